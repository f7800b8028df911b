"""The trainer that packing is compared with: a padded step written the usual way."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from agent_r1.bench.learner_speed import BETAS, LR, MAX_GRAD_NORM
from agent_r1.bench.measure import free_memory
from agent_r1.types import CreditedTrajectory

MICRO_BATCHES = (32, 16, 8, 4, 2, 1)


@dataclass(kw_only=True)
class PaddedTrainer:
    """One optimizer step as trainers on top of `transformers` take it: right-padded micro-batches with an attention
    mask, all logits in fp32, bf16 autocast over fp32 weights, SDPA, fused AdamW."""

    model: Any  # a transformers causal LM in float32
    autocast_dtype: torch.dtype | None

    def __post_init__(self) -> None:
        self.model.set_attn_implementation("sdpa")
        self._adam = torch.optim.AdamW(self.model.parameters(), lr=LR, betas=BETAS, weight_decay=0.0, fused=True)

    @property
    def device(self) -> torch.device:
        device: torch.device = self.model.device
        return device

    def step(self, credited: Sequence[CreditedTrajectory], micro_batch: int) -> None:
        total = sum(item.trajectory.num_response_tokens for item in credited)
        self._adam.zero_grad(set_to_none=True)
        for start in range(0, len(credited), micro_batch):
            (self._loss(credited[start : start + micro_batch]) / total).backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), MAX_GRAD_NORM)
        self._adam.step()

    def largest_micro_batch(self, credited: Sequence[CreditedTrajectory]) -> int:
        """The largest that fits; finding it also warms up the trainer."""
        for micro_batch in MICRO_BATCHES:
            if micro_batch > len(credited):
                continue
            try:
                self.step(credited, micro_batch)
            except torch.cuda.OutOfMemoryError:
                self._adam.zero_grad(set_to_none=True)
                free_memory(self.device)
            else:
                return micro_batch
        raise torch.cuda.OutOfMemoryError("a micro-batch of one sequence does not fit into GPU memory")

    def _loss(self, credited: Sequence[CreditedTrajectory]) -> Tensor:
        ids_BL, attention_BL, advantages_BL, trained_BL = (tensor.to(self.device) for tensor in _pad(credited))
        with torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            logits_BLV = self.model(input_ids=ids_BL, attention_mask=attention_BL, use_cache=False).logits
        logprobs_BLV = logits_BLV[:, :-1].float().log_softmax(-1)
        logprobs_BL = logprobs_BLV.gather(-1, ids_BL[:, 1:, None])[..., 0]
        loss: Tensor = -(advantages_BL * logprobs_BL * trained_BL).sum()
        return loss


def _pad(credited: Sequence[CreditedTrajectory]) -> Iterator[Tensor]:
    """Single-step trajectories as ids and attention mask [B, L], advantages and trained tokens [B, L - 1]."""
    pairs = [(item.trajectory.steps[0], item.advantages[0]) for item in credited]
    longest = max(len(step.prompt_ids) + len(step.response_ids) for step, _ in pairs)
    ids, seen, advantages, trained = [], [], [], []
    for step, values in pairs:
        before, after = len(step.prompt_ids), len(step.response_ids)
        rest = longest - before - after
        ids.append(step.prompt_ids + step.response_ids + [0] * rest)
        seen.append([1] * (before + after) + [0] * rest)
        advantages.append([0.0] * (before - 1) + values + [0.0] * rest)
        trained.append([0.0] * (before - 1) + [1.0] * after + [0.0] * rest)
    yield from (torch.tensor(column) for column in (ids, seen, advantages, trained))
