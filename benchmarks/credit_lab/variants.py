"""The compared algorithms: every one of the table, and variants that isolate causes.

Critics are tables over token contexts. A learned critic is fitted to `value_targets` with the learner's value loss; an
oracle gives the exact values of the current policy, so that any remaining error is not the critic's.

Shape suffixes: X = token contexts, P = rows of the policy, T = steps, S = states, A = actions.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch import Tensor, nn

from agent_r1.learn.algorithms import ALGORITHMS, Algorithm, get_algorithm
from agent_r1.learn.credit import Values
from agent_r1.learn.losses import value_loss
from agent_r1.learn.model.critic import with_last_state
from agent_r1.learn.optimizer import Optimizer, warmup
from agent_r1.types import CreditedTrajectory, Step, Trajectory
from benchmarks.credit_lab.exact import exact_values
from benchmarks.credit_lab.play import num_contexts, token_contexts
from benchmarks.credit_lab.worlds import World

CRITIC_LR = 0.1
ADAM: dict[str, Any] = {"betas": (0.9, 0.99), "eps": 1e-8, "weight_decay": 0.0, "max_grad_norm": 1.0}
ValueFunction = Callable[[Sequence[Trajectory]], list[Values]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Variant:
    algorithm: str
    settings: Mapping[str, object] = field(default_factory=dict)
    critic: Literal["learned", "oracle"] = "learned"  # if the algorithm has one

    def build(self) -> Algorithm:
        return get_algorithm(self.algorithm, **self.settings)


def _variants() -> dict[str, Variant]:
    found = {name: Variant(algorithm=name) for name in ALGORITHMS}
    for name in ("ppo", "steppo"):
        found[f"{name} lam=0.9"] = Variant(algorithm=name, settings={"lam": 0.9})
        found[f"{name} gamma=0.95"] = Variant(algorithm=name, settings={"gamma": 0.95})
        found[f"{name} oracle"] = Variant(algorithm=name, critic="oracle")
        found[f"{name} oracle lam=0.9"] = Variant(algorithm=name, settings={"lam": 0.9}, critic="oracle")
        bootstrap = {"bootstrap_truncated": True}
        found[f"{name} bootstrap"] = Variant(algorithm=name, settings=bootstrap)
        found[f"{name} gamma=0.95 bootstrap"] = Variant(algorithm=name, settings=bootstrap | {"gamma": 0.95})
    found["gigpo gamma=0.95"] = Variant(algorithm="gigpo", settings={"gamma": 0.95})
    found["gigpo by prompt"] = Variant(algorithm="gigpo", settings={"anchor": "prompt"})
    found["reinforce unwhitened"] = Variant(algorithm="reinforce", settings={"whiten_batch": False})
    return found


VARIANTS: dict[str, Variant] = _variants()


def variants_for(world: World) -> list[str]:
    """The variants that can differ in a world.

    With stamped prompts, only the algorithms of the table and GiGPO's anchors can. Bootstrapping matters only if
    episodes can be truncated.
    """
    if world.prompts == "stamped":
        return [*ALGORITHMS, "gigpo by prompt"]
    return [name for name in VARIANTS if world.truncates or not name.endswith("bootstrap")]


def oracle(world: World, policy_PA: Tensor) -> ValueFunction:
    """Exact values before and after the decision (style has no effect). It knows the horizon: nothing follows a
    truncation."""
    values = exact_values(world, policy_PA.detach())
    states, actions = values.states_TS.tolist(), values.actions_TSA.tolist()

    def at(time: int, step: Step) -> list[float]:
        state, decision = token_contexts(world, step)[0], step.response_ids[0]
        return [states[time][state]] + [actions[time][state][decision]] * (len(step.response_ids) - 1)

    return lambda trajectories: [
        Values(per_token=[at(time, step) for time, step in enumerate(each.steps)], bootstrap=0.0)
        for each in trajectories
    ]


class LearnedCritic:
    """One value per token context, trained as the learner trains its critic: one Adam step on each batch."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.table_X = nn.Parameter(torch.zeros(num_contexts(world), dtype=torch.float64))
        self._optimizer = Optimizer([self.table_X], lr=CRITIC_LR, schedule=warmup(0), **ADAM)

    def values(self, trajectories: Sequence[Trajectory]) -> list[Values]:
        table = self.table_X.tolist()
        asked = [
            [[table[x] for x in token_contexts(self.world, step)] for step in with_last_state(each).steps]
            for each in trajectories
        ]
        return [
            Values(per_token=rows[: len(each.steps)], bootstrap=rows[-1][0] if each.stop.is_truncated else 0.0)
            for each, rows in zip(trajectories, asked, strict=True)
        ]

    def fit(self, credited: Sequence[CreditedTrajectory]) -> None:
        asked = [
            (context, value, target)
            for item in credited
            for step, values, targets in zip(
                item.trajectory.steps, item.values or [], item.value_targets or [], strict=True
            )
            for context, value, target in zip(token_contexts(self.world, step), values, targets, strict=True)
            if target is not None
        ]
        contexts, values, targets = zip(*asked, strict=True)
        self._optimizer.zero_grad()
        value_loss(
            self.table_X[list(contexts)],
            torch.tensor(values, dtype=torch.float64),
            torch.tensor(targets, dtype=torch.float64),
            num_targets=len(asked),
            clip=None,
        ).backward()
        self._optimizer.clip()
        self._optimizer.step()
