"""Steps on a CPU: one forward per step, on the engine's worker thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.engines.local.attention_interface import running
from agent_r1.engines.local.cpu.cpu_attention import CpuCache, CpuStep
from agent_r1.engines.local.model_runner import PROBE_BLOCKS, ModelRunner, positions_of, sight_of
from agent_r1.engines.local.request import Chunk, Draw, ReadDraws
from agent_r1.engines.local.sampling import sample
from agent_r1.vision.picture_format import PictureFormat


class CpuRunner(ModelRunner):
    """Computes a step before `launch` returns."""

    overlaps = False

    def __init__(
        self, model: PreTrainedModel, *, num_blocks: int, block_size: int, pictures: PictureFormat | None = None
    ) -> None:
        super().__init__(model, pictures)
        self.cache = CpuCache(num_blocks=num_blocks, block_size=block_size)

    @torch.inference_mode()
    def launch(self, chunks: Sequence[Chunk]) -> ReadDraws:
        self.cache.copy([pair for chunk in chunks for pair in chunk.copies])
        logits_BV = self._logits(chunks, self.cache)
        drawing = [request for chunk in chunks for request in chunk.draws]
        drawn: list[Draw] = []
        if drawing:
            uniforms = [request.uniforms[len(request.logprobs)] for request in drawing]
            sampled = sample(logits_BV, [request.sampling for request in drawing], uniforms)
            drawn = [([token], [logprob], kept) for token, logprob, kept in zip(*sampled, strict=True)]
        return lambda: drawn

    def clear_cache(self) -> None:
        self.cache.clear()

    def logits_of(self, steps: Sequence[Sequence[Chunk]]) -> Tensor:
        cache = CpuCache(num_blocks=PROBE_BLOCKS, block_size=self.cache.block_size)
        return [self._logits(chunks, cache) for chunks in steps][-1]

    def _logits(self, chunks: Sequence[Chunk], cache: CpuCache) -> Tensor:
        """Logits after the last token of each sampling chunk, repeated for each of its requests, [B, V]."""
        ids = torch.tensor([token for chunk in chunks for token in chunk.ids])
        last = np.cumsum([chunk.length for chunk in chunks]) - 1
        keep = torch.from_numpy(last[[chunk.count > 0 for chunk in chunks]])
        with running(CpuStep(chunks, cache)):
            if self.eyes is None:
                positions = torch.tensor([place for chunk in chunks for place in range(chunk.start, chunk.end)])
                logits = self.forward(ids, positions, keep)
            else:
                form = self.eyes.form
                logits = self.forward(ids, torch.from_numpy(positions_of(chunks, form)), keep, sight_of(chunks, form))
        sampling = [chunk for chunk in chunks if chunk.count]
        rows = [row for row, chunk in enumerate(sampling) for _ in chunk.draws]
        return logits if len(rows) == len(sampling) else logits[torch.tensor(rows)]
