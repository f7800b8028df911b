"""Tiny random models of many architectures, each with the features switched on that its real models use."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import transformers

VOCABULARY = 97
WINDOW = 6  # tokens; prompts and segments of the tests are longer
SHAPE: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": 0,
}
WINDOWED: dict[str, Any] = {"sliding_window": WINDOW, "layer_types": ["sliding_attention", "full_attention"]}
EXPERTS: dict[str, Any] = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
MAMBA: dict[str, Any] = {"mamba_d_ssm": 64, "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_state": 8}
GATED_DELTA: dict[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "layer_types": ["linear_attention", "full_attention"],
}
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.75,
    "short_factor": [1.0 + 0.1 * i for i in range(6)],  # half of the 12 rotated of 16 dimensions
    "long_factor": [2.0 + i for i in range(6)],
    "original_max_position_embeddings": 128,
}
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 2.0, "rope_theta": 1e4, "original_max_position_embeddings": 128}


@dataclass(frozen=True)
class Architecture:
    """One row of the table."""

    name: str
    config: str  # a class of transformers; one that an older version lacks is skipped
    features: str
    settings: dict[str, Any] = field(default_factory=dict)

    @property
    def exists(self) -> bool:
        return hasattr(transformers, self.config)

    def make(self) -> Any:
        """A model in eval mode, the same weights every time, large enough that a wrong key or position shows."""
        torch.manual_seed(0)
        config = getattr(transformers, self.config)(**(SHAPE | self.settings))
        model = transformers.AutoModelForCausalLM.from_config(config).eval()
        generator = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                if parameter.ndim > 1 and "conv1d" not in name:
                    parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
                elif "sinks" in name:
                    parameter.copy_(torch.randn(parameter.shape, generator=generator))
        return model


ARCHITECTURES = [
    Architecture("Llama", "LlamaConfig", "tied embeddings", {"tie_word_embeddings": True}),
    Architecture("Mistral", "MistralConfig", "sliding window", {"sliding_window": WINDOW}),
    Architecture("Qwen2", "Qwen2Config", "biases"),
    Architecture("Qwen3", "Qwen3Config", "normalised queries and keys"),
    Architecture("Qwen3-MoE", "Qwen3MoeConfig", "experts", EXPERTS),
    Architecture(
        "Gemma 2",
        "Gemma2Config",
        "soft-capped scores and logits, sliding windows",
        WINDOWED | {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 5.0, "query_pre_attn_scalar": 8},
    ),
    Architecture("Gemma 3", "Gemma3TextConfig", "sliding windows with their own rope", WINDOWED),
    Architecture("Phi-3", "Phi3Config", "fused projections, sliding window", {"sliding_window": WINDOW}),
    Architecture(
        "Phi-4-mini",
        "Phi3Config",
        "partial rotary, longrope up to its original length",
        {"rope_parameters": LONGROPE, "tie_word_embeddings": True},
    ),
    Architecture("SmolLM3", "SmolLM3Config", "layers without positions", {"no_rope_layers": [1, 0]}),
    Architecture("GLM-4", "Glm4Config", "norms around blocks, partial rotary", {"partial_rotary_factor": 0.5}),
    Architecture("OLMo 2", "Olmo2Config", "norms after blocks"),
    Architecture("OLMo 3", "Olmo3Config", "sliding windows", WINDOWED),
    Architecture(
        "Granite",
        "GraniteConfig",
        "scaled embeddings, residuals, scores and logits",
        {
            "embedding_multiplier": 3.0,
            "residual_multiplier": 0.7,
            "attention_multiplier": 0.1,
            "logits_scaling": 3.0,
        },
    ),
    Architecture("Cohere", "CohereConfig", "scaled logits, parallel blocks", {"logit_scale": 0.25}),
    Architecture(
        "gpt-oss",
        "GptOssConfig",
        "attention sinks, sliding windows, experts, YaRN",
        WINDOWED | {"num_local_experts": 4, "num_experts_per_tok": 2, "rope_parameters": YARN},
    ),
    Architecture("Llama 4", "Llama4TextConfig", "chunked attention", {"attention_chunk_size": WINDOW}),
    Architecture("BLOOM", "BloomConfig", "position biases", {"n_layer": 2, "n_head": 4}),
    Architecture("Falcon-H1", "FalconH1Config", "Mamba beside attention", MAMBA | {"lm_head_multiplier": 0.5}),
    Architecture("Qwen3-Next", "Qwen3NextConfig", "linear attention, experts", EXPERTS | GATED_DELTA),
    Architecture(
        "LFM2", "Lfm2Config", "convolutions between attention layers", {"layer_types": ["conv", "full_attention"]}
    ),
    Architecture("Mamba 2", "Mamba2Config", "no attention", {"num_heads": 8, "state_size": 8, "n_groups": 2}),
]
