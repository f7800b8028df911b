"""What a viewer asks of a run directory."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from agent_r1.errors import ConfigError, DataError
from agent_r1.runs.outcomes import EvalRecord, Subject
from agent_r1.runs.reader import RunReader
from agent_r1.runs.run_dir import RunDir
from agent_r1.tokens.vocabulary import token_texts
from tests.chatml import tokenizer
from tests.runs.test_run_dir import CONFIG, GROUPS, TRAJECTORY


@pytest.fixture
def run(tmp_path: Path) -> RunReader:
    written = RunDir.create(tmp_path / "run", CONFIG)
    for step in (1, 12):
        groups = [replace(GROUPS[0], trajectories=[TRAJECTORY] * step)]
        written.write_trajectories("train", step, groups)
        written.append_metrics("train", step, {"success": step / 100})
    written.write_trajectories("eval", 10, GROUPS)
    subject = Subject.of(written.settings, model="m", panel="p")
    EvalRecord(subject=subject, outcomes={"a": {"success": 1.0}}, metrics={}).save(written.evals / "best.json")
    written.write_tokens(token_texts(tokenizer()))
    return RunReader.open(written.path)


def test_a_run_lists_its_files_metrics_and_evaluations(run: RunReader) -> None:
    assert [(file.path.name, len(file)) for file in run.files("train")] == [
        ("train_000001.jsonl", 1),
        ("train_000012.jsonl", 12),
    ]
    assert len(run.files()) == 3
    assert run.files("sft") == []
    assert list(run.files("eval")[0].trajectories()) == [TRAJECTORY]
    assert [record["success"] for record in run.read_metrics("train")] == [0.01, 0.12]
    assert run.evaluations()["best"].outcomes == {"a": {"success": 1.0}}
    assert run.settings["model"]["path"] == "a/b"


def test_tokens_have_texts_without_a_model(run: RunReader) -> None:
    text = "Zoë says <|im_end|>\n"
    texts = run.token_texts([*tokenizer().encode(text), 10**6])
    assert "<|im_end|>" in texts
    assert texts[-1] == ""
    assert "".join(texts).encode("utf-8", "surrogateescape") == text.encode()
    (run.path / "tokens.json").unlink()
    with pytest.raises(DataError, match=r"tokens\.json"):
        RunReader.open(run.path).token_texts([1])


def test_what_is_not_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such folder"):
        RunReader.open(tmp_path / "nowhere")
    with pytest.raises(ConfigError, match=r"no config\.json"):
        RunReader.open(tmp_path)
