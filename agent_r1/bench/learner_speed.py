"""`agent-r1 bench learner`: what an optimizer step costs, in time and memory.

packed    sequences of very different lengths, packed without padding

A step is a whole one: trajectories in, merged and packed, all passes, clipping, AdamW. Token ids, advantages and
lengths are random, and the loss is REINFORCE over all response tokens.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import nn

from agent_r1.bench.measure import (
    GIB,
    Cost,
    alternate,
    free_memory,
    matmul_flops,
    measure,
    synchronize,
)
from agent_r1.bench.models import BenchModel
from agent_r1.bench.results import Figures, Row
from agent_r1.bench.synthetic import SyntheticTrajectories
from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.batch.tree import PrefixSharing
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.plan.formulas import training_flops
from agent_r1.types import CreditedTrajectory

STATE_BYTES = 12  # per parameter: the fp32 weight and AdamW's two moments
# AdamW does all its work but no weight moves: repeats measure the same step, and gradients the same weights.
LR = 1e-20
BETAS = (0.9, 0.99)
MAX_GRAD_NORM = 1e9  # computed but never reached, so gradients are not scaled
PROMPT_SHARE = 0.25  # share of the prompt in a sequence of `packed`


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnerSizes:
    tokens_per_pack: int
    packed: tuple[tuple[int, int], ...]  # (mean tokens of a sequence, sequences)


FULL = LearnerSizes(tokens_per_pack=131_072, packed=((1024, 32), (4096, 16)))
QUICK = LearnerSizes(tokens_per_pack=256, packed=((24, 4),))


def make_learner(policy: PolicyModel, *, tokens_per_pack: int, **settings: Any) -> Learner:
    """A learner with the REINFORCE loss whose updates do all their work and change no weight."""
    return Learner(
        policy,
        loss=get_algorithm("reinforce").loss,
        lr=LR,
        temperature=1.0,
        betas=BETAS,
        weight_decay=0.0,
        max_grad_norm=MAX_GRAD_NORM,
        max_tokens_per_pack=tokens_per_pack,
        max_nonfinite_updates=1,
        **settings,
    )


@dataclass(kw_only=True)
class LearnerBench:
    """Builds the policy when the first row needs it, and keeps it for the others."""

    model: BenchModel
    sizes: LearnerSizes
    device: torch.device
    repeats: int
    start_up_seconds: float = field(default=0.0, init=False)
    _policy: PolicyModel | None = field(default=None, init=False)

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        return {"packed": self.packed}

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        return torch.bfloat16 if self.device.type == "cuda" else None

    def close(self) -> None:
        self._policy = None
        free_memory(self.device)

    def policy(self) -> PolicyModel:
        """The policy, warm: compilation on first use is reported as start-up time."""
        if self._policy is None:
            network = self.model.network(dtype=torch.float32, device=self.device)
            began = time.perf_counter()
            self._policy = PolicyModel(network, autocast_dtype=self.autocast_dtype, compiled=self.device.type == "cuda")
            synthetic, learner = SyntheticTrajectories(self.model.vocabulary), self.learner(self._policy)
            for count in (3, 5):  # two sizes, so that dynamic shapes are compiled
                learner.update([synthetic.single(synthetic.ids(8), 8 + count) for _ in range(count)])
            synchronize(self.device)
            self.start_up_seconds = time.perf_counter() - began
        return self._policy

    def packed(self) -> Iterator[Row]:
        synthetic, learner = SyntheticTrajectories(self.model.vocabulary), self.learner(self.policy())
        peak_flops = matmul_flops(self.device, self.autocast_dtype or torch.float32)
        for mean, sequences in self.sizes.packed:
            lengths = synthetic.spread(mean, sequences)
            prompts = [max(1, round(PROMPT_SHARE * length)) for length in lengths]
            batch = [synthetic.single(synthetic.ids(p), n - p) for p, n in zip(prompts, lengths, strict=True)]
            learner.update(batch)
            peak_seconds = self.flops(lengths, trained=sum(lengths) - sum(prompts)) / peak_flops
            trainers, once = self.trainers(learner, batch)
            costs = alternate(trainers, self.repeats)
            yield Row(
                name=f"packed/{sequences} sequences of {mean} tokens",
                settings={
                    **self.model.settings,
                    "mean": mean,
                    "sequences": sequences,
                    "tokens_per_pack": self.sizes.tokens_per_pack,
                },
                headline="tokens_per_second",
                repeats=[self.packed_figures(each, sum(lengths), peak_seconds) for each in costs],
                once=once | {"matmul_tflops": peak_flops / 1e12, "start_up_seconds": self.start_up_seconds},
            )

    def trainers(
        self, learner: Learner, batch: list[CreditedTrajectory]
    ) -> tuple[dict[str, Callable[[], Cost]], Figures]:
        """Functions that take one step, by name, with figures about them; subclasses add other trainers."""
        return {"packed": partial(self.cost, learner.policy.model, partial(learner.update, batch))}, {}

    def packed_figures(self, costs: dict[str, Cost], tokens: int, peak_seconds: float) -> Figures:
        """`peak_seconds`: how long the needed FLOPs take at the rate of a large matrix product."""
        packed = costs["packed"]
        figures = {
            "seconds": packed.seconds,
            "tokens_per_second": tokens / packed.seconds,
            "mfu": peak_seconds / packed.seconds,
        }
        return figures | ({"peak_gib": self.peak_gib(packed)} if self.device.type == "cuda" else {})

    def peak_gib(self, cost: Cost) -> float:
        """Weights, optimizer state, and the most that a step adds to them."""
        return (STATE_BYTES * self.model.parameters + cost.added_bytes) / GIB

    def flops(self, lengths: Sequence[int], *, trained: int) -> float:
        """The FLOPs of a step over sequences of these lengths, with `trained` response tokens in all."""
        return training_flops(
            lengths,
            trained=trained,
            body_parameters=self.model.body_parameters,
            head_parameters=self.model.head_parameters,
            attention_width=self.model.attention_width,
        )

    def learner(self, policy: PolicyModel, prefix_sharing: PrefixSharing = "off") -> Learner:
        return make_learner(policy, tokens_per_pack=self.sizes.tokens_per_pack, prefix_sharing=prefix_sharing)

    def cost(self, model: nn.Module, step: Callable[[], object]) -> Cost:
        """Gradients of the last step are dropped first, so that this step's gradients count as added memory."""
        model.zero_grad(set_to_none=True)
        return measure(step, self.device)
