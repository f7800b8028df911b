"""The whole pipeline on a model of 30k parameters: train, kill, resume, evaluate, imitate, chat."""

from __future__ import annotations

import asyncio
import io
import json
import math
import os
import random
import re
import shutil
import signal
import time
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from rich.console import Console

from agent_r1.build.learner import build_learner, build_sft_learner
from agent_r1.build.models.load import load_model
from agent_r1.build.plan import build_algorithm, build_plan
from agent_r1.build.start import base_model
from agent_r1.build.task import build_task
from agent_r1.cli.commands.chat import answer, open_chat
from agent_r1.cli.commands.play import run_eval, run_sft
from agent_r1.cli.commands.train import Outcome, run_training
from agent_r1.cli.train_command import Job
from agent_r1.config import RunConfig, load_config, parse_config
from agent_r1.errors import ConfigError, DataError
from agent_r1.learn.model.critic import Critic
from agent_r1.runs.reader import latest_checkpoint, list_checkpoints
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories, trajectory_to_json
from agent_r1.train.checkpoint import load_state
from agent_r1.train.rng import restore_rng, rng_state, seed_all
from tests.forked import start_program

ROOT = Path(__file__).parents[2]
MINI = str(ROOT / "tests" / "mini")
TIMING = ("time", "tokens_per_second")


pytestmark = pytest.mark.usefixtures("cache")  # one warm start for the tests of this file


def console() -> Console:
    return Console(file=open(os.devnull, "w", encoding="utf-8"))


def mini(*overrides: str) -> RunConfig:
    return load_config(MINI, overrides)


def trained(path: Path, *overrides: str, recipe: str | Path = MINI) -> Outcome:
    config = load_config(str(recipe), overrides)
    return run_training(config, build_plan(config), RunDir.create(path, config), console(), resume=False)


def resumed(run: RunDir) -> Outcome:
    config = parse_config(run.settings)
    return run_training(config, build_plan(config), run, console(), resume=True)


def numbers(run: Path) -> list[dict[str, Any]]:
    """All metrics except timings."""
    records = RunDir.open(run).read_metrics()
    return [{key: value for key, value in record.items() if not key.startswith(TIMING)} for record in records]


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    """An uninterrupted run of four steps."""
    path = tmp_path_factory.mktemp("runs") / "finished"
    trained(path)
    return path


def test_a_run_leaves_everything_the_next_program_needs(finished: Path) -> None:
    assert parse_config(RunDir.open(finished).settings) == mini()
    kinds = [(record["kind"], record["step"]) for record in numbers(finished)]
    assert kinds == [("eval", 0), ("train", 1), ("train", 2), ("eval", 2), ("train", 3), ("train", 4), ("eval", 4)]
    assert [step for step, _ in list_checkpoints(finished / "checkpoints")] == [2, 4]
    assert (finished / "curve.png").stat().st_size > 1000
    trajectories = list(read_trajectories(finished / "trajectories", "train_*"))
    assert len(trajectories) == 4 * 3 * 4  # steps x rows x attempts
    for trajectory in trajectories:
        for before, after in zip(trajectory.steps, trajectory.steps[1:], strict=False):
            seen = before.prompt_ids + before.response_ids
            assert after.prompt_ids[: len(seen)] == seen  # an append-only episode only appends ids


def test_sampler_and_learner_agree_on_every_sampled_token(finished: Path) -> None:
    steps = [record for record in numbers(finished) if record["kind"] == "train"]
    assert all(record["mismatch_max"] < 1e-4 for record in steps)


def test_the_same_description_gives_the_same_run(finished: Path, tmp_path: Path) -> None:
    trained(tmp_path / "again")
    assert numbers(tmp_path / "again") == numbers(finished)


def test_another_seed_gives_another_run(finished: Path, tmp_path: Path) -> None:
    trained(tmp_path / "other", "seed=1")
    assert numbers(tmp_path / "other") != numbers(finished)


EIGHT = "trainer.steps=8"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    """An uninterrupted run of eight steps; its numbers do not depend on how often it saves."""
    path = tmp_path_factory.mktemp("runs") / "whole"
    trained(path, EIGHT)
    return path


def start(path: Path, log: Path, *overrides: str) -> BaseProcess:
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return start_program(["train", MINI, "--run", str(path), *overrides], environment, log)


def wait_for_step(path: Path, step: int, process: BaseProcess, log: Path) -> None:
    for _ in range(6000):  # 300 s
        metrics = path / "metrics.jsonl"
        if metrics.exists() and f'"kind": "train", "step": {step},' in metrics.read_text(encoding="utf-8"):
            return
        if not process.is_alive():
            break
        time.sleep(0.05)
    raise AssertionError(f"step {step} never came: {log.read_text(encoding='utf-8')}")


def test_a_run_killed_without_warning_resumes_exactly(whole: Path, tmp_path: Path) -> None:
    path, log = tmp_path / "killed", tmp_path / "log"
    process = start(path, log, EIGHT, "trainer.save_every=2")
    wait_for_step(path, 3, process, log)
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    run = RunDir.open(path)
    saved, _ = latest_checkpoint(run.checkpoints)
    assert saved < 8
    resumed(run)
    assert numbers(path) == numbers(whole)


def test_sigterm_saves_the_last_finished_step_and_the_run_resumes_exactly(whole: Path, tmp_path: Path) -> None:
    path, log = tmp_path / "stopped", tmp_path / "log"
    process = start(path, log, EIGHT, "trainer.save_every=100")
    wait_for_step(path, 2, process, log)
    process.terminate()
    process.join(300)
    assert process.exitcode == 128 + signal.SIGTERM
    said = log.read_text(encoding="utf-8")
    assert re.search(r"stopped by SIGTERM; saved after step \d+; continue with: agent-r1 train --resume", said)
    run = RunDir.open(path)
    done, _ = latest_checkpoint(run.checkpoints)
    assert 2 <= done < 8
    resumed(run)
    assert numbers(path) == numbers(whole)


def test_a_run_out_of_minutes_is_evaluated_and_saved_and_resumes_exactly(finished: Path, tmp_path: Path) -> None:
    config = mini("trainer.max_minutes=1e-6")
    screen = Console(record=True, width=200, file=io.StringIO())
    outcome = run_training(config, build_plan(config), RunDir.create(tmp_path / "run", config), screen, resume=False)
    run = outcome.run
    assert "in 1 step; this took" in (said := screen.export_text())
    assert f"train --resume {run.path} (trainer.max_minutes" in said
    assert outcome.after["step"] == latest_checkpoint(run.checkpoints)[0] == 1
    assert resumed(run).after["step"] == 2  # each command has its own minutes
    steps = [[record for record in numbers(path) if record["kind"] == "train"] for path in (run.path, finished)]
    assert steps[0] == steps[1][:2]


def test_a_run_stopped_before_its_first_save_starts_over(finished: Path, tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "early", mini())
    resumed(run)
    assert numbers(run.path) == numbers(finished)


def test_a_run_without_its_checkpoints_keeps_its_metrics(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    shutil.rmtree(tmp_path / "run" / "checkpoints")
    with pytest.raises(DataError, match="checkpoints is empty"):
        resumed(RunDir.open(tmp_path / "run"))
    assert numbers(tmp_path / "run") == numbers(finished)


def test_a_damaged_trainer_state_is_a_one_line_error(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished, tmp_path / "run")
    _, checkpoint = latest_checkpoint(tmp_path / "run" / "checkpoints")
    state = checkpoint / "trainer_state.pt"
    for kept in (state.read_bytes()[:5000], b"nonsense", b""):
        state.write_bytes(kept)
        with pytest.raises(DataError, match=r"trainer_state\.pt is damaged: .* remove .*step_000004"):
            load_state(checkpoint)


def test_the_kl_penalty_compares_with_the_initial_policy_also_after_resuming(tmp_path: Path) -> None:
    settings = ("algorithm.kl_coef=0.1", "trainer.save_every=2")
    trained(tmp_path / "whole", *settings)
    trained(tmp_path / "half", *settings, "trainer.steps=2")
    config = json.loads((tmp_path / "half" / "config.json").read_text(encoding="utf-8"))
    config["trainer"]["steps"] = 4
    (tmp_path / "half" / "config.json").write_text(json.dumps(config), encoding="utf-8")
    run = RunDir.open(tmp_path / "half")
    resumed(run)
    kl = [record["kl_to_reference"] for record in numbers(tmp_path / "whole") if record["kind"] == "train"]
    assert kl[0] == pytest.approx(0, abs=1e-9)  # before the first update policy and reference are the same
    assert kl[-1] > 0
    assert numbers(tmp_path / "half") == numbers(tmp_path / "whole")


def test_evaluation_reports_success_with_its_error_and_pass_at_k(finished: Path) -> None:
    run = RunDir.open(finished)
    config = mini("eval.rows=5", "eval.samples=3", "eval.temperature=1.0")
    result = run_eval(config, run, console())
    assert len(result.groups) == 5
    assert result.metrics["rows"] == 5
    assert result.metrics["samples"] == 3
    assert "pass@3" in result.metrics
    again = run_eval(config, run, console())
    assert again.metrics == result.metrics


def test_sft_writes_a_checkpoint_that_rl_can_start_from(tmp_path: Path) -> None:
    config = mini()
    path = run_sft(config, build_task(config), RunDir.create(tmp_path / "sft", config), console())
    losses = [record["loss"] for record in numbers(tmp_path / "sft") if record["kind"] == "sft"]
    assert len(losses) == 4  # 8 demonstrations / 4 per update x 2 epochs
    assert losses[-1] < losses[0]
    assert path.name == "step_000004"
    assert [record["step"] for record in numbers(tmp_path / "sft") if record["kind"] == "eval"] == [0, 4]
    outcome = trained(tmp_path / "rl", f"model.path={tmp_path / 'sft'}", "sft.demos=null", "trainer.steps=1")
    assert outcome.after["step"] == 1


def test_sft_on_a_run_takes_its_good_training_episodes_only(finished: Path, tmp_path: Path) -> None:
    source = [f"sft.trajectories={finished}", "sft.demos=null", "sft.epochs=1", "sft.batch_size=1000"]
    best = max(t.total_reward for t in read_trajectories(finished / "trajectories", "train_*"))
    config = mini(*source, f"sft.min_reward={best / 2}")
    run_sft(config, build_task(config), RunDir.create(tmp_path / "own", config), console())
    good = [t for t in read_trajectories(finished / "trajectories", "train_*") if t.total_reward >= best / 2]
    [record] = [record for record in numbers(tmp_path / "own") if record["kind"] == "sft"]
    assert record["trajectories"] == len(good)
    config = mini(*source, "sft.min_reward=99")
    with pytest.raises(DataError, match=r"no trajectory under .* reward of at least sft\.min_reward=99"):
        run_sft(config, build_task(config), RunDir.create(tmp_path / "none", config), console())


def test_episodes_of_an_evaluation_are_not_imitated(finished: Path) -> None:
    file = finished / "trajectories" / "eval_000002.jsonl"
    assert file.is_file()
    with pytest.raises(ConfigError, match=r"holds episodes of test rows"):
        build_plan(mini(f"sft.trajectories={file}", "sft.demos=null"))


def test_trajectories_of_another_tokenizer_are_refused(finished: Path, tmp_path: Path) -> None:
    source = tmp_path / "other" / "trajectories"
    source.mkdir(parents=True)
    [first, *_] = read_trajectories(finished / "trajectories", "train_*")
    record = trajectory_to_json(first)
    for step in record["steps"]:
        step["action_text"] = "something else"
    (source / "train_000001.jsonl").write_text(json.dumps(record) + "\n", encoding="utf-8")
    config = mini(f"sft.trajectories={tmp_path / 'other'}", "sft.demos=null", "sft.min_reward=-1")
    with pytest.raises(DataError, match="was sampled with another tokenizer"):
        run_sft(config, build_task(config), RunDir.create(tmp_path / "run", config), console())


def test_a_warm_start_cannot_be_resumed_as_a_training_run(tmp_path: Path) -> None:
    config = mini("sft.count=4", "sft.epochs=1")
    run = RunDir.create(tmp_path / "sft", config)
    run_sft(config, build_task(config), run, console())
    with pytest.raises(ConfigError, match=r"model\.path="):
        resumed(run)
    assert Job.resumed(run, mini("trainer.steps=0"), ()).done  # its updates are no steps to go beyond


def test_a_run_of_zero_steps_saves_a_model(tmp_path: Path) -> None:
    trained(tmp_path / "none", "trainer.steps=0", "sft.demos=null")
    assert latest_checkpoint(tmp_path / "none" / "checkpoints")[0] == 0


def test_every_setting_of_the_learner_arrives() -> None:
    config = mini(
        "learner.lr=0.5",
        "learner.betas=[0.7,0.8]",
        "learner.adam_eps=1e-5",
        "learner.weight_decay=0.3",
        "learner.warmup_steps=3",
        "learner.schedule=linear",
        "learner.min_lr_ratio=0.25",
        "learner.target_kl=0.02",
        "trainer.steps=4",
        "seed=5",
        "learner.max_grad_norm=0.25",
        "learner.num_epochs=2",
        "learner.num_minibatches=3",
        "learner.max_tokens_per_pack=77",
        "learner.max_nonfinite_updates=9",
        "rollout.temperature=0.6",
        "algorithm.settings.clip_high=0.4",
    )
    model = load_model(config, base_model(config))
    learner = build_learner(config, model, build_algorithm(config), None)
    assert (learner.lr, learner.betas, learner.weight_decay, learner.adam_eps) == (0.5, (0.7, 0.8), 0.3, 1e-5)
    # 4 steps of 2 epochs of 3 mini-batches are 24: 3 of warm-up, then 21 from 1 down to 0.25
    rates = [learner.schedule(step, step) for step in (1, 2, 3, 10, 17, 24, 30)]
    assert rates == pytest.approx([0.25, 0.5, 0.75, 0.75, 0.5, 0.25, 0.25])
    assert (learner.target_kl, learner.seed) == (0.02, 5)
    assert (learner.max_grad_norm, learner.num_epochs, learner.num_minibatches) == (0.25, 2, 3)
    assert (learner.max_tokens_per_pack, learner.max_nonfinite_updates, learner.temperature) == (77, 9, 0.6)
    sft = build_sft_learner(config, model, num_updates=100)
    assert (sft.lr, sft.betas, sft.weight_decay, sft.temperature) == (3e-3, (0.7, 0.8), 0.3, 1.0)
    assert (sft.adam_eps, sft.target_kl) == (1e-5, None)
    assert sft.schedule(50, 50) == pytest.approx(0.1 + 0.9 * (1 + math.cos(math.pi * 40 / 90)) / 2)
    assert sft.schedule(100, 100) == pytest.approx(0.1)
    straight = build_sft_learner(mini("sft.schedule=linear"), model, num_updates=100)
    assert straight.schedule(55, 55) == pytest.approx(0.55)


def test_every_setting_of_the_critics_rate_arrives_or_is_the_learners(cache: Path) -> None:
    def critic(*overrides: str) -> Critic:
        config = mini("algorithm.name=ppo", "learner.lr=1e-4", "trainer.steps=11", *overrides)
        made = build_learner(config, load_model(config, base_model(config)), build_algorithm(config), None).critic
        assert made is not None
        return made

    def rates(made: Critic) -> list[float]:
        assert made.schedule is not None
        return [made.schedule(step, step) for step in (1, 6, 11)]

    falling = ("learner.warmup_steps=1", "learner.schedule=linear", "learner.min_lr_ratio=0")
    assert rates(critic()) == [1.0, 1.0, 1.0]
    assert critic().returns is None
    assert rates(critic(*falling)) == pytest.approx([0.5, 0.5, 0.0])
    assert rates(critic(*falling, "critic.schedule=constant")) == [0.5, 1.0, 1.0]
    assert rates(critic(*falling, "critic.warmup_steps=3", "critic.schedule=constant")) == [0.25, 1.0, 1.0]
    assert rates(critic("critic.schedule=cosine", "learner.min_lr_ratio=0.5"))[2] == pytest.approx(0.5)
    assert critic("critic.normalize_returns=true").returns is not None


def test_global_random_streams_are_restored(tmp_path: Path) -> None:
    seed_all(3)
    first = (random.random(), float(np.random.rand()), float(torch.rand(())))
    state = rng_state()
    second = (random.random(), float(np.random.rand()), float(torch.rand(())))
    torch.save(state, tmp_path / "state.pt")
    restore_rng(torch.load(tmp_path / "state.pt", weights_only=True))
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == second
    restore_rng({key: value for key, value in state.items() if key != "cuda"})  # saved without a GPU
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == second
    seed_all(3)
    assert (random.random(), float(np.random.rand()), float(torch.rand(()))) == first


def test_chat_uses_the_same_environment_and_keeps_the_conversation(finished: Path) -> None:
    chat = open_chat(parse_config(RunDir.open(finished).settings), str(finished))
    assert chat.question == "double 1000"
    chat.enter(2)
    assert chat.question == "double 1002"
    asyncio.run(answer(chat, "double 4", console()))
    asyncio.run(answer(chat, "and 5?", console()))
    with pytest.raises(ConfigError, match="row 99"):
        chat.enter(99)


def test_a_missing_model_is_a_clear_error(tmp_path: Path) -> None:
    for path, message in (
        ("./nowhere", "there is no such directory, and it is not a hub id"),
        (str(tmp_path), "holds no config.json: name a Hugging Face model directory, a run or a GGUF file"),
        (str(Path(__file__)), "is a file, and not a .gguf"),
    ):
        with pytest.raises(ConfigError, match=message):
            trained(tmp_path / f"run{len(path)}", f"model.path={path}", "sft.demos=null")
