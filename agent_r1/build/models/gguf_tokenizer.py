"""Read the tokenizer of a GGUF file as a transformers tokenizer.

Releases of transformers disagree about special tokens and about how text is split before merging
(`tokenizer.ggml.pre`), so that the same file would be tokenised differently. Here the metadata decides, and an unknown
splitting rule is an error: a wrong one would degrade the model unnoticed.

Supports byte-level BPE (`tokenizer.ggml.model` is gpt2: Llama 3, Qwen, SmolLM), not SentencePiece (Llama 2, Gemma).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import PreTrainedTokenizerFast

from agent_r1.errors import DataError, did_you_mean

Metadata = Mapping[str, Any]
INSTEAD = "Use a Hugging Face directory or a hub id instead"

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# Words, digits and the rest are split; Qwen takes digits one by one, Llama 3 up to three at once.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


@dataclass(frozen=True, slots=True, kw_only=True)
class Splitting:
    """How text is prepared before its bytes are merged."""

    steps: tuple[Any, ...]  # pre-tokenizers, in order
    nfc: bool = False
    ignore_merges: bool = False  # do not split a piece that is a token


def _split_by(digits: str) -> tuple[Any, ...]:
    pattern = Regex(f"{_WORDS}|{digits}|{_REST}")
    return (
        pre_tokenizers.Split(pattern, behavior="isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    )


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
SPLITTINGS = {  # by the value of tokenizer.ggml.pre
    "gpt-2": Splitting(steps=(_GPT2,)),
    "smollm": Splitting(steps=(pre_tokenizers.Digits(individual_digits=True), _GPT2)),
    "qwen2": Splitting(steps=_split_by(r"\p{N}"), nfc=True),
    "llama-bpe": Splitting(steps=_split_by(r"\p{N}{1,3}"), ignore_merges=True),
}


def tokenizer_of(metadata: Metadata, file: Path) -> Any:
    """Return a fast tokenizer with the file's vocabulary, special tokens and chat template."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind != "gpt2":
        raise DataError(f"{file} has a tokenizer of kind {kind!r}; only gpt2 (byte-level BPE) can be read. {INSTEAD}")
    if pre not in SPLITTINGS:
        hint = did_you_mean(str(pre), SPLITTINGS).replace("Choose one of", "Known are")
        raise DataError(f"{file} splits text in an unknown way, tokenizer.ggml.pre={pre!r}.{hint}. {INSTEAD}")
    missing = [name for name in ("tokens", "token_type", "merges") if f"tokenizer.ggml.{name}" not in metadata]
    if missing:
        raise DataError(f"{file} has no tokenizer.ggml.{missing[0]}, so its tokenizer cannot be read. {INSTEAD}")
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in _NAMED.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_byte_level(metadata, SPLITTINGS[pre]),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # no causal model takes the default's token_type_ids
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _byte_level(metadata: Metadata, splitting: Splitting) -> Any:
    tokens, types = metadata["tokenizer.ggml.tokens"], metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(tokens)}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=splitting.ignore_merges))
    if splitting.nfc:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(list(splitting.steps))
    tokenizer.decoder = decoders.ByteLevel()
    # Tokens that no merge produces are matched as a whole and keep their ids.
    whole = [(token, kind) for token, kind in zip(tokens, types, strict=True) if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL) for token, kind in whole])
    if metadata.get("tokenizer.ggml.add_bos_token"):
        index = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[BOS] $A", pair="[BOS] $A [BOS]:1 $B:1", special_tokens=[("[BOS]", index)]
        )
    return tokenizer
