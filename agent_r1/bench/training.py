"""What the learner's benchmarks train on, and the trainer they compare with: a padded step written the usual way.

Token ids, advantages and lengths are random. The loss is REINFORCE over all response tokens on both sides: without
clipping, every trained token has a gradient, so gradients of two layouts can be compared.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from agent_r1.bench.measure import free_memory
from agent_r1.types import CreditedTrajectory, Step, StopReason, Trajectory

LR = 1e-20  # AdamW does all its work and no weight moves: repeats measure the same, gradients compare the same weights
BETAS = (0.9, 0.99)
MAX_GRAD_NORM = 1e9  # measured, never reached: a gradient is compared as it came
MICRO_BATCHES = (32, 16, 8, 4, 2, 1)


class Maker:
    """Draws trajectories of given lengths."""

    def __init__(self, vocabulary: int, seed: int = 0) -> None:
        self._vocabulary = vocabulary
        self._rng = np.random.default_rng(seed)

    def ids(self, count: int) -> list[int]:
        drawn: list[int] = self._rng.integers(self._vocabulary, size=count).tolist()
        return drawn

    def spread(self, mean: int, count: int) -> list[int]:
        """Lengths from a quarter of the longest to the longest, evenly, with that mean: 0.4 to 1.6 times it."""
        lengths = self._rng.permutation(np.linspace(0.4 * mean, 1.6 * mean, count)).round()
        return [int(length) for length in lengths]

    def single(self, prompt: list[int], response_tokens: int) -> CreditedTrajectory:
        return self.credited([self.step(prompt, response_tokens)])

    def growing(self, *, steps: int, prompt: int, response: int, observation: int) -> CreditedTrajectory:
        """An episode that only appends to its context."""
        context, taken = self.ids(prompt), []
        for _ in range(steps):
            taken.append(self.step(context, response))
            context = context + taken[-1].response_ids + self.ids(observation)
        return self.credited(taken)

    def step(self, prompt: list[int], response_tokens: int) -> Step:
        response = self.ids(response_tokens)
        logprobs = [-math.log(self._vocabulary)] * response_tokens
        return Step(prompt_ids=prompt, response_ids=response, response_logprobs=logprobs)

    def credited(self, steps: list[Step]) -> CreditedTrajectory:
        advantages = [self._rng.normal(size=len(step.response_ids)).tolist() for step in steps]
        trajectory = Trajectory(row_id="bench", trajectory_id="bench", steps=steps, stop=StopReason.ANSWERED)
        return CreditedTrajectory(trajectory=trajectory, advantages=advantages)


def one_row_per_step(credited: Sequence[CreditedTrajectory]) -> list[CreditedTrajectory]:
    """The same steps and advantages, each step a trajectory of its own, so that nothing is merged."""
    return [
        CreditedTrajectory(
            trajectory=Trajectory(row_id="bench", trajectory_id="bench", steps=[step], stop=StopReason.ANSWERED),
            advantages=[advantages],
        )
        for item in credited
        for step, advantages in zip(item.trajectory.steps, item.advantages, strict=True)
    ]


@dataclass(kw_only=True)
class PaddedTrainer:
    """One optimizer step as trainers over `transformers` do it: right-padded micro-batches with an attention mask, all
    logits in fp32, bf16 autocast over fp32 weights, SDPA, fused AdamW."""

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
        """The largest that fits; it also warms the trainer up."""
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
        raise torch.cuda.OutOfMemoryError("not even one sequence at a time fits into the GPU's memory")

    def _loss(self, credited: Sequence[CreditedTrajectory]) -> Tensor:
        ids_BL, attention_BL, advantages_BL, trained_BL = (tensor.to(self.device) for tensor in _padded(credited))
        with torch.autocast(self.device.type, dtype=self.autocast_dtype, enabled=self.autocast_dtype is not None):
            logits_BLV = self.model(input_ids=ids_BL, attention_mask=attention_BL, use_cache=False).logits
        logprobs_BLV = logits_BLV[:, :-1].float().log_softmax(-1)
        logprobs_BL = logprobs_BLV.gather(-1, ids_BL[:, 1:, None])[..., 0]
        loss: Tensor = -(advantages_BL * logprobs_BL * trained_BL).sum()
        return loss


def _padded(credited: Sequence[CreditedTrajectory]) -> Iterator[Tensor]:
    """Of single-step trajectories: ids and attention mask [B, L]; advantages and what is trained [B, L - 1]."""
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
