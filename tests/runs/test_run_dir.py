"""The run directory survives kills, full disks and resumption."""

from __future__ import annotations

import json
import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from multiprocessing import Pipe
from pathlib import Path
from threading import Barrier

import pytest

from agent_r1.config import parse_config
from agent_r1.errors import ConfigError, DataError
from agent_r1.runs.records import read_trajectories, trajectory_from_json, trajectory_to_json
from agent_r1.runs.run_dir import RunDir, new_run_path
from agent_r1.types import Group, Step, StopReason, Support, TaskRow, ToolCallRecord, Trajectory

CONFIG = parse_config({"recipe": "x", "task": {"rows": "task.rows", "reward": "task.reward"}, "model": {"path": "a/b"}})
STEP = Step(
    prompt_ids=[1, 2],
    response_ids=[3, 4],
    response_logprobs=[-0.1, -1 / 3],
    reward=0.5,
    action_text='call "ü"',
    calls=(
        ToolCallRecord(
            name="add", arguments={"a": [1, None]}, result="3", reward=0.5, text_span=(0, 4), token_span=(0, 2)
        ),
    ),
    info={"k": 1},
)
TRAJECTORY = Trajectory(
    row_id="r",
    trajectory_id="r#0",
    steps=[STEP, replace(STEP, calls=())],
    stop=StopReason.MAX_STEPS,
    outcome_reward=1.0,
    reward_components={"reward": 1.0, "format": 0.25},
)
ROW = TaskRow(prompt=[{"role": "user", "content": "?"}], row_id="r", reward_model={"ground_truth": 3})


def test_a_trajectory_round_trips_exactly_through_json() -> None:
    record = json.loads(json.dumps(trajectory_to_json(TRAJECTORY, [[0.1, 0.2], [0.3, 0.4]])))
    assert record["steps"][0]["advantages"] == [0.1, 0.2]
    assert record["total_reward"] == 2.0  # 0.5 + 0.5 + 1.0
    assert trajectory_from_json(record) == TRAJECTORY


def test_the_ids_that_top_p_kept_round_trip_in_few_bytes() -> None:
    kept = [[3, 70_000], list(range(1000))]
    step = replace(STEP, temperature=0.7, top_p=0.9, top_k=1024, support=Support.of(kept))
    text = json.dumps(trajectory_to_json(replace(TRAJECTORY, steps=[step])))
    assert len(text) < 1002 * 4 * 4 / 3 + 1500  # four bytes an id, in base64
    [read] = trajectory_from_json(json.loads(text)).steps
    assert read == step
    assert read.support is not None
    assert read.support.per_token() == kept
    for damage in ('"counts": "AgA', '"ids": "AAAA'):
        with pytest.raises(DataError, match="not a trajectory record"):
            trajectory_from_json(json.loads(text.replace(damage.partition(': "')[0] + ': "', damage)))


def test_records_from_before_sampling_was_recorded_are_read() -> None:
    record = trajectory_to_json(TRAJECTORY)
    for step in record["steps"]:
        for name in ("temperature", "top_p", "top_k", "support"):
            del step[name]
    assert trajectory_from_json(record) == TRAJECTORY


def test_written_groups_are_read_back(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    path = run.write_trajectories("train", 3, [Group(row=ROW, trajectories=[TRAJECTORY])], {"r#0": [[1.0] * 2] * 2})
    assert path.name == "train_000003.jsonl.gz"
    assert list(read_trajectories(path)) == [TRAJECTORY]
    assert list(read_trajectories(path.parent, "train_*")) == [TRAJECTORY]
    with pytest.raises(DataError, match="no trajectories"):
        list(read_trajectories(path.parent, "eval_*"))


def test_a_file_that_is_not_trajectories_is_a_clear_error(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text('{"row_id": "r"}\n', encoding="utf-8")
    with pytest.raises(DataError, match="line 1: not a trajectory record: KeyError: 'trajectory_id'"):
        list(read_trajectories(path))


def test_a_run_directory_is_never_overwritten(tmp_path: Path) -> None:
    RunDir.create(tmp_path, CONFIG).append_metrics("eval", 0, {"success": 0.5})
    with pytest.raises(ConfigError, match="already holds a run; choose another folder"):
        RunDir.create(tmp_path, CONFIG)
    assert RunDir.open(tmp_path).config == CONFIG
    with pytest.raises(ConfigError, match="is not a run directory"):
        RunDir.open(tmp_path / "nowhere")


def test_a_start_that_came_to_nothing_is_not_in_the_way(tmp_path: Path) -> None:
    other = CONFIG.model_copy(update={"seed": 7})
    run = RunDir.create(tmp_path, CONFIG)
    with run.locked(), pytest.raises(ConfigError, match="another process is writing"):
        RunDir.create(tmp_path, other)  # it may have only just begun
    assert RunDir.open(tmp_path).config == CONFIG
    run.reference.mkdir()  # kept before the first evaluation
    assert RunDir.create(tmp_path, other).config == other
    assert not run.reference.exists()
    run.write_trajectories("collected", 1, [Group(row=ROW, trajectories=[TRAJECTORY])])
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDir.create(tmp_path, CONFIG)


def test_a_start_that_has_only_just_begun_is_not_taken_over(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, CONFIG)  # and has not come to write anything else
    with pytest.raises(ConfigError, match="another process is writing"):
        RunDir.create(tmp_path, CONFIG.model_copy(update={"seed": 7}))
    with pytest.raises(ConfigError, match="another process is writing"), RunDir.open(tmp_path).locked():
        pass
    with run.locked():
        assert run.config == CONFIG
    with RunDir.open(tmp_path).locked():  # free again
        pass


def test_of_many_starts_in_one_folder_one_wins_and_its_description_stays(tmp_path: Path) -> None:
    starts, losses = 4, ("another process is writing", "already holds a run")

    def start(folder: Path, seed: int) -> RunDir | str:
        together.wait()
        try:
            return RunDir.create(folder, CONFIG.model_copy(update={"seed": seed}))
        except ConfigError as error:
            return str(error)

    together = Barrier(starts)
    with ThreadPoolExecutor(starts) as threads:
        for attempt in range(50):
            folder = tmp_path / str(attempt)
            ended = list(threads.map(partial(start, folder), range(starts)))
            (seed,) = (seed for seed, end in enumerate(ended) if isinstance(end, RunDir))
            assert RunDir.open(folder).config.seed == seed
            assert all(isinstance(end, RunDir) or any(loss in end for loss in losses) for end in ended)


def test_what_is_forked_while_a_run_is_written_does_not_hold_it_afterwards(tmp_path: Path) -> None:
    run, (ours, its) = RunDir.create(tmp_path, CONFIG), Pipe()
    with run.locked():
        child = os.fork()
        if child == 0:
            its.send_bytes(b"begun")
            its.recv_bytes()
            os._exit(0)
        ours.recv_bytes()
        with pytest.raises(ConfigError, match="another process is writing"), RunDir.open(tmp_path).locked():
            pass  # nor has it given the lock up for the one who has it
    try:
        with RunDir.open(tmp_path).locked():
            pass
    finally:
        ours.send_bytes(b"end")
        os.waitpid(child, 0)


def test_a_failed_start_releases_the_directory(tmp_path: Path) -> None:
    (tmp_path / "config.json" / "x").mkdir(parents=True)  # cannot be replaced by a file
    with pytest.raises((OSError, ConfigError)):
        RunDir.create(tmp_path, CONFIG)
    shutil.rmtree(tmp_path / "config.json")
    assert RunDir.create(tmp_path, CONFIG).config == CONFIG


def test_folders_that_are_chosen_in_the_same_second_are_different_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r1.runs.run_dir.time.strftime", lambda form: "now")
    config = CONFIG.model_copy(update={"recipe": "quickstart"})
    names = [new_run_path(config, tmp_path, suffix=suffix).name for suffix in ("", "", "-sft", "-sft")]
    assert names == [f"quickstart-now-seed0{end}" for end in ("", "-2", "-sft", "-2-sft")]


def test_runs_that_lead_nowhere_are_told(tmp_path: Path) -> None:
    (tmp_path / "runs").symlink_to(tmp_path / "a disk that is not mounted")
    with pytest.raises(FileExistsError):
        new_run_path(CONFIG.model_copy(update={"recipe": "quickstart"}), tmp_path / "runs")


def test_a_model_is_not_taken_for_such_a_start(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(ConfigError, match="already holds a run"):
        RunDir.create(tmp_path, CONFIG)
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


def test_a_setting_of_an_env_may_be_infinite(tmp_path: Path) -> None:
    task = CONFIG.task.model_copy(update={"env_kwargs": {"patience": float("inf")}})
    RunDir.create(tmp_path, CONFIG.model_copy(update={"task": task}))
    assert RunDir.open(tmp_path).config.task.env_kwargs == {"patience": float("inf")}


def test_a_torn_last_line_is_ignored_and_later_steps_are_forgotten(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, CONFIG)
    for step in (1, 2, 3):
        run.append_metrics("train", step, {"loss": step / 3})
        run.write_trajectories("train", step, [Group(row=ROW, trajectories=[TRAJECTORY])])
    with (tmp_path / "metrics.jsonl").open("a", encoding="utf-8") as file:
        file.write('{"kind": "train", "st')  # killed while writing
    run.forget_after(2)
    assert [(record["step"], record["loss"]) for record in run.read_metrics("train")] == [(1, 1 / 3), (2, 2 / 3)]
    names = sorted(path.name for path in (tmp_path / "trajectories").iterdir())
    assert names == ["train_000001.jsonl.gz", "train_000002.jsonl.gz"]


def test_two_programs_cannot_write_to_one_run(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, CONFIG)
    refused = pytest.raises(ConfigError, match="another process is writing to")
    with run.locked(), refused, RunDir.open(tmp_path).locked():
        pass
    with RunDir.open(tmp_path).locked():  # free again
        pass


def test_a_model_directory_is_not_a_run(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"hidden_size": 32}', encoding="utf-8")
    with pytest.raises(ConfigError, match=r"its config\.json describes a model, not a run"):
        RunDir.open(tmp_path)


def test_a_number_that_is_not_finite_is_written_as_null(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, CONFIG)
    run.append_metrics("train", 1, {"loss": float("nan"), "lr": 0.5})
    assert '"loss": null, "lr": 0.5' in (tmp_path / "metrics.jsonl").read_text(encoding="utf-8")


def test_a_damaged_trajectory_file_is_a_clear_error(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path, CONFIG)
    path = run.write_trajectories("train", 1, [Group(row=ROW, trajectories=[TRAJECTORY] * 50)])
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"train_000001\.jsonl\.gz line"):
        list(read_trajectories(path))


def test_a_setting_that_could_only_be_nothing_does_not_shut_out_runs_that_have_it(tmp_path: Path) -> None:
    described = CONFIG.model_dump(mode="json") | {"lora": {"rank": 4, "dropout": 0.0}}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    lora = RunDir.open(tmp_path).config.lora
    assert lora is not None
    assert lora.rank == 4


def test_a_run_that_was_saved_with_settings_that_do_nothing_still_opens(tmp_path: Path) -> None:
    described = CONFIG.model_dump(mode="json")
    described |= {"critic": {"value_clip": 0.5}, "algorithm": {"name": "steppo", "settings": {"clip_high": 0.1}}}
    (tmp_path / "config.json").write_text(json.dumps(described), encoding="utf-8")
    config = RunDir.open(tmp_path).config
    assert config.critic is not None
    assert (config.critic.value_clip, config.learner.num_epochs, config.learner.num_minibatches) == (0.5, 1, 1)
