"""`agent-r1 doctor` names each of many faults, and says nothing about what is sound."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.config import bundled_presets, bundled_recipes
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
    (["task.env=task.Counts", *NO_TOOLS], ("yellow", "the same episode repeats"), "other prompts"),
    (["task.env=task.Blocks", *NO_TOOLS], ("yellow", "other episodes go on"), "blocked"),
    (["task.env=task.ClosesOnce", *NO_TOOLS], ("red", "env can be closed"), "already closed"),
    (["model.chat_template=forgets.jinja"], ("yellow", "template keeps prefixes"), "not appended"),
    (["model.chat_template=hides_tools.jinja"], ("yellow", "template shows tools"), "same with and without"),
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


TINY = [preset for recipe in bundled_recipes() for preset in bundled_presets(recipe) if preset.endswith("/tiny")]


@pytest.mark.parametrize("recipe", ["quickstart", "vision_quickstart", *TINY])
def test_nothing_bad_is_said_about_our_own_recipes(cli: Cli, recipe: str) -> None:
    said = diagnose(cli, recipe)
    assert (said.code, said.bad) == (0, [])


def test_the_engine_tier_samples_and_compares_with_the_learner(cli: Cli, sound: Path) -> None:
    said = diagnose(cli, sound, ["--engine", "--quick", "sft.demos=null", "rollout.max_response_tokens=12"])
    assert said.levels("sampler and learner agree") == ["green"]
    assert said.levels("a step fits into memory") == said.levels("checkpoints fit on the disk") == ["green"]
    assert said.levels("the policy calls tools") == ["yellow"]  # it knows nothing,
    assert said.levels("responses are not cut off") == ["red"]  # not even how to end
    assert said.levels("demonstrations score high") == []


def test_groups_that_all_earn_the_same_are_named_with_their_cause(cli: Cli, sound: Path) -> None:
    settings = ["--engine", "--quick", "sft.demos=null", "rollout.max_steps=1", "rollout.max_response_tokens=12"]
    name = "attempts at a row differ in reward"
    easy = diagnose(cli, sound, [*settings, "task.reward=task.for_anything"])
    hard = diagnose(cli, sound, [*settings, "task.reward=task.never"])
    assert easy.levels(name) == hard.levels(name) == ["yellow"]
    fixes = [next(each["fix"] for each in said.findings if each["name"] == name) for said in (easy, hard)]
    assert ["easy" in fixes[0], "hard" in fixes[1]] == [True, True]
    assert all(said.levels("sampler and learner agree") == ["green"] for said in (easy, hard))


def test_the_quick_tier_plays_nothing(cli: Cli, sound: Path) -> None:
    said = diagnose(cli, sound, ["--quick", "task.reward=task.broken"])
    assert (said.code, said.bad) == (0, [])


def test_training_says_what_the_quick_tier_found_and_nothing_else(cli: Cli, sound: Path, tmp_path: Path) -> None:
    few = ["trainer.steps=1", "rollout.max_response_tokens=8", "rollout.max_steps=1", "sft.demos=null"]
    ended = cli("train", sound, *few, "rollout.temperature=0.2", "--run", tmp_path / "run")
    assert ended.code == 0
    assert "sampling explores: temperature 0.2" in ended.out
    assert "rows:" not in ended.out
