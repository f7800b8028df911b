"""Tokenizers under test: small ones, ours with the bundled chat template, and real ones.

To test real tokenizers, set AGENT_R1_TOKENIZERS to a directory whose sub-directories each hold a tokenizer.json and a
tokenizer_config.json (as `AutoTokenizer.from_pretrained` reads them).
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from agent_r1.build.recipe import TEMPLATES
from agent_r1.tokens.control_tokens import CUT, SLOT
from agent_r1.tokens.rendering import Renderer
from agent_r1.tokens.template_check import verify_template
from agent_r1.types import Message
from tests.tokens.small_tokenizers import FAMILIES, renderer_of, tokenizer_of

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
    # NFC, because some tokenizers normalise: no ids of theirs spell other texts.
    return unicodedata.normalize("NFC", "".join(pieces).replace(CUT, "").replace(SLOT, ""))


def _message(role: str, contents: st.SearchStrategy[str]) -> st.SearchStrategy[Message]:
    return contents.map(lambda content: {"role": role, "content": content})


def _from_tool(contents: st.SearchStrategy[str]) -> st.SearchStrategy[Message]:
    """A tool's result in a user message, for templates without a tool role."""
    return contents.map(lambda content: {"role": "user", "from_tool": True, "content": content})


CHATML_TOOLS = (TEMPLATES / "chatml_tools.jinja").read_text(encoding="utf-8")
# With the bundled template: one whose tags are plain text, and two in which some of them are tokens.
BUNDLED = {f"chatml_tools-{name}": name for name in ("smollm2", "qwen2_5", "qwen3")}
_ROOT = os.environ.get("AGENT_R1_TOKENIZERS")
REAL = {path.parent.name: path.parent for path in sorted(Path(_ROOT).glob("*/tokenizer.json"))} if _ROOT else {}
SUBJECTS = [*FAMILIES, *BUNDLED, *REAL]


@cache
def subject_of(name: str) -> Subject:
    if name in FAMILIES:
        family = FAMILIES[name]
        turn_end = "<|end|>" if name == "harmony" else family.eos
        return Subject.of(tokenizer_of(name), renderer_of(name), turn_end=turn_end, tool_role=family.tool_role)
    if name in BUNDLED:
        known = tokenizer_of(BUNDLED[name])
        tokenizer: Any = PreTrainedTokenizerFast(
            tokenizer_object=known.backend_tokenizer, eos_token=known.eos_token, chat_template=CHATML_TOOLS
        )
        return Subject.of(tokenizer, Renderer(tokenizer), turn_end="<|im_end|>")
    tokenizer = AutoTokenizer.from_pretrained(str(REAL[name]))
    renderer = Renderer(tokenizer)
    tool_role = verify_template(renderer).extends_after_tool
    return Subject.of(tokenizer, renderer, turn_end=tokenizer.eos_token, tool_role=tool_role)
