"""Offline logs, read back from the trackers' own files, say what metrics.jsonl says; a resumed run continues them."""

from __future__ import annotations

import json
import struct
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.runs.reader import RunReader
from agent_r1.track.observer import IDS
from tests.conftest import Cli
from tests.ranks_started import MINI

Curves = dict[str, dict[int, float]]  # metric -> step -> value
BLOCK, HEADER = 32768, 7  # bytes, of the LevelDB log format that wandb and swanlab write
STEPS = 3


def written(run: Path) -> Curves:
    """What metrics.jsonl says. Numbers of step 2 were written once, although the run was resumed there."""
    curves: Curves = defaultdict(dict)
    for record in RunReader.open(run).read_metrics():
        for name, value in record.items():
            if name not in ("kind", "step", "time", "panel") and value is not None:
                curves[f"{record['kind']}/{name}"][record["step"]] = value
    return dict(curves)


def records(path: Path) -> Iterator[bytes]:
    data, position, parts = path.read_bytes(), HEADER, b""
    while position + HEADER <= len(data):
        if (left := BLOCK - position % BLOCK) < HEADER:
            position += left
            continue
        _, size, kind = struct.unpack("<IHB", data[position : position + HEADER])
        parts += data[position + HEADER : position + HEADER + size]
        position += HEADER + size
        if kind in (1, 4):  # a whole record, or the last part of one
            yield parts
            parts = b""


@pytest.fixture(scope="module")
def run(cache: None, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where a run is tracked by two trackers, and resumed."""
    pytest.importorskip("wandb")
    pytest.importorskip("tensorboard")
    return tmp_path_factory.mktemp("runs") / "tracked"


@pytest.fixture
def tracked(run: Path, cli: Cli, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WANDB_MODE", "offline")
    if not run.exists():
        words = ["track=[wandb,tensorboard]", "trainer.steps=2"]
        assert cli("train", MINI, *words, "--run", run).code == 0
        first = (run / IDS).read_text()
        assert cli("train", "--resume", run, f"trainer.steps={STEPS}").code == 0
        assert (run / IDS).read_text() == first
    return run


def test_tensorboard_has_every_number(tracked: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    log = EventAccumulator(str(tracked / "tensorboard"))
    log.Reload()
    seen = {name: {event.step: event.value for event in log.Scalars(name)} for name in log.Tags()["scalars"]}
    expected = written(tracked)
    assert seen.keys() == expected.keys()
    for name, curve in expected.items():
        assert seen[name] == pytest.approx(curve, rel=1e-6)  # TensorBoard keeps float32
    assert set(seen["train/success"]) == set(range(1, STEPS + 1))
    assert "curve" in log.Tags()["images"]
    texts = {tag: log.Tensors(tag)[0].tensor_proto.string_val[0].decode() for tag in log.Tags()["tensors"]}
    assert "recipe:" in texts["config/text_summary"]
    assert "| row | prompt |" in texts["eval/table/text_summary"]
    assert "user: double" in texts["eval/transcript_0/text_summary"]


def test_wandb_has_every_number_in_one_run(tracked: Path) -> None:
    from wandb.proto import wandb_internal_pb2

    seen: Curves = defaultdict(dict)
    files = sorted(tracked.glob("wandb/offline-run-*/run-*.wandb"))
    assert len(files) == 2  # before and after the resume; `wandb sync` merges them by the id
    ids, media = set(), set()
    for data in (data for file in files for data in records(file)):
        record = wandb_internal_pb2.Record()
        record.ParseFromString(data)
        if record.WhichOneof("record_type") == "run":
            ids.add(record.run.run_id)
            config = {item.key: json.loads(item.value_json) for item in record.run.config.update}
            assert config["learner"]["lr"] == 1e-3
        if record.WhichOneof("record_type") == "history":
            items = record.history.item
            logged = {item.key or ".".join(item.nested_key): json.loads(item.value_json) for item in items}
            media |= {name.split(".")[0] for name in logged if "." in name}
            for name, value in logged.items():
                if "." not in name and name.startswith(("train/", "eval/")):
                    seen[name][logged["step"]] = value
    assert ids == {json.loads((tracked / IDS).read_text())["wandb"]}
    assert seen == written(tracked)
    assert {"eval/table", "eval/transcripts", "curve"} <= media
