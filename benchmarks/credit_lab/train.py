"""Learning curves: a variant trains a tabular policy, one Adam step per batch; J is computed exactly.

The learning rate is chosen for every variant and world by one rule: of `LEARNING_RATES`, the one with the largest mean
return over the whole run, on seeds that the reported curves do not use.

Shape suffixes: P = rows of the policy, A = choices.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from agent_r1.learn.optimizer import Optimizer, warmup
from agent_r1.learn.rewards import ProcessScaling
from benchmarks.credit_lab.estimate import EPISODES, credit, loss_of, shaper_for
from benchmarks.credit_lab.exact import best_return, expected_gradient, expected_return
from benchmarks.credit_lab.play import Player, initial_policy
from benchmarks.credit_lab.variants import ADAM, VARIANTS, LearnedCritic, ValueFunction, Variant, oracle
from benchmarks.credit_lab.worlds import WORLDS, World

LEARNING_RATES = (0.06, 0.2, 0.6, 1.8)
EXACT = "exact gradient"  # the learner without noise, for comparison


@dataclass(frozen=True, slots=True, kw_only=True)
class Run:
    """Identifies a training run; small, because it is sent between processes."""

    world: str
    variant: str  # of `VARIANTS`, or EXACT
    lr: float
    seed: int
    episodes: int  # budget; all sampled episodes count
    process: ProcessScaling = "raw"


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """Share of the possible gain (0: initial policy, 1: best possible) by number of episodes."""

    episodes: list[int]
    gained: list[float]

    def at(self, grid: list[int]) -> list[float]:
        """An update takes effect after the episode that completed its batch."""
        place = np.searchsorted(self.episodes, grid, side="right") - 1
        return [self.gained[i] for i in place.tolist()]


def train(run: Run) -> Curve:
    world = WORLDS[run.world]
    policy_PA = nn.Parameter(initial_policy(world))
    optimizer = Optimizer([policy_PA], lr=run.lr, schedule=warmup(0), **ADAM)
    update = _ExactUpdate(world) if run.variant == EXACT else _Update(world, VARIANTS[run.variant], run)
    start, best = float(expected_return(world, policy_PA.detach())), best_return(world)
    episodes, gained = [0], [0.0]
    while episodes[-1] < run.episodes:
        optimizer.zero_grad()
        if update(policy_PA):
            optimizer.clip()
            optimizer.step()
        with torch.no_grad():
            now = float(expected_return(world, policy_PA))
        episodes.append(update.episodes)
        gained.append((now - start) / (best - start))
    return Curve(episodes=episodes, gained=gained)


class _Update:
    """Computes the gradient of one batch; False if there was nothing to learn from."""

    def __init__(self, world: World, variant: Variant, run: Run) -> None:
        self.world, self.variant, self.algorithm = world, variant, variant.build()
        self.player = Player(world=world, seed=run.seed)
        self.shaper = shaper_for(self.algorithm, run.process)
        self.critic = LearnedCritic(world)

    @property
    def episodes(self) -> int:
        return self.player.episodes

    def __call__(self, policy_PA: Tensor) -> bool:
        groups = self.player.batch(policy_PA, self.algorithm)
        credited = credit(groups, self.algorithm, shaper=self.shaper, values=self._values(policy_PA))
        if not credited:
            return False
        loss_of(self.world, policy_PA, credited, self.algorithm).backward()
        if self.algorithm.needs_critic and self.variant.critic == "learned":
            self.critic.fit(credited)
        return True

    def _values(self, policy_PA: Tensor) -> ValueFunction:
        return oracle(self.world, policy_PA) if self.variant.critic == "oracle" else self.critic.values


class _ExactUpdate:
    def __init__(self, world: World) -> None:
        self.world, self.episodes = world, 0

    def __call__(self, policy_PA: Tensor) -> bool:
        policy_PA.grad = -expected_gradient(self.world, policy_PA)
        self.episodes += EPISODES  # as if it had sampled a batch
        return True
