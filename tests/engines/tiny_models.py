"""Random models of a few thousand weights, one per kind of attention."""

from __future__ import annotations

from typing import Any

import torch
import transformers

VOCAB = 97
# The wide initialisation gives peaked, varied distributions, so a wrong key or position shows in the tokens.
SHAPE: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOWED = {"head_dim": 16, "sliding_window": 6, "layer_types": ["sliding_attention", "full_attention"]}
GPT2 = {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128, "initializer_range": 0.3}

FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {  # name -> configuration class, its settings
    "llama": ("LlamaConfig", SHAPE),
    "llama_tied": ("LlamaConfig", SHAPE | {"tie_word_embeddings": True}),
    "qwen3": ("Qwen3Config", SHAPE | {"head_dim": 16}),
    "mistral_windowed": ("MistralConfig", SHAPE | {"sliding_window": 6}),
    "gemma3": ("Gemma3TextConfig", SHAPE | WINDOWED),
    "gpt2": ("GPT2Config", GPT2),
    "gemma2_soft_capped": ("Gemma2Config", SHAPE | {"head_dim": 16}),
}


def tiny(family: str, **changes: Any) -> Any:
    """A model in eval mode, the same weights every time."""
    config_class, settings = FAMILIES[family]
    torch.manual_seed(0)
    config = getattr(transformers, config_class)(**(settings | changes))
    return transformers.AutoModelForCausalLM.from_config(config).eval()


def prompts(*lengths: int, seed: int = 0) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, VOCAB, (length,), generator=generator).tolist() for length in lengths]
