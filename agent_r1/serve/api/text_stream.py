"""Tokens in, text out, while a response is being sampled.

Nothing that has been shown is ever taken back: text waits as long as it may turn out to be half a character, the
beginning of a stop text, a call or thinking. Pure: knows no engine and no HTTP.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

from agent_r1.tokens.formats.base import ToolCallFormat
from agent_r1.wire.chat_answer import TokenLogprob
from agent_r1.wire.reply import split_thinking

Decode = Callable[[Sequence[int]], str]

REPLACEMENT = "\ufffd"  # stands for half a character in decoded text
MARK_STARTS = re.compile(r"[<\[`]")  # every mark of a call or of thinking begins with one of these
MARK_CHARS = 64  # no mark is longer
# How many earlier tokens are decoded again with new ones, at least and at most: in some tokenizers, the text of a token
# depends on the ones before it.
WINDOW, LONGEST_WINDOW = 8, 32


class Detokenizer:
    """Decodes a growing list of ids without decoding all of it again."""

    def __init__(self, decode: Decode) -> None:
        self.text = ""  # whole characters only
        self._decode = decode
        self._ids: list[int] = []
        self._start = 0  # ids before this are done with
        self._known = ""  # the part of `text` that the ids from `_start` on have added

    def push(self, ids: Sequence[int]) -> None:
        self._ids.extend(ids)
        window = self._decode(self._ids[self._start :])
        if window.endswith(REPLACEMENT) or not window.startswith(self._known):
            return
        self.text += window[len(self._known) :]
        self._known = window
        if len(self._ids) - self._start <= LONGEST_WINDOW:
            return
        self._start = len(self._ids) - WINDOW
        self._known = self._decode(self._ids[self._start :])
        if not window.endswith(self._known):  # the window begins inside a character: take it from the response's start
            self._start, self._known = 0, self.text


class TextStream:
    """The part of a response that a client may see so far."""

    def __init__(
        self,
        decode: Decode,
        *,
        stop: Sequence[str] = (),
        tool_format: ToolCallFormat | None,
        opened: bool,
        raw: bool = False,
    ) -> None:
        """
        tool_format: reads calls; None if there are no tools, so that everything is text.
        opened: the prompt ends with <think>, so the response begins inside it.
        raw: thinking is text, too.
        """
        self.stopped = False  # a stop text was found; nothing after it counts
        self.shown = ""  # text without calls and thinking
        self.reasoning = ""
        self._decoder = Detokenizer(decode)
        self._stop = tuple(stop)
        self._longest_stop = max(map(len, self._stop), default=0)
        self._format, self._opened = tool_format, opened
        self._cut: int | None = None  # where the stop text begins
        self._searched = 0
        self._split_at = 0  # length of the text when it was last split
        self._plain, self._raw = not opened, raw

    @property
    def text(self) -> str:
        """All text so far, up to a stop text."""
        return self._decoder.text if self._cut is None else self._decoder.text[: self._cut]

    def push(self, ids: Sequence[int]) -> tuple[str, str]:
        """Take new ids; returns the new text and the new thinking that can be shown."""
        if self.stopped:
            return "", ""
        self._decoder.push(ids)
        self._find_stop()
        return self._advance(*self._visible(self.text[: self._settled()]))

    def end(self, text: str, reasoning: str) -> tuple[str, str]:
        """The rest of the text for the user and of the thinking, now that the whole response has been read."""
        return self._advance(text, reasoning)

    def _advance(self, shown: str, reasoning: str) -> tuple[str, str]:
        new, thought = "", ""
        if shown.startswith(self.shown):
            new, self.shown = shown[len(self.shown) :], shown
        if reasoning.startswith(self.reasoning):
            thought, self.reasoning = reasoning[len(self.reasoning) :], reasoning
        return new, thought

    def _find_stop(self) -> None:
        text = self._decoder.text
        begin = max(0, self._searched - self._longest_stop + 1)
        found = [at for stop in self._stop if (at := text.find(stop, begin)) >= 0]
        self._searched = len(text)
        if found:
            self._cut, self.stopped = min(found), True

    def _settled(self) -> int:
        """The length of the text that cannot become part of a stop text."""
        text = self.text
        if not self._stop or self.stopped:
            return len(text)
        for start in range(max(0, len(text) - self._longest_stop + 1), len(text)):
            if any(stop.startswith(text[start:]) for stop in self._stop):
                return start
        return len(text)

    def _visible(self, text: str) -> tuple[str, str]:
        """Split an unfinished text into the part that is certainly for the user and the part that is certainly
        thinking."""
        if self._raw:
            return text, ""
        if self._format is not None and not self._format.has_marks:
            return self.shown, self.reasoning  # a call looks like text until it ends
        if not text.strip():  # blanks before thinking are not shown
            return "", ""
        if self._plain and not MARK_STARTS.search(text, max(0, len(self.shown) - MARK_CHARS)):
            return (text.strip() if self._format is not None else text), ""
        self._plain = False
        if len(text) - self._split_at < len(text) // 64:  # so that a long response is not read again for every token
            return self.shown, self.reasoning
        self._split_at = len(text)
        tail = max(0, len(text) - MARK_CHARS)
        mark = MARK_STARTS.search(text, tail)
        text = text[: mark.start()] if mark is not None else text
        if not text.strip():
            return "", ""
        reasoning, spoken = split_thinking(text, opened=self._opened)
        if self._format is None:
            return spoken, reasoning
        content, events = self._format.parse(text)
        if events:  # the text after a call may still be taken for part of it
            content = self._format.parse(text[: events[0].span[0]])[0]
        return content, reasoning


def as_logprobs(ids: Sequence[int], logprobs: Sequence[float], decode: Decode) -> list[TokenLogprob]:
    """The sampled tokens for a client."""
    pieces = [decode((token,)) for token in ids]
    return [
        TokenLogprob(token=piece, logprob=logprob, text_bytes=None if REPLACEMENT in piece else tuple(_utf8(piece)))
        for piece, logprob in zip(pieces, logprobs, strict=True)
    ]


def _utf8(text: str) -> bytes:
    return text.encode("utf-8", errors="replace")
