"""Fast encoding and decoding of plain text: an agent does both at every step of every episode.

For a short text, transformers takes four times as long as the library beneath it. Knows tokenizers by their methods
only; imports no transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def fast_encoder(tokenizer: PreTrainedTokenizerBase) -> Callable[[str], list[int]]:
    """Return `tokenizer.encode` without added special tokens and without warnings about the length of a text."""
    slow: Callable[[str], list[int]] = partial(tokenizer.encode, add_special_tokens=False, verbose=False)
    if not _uses_backend(tokenizer, "encode", "_encode_plus"):
        return slow
    backend: Any = tokenizer.backend_tokenizer

    def encode(text: str) -> list[int]:
        # Other code may have set truncation or padding, which stay until the next call of transformers.
        unset = backend.truncation is None and backend.padding is None
        if not unset or backend.encode_special_tokens != tokenizer.split_special_tokens:
            return slow(text)
        return list(backend.encode(text, add_special_tokens=False).ids)

    return encode


def fast_decoder(tokenizer: PreTrainedTokenizerBase) -> Callable[..., str]:
    """Return `tokenizer.decode(ids, skip_special_tokens=)` without any cleaning up."""
    if not _uses_backend(tokenizer, "decode", "_decode"):
        return partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    decode: Callable[..., str] = tokenizer.backend_tokenizer.decode
    return decode


def _uses_backend(tokenizer: PreTrainedTokenizerBase, method: str, inner: str) -> bool:
    """Whether both methods are the library's own, which pass plain text and ids on unchanged."""
    names = [getattr(type(tokenizer), each).__qualname__ for each in (method, inner)]
    return names == [f"PreTrainedTokenizerBase.{method}", f"TokenizersBackend.{inner}"]
