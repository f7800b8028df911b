"""`agent-r1 doctor --engine`: faults that show only when the model samples and the learner sees the episodes."""

from __future__ import annotations

import asyncio
import os
import shutil
from pathlib import Path

import pytest
import torch

from agent_r1.build.engine import build_engine
from agent_r1.build.models.load import load_model
from agent_r1.build.plan import build_plan
from agent_r1.build.start import base_model
from agent_r1.config import load_config
from agent_r1.doctor.sampled import check_gap, resting_learner, sample
from tests.conftest import Cli
from tests.doctor.recipes import diagnose, write_recipe

pytestmark = pytest.mark.usefixtures("cache")

SHORT = ["--engine", "--quick", "sft.demos=null", "rollout.max_steps=1", "rollout.max_response_tokens=12"]


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


def test_the_engine_tier_samples_and_compares_with_the_learner(cli: Cli, sound: Path) -> None:
    said = diagnose(cli, sound, ["--engine", "--quick", "sft.demos=null", "rollout.max_response_tokens=12"])
    assert said.levels("sampler and learner agree") == ["green"]
    assert said.levels("a step fits into memory") == said.levels("checkpoints fit on the disk") == ["green"]
    assert said.levels("the policy calls tools") == ["yellow"]  # it knows nothing,
    assert said.levels("responses are not cut off") == ["red"]  # not even how to end
    assert said.levels("demonstrations score high") == []


def test_groups_that_all_earn_the_same_are_named_with_their_cause(cli: Cli, sound: Path) -> None:
    settings = ["--engine", "--quick", "sft.demos=null", "rollout.max_steps=1", "rollout.max_response_tokens=12"]
    name = "attempts at a row differ in reward"
    easy = diagnose(cli, sound, [*settings, "task.reward=task.for_anything"])
    hard = diagnose(cli, sound, [*settings, "task.reward=task.never"])
    assert easy.levels(name) == hard.levels(name) == ["yellow"]
    fixes = [next(each["fix"] for each in said.findings if each["name"] == name) for said in (easy, hard)]
    assert ["easy" in fixes[0], "hard" in fixes[1]] == [True, True]
    assert all(said.levels("sampler and learner agree") == ["green"] for said in (easy, hard))


def test_sampled_episodes_that_fail_are_red(cli: Cli, sound: Path) -> None:
    said = diagnose(cli, sound, [*SHORT, "task.reward=task.broken"])
    assert ("red", "sampled episodes end without errors") in said.bad
    assert "gold" in said.evidence("sampled episodes end without errors")
    assert said.levels("sampler and learner agree") == []  # nothing to compare


def test_a_learner_with_other_weights_than_the_sampler_is_noticed(sound: Path) -> None:
    config = load_config(str(sound), SHORT[2:])
    plan = build_plan(config)
    model, base = load_model(config, base_model(config)), base_model(config)
    engine = build_engine(config, model, adapters=None)
    sampled = asyncio.run(plan.task.run(sample(config, plan, model, engine, 4)))
    asyncio.run(engine.close())
    lights = []
    for noise in (0.0, 0.02, 1.0):
        changed = load_model(config, base)
        torch.manual_seed(0)
        with torch.no_grad():
            for weight in changed.network.parameters():
                weight += noise * torch.randn_like(weight)
        lights += [found.level for found in check_gap(sampled, resting_learner(config, changed))]
    assert lights == ["green", "yellow", "red"]


def test_too_little_memory_and_disk_are_red(cli: Cli, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = {"SC_PHYS_PAGES": 10, "SC_PAGE_SIZE": 4096}
    sysconf, usage = os.sysconf, shutil.disk_usage
    monkeypatch.setattr(os, "sysconf", lambda name: known.get(name) or sysconf(name))
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=2**16))
    said = diagnose(cli, sound, SHORT)
    assert {("red", "a step fits into memory"), ("red", "checkpoints fit on the disk")} <= set(said.bad)
    assert said.code == 1
