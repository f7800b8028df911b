"""The models that are measured, with random weights, and a tokenizer that fits any of them.

Speed does not depend on the weights, so none are downloaded. The end-of-text token lies beyond the model's vocabulary:
it cannot be sampled, so every response has exactly the requested length, while both sides of a comparison still look
for it.
"""

from __future__ import annotations

from copy import deepcopy
from dataclasses import asdict, dataclass
from functools import cache, cached_property
from itertools import islice, product
from string import ascii_lowercase
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import AutoConfig, AutoModelForCausalLM, LlamaConfig, PreTrainedTokenizerFast

from agent_r1.engines.local.gpu.gpu_attention import bytes_per_token, key_value_shape
from agent_r1.engines.local.weights import cast_weights
from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.plan.shapes import SHAPES

PAD, TURN_START, TURN_END, NEVER = "<|pad|>", "<|im_start|>", "<|im_end|>", "<|never|>"
TEMPLATE = (
    "{%- set independent_turns = true %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}"
    "{% for call in m.tool_calls or [] %}<tool_call>{{ call.function | tojson }}</tool_call>{% endfor %}"
    "<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


class BenchModel:
    """A causal LM with random weights, and the sizes that set its cost."""

    def __init__(self, config: Any, settings: dict[str, Any]) -> None:
        self.config = config
        self.settings = settings  # identify the model in a row of results

    @classmethod
    def load(cls, path: str) -> BenchModel:
        """The architecture and sizes of a model directory or hub name; only its config.json is read."""
        try:
            config = AutoConfig.from_pretrained(path).get_text_config()
        except (OSError, ValueError) as error:
            raise ConfigError(f"--model {path}: cannot read its configuration: {error}") from error
        return cls(config, {"model": path})

    @property
    def vocabulary(self) -> int:
        size: int = self.config.vocab_size
        return size

    @property
    def attention_width(self) -> int:
        """Multiply-adds for one pair of query and key, over all layers."""
        size: int = (
            self.config.num_hidden_layers * self.config.num_attention_heads * key_value_shape(self.config)["size"]
        )
        return size

    @property
    def head_parameters(self) -> int:
        size: int = self.config.vocab_size * self.config.hidden_size
        return size

    @property
    def body_parameters(self) -> int:
        """Weights that every token is multiplied with. Looking up an embedding is not a multiplication."""
        matrices: list[int] = [p.numel() for p in self._empty.base_model.parameters() if p.ndim > 1]
        return sum(matrices) - self.head_parameters

    @property
    def parameters(self) -> int:
        return sum(p.numel() for p in self._empty.parameters())

    def kv_bytes_per_token(self, dtype: torch.dtype) -> int:
        return bytes_per_token(self.config, dtype)

    def network(self, *, dtype: torch.dtype, device: torch.device, seed: int = 0) -> Any:
        """Equal seeds give equal weights; the caller's random state is left alone."""
        # On the device from the start: drawing billions of weights on a CPU takes minutes.
        with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []), torch.device(device):
            torch.manual_seed(seed)
            # A network's attention is set in its configuration, so each needs its own.
            return cast_weights(AutoModelForCausalLM.from_config(deepcopy(self.config)), dtype)

    @cached_property
    def _empty(self) -> Any:
        with torch.device("meta"):
            return AutoModelForCausalLM.from_config(self.config)


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaShape:
    """Sizes of a Llama."""

    layers: int
    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    vocabulary: int
    positions: int
    head_size: int | None = None  # None: hidden size over heads
    tied: bool = True  # whether output head and embeddings share weights

    @classmethod
    def named(cls, name: str) -> LlamaShape:
        """The sizes of `agent-r1 plan --model NAME`, or `tiny`."""
        if name == "tiny":
            return TINY
        if (known := SHAPES.get(name)) is None:
            raise ConfigError(f"--shape {name}: there are no such sizes.{did_you_mean(name, ['tiny', *SHAPES])}")
        return cls(
            layers=known.layers,
            hidden=known.hidden,
            intermediate=known.intermediate,
            heads=known.query_heads,
            kv_heads=known.key_heads,
            vocabulary=known.vocabulary,
            positions=8_192 if name == "135m" else 65_536,
            head_size=None if known.query_width == known.hidden else known.head_size,
            tied=known.tied,
        )

    def model(self) -> BenchModel:
        config = LlamaConfig(
            vocab_size=self.vocabulary,
            hidden_size=self.hidden,
            intermediate_size=self.intermediate,
            num_hidden_layers=self.layers,
            num_attention_heads=self.heads,
            num_key_value_heads=self.kv_heads,
            max_position_embeddings=self.positions,
            tie_word_embeddings=self.tied,
            head_dim=self.head_size or self.hidden // self.heads,
            bos_token_id=None,
            eos_token_id=None,
            pad_token_id=make_tokenizer(self.vocabulary).pad_token_id,
        )
        sizes = {name: value for name, value in asdict(self).items() if value not in (None, True)}  # as stored before
        return BenchModel(config, {"shape": sizes})


SMOLLM2_135M = LlamaShape(
    layers=30, hidden=576, intermediate=1536, heads=9, kv_heads=3, vocabulary=49_152, positions=8_192
)
TINY = LlamaShape(layers=2, hidden=48, intermediate=96, heads=3, kv_heads=1, vocabulary=320, positions=1_024)


@cache
def make_tokenizer(vocabulary: int) -> Any:
    """Text is bytes, one token each; the remaining ids decode to four letters."""
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
    """Every token except `NEVER`, which gets the first id beyond the model's vocabulary."""
    alphabet = sorted(ByteLevel.alphabet())
    control = [PAD, TURN_START, TURN_END]
    fillers = islice(product(ascii_lowercase, repeat=4), vocabulary - len(alphabet) - len(control))
    words = [*alphabet, *map("".join, fillers), *control]
    return [(word, index) for index, word in enumerate(words)]
