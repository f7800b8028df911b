"""The warm start reports failed calls of demonstrations and stops at its target loss."""

from __future__ import annotations

import asyncio
import io
import re
import shutil
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.build.checks import check_start
from agent_r1.build.start import sft_trajectories
from agent_r1.build.task import build_task
from agent_r1.cli.commands.train import seeded_start
from agent_r1.config import RunConfig, load_config
from agent_r1.errors import DataError
from agent_r1.runs.trajectories import write_groups
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tokens.rendering import Renderer
from agent_r1.train.sft import LOSS_WINDOW
from agent_r1.types import Group, Step, StopReason, Trajectory
from tests.chatml import row, tokenizer

MINI = Path(__file__).parents[1] / "mini"
GOOD = '<tool_call>{"name": "double", "arguments": {"number": 1}}</tool_call>'
TYPO = GOOD.replace("double", "doubel")
BAD_ARGUMENT = GOOD.replace("number", "numbre")
UNREADABLE = GOOD.replace("}}", "}")


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    return Path(shutil.copytree(MINI, tmp_path / "recipe", ignore=shutil.ignore_patterns("__pycache__")))


def said_about(recipe: Path, *given: list[str] | str, ending: str = "done") -> list[str]:
    """What is reported when rows are demonstrated with these calls, and then an answer; overrides are texts."""
    demos, overrides = [d for d in given if isinstance(d, list)], [each for each in given if isinstance(each, str)]
    code = f"def mine(count, seed):\n    return [(r, [*c, {ending!r}]) for r, c in zip(rows('train'), {demos!r})]\n"
    with (recipe / "task.py").open("a", encoding="utf-8") as file:
        file.write(code)
    config, said = load_config(str(recipe), ["sft.demos=task.mine", "rollout.max_steps=5", *overrides]), list[str]()
    played = asyncio.run(sft_trajectories(config, build_task(config), Renderer(tokenizer()), said.append))
    assert len(played) == len(demos)
    return said


def test_demonstrations_without_failed_calls_report_nothing(recipe: Path) -> None:
    assert said_about(recipe, [GOOD], [GOOD, GOOD], []) == []


@pytest.mark.parametrize("calls", [[BAD_ARGUMENT, GOOD, TYPO], [TYPO, TYPO, TYPO, TYPO]])
def test_a_demonstration_that_calls_an_unknown_tool_is_an_error(recipe: Path, calls: list[str]) -> None:
    # Four in a row would end the episode before its texts do: the tool is what has to be named, not the limit.
    with pytest.raises(DataError, match=r"demonstration 1 \(train-1\) .* no tool 'doubel'\. Did you mean 'double'"):
        said_about(recipe, [GOOD], calls)


@pytest.mark.parametrize("name", sorted(set(FORMATS) - {"hermes", "retool"}))
def test_a_demonstration_whose_calls_the_env_does_not_read_is_an_error_that_names_their_format(
    recipe: Path, name: str
) -> None:
    foreign = FORMATS[name].write_call("double", {"number": 2})
    with pytest.raises(DataError, match=rf"demonstration 1 \(train-1\) .* set task\.env_kwargs\.tool_format={name},"):
        said_about(recipe, [GOOD], [foreign], "rollout.max_response_tokens=200")


@pytest.mark.parametrize(
    ("demos", "start", "named"),
    [
        (
            [[UNREADABLE]],
            "1 of 1 demonstrations contain calls that failed, the first (row train-0): unreadable call: ",
            "",
        ),
        (
            [[GOOD], [GOOD, BAD_ARGUMENT], [UNREADABLE, UNREADABLE]],
            "2 of 3 demonstrations contain calls that failed, the first (row train-1): double: ",
            "numbre",
        ),
    ],
)
def test_other_calls_that_fail_are_counted_and_the_first_is_shown(
    recipe: Path, demos: list[list[str]], start: str, named: str
) -> None:
    [line] = said_about(recipe, *demos)
    assert line.startswith(start)
    assert named in line.removeprefix(start)
    assert len(line) <= len(start) + 200  # a tool's traceback is cut, and kept on one line
    assert "\n" not in line


def warm_started(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *overrides: str) -> list[str]:
    """The lines of a warm start of 30 updates: 8 demonstrations in batches of 4, 15 times."""
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    console = Console(file=io.StringIO(), width=200)
    config = load_config(str(MINI), ["sft.epochs=15", *overrides])
    asyncio.run(seeded_start(config, build_task(config), console))
    assert isinstance(console.file, io.StringIO)
    return [re.sub(r"loss \d+\.\d+|\d+:\d\d", "#", line) for line in console.file.getvalue().splitlines()]


def test_without_a_target_loss_the_time_left_is_exact(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert warm_started(monkeypatch, tmp_path) == [f"warm start {n}/30  #  # left" for n in (10, 20, 30)]


def test_a_warm_start_stopped_by_its_target_loss_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    # Any loss is below 100, so the first full window of 20 is enough.
    assert LOSS_WINDOW == 20
    assert warm_started(monkeypatch, tmp_path, "sft.target_loss=100") == [
        "warm start 10/30  #  at most # left",
        "warm start 20/20  #  # left",
        "stopped after 20 of at most 30 updates: loss below sft.target_loss=100",
    ]


@pytest.mark.parametrize("settings", [("sft.target_loss=1e-9",), ("sft.target_loss=100", "sft.epochs=10")])
def test_a_warm_start_that_makes_all_updates_was_not_stopped(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, settings: tuple[str, ...]
) -> None:
    # 10 epochs are 20 updates: the target is reached with the very last.
    last = warm_started(monkeypatch, tmp_path, *settings)[-1]
    assert re.fullmatch(r"warm start (\d+)/\1  #  # left", last)


def with_one_trajectory(folder: Path, name: str, given: str = "") -> RunConfig:
    """A config that imitates the folder, or `given` in it, which holds one good trajectory in a file of that name."""
    ids = Renderer(tokenizer()).encode_response("x")
    step = Step(prompt_ids=[1], response_ids=ids, response_logprobs=[0.0] * len(ids), action_text="x")
    good = Trajectory(row_id="r", trajectory_id="t", steps=[step], stop=StopReason.ANSWERED, outcome_reward=1.0)
    write_groups(folder / name, [Group(row=row(), trajectories=[good])])
    return load_config(str(MINI), ["sft.demos=null", f"sft.trajectories={folder / given}"])


def imitated(config: RunConfig) -> list[Trajectory]:
    return asyncio.run(sft_trajectories(config, build_task(config), Renderer(tokenizer()), lambda line: None))


@pytest.mark.parametrize(
    ("name", "given"),
    [("train_1.jsonl", ""), ("trajectories/train_1.jsonl", ""), ("any.jsonl", "any.jsonl")],
)
def test_training_episodes_of_a_folder_or_run_and_a_file_of_any_name_are_imitated(
    tmp_path: Path, name: str, given: str
) -> None:
    config = with_one_trajectory(tmp_path, name, given)
    check_start(config)
    assert len(imitated(config)) == 1


@pytest.mark.parametrize("name", ["best.jsonl", "eval_1.jsonl"])
def test_a_folder_without_training_episodes_is_refused_before_the_run(tmp_path: Path, name: str) -> None:
    config = with_one_trajectory(tmp_path, name)
    for look in (check_start, imitated):
        with pytest.raises(DataError, match=f"no trajectories .* at {tmp_path}"):
            look(config)
