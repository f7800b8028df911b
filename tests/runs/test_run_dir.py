"""The run directory survives kills, concurrent starts and resumption."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Barrier

import pytest

from agent_r1 import __version__
from agent_r1.config import parse_config
from agent_r1.errors import ConfigError
from agent_r1.runs.run_dir import RunDir, new_run_path
from agent_r1.types import Group, StopReason, TaskRow, Trajectory

CONFIG = parse_config({"recipe": "x", "task": {"rows": "task.rows", "reward": "task.reward"}, "model": {"path": "a/b"}})
OTHER = CONFIG.model_copy(update={"seed": 7})
TRAJECTORY = Trajectory(row_id="r", trajectory_id="r#0", steps=[], stop=StopReason.ANSWERED)
GROUPS = [Group(row=TaskRow(prompt=[], row_id="r"), trajectories=[TRAJECTORY])]


def test_a_run_directory_is_never_overwritten(tmp_path: Path) -> None:
    RunDir.create(tmp_path, CONFIG).append_metrics("eval", 0, {"success": 0.5})
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDir.create(tmp_path, CONFIG)
    assert parse_config(RunDir.open(tmp_path).settings) == CONFIG


def test_a_directory_whose_run_produced_nothing_is_reused(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, CONFIG)
    run.reference.mkdir()  # written before the first evaluation
    run.write_tokens(["a"])
    with run.locked():
        pass
    again = RunDir.create(tmp_path, OTHER)
    assert parse_config(again.settings) == OTHER
    assert sorted(path.name for path in tmp_path.iterdir()) == [".lock", "config.json", "versions.json"]
    again.write_trajectories("collected", 1, GROUPS)
    with again.locked(), pytest.raises(ConfigError, match="already holds a run"):
        RunDir.create(tmp_path, CONFIG)


def test_a_run_records_the_versions_of_every_start_that_changes_them(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, CONFIG)
    run.record_versions()  # resumed by the same code
    (first,) = json.loads((tmp_path / "versions.json").read_text(encoding="utf-8"))
    assert first["agent-r1"] == __version__
    assert set(first) == {"agent-r1", "python", "torch", "transformers"}
    (tmp_path / "versions.json").write_text(json.dumps([{**first, "torch": "2.0"}]), encoding="utf-8")
    run.record_versions()  # resumed after an update of torch
    assert json.loads((tmp_path / "versions.json").read_text(encoding="utf-8")) == [{**first, "torch": "2.0"}, first]


def test_a_run_that_has_just_begun_or_is_being_written_is_locked(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, CONFIG)
    for _ in range(2):  # before and during its first `locked`
        with pytest.raises(ConfigError, match="another process is writing"):
            RunDir.create(tmp_path, OTHER)
        with pytest.raises(ConfigError, match="another process is writing"), RunDir.open(tmp_path).locked():
            pass
    with run.locked(), pytest.raises(ConfigError, match="another process"), RunDir.open(tmp_path).locked():
        pass
    with RunDir.open(tmp_path).locked():  # free again
        assert parse_config(run.settings) == CONFIG


def test_of_many_starts_in_one_folder_exactly_one_wins(tmp_path: Path) -> None:
    starts, losses = 4, ("another process is writing", "already holds a run")

    def start(folder: Path, seed: int) -> RunDir | str:
        together.wait()
        try:
            return RunDir.create(folder, CONFIG.model_copy(update={"seed": seed}))
        except ConfigError as error:
            return str(error)

    together = Barrier(starts)
    with ThreadPoolExecutor(starts) as threads:
        for attempt in range(20):
            folder = tmp_path / str(attempt)
            ended = list(threads.map(partial(start, folder), range(starts)))
            (seed,) = (seed for seed, end in enumerate(ended) if isinstance(end, RunDir))
            assert RunDir.open(folder).settings["seed"] == seed
            assert all(isinstance(end, RunDir) or any(loss in end for loss in losses) for end in ended)


def test_a_child_forked_while_a_run_is_written_does_not_keep_the_lock(tmp_path: Path) -> None:
    run, (ours, its) = RunDir.create(tmp_path, CONFIG), Pipe()
    with run.locked():
        child = os.fork()
        if child == 0:
            its.send_bytes(b"begun")
            its.recv_bytes()
            os._exit(0)
        ours.recv_bytes()
        with pytest.raises(ConfigError, match="another process is writing"), RunDir.open(tmp_path).locked():
            pass  # nor did the child release it
    try:
        with RunDir.open(tmp_path).locked():
            pass
    finally:
        ours.send_bytes(b"end")
        os.waitpid(child, 0)


def test_a_failed_start_releases_the_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(shutil, "rmtree", lambda *args, **kwargs: (_ for _ in ()).throw(OSError("disk full")))
        with pytest.raises(OSError, match="disk full"):
            RunDir.create(tmp_path, CONFIG)
    assert parse_config(RunDir.create(tmp_path, CONFIG).settings) == CONFIG


def test_a_model_directory_is_neither_a_run_nor_a_place_for_one(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="already holds"):
        RunDir.create(tmp_path, CONFIG)
    with pytest.raises(ConfigError, match="describes a model"):
        RunDir.open(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_folders_chosen_in_the_same_second_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.runs.run_dir.time.strftime", lambda form: "now")
    names = [new_run_path("x", seed=0, suffix=suffix, root=tmp_path).name for suffix in ("", "", "-sft", "-sft")]
    assert names == [f"x-now-seed0{end}" for end in ("", "-2", "-sft", "-2-sft")]
    (tmp_path / "runs").symlink_to(tmp_path / "a disk that is not mounted")
    with pytest.raises(ConfigError, match=r"^cannot create the folder .*runs: File exists; choose another"):
        new_run_path("x", seed=0, root=tmp_path / "runs")


def test_a_run_directory_that_cannot_be_created_is_refused_by_name(tmp_path: Path) -> None:
    (tmp_path / "notes").write_text("a file", encoding="utf-8")
    with pytest.raises(ConfigError, match=r"^cannot create the folder .*notes: File exists"):
        RunDir.create(tmp_path / "notes", CONFIG)
    with pytest.raises(ConfigError, match=r"^cannot create the folder .*mine: Not a directory"):
        RunDir.create(tmp_path / "notes" / "mine", CONFIG)


def test_a_setting_of_an_env_may_be_infinite(tmp_path: Path) -> None:
    task = CONFIG.task.model_copy(update={"env_kwargs": {"patience": float("inf")}})
    run = RunDir.create(tmp_path, CONFIG.model_copy(update={"task": task}))
    assert parse_config(run.settings).task.env_kwargs == {"patience": float("inf")}


def test_a_run_saved_with_settings_that_are_refused_now_still_opens(tmp_path: Path) -> None:
    described = CONFIG.model_dump(mode="json")
    described |= {"critic": {"value_clip": 0.5}, "algorithm": {"name": "steppo", "settings": {"clip_high": 0.1}}}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    critic = parse_config(RunDir.open(tmp_path).settings).critic
    assert critic is not None
    assert critic.value_clip == 0.5


def test_resuming_drops_what_came_after_the_checkpoint(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, CONFIG)
    for step in (1, 2, 3):
        run.append_metrics("train", step, {"loss": step / 3})
        run.append_metrics("eval", step, {"success": 0.5})
        run.write_trajectories("train", step, GROUPS)
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    run.forget_after(2)
    assert [(record["step"], record["loss"]) for record in run.read_metrics("train")] == [(1, 1 / 3), (2, 2 / 3)]
    assert [record["step"] for record in run.read_metrics("eval")] == [1]  # the episodes of the second are missing
    names = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert names == [f"train_00000{step}.jsonl{index}" for step in (1, 2) for index in ("", ".idx")]


def test_a_number_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, CONFIG)
    run.append_metrics("train", 1, {"loss": float("nan"), "lr": 0.5})
    assert '"loss": null, "lr": 0.5' in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")
