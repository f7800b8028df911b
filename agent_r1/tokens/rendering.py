"""Exact tokens: observations become prompts, and what was sampled is never tokenised again.

A first prompt is written by the model's own chat template. A later one that only adds messages to what the model has
already seen and said is built by appending ids ("extended"); anything else, a rewritten history above all, is rendered
afresh. `conversations.py` decides which exchange a prompt extends. Text is for the env and for people.

Contents cannot forge control tokens. Text from a message never becomes a special token, and text from a tool never
becomes any added token (`</tool_response>`, `<think>`, ...). The template reads the contents with their look-alikes
defused (`control_tokens.py`), so these cannot steer it either. Without look-alikes the ids are the tokenizer's own.

Knows tokenizers and chat templates by their methods only; imports neither transformers nor torch.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from agent_r1.errors import DataError
from agent_r1.text import sanitize
from agent_r1.tokens.control_tokens import CUT, SLOT, ControlTokens, scrub
from agent_r1.tokens.messages import follows, is_from_tool, joined, says, schema_as_json, told_apart, with_slot
from agent_r1.tokens.remember import remembering
from agent_r1.tokens.tokenizing import decoder, encoder
from agent_r1.types import Message, Observation

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

ToolSchemas = Sequence[Mapping[str, Any]]

# A template that says this of itself, in a comment, writes what follows a reply without looking at what is before it.
# Then that is all it is asked to write, however long the conversation has become.
FORGETFUL = "What follows a reply does not depend on what is before it."
# Messages kept with their look-alikes defused, and their characters: every message is shown again in each later step.
MAX_RECENT_MESSAGES, MAX_KEPT_MESSAGE = 4096, 4096

# A template is a program that expects certain roles, keys and types; these are its ways to refuse.
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One exchange, as the model saw and said it: what a next prompt may extend."""

    observation: Observation
    prompt_ids: list[int]
    response_ids: list[int]
    text: str  # the response as the env was given it


class Renderer:
    """Observations to ids and ids to text, for one tokenizer and chat template.

    Episodes share it: it keeps nothing of theirs but recent results, each a pure function of what it is looked up by
    (unless a template writes the date: then a prompt may show that of the last time it was asked for).
    """

    stop_ids: tuple[int, ...]  # sampling one of these ends a response; the first is the one that ends an answer

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,  # None: the tokenizer's own
        template_kwargs: Mapping[str, Any] | None = None,  # e.g. {"enable_thinking": False}
        extra_stop_ids: Iterable[int] = (),  # e.g. those of the model's generation config
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder, self._decoder = encoder(tokenizer), decoder(tokenizer)
        self._chat_template = chat_template
        self._template_kwargs = dict(template_kwargs or {})
        template = chat_template or tokenizer.chat_template
        self._forgetful = isinstance(template, str) and FORGETFUL in template  # some have several, by name
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        # Some vocabularies list runs of blanks as added tokens (Gemma): those are text, and cutting them changes ids.
        control = special | {token.content for token in added if token.content.strip(" \t\r\n▁")}
        self._special = ControlTokens(special)
        self._control = ControlTokens(control)
        self._tools_from = remembering(lambda tools: self._special.defuse(json.loads(tools)))
        self._safe_from = remembering(
            lambda message: self._safe(json.loads(message)), recent=MAX_RECENT_MESSAGES, longest=MAX_KEPT_MESSAGE
        )
        self._written_from = remembering(self._write_from)
        self._ids_of = remembering(self._tokenise)
        self._text_of = remembering(self._spell)
        self._span_of = remembering(self._find_span)
        self._piece = lru_cache(None)(lambda token: self._spell((token,)))  # as many as the vocabulary has
        self._turn_ends, sampled_ends = self._find_turn_ends()
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        found = [*map(tokenizer.convert_tokens_to_ids, sampled_ends), *eos, *extra_stop_ids]
        self.stop_ids = tuple(dict.fromkeys(found))

    # ids -> text

    def decode(self, response_ids: Sequence[int]) -> str:
        """The response as text: without the stop token that ended it, with all other special tokens."""
        return self._decode(response_ids[:-1] if self._stop_id(response_ids) is not None else response_ids)

    def encode_response(self, text: str) -> list[int]:
        """A response that was written, not sampled (a demonstration): its ids, closed by a stop token."""
        ids = self._encode(scrub(text))
        if self._stop_id(ids) is not None:
            return ids  # the text brings its own, as a gpt-oss tool call does
        if not self.stop_ids:
            raise DataError("no stop token is known to end a response: set the tokenizer's eos_token")
        return [*ids, self.stop_ids[0]]

    def token_span(self, response_ids: Sequence[int], text_start: int, text_end: int) -> tuple[int, int]:
        """The response tokens [start, end) that hold any part of characters [text_start, text_end) of the text.

        A character whose bytes are spread over several tokens belongs to all of them.
        """
        return self._span_of(tuple(response_ids), text_start, text_end)

    def _find_span(self, response_ids: tuple[int, ...], text_start: int, text_end: int) -> tuple[int, int]:
        text = self.decode(response_ids)
        if not 0 <= text_start <= text_end <= len(text):
            raise ValueError(
                f"characters [{text_start}, {text_end}) do not lie in the decoded response of {len(text)} characters"
            )

        own = response_ids if self._stop_id(response_ids) is None else response_ids[:-1]
        pieces = list(map(self._piece, own))
        if "".join(pieces) == text:  # no character is spread over several tokens
            ends = list(accumulate(map(len, pieces)))
            start = bisect_right(ends, text_start)
            return start, bisect_left(ends, text_end) + 1 if text_start < text_end else start

        def spelled(count: int) -> tuple[int, int]:
            """Characters the first `count` tokens spell out in full, and those they at least begin."""
            prefix = self._spell(response_ids[:count])
            full = next((i for i, (a, b) in enumerate(zip(prefix, text, strict=False)) if a != b), None)
            full = min(len(prefix), len(text)) if full is None else full
            return full, full + (len(prefix) > full)

        # Both grow with count, so bisection finds the borders with few decodings.
        counts = range(len(response_ids) + 1)
        start = max(0, bisect_left(counts, text_start + 1, key=lambda count: spelled(count)[1]) - 1)
        end = bisect_left(counts, text_end, key=lambda count: spelled(count)[0])
        return start, end if text_start < text_end else start

    # observation -> ids

    def render(self, observation: Observation, tools: ToolSchemas = ()) -> list[int]:
        """The prompt, written afresh.

        Text observations are tokenised as they stand, control tokens included and without a BOS of ours: an env that
        speaks raw text has written these itself. Ids are taken verbatim.
        """
        if observation.token_ids is not None:
            return list(observation.token_ids)
        if observation.text is not None:
            return self._encode(scrub(observation.text))
        assert observation.messages is not None  # Observation holds exactly one of the three
        return self._encode(self._template(observation.messages, tools))

    def extend(self, turn: Turn, observation: Observation, tools: ToolSchemas = ()) -> list[int] | None:
        """The prompt as `turn.prompt_ids + turn.response_ids + new ids`, or None if the observation does more than add.

        What was seen stays seen, also where the template would drop it by now (reasoning of earlier turns). None, too,
        when the template does not let us see where a reply ends; `render` is then the safe way.
        """
        seen = turn.prompt_ids + turn.response_ids
        if observation.token_ids is not None:
            return list(observation.token_ids) if observation.token_ids[: len(seen)] == seen else None
        if observation.text is not None:
            rest = self._rest_of_text(turn, observation.text)
        else:
            assert observation.messages is not None
            rest = self._rest_of_messages(turn, observation.messages, tools)
        if rest is None:
            return None
        stop_id = self._stop_id(turn.response_ids)
        if stop_id is not None:
            # Tokenise in sight of the stop token: some tokenizers treat the start of a text unlike its middle.
            ids = self._encode(self._decode([stop_id]) + rest)
            if ids[:1] == [stop_id]:
                return seen + ids[1:]
        return seen + self._encode(rest)

    def _rest_of_text(self, turn: Turn, text: str) -> str | None:
        if turn.observation.text is None:
            return None
        stop_id = self._stop_id(turn.response_ids)
        # The model saw its stop token; a text that leaves it out is another text.
        seen = turn.observation.text + turn.text + ("" if stop_id is None else self._decode([stop_id]))
        return scrub(text[len(seen) :]) if text.startswith(seen) else None

    def _rest_of_messages(self, turn: Turn, messages: list[Message], tools: ToolSchemas) -> str | None:
        before = turn.observation.messages
        if before is None or not follows(messages, before, turn.text):
            return None
        reply = len(before)
        try:
            is_whole = says(messages[reply], turn.text)
            rest = (self._rest_after_content if is_whole else self._rest_after_turn_end)(messages, reply, tools)
        except DataError:  # the template refuses our stand-in; whether it takes the real messages, `render` will see
            return None
        stop_id = self._stop_id(turn.response_ids)
        if rest is None or stop_id is None:
            return rest  # a reply cut off by its length: the template's end of turn belongs to the prompt
        ends = (*self._turn_ends, self._decode([stop_id]))
        return next((rest.lstrip()[len(end) :] for end in ends if rest.lstrip().startswith(end)), rest)

    def _rest_after_content(self, messages: list[Message], reply: int, tools: ToolSchemas) -> str | None:
        """What the template writes after the content of message `reply`; None unless it shows it exactly once."""
        if self._forgetful:
            messages, reply, tools = messages[reply:], 0, ()
        pieces = self._template(messages, tools, slot=reply).split(SLOT)
        return pieces[1] if len(pieces) == 2 else None

    def _rest_after_turn_end(self, messages: list[Message], reply: int, tools: ToolSchemas) -> str | None:
        """What the template writes from the end-of-turn token of message `reply` on.

        For replies taken apart into tool calls and the like, where no content marks the end: it is the last
        end-of-turn token before the next message, provided that as many turns end there as when the reply is last.
        """
        if reply + 1 == len(messages) or not self._turn_ends:
            return None
        whole = self._template(messages, tools)
        head, found, _ = self._template(messages, tools, slot=reply + 1).partition(SLOT)
        alone = self._template(messages[: reply + 1], tools, generation_prompt=False)
        turn_end = re.compile("|".join(map(re.escape, self._turn_ends)))
        ends, ends_alone = ([match.span() for match in turn_end.finditer(text)] for text in (head, alone))
        if not found or not whole.startswith(head) or not ends or len(ends) != len(ends_alone):
            return None
        return None if alone[ends_alone[-1][1] :].strip() else whole[ends[-1][0] :]

    # the template

    def _find_turn_ends(self) -> tuple[list[str], list[str]]:
        """The special tokens that close an assistant's turn in the template, and those a model samples to do so.

        They can differ: gpt-oss samples `<|return|>` or `<|call|>`, and its template writes `<|end|>` into history.
        """
        user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": ""}
        call = {"type": "function", "function": {"name": "probe", "arguments": {}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}

        def after_answer(*more: Message, generation_prompt: bool = True) -> str | None:
            text = self._try_template([user, answer, *more], slot=1, generation_prompt=generation_prompt)
            return self._special.at_start(text.rpartition(SLOT)[2]) if SLOT in text else None

        called = self._try_template([user, calling], generation_prompt=False)
        after_call = self._special.at_end(called) if "probe" in called else None  # not all templates show calls
        sampled = [end for end in (after_answer(generation_prompt=False), after_call) if end]
        # Only a token that comes whatever follows ends a turn; others open the next one (GLM has just those).
        in_history = after_answer()
        always = [in_history] if in_history and in_history == after_answer(user) else []
        return list(dict.fromkeys([*sampled, *always])), sampled

    def _template(
        self, messages: list[Message], tools: ToolSchemas, *, slot: int | None = None, generation_prompt: bool = True
    ) -> str:
        """What the template writes, look-alikes defused, with `SLOT` for the content of message `slot`."""
        shown = messages if slot is None else with_slot(messages, slot)
        tools_as_json = f"[{', '.join(map(schema_as_json, tools))}]"
        try:
            as_json = tuple(map(json.dumps, shown))
        except (TypeError, ValueError):  # not JSON: images, say
            return self._write(list(map(self._safe, messages)), tools_as_json, slot, generation_prompt)
        return self._written_from(as_json, tools_as_json, slot, generation_prompt)

    def _write_from(self, messages: tuple[str, ...], tools: str, slot: int | None, generation_prompt: bool) -> str:
        return self._write(list(map(self._safe_from, messages)), tools, slot, generation_prompt)

    def _safe(self, message: Message) -> Message:
        own, added = told_apart(message)
        safe: Message = (self._control if is_from_tool(own) else self._special).defuse(own)
        return joined(safe, self._control.defuse(added), self._control.close) if added else safe

    def _write(self, safe: list[Message], tools: str, slot: int | None, generation_prompt: bool) -> str:
        try:
            text = self._tokenizer.apply_chat_template(
                safe if slot is None else with_slot(safe, slot),
                tools=self._tools_from(tools) or None,
                chat_template=self._chat_template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._template_kwargs,
            )
        except REFUSALS as error:
            roles = ", ".join(str(message.get("role")) for message in safe)
            raise DataError(
                f"the chat template refuses messages with the roles [{roles}]: {error}. "
                "Change the messages the env makes, or give the run a chat template that takes them."
            ) from error
        assert isinstance(text, str)
        return text

    def _try_template(self, messages: list[Message], *, slot: int | None = None, generation_prompt: bool) -> str:
        try:
            return self._template(messages, (), slot=slot, generation_prompt=generation_prompt)
        except DataError:
            return ""

    # the tokenizer

    def _encode(self, text: str) -> list[int]:
        return list(self._ids_of(text))

    def _tokenise(self, text: str) -> tuple[int, ...]:
        return tuple(token for piece in sanitize(text).split(CUT) if piece for token in self._encoder(piece))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._text_of(tuple(ids))

    def _spell(self, ids: tuple[int, ...]) -> str:
        text = self._decoder(list(ids), skip_special_tokens=False)
        assert isinstance(text, str)
        return text

    def _stop_id(self, response_ids: Sequence[int]) -> int | None:
        return response_ids[-1] if response_ids and response_ids[-1] in self.stop_ids else None


@dataclass(frozen=True, slots=True, kw_only=True)
class TemplateReport:
    """What a chat template can do for an agent."""

    stop_tokens: tuple[str, ...]
    renders: bool  # there is a template, and it takes a user message
    joins: bool  # text tokenised in two pieces is the same text: without it nothing can be appended
    extends: bool  # a next user message is appended, not rendered afresh
    extends_after_tool: bool  # so is a tool's result
    tool_role: bool  # messages of role "tool" are shown to the model
    tools_shown: bool  # tool schemas are shown to the model
    problems: tuple[str, ...]  # in words; empty when all of the above hold


def verify_template(renderer: Renderer, tools: ToolSchemas = ()) -> TemplateReport:
    """Try a short conversation on the template. Reports what does not work; never raises because of the template."""
    schema = {"name": "probe", "description": "Probe.", "parameters": {"type": "object", "properties": {}}}
    tools = tools or [{"type": "function", "function": schema}]
    user, said = {"role": "user", "content": "Ping?"}, {"role": "assistant", "content": "probe"}
    called = {
        **said,
        "content": "",
        "tool_calls": [{"type": "function", "function": {"name": "probe", "arguments": {}}}],
    }
    result = {"role": "tool", "name": "probe", "content": "tool-said-this"}

    def attempt(*messages: Message, tools: ToolSchemas = tools) -> list[int]:
        try:
            return renderer.render(Observation(messages=list(messages)), tools)
        except DataError:
            return []

    def extends(reply: Message, added: Message) -> bool:
        asked, ids = Observation(messages=[user]), renderer.encode_response("probe")
        turn = Turn(observation=asked, prompt_ids=attempt(user), response_ids=ids, text="probe")
        return renderer.extend(turn, Observation(messages=[user, reply, added]), tools) is not None

    works = bool(attempt(user)) and bool(renderer.stop_ids)
    extends_user = works and extends(said, user)
    # gpt-oss takes a tool's result only after a message with the call in it; others do not know such messages.
    extends_tool = works and (extends(said, result) or extends(called, result))
    tool_role = any(result["content"] in renderer.decode(attempt(user, reply, result)) for reply in (said, called))
    tools_shown = attempt(user) != attempt(user, tools=())
    joins = renderer._decode([*renderer._encode("a"), *renderer._encode("b")]) == "ab"
    checks = {
        "the tokenizer writes a space before every piece of text (Llama-2 style), so nothing can be appended": joins,
        "the template cannot render a user message, or there is none": bool(attempt(user)),
        "no stop token is known: set the tokenizer's eos_token or give extra stop ids": bool(renderer.stop_ids),
        "a next user message cannot be appended: each turn is rendered afresh": extends_user,
        "a tool's result cannot be appended: each turn is rendered afresh": extends_tool,
        'role "tool" is not shown: put results into user messages, or use a tool template': tool_role,
        "tools are not shown: describe them in the system message, or use a tool template": tools_shown,
    }
    return TemplateReport(
        stop_tokens=tuple(renderer._decode([stop_id]) for stop_id in renderer.stop_ids),
        renders=bool(attempt(user)),
        joins=joins,
        extends=extends_user,
        extends_after_tool=extends_tool,
        tool_role=tool_role,
        tools_shown=tools_shown,
        problems=tuple(problem for problem, holds in checks.items() if not holds),
    )
