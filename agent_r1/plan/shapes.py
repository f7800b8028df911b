"""The sizes of a model that set what it costs, by name or from a Hugging Face `config.json`."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from agent_r1.errors import ConfigError

MEASURED: dict[str, Any] = json.loads((Path(__file__).parent / "measured.json").read_text(encoding="utf-8"))


@dataclass(frozen=True, slots=True)
class Shape:
    """A dense decoder: grouped-query attention and a gated MLP."""

    name: str
    layers: int
    hidden: int
    intermediate: int
    query_heads: int
    key_heads: int
    head_size: int
    vocabulary: int
    tied: bool  # output head and embeddings are the same weights

    @property
    def query_width(self) -> int:
        return self.query_heads * self.head_size

    @property
    def kv_width(self) -> int:
        return self.key_heads * self.head_size

    @property
    def layer_matrices(self) -> list[tuple[int, int]]:
        """(outputs, inputs) of the linear layers of a decoder layer: queries, keys, values, output; gate, up, down."""
        hidden, query, kv, wide = self.hidden, self.query_width, self.kv_width, self.intermediate
        attention = [(query, hidden), (kv, hidden), (kv, hidden), (hidden, query)]
        return [*attention, (wide, hidden), (wide, hidden), (hidden, wide)]

    @property
    def layer_parameters(self) -> int:
        return sum(outputs * inputs for outputs, inputs in self.layer_matrices)

    @property
    def body_parameters(self) -> int:
        """Weights of the layers, which every token is multiplied with. Norms and biases are too few to matter."""
        return self.layers * self.layer_parameters

    @property
    def head_parameters(self) -> int:
        return self.vocabulary * self.hidden

    @property
    def parameters(self) -> int:
        return self.body_parameters + self.head_parameters * (1 if self.tied else 2)

    @property
    def attention_width(self) -> int:
        return self.layers * self.query_width

    @property
    def kv_bytes(self) -> int:
        """Keys and values of one token, in bf16."""
        return 2 * 2 * self.layers * self.kv_width

    @property
    def activation_bytes(self) -> int:
        """Kept per token and layer for the backward pass, with bf16 products: two inputs of norms in fp32; in bf16 the
        normed inputs, queries, keys, values, the output of attention, and three vectors of the MLP."""
        return 12 * self.hidden + 4 * self.query_width + 4 * self.kv_width + self.mlp_bytes

    @property
    def mlp_bytes(self) -> int:
        """The part of `activation_bytes` that chunks of tokens save."""
        return 6 * self.intermediate

    def trained_matrices(self, rank: int | None) -> list[tuple[int, int]]:
        """(rows, columns) of what is trained: everything, or low-rank adapters on every linear layer but the head."""
        if rank is None:
            embeddings = [(self.vocabulary, self.hidden)] * (1 if self.tied else 2)
            return self.layers * self.layer_matrices + embeddings
        return self.layers * [size for out, into in self.layer_matrices for size in ((rank, into), (out, rank))]

    def trained_parameters(self, rank: int | None) -> int:
        return sum(rows * columns for rows, columns in self.trained_matrices(rank))


SHAPES = {name: Shape(name, *sizes) for name, sizes in MEASURED["shapes"].items() if name != "columns"}


def find_shape(model: str) -> Shape:
    """Return the shape of a size such as `8b`, or that of a model directory, `config.json` or hub name."""
    if (known := SHAPES.get(model.lower())) is not None:
        return known
    if not Path(model).expanduser().exists() and model.count("/") != 1:
        raise ConfigError(f"--model {model}: neither a size ({', '.join(SHAPES)}) nor a model directory or hub name")
    from transformers import AutoConfig  # knows each architecture's defaults

    try:
        config = AutoConfig.from_pretrained(str(Path(model).expanduser()))
        sees = getattr(config, "vision_config", None) is not None
        name = f"{model} (its decoder; the vision tower is not counted)" if sees else model
        return read_shape(name, config.get_text_config())
    except (OSError, ValueError, AttributeError) as error:
        raise ConfigError(f"--model {model}: cannot read the sizes of a dense decoder: {error}") from error


def read_shape(name: str, config: Any) -> Shape:
    """Raises AttributeError for a missing size, and ConfigError for a mixture of experts."""
    if any("expert" in key and value for key, value in config.to_dict().items()):
        raise ConfigError(f"--model {name} is a mixture of experts, which has not been measured: name a dense size")
    heads, hidden = config.num_attention_heads, config.hidden_size
    key_heads = getattr(config, "num_key_value_heads", None) or heads
    size = getattr(config, "head_dim", None) or hidden // heads
    widths = (config.num_hidden_layers, hidden, config.intermediate_size, heads, key_heads, size)
    return Shape(name, *widths, config.vocab_size, config.tie_word_embeddings)
