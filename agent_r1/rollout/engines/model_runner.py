"""One step of a Hugging Face causal LM over the paged cache: chunks in, sampled tokens out.

The model runs unmodified, through its own forward (so logit scaling and soft-capping are its own), with our attention.
Whether that is right for a given model is not assumed: `verify` compares the first logits with the model's own
attention and refuses a model that differs. Nothing here knows requests' lifetimes or the event loop.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.agent.sampler import Sampling
from agent_r1.errors import ConfigError, DataError, did_you_mean
from agent_r1.rollout.engines.attention import PAGED, StepLayout, register, running
from agent_r1.rollout.engines.kv_cache import KVCache
from agent_r1.rollout.engines.sampling import sample
from agent_r1.rollout.engines.scheduler import Chunk, Request

SUPPORTED_LAYERS = {"full_attention", "sliding_attention"}
# These rescale all positions by the longest one in the batch, so one sequence would change the logits of another.
BATCH_DEPENDENT_ROPE = {"dynamic", "longrope"}


class ModelRunner:
    """Owns the model and its cache. Every method but the constructor runs on the engine's one worker thread."""

    def __init__(self, model: PreTrainedModel, *, num_blocks: int, block_size: int) -> None:
        register()
        self.model: Any = model.eval().requires_grad_(False)
        self.cache = KVCache(num_blocks=num_blocks, block_size=block_size)
        self.config: Any = model.config.get_text_config()
        self._device: torch.device = model.device

    @torch.inference_mode()
    def step(self, chunks: Sequence[Chunk]) -> tuple[list[int], list[float]]:
        """Run the chunks; one token and log-prob for each request that draws, in order."""
        self.cache.copy([pair for chunk in chunks for pair in chunk.copies])
        layout = StepLayout.of(chunks, self.cache, self._device)
        logits_BV = self._logits(chunks, layout)
        self.cache.copy(layout.places.copies)
        drawing = [request for chunk in chunks for request in chunk.draws]
        if not drawing:
            return [], []
        uniforms = [request.uniforms[len(request.logprobs)] for request in drawing]
        return sample(logits_BV, [request.sampling for request in drawing], uniforms)

    @torch.inference_mode()
    def verify(self) -> None:
        """Switch the model to paged attention, after proving on two short sequences that its logits stay the same."""
        _check_config(self.config)
        vocab = self.config.vocab_size
        long, short = [(7 * i + 3) % vocab for i in range(8)], [(5 * i + 1) % vocab for i in range(4)]
        expected = torch.cat([self._plain_logits(long), self._plain_logits(short)])
        self.model.set_attn_implementation(PAGED)

        # Both kinds of work at once: prefill in two chunks beside prefill and one decoded token, in separate blocks.
        probe = KVCache(num_blocks=len(long) + len(short), block_size=self.cache.block_size)
        blocks_long, blocks_short = list(range(len(long))), list(range(len(long), probe.num_blocks))

        def chunk(ids: list[int], start: int, blocks: list[int], samples: bool) -> Chunk:
            request = Request(session="", tokens=ids, sampling=Sampling(max_tokens=1), uniforms=np.zeros(1))
            return Chunk(request, ids, start, blocks, samples)

        first = [chunk(long[:5], 0, blocks_long, False), chunk(short[:3], 0, blocks_short, False)]
        self._logits(first, StepLayout.of(first, probe, self._device))
        second = [chunk(short[3:], 3, blocks_short, True), chunk(long[5:], 5, blocks_long, True)]
        layout = StepLayout.of(second, probe, self._device)
        got = self._logits(second, layout).flip(0)
        self._check_layers(layout.windows)
        self._check_logits(got, expected)

    @torch.no_grad()
    def load_weights(self, weights: Mapping[str, Tensor]) -> None:
        """Copy into the model's own tensors; checked as a whole first, so an error changes nothing."""
        targets: dict[str, Tensor] = self.model.state_dict(keep_vars=True)
        unknown = [name for name in weights if name not in targets]
        if unknown:
            raise DataError(f"the model has no weight {unknown[0]!r}.{did_you_mean(unknown[0], targets)}")
        for name, tensor in weights.items():
            if tensor.shape != targets[name].shape:
                raise DataError(
                    f"weight {name!r} has shape {tuple(tensor.shape)}, the model needs {tuple(targets[name].shape)}"
                )
        # Tied weights are one parameter under several names; any of them will do, but they must agree.
        given: dict[int, str] = {}
        for name in weights:
            other = given.setdefault(id(targets[name]), name)
            if other != name and not torch.equal(weights[name], weights[other]):
                raise DataError(f"{name!r} and {other!r} are tied in the model, but were given different values")
        missing = [name for name, parameter in self.model.named_parameters() if id(parameter) not in given]
        if missing:
            raise DataError(
                f"{len(missing)} of the model's weights were not given, {missing[0]!r} first. "
                "Pass all of them, as model.state_dict() or model.named_parameters() names them."
            )
        for name in given.values():
            targets[name].copy_(weights[name])

    def _logits(self, chunks: Sequence[Chunk], layout: StepLayout) -> Tensor:
        """Logits after the last token of each chunk that samples, once for every request that draws from it, [B, V]."""
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        draws: list[int] = []
        for chunk in chunks:
            ids += chunk.ids
            positions += range(chunk.start, chunk.end)
            if chunk.samples:
                draws += [len(last)] * (1 + len(chunk.twins))
                last.append(len(ids) - 1)
        index = torch.tensor([ids, positions], device=self._device)
        keep = torch.tensor(last, dtype=torch.int64, device=self._device)
        with running(layout):
            output = self.model(
                input_ids=index[:1], position_ids=index[1:], use_cache=False, logits_to_keep=keep, return_dict=True
            )
        logits: Tensor = output.logits[0]
        return logits if len(draws) == len(last) else logits[torch.tensor(draws, device=self._device)]

    def _plain_logits(self, ids: list[int]) -> Tensor:
        logits: Tensor = self.model(input_ids=torch.tensor([ids], device=self._device), use_cache=False).logits[:, -1]
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

    def _check_logits(self, got: Tensor, expected: Tensor) -> None:
        tolerance = max(1e-4, 8 * torch.finfo(expected.dtype).eps)
        error, scale = (got - expected).abs().max().item(), expected.abs().max().item()
        if not error <= tolerance * scale:  # also refuses nan
            raise ConfigError(
                f"{type(self.model).__name__} gives other logits with paged attention than with its own: they differ "
                f"by {error:.3g} where the largest is {scale:.3g}. Use another engine for this model."
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
