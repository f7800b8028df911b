"""Every command on a page runs on a small task, or `shell.NOT_RUN` says why not; then its options are known."""

from __future__ import annotations

import argparse
import re
import runpy
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest
from rich.console import Console, ConsoleDimensions
from typer.main import get_command

from agent_r1.build.plan import build_plan
from agent_r1.cli.app import app
from agent_r1.cli.commands.init import write_task
from agent_r1.cli.commands.train import run_training
from agent_r1.cli.terminal import Terminal
from agent_r1.config import RECIPES, load_config
from agent_r1.runs.run_dir import RunDir
from tests.conftest import Cli
from tests.docs.shown.blocks import ROOT, Block, blocks, in_language
from tests.docs.shown.outputs import TEXTS, differing, output_of
from tests.docs.shown.shell import COMMANDS, NOT_RUN, RUN, SKIPPED, reason

TINY = [
    *("trainer.steps=2", "trainer.eval_every=1", "trainer.save_every=1", "eval.rows=2"),
    *("rollout.rows_per_step=2", "rollout.group_size=2"),
]
TINY_SFT = ["sft.count=16", "sft.epochs=1"]
# What stands for a name on a page: a task, a run, a step of the small run, an episode of it.
VALUES = {
    **dict.fromkeys(["RECIPE", "known-good", "path/to/shop", "path/to/recipe/"], "shop"),
    "owner/name": "runs/other",
    "eval_000040/0": "eval_000002/0",
    "91": "2",
    "40": "2",
    "eval.rows=null": "eval.rows=2",
}
RED = (  # a mistake on purpose; a model that has hardly been trained
    "agent-r1 doctor quickstart task.success_reward=2 --json",
    "agent-r1 doctor quickstart --engine --rows 8",
    "agent-r1 doctor shop --engine",
)
STRICTER = "\n\ndef stricter(row, trajectory):\n    return float(len(trajectory.steps) < 3)\n"
BRIEF = "def brief(row, trajectory):\n    return 1.0 / len(trajectory.steps)\n"


@pytest.fixture(scope="module")
def workspace(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Iterator[Path]:
    """The tasks that pages name, and a run of two steps, which stands for every run."""
    folder = tmp_path_factory.mktemp("pages")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.syspath_prepend(folder)
        for task in ("shop", "path/to/recipe"):
            write_task(Path(task), Console(quiet=True))
        with Path("shop/task.py").open("a", encoding="utf-8") as file:
            file.write(STRICTER)
        Path("my_rewards.py").write_text(BRIEF, encoding="utf-8")
        for preset in ("small", "long"):
            Path(f"path/to/recipe/{preset}.yaml").write_text("base: base.yaml\nseed: 1\n", encoding="utf-8")
        page = ROOT / "docs" / "write-an-env.md"
        Path("path/to/corridor").mkdir()
        Path("path/to/corridor/task.py").write_text(blocks(page, "python")[0], encoding="utf-8")
        Path("path/to/corridor/base.yaml").write_text(blocks(page, "yaml")[0], encoding="utf-8")
        config = load_config("shop", [*TINY, *TINY_SFT])
        run = RunDir.create(Path("trained"), config)
        run_training(config, build_plan(config), run, Console(quiet=True), resume=False)
        yield folder


def with_runs(words: Sequence[str]) -> None:
    """Put the small run where a command expects one, and nothing where it writes one."""
    for before, word in zip(["", *words], words, strict=False):
        named = re.search(r"(?:^|=)(runs/[\w-]+|RUN$)", word)
        if named is not None:
            shutil.rmtree(named[1], ignore_errors=True)
            if before != "--run":
                shutil.copytree("trained", named[1])


def shorter(words: Sequence[str]) -> list[str]:
    """What ends a command soon."""
    verb = words[0]
    if verb == "train":
        start = [] if "sft.demos=null" in words else TINY_SFT
        return [] if "--resume" in words else [*TINY, "trainer.steps=1", *start]
    if verb == "doctor":
        return TINY_SFT if "--engine" in words else []
    more = {"eval": ["eval.rows=2"], "chat": ["--ask", ""], "collect": ["--rows", "2", "--samples", "2", *TINY_SFT]}
    return more.get(verb, [])


def on_small(command: str) -> str:
    return shlex.join(VALUES.get(word, word) for word in shlex.split(command))


@pytest.mark.parametrize("command", dict.fromkeys(on_small(each) for each in RUN if each.startswith("agent-r1 ")))
def test_a_command_shown_runs(
    command: str, cli: Cli, workspace: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    words = shlex.split(command)[1:]
    monkeypatch.chdir(tmp_path if words[0] == "init" else workspace)
    if words[0] != "init":
        with_runs(words)
    if words[0] == "export":
        shutil.rmtree(words[-1], ignore_errors=True)
    ended = cli(*words, *shorter(words))
    assert ended.code == (1 if command in RED else 0), ended


@pytest.fixture
def wide(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal in which no line is broken, also for consoles that took their width when they were imported."""
    monkeypatch.setattr(Terminal, "size", property(lambda _: ConsoleDimensions(200, 50)))


@pytest.mark.parametrize("block", [block for block in TEXTS if output_of(block)], ids=lambda block: block.place)
def test_an_output_shown_is_what_the_command_prints(
    block: Block, cli: Cli, workspace: Path, wide: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    output = output_of(block)
    assert output is not None
    monkeypatch.chdir(workspace)
    words = shlex.split(output.command)[1:]
    with_runs(words)
    ended = cli(*words)
    assert differing(block.body, ended.out + ended.err, output) == [], ended


def test_every_command_that_is_no_agent_r1_has_a_reason_and_every_reason_a_command() -> None:
    assert [command for command in RUN if not command.startswith("agent-r1 ")] == []
    idle = {why for pattern, why in NOT_RUN.items() if not any(re.fullmatch(pattern, each, re.S) for each in COMMANDS)}
    assert idle == set()
    for why in NOT_RUN.values():
        for path in re.findall(r"(?:tests/|\.ci/)[\w/.]+\w", why):
            assert (ROOT / path).exists(), path


@pytest.mark.parametrize("command", [command for command in SKIPPED if re.search(r"\bagent-r1 ", command)])
def test_the_options_and_settings_of_other_commands_are_known(command: str) -> None:
    words = shlex.split(command)
    verb, *words = ["gsm8k_tool" if word == "RECIPE" else word for word in words[words.index("agent-r1") + 1 :]]
    known = get_command(app).commands[verb]  # type: ignore[attr-defined]
    given = known.make_context(verb, list(words), resilient_parsing=False).params
    recipe = given.get("recipe")
    if recipe is not None and (RECIPES / recipe.split("/")[0]).exists():
        load_config(recipe, given.get("overrides") or ())


class Parsed(BaseException):
    """The options of a benchmark were accepted."""


@pytest.mark.parametrize("command", [command for command in SKIPPED if "-m benchmarks." in command])
def test_the_options_of_a_benchmark_shown_are_known(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    parse = argparse.ArgumentParser.parse_args

    def parse_only(self: argparse.ArgumentParser, *args: Any, **kwargs: Any) -> NoReturn:
        parse(self, *args, **kwargs)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", parse_only)
    _, _, module, *options = shlex.split(command)
    monkeypatch.setattr(sys, "argv", [module, *options])
    try:
        with pytest.raises(Parsed):
            runpy.run_module(module, run_name="__main__", alter_sys=True)
    except ModuleNotFoundError as error:
        if error.name not in ("verl", "trl"):
            raise
        pytest.skip(f"{error.name} needs an environment of its own")


def test_python_in_a_command_compiles() -> None:
    for command in SKIPPED:
        if command.startswith("python -c "):
            compile(shlex.split(command)[2], command, "exec")


def test_bash_can_read_every_block() -> None:
    for block in in_language("bash"):
        checked = subprocess.run(["bash", "-n"], input=block.body, capture_output=True, text=True)
        assert checked.returncode == 0, (block.place, checked.stderr)


def test_a_new_command_is_run_or_needs_a_reason() -> None:
    assert reason("agent-r1 compare runs/new runs/other") is None
    assert reason("docker run image") is None
