"""A Hugging Face causal LM over the paged cache: chunks in, sampled tokens out.

The model runs unmodified, through its own forward (which may scale or soft-cap logits), with our attention. `verify`
checks that this is right for a given model: it compares logits with those of the model's own attention and refuses a
model that differs. Nothing here knows the event loop or how long requests live.
"""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.compute.attention import LENGTH_DEPENDENT_ROPE, short_windows
from agent_r1.engines.base import Sampling
from agent_r1.engines.local.attention_interface import PAGED, record_windows, register
from agent_r1.engines.local.request import Chunk, ReadDraws, Request
from agent_r1.engines.local.weights import copy_weights
from agent_r1.errors import ConfigError, UnsupportedModelError
from agent_r1.vision.eyes import Eyes, Sight
from agent_r1.vision.picture_format import PictureFormat
from agent_r1.vision.pictures import by_key

logger = logging.getLogger(__name__)

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}

NUM_PROBES = 3  # pairs of sequences that a model is verified with
PROBE_BLOCKS = 12  # one for each token of a pair, whatever the block size


class ModelRunner(ABC):
    """Owns the model and its cache."""

    overlaps: bool  # `launch` returns before the work is done, and may continue work that is not done yet
    max_stop_ids: int | None = None  # limit on the stop ids of a request

    def __init__(self, model: PreTrainedModel, pictures: PictureFormat | None = None) -> None:
        register()
        self.eyes = None if pictures is None else Eyes(model, pictures)
        self.model: Any = model.eval().requires_grad_(False)
        self.config: Any = model.config.get_text_config()
        self.device: torch.device = model.device
        for name, buffer in model.named_buffers():
            if "inv_freq" in name and buffer.dtype != torch.float32:  # angles would be off after some hundred tokens
                raise ConfigError(
                    f"{name} of {type(model).__name__} is {buffer.dtype}, which is too coarse: use "
                    "cast_weights(model, dtype) instead of model.to(dtype)"
                )

    @property
    def decoder(self) -> Any:
        """The model without the tower that looks at pictures, if it has one."""
        return self.model if self.eyes is None else self.eyes.decoder

    @abstractmethod
    def launch(self, chunks: Sequence[Chunk]) -> ReadDraws:
        """Run the chunks of a step."""

    @abstractmethod
    def clear_cache(self) -> None:
        """Overwrite the cache with zeros."""

    @abstractmethod
    def logits_of(self, steps: Sequence[Sequence[Chunk]]) -> Tensor:
        """Run steps in an empty cache; returns the logits that the last step samples from, [B, V]."""

    def prepare(self) -> None:  # noqa: B027 (nothing to do on a CPU)
        """Do what would make the first steps slow, once the model is verified."""

    def close(self) -> None:  # noqa: B027
        """Free device memory."""

    @torch.inference_mode()
    def plain_logits(self) -> list[Tensor]:
        """For `verify`: logits with the model's own attention after each pair of probes, [2, V]."""
        layers = set(getattr(self.config, "layer_types", None) or ()) - SUPPORTED_LAYERS
        if layers:
            raise UnsupportedModelError(f"LocalEngine does not support layers of type {sorted(layers)}")
        with short_windows(self.model):
            expected = [
                torch.cat([self.model(input_ids=self._batch(ids), use_cache=False).logits[:, -1] for ids in probes])
                for probes in self._probes()
            ]
        fix_rope(self.model)
        return expected

    def _batch(self, ids: list[int]) -> Tensor:
        return torch.tensor([ids], device=self.device)

    def _probes(self) -> list[tuple[list[int], list[int]]]:
        """Pairs of short sequences from the middle of the vocabulary: control tokens are at its ends."""
        vocab = self.config.vocab_size
        starts = [vocab * (3 + number) // 10 for number in range(NUM_PROBES)]
        return [
            ([(start + 5 * i) % vocab for i in range(4)], [(start + 2 + 7 * i) % vocab for i in range(8)])
            for start in starts
        ]

    @torch.inference_mode()
    def verify(self, expected: Sequence[Tensor]) -> None:
        """Switch the model to paged attention, and check that its logits stay the same.

        One pair of probes that agrees is enough, since a whole vocabulary does not agree by chance. One that differs is
        not enough to refuse: large models have enormous activations on a few tokens, and in half precision the last bit
        can decide which tokens these are. Such a difference is logged.
        """
        self.decoder.set_attn_implementation(PAGED)
        name, errors = type(self.model).__name__, list[str]()
        for probes, logits_2V in zip(self._probes(), expected, strict=True):
            with short_windows(self.model):
                error = self._compare(*probes, logits_2V)
            if error is None:
                break
            errors.append(error)
        else:
            if not any(logits_2V.isfinite().all() for logits_2V in expected):
                raise ConfigError(
                    f"the logits of {name} are not finite: its weights are damaged, or too large for {self.model.dtype}"
                )
            raise UnsupportedModelError(f"the logits of {name} differ with paged attention, by {errors[0]}")
        if errors:
            logger.warning("%s was verified on a later probe; before, its logits differed by %s", name, errors[0])

    def _compare(self, short: list[int], long: list[int], expected: Tensor) -> str | None:
        """Describe how far off the logits are; None if they agree."""

        def chunk(ids: list[int], start: int, blocks: list[int], count: int) -> Chunk:
            request = Request(session="", tokens=ids, sampling=Sampling(max_tokens=1), uniforms=np.zeros(1))
            return Chunk(request, ids, start, blocks, count)

        # All kinds of work: prefill, continued prefill beside a single token, and only single tokens.
        blocks_long, blocks_short = list(range(8)), list(range(8, PROBE_BLOCKS))
        first = [chunk(long[:5], 0, blocks_long, 0), chunk(short[:2], 0, blocks_short, 0)]
        second = [chunk(short[2:3], 2, blocks_short, 1), chunk(long[5:7], 5, blocks_long, 1)]
        third = [chunk(short[3:], 3, blocks_short, 1), chunk(long[7:], 7, blocks_long, 1)]
        windows: dict[int, int | None] = {}
        with record_windows(windows):
            got = self.logits_of([first, second, third])
        self._check_layers(windows)
        return describe_difference(self.model, got, expected)

    def load_weights(self, source: Iterable[tuple[str, Tensor]]) -> None:
        copy_weights(self.model, source)
        if self.eyes is not None:
            self.eyes.forget()

    def forward(self, ids_N: Tensor, positions_N: Tensor, keep_B: Tensor, sight: Sight | None = None) -> Tensor:
        """The logits at some rows, [B, V]. Positions of a model that takes pictures are [A, N]."""
        if self.eyes is not None:
            hidden_ND = self.eyes.hidden(ids_N, positions_N, sight)
            seen_logits: Tensor = self.model.get_output_embeddings()(hidden_ND.index_select(0, keep_B))
            return seen_logits
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
        """Check that every layer called our attention, and passed its sliding window if it has one."""
        name = type(self.model).__name__
        missing = sorted(set(range(self.config.num_hidden_layers)) - set(windows))
        if missing:
            raise UnsupportedModelError(f"layers {missing} of {name} do not use transformers' AttentionInterface")
        kinds = getattr(self.config, "layer_types", None)
        if kinds is None:
            windowed = getattr(self.config, "sliding_window", None) and getattr(self.config, "use_sliding_window", True)
            kinds = ["sliding_attention" if windowed else "full_attention"] * len(windows)
        hidden = [layer for layer, kind in enumerate(kinds) if kind == "sliding_attention" and windows[layer] is None]
        if hidden:
            raise UnsupportedModelError(
                f"layers {hidden} of {name} do not pass their sliding window to the attention function"
            )


def describe_difference(model: Any, got: Tensor, expected: Tensor) -> str | None:
    """Describe how far off logits are; None if they agree."""
    body = model.get_input_embeddings().weight.dtype  # the head may have a higher precision
    tolerance = max(1e-4, 8 * torch.finfo(body).eps)
    error, scale = (got - expected).abs().max().item(), expected.abs().max().item()
    agrees = error <= tolerance * scale  # False for nan
    return None if agrees else f"{error:.3g} where the largest is {scale:.3g}"


def fix_rope(model: Any) -> None:
    """Keep the frequencies of short sequences, which the model has just run; `position_limit` excludes longer ones."""
    for module in model.modules():
        kind = getattr(module, "rope_type", None)
        if isinstance(kind, dict):
            module.rope_type = {
                layer: "default" if one in LENGTH_DEPENDENT_ROPE else one for layer, one in kind.items()
            }
        elif kind in LENGTH_DEPENDENT_ROPE:
            module.rope_type = "default"


# A picture moves the positions of what follows it, so they are not places in the sequence. The cache goes on counting
# places. Shape suffixes: A = numbers of a position, N = tokens of a step.


def shift_of(request: Request) -> int:
    """The position of a sampled token minus its place: the same for all of a response."""
    known_AL = request.positions_AL
    return 0 if known_AL is None else int(known_AL.max(initial=-1)) + 1 - known_AL.shape[1]


def positions_of(chunks: Sequence[Chunk], form: PictureFormat) -> NDArray[np.int64]:
    """Return the positions of the chunks' tokens, [A, N]."""
    parts = []
    for chunk in chunks:
        known_AL, sampled = chunk.request.positions_AL, chunk.start
        if known_AL is not None:
            parts.append(known_AL[:, chunk.start : chunk.end])
            sampled = max(sampled, known_AL.shape[1])
        parts.append(np.tile(np.arange(sampled, chunk.end) + shift_of(chunk.request), (form.axes, 1)))
    return np.concatenate(parts, axis=1)


def sight_of(chunks: Sequence[Chunk], form: PictureFormat) -> Sight | None:
    """The pictures that the chunks show."""
    shown = [chunk for chunk in chunks if chunk.ids and min(chunk.ids) < 0]
    if not shown:
        return None
    ids_N = np.array([token for chunk in chunks for token in chunk.ids or (0,)], np.int64)
    return Sight.of(ids_N, by_key(picture for chunk in shown for picture in chunk.request.pictures.values()), form)
