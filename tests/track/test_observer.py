"""Trackers follow a run from threads of their own. One that raises or hangs is reported once and costs nothing else."""

from __future__ import annotations

import json
import math
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from agent_r1.api.results import Transcript
from agent_r1.config import load_config
from agent_r1.errors import ConfigError
from agent_r1.runs.run_dir import Evaluation, RunDir
from agent_r1.track import observer
from agent_r1.track.base import Start, Table
from agent_r1.track.observer import IDS, KINDS, Tracking, chosen_transcripts, evaluation_table
from agent_r1.types import Group, Step, StopReason, TaskRow, Trajectory
from agent_r1.vision.contents import picture_mark
from agent_r1.vision.pictures import as_picture
from tests.conftest import Cli
from tests.ranks_started import MINI


def episode(name: str, reward: float, texts: Sequence[str] = ("a | b\nc",)) -> Group:
    steps = [Step(prompt_ids=[0], response_ids=[1], response_logprobs=[0.0], action_text=text) for text in texts]
    played = Trajectory(row_id=name, trajectory_id=name, steps=steps, stop=StopReason.ANSWERED, outcome_reward=reward)
    return Group(row=TaskRow(prompt=[{"role": "user", "content": f"{name}?"}], row_id=name), trajectories=[played])


GROUPS = [episode("first", 0.0), episode("second", 1.0), episode("third", 0.0), episode("long", 0.0, ["x", "y"])]
EVALUATION = Evaluation(metrics={"success": 0.25, "odd": math.nan}, groups=GROUPS, panel="p")


def play(run: RunDir, tracking: Tracking, *, step: int = 0) -> None:
    """What a trainer tells its observer."""
    tracking.start(run, step=step)
    tracking.evaluation(step, EVALUATION)
    tracking.step(step + 1, GROUPS, {"success": 0.5, "reward/mean": 0.75, "kl": math.inf})
    (run.path / "curve.png").write_bytes(PNG)
    tracking.finish(run)


PNG = bytes.fromhex(
    "89504e470d0a1a0a0000000d49484452000000010000000108020000009077"
    "53de0000000c4944415408d763f8cfc0000003010100c9fe92ef0000000049454e44ae426082"
)
SETTINGS: dict[str, Any] = load_config(MINI).model_dump(mode="json")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", load_config(MINI))


class Recorded:
    """A tracker that remembers what it was told, and fails where it is told to."""

    PACKAGE = "json"

    def __init__(self, about: Start, *, fail: str = "") -> None:
        self.about, self.fail, self.told = about, fail, list[tuple[Any, ...]]()
        self.id = about.known or "id-1"
        self._tell("start")

    def _tell(self, what: str, *more: Any) -> None:
        self.told.append((what, *more))
        if self.fail == what:
            raise RuntimeError("the server said no")
        if self.fail == f"{what} hangs":
            threading.Event().wait(60)

    def metrics(self, step: int, metrics: Mapping[str, float]) -> None:
        self._tell("metrics", step, dict(metrics))

    def table(self, step: int, table: Table) -> None:
        self._tell("table", step, len(table.rows))

    def transcripts(self, step: int, texts: Sequence[str]) -> None:
        self._tell("transcripts", step, len(texts))

    def picture(self, step: int, path: Path) -> None:
        self._tell("picture", step, path.name)

    def finish(self) -> None:
        self._tell("finish")


Install = Callable[..., list[Recorded]]


@pytest.fixture
def install(monkeypatch: pytest.MonkeyPatch) -> Install:
    """Put a tracker that records in the place of one that is known."""

    def put(name: str, fail: str = "") -> list[Recorded]:
        made: list[Recorded] = []

        def start(about: Start) -> Recorded:
            made.append(Recorded(about, fail=fail))
            return made[-1]

        module = ModuleType(f"recorded_{name}")
        vars(module).update(PACKAGE="json", check=lambda: None, start=start)
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setitem(KINDS, name, module.__name__)
        return made

    return put


TOLD = [
    ("start",),
    ("metrics", 0, {"eval/success": 0.25}),  # numbers that are not finite are left out
    ("table", 0, 4),
    ("transcripts", 0, 3),
    ("metrics", 1, {"train/success": 0.5, "train/reward/mean": 0.75}),
    ("picture", 1, "curve.png"),
    ("finish",),
]


def test_a_tracker_is_told_everything_in_order(run: RunDir, install: Install) -> None:
    made = install("wandb")
    play(run, Tracking(["wandb"], SETTINGS))
    [tracker] = made
    assert tracker.told == TOLD
    assert (tracker.about.name, tracker.about.known, tracker.about.step) == ("run", None, 0)
    assert tracker.about.settings["learner"]["lr"] == 1e-3


def test_a_resumed_run_continues_in_the_same_place(run: RunDir, install: Install) -> None:
    made = install("wandb")
    play(run, Tracking(["wandb"], SETTINGS))
    assert json.loads((run.path / IDS).read_text()) == {"wandb": "id-1"}
    play(run, Tracking(["wandb"], SETTINGS), step=1)
    assert (made[1].about.known, made[1].about.step) == ("id-1", 1)


@pytest.mark.parametrize("where", ["start", "metrics", "table", "picture", "finish"])
def test_a_tracker_that_raises_is_reported_once_and_the_others_go_on(run: RunDir, install: Install, where: str) -> None:
    install("wandb", fail=where)
    healthy = install("mlflow")
    with pytest.warns(RuntimeWarning, match="wandb.*the server said no") as said:
        play(run, Tracking(["wandb", "mlflow"], SETTINGS))
    assert len([warning for warning in said if "wandb" in str(warning.message)]) == 1
    assert healthy[0].told == TOLD


@pytest.mark.parametrize("where", ["start hangs", "metrics hangs", "finish hangs"])
def test_a_tracker_that_hangs_does_not_hold_up_the_run(
    run: RunDir, install: Install, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(observer, "FINISH_SECONDS", 0.05)
    install("wandb", fail=where)
    with pytest.warns(RuntimeWarning, match=r"wandb: it did not finish in 0\.05 s"):
        play(run, Tracking(["wandb"], SETTINGS))


def test_a_tracker_that_takes_nothing_is_not_fed_forever(
    run: RunDir, install: Install, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(observer, "MAX_WAITING", 5)
    monkeypatch.setattr(observer, "FINISH_SECONDS", 0.05)
    install("wandb", fail="start hangs")

    def feed() -> None:
        tracking = Tracking(["wandb"], SETTINGS)
        tracking.start(run, step=0)
        for step in range(20):
            tracking.step(step, GROUPS, {"success": 0.5})
        tracking.finish(run)

    with pytest.warns(RuntimeWarning, match="has not taken 5 messages") as said:
        feed()
    assert len(said) == 1


@pytest.mark.filterwarnings("error")
def test_a_failing_tracker_ends_no_run_even_if_warnings_are_errors(run: RunDir, install: Install) -> None:
    install("wandb", fail="metrics")
    play(run, Tracking(["wandb"], SETTINGS))


def test_what_is_not_installed_or_named_twice_is_an_error_before_anything_starts(
    tmp_path: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("agent_r1.track.tensorboard_tracker.PACKAGE", "no_such_package")
    ended = cli("train", MINI, "track=[tensorboard]", "--run", tmp_path / "run")
    assert ended.code == 2
    assert "pip install 'agent-r1[tensorboard]'" in ended.err
    assert cli("train", MINI, "track=[tensorbored]", "--run", tmp_path / "run").code == 2
    assert not (tmp_path / "run").exists()
    with pytest.raises(ConfigError, match="twice"):
        Tracking(["wandb", "wandb"], SETTINGS)


def test_without_a_key_wandb_is_refused_before_it_asks_for_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("wandb")
    for name in ("WANDB_MODE", "WANDB_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    with pytest.raises(ConfigError, match="WANDB_MODE=offline"):
        Tracking(["wandb"], SETTINGS)
    monkeypatch.setenv("WANDB_MODE", "offline")
    Tracking(["wandb"], SETTINGS)


def test_an_evaluation_is_a_table_and_a_few_transcripts() -> None:
    table = evaluation_table(EVALUATION, 1.0)
    assert table.rows[1] == ["second", "second?", "a | b\nc", 1.0, 1.0, 1.0, "answered"]
    assert table.as_markdown().splitlines()[3] == "| second | second? | a \\| b c | 1 | 1 | 1 | answered |"
    texts = chosen_transcripts(EVALUATION, 1.0)
    assert [text.splitlines()[0] for text in texts] == [
        "row first, reward 0", "row second, reward 1", "row long, reward 0",
    ]  # fmt: skip
    assert texts[0].splitlines()[1] == "user: first?"


def test_pictures_in_a_question_are_marks() -> None:
    picture = as_picture(PNG, what="the picture")
    group = episode("seen", 1.0)
    group.row.prompt[0]["content"] = [{"type": "image", "image": picture}, {"type": "text", "text": "red?"}]
    seen = Evaluation(metrics={}, groups=[group], panel="p")
    asked = f"{picture_mark(picture)}\nred?"
    assert evaluation_table(seen, 1.0).rows[0][1] == asked
    assert f"user: {asked}" in chosen_transcripts(seen, 1.0)[0]
    assert Transcript(group.row, group.trajectories[0]).lines[0] == ("user", asked)


# The real clients that have a local mode and are light enough to run here. The others are in test_offline_logs.py.


def test_mlflow_keeps_metrics_config_and_files(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    mlflow = pytest.importorskip("mlflow")
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file:{run.path.parent / 'mlruns'}")
    play(run, Tracking(["mlflow"], SETTINGS))
    play(run, Tracking(["mlflow"], SETTINGS), step=1)
    client = mlflow.MlflowClient()
    [found] = client.search_runs([client.get_experiment_by_name("agent-r1").experiment_id])
    assert found.info.run_id == json.loads((run.path / IDS).read_text())["mlflow"]
    assert found.info.status == "FINISHED"
    assert found.data.params["learner.lr"] == "0.001"
    curve = client.get_metric_history(found.info.run_id, "train/reward/mean")
    assert [(point.step, point.value) for point in curve] == [(1, 0.75), (2, 0.75)]
    files = {item.path for folder in ("", "eval") for item in client.list_artifacts(found.info.run_id, folder)}
    assert {"config.json", "curve.png", "eval/table_000000.json", "eval/transcripts_000001.txt"} <= files


def test_trackio_keeps_metrics_in_one_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKIO_DIR", str(run.path.parent / "trackio"))  # read when it is imported
    monkeypatch.setenv("TRACKIO_PROJECT", "coins")
    pytest.importorskip("trackio")
    play(run, Tracking(["trackio"], SETTINGS))
    play(run, Tracking(["trackio"], SETTINGS), step=1)
    from trackio.sqlite_storage import SQLiteStorage

    [name] = SQLiteStorage.get_runs("coins")
    assert name == json.loads((run.path / IDS).read_text())["trackio"]
    assert name.startswith("run-")
    logs = SQLiteStorage.get_logs("coins", name)
    assert [(log["step"], log["train/reward/mean"]) for log in logs if "train/reward/mean" in log] == [
        (1, 0.75), (2, 0.75),
    ]  # fmt: skip
    assert {"eval/table", "eval/transcripts", "curve"} <= {name for log in logs for name in log}


def test_swanlab_keeps_metrics_in_one_run(run: RunDir, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("swanlab")
    monkeypatch.setenv("SWANLAB_MODE", "offline")
    play(run, Tracking(["swanlab"], SETTINGS))
    play(run, Tracking(["swanlab"], SETTINGS), step=1)
    from swanlab.proto.swanlab.record.v1.record_pb2 import Record

    from tests.track.test_offline_logs import records

    files = sorted(run.path.glob("swanlog/*/*.swanlab"))
    kept = json.loads((run.path / IDS).read_text())["swanlab"]
    assert {file.stem for file in files} == {f"run-{kept}"}
    said = ""
    for data in (data for file in files for data in records(file)):
        record = Record()
        record.ParseFromString(data)
        said += str(record)
    assert said.count("train/reward/mean") >= 2
    assert "0.75" in said
    assert list(run.path.glob("swanlog/*/media/image/*.png"))
