"""The command line as people use it: words in; lines, exit code and run directory out."""

from __future__ import annotations

import io
import re
import shutil
import sys
from pathlib import Path

import pytest
import yaml
from rich.console import Console

from agent_r1.cli.app import PANELS
from agent_r1.cli.display import Display, program, sparkline, step_summary, transcript_panel
from agent_r1.config import load_config, parse_config
from agent_r1.runs.reader import list_checkpoints
from agent_r1.runs.run_dir import RunDir
from agent_r1.types import Group, StopReason, Trajectory
from tests.chatml import row
from tests.conftest import Cli

MINI = str(Path(__file__).parents[1] / "mini")
PLAIN = ("sft.demos=null", "trainer.steps=1", "trainer.eval_every=9", "rollout.max_response_tokens=8")

pytestmark = pytest.mark.usefixtures("cache")


@pytest.fixture
def described(tmp_path: Path) -> Path:
    """A run directory that no step was made in."""
    return RunDir.create(tmp_path / "run", load_config(MINI, PLAIN)).path


@pytest.mark.parametrize("words", [("train", MINI, "[/x]"), ("train", "[/x]"), ("eval", "[/x]"), ("chat", "[/x]")])
def test_an_error_quotes_what_was_typed_as_it_was_typed(cli: Cli, words: tuple[str, ...]) -> None:
    ended = cli(*words)
    assert ended.code == 2
    assert ended.err.startswith("error: ")
    assert "[/x]" in ended.err


@pytest.mark.parametrize("words", [(), ("train",), ("bench",), ("bench", "engine"), ("data", "recipe"), ("search",)])
def test_help_is_asked_for_in_two_ways(cli: Cli, words: tuple[str, ...]) -> None:
    short, long = cli(*words, "-h"), cli(*words, "--help")
    assert (short.code, short.err) == (0, "")
    assert "Usage: " in short.out
    assert short == long


def test_a_recipe_that_cannot_be_imported_ends_with_an_error_not_with_a_traceback(cli: Cli, tmp_path: Path) -> None:
    folder = recipe(tmp_path / "broken", "\ndef broken()\n    return 1\n")
    line = (folder / "task.py").read_text(encoding="utf-8").splitlines().index("def broken()") + 1
    ended = cli("train", folder, "--dry-run")
    assert (ended.code, ended.out) == (2, "")
    assert ended.err == f"error: cannot import {folder}/task.py: line {line}: expected ':'\n    def broken()\n"


def test_a_dry_run_prints_settings_that_can_be_read_back(cli: Cli) -> None:
    note = "ä [/b] :100: " + "long " * 50
    ended = cli("train", MINI, "--dry-run", f"model.template_kwargs={{note: '{note}'}}")
    settings, _, plan = ended.out.rpartition("plan: ")
    assert parse_config(yaml.safe_load(settings)).model.template_kwargs == {"note": note}
    assert plan == (
        "warm start of 2 epochs on at most 8 demonstrations, then 4 steps of grpo, 3 rows x 4 attempts each, "
        "evaluated every 2 on 4 held-out rows; tool calls: inferred from the chat template when the model is loaded\n"
    )
    assert "then 4 steps or 2.5 minutes of grpo" in cli("train", MINI, "--dry-run", "trainer.max_minutes=2.5").out


def test_a_dry_run_of_the_warm_start_speaks_of_the_warm_start(cli: Cli, described: Path) -> None:
    ended = cli("sft", MINI, "--dry-run", "eval.rows=null")
    assert (ended.code, ended.err) == (0, "")
    plan = "plan: warm start of 2 epochs on at most 8 demonstrations, evaluated on 20 held-out rows"
    assert ended.out.endswith(f"{plan}; tool calls: inferred from the chat template when the model is loaded\n")
    (described / "trajectories").mkdir()
    (described / "trajectories" / "train_000000.jsonl").touch()  # what is in it is read when it is imitated
    own = ("sft.demos=null", f"sft.trajectories={described}", "sft.min_reward=0.5")
    plan = f"warm start of 2 epochs on the trajectories of {described} with a reward of at least 0.5, evaluated on"
    assert plan in cli("sft", MINI, "--dry-run", *own).out


@pytest.mark.parametrize("value", ["[", "{", "${", "'", "a: b: c"])
def test_a_value_that_is_no_yaml_is_an_error_about_that_value(cli: Cli, described: Path, value: str) -> None:
    ended = cli("eval", described, f"eval.rows={value}")
    assert ended.code == 2
    assert f"eval.rows={value}" in ended.err
    assert "Traceback" not in ended.err


@pytest.mark.parametrize(
    ("command", "words", "named"),
    [
        ("eval", ["seed=3"], ["'seed=3'", "task.test_split", "data.path", "model.device"]),
        ("eval", ["eval.rows"], ["'eval.rows'", "section.key=value"]),
        ("eval", ["eval=5"], ["error: eval=5", "section", "rows, samples"]),
        ("eval", ["eval=null"], ["error: eval=null"]),
        ("eval", ["eval.rowz=3"], ["'rowz'", "Did you mean 'rows'?"]),
        ("eval", ["--split", "a", "task.test_split=b"], ["--split a", "task.test_split="]),
        ("chat", ["eval.samples=3"], ["'eval.samples=3'", "eval.temperature"]),  # which would have no effect
        ("chat", ["what", "is 2*3?"], ["--ask 'what is 2*3?'"]),
        ("resume", ["seed=3"], ["'seed=3'", "trainer.steps"]),
        ("resume", [MINI], [MINI, "trainer.steps"]),
        ("resume", ["trainer.steps=2", "learner.lr=1"], ["'learner.lr=1'"]),
        ("resume", ["trainer.steps=many"], ["trainer.steps='many'"]),
        ("resume", ["--run", "x"], ["--run"]),
    ],
)
def test_an_existing_run_is_changed_only_where_that_makes_sense(
    cli: Cli, described: Path, command: str, words: list[str], named: list[str]
) -> None:
    ended = cli(*(("train", "--resume") if command == "resume" else (command,)), described, *words)
    assert ended.code == 2
    assert all(name in ended.err for name in named)
    assert "Traceback" not in ended.err
    assert parse_config(RunDir.open(described).settings) == load_config(MINI, PLAIN)


def test_a_variable_is_read_for_an_existing_run_as_for_a_new_one(
    cli: Cli, described: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STEPS", "3")
    planned = cli("train", "--resume", described, "trainer.steps=${oc.decode:${oc.env:STEPS}}", "--dry-run")
    assert planned.code == 0, planned.err
    assert "3 steps of grpo" in planned.out
    unset = cli("train", "--resume", described, "trainer.steps=${oc.env:NOT_SET}")
    assert (unset.code, "NOT_SET" in unset.err, "Traceback" in unset.err) == (2, True, False)


def test_a_finished_run_can_be_made_longer(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", MINI, *PLAIN, "--run", run).code == 0
    planned = cli("train", "--resume", run, "trainer.steps=3", "--dry-run")
    assert planned.code == 0
    assert planned.out.partition("plan: ")[2].startswith("after step 1, 2 more steps of grpo, 3 rows x 4 attempts each")
    assert parse_config(RunDir.open(run).settings).trainer.steps == 1  # a dry run changes nothing
    assert len(RunDir.open(run).read_metrics("train")) == 1

    again = cli("train", "--resume", run)
    assert "\n  continue    all 1 steps were done already" in again.out
    assert "continuing" not in again.out
    longer = cli("train", "--resume", run, "trainer.steps=3")
    assert longer.code == 0
    assert f"continuing {run} after step 1\n" in longer.out
    assert "  continue  " not in longer.out
    assert parse_config(RunDir.open(run).settings) == load_config(MINI, (*PLAIN, "trainer.steps=3"))
    assert [record["step"] for record in RunDir.open(run).read_metrics("train")] == [1, 2, 3]
    assert list_checkpoints(run / "checkpoints")[-1][0] == 3

    ended = cli("train", "--resume", run, "trainer.steps=2")
    assert ended.code == 2
    assert f"trainer.steps=2: {run}" in ended.err
    assert parse_config(RunDir.open(run).settings).trainer.steps == 3


def recipe(folder: Path, code: str) -> Path:
    """The mini recipe with more Python in its task."""
    shutil.copytree(MINI, folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "task.py").open("a", encoding="utf-8") as file:
        file.write(code)
    return folder


def test_a_signal_ends_a_run_with_one_line_about_what_was_kept(cli: Cli, tmp_path: Path) -> None:
    lines = ("import os", "def stop(row, trajectory):", "    os.kill(os.getpid(), 15)", "    return 0.0", "")
    folder, run = recipe(tmp_path / "stops", "\n".join(lines)), tmp_path / "[run]"
    ended = cli("train", folder, *PLAIN, "task.reward=task.stop", "--run", run)
    assert ended.code == 128 + 15  # SIGTERM
    [line] = ended.err.splitlines()
    assert line.startswith("stopped by SIGTERM; ")
    assert line.endswith(f"continue with: agent-r1 train --resume {run}")


def test_ctrl_c_before_anything_has_begun_ends_with_one_line(cli: Cli, tmp_path: Path) -> None:
    folder = recipe(tmp_path / "slow", "\nraise KeyboardInterrupt  # while this is being imported\n")
    ended = cli("train", folder, "--run", tmp_path / "run")
    assert (ended.code, ended.err) == (130, "stopped by SIGINT\n")
    assert not (tmp_path / "run").exists()


def printed(console: Console) -> str:
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_the_display_prints_paths_and_messages_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=40)
    with Display(console, "training", total=2) as display:
        display.note("warning: [/x] :100: " + "y" * 60)
        display.update(1, "reward [/x]", value=float("nan"))
    note, step = printed(console).splitlines()
    assert note == "warning: [/x] :100: " + "y" * 60  # not wrapped either: paths are there to be copied
    assert step.startswith("training 1/2  reward [/x]  ")
    trajectory = Trajectory(row_id="[/x]", trajectory_id="t", steps=[], stop=StopReason.ANSWERED)
    console.print(transcript_panel(Group(row=row("[/x]", "[/y]"), trajectories=[trajectory]), trajectory))
    assert "episode [/x]" in printed(console)


def test_a_step_is_summed_up_without_a_loss_and_drawn_without_a_value() -> None:
    metrics = {"reward/mean": 0.5, "success": 0.25, "episode/steps": 2, "episode/tool_calls": 1}
    summary = step_summary({**metrics, "tokens_per_second": 1500})
    assert summary == "reward 0.50  success  25%  steps/episode 2.0  tool calls 1.0  1.5k tok/s"
    assert sparkline([0.0, float("nan"), 1.0, float("inf")]) == "▁ █ "


def test_the_picture_says_how_the_held_out_rows_were_sampled(tmp_path: Path) -> None:
    from matplotlib import rc_context

    from agent_r1.track.plots import plot_curve

    records = [
        {"kind": "eval", "step": 0, "success": 0.1, "success_stderr": 0.01},
        {"kind": "train", "step": 1, "success": 0.2},
    ]
    with rc_context({"svg.fonttype": "none"}):  # text stays text
        plot_curve(records, tmp_path / "curve.svg", "mini", "held-out rows (temperature 0.7)")
    assert "held-out rows (temperature 0.7)" in (tmp_path / "curve.svg").read_text(encoding="utf-8")


def test_hints_name_the_program_as_it_can_be_called(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for folder in ("a", "b"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "agent-r1").write_text("#!/bin/sh\n", encoding="utf-8")
        (tmp_path / folder / "agent-r1").chmod(0o755)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PATH", str(tmp_path / "a"))
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "a" / "agent-r1")])
    assert program() == "agent-r1"  # the one on the path
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "b" / "agent-r1")])
    assert program() == "b/agent-r1"  # one in a virtual environment that is not active


def test_the_live_display_fits_into_80_columns() -> None:
    console = Console(file=io.StringIO(), width=80, force_terminal=True, color_system=None)
    metrics = {"reward/mean": -0.25, "success": 1.0, "episode/steps": 12, "episode/tool_calls": 10}
    with Display(console, "warm start", total=1000) as display:
        display.update(999, step_summary({**metrics, "tokens_per_second": 12500}), value=1.0, may_end_early=True)
    lines = [line.rstrip() for line in printed(console).splitlines()]
    assert any(re.search(r"999/1000 \d:\d\d:\d\d at most \d+:\d\d left$", line) for line in lines)
    assert any(line.startswith("reward -0.25") and line.endswith("12.5k tok/s") for line in lines)


def test_an_evaluation_shows_episodes_done_success_and_time_left(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.cli.display.SILENT_SECONDS", -1.0)  # so that every call prints a line
    console = Console(file=io.StringIO(), width=80)
    with Display(console, "training", total=2) as display:
        for finished, success in ((0, 0.0), (1, 1.0), (50, 0.5)):
            display.evaluating(finished, 200, success)
        display.episodes(3, 8)
    first, _, later, step = printed(console).splitlines()
    assert first == "evaluated 0/200  success so far 0.0%"
    assert re.fullmatch(r"evaluated 50/200  success so far 50.0%  \d+:\d\d left", later)
    assert step.startswith("episodes 3/8")


def test_help_lists_the_commands_in_the_order_of_their_use(cli: Cli) -> None:
    shown = cli("--help").out
    places = [shown.index(f"│ {name} ") for names in PANELS.values() for name in names]
    assert places == sorted(places)
    assert all(panel in shown for panel in PANELS)
