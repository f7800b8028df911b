"""`agent-r1 doctor` names each of many faults, and says nothing about what is sound."""

from __future__ import annotations

import asyncio
import io
import json
import os
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from agent_r1.build.plan import build_plan
from agent_r1.cli.commands.train import Training
from agent_r1.config import bundled_presets, bundled_recipes, load_config
from agent_r1.doctor.canary import answer_fields, with_canary
from agent_r1.doctor.environment import check_blocking
from agent_r1.doctor.players import answer_text
from agent_r1.doctor.watchdog import Pulse, watched
from agent_r1.envs.check import CANARY_NUMBER
from agent_r1.guard import guarded
from agent_r1.ranks.crew import Crew
from agent_r1.runs.run_dir import RunDir
from agent_r1.types import TaskRow
from tests.conftest import Cli
from tests.doctor.recipes import diagnose, write_recipe

pytestmark = pytest.mark.usefixtures("cache")

NO_TOOLS = ("task.tools=[]", "sft.demos=task.not_calling")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_recipe(tmp_path_factory.mktemp("recipe"))


def test_a_sound_recipe_is_green_everywhere(cli: Cli, sound: Path) -> None:
    said = diagnose(cli, sound)
    assert (said.code, said.bad) == (0, [])
    assert len(said.findings) >= 18


# settings that choose the fault, (light, check) that must name it, and a part of the evidence
FAULTS = [
    (["task.reward=task.never"], ("red", "demonstrations score high"), "none earns"),
    (["task.reward=task.for_anything"], ("red", "silence and chance score low"), "empty"),
    (["task.reward=task.broken"], ("red", "episodes end without errors"), "gold"),
    (["task.reward=task.not_a_number"], ("red", "episodes end without errors"), "nan"),
    (["task.reward=task.huge"], ("yellow", "reward varies"), "1000"),
    (["task.reward=task.by_luck", "task.success_reward=0.5"], ("yellow", "the same episode repeats"), "reward"),
    (["task.rows=task.rows_with_answers"], ("yellow", "prompt does not tell the answer"), "4 of 4"),
    (["task.rows=task.long_rows"], ("red", "longest row fits the context"), "512"),
    (["task.rows=task.same_rows"], ("red", "task"), "same task as training row"),
    (["sft.demos=task.calling_another_tool"], ("red", "demonstrations"), "find"),
    (["sft.demos=task.not_calling"], ("yellow", "demonstrations call tools"), "no demonstration"),
    (["task.tools=[task.slow_look_up]", "rollout.episode_seconds=0.2"], ("red", "episodes end without errors"), "0.2"),
    (
        ["task.env=task.Tells", "task.rows=task.rows_with_notes", *NO_TOOLS],
        ("red", "ground truth is never shown"),
        "Hint",
    ),
    (
        ["task.env=task.Tells", "task.rows=task.rows_with_numbers", *NO_TOOLS],
        ("red", "ground truth is never shown"),
        "Hint",
    ),
    (["task.rows=task.bare_rows", "sft.demos=null"], ("yellow", "reward can be earned"), "no evidence"),
    (["task.reward=task.never", "sft.demos=null"], ("yellow", "reward can be earned"), "at most 0"),
    (["task.rows=task.rows_with_one_long"], ("red", "longest row fits the context"), "'test-Anna-Maria'"),
    (["task.env=task.ShowsMuch", *NO_TOOLS], ("yellow", "prompts leave room to answer"), "of 512"),
    (["task.env=task.Counts", *NO_TOOLS], ("yellow", "the same episode repeats"), "other prompts"),
    (["task.env=task.ClosesOnce", *NO_TOOLS], ("red", "env can be closed"), "already closed"),
    (["model.chat_template=forgets.jinja"], ("yellow", "template keeps prefixes"), "not appended"),
    (["model.chat_template=hides_tools.jinja"], ("yellow", "template shows tools"), "same with and without"),
    (["model.chat_template=hides_results.jinja"], ("yellow", "template shows tools"), "do not appear"),
    (["model.chat_template=other_calls.jinja"], ("red", "task"), "(call "),
    (
        ["model.chat_template=other_calls.jinja", "task.env_kwargs.tool_format=hermes"],
        ("yellow", "call format matches the template"),
        "(call ",
    ),
    (["model.make=task.make_endless"], ("yellow", "pad and end tokens"), "no eos_token"),
    (["model.chat_template=other_end.jinja"], ("yellow", "stop token is trained"), "im_end"),
    (["model.make=task.make_small"], ("red", "pad and end tokens"), "200"),
    (["model.make=task.make_lowering"], ("red", "text survives the tokenizer"), "anna"),
    (["model.make=task.make_lowering"], ("red", "tool calls are read back"), "look_up"),
    (["task.env_kwargs.tool_format=retool"], ("red", "task"), "tool_format"),
    (["rollout.temperature=0.1"], ("yellow", "sampling explores"), "0.1"),
    (["learner.lr=0.1"], ("yellow", "learning rate"), "0.1"),
    (["rollout.max_context_tokens=4096"], ("red", "model"), "2048"),
    (["rollout.gruop_size=4"], ("red", "settings"), "gruop_size"),
]


@pytest.mark.parametrize(("settings", "named", "evidence"), FAULTS, ids=lambda value: str(value)[:60])
def test_every_fault_is_named(
    cli: Cli, sound: Path, settings: list[str], named: tuple[str, str], evidence: str
) -> None:
    said = diagnose(cli, sound, settings)
    assert named in said.bad
    assert evidence in said.evidence(named[1])
    assert said.code == any(level == "red" for level, _ in said.bad)
    assert all(each["fix"] for each in said.findings if each["level"] != "green")


def test_demonstrations_may_earn_a_part_of_a_graded_reward(cli: Cli, sound: Path) -> None:
    name = "demonstrations score high"  # the four earn 0.3, 0.5, 0.7 and 0.9
    few = diagnose(cli, sound, ["task.reward=task.graded", "task.success_reward=0.9"])
    none = diagnose(cli, sound, ["task.reward=task.graded", "task.success_reward=0.95"])
    never = diagnose(cli, sound, ["task.reward=task.graded", "task.success_reward=2"])
    assert [said.levels(name) for said in (few, none, never)] == [["green"], ["yellow"], ["red"]]
    assert few.evidence(name) == "1 of 4 earn task.success_reward=0.9, 0.6 on average"


def test_without_demonstrations_the_ground_truth_shows_that_the_reward_can_be_earned(cli: Cli, sound: Path) -> None:
    name = "reward can be earned"
    plain = diagnose(cli, sound, ["sft.demos=null"])
    boxed = diagnose(cli, sound, ["sft.demos=null", "task.reward=task.for_a_box"])
    assert (plain.code, plain.bad, boxed.bad) == (0, [], [])
    assert [said.levels(name) for said in (plain, boxed)] == [["green"], ["green"]]
    assert "'...'" in plain.evidence(name)
    assert "boxed{...}" in boxed.evidence(name)


@pytest.mark.parametrize(
    ("truth", "text"), [(" 12 ", "12"), (7, "7"), (["Ulm", "Bonn"], "Ulm"), ({"target": ["a"]}, "a"), ({}, None)]
)
def test_a_ground_truth_is_said_as_text(truth: object, text: str | None) -> None:
    assert answer_text(truth) == text


def test_short_answers_are_replaced_only_in_fields_that_hold_them_in_every_row() -> None:
    rows = [
        TaskRow(prompt=[], reward_model={"ground_truth": answer}, extra_info={"answer": str(answer), "size": 3})
        for answer in (3, 4, 5, 6)
    ]
    first = with_canary(rows[0], answer_fields(rows))
    assert first.extra_info == {"answer": str(CANARY_NUMBER), "size": 3}
    assert first.ground_truth == CANARY_NUMBER
    alone = with_canary(rows[0], answer_fields(rows[:1]))  # a single row does not tell a 3 from a 3
    assert alone.extra_info == rows[0].extra_info


def test_a_tool_that_ignores_its_end_is_red(cli: Cli, sound: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for module in ("guard", "cli.signals"):
        monkeypatch.setattr(f"agent_r1.{module}.CANCEL_SECONDS", 0.05)
    said = diagnose(cli, sound, ["task.tools=[task.stubborn_look_up]", "--seconds", "0.2"])
    assert said.code == 1
    assert ("red", "episodes end without errors") in said.bad
    assert "0.2 s" in said.evidence("episodes end without errors")
    assert said.levels("the same episode repeats") == []  # it would take as long


def test_doctor_ends_although_an_environment_blocks_for_good(
    cli: Cli, sound: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free, codes = tmp_path / "free", list[int]()

    def leave(code: int) -> None:
        codes.append(code)
        free.touch()

    monkeypatch.setenv("BLOCKED_UNTIL", str(free))
    monkeypatch.setattr(os, "_exit", leave)
    ended = cli("doctor", sound, "task.env=task.Blocks", *NO_TOOLS, "--seconds", "0.4", "--rows", "2", "--json")
    found, _ = json.JSONDecoder().raw_decode(ended.out)  # printed while the environment still blocks
    assert codes[0] == 1
    assert (found[-1]["level"], found[-1]["name"]) == ("red", "other episodes go on")
    assert "(Blocks.step)" in found[-1]["evidence"]
    assert "task.py:" in found[-1]["evidence"]


def test_every_time_that_user_code_blocks_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.doctor.watchdog.LONG", 0.02)

    async def block(pulse: Pulse, until: int) -> None:
        while len(pulse.gaps) < until:
            time.sleep(0.01)

    async def play() -> Pulse:
        async with watched(60, pytest.fail) as pulse:
            for until in (1, 2):
                await guarded(block(pulse, until), seconds=60)
                await asyncio.sleep(0)
        return pulse

    assert len(asyncio.run(play()).gaps) == 2


def test_blocking_once_for_a_short_time_is_fine() -> None:
    lights = [check_blocking(Pulse(gaps=gaps))[0].level for gaps in ([], [3.0], [1.5, 1.5], [3.0, 2.5], [11.0])]
    assert lights == ["green", "green", "green", "yellow", "yellow"]


TINY = [preset for recipe in bundled_recipes() for preset in bundled_presets(recipe) if preset.endswith("/tiny")]


@pytest.mark.parametrize("recipe", ["quickstart", "vision_quickstart", *TINY])
def test_nothing_bad_is_said_about_our_own_recipes(cli: Cli, recipe: str) -> None:
    said = diagnose(cli, recipe)
    assert (said.code, said.bad) == (0, [])


def test_the_quick_tier_plays_nothing(cli: Cli, sound: Path) -> None:
    said = diagnose(cli, sound, ["--quick", "task.reward=task.broken"])
    assert (said.code, said.bad) == (0, [])


def test_training_says_what_the_quick_tier_found_and_nothing_else(cli: Cli, sound: Path, tmp_path: Path) -> None:
    few = ["trainer.steps=1", "rollout.max_response_tokens=8", "rollout.max_steps=1", "sft.demos=null"]
    ended = cli("train", sound, *few, "rollout.temperature=0.2", "--run", tmp_path / "run")
    assert ended.code == 0
    assert "sampling explores: temperature 0.2" in ended.out
    assert "rows:" not in ended.out


@pytest.mark.skipif(find_spec("verl") is not None, reason="training would go on")
def test_training_on_verl_begins_with_the_quick_tier_too(sound: Path, tmp_path: Path) -> None:
    settings = ["backend=verl", "verl.cpu=true", "sft.demos=null", "rollout.temperature=0.2"]
    config, screen = load_config(str(sound), settings), io.StringIO()
    plan, run = build_plan(config), RunDir.create(tmp_path / "run", config)
    training = Training(config, plan, run, Console(file=screen, width=300), Crew(), resume=False)
    watch: Any = object()
    with pytest.raises(ModuleNotFoundError):  # of a package that verl brings
        asyncio.run(plan.task.run(training.train(watch)))
    assert "sampling explores: temperature 0.2" in screen.getvalue()
