"""Every algorithm through the whole pipeline, with greedy baselines and dynamic sampling."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_r1.build.collectors import greedy_collector
from agent_r1.build.plan import build_algorithm
from agent_r1.build.resolve import resolve
from agent_r1.config import load_config
from agent_r1.errors import ConfigError
from agent_r1.flows.flow import AgentFlowBase
from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.rollout.collect import Collector
from agent_r1.runs.reader import list_checkpoints
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from agent_r1.types import StopReason, TaskRow
from tests.train.test_pipeline import MINI, numbers, resumed, trained

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_trains_evaluates_and_saves(name: str, tmp_path: Path) -> None:
    run = trained(tmp_path / "run", f"algorithm.name={name}", "trainer.steps=2").run
    steps = run.read_metrics("train")
    assert [record["step"] for record in steps] == [1, 2]
    assert all(record["nonfinite_updates"] == 0 for record in steps)
    assert sum(record["optimizer_steps"] for record in steps) > 0
    assert [step for step, _ in list_checkpoints(run.checkpoints)] == [2]


# Untrained bytes, so that most responses are cut or end at once, in an environment that only max_steps ends.
ENDLESS = ["task.env=task.Endless", "task.tools=[]", "sft.demos=null", "rollout.max_response_tokens=48"]
RESUMED = {
    "critic": ["algorithm.name=ppo", "critic.warmup_updates=1"],
    "shared critic": ["algorithm.name=steppo", "critic.shared=true", *ENDLESS],
    "adaptive KL in the reward": [
        "algorithm.name=reinforce++",
        "algorithm.kl_coef=0.1",
        "algorithm.kl_in=reward",
        "algorithm.kl_target=0.001",
        "algorithm.kl_horizon=50",
    ],
    "running scale of process rewards": ["rewards.process=running_std", *ENDLESS],
    "sampling rounds and epochs": ["algorithm.name=dapo", "learner.num_epochs=2", "learner.num_minibatches=2"],
    "correction": ["correction.kind=truncate"],
}


@pytest.mark.parametrize("overrides", RESUMED.values(), ids=RESUMED)
def test_what_an_algorithm_remembers_survives_a_resume(overrides: list[str], tmp_path: Path) -> None:
    trained(tmp_path / "whole", "trainer.steps=2", "trainer.save_every=1", *overrides)
    shutil.copytree(tmp_path / "whole", tmp_path / "cut")
    shutil.rmtree(tmp_path / "cut" / "checkpoints" / "step_000002")
    resumed(RunDir.open(tmp_path / "cut"))
    assert numbers(tmp_path / "cut") == numbers(tmp_path / "whole")


def test_dynamic_sampling_replaces_rows_without_signal(tmp_path: Path) -> None:
    # Greedy-like sampling: attempts at a row are all alike, so no group varies and every round is used.
    cold = ["sft.demos=null", "rollout.temperature=0.001", "trainer.steps=1", "rollout.max_response_tokens=4"]
    rounds = trained(tmp_path / "rounds", "algorithm.name=dapo", "algorithm.settings.sampling_rounds=3", *cold).run
    played = list(read_trajectories(tmp_path / "rounds" / "trajectories", "train_*"))
    assert 2 * 3 <= rounds.read_metrics("train")[0]["group/count"] == len(played) / 4 <= 3 * 3  # rounds x rows
    assert rounds.read_metrics("train")[0]["empty_update"] == 1
    rows = [trajectory.row_id for trajectory in played]
    assert len(set(rows)) == len(rows) / 4  # no row twice in one step
    once = trained(tmp_path / "once", *cold).run
    assert once.read_metrics("train")[0]["group/count"] == 3


def test_dynamic_sampling_replaces_rows_whose_differences_are_not_trained_on(tmp_path: Path) -> None:
    recipe = tmp_path / "mini"
    shutil.copytree(MINI, recipe)
    with (recipe / "task.py").open("a", encoding="utf-8") as task:
        task.write("\n\ndef nothing(row: TaskRow, trajectory: Trajectory) -> float:\n    return 0.0\n")
    rewarded = ["task.reward=task.nothing", *ENDLESS, "algorithm.name=dapo", "trainer.steps=1"]

    def first_step(process: str) -> dict[str, Any]:
        run = trained(tmp_path / process, f"rewards.process={process}", *rewarded, recipe=recipe).run
        return run.read_metrics("train")[0]

    # Attempts at a row earn different process rewards (in most rows, by chance), and all of them the same outcome.
    paid, ignored = first_step("raw"), first_step("ignored")
    assert (paid["empty_update"], ignored["empty_update"]) == (0, 1)
    assert 3 <= paid["group/count"] < ignored["group/count"]


def test_an_episode_cut_at_max_steps_remembers_where_it_would_have_gone_on(tmp_path: Path) -> None:
    trained(tmp_path / "run", "algorithm.name=steppo", "rollout.max_steps=1", "trainer.steps=1", *ENDLESS)
    cut = [t for t in read_trajectories(tmp_path / "run" / "trajectories", "train_*") if t.stop is StopReason.MAX_STEPS]
    assert cut
    for trajectory in cut:
        seen = trajectory.steps[-1].prompt_ids + trajectory.steps[-1].response_ids
        assert trajectory.next_prompt_ids[: len(seen)] == seen
        assert len(trajectory.next_prompt_ids) > len(seen)  # the tool's answer and the next generation prompt


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["critic.lr=1e-3"], "'grpo' has no critic"),
        (["algorithm.settings.clip_high=wide"], r"clip_high='wide'"),
        (["algorithm.settings.sampling_rounds=0"], r"sampling_rounds=0"),
        (
            ["algorithm.name=remax", "algorithm.settings.sampling_rounds=2", "rollout.group_size=1"],
            r"sampling_rounds=2 .*group_size",
        ),
        (["algorithm.name=gigpo", "algorithm.settings.anchor=place"], r"anchor='place'"),
        (["algorithm.settings.horizon=10"], "horizon .*aggregation=token"),
        (["algorithm.settings.overlong_buffer=0.5"], "overlong_penalty"),
        (
            ["algorithm.name=remax", "learner.num_epochs=2"],
            r"remax .*learner\.num_epochs=1",
        ),
        (
            ["algorithm.name=remax", "learner.num_epochs=2", "learner.num_minibatches=3"],
            r"first of 6 .*\. Set learner\.num_epochs=1 and learner\.num_minibatches=1, or use rloo",
        ),
    ],
)
def test_settings_an_algorithm_cannot_use_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_algorithm(load_config(MINI, overrides))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["algorithm.kl_in=reward"], "algorithm.kl_in does nothing without algorithm.kl_coef"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_target=0.1"], "kl_target does nothing without algorithm.kl_in"),
        (["algorithm.kl_coef=0.1", "algorithm.kl_in=reward", "algorithm.kl_estimator=k2"], "algorithm.kl_estimator"),
        (["algorithm.kl_horizon=5"], "does nothing without algorithm.kl_target"),
        (["correction.floor=0.5", "correction.kind=truncate"], "floor does nothing"),
        (["correction.cap=3"], "correction.kind is missing"),
        (["correction.kind=reject", "correction.floor=3"], r"correction\.floor=3"),
        (["correction.kind=truncate", "correction.cap=0.5"], r"correction\.cap=0\.5"),
        (["rewards.process=ignored", "rewards.process_weight=2"], "process_weight does nothing"),
        (["critic.value_coef=0.5"], "critic.value_coef does nothing"),
        (["rewards.process=largest"], "rewards.process"),
    ],
)
def test_settings_without_effect_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        load_config(MINI, overrides)


def test_a_failed_greedy_attempt_costs_its_row_and_not_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refusing(row: TaskRow) -> AgentFlowBase:
        raise RuntimeError("no greedy attempts today")

    def failing(*parts: Any) -> Collector:
        return replace(greedy_collector(*parts), make_flow=refusing)

    monkeypatch.setattr("agent_r1.build.trainer.greedy_collector", failing)
    run = trained(tmp_path / "run", "algorithm.name=remax", "rollout.group_size=3", "trainer.steps=1").run
    (step,) = run.read_metrics("train")
    assert step["group/no_baseline"] == step["group/count"] == 3
    assert step["stop/error"] == 0  # of the attempts that are trained on
    assert step["empty_update"] == 1


def test_a_checkpoint_of_another_format_is_refused_in_words(tmp_path: Path) -> None:
    run = trained(tmp_path / "run", "trainer.steps=1").run
    path = run.checkpoints / "step_000001" / "trainer_state.pt"
    state = torch.load(path, weights_only=True)
    del state["format"]
    torch.save(state, path)
    with pytest.raises(ConfigError, match=r"another version of agent-r1 .* model.path="):
        resumed(run)


COUNTED = """
import asyncio

from agent_r1 import AgentEnv
from agent_r1.types import Observation, Transition


class Counted(AgentEnv):
    alive = most = 0

    async def reset(self, row):
        Counted.alive += 1
        Counted.most = max(Counted.most, Counted.alive)
        await asyncio.sleep(0.01)
        return Observation(messages=list(row.prompt))

    async def step(self, action):
        return Transition(terminated=True)

    async def close(self):
        Counted.alive -= 1
"""


@pytest.mark.parametrize("name", ["grpo", "remax"])
def test_no_more_episodes_are_played_at_once_than_may_be_greedy_ones_included(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe"
    shutil.copytree(MINI, recipe, ignore=shutil.ignore_patterns("__pycache__"))
    (recipe / "world.py").write_text(COUNTED, encoding="utf-8")
    world = ("task.env=world.Counted", "task.tools=[]", "sft.demos=null", f"algorithm.name={name}")
    limits = ("rollout.max_concurrent=3", "rollout.max_response_tokens=4", "trainer.steps=1")
    trained(tmp_path / "run", *world, *limits, recipe=recipe)
    assert resolve("world.Counted", recipe=str(recipe)).most == 3
