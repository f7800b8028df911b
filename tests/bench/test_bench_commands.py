"""`agent-r1 bench` runs on a CPU at its small sizes, stores its rows and compares them with stored ones."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from agent_r1.bench.command import Options, bench
from agent_r1.bench.models import TINY
from agent_r1.cli.app import app
from agent_r1.errors import ConfigError
from tests.bench.result_files import read_rows


def options(out: Path, only: str | None = None, repeats: int = 1) -> Options:
    return Options(device="cpu", quick=True, repeats=repeats, out=out, only=only)


@pytest.fixture
def console() -> Console:
    return Console(width=120, record=True)


def test_the_engine_is_measured_group_by_group(tmp_path: Path, console: Console) -> None:
    path = bench("engine", options(tmp_path, repeats=2), console)
    assert path.name.startswith("bench_engine.")
    assert path.name.endswith(".quick.json")
    rows = read_rows(path)
    decode = rows["decode/4 sequences"]
    assert len(decode["repeats"]) == 2
    assert 0 < decode["figures"]["floor_share"] < 1
    assert rows["episodes/tools of 0 ms"]["figures"]["decode_share"] > 0

    again = read_rows(bench("engine", options(tmp_path, only="decode"), console))
    assert "2 of 2 rows compared" in console.export_text()
    assert again["decode/4 sequences"] != decode  # measured again
    assert again["episodes/tools of 0 ms"] == rows["episodes/tools of 0 ms"]  # kept


def test_a_whole_step_is_measured_part_by_part(tmp_path: Path, console: Console) -> None:
    [row] = read_rows(bench("step", options(tmp_path), console)).values()
    figures = row["figures"]
    parts = sum(figures[f"{part}_seconds"] for part in ("collect", "update", "sync"))
    assert figures["seconds"] == pytest.approx(parts)
    # 2 rows x 2 attempts x 3 steps x 4 tokens
    assert figures["sampled_tokens_per_second"] == pytest.approx(48 / figures["seconds"])


def test_the_command_line_measures_a_model_by_its_configuration_alone(tmp_path: Path) -> None:
    TINY.model().config.save_pretrained(tmp_path / "model")
    words = ["bench", "learner", "--device", "cpu", "--repeats", "1", "--model", str(tmp_path / "model")]
    ran = CliRunner().invoke(app, [*words, "--out", str(tmp_path / "out")])
    assert ran.exit_code == 0, ran.output
    assert "tokens per second" in ran.output
    [file] = (tmp_path / "out").iterdir()
    [row] = read_rows(file).values()
    assert row["settings"]["model"] == str(tmp_path / "model")
    assert "model" in file.name  # not in the file of the default model


def test_bad_options_are_refused_before_anything_is_measured(tmp_path: Path, console: Console) -> None:
    with pytest.raises(ConfigError, match="decode"):
        bench("engine", options(tmp_path, only="decoding"), console)
    with pytest.raises(ConfigError, match="--repeats"):
        options(tmp_path, repeats=0)
    with pytest.raises(ConfigError, match="nowhere"):
        bench("step", Options(device="cpu", model=str(tmp_path / "nowhere"), out=tmp_path), console)
    assert list(tmp_path.iterdir()) == []
