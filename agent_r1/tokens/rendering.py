"""Exact tokens: observations become prompts, and what was sampled is never tokenised again.

The model's own chat template writes the first prompt. A later prompt that only adds messages to what the model has seen
and said is built by appending ids; any other prompt, such as one with a rewritten history, is rendered from scratch.
`conversations.py` decides which exchange a prompt extends. Text is for the env and for people.

Contents cannot forge control tokens. Text from a message never becomes a special token, and text from a tool never
becomes any added token (`</tool_response>`, `<think>`, ...). The template, too, reads contents whose look-alikes are
defused (`control_tokens.py`), so they cannot steer it. Without look-alikes, the ids are the tokenizer's own.

Knows tokenizers and chat templates by their methods only; imports neither transformers nor torch.
"""

from __future__ import annotations

import json
import re
from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import TYPE_CHECKING, Any

from jinja2 import TemplateError

from agent_r1.errors import DataError
from agent_r1.text import sanitize
from agent_r1.tokens.control_tokens import CUT, SLOT, ControlTokens, defuse_message, scrub
from agent_r1.tokens.placeholders import Placeholders, as_parts, picture_name
from agent_r1.tokens.tokenizer import fast_decoder, fast_encoder
from agent_r1.types import Message, Observation
from agent_r1.vision.pictures import pictures_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from agent_r1.vision.picture_format import PictureFormat

ToolSchemas = Sequence[Mapping[str, Any]]

# A template that sets this writes the same text after a reply, whatever precedes it. Then only the new messages are
# rendered, however long the conversation is.
INDEPENDENT_TURNS = re.compile(r"\{%-?\s*set independent_turns = true\s*-?%\}")

# Templates that test for a content of None (DeepSeek's) need it to show calls, but from version 5.23 on, transformers
# drops keys whose value is None. This restores the content, and changes nothing in earlier versions.
EXPECTS_NONE = re.compile(r"""content['"]?\]?\s+is\s+(not\s+)?none""", re.IGNORECASE)
RESTORE_NONE = (
    "{% set restored = namespace(messages=[]) %}{% for message in messages %}{% set restored.messages = "
    "restored.messages + [message if 'content' in message else dict(message, content=none)] %}{% endfor %}"
    "{% set messages = restored.messages +%}"  # the plus sign keeps a line break at the start of the template
)

# Members of a group often see the same prompts. Long results are rarely shared and would fill the memory.
MAX_CACHED, MAX_CACHED_CHARS, MAX_CACHED_IDS = 1024, 65_536, 512

# A template is a program that expects certain roles, keys and types. It raises one of these for others.
REFUSALS = (TemplateError, TypeError, ValueError, KeyError, IndexError, AttributeError)

_TO_JSON = json.JSONEncoder(default=picture_name).encode  # json.dumps would make an encoder for every call

EDITED = "edited"  # key of a reply that shows less than was sampled, so that no prompt may extend its ids
PARSED_KEYS = frozenset({"tool_calls", "reasoning_content", "reasoning", "thinking"})  # keys of a parsed reply


class Renderer:
    """Observations to ids and ids to text, for one tokenizer and chat template. Shared by all episodes.

    Recent prompts are cached, so a template that writes the time may show an earlier one.
    """

    stop_ids: tuple[int, ...]  # sampling one of these ends a response; the first one ends an answer

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        *,
        chat_template: str | None = None,  # None: the tokenizer's own
        template_kwargs: Mapping[str, Any] | None = None,  # e.g. {"enable_thinking": False}
        extra_stop_ids: Iterable[int] = (),  # e.g. those of the model's generation config
        pictures: PictureFormat | None = None,  # None: the model takes text only
    ) -> None:
        self._tokenizer = tokenizer
        self._encoder, self._decoder = fast_encoder(tokenizer), fast_decoder(tokenizer)
        self._chat_template = chat_template
        self._template_kwargs = dict(template_kwargs or {})
        template = chat_template or tokenizer.chat_template  # a dict if the tokenizer has several
        self._independent_turns = isinstance(template, str) and INDEPENDENT_TURNS.search(template) is not None
        added = tokenizer.added_tokens_decoder.values()
        special = {token.content for token in added if token.special} | set(tokenizer.all_special_tokens)
        # Some vocabularies list runs of blanks as added tokens (Gemma). Those are text, and cutting them changes ids.
        control = special | {token.content for token in added if token.content.strip(" \t\r\n▁")}
        self._special = ControlTokens(special)
        self._control = ControlTokens(control)
        self._cached_ids = lru_cache(MAX_CACHED)(self._tokenise)
        self._cached_decode = lru_cache(MAX_CACHED)(self._decode)
        self._cached_text = lru_cache(MAX_CACHED)(self._write_json)
        self._cached_tools = lru_cache(MAX_CACHED)(lambda tools: self._special.defuse(json.loads(tools)))
        self._piece = lru_cache(None)(lambda token: self._decode((token,)))  # at most one per token of the vocabulary
        self.pictures = pictures
        self._placeholders, self._in_parts = Placeholders(tokenizer, pictures), False
        self._in_parts = pictures is not None and self._needs_parts()  # the template ignores contents that are strings
        self._turn_ends, sampled_ends = self._find_turn_ends()
        eos = [] if tokenizer.eos_token_id is None else [tokenizer.eos_token_id]
        found = [*map(tokenizer.convert_tokens_to_ids, sampled_ends), *eos, *extra_stop_ids]
        self.stop_ids = tuple(dict.fromkeys(found))

    # ids -> text

    def decode(self, response_ids: Sequence[int]) -> str:
        """Decode a response without the stop token that ended it, but with all other special tokens."""
        own = tuple(response_ids[:-1] if self._stop_id(response_ids) is not None else response_ids)
        return (self._cached_decode if len(own) <= MAX_CACHED_IDS else self._decode)(own)

    def encode_response(self, text: str) -> list[int]:
        """Encode a response that was written, not sampled (a demonstration), and end it with a stop token."""
        ids = self._encode(scrub(text))
        if self._stop_id(ids) is not None:
            return ids  # the text has its own, like a gpt-oss tool call
        if not self.stop_ids:
            raise DataError("no stop token is known to end a response: set the tokenizer's eos_token")
        return [*ids, self.stop_ids[0]]

    def token_span(self, response_ids: Sequence[int], text_start: int, text_end: int) -> tuple[int, int]:
        """The response tokens [start, end) that hold any part of characters [text_start, text_end) of the text.

        A character whose bytes are spread over several tokens belongs to all of them.
        """
        text = self.decode(response_ids)
        if not 0 <= text_start <= text_end <= len(text):
            raise ValueError(
                f"characters [{text_start}, {text_end}) are outside the decoded response of {len(text)} characters"
            )

        own = response_ids if self._stop_id(response_ids) is None else response_ids[:-1]
        pieces = list(map(self._piece, own))
        if "".join(pieces) == text:  # no character is spread over several tokens
            ends = list(accumulate(map(len, pieces)))
            start = bisect_right(ends, text_start)
            return start, bisect_left(ends, text_end) + 1 if text_start < text_end else start

        def spelled(count: int) -> tuple[int, int]:
            """Characters that the first `count` tokens spell completely, and those that they at least begin."""
            prefix = self._decode(response_ids[:count])
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
        """Write the prompt from scratch.

        Text observations are tokenised as they are, including control tokens and without an added BOS: an env that
        gives raw text has written these itself. Ids are taken verbatim.
        """
        if observation.token_ids is not None:
            return list(observation.token_ids)
        if observation.text is not None:
            return self._placeholders.fill(self._encode(scrub(observation.text)), [])
        assert observation.messages is not None  # Observation holds exactly one of the three
        ids = self._encode(self._placeholders.surround(self._template(observation.messages, tools)))
        return self._placeholders.fill(ids, pictures_of(observation.messages))

    def try_render(self, messages: list[Message], tools: ToolSchemas = ()) -> list[int]:
        """Write the prompt from scratch; no ids if the template refuses the messages."""
        try:
            return self.render(Observation(messages=messages), tools)
        except DataError:
            return []

    def new_ids(
        self, before: Observation, response_ids: list[int], said: str, now: Observation, tools: ToolSchemas = ()
    ) -> list[int] | None:
        """Return the ids that, after a prompt that showed `before` and its response, make a prompt that shows `now`.

        The messages of `now` must continue those of `before` (see `follows`). Returns None if a text of `now` is not a
        continuation, or if the template does not show where a reply ends; then use `render`.

        The model keeps seeing what it saw, even if the template would now drop it (reasoning of earlier turns).
        """
        stop_id = self._stop_id(response_ids)
        if now.text is not None:
            rest = self._rest_of_text(before.text, said, stop_id, now.text)
        else:
            rest = self._rest_of_messages(before, said, stop_id, now, tools)
        if rest is None:
            return None
        rest, ids = self._placeholders.surround(rest), None
        if stop_id is not None:
            # Include the stop token: some tokenizers treat the start of a text differently from its middle.
            after_stop = self._encode(self._piece(stop_id) + rest)
            ids = after_stop[1:] if after_stop[:1] == [stop_id] else None
        new = now.messages[len(before.messages or ()) + 1 :] if now.messages is not None else []
        return self._placeholders.fill(self._encode(rest) if ids is None else ids, pictures_of(new))

    def _rest_of_text(self, before: str | None, said: str, stop_id: int | None, text: str) -> str | None:
        if before is None:
            return None
        # The model saw its stop token, so a text without it is a different text.
        seen = before + said + ("" if stop_id is None else self._piece(stop_id))
        return scrub(text[len(seen) :]) if text.startswith(seen) else None

    def _rest_of_messages(
        self, before: Observation, said: str, stop_id: int | None, now: Observation, tools: ToolSchemas
    ) -> str | None:
        messages, reply = now.messages or [], len(before.messages or ())
        try:
            if _says(messages[reply], said):
                rest = self._rest_after_content(messages, reply, tools)
            else:
                rest = self._rest_after_turn_end(messages, reply, tools)
        except DataError:  # the template refuses our stand-in; `render` will tell whether it accepts the messages
            return None
        if rest is None or stop_id is None:
            return rest  # the reply was cut at its length limit: the prompt has to end its turn
        ends, stripped = (*self._turn_ends, self._piece(stop_id)), rest.lstrip()
        return next((stripped[len(end) :] for end in ends if stripped.startswith(end)), rest)

    def _rest_after_content(self, messages: list[Message], reply: int, tools: ToolSchemas) -> str | None:
        """Return what the template writes after the content of message `reply`; None unless it shows that once."""
        if self._independent_turns:
            messages, reply, tools = messages[reply:], 0, ()
        pieces = self._template(messages, tools, slot=reply).split(SLOT)
        return pieces[1] if len(pieces) == 2 else None

    def _rest_after_turn_end(self, messages: list[Message], reply: int, tools: ToolSchemas) -> str | None:
        """Return what the template writes from the end-of-turn token of message `reply` on.

        For replies that were parsed into tool calls and the like, whose end no content marks. The token is the last
        end-of-turn token before the next message, if the number of turn ends is the same as without that message.
        """
        if reply + 1 == len(messages) or not self._turn_ends:
            return None
        whole = self._template(messages, tools)
        before, found, _ = self._template(messages, tools, slot=reply + 1).partition(SLOT)
        alone = self._template(messages[: reply + 1], tools, generation_prompt=False)
        turn_end = re.compile("|".join(map(re.escape, self._turn_ends)))
        ends, ends_alone = ([match.span() for match in turn_end.finditer(text)] for text in (before, alone))
        if not found or not whole.startswith(before) or not ends or len(ends) != len(ends_alone):
            return None
        return None if alone[ends_alone[-1][1] :].strip() else whole[ends[-1][0] :]

    # the template

    def _needs_parts(self) -> bool:
        """Whether the template shows texts only as parts of a content (SmolVLM's)."""
        message = {"role": "user", "content": "Ping?"}

        def shows(message: Message) -> bool:
            try:
                return "Ping?" in self._write([message], "[]", None, True)
            except DataError:
                return False

        return not shows(message) and shows(as_parts(message))

    def _find_turn_ends(self) -> tuple[list[str], list[str]]:
        """The special tokens that end an assistant's turn in the template, and those that a model samples to end it.

        They can differ: gpt-oss samples `<|return|>` or `<|call|>`, and its template writes `<|end|>` into history.
        """
        user, answer = {"role": "user", "content": "?"}, {"role": "assistant", "content": ""}
        call = {"type": "function", "function": {"name": "probe", "arguments": {}}}
        calling = {"role": "assistant", "content": "", "tool_calls": [call]}

        def attempt(*messages: Message, slot: int | None = None, generation_prompt: bool) -> str:
            try:
                return self._template(list(messages), (), slot=slot, generation_prompt=generation_prompt)
            except DataError:
                return ""

        def after_answer(*more: Message, generation_prompt: bool = True) -> str | None:
            text = attempt(user, answer, *more, slot=1, generation_prompt=generation_prompt)
            return self._special.at_start(text.rpartition(SLOT)[2]) if SLOT in text else None

        called = attempt(user, calling, generation_prompt=False)
        after_call = self._special.at_end(called) if "probe" in called else None  # some templates do not show calls
        sampled = [end for end in (after_answer(generation_prompt=False), after_call) if end]
        # A token ends the turn only if the template writes it whatever follows. Other tokens open the next turn (GLM
        # has only those).
        in_history = after_answer()
        always = [in_history] if in_history and in_history == after_answer(user) else []
        return list(dict.fromkeys([*sampled, *always])), sampled

    def _template(
        self, messages: list[Message], tools: ToolSchemas, *, slot: int | None = None, generation_prompt: bool = True
    ) -> str:
        """Apply the template with look-alikes defused, and with `SLOT` for the content of message `slot`."""
        # As JSON, 1 is not True and the order of keys counts, so equal keys mean equal prompts.
        try:
            tools_json = json.dumps(list(tools))
        except (TypeError, ValueError) as error:
            raise DataError(f"a tool schema is not JSON: {error}. Schemas: {tools!r:.300}") from error
        try:
            messages_json = _TO_JSON(messages if slot is None else _with_slot(messages, slot))
        except (TypeError, ValueError):  # images, for example
            return self._write(messages, tools_json, slot, generation_prompt)
        is_short = len(messages_json) + len(tools_json) <= MAX_CACHED_CHARS
        write = self._cached_text if is_short else self._write_json
        return write(messages_json, tools_json, slot, generation_prompt)

    def _write_json(self, messages: str, tools: str, slot: int | None, generation_prompt: bool) -> str:
        return self._write(json.loads(messages), tools, slot, generation_prompt)

    def _write(self, messages: list[Message], tools: str, slot: int | None, generation_prompt: bool) -> str:
        safe = [defuse_message(message, special=self._special, control=self._control) for message in messages]
        safe = list(map(as_parts, safe)) if self._in_parts else safe
        safe = safe if slot is None else _with_slot(safe, slot)
        schemas = self._cached_tools(tools) or None
        template = self._chat_template
        try:
            if any(_only_calls(message) for message in safe):
                template = self._tokenizer.get_chat_template(template, schemas)
                if EXPECTS_NONE.search(template):
                    template = RESTORE_NONE + template
                else:  # a template without this test may write None as "None"
                    safe = [{**message, "content": ""} if _only_calls(message) else message for message in safe]
            text = self._tokenizer.apply_chat_template(
                safe,
                tools=schemas,
                chat_template=template,
                add_generation_prompt=generation_prompt,
                tokenize=False,
                **self._template_kwargs,
            )
        except REFUSALS as error:
            roles = ", ".join(str(message.get("role")) for message in safe)
            raise DataError(
                f"the chat template refuses messages with the roles [{roles}]: {error}. "
                "Change the messages of the env, or set a template in model.chat_template."
            ) from error
        assert isinstance(text, str)
        return text

    # the tokenizer

    def _encode(self, text: str) -> list[int]:
        return list((self._cached_ids if len(text) <= MAX_CACHED_CHARS else self._tokenise)(text))

    def _tokenise(self, text: str) -> tuple[int, ...]:
        return tuple(token for piece in sanitize(text).split(CUT) if piece for token in self._encoder(piece))

    def _decode(self, ids: Sequence[int]) -> str:
        return self._decoder(list(ids), skip_special_tokens=False)

    def _stop_id(self, response_ids: Sequence[int]) -> int | None:
        return response_ids[-1] if response_ids and response_ids[-1] in self.stop_ids else None


def follows(messages: list[Message], before: list[Message], text: str) -> bool:
    """Whether `messages` start with `before` and a reply that can be the assistant's `text`; anything may follow."""
    if len(messages) <= len(before) or messages[: len(before)] != before:
        return False
    reply = messages[len(before)]
    return _says(reply, text) or _is_parsed_from(reply, text)


def _says(message: Message, text: str) -> bool:
    """Whether this is the assistant saying `text` and nothing else."""
    more = len(message) > 2 and any(value for key, value in message.items() if key not in ("role", "content"))
    return message.get("role") == "assistant" and not more and _text_of(message.get("content")) == text


def _is_parsed_from(message: Message, text: str) -> bool:
    """Whether this can be the assistant's `text` in parts: it contains every line of prose and every tool name."""
    parsed = {key: value for key, value in message.items() if value and key in PARSED_KEYS}
    if message.get("role") != "assistant" or not parsed or message.get(EDITED):
        return False
    names = [call.get("function", call).get("name") for call in parsed.pop("tool_calls", [])]
    prose = [_text_of(value) for value in (*parsed.values(), message.get("content") or "")]
    if not all(isinstance(value, str) for value in (*names, *prose)):
        return False
    lines = [line.strip() for value in prose for line in str(value).splitlines()]
    return all(piece in text for piece in (*names, *lines))


def _text_of(content: Any) -> str | None:
    """The text of a content that is a string or a list of one text part."""
    if isinstance(content, list) and len(content) == 1 and isinstance(content[0], Mapping):
        content = content[0].get("text")
    return content if isinstance(content, str) else None


def _only_calls(message: Message) -> bool:
    return bool(message.get("tool_calls")) and message.get("content", "") is None


def _with_slot(messages: list[Message], index: int) -> list[Message]:
    """Replace the content of one message by `SLOT`, as a string or as parts."""
    in_parts = isinstance(messages[index].get("content"), list)
    content = [{"type": "text", "text": SLOT}] if in_parts else SLOT
    return [*messages[:index], {**messages[index], "content": content}, *messages[index + 1 :]]
