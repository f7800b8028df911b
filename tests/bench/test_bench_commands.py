"""Every benchmark runs on a CPU at its small sizes, stores what it measured and compares with what was stored."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

from agent_r1.bench import learner
from agent_r1.bench.command import Options, bench_engine, bench_learner, bench_step
from agent_r1.bench.episodes import Workload
from agent_r1.bench.models import Shape, make_network
from agent_r1.bench.step import QUICK, StepBench
from agent_r1.bench.training import Maker, PaddedTrainer, one_row_per_step
from agent_r1.cli.app import app
from agent_r1.errors import ConfigError

CPU = torch.device("cpu")


def options(out: Path, only: str | None = None, repeats: int = 1) -> Options:
    return Options(device="cpu", quick=True, repeats=repeats, out=out, only=only)


def rows_of(path: Path) -> dict[str, dict[str, Any]]:
    stored = json.loads(path.read_text(encoding="utf-8"))
    assert stored["accelerator"]
    assert {"commit", "torch", "processor"} <= stored.keys()
    for row in stored["rows"]:
        assert row["commit"]
        assert row["headline"] in row["figures"]
        assert all(map(math.isfinite, row["figures"].values()))
    return {row["name"]: row for row in stored["rows"]}


@pytest.fixture
def console() -> Console:
    return Console(width=120, record=True)


def test_the_engine_is_measured_group_by_group(tmp_path: Path, console: Console) -> None:
    path = bench_engine(options(tmp_path, repeats=2), console)
    assert path.name.startswith("bench_engine.")
    assert path.name.endswith(".quick.json")
    rows = rows_of(path)
    decode = rows["decode/4 sequences"]
    assert len(decode["repeats"]) == 2
    assert 0 < decode["figures"]["floor_share"] < 1
    assert rows["episodes/tools of 0 ms"]["figures"]["decode_share"] > 0
    # After the first step only the observation and the last sampled token have to run, for each of two episodes; an
    # engine that shares whole blocks alone may run the rest of one again.
    prefilled = [rows[f"append/step {step}"]["figures"]["prefilled_tokens"] for step in range(2, 7)]
    assert all(2 * 9 <= tokens < 2 * (9 + 32) for tokens in prefilled)
    soak = rows["soak/all rounds"]["figures"]
    assert soak["tool_errors"] > 0
    assert soak["cancelled_requests"] > 0
    nothing = ("lost_episodes", "unanswered_requests", "free_blocks_growth", "pending_requests_growth")
    assert {name: soak[name] for name in nothing} == dict.fromkeys(nothing, 0)


def test_the_learner_is_measured_and_compared_with_what_is_stored(tmp_path: Path, console: Console) -> None:
    path = bench_learner(options(tmp_path), console)
    rows = rows_of(path)
    assert {name.partition("/")[0] for name in rows} == {"packed", "steps", "shared", "sharing"}
    assert "0 of" in console.export_text()
    merged = rows["steps/3 steps, prompt of 12"]["figures"]
    assert merged["fp32_gradient_difference"] < 1e-5
    # Rows of 16, 24 and 32 tokens against one of 32, with 12 trained tokens either way; 39,936 weights in the body,
    # 15,360 in the head, an attention of width 96. 6 x (39,936 x 72 + 15,360 x 12) + 12 x 96 x (136 + 300 + 528) over
    # 6 x (39,936 x 32 + 15,360 x 12) + 12 x 96 x 528.
    assert merged["flops_ratio_over_steps"] == pytest.approx(19_468_800 / 9_381_888 / 3)
    assert rows["shared/prompt of 32 tokens"]["figures"]["fp32_gradient_difference"] < 1e-5
    # 4 x (32 + 8) tokens as segments; 32 + 4 x 8 as a tree.
    assert rows["shared/prompt of 32 tokens"]["figures"]["token_ratio"] == 160 / 64

    again = rows_of(bench_learner(options(tmp_path, only="steps"), console))
    assert "1 of 1 rows compared" in console.export_text()
    assert again.keys() == rows.keys()
    assert again["steps/3 steps, prompt of 12"] != rows["steps/3 steps, prompt of 12"]  # measured anew
    assert again["shared/prompt of 32 tokens"] == rows["shared/prompt of 32 tokens"]  # kept


def test_a_whole_step_is_measured_part_by_part(tmp_path: Path, console: Console) -> None:
    [row] = rows_of(bench_step(options(tmp_path), console, against=None)).values()
    figures = row["figures"]
    parts = sum(figures[f"{part}_seconds"] for part in ("collect", "update", "sync"))
    assert figures["seconds"] == pytest.approx(parts)
    # 2 rows x 2 attempts x 3 steps x 4 tokens
    assert figures["sampled_tokens_per_second"] == pytest.approx(48 / figures["seconds"])


def test_the_command_line_runs_a_benchmark_and_shows_its_file(tmp_path: Path) -> None:
    words = ["bench", "learner", "--quick", "--device", "cpu", "--repeats", "1", "--only", "shared"]
    ran = CliRunner().invoke(app, [*words, "--out", str(tmp_path)])
    assert ran.exit_code == 0, ran.output
    assert "tree seconds" in ran.output
    [file] = tmp_path.iterdir()
    shown = CliRunner().invoke(app, ["bench", "show", str(file), "--only", "shared"])
    assert "| token ratio | 2.50x |" in shown.output


class Snail:
    """A rival that says what it took."""

    name = "snail"

    def __init__(self, workload: Workload, shape: Shape, device: torch.device) -> None:
        self.settings = {"rows": workload.rows, "home": True}

    def run(self, steps: int, between: Callable[[], None]) -> list[float]:
        for _ in range(steps):
            between()
        return [float(1000 * (number + 1)) for number in range(steps)]


def test_a_rival_takes_turns_with_us_and_its_first_step_does_not_count() -> None:
    [row] = StepBench(sizes=QUICK, device=CPU, repeats=2, make_rival=Snail).step()
    assert row.name == "step/agent-r1 and snail"
    assert row.settings["home"]
    assert [figures["snail_seconds"] for figures in row.repeats] == [2000.0, 3000.0]
    assert all(f["speed_ratio"] == f["snail_seconds"] / f["seconds"] for f in row.repeats)


@pytest.mark.skipif(find_spec("trl") is not None, reason="trl is installed")
def test_a_rival_that_is_not_installed_is_an_error_that_says_so(tmp_path: Path, console: Console) -> None:
    with pytest.raises(ConfigError, match="No module named 'trl'"):
        bench_step(options(tmp_path), console, against="trl")


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_trl_plays_the_same_workload(tmp_path: Path, console: Console) -> None:
    [row] = rows_of(bench_step(options(tmp_path), console, against="trl")).values()
    assert row["figures"]["trl_seconds"] > 0  # that its episodes have the same lengths, it checks itself


def test_an_unknown_group_is_refused_before_anything_is_measured(tmp_path: Path, console: Console) -> None:
    with pytest.raises(ConfigError, match="decode"):
        bench_engine(options(tmp_path, only="decoding"), console)
    with pytest.raises(ConfigError, match="--repeats"):
        options(tmp_path, repeats=0)
    assert list(tmp_path.iterdir()) == []


def test_the_padded_baseline_computes_the_gradient_that_packing_does() -> None:
    maker = Maker(learner.QUICK.shape.vocabulary)
    batch = [maker.single(maker.ids(prompt), response) for prompt, response in ((5, 9), (3, 4), (8, 1))]
    network = make_network(learner.QUICK.shape, dtype=torch.float32, device=CPU)
    padded = PaddedTrainer(model=network, autocast_dtype=None)
    bench = learner.LearnerBench(sizes=learner.QUICK, device=CPU, repeats=1)
    expected = learner._gradient(bench._learner(bench.policy()), batch)
    for micro_batch in (1, 2, 3):
        padded.step(batch, micro_batch)
        got = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
        assert learner._difference(got, expected) < 1e-5


def test_one_row_per_step_keeps_every_step_and_advantage() -> None:
    episode = Maker(320).growing(steps=3, prompt=6, response=2, observation=4)
    rows = one_row_per_step([episode])
    assert [row.trajectory.steps[0] for row in rows] == episode.trajectory.steps
    assert [row.advantages[0] for row in rows] == episode.advantages
    # 6, then 2 + 4 more each time
    assert [len(step.prompt_ids) for step in episode.trajectory.steps] == [6, 12, 18]


def test_lengths_are_spread_around_their_mean() -> None:
    lengths = Maker(320).spread(1000, 13)
    assert (min(lengths), max(lengths)) == (400, 1600)  # a quarter of the longest
    assert sum(lengths) == 13_000
