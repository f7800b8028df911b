"""Steps on a CPU: one forward per step, on the engine's worker thread."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor
from transformers import PreTrainedModel

from agent_r1.engines.local.attention_interface import running
from agent_r1.engines.local.cpu.cpu_attention import CpuStep
from agent_r1.engines.local.cpu.cpu_cache import CpuCache
from agent_r1.engines.local.model_runner import PROBE_BLOCKS, ModelRunner
from agent_r1.engines.local.request import Chunk, Draw, ReadDraws
from agent_r1.engines.local.sampling import sample
from agent_r1.vision.eyes import Eyes, Sight
from agent_r1.vision.picture_format import PictureFormat
from agent_r1.vision.pictures import by_key


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
        ids: list[int] = []
        positions: list[int] = []
        last: list[int] = []
        draws: list[int] = []
        for chunk in chunks:
            ids += chunk.ids
            positions += range(chunk.start, chunk.end)
            if chunk.count:
                draws += [len(last)] * (1 + len(chunk.twins))
                last.append(len(ids) - 1)
        keep = torch.tensor(last, dtype=torch.int64)
        with running(CpuStep(chunks, cache)):
            if self.eyes is None:
                logits = self.forward(torch.tensor(ids), torch.tensor(positions), keep)
            else:
                logits = self.forward(torch.tensor(ids), _positions(chunks, self.eyes), keep, _sight(chunks, self.eyes))
        return logits if len(draws) == len(last) else logits[torch.tensor(draws)]


def _positions(chunks: Sequence[Chunk], eyes: Eyes) -> Tensor:
    """[A, N]: the positions of a prompt's tokens, which pictures shift, and then one more for each sampled token."""
    parts = []
    for chunk in chunks:
        known_AL = chunk.request.positions_AL
        if known_AL is None:  # a probe
            known_AL = eyes.form.positions(np.arange(chunk.end), {})
        start, end, length = chunk.start, chunk.end, known_AL.shape[1]
        after_L = known_AL.max(initial=-1) + 1 + np.arange(max(start, length) - length, max(end - length, 0))
        parts += [known_AL[:, start:end], np.tile(after_L, (len(known_AL), 1))]
    return torch.from_numpy(np.concatenate(parts, axis=1))


def _sight(chunks: Sequence[Chunk], eyes: Eyes) -> Sight | None:
    shown = [chunk for chunk in chunks if min(chunk.ids) < 0]
    if not shown:
        return None
    ids_N = np.array([token for chunk in chunks for token in chunk.ids], np.int64)
    return Sight.of(ids_N, by_key(p for chunk in shown for p in chunk.request.pictures.values()), eyes.form)
