"""The published speed tables can be measured on a CPU at small sizes, and docs/benchmarks.md shows what is stored."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from agent_r1.bench import learner_speed, step_speed
from agent_r1.bench.command import Options
from agent_r1.bench.learner_speed import LearnerBench
from agent_r1.bench.models import TINY, BenchModel
from agent_r1.bench.results import Results, Row
from agent_r1.bench.synthetic import SyntheticTrajectories
from agent_r1.bench.workload import Workload
from agent_r1.errors import ConfigError, DataError
from benchmarks.machine import RESULTS
from benchmarks.speed.__main__ import main, run
from benchmarks.speed.learner_comparison import break_even, gradient, one_row_per_step, relative_difference
from benchmarks.speed.padded_trainer import PaddedTrainer
from benchmarks.speed.step_comparison import StepComparison, find_rival
from benchmarks.speed.tables import as_markdown, fill_page
from tests.bench.result_files import FAST, SLOW, read_rows

CPU = torch.device("cpu")
QUIET = Console(quiet=True)


def options(out: Path) -> Options:
    return Options(device="cpu", quick=True, repeats=1, out=out)


def test_the_engine_is_compared_grows_linearly_and_leaves_nothing_behind(tmp_path: Path) -> None:
    rows = read_rows(run("engine", options(tmp_path), QUIET))
    assert {name.partition("/")[0] for name in rows} == {"decode", "prompts", "episodes", "append", "soak", "actions"}
    assert rows["decode/4 sequences"]["figures"]["speed_ratio"] > 0
    # After the first step only the observation and the last sampled token have to run, for each of two episodes; an
    # engine that shares only whole blocks may recompute the rest of one.
    prefilled = [rows[f"append/step {step}"]["figures"]["prefilled_tokens"] for step in range(2, 7)]
    assert all(2 * 9 <= tokens < 2 * (9 + 32) for tokens in prefilled)
    actions = rows["actions/4 steps"]["figures"]
    assert actions["calls_per_second"] == pytest.approx(4 * actions["episodes_per_second"])
    assert 1 < actions["tokens_per_call"] < 6  # 3 on average, were they not cut at 6
    soak = rows["soak/all rounds"]["figures"]
    assert soak["tool_errors"] > 0
    assert soak["cancelled_requests"] > 0
    nothing = ("lost_episodes", "unanswered_requests", "free_blocks_growth", "pending_requests_growth")
    assert {name: soak[name] for name in nothing} == dict.fromkeys(nothing, 0)


def test_merged_and_shared_segments_give_the_same_gradient_for_less_work(tmp_path: Path) -> None:
    rows = read_rows(run("learner", options(tmp_path), QUIET))
    assert {name.partition("/")[0] for name in rows} == {"packed", "steps", "shared", "sharing"}
    assert rows["packed/4 sequences of 24 tokens"]["figures"]["speed_ratio"] > 0
    merged = rows["steps/3 steps, prompt of 12"]["figures"]
    assert merged["fp32_gradient_difference"] < 1e-5
    # Rows of 16, 24 and 32 tokens against one of 32, with 12 trained tokens either way; 39,936 weights in the body,
    # 15,360 in the head, an attention of width 96. 6 x (39,936 x 72 + 15,360 x 12) + 12 x 96 x (136 + 300 + 528) over
    # 6 x (39,936 x 32 + 15,360 x 12) + 12 x 96 x 528.
    assert merged["flops_ratio_over_steps"] == pytest.approx(19_468_800 / 9_381_888 / 3)
    shared = rows["shared/prompt of 32 tokens"]["figures"]
    assert shared["fp32_gradient_difference"] < 1e-5
    assert shared["token_ratio"] == 160 / 64  # 4 x (32 + 8) tokens as segments; 32 + 4 x 8 as a tree


class Snail:
    """A rival that only reports times."""

    name = "snail"

    def __init__(self, workload: Workload, model: BenchModel, device: torch.device) -> None:
        self.settings = {"rows": workload.rows, "home": True}

    def run(self, steps: int, between: Callable[[], None]) -> list[float]:
        for _ in range(steps):
            between()
        return [float(1000 * (number + 1)) for number in range(steps)]


def test_a_rival_takes_turns_with_us_and_its_first_step_does_not_count() -> None:
    [row] = StepComparison(model=TINY.model(), sizes=step_speed.QUICK, device=CPU, repeats=2, make_rival=Snail).step()
    assert row.name == "step/agent-r1 and snail"
    assert row.settings["home"]
    assert [figures["snail_seconds"] for figures in row.repeats] == [2000.0, 3000.0]
    assert all(f["speed_ratio"] == f["snail_seconds"] / f["seconds"] for f in row.repeats)


def test_an_unknown_rival_is_refused() -> None:
    with pytest.raises(ConfigError, match="trl"):
        find_rival("trll")


@pytest.mark.skipif(find_spec("trl") is not None, reason="trl is installed")
def test_a_rival_that_is_not_installed_is_refused() -> None:
    with pytest.raises(ConfigError, match="No module named 'trl'"):
        find_rival("trl")


@pytest.mark.skipif(find_spec("trl") is None, reason="trl is not installed")
def test_trl_plays_the_same_workload(tmp_path: Path) -> None:
    [row] = read_rows(run("step", options(tmp_path), QUIET, against="trl")).values()
    assert row["figures"]["trl_seconds"] > 0  # the rival checks the lengths of its episodes


def test_the_padded_baseline_computes_the_gradient_that_packing_does() -> None:
    synthetic, model = SyntheticTrajectories(TINY.vocabulary), TINY.model()
    batch = [synthetic.single(synthetic.ids(prompt), response) for prompt, response in ((5, 9), (3, 4), (8, 1))]
    network = model.network(dtype=torch.float32, device=CPU)
    padded = PaddedTrainer(model=network, autocast_dtype=None)
    bench = LearnerBench(model=model, sizes=learner_speed.QUICK, device=CPU, repeats=1)
    expected = gradient(bench.learner(bench.policy()), batch)
    for micro_batch in (1, 2, 3):
        padded.step(batch, micro_batch)
        got = torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])
        assert relative_difference(got, expected) < 1e-5


def test_one_row_per_step_keeps_every_step_and_advantage() -> None:
    episode = SyntheticTrajectories(320).growing(steps=3, prompt=6, response=2, observation=4)
    rows = one_row_per_step([episode])
    assert [row.trajectory.steps[0] for row in rows] == episode.trajectory.steps
    assert [row.advantages[0] for row in rows] == episode.advantages


def test_the_break_even_lies_where_the_speed_up_last_crosses_one() -> None:
    # Between factor 1.2 at 0.9 and factor 1.6 at 1.1: half way.
    assert break_even([(1.1, 1.05), (1.6, 1.1), (1.2, 0.9), (2.0, 1.5)]) == pytest.approx(1.4)
    assert break_even([(1.5, 1.2), (1.1, 1.0)]) == 1.1
    assert break_even([(1.1, 0.8), (4.0, 0.9)]) is None


@given(st.lists(st.tuples(st.floats(1, 10), st.floats(0.1, 10)), min_size=1, max_size=8, unique_by=lambda p: p[0]))
def test_a_break_even_lies_between_the_measured_factors(points: list[tuple[float, float]]) -> None:
    found = break_even(points)
    if found is not None:
        assert min(points)[0] <= found <= max(points)[0]


def test_markdown_shows_shares_ratios_and_large_numbers_each_their_way() -> None:
    row = Row(
        name="decode/8",
        settings={},
        headline="tokens_per_second",
        repeats=[{"tokens_per_second": 12345.6, "floor_share": 0.456, "speed_ratio": 8.125, "seconds": 0.012345}],
        once={"gradient_difference": 0.0012},
    )
    assert as_markdown([row, SLOW], "decode").splitlines() == [
        "|  | 8 |",
        "| --- | ---: |",
        "| tokens per second | 12,346 |",
        "| floor share | 45.6% |",
        "| speed ratio | 8.12x |",
        "| seconds | 0.0123 |",
        "| gradient difference | 1.2e-03 |",
    ]
    with pytest.raises(DataError, match=r"\['decode', 'soak'\]"):
        as_markdown([row, SLOW], "append")


def test_many_rows_of_few_figures_run_downwards() -> None:
    steps = [Row(name=f"append/{n}", settings={}, headline="seconds", repeats=[{"seconds": n}]) for n in (1, 2)]
    assert as_markdown(steps, "append").splitlines() == ["|  | seconds |", "| --- | ---: |", "| 1 | 1 |", "| 2 | 2 |"]


def stored_results(*rows: Row) -> Results:
    machine = {"torch": "2", "transformers": "5", "python": "3"}
    return Results(command="python -m benchmarks.speed engine", machine=machine, accelerator="A", rows=list(rows))


def test_stored_results_are_printed_as_markdown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    stored_results(FAST, SLOW).write(tmp_path / "bench.json")
    main(["show", str(tmp_path / "bench.json")])
    assert "| floor share | 60.0% |" in capsys.readouterr().out
    with pytest.raises(ConfigError, match=r"none\.json"):
        main(["show", str(tmp_path / "none.json")])


def test_a_page_shows_stored_results_between_its_markers(tmp_path: Path) -> None:
    stored_results(FAST, SLOW).write(tmp_path / "bench_engine.a.json")
    setting, soak = "<!-- bench_engine.a.json setting -->\n", "<!-- bench_engine.a.json soak -->\n"
    end = "<!-- end -->\n"
    filled = fill_page(f"# Title\n{setting}{end}text\n{soak}old\n{end}rest\n", tmp_path)
    assert "A, torch 2, transformers 5, Python 3; commit abc, unknown; medians of 2.\n<!-- end -->" in filled
    assert "| seconds |\n| --- | ---: |\n| all | 4 |\n<!-- end -->\nrest" in filled
    assert fill_page(filled, tmp_path) == filled
    with pytest.raises(DataError, match=r"bench_x\.json"):
        fill_page(f"<!-- bench_x.json soak -->\n{end}", tmp_path)


def test_the_benchmarks_page_shows_the_stored_results() -> None:
    page = (RESULTS.parents[1] / "docs" / "benchmarks.md").read_text(encoding="utf-8")
    assert fill_page(page, RESULTS) == page
