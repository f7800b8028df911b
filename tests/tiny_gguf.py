"""A model of a few thousand weights, and the GGUF file that llama.cpp would make of it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGMLQuantizationType, GGUFWriter, TokenType
from gguf.quants import quantize
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, Qwen2Config, Qwen2ForCausalLM

from tests.chatml import TEMPLATE

BYTES = sorted(ByteLevel.alphabet())
CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
WORDS = ["he", "ll", "hell", "hello", "ĠĠ", "12", "123"]  # each made of two before it
MERGES = ["h e", "l l", "he ll", "hell o", "Ġ Ġ", "1 2", "12 3"]
TOKENS = [*CONTROL, *BYTES, *WORDS, "<tool_call>"]
TYPES = [TokenType.CONTROL] * 3 + [TokenType.NORMAL] * (256 + len(WORDS)) + [TokenType.USER_DEFINED]
SIZES = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
}
OUTER = {
    "embed_tokens.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "lm_head.weight": "output.weight",
}
NAMES = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Tiny:
    architecture: str = "llama"
    tied: bool = True
    quantised: bool = False
    tokenizer: str = "gpt2"
    pre: str = "smollm"
    without: str = ""  # a tensor, or a key of the metadata, that is left out
    rope_freqs: bool = False
    chat_template: bool = True
    add_bos: bool = False

    def network(self) -> Any:
        torch.manual_seed(0)
        settings: dict[str, Any] = {**SIZES, "tie_word_embeddings": self.tied, "rms_norm_eps": 1e-5}
        settings |= {"rope_parameters": {"rope_type": "default", "rope_theta": 5000.0}}
        network: Any = (
            LlamaForCausalLM(LlamaConfig(**settings))
            if self.architecture == "llama"
            else Qwen2ForCausalLM(Qwen2Config(**settings))
        )
        for parameter in network.parameters():
            torch.nn.init.normal_(parameter, std=0.3)
        return network.eval()

    def write(self, file: Path) -> Path:
        writer = GGUFWriter(file, self.architecture)
        self._describe(writer)
        for name, tensor in self.network().state_dict().items():
            self._add(writer, name, tensor)
        if self.rope_freqs:
            writer.add_tensor("rope_freqs.weight", np.ones(4, dtype=np.float32))
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
        return file

    def _describe(self, writer: Any) -> None:
        writer.add_context_length(SIZES["max_position_embeddings"])
        writer.add_embedding_length(SIZES["hidden_size"])
        writer.add_block_count(SIZES["num_hidden_layers"])
        writer.add_feed_forward_length(SIZES["intermediate_size"])
        writer.add_head_count(SIZES["num_attention_heads"])
        writer.add_head_count_kv(SIZES["num_key_value_heads"])
        writer.add_layer_norm_rms_eps(1e-5)
        writer.add_rope_freq_base(5000.0)
        writer.add_rope_dimension_count(SIZES["hidden_size"] // SIZES["num_attention_heads"])
        writer.add_vocab_size(SIZES["vocab_size"])
        writer.add_tokenizer_model(self.tokenizer)
        writer.add_tokenizer_pre(self.pre)
        writer.add_token_list(TOKENS)
        writer.add_token_types(TYPES)
        if self.without != "merges":
            writer.add_token_merges(MERGES)
        writer.add_bos_token_id(1)
        writer.add_eos_token_id(2)
        writer.add_unk_token_id(0)
        writer.add_pad_token_id(2)
        writer.add_add_bos_token(self.add_bos)
        if self.chat_template:
            writer.add_chat_template(TEMPLATE)

    def _add(self, writer: Any, name: str, tensor: torch.Tensor) -> None:
        if name == "lm_head.weight" and self.tied:
            return  # llama.cpp takes the embedding
        stored = _stored_name(name)
        if stored == self.without:
            return
        shared = {"attn_q": SIZES["num_attention_heads"], "attn_k": SIZES["num_key_value_heads"]}
        heads = shared.get(stored.split(".")[-2])
        values = tensor.numpy()
        if heads is not None and self.architecture == "llama":  # rotary pairs lie side by side there
            values = values.reshape(heads, 2, -1, values.shape[-1]).swapaxes(1, 2).reshape(values.shape)
        if self.quantised and values.ndim == 2:
            kind = GGMLQuantizationType.Q8_0
            writer.add_tensor(stored, quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(stored, values)


def _stored_name(name: str) -> str:
    plain = name.removeprefix("model.")
    if plain in OUTER:
        return OUTER[plain]
    _, layer, part = plain.split(".", 2)
    module, kind = part.rsplit(".", 1)
    return f"blk.{layer}.{NAMES[module]}.{kind}"
