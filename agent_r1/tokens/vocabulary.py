"""The text of every token of a tokenizer, exact enough to spell any sequence of ids without the tokenizer.

A token may be only some of the bytes of a character. Such bytes are written as lone surrogates, as Python's
`surrogateescape` does, so `"".join(texts).encode("utf-8", "surrogateescape")` gives back exactly the bytes of a text.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_BYTE = re.compile("<0x([0-9A-F]{2})>")  # how vocabularies with byte fallback spell a byte


def token_texts(tokenizer: PreTrainedTokenizerBase) -> list[str]:
    """Return the text of each id; ids that the tokenizer does not have are empty."""
    added: dict[int, str] = {index: token.content for index, token in tokenizer.added_tokens_decoder.items()}
    pieces: dict[int, str] = {index: piece for piece, index in tokenizer.get_vocab().items()}
    byte_of = _byte_alphabet()
    is_byte_level = all(char in byte_of for index, piece in pieces.items() if index not in added for char in piece)

    def text(index: int) -> str:
        if index in added:
            return added[index]
        piece = pieces.get(index, "")
        if is_byte_level:
            raw = bytes(byte_of[char] for char in piece)
        elif match := _BYTE.fullmatch(piece):
            raw = bytes([int(match[1], 16)])
        else:
            return piece.replace("▁", " ")  # SentencePiece
        return raw.decode("utf-8", "surrogateescape")

    return [text(index) for index in range(max(pieces, default=-1) + 1)]


def _byte_alphabet() -> dict[str, int]:
    """Return the byte behind each character of a byte-level vocabulary (GPT-2, Llama 3, Qwen).

    Printable bytes stand for themselves, the others for the characters from 256 on.
    """
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + n): byte for n, byte in enumerate(others)}
