"""A Hugging Face causal LM over the paged cache: chunks in, sampled tokens out.

The model runs unmodified, through its own forward (so logit scaling and soft-capping are its own), with our attention.
Whether that is right for a given model is not assumed: `verify` compares the first logits with the model's own
attention and refuses a model that differs. Nothing here knows requests' lifetimes or the event loop.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.engines.base import Sampling
from agent_r1.engines.local.attention_interface import PAGED, noting, register
from agent_r1.engines.local.fp32_head import with_head_weights
from agent_r1.engines.local.request import Chunk, Request
from agent_r1.engines.local.sampling import Kept
from agent_r1.errors import ConfigError, DataError, did_you_mean

logger = logging.getLogger(__name__)

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
# These rescale all positions by the longest one in the batch, so one sequence would change the logits of another.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}

NUM_PROBES = 3  # pairs of sequences that a model is verified with
PROBE_BLOCKS = 12  # one for each token of a pair, whatever the block size

# Angles are these times positions: in half precision they would be off by whole turns after some thousand tokens.
FREQUENCIES = "inv_freq"

# Tokens, log-probs and what was sampled from, for each request that draws. The last is None if no request asks for it.
Drawn = tuple[Sequence[Sequence[int]], Sequence[Sequence[float]], Sequence[Kept | None] | None]


def cast_weights(model: Any, dtype: torch.dtype) -> Any:
    """`model.to(dtype)` for the weights alone; buffers, rotary frequencies among them, stay as they are."""
    for parameter in model.parameters():
        parameter.data = parameter.data.to(dtype)
    return model


class ModelRunner(ABC):
    """Owns the model and its cache."""

    overlaps: bool  # `launch` returns before the work is done, and goes on from work that is not done yet
    max_stop_ids: int | None = None  # that a request may have

    def __init__(self, model: PreTrainedModel) -> None:
        register()
        self.model: Any = model.eval().requires_grad_(False)
        self.config: Any = model.config.get_text_config()
        self.device: torch.device = model.device
        for name, buffer in model.named_buffers():
            if FREQUENCIES in name and buffer.dtype != torch.float32:
                raise ConfigError(
                    f"{name} of {type(model).__name__} is in {buffer.dtype}, too coarse for positions after some "
                    "hundred tokens: use cast_weights(model, dtype) instead of model.to(dtype)"
                )

    @abstractmethod
    def launch(self, chunks: Sequence[Chunk]) -> Callable[[], Drawn | None]:
        """Run the chunks. What is returned says what was drawn, once it is there."""

    def prepare(self) -> None:
        """Do what would make the first steps slow, now that the model is known to work."""
        return

    @abstractmethod
    def clear_cache(self) -> None:
        """Overwrite what the cache holds."""

    def close(self) -> None:
        """Let go of the device's memory."""
        return

    @abstractmethod
    def logits_of(self, steps: Sequence[Sequence[Chunk]]) -> Tensor:
        """Run chunks step after step in an empty cache; the logits that the last step samples from, [B, V]."""

    @torch.inference_mode()
    def plain_logits(self) -> list[Tensor]:
        """What the model itself, with its own attention, says after two short sequences, [2, V], again and again with
        others; for `verify`."""
        _check_config(self.config)
        return [
            torch.cat([self.model(input_ids=self._batch(ids), use_cache=False).logits[:, -1] for ids in probes])
            for probes in self._probes()
        ]

    def _batch(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.device)

    def _probes(self) -> list[tuple[list[int], list[int]]]:
        """From the middle of the vocabulary: control tokens, which stand at its ends, say little about a model."""
        vocab = self.config.vocab_size
        starts = [vocab * (3 + number) // 10 for number in range(NUM_PROBES)]
        return [
            ([(start + 5 * i) % vocab for i in range(4)], [(start + 2 + 7 * i) % vocab for i in range(8)])
            for start in starts
        ]

    @torch.inference_mode()
    def verify(self, expected: Sequence[Tensor]) -> None:
        """Switch the model to paged attention, after proving that its logits stay the same.

        Agreement on one pair of sequences is proof enough: nothing else agrees on a whole vocabulary. Disagreement is
        proof only if they all disagree. Large models put enormous activations on a few tokens, and which tokens that
        are can hang on the last bit of half precision, on either side.
        """
        self.model.set_attn_implementation(PAGED)
        pairs = zip(self._probes(), expected, strict=True)
        compared = (self._compare(*probes, logits_2V) for probes, logits_2V in pairs)
        errors = list(takewhile(lambda error: error is not None, compared))
        if len(errors) == len(expected):
            if not any(logits_2V.isfinite().all() for logits_2V in expected):
                raise ConfigError(
                    f"{type(self.model).__name__} gives logits that are not finite: its weights are damaged, or too "
                    f"large for {self.model.dtype}"
                )
            raise ConfigError(
                f"{type(self.model).__name__} gives other logits with paged attention than with its own: they differ "
                f"by {errors[0]}. Use another engine for this model."
            )
        if errors:
            logger.warning(
                "%s was verified on probe %d of %d; before that its logits with paged attention differed from its own, "
                "first by %s. In half precision that can be rounding; in float32 it should not happen",
                type(self.model).__name__,
                len(errors) + 1,
                len(expected),
                errors[0],
            )

    def _compare(self, short: list[int], long: list[int], expected: Tensor) -> str | None:
        """How far off the logits are, if they are."""

        def chunk(ids: list[int], start: int, blocks: list[int], count: int) -> Chunk:
            request = Request(session="", tokens=ids, sampling=Sampling(max_tokens=1), uniforms=np.zeros(1))
            return Chunk(request, ids, start, blocks, count)

        # All kinds of work: prefill, prefill that goes on beside a single token, and single tokens alone.
        blocks_long, blocks_short = list(range(8)), list(range(8, PROBE_BLOCKS))
        first = [chunk(long[:5], 0, blocks_long, 0), chunk(short[:2], 0, blocks_short, 0)]
        second = [chunk(short[2:3], 2, blocks_short, 1), chunk(long[5:7], 5, blocks_long, 1)]
        third = [chunk(short[3:], 3, blocks_short, 1), chunk(long[7:], 7, blocks_long, 1)]
        windows: dict[int, int | None] = {}
        with noting(windows):
            got = self.logits_of([first, second, third])
        self._check_layers(windows)
        body = self.model.get_input_embeddings().weight.dtype  # the head may have a higher precision
        tolerance = max(1e-4, 8 * torch.finfo(body).eps)
        error, scale = (got - expected).abs().max().item(), expected.abs().max().item()
        same = error <= tolerance * scale  # nan is not
        return None if same else f"{error:.3g} where the largest is {scale:.3g}"

    @torch.no_grad()
    def load_weights(self, source: Iterable[tuple[str, Tensor]]) -> None:
        """Copy into the model's own tensors, one at a time: a source may compute each when it is asked for."""
        targets: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        given: dict[int, str] = {}
        for name, tensor in with_head_weights(self.model, source):
            target = targets.get(name)
            if target is None:
                raise DataError(f"the model has no weight {name!r}.{did_you_mean(name, targets)}")
            if tensor.shape != target.shape:
                raise DataError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the model needs {tuple(target.shape)}"
                )
            # Tied weights are one parameter under several names; any of them will do, but they must agree.
            other = given.setdefault(id(target), name)
            if other != name and not torch.equal(target, tensor.to(target)):
                raise DataError(f"{name!r} and {other!r} are tied in the model, but were given different values")
            target.copy_(tensor)
        missing = [name for name, parameter in self.model.named_parameters() if id(parameter) not in given]
        if missing:
            raise DataError(
                f"{len(missing)} of the model's weights were not given, {missing[0]!r} first. "
                "Pass all of them, as model.state_dict() or model.named_parameters() names them."
            )

    def forward(self, ids_N: Tensor, positions_N: Tensor, keep_B: Tensor) -> Tensor:
        """Logits at the rows to keep, [B, V]."""
        output = self.model(
            input_ids=ids_N[None],
            position_ids=positions_N[None],
            use_cache=False,
            logits_to_keep=keep_B,
            return_dict=True,
        )
        logits: Tensor = output.logits[0]
        return logits

    def _check_layers(self, windows: Mapping[int, int | None]) -> None:
        """Every layer went through our attention, and told us its window if it has one."""
        name = type(self.model).__name__
        silent = sorted(set(range(self.config.num_hidden_layers)) - set(windows))
        if silent:
            raise ConfigError(f"layers {silent} of {name} do not use transformers' AttentionInterface")
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            windowed = getattr(self.config, "sliding_window", None) and getattr(self.config, "use_sliding_window", True)
            kinds = ["sliding_attention" if windowed else "full_attention"] * len(windows)
        hidden = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention" and windows[layer] is None]
        if hidden:
            raise ConfigError(
                f"layers {hidden} of {name} have a sliding window but do not pass it to their attention function, "
                "so LocalEngine cannot honour it. Use another engine for this model."
            )


def _check_config(config: Any) -> None:
    """What a short probe could not notice."""
    unsupported = set(getattr(config, "layer_types", None) or ()) - SUPPORTED_LAYERS
    if unsupported:
        raise ConfigError(
            f"LocalEngine caches keys and values of {sorted(SUPPORTED_LAYERS)} layers; "
            f"this model also has {sorted(unsupported)}. Use another engine for it."
        )
    rope = getattr(config, "rope_parameters", None) or {}
    kinds = {value["rope_type"] for value in (rope, *rope.values()) if isinstance(value, dict) and "rope_type" in value}
    if kinds & BATCH_DEPENDENT_ROPE:
        raise ConfigError(
            f"rope_type {sorted(kinds & BATCH_DEPENDENT_ROPE)} depends on the longest sequence of a batch, so results "
            "would depend on what else runs. Use a model with another rope_type, or another engine."
        )
