"""docs/metrics.md names every number that a training step reports."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.credit import assign_credit, attempts_of
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.rewards import KLInReward, RewardShaper
from agent_r1.train.evaluate import episode_metrics
from agent_r1.train.tickets import Ledger, staleness_metrics
from agent_r1.types import Trajectory
from tests.learn.builders import correction, group, new_critic, step, tiny_model, trajectory

PAGE = Path(__file__).parents[2] / "docs" / "metrics.md"
LAYOUT = {"packs", "segments", "packing_efficiency", "trajectories", "lr", "optimizer_steps"}  # speak for themselves
FAMILIES = ("stop/", "reward_part/")


def episode(name: str, reward: float) -> Trajectory:
    return trajectory(step([1, 2], [3, 4]), step([1, 2, 3, 4, 5], [6]), reward=reward, name=name)


def test_every_reported_metric_is_explained() -> None:
    policy = PolicyModel(tiny_model())
    algorithm = get_algorithm("ppo", dual_clip=3.0)
    learner = Learner(
        policy,
        loss=algorithm.loss,
        lr=1e-3,
        temperature=1.0,
        betas=(0.9, 0.99),
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_tokens_per_pack=64,
        max_nonfinite_updates=3,
        kl_coef=0.1,
        kl_estimator="k3",
        reference=policy.copy(),
        correction=correction("reject"),
        critic=new_critic(policy, shared=False),
    )
    paid = trajectory(replace(step([1, 2], [3, 4]), reward=0.2), name="paid")  # a process reward
    groups = [group(episode("right", 1.0), episode("wrong", 0.0), paid)]
    shaper = RewardShaper(process="running_std", kl=KLInReward(coef=0.1, target=0.1, horizon=100))
    played = attempts_of(groups)
    values, kl = learner.values(played), learner.kl_to_reference(played)
    credited = assign_credit(groups, algorithm, shaper=shaper, values=values, kl=kl)
    reported = {*learner.update(credited), *episode_metrics(groups, success_reward=1.0), *shaper.metrics}
    explained = set(re.findall(r"`([\w/@]+)`", PAGE.read_text(encoding="utf-8")))
    assert {name for name in reported - explained - LAYOUT if not name.startswith(FAMILIES)} == set()
    assert {"value_loss", "importance_rejected", "process_scale", "reward_kl", "kl_to_reference"} <= reported


def test_the_metrics_of_asynchronous_steps_are_explained() -> None:
    reported = Ledger().metrics | staleness_metrics([], 1)
    explained = set(re.findall(r"`([\w/@]+)`", PAGE.read_text(encoding="utf-8")))
    assert set(reported) <= explained
