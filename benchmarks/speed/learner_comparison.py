"""The learner's published tables: what `agent-r1 bench learner` measures, and beside it

packed    the usual padded step
steps     T-step episodes merged into one segment each, against one row per step; gradients compared
shared    a group that shares a long prompt: the token tree against flat segments; gradients compared
sharing   the same for shorter and shorter prompts: the sharing factor from which the tree pays
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from agent_r1.bench.learner_speed import LearnerBench
from agent_r1.bench.measure import Cost, alternate
from agent_r1.bench.models import LlamaShape
from agent_r1.bench.results import Figures, Row
from agent_r1.bench.synthetic import SyntheticTrajectories
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import CreditedTrajectory, StopReason, Trajectory
from benchmarks.speed.padded_trainer import PaddedTrainer


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparisonSizes:
    fp32_layers: int  # of the model whose fp32 gradients are compared
    steps: tuple[tuple[int, int, int], ...]  # (steps of an episode, tokens of its prompt, episodes)
    response: int  # tokens of a step of `steps`
    observation: int
    groups: int
    group_size: int
    shared_prompt: int
    shared_response: int
    sharing_prompts: tuple[int, ...]


FULL = ComparisonSizes(
    fp32_layers=2,
    steps=((4, 512, 64), (16, 512, 32), (64, 512, 16), (64, 2048, 8)),
    response=16,
    observation=64,
    groups=16,
    group_size=8,
    shared_prompt=2048,
    shared_response=256,
    sharing_prompts=(16, 32, 64, 128, 256, 512),
)
QUICK = ComparisonSizes(
    fp32_layers=1,
    steps=((3, 12, 2),),
    response=4,
    observation=4,
    groups=1,
    group_size=4,
    shared_prompt=32,
    shared_response=8,
    sharing_prompts=(4, 16),
)


@dataclass(kw_only=True)
class LearnerComparison(LearnerBench):
    shape: LlamaShape  # of the model
    compared: ComparisonSizes
    _padded: PaddedTrainer | None = field(default=None, init=False)
    _fp32: PolicyModel | None = field(default=None, init=False)

    @property
    def groups(self) -> dict[str, Callable[[], Iterator[Row]]]:
        return super().groups | {"steps": self.steps, "shared": self.shared, "sharing": self.sharing}

    def close(self) -> None:
        self._padded = self._fp32 = None
        super().close()

    def trainers(
        self, learner: Learner, batch: list[CreditedTrajectory]
    ) -> tuple[dict[str, Callable[[], Cost]], Figures]:
        if self._padded is None:
            network = self.model.network(dtype=torch.float32, device=self.device)
            self._padded = PaddedTrainer(model=network, autocast_dtype=self.autocast_dtype)
        padded = self._padded
        micro_batch = padded.largest_micro_batch(batch)
        ours, once = super().trainers(learner, batch)
        theirs = partial(self.cost, padded.model, partial(padded.step, batch, micro_batch))
        return ours | {"padded": theirs}, once | {"padded_micro_batch": float(micro_batch)}

    def packed_figures(self, costs: dict[str, Cost], tokens: int, peak_seconds: float) -> Figures:
        packed, padded = costs["packed"], costs["padded"]
        figures = super().packed_figures(costs, tokens, peak_seconds) | {
            "padded_seconds": padded.seconds,
            "speed_ratio": padded.seconds / packed.seconds,
            "padded_mfu": peak_seconds / padded.seconds,
        }
        if self.device.type != "cuda":
            return figures
        return figures | {
            "padded_peak_gib": self.peak_gib(padded),
            "memory_share": self.peak_gib(packed) / self.peak_gib(padded),
        }

    def steps(self) -> Iterator[Row]:
        sizes, learner = self.compared, self.learner(self.policy())
        fp32 = self.learner(self._fp32_policy())
        for steps, prompt, episodes in sizes.steps:
            synthetic = SyntheticTrajectories(self.model.vocabulary, seed=steps)
            lengths = {"prompt": prompt, "response": sizes.response, "observation": sizes.observation}
            merged = [synthetic.growing(steps=steps, **lengths) for _ in range(episodes)]
            rows = one_row_per_step(merged)
            difference = relative_difference(gradient(learner, rows), gradient(learner, merged))
            exact = relative_difference(gradient(fp32, rows[:steps]), gradient(fp32, merged[:1]))
            costs = self._alternate(learner, rows=partial(learner.update, rows), merged=partial(learner.update, merged))
            growth = sizes.response + sizes.observation
            ends = [prompt + sizes.response + growth * step for step in range(steps)]  # of each row; the last is merged
            trained = sizes.response * steps  # either way
            bound = self.flops(ends, trained=trained) / self.flops(ends[-1:], trained=trained)
            yield Row(
                name=f"steps/{steps} steps, prompt of {prompt}",
                settings=self._settings(steps=steps, episodes=episodes, **lengths),
                headline="merged_seconds",
                repeats=[
                    {
                        "merged_seconds": each["merged"].seconds,
                        "rows_seconds": each["rows"].seconds,
                        "time_ratio": each["rows"].seconds / each["merged"].seconds,
                        "time_ratio_over_steps": each["rows"].seconds / each["merged"].seconds / steps,
                    }
                    for each in costs
                ],
                once={
                    "flops_ratio_over_steps": bound / steps,
                    "gradient_difference": difference,
                    "fp32_gradient_difference": exact,
                },
            )

    def shared(self) -> Iterator[Row]:
        yield self._tree_row("shared", self.compared.shared_prompt)

    def sharing(self) -> Iterator[Row]:
        rows = [self._tree_row("sharing", prompt) for prompt in self.compared.sharing_prompts]
        yield from rows
        found = break_even([(row.figures["token_ratio"], row.figures["speed_ratio"]) for row in rows])
        if found is not None:
            yield Row(
                name="sharing/break-even",
                settings={**rows[0].settings, "prompts": list(self.compared.sharing_prompts)},
                headline="token_ratio",
                repeats=[],
                once={"token_ratio": found},
            )

    def _tree_row(self, group: str, prompt_tokens: int) -> Row:
        sizes, synthetic = self.compared, SyntheticTrajectories(self.model.vocabulary, seed=prompt_tokens)
        prompts = [synthetic.ids(prompt_tokens) for _ in range(sizes.groups)]
        batch = [synthetic.single(p, sizes.shared_response) for p in prompts for _ in range(sizes.group_size)]
        flat, tree = (self.learner(self.policy(), sharing) for sharing in ("off", "on"))
        fp32_flat, fp32_tree = (self.learner(self._fp32_policy(), sharing) for sharing in ("off", "on"))
        some = batch[: sizes.group_size]
        difference = relative_difference(gradient(tree, batch), gradient(flat, batch))
        exact = relative_difference(gradient(fp32_tree, some), gradient(fp32_flat, some))
        costs = self._alternate(flat, flat=partial(flat.update, batch), tree=partial(tree.update, batch))
        flat_tokens = len(batch) * (prompt_tokens + sizes.shared_response)
        saved = sizes.groups * (sizes.group_size - 1) * prompt_tokens
        return Row(
            name=f"{group}/prompt of {prompt_tokens} tokens",
            settings=self._settings(
                groups=sizes.groups,
                group_size=sizes.group_size,
                prompt=prompt_tokens,
                response=sizes.shared_response,
            ),
            headline="tree_seconds",
            repeats=[
                {
                    "tree_seconds": each["tree"].seconds,
                    "flat_seconds": each["flat"].seconds,
                    "speed_ratio": each["flat"].seconds / each["tree"].seconds,
                }
                for each in costs
            ],
            once={
                "token_ratio": flat_tokens / (flat_tokens - saved),
                "gradient_difference": difference,
                "fp32_gradient_difference": exact,
            },
        )

    def _settings(self, **sizes: int) -> dict[str, Any]:
        return {**self.model.settings, **sizes, "tokens_per_pack": self.sizes.tokens_per_pack}

    def _fp32_policy(self) -> PolicyModel:
        """Few layers and no autocast, so that two layouts may differ by rounding only."""
        if self._fp32 is None:
            small = replace(self.shape, layers=self.compared.fp32_layers).model()
            self._fp32 = PolicyModel(small.network(dtype=torch.float32, device=self.device))
        return self._fp32

    def _alternate(self, learner: Learner, **sides: Callable[[], object]) -> list[dict[str, Cost]]:
        model = learner.policy.model
        return alternate({name: partial(self.cost, model, work) for name, work in sides.items()}, self.repeats)


def one_row_per_step(credited: Sequence[CreditedTrajectory]) -> list[CreditedTrajectory]:
    """The same steps and advantages, with every step a trajectory of its own, so that nothing is merged."""
    return [
        CreditedTrajectory(
            trajectory=Trajectory(row_id="bench", trajectory_id="bench", steps=[step], stop=StopReason.ANSWERED),
            advantages=[advantages],
        )
        for item in credited
        for step, advantages in zip(item.trajectory.steps, item.advantages, strict=True)
    ]


def gradient(learner: Learner, credited: Sequence[CreditedTrajectory]) -> Tensor:
    """The gradient of all weights in one vector. The learning rate is too small to change the weights."""
    learner.update(credited)
    parameters = learner.policy.model.parameters()
    return torch.cat([parameter.grad.flatten() for parameter in parameters if parameter.grad is not None])


def relative_difference(one: Tensor, other: Tensor) -> float:
    """Norm of the difference over the norm of `other`."""
    return float((one - other).norm() / other.norm())


def break_even(points: Iterable[tuple[float, float]]) -> float | None:
    """The sharing factor from which the speed-up is at least 1, between measured (factor, speed-up) points.

    Interpolated where the speed-up last crosses 1; the smallest factor if it is never below 1, None if it ends below.
    """
    ordered = sorted(points)
    if ordered[-1][1] < 1:
        return None
    for (below, slow), (above, fast) in reversed(list(pairwise(ordered))):
        if slow < 1:
            return below + (above - below) * (1 - slow) / (fast - slow)
    return ordered[0][0]
