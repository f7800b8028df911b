"""Convert GGUF files, the one-file format of llama.cpp, to Hugging Face directories for transformers and vLLM.

transformers reads the architecture and unpacks the weights. Scaled positions and missing weights, which it ignores
silently, are errors here.

The tokenizer is read here: releases of transformers disagree about special tokens and about how text is split before
merging (`tokenizer.ggml.pre`), so that the same file would be tokenised differently. The metadata decides, and an
unknown splitting rule is an error: a wrong one would degrade the model unnoticed. Supported are byte-level BPE
(`tokenizer.ggml.model` is gpt2: Llama 3, Qwen, SmolLM) and Gemma's SentencePiece (llama, with no blank put before the
text), not that of Llama 2.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE
from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast
from transformers.utils import logging as transformers_logging

from agent_r1.data.files import dump_json, read_json
from agent_r1.errors import DataError, did_you_mean, import_extra

transformers_logging.disable_progress_bar()  # it would overwrite our display

Metadata = Mapping[str, Any]
INSTEAD = "Use a Hugging Face directory or a hub id instead"

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_BLANK = "\u2581"  # the sign that SentencePiece writes for a blank
_NAMED = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}

# Words, digits and the rest are split; Qwen takes digits one by one, Llama 3 up to three at once.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"


def _split_by(digits: str) -> list[Any]:
    pattern = Regex(f"{_WORDS}|{digits}|{_REST}")
    whole_bytes = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    return [pre_tokenizers.Split(pattern, behavior="isolated"), whole_bytes]


_GPT2 = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
SPLITTINGS: dict[str, list[Any]] = {  # pre-tokenizers by the value of tokenizer.ggml.pre
    "gpt-2": [_GPT2],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), _GPT2],
    "qwen2": _split_by(r"\p{N}"),
    "llama-bpe": _split_by(r"\p{N}{1,3}"),
}


def convert_gguf(file: Path, directory: Path) -> None:
    """Write the model in `file` to `directory`: config, weights, tokenizer, chat template, generation config."""
    metadata, dtype = _read(file)
    tokenizer = tokenizer_of(metadata, file)
    _load_network(file, dtype).save_pretrained(str(directory))
    tokenizer.save_pretrained(str(directory))
    _make_portable(directory)


def _read(file: Path) -> tuple[Metadata, torch.dtype]:
    """Return the file's metadata and the smallest dtype that holds its weights."""
    gguf = import_extra("gguf", f"reading {file}", "gguf")
    try:
        reader = gguf.GGUFReader(file)
        metadata = {name: field.contents() for name, field in reader.fields.items()}
    except (ValueError, IndexError, KeyError) as error:
        raise DataError(f"{file} cannot be read as a GGUF file: {error}. Is the download complete?") from error
    _check_positions(metadata, {tensor.name for tensor in reader.tensors}, file)
    wide = {gguf.GGMLQuantizationType[name] for name in ("F64", "F32", "F16")}
    matrices = [tensor.tensor_type for tensor in reader.tensors if len(tensor.shape) > 1]
    # bfloat16 represents weights that were packed into 8 bits or fewer exactly.
    return metadata, torch.float32 if wide.intersection(matrices) else torch.bfloat16


def _check_positions(metadata: Metadata, tensors: set[str], file: Path) -> None:
    """Refuse scaled positions: transformers reads them for gpt-oss only and would load a different model."""
    architecture = metadata.get("general.architecture")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", "none")
    if architecture != "gpt-oss" and (scaling != "none" or "rope_freqs.weight" in tensors):
        raise DataError(f"{file} scales its positions (as Llama 3.1 and later do), which is not supported. {INSTEAD}")


def _load_network(file: Path, dtype: torch.dtype) -> Any:
    arguments: dict[str, Any] = {"gguf_file": file.name, "dtype": dtype, "output_loading_info": True}
    try:
        from transformers import GgufConfig
    except ImportError:  # this release always unpacks
        pass
    else:
        arguments["quantization_config"] = GgufConfig(dequantize=True)
    try:
        network, loading = AutoModelForCausalLM.from_pretrained(str(file.parent), **arguments)
    except (OSError, ValueError, KeyError, RuntimeError, NotImplementedError) as error:
        raise DataError(f"transformers cannot read the model in {file}: {error}. {INSTEAD}") from error
    missing = sorted(map(str, {*loading["missing_keys"], *loading["mismatched_keys"]}))
    if missing:
        raise DataError(f"{file} lacks {len(missing)} weights of its architecture, the first is {missing[0]}")
    if getattr(network.config, "quantization_config", None) is not None:
        del network.config.quantization_config  # the weights are unpacked now
    return network


def _make_portable(directory: Path) -> None:
    """Add the older spelling of settings that transformers 5 renamed, for transformers 4 and vLLM."""
    model = read_json((directory / "config.json").read_text("utf-8"))
    model.pop("_model_name_or_path", None)
    model["torch_dtype"] = model["dtype"]
    positions = model.get("rope_parameters") or {}
    if "rope_theta" in positions:
        model["rope_theta"] = positions["rope_theta"]
    (directory / "config.json").write_text(dump_json(model, indent=2) + "\n", encoding="utf-8")
    words = read_json((directory / "tokenizer_config.json").read_text("utf-8"))
    for private in ("backend", "is_local", "local_files_only"):
        words.pop(private, None)
    words["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "max_position_embeddings" in model:
        words["model_max_length"] = model["max_position_embeddings"]
    (directory / "tokenizer_config.json").write_text(dump_json(words, indent=2) + "\n", encoding="utf-8")


def tokenizer_of(metadata: Metadata, file: Path) -> Any:
    """Return a fast tokenizer with the file's vocabulary, special tokens and chat template."""
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    is_gemma = kind == "llama" and metadata.get("tokenizer.ggml.add_space_prefix") is False
    if kind != "gpt2" and not is_gemma:
        known = "gpt2 (byte-level BPE) and Gemma's llama (add_space_prefix is false)"
        raise DataError(f"{file} has a tokenizer of kind {kind!r}; only {known} can be read. {INSTEAD}")
    if not is_gemma and pre not in SPLITTINGS:
        hint = did_you_mean(str(pre), SPLITTINGS).replace("Choose one of", "Known are")
        raise DataError(f"{file} splits text in an unknown way, tokenizer.ggml.pre={pre!r}.{hint}. {INSTEAD}")
    needed = ("tokens", "token_type", "scores" if is_gemma else "merges")
    missing = [name for name in needed if f"tokenizer.ggml.{name}" not in metadata]
    if missing:
        raise DataError(f"{file} has no tokenizer.ggml.{missing[0]}, so its tokenizer cannot be read. {INSTEAD}")
    tokens = metadata["tokenizer.ggml.tokens"]
    ids = {ours: metadata.get(f"tokenizer.ggml.{theirs}_token_id") for ours, theirs in _NAMED.items()}
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=_with_control_tokens(
            _sentence_pieces(metadata) if is_gemma else _byte_level(metadata, str(pre)), metadata
        ),
        clean_up_tokenization_spaces=False,
        model_input_names=["input_ids", "attention_mask"],  # no causal model takes the default's token_type_ids
        **{name: tokens[index] for name, index in ids.items() if index is not None},
    )
    tokenizer.chat_template = metadata.get("tokenizer.chat_template")
    return tokenizer


def _byte_level(metadata: Metadata, pre: str) -> Any:
    merges = [tuple(merge.split(" ")) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {token: index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    tokenizer = Tokenizer(BPE(vocabulary, merges, ignore_merges=pre == "llama-bpe"))
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITTINGS[pre])
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer


def _sentence_pieces(metadata: Metadata) -> Any:
    """Two tokens merge if the result is a token. The best score comes first; runs of blanks are above all words."""
    ids = {token.replace(" ", _BLANK): index for index, token in enumerate(metadata["tokenizer.ggml.tokens"])}
    ranked = [
        (0.0 if kind == _USER_DEFINED else score, cut, len(token) - cut, token)
        for token, kind, score in zip(
            ids, metadata["tokenizer.ggml.token_type"], metadata["tokenizer.ggml.scores"], strict=True
        )
        for cut in range(1, len(token))
        if token[:cut] in ids and token[cut:] in ids
    ]
    ranked.sort(key=lambda rank: rank[:3], reverse=True)  # as transformers writes it: equal ranks keep the order of ids
    merges = [(token[:cut], token[cut:]) for _, cut, _, token in ranked]
    unknown = metadata["tokenizer.ggml.tokens"][metadata["tokenizer.ggml.unknown_token_id"]]
    tokenizer = Tokenizer(BPE(ids, merges, unk_token=unknown, fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Replace(" ", _BLANK)
    tokenizer.decoder = decoders.Sequence([decoders.Replace(_BLANK, " "), decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer


def _with_control_tokens(tokenizer: Any, metadata: Metadata) -> Any:
    kinds = enumerate(metadata["tokenizer.ggml.token_type"])
    # Tokens that no merge produces are matched as a whole and keep their ids.
    whole = [(tokenizer.id_to_token(index), kind) for index, kind in kinds if kind in (_CONTROL, _USER_DEFINED)]
    tokenizer.add_tokens([AddedToken(token, normalized=False, special=kind == _CONTROL) for token, kind in whole])
    if metadata.get("tokenizer.ggml.add_bos_token"):
        index = metadata["tokenizer.ggml.bos_token_id"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[BOS] $A", pair="[BOS] $A [BOS]:1 $B:1", special_tokens=[("[BOS]", index)]
        )
    return tokenizer
