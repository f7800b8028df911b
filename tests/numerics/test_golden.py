"""Ten updates of a tiny seeded run of every algorithm, compared with committed numbers.

A change here means that training changed. If it was meant to, regenerate with

    AGENT_R1_WRITE_GOLDEN=1 pytest tests/numerics/test_golden.py

and give the reason in the commit. Weights, trajectories and old log-probs come from seeds and closed formulas, so the
numbers depend on no library's initialisation. Two mini-batches and two epochs per update, so that ratios differ from 1
and clips are active; process rewards, truncated episodes, greedy attempts and a critic take part where an algorithm
uses them. The tolerance of 1e-3 is for kernels that sum in another order: each step then differs by about 1e-6, and
forty steps of Adam, which divides by small gradients, let that grow.
"""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest

from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.optimizer import warmup
from tests.learn.builders import credit_for, critic_of, learner_for, on_policy, random_groups, tiny_model

FOLDER = Path(__file__).parent.parent / "golden"
RELATIVE, ABSOLUTE = 1e-3, 1e-5
UPDATES = 10
METRICS = ("loss", "grad_norm", "approx_kl", "entropy", "value_loss", "explained_variance")


def golden_file(name: str) -> Path:
    return FOLDER / f"{name.replace('+', 'p')}_tiny.json"


def run(name: str) -> dict[str, list[float]]:
    policy, rng = PolicyModel(tiny_model("qwen3", seed=3)), random.Random(7)
    groups = random_groups(rng, rows=3, size=4)
    critic = critic_of(policy, shared=name == "ppo") if ALGORITHMS[name].needs_critic else None
    learner = learner_for(
        name,
        policy,
        critic=critic,
        weight_decay=0.01,
        schedule=warmup(2),
        num_minibatches=2,
        num_epochs=2,
        max_tokens_per_pack=96,
    )
    updates: list[dict[str, Any]] = []
    for _ in range(UPDATES):
        heard = on_policy(groups, policy, rng, noise=0.05)  # as if sampled just now, by a slightly different sampler
        updates.append(learner.update(credit_for(name, heard, learner)))
    return {metric: [update[metric] for update in updates] for metric in METRICS if metric in updates[0]}


@pytest.mark.parametrize("name", ALGORITHMS)
def test_a_tiny_run_reproduces_the_committed_numbers(name: str) -> None:
    got, path = run(name), golden_file(name)
    if os.environ.get("AGENT_R1_WRITE_GOLDEN"):
        path.write_text(json.dumps(got, indent=1) + "\n")
    expected = json.loads(path.read_text())
    assert got.keys() == expected.keys()
    for metric, values in expected.items():
        assert got[metric] == pytest.approx(values, rel=RELATIVE, abs=ABSOLUTE), metric


def test_every_committed_file_belongs_to_an_algorithm() -> None:
    assert {path.name for path in FOLDER.glob("*.json")} == {golden_file(name).name for name in ALGORITHMS}
