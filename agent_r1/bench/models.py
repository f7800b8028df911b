"""What is benchmarked: a Llama made from its shape alone, with random weights, and a tokenizer that fits any shape.

Speed does not depend on what weights say, so nothing is downloaded. The end-of-text token lies beyond the model's
vocabulary: it can never be sampled, so every response has exactly the length it is given, on every side of a
comparison, while each side still looks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from itertools import islice, product
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from agent_r1.engines.local.model_runner import cast_weights
from agent_r1.tokens.rendering import FORGETFUL

PAD, TURN_START, TURN_END, NEVER = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|never|>"
TEMPLATE = (
    f"{{# {FORGETFUL} #}}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Of a Llama with tied embeddings."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int

    @property
    def attention_width(self) -> int:
        """What a pair of a query and a key costs, over all layers, in multiply-adds."""
        return self.layers * self.hidden

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def body_parameters(self) -> int:
        """Those every token is multiplied with. Looking an embedding up is no multiplication."""
        attention = 2 * self.hidden * self.hidden + 2 * self.hidden * (self.hidden // self.heads) * self.kv_heads
        return self.layers * (attention + 3 * self.hidden * self.intermediate)

    @property
    def parameters(self) -> int:
        norms = (2 * self.layers + 1) * self.hidden
        return self.body_parameters + self.head_parameters + norms

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        return 2 * self.layers * self.kv_heads * (self.hidden // self.heads) * dtype.itemsize


SMOLLM2_135M = Shape(layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, vocabulary=49_152, positions=8_192)
TINY = Shape(layers=2, hidden=48, intermediate=96, heads=3, kv_heads=1, vocabulary=320, positions=1_024)


def make_network(shape: Shape, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
    """The same weights for the same shape and seed."""
    config = LlamaConfig(
        vocab_size=shape.vocabulary,
        hidden_size=shape.hidden,
        intermediate_size=shape.intermediate,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        num_key_value_heads=shape.kv_heads,
        max_position_embeddings=shape.positions,
        tie_word_embeddings=True,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=make_tokenizer(shape.vocabulary).pad_token_id,
    )
    with torch.random.fork_rng(devices=[]):  # whoever asks for a model keeps the random numbers they had
        torch.manual_seed(seed)
        return cast_weights(LlamaForCausalLM(config), dtype).to(device)


@cache
def make_tokenizer(vocabulary: int) -> Any:
    """Text is bytes, one token each; the other ids only ever come from a model, and read as four letters."""
    bare = Tokenizer(BPE(vocab=dict(_words(vocabulary)), merges=[]))
    bare.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    bare.decoder = ByteLevelDecoder()
    bare.add_special_tokens([AddedToken(token, special=True) for token in (PAD, TURN_START, TURN_END, NEVER)])
    return PreTrainedTokenizerFast(
        tokenizer_object=bare,
        pad_token=PAD,
        eos_token=NEVER,
        additional_special_tokens=[TURN_START, TURN_END],
        clean_up_tokenization_spaces=False,
        chat_template=TEMPLATE,
    )


def _words(vocabulary: int) -> list[tuple[str, int]]:
    """Everything but `NEVER`, whose id is then the first that the model does not have."""
    alphabet = sorted(ByteLevel.alphabet())
    control = [PAD, TURN_START, TURN_END]
    fillers = islice(product(ascii_lowercase, repeat=4), vocabulary - len(alphabet) - len(control))
    words = [*alphabet, *map("".join, fillers), *control]
    return [(word, index) for index, word in enumerate(words)]
