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
    slowly: Callable[[str], list[int]] = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    if not _only_calls_backend(tokenizer, "encode", "_encode_plus"):
        return slowly
    backend: Any = tokenizer.backend_tokenizer

    def encode(text: str) -> list[int]:
        # What it was saved with, or what somebody else's last call asked for, stays set until a call sets it anew.
        unset = backend.truncation is None and backend.padding is None
        if not unset or backend.encode_special_tokens != tokenizer.split_special_tokens:
            return slowly(text)
        return list(backend.encode(text, add_special_tokens=False).ids)

    return encode


def decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[..., Any]:
    """`tokenizer.decode(ids, skip_special_tokens=)` without any cleaning up."""
    if not _only_calls_backend(tokenizer, "decode", "_decode"):
        return partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    decode: Callable[..., Any] = tokenizer.backend_tokenizer.decode
    return decode


def _only_calls_backend(tokenizer: PreTrainedTokenizerBase, method: str, inner: str) -> bool:
    """Whether both methods are the library's own for fast tokenizers, which do nothing to a plain text or to ids."""
    names = [getattr(type(tokenizer), each).__qualname__ for each in (method, inner)]
    return names == [f"PreTrainedTokenizerBase.{method}", f"TokenizersBackend.{inner}"]
