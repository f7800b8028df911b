"""Ten updates of a tiny seeded run, compared with committed numbers.

A change here means that training changed. If it was meant to, regenerate with

    AGENT_R1_WRITE_GOLDEN=1 pytest tests/numerics/test_golden.py

and give the reason in the commit. Weights, trajectories and old log-probs come from seeds and closed formulas, so the
numbers depend on no library's initialisation. The tolerance of 1e-3 is for kernels that sum in another order: each
step then differs by about 1e-6, and ten steps of Adam, which divides by small gradients, let that grow.
"""

from __future__ import annotations

import json
import os
import random
from dataclasses import replace
from pathlib import Path

import pytest

from agent_r1.learn import Learner, PolicyModel, assign_credit, get_algorithm
from agent_r1.learn.learner import warmup
from agent_r1.types import Group
from tests.learn.builders import group, random_trajectory, tiny_model

GOLDEN = Path(__file__).parent.parent / "golden" / "grpo_tiny.json"
RELATIVE, ABSOLUTE = 1e-3, 1e-5


def groups() -> list[Group]:
    rng = random.Random(7)
    result = []
    for _ in range(4):
        attempts = [random_trajectory(rng, kind="mixed", name=f"t{i}") for i in range(4)]
        result.append(group(*(replace(a, outcome_reward=float(rng.random() < 0.5)) for a in attempts)))
    return result


def run() -> dict[str, list[float]]:
    algorithm = get_algorithm("grpo")
    learner = Learner(
        PolicyModel(tiny_model("qwen3", seed=3)),
        loss=algorithm.loss,
        lr=1e-3,
        temperature=1.0,
        betas=(0.9, 0.999),
        weight_decay=0.01,
        max_grad_norm=1.0,
        max_nonfinite_updates=1,
        schedule=warmup(2),
        max_tokens_per_pack=48,
    )
    updates = [learner.update(assign_credit(groups(), algorithm)) for _ in range(10)]
    return {name: [update[name] for update in updates] for name in ("loss", "grad_norm")}


def test_a_tiny_run_reproduces_the_committed_numbers() -> None:
    got = run()
    if os.environ.get("AGENT_R1_WRITE_GOLDEN"):
        GOLDEN.write_text(json.dumps(got, indent=1) + "\n")
    expected = json.loads(GOLDEN.read_text())
    assert got.keys() == expected.keys()
    for name, values in expected.items():
        assert got[name] == pytest.approx(values, rel=RELATIVE, abs=ABSOLUTE), name
