"""Asynchronous runs of a model of 30k parameters: what is trained, by which weights it was sampled, kill and resume."""

from __future__ import annotations

import os
import re
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_r1.build.plan import build_plan
from agent_r1.cli.commands.play import run_eval
from agent_r1.cli.commands.train import run_training
from agent_r1.config import parse_config
from agent_r1.errors import ConfigError
from agent_r1.runs.reader import latest_checkpoint
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from agent_r1.train.checkpoint import load_state
from tests.forked import start_program
from tests.ranks_started import ends, start_ranks
from tests.train.test_pipeline import MINI, console, mini, numbers, resumed, trained, wait_for_step

pytestmark = pytest.mark.usefixtures("cache")
ASYNC = "trainer.mode=async"
ROWS, ATTEMPTS = 3, 4  # of the recipe, per step and per row


def steps_of(run: Path) -> list[dict[str, Any]]:
    return [record for record in RunDir.open(run).read_metrics() if record["kind"] == "train"]


def played(run: Path) -> list[str]:
    """The ids of the episodes that some step took or dropped."""
    return [trajectory.trajectory_id for trajectory in read_trajectories(run / "trajectories", "train_*")]


def check_every_group_was_played_once(run: Path, *, steps: int) -> None:
    """On a machine that updates much faster than it samples, a group may be dropped as stale; the next replaces it."""
    ids, last = played(run), steps_of(run)[-1]
    assert last["groups/trained"] == steps * ROWS
    assert last["groups/failed"] == last["groups/uniform"] == 0
    assert last["groups/started"] == last["groups/trained"] + last["groups/stale"]
    assert len(ids) == len(set(ids)) == last["groups/started"] * ATTEMPTS


@pytest.fixture(scope="module")
def in_turns(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    """A synchronous run."""
    path = tmp_path_factory.mktemp("runs") / "sync"
    trained(path)
    return path


@pytest.fixture(scope="module")
def running_ahead(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    """An asynchronous run of four steps with every checkpoint kept. No version is more than 3 old, so that no group is
    dropped however fast the machine samples and updates."""
    path = tmp_path_factory.mktemp("runs") / "async"
    trained(path, ASYNC, "trainer.max_staleness=3", "trainer.save_every=1",
            "trainer.keep_checkpoints=9", "trainer.eval_every=4")  # fmt: skip
    return path


def test_without_staleness_a_run_is_the_synchronous_run(in_turns: Path, tmp_path: Path) -> None:
    trained(tmp_path / "async", ASYNC, "trainer.max_staleness=0", "correction=null")
    records = zip(numbers(in_turns), numbers(tmp_path / "async"), strict=True)
    assert all(record.items() <= other.items() for record, other in records)


def test_every_started_group_is_trained_once(running_ahead: Path) -> None:
    ids = played(running_ahead)
    assert len(ids) == len(set(ids)) == 4 * ROWS * ATTEMPTS
    last = steps_of(running_ahead)[-1]
    assert last["groups/started"] == last["groups/trained"] == 4 * ROWS
    assert last["groups/stale"] == last["groups/failed"] == last["groups/uniform"] == 0


def test_rows_and_noise_are_those_of_a_synchronous_run(running_ahead: Path, in_turns: Path) -> None:
    assert sorted(played(running_ahead)) == sorted(played(in_turns))


def test_every_log_prob_is_of_the_version_that_sampled_the_token(running_ahead: Path) -> None:
    saved = {step: running_ahead / "checkpoints" / f"step_{step:06d}" for step in range(1, 5)}
    models = {step: AutoModelForCausalLM.from_pretrained(path).eval() for step, path in saved.items()}
    ages: Counter[int] = Counter()
    for record in steps_of(running_ahead):
        step = record["step"]
        for trajectory in read_trajectories(running_ahead / "trajectories", f"train_{step:06d}*"):
            for each in trajectory.steps:
                start = 0
                for version, count in each.versions:
                    ages[step - 1 - version] += count
                    if version in models:  # the weights before the first step are not a checkpoint
                        check_logprobs(models[version], each, start, start + count)
                    start += count
    assert set(ages) <= {0, 1, 2, 3}
    assert ages[1] + ages[2] + ages[3] > 0
    reported = sum((Counter({age: int(record.get(f"staleness/tokens_{age}", 0)) for age in range(4)})
                    for record in steps_of(running_ahead)), Counter[int]())  # fmt: skip
    assert reported == ages


@torch.no_grad()
def check_logprobs(model: Any, step: Any, start: int, end: int) -> None:
    ids = torch.tensor([step.prompt_ids + step.response_ids[:end]])
    logits = model(ids).logits[0].double()
    first = len(step.prompt_ids) + start
    expected = logits.log_softmax(-1)[first - 1 : -1].gather(1, ids[0, first:, None])[:, 0]
    given = torch.tensor(step.response_logprobs[start:end], dtype=torch.float64)
    torch.testing.assert_close(given, expected, rtol=0, atol=1e-4)


def test_the_correction_is_on_unless_the_config_says_otherwise(running_ahead: Path) -> None:
    config = parse_config(RunDir.open(running_ahead).settings)
    assert config.correction is not None
    assert (config.correction.kind, config.correction.level) == ("truncate", "token")
    assert all("importance_mean" in record for record in steps_of(running_ahead))
    assert mini(ASYNC, "correction=null").correction is None
    chosen = mini(ASYNC, "correction={kind: reject, cap: 3.0}").correction
    assert chosen is not None
    assert (chosen.kind, chosen.cap) == ("reject", 3.0)
    assert mini().correction is None


def test_an_evaluation_has_the_same_numbers_as_the_command(running_ahead: Path) -> None:
    run = RunDir.open(running_ahead)
    run_eval(parse_config(run.settings), run, console(), model=None, name="again")
    during = run.read_metrics("eval")[-1]
    trajectories = list(read_trajectories(running_ahead / "trajectories", "eval_000004*"))
    again = RunDir.open(running_ahead).path / "evals" / "again.json"
    assert again.exists()
    text = again.read_text(encoding="utf-8")
    assert f'"success": {during["success"]}' in text
    assert f'"reward/mean": {during["reward/mean"]}' in text
    assert len(trajectories) == 4


def start(path: Path, log: Path, *overrides: str) -> Any:
    return start_program(["train", MINI, "--run", str(path), *overrides], {**os.environ, "OMP_NUM_THREADS": "1"}, log)


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_a_run_that_was_killed_loses_and_repeats_no_group(how: signal.Signals, tmp_path: Path) -> None:
    path, log = tmp_path / "run", tmp_path / "log"
    process = start(path, log, ASYNC, "trainer.steps=6", "trainer.save_every=2", "trainer.eval_every=6")
    wait_for_step(path, 3, process, log)
    os.kill(process.pid, how)
    process.join(300)
    run = RunDir.open(path)
    step, checkpoint = latest_checkpoint(run.checkpoints)
    tickets = load_state(checkpoint)["tickets"]
    assert tickets["ended"]["trained"] == ROWS * step
    # In play, or waiting for their step.
    assert len(tickets["open"]) == tickets["next"] - sum(tickets["ended"].values())
    if how == signal.SIGTERM:
        assert re.search(rf"saved after step {step}", log.read_text(encoding="utf-8"))
    resumed(run)
    assert [record["step"] for record in steps_of(path)] == list(range(1, 7))
    check_every_group_was_played_once(path, steps=6)


def test_two_ranks_train_asynchronously_on_the_groups_of_one_process(in_turns: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "two", tmp_path / "log"
    settings = [ASYNC, "trainer.max_staleness=0", "correction=null"]
    assert ends(start_ranks(2, [MINI, "--run", str(run), *settings], log)) == [0, 0], log.read_text(encoding="utf-8")
    assert sorted(played(run)) == sorted(played(in_turns))
    for ours, theirs in zip(steps_of(run), steps_of(in_turns), strict=True):
        for name in ("loss", "grad_norm", "reward/mean", "episode/response_tokens"):
            assert ours[name] == pytest.approx(theirs[name], abs=1e-6)


def test_two_ranks_that_run_ahead_train_every_group_once_and_resume_as_one(tmp_path: Path) -> None:
    run, log = tmp_path / "two", tmp_path / "log"
    words = [MINI, "--run", str(run), ASYNC, "trainer.save_every=1", "trainer.max_minutes=0.0001"]
    assert ends(start_ranks(2, words, log)) == [0, 0], log.read_text(encoding="utf-8")
    assert [record["step"] for record in steps_of(run)] == [1]
    config = parse_config(RunDir.open(run).settings)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"max_minutes": None})})
    run_training(config, build_plan(config), RunDir.open(run), console(), resume=True)
    check_every_group_was_played_once(run, steps=4)


@pytest.mark.parametrize("algorithm", ["dapo", "remax"])
def test_algorithms_that_need_more_than_groups_run_asynchronously(algorithm: str, tmp_path: Path) -> None:
    trained(tmp_path / "run", ASYNC, f"algorithm.name={algorithm}", "trainer.steps=2")
    last = steps_of(tmp_path / "run")[-1]
    dropped = last["groups/stale"] + last["groups/uniform"] + last["groups/failed"]
    assert last["groups/started"] == last["groups/trained"] + dropped
    assert last["group/no_baseline"] == 0


def test_a_loss_without_a_ratio_needs_the_correction() -> None:
    config = mini(ASYNC, "algorithm.name=reinforce", "correction=null")
    with pytest.raises(ConfigError, match=r"reinforce has no importance ratio.*correction\.kind=truncate"):
        build_plan(config)
    build_plan(mini(ASYNC, "algorithm.name=reinforce"))
    build_plan(mini(ASYNC, "algorithm.name=reinforce", "correction=null", "trainer.max_staleness=0"))


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["trainer.max_staleness=2"], r"trainer\.max_staleness does nothing without trainer\.mode=async"),
        ([ASYNC, "engine={kind: vllm, urls: [http://a:1], sleep: true}"], r"engine\.sleep"),
        (["engine.device=cuda:1"], r"engine\.device=cuda:1, but this run computes on cpu"),
        (["engine.device=tpu"], r"engine\.device"),
    ],
)
def test_settings_that_an_asynchronous_run_cannot_use_are_refused(overrides: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_plan(mini(*overrides))
