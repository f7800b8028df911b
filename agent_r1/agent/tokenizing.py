"""Encoding and decoding of plain text, as fast as the library beneath transformers does it.

transformers looks at every id it is asked to decode, and hands even a single short text to a pool of threads. An agent
encodes and decodes at every step of every episode. Knows tokenizers by their methods only; imports no transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """`tokenizer.encode` without special tokens of its own, and without remarks on the length of a text."""
    encode: Callable[[str], list[int]] = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    if not _is_plain(tokenizer, "_encode_plus"):
        return encode
    encode("?")  # sets what a tokenizer may have been saved with, such as truncation, to what this call asks for
    backend: Any = tokenizer.backend_tokenizer
    return lambda text: list(backend.encode(text, add_special_tokens=False).ids)


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    """`tokenizer.decode(ids, skip_special_tokens=)` without any cleaning up."""
    if not _is_plain(tokenizer, "_decode"):
        return partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    decode: Callable[..., Any] = tokenizer.backend_tokenizer.decode
    return decode


def _is_plain(tokenizer: PreTrainedTokenizerBase, method: str) -> bool:
    """Whether the method is the library's own for fast tokenizers, and so does nothing but call its backend."""
    name: str = getattr(type(tokenizer), method).__qualname__
    return name == f"TokenizersBackend.{method}"
