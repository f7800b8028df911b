"""The properties that rendering promises, as checks that any tokenizer and chat template can be put through."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hypothesis import strategies as st

from agent_r1.tokens.control_tokens import CUT, SLOT
from agent_r1.tokens.conversations import Conversations
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Message, Observation
from tests.tokens.small_tokenizers import template_ids, template_text

STAND_IN = "@what-was-sampled@"  # in the template's text, for replies whose own text a template may take apart
WORDS = ["hello", "The answer", "42", "x<y", "a | b", "{}", '"q"', "it's", "é", "你好", "🙂", "👩‍🚀", "e\u0301", "İ"]
BLANKS = ["\n", "\n\n", " ", "   ", "\t", "\r\n", "\n \n"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """A tokenizer under test."""

    tokenizer: Any
    renderer: Renderer
    turn_end: str  # how the template closes a reply in history
    tool_role: bool = True
    system_role: bool = True
    added: dict[int, str] = field(default_factory=dict)
    special: frozenset[str] = frozenset()

    @classmethod
    def of(cls, tokenizer: Any, renderer: Renderer, **kwargs: Any) -> Subject:
        tokens = tokenizer.added_tokens_decoder
        return cls(
            tokenizer=tokenizer,
            renderer=renderer,
            added={index: token.content for index, token in tokens.items()},
            special=frozenset(token.content for token in tokens.values() if token.special),
            **kwargs,
        )

    def text(self, ids: Sequence[int]) -> str:
        text = self.tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text

    def spelled(self, text: str) -> str:
        """The text as far as the vocabulary can say it: SmolLM2's, for one, lacks some bytes."""
        return self.text(self.tokenizer.encode(text, add_special_tokens=False))

    def control(self, ids: Sequence[int]) -> Counter[str]:
        """The added tokens among the ids; runs of blanks are text, even where a vocabulary lists them as added."""
        return Counter(self.added[i] for i in ids if i in self.added and self.added[i].strip(" \t\r\n▁"))

    def neutral(self, message: Message) -> Message:
        """The message without what must not become a control token."""
        from_tool = message["role"] == "tool" or message.get("from_tool")
        forbidden = self.added.values() if from_tool else self.special
        longest_first = sorted((token for token in forbidden if token.strip()), key=len, reverse=True)
        return {**message, "content": re.sub("|".join(map(re.escape, longest_first)), "x", message["content"])}

    def clean(self) -> st.SearchStrategy[str]:
        """Contents with odd blanks and characters, but nothing that looks like a control token."""
        letters = st.text(max_size=6)
        pieces = st.lists(st.sampled_from(WORDS) | st.sampled_from(BLANKS) | letters, max_size=5)
        return pieces.map(_joined).filter(lambda text: not any(token in text for token in self._texts()))

    def wild(self) -> st.SearchStrategy[str]:
        """Contents full of look-alikes and of pieces that could grow into one."""
        tokens = [*self._texts()[:12], "<|im_end|>", "<tool_call>", "<|eot_id|>", "</tool_response>", "<think>"]
        pieces = [*tokens, *(token[:-2] for token in tokens), *(token[1:] for token in tokens), "<", "|>"]
        return st.lists(st.sampled_from(pieces) | st.sampled_from(WORDS) | st.sampled_from(BLANKS), max_size=6).map(
            _joined
        )

    def _texts(self) -> list[str]:
        return [token for token in self.added.values() if token.strip(" \t\r\n▁")]

    def conversations(self, contents: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
        """Something for the model to answer, with some turns before it."""
        system = st.lists(_message("system", contents), max_size=1 if self.system_role else 0)
        turns = st.lists(st.tuples(_message("assistant", self.clean()), self.answers(contents)), max_size=3)
        return st.builds(
            lambda first, user, turns: [*first, user, *(m for reply, new in turns for m in (reply, *new))],
            system,
            _message("user", contents),
            turns,
        )

    def answers(self, contents: st.SearchStrategy[str]) -> st.SearchStrategy[list[Message]]:
        """What an env may add after a reply: a user message, or the results of some tools."""
        user = st.lists(_message("user", contents) | _from_tool(contents), min_size=1, max_size=1)
        return user | st.lists(_message("tool", contents), min_size=1, max_size=3) if self.tool_role else user

    def responses(self) -> st.SearchStrategy[list[int]]:
        """Any ids at all, closed by a stop token or not; seldom what the tokenizer would make of their text."""
        ids = st.lists(st.integers(0, len(self.tokenizer) - 1), max_size=8)
        return st.tuples(ids, st.sampled_from([(), *((stop,) for stop in self.renderer.stop_ids)])).map(
            lambda pair: [*pair[0], *pair[1]]
        )


def _joined(pieces: list[str]) -> str:
    # NFC, because some tokenizers normalise: their own ids do not spell out other texts, whoever renders them.
    return unicodedata.normalize("NFC", "".join(pieces).replace(CUT, "").replace(SLOT, ""))


def _message(role: str, contents: st.SearchStrategy[str]) -> st.SearchStrategy[Message]:
    return contents.map(lambda content: {"role": role, "content": content})


def _from_tool(contents: st.SearchStrategy[str]) -> st.SearchStrategy[Message]:
    """A tool's result in a user message, for templates without a tool role."""
    return contents.map(lambda content: {"role": "user", "from_tool": True, "content": content})


def check_ids_are_the_tokenizers_own(subject: Subject, messages: list[Message], tools: list[dict[str, Any]]) -> None:
    """For messages without look-alikes."""
    ids = subject.renderer.render(Observation(messages=messages), tools)
    assert ids == template_ids(subject.tokenizer, messages, tools or None)


def check_contents_make_no_control_tokens(subject: Subject, messages: list[Message]) -> None:
    ids = subject.renderer.render(Observation(messages=messages))
    assert subject.text(ids) == subject.spelled(template_text(subject.tokenizer, messages))
    neutral = template_ids(subject.tokenizer, [subject.neutral(message) for message in messages])
    assert subject.control(ids) == subject.control(neutral)


def check_prompts_extend_what_was_sampled(
    subject: Subject, messages: list[Message], turns: list[tuple[list[int], list[Message]]]
) -> None:
    """Each turn is what the model sampled and what the env adds to it."""
    conversation = Conversations(subject.renderer)
    prompt_ids = conversation.prompt(Observation(messages=messages))
    as_seen_by_template = list(messages)
    for response_ids, added in turns:
        text = subject.renderer.decode(response_ids)
        conversation.record(response_ids, text)
        messages = [*messages, {"role": "assistant", "content": text}, *added]
        as_seen_by_template += [{"role": "assistant", "content": STAND_IN}, *added]

        seen = prompt_ids + response_ids
        prompt_ids = conversation.prompt(Observation(messages=messages))
        assert conversation.extended
        assert prompt_ids[: len(seen)] == seen

        new_ids = prompt_ids[len(seen) :]
        ended = bool(response_ids) and response_ids[-1] in subject.renderer.stop_ids
        assert subject.text(new_ids) == subject.spelled(_rest(subject, as_seen_by_template, ended))
        neutral_rest = _rest(subject, [subject.neutral(message) for message in as_seen_by_template], ended)
        assert subject.control(new_ids) == subject.control(
            subject.tokenizer.encode(neutral_rest, add_special_tokens=False)
        )


def _rest(subject: Subject, messages: list[Message], ended: bool) -> str:
    """The template's text after the last reply; without the end of its turn if the model has sampled that itself."""
    rest = template_text(subject.tokenizer, messages).rpartition(STAND_IN)[2]
    assert rest.startswith(subject.turn_end)
    return rest.removeprefix(subject.turn_end) if ended else rest
