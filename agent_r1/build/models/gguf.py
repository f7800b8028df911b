"""Convert GGUF files, the one-file format of llama.cpp, to Hugging Face directories for transformers and vLLM.

transformers reads the architecture and unpacks the weights, `gguf_tokenizer.py` reads the tokenizer. Scaled positions
and missing weights, which transformers ignores silently, are errors here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging as transformers_logging

from agent_r1.build.models.gguf_tokenizer import INSTEAD, Metadata, tokenizer_of
from agent_r1.errors import DataError, import_extra

transformers_logging.disable_progress_bar()  # it would overwrite our display


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
    model = _load(directory / "config.json")
    model.pop("_model_name_or_path", None)
    model["torch_dtype"] = model["dtype"]
    positions = model.get("rope_parameters") or {}
    if "rope_theta" in positions:
        model["rope_theta"] = positions["rope_theta"]
    _save(model, directory / "config.json")
    words = _load(directory / "tokenizer_config.json")
    for private in ("backend", "is_local", "local_files_only"):
        words.pop(private, None)
    words["tokenizer_class"] = "PreTrainedTokenizerFast"
    if "max_position_embeddings" in model:
        words["model_max_length"] = model["max_position_embeddings"]
    _save(words, directory / "tokenizer_config.json")


def _load(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content


def _save(content: Mapping[str, Any], path: Path) -> None:
    path.write_text(json.dumps(content, indent=2, ensure_ascii=False, allow_nan=False) + "\n", encoding="utf-8")
