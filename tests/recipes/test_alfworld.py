"""The recipe `alfworld`: the engine against what the official one said, the data in every form, env, reward, experts.

`alfworld_golden.json` is a play of a room full of oddities in the official engine; `test_alfworld_official.py` plays it
there again where that engine is installed.
"""

from __future__ import annotations

import asyncio
import io
import json
import random
import tarfile
import zipfile
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.agent.check import check_env
from agent_r1.config import load_config
from agent_r1.errors import ConfigError, DataError
from agent_r1.recipes.alfworld import data, made, task
from agent_r1.recipes.alfworld.engine import NOTHING_HAPPENS, World
from agent_r1.recipes.alfworld.env import AlfWorld
from agent_r1.recipes.alfworld.expert import Explorer, Wish, learn_priors, read_wish
from agent_r1.recipes.alfworld.game import TASK_TYPES, read_game
from agent_r1.tasks.panel import panel_hash
from agent_r1.types import Action, Observation, Step, StopReason, Trajectory

GOLDEN = json.loads(Path(__file__).with_name("alfworld_golden.json").read_text(encoding="utf-8"))
ENTRIES = made.entries("train")


# The engine


def test_the_engine_says_what_the_official_one_said() -> None:
    world = World(read_game(GOLDEN["problem"], GOLDEN["task"]))
    assert [world.intro, world.admissible(), world.won] == GOLDEN["said"][0]
    for command, said in zip(GOLDEN["commands"], GOLDEN["said"][1:], strict=True):
        assert [world.step(command), world.admissible(), world.won] == said, command


@given(st.sampled_from(ENTRIES), st.integers(0, 2**32))
@settings(max_examples=60, deadline=None)
def test_what_is_admissible_does_something_and_nothing_else_does(entry: data.Entry, seed: int) -> None:
    rng, world = random.Random(seed), World(made.made_game(entry.name))
    known = {"", "look", "go to desk 1", "take mug 1 from desk 1", "open fridge 1", "heat cup 1 with microwave 1"}
    for _ in range(20):
        commands = world.admissible()
        assert commands == sorted(set(commands))
        before = (world.scene(), world.won)
        for refused in known - set(commands):
            assert world.step(refused) == NOTHING_HAPPENS
        assert (world.scene(), world.won) == before
        assert world.admissible() == commands
        command = rng.choice(commands)
        known.add(command)
        assert world.step(command) != NOTHING_HAPPENS
        if command.split()[0] in ("look", "inventory", "help", "examine"):
            assert (world.scene(), world.admissible()) == (before[0], commands)


@pytest.mark.parametrize("entry", ENTRIES[:60], ids=lambda entry: entry.name)
def test_a_walkthrough_wins_with_its_last_step(entry: data.Entry) -> None:
    world = World(made.made_game(entry.name))
    assert world.game.goal.task_type == entry.task_type
    won = [(world.step(command) != NOTHING_HAPPENS, world.won) for command in entry.walkthrough]
    assert won == [(True, False)] * (len(won) - 1) + [(True, True)]


def test_two_things_must_be_in_one_receptacle_and_treated_things_treated() -> None:
    world = World(read_game(GOLDEN["problem"], GOLDEN["task"]))
    for command in ("go to fridge 1", "open fridge 1", "take potato 1 from fridge 1", "go to countertop 1"):
        world.step(command)
    world.step("move potato 1 to countertop 1")
    assert not world.won  # it is not hot
    facts = made.kitchen({"Mug_bar_1": "Desk", "Mug_bar_2": "CounterTop"})
    goal = made.GOALS["pick_two_obj_and_place"].format(thing="Mug", place="Desk")
    world = World(read_game(made.write_problem(facts, goal), ""))
    assert not world.won
    for command in ("go to countertop 1", "take mug 1 from countertop 1", "go to desk 1", "move mug 1 to desk 1"):
        world.step(command)
    assert world.won


def test_equal_games_are_played_apart() -> None:
    game = made.made_game(ENTRIES[0].name)
    one, other = World(game), World(game)
    for command in ENTRIES[0].walkthrough:
        one.step(command)
    assert one.won
    assert (other.won, other.intro, other.scene()) == (False, World(game).intro, World(game).scene())


def test_a_problem_that_is_none_of_the_known_ones_is_refused() -> None:
    facts = made.kitchen({"Mug_bar_1": "Desk"})
    with pytest.raises(DataError, match="none of the six kinds"):
        read_game(made.write_problem(facts, "(:goal (and (holds agent1 Mug_bar_1)))"), "")
    with pytest.raises(DataError, match="not a PDDL problem"):
        read_game("hello", "")
    goal = made.GOALS["pick_and_place_simple"].format(thing="Mug", place="Desk")
    with pytest.raises(DataError, match="empty hands and closed doors"):
        read_game(made.write_problem([*facts, ("opened", "Fridge_bar_1")], goal), "")


# Data


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """Games of all splits, as files of the release; their rules are stand-ins."""
    monkeypatch.setenv("AGENT_R1_DATA", str(tmp_path / "cache"))
    monkeypatch.setattr(data, "DOMAIN", data._short(b"the domain"))
    monkeypatch.setattr(data, "GRAMMAR", data._short(b'"rhs": ""'))

    def file(problem: str, said: str, steps: list[str], **changed: Any) -> bytes:
        game = {"pddl_domain": "the domain", "grammar": f'"rhs": "{said}"', "pddl_problem": problem}
        return json.dumps({**game, "solvable": True, "walkthrough": steps, **changed}).encode()

    files = {}
    for index, split in enumerate(("train",) * 6 + ("valid_train", "valid_seen", "valid_unseen")):
        facts = made.kitchen({"Mug_bar_1": "CounterTop", "DeskLamp_bar_1": "Desk"})
        kind = TASK_TYPES[index % 6]
        problem = made.write_problem(facts, made.GOALS[kind].format(thing="Mug", place="Desk"))
        name = f"json/{split}/{kind}-Mug-None-Desk-1/trial_{index}/{data.RELEASED}"
        files[name] = file(problem, f"Your task is to: {kind}.", ["go to countertop 1"])
        files[name.replace("trial_", "unsolvable_")] = file(problem, "Your task is to: x.", [], solvable=False)
        files[name.replace("Mug-None", "MugSliced-None")] = file(problem, "Your task is to: x.", [])
        files[name.replace(kind, "pick_and_place_with_movable_recep")] = file(problem, "Your task is to: x.", [])
    return files


def write_tree(files: dict[str, bytes], folder: Path) -> Path:
    for name, content in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_bytes(content)
    return folder


def write_archive(files: dict[str, bytes], file: Path) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    if file.suffix == ".zip":
        with zipfile.ZipFile(file, "w") as archive:
            for name, content in files.items():
                archive.writestr(name, content)
    else:
        with tarfile.open(file, "w:xz") as packed:
            for name, content in files.items():
                member = tarfile.TarInfo(name)
                member.size = len(content)
                packed.addfile(member, io.BytesIO(content))
    return file


def test_a_tree_and_archives_give_the_same_games_in_the_same_order(released: dict[str, bytes], tmp_path: Path) -> None:
    backwards = dict(reversed(released.items()))
    sources = [
        write_tree(backwards, tmp_path / "tree"),
        write_archive(released, tmp_path / "zip" / "games.zip").parent,
        write_archive(backwards, tmp_path / "games.tar.xz"),
    ]
    found = [[data.entries(split, str(source)) for split in data.SPLITS] for source in sources]
    assert found[0] == found[1] == found[2]
    assert [len(games) for games in found[0]] == [6, 1, 1, 1]
    assert len({data.content_hash(data.games_file(str(source))) for source in sources}) == 1
    train = [entry.name for entry in found[0][0]]
    assert train == sorted(train, key=lambda name: sha256(name.encode()).hexdigest())
    assert train != sorted(train)


def test_rows_are_the_same_panel_wherever_the_games_are(released: dict[str, bytes], tmp_path: Path) -> None:
    here, there = (str(write_tree(released, tmp_path / name)) for name in ("here", "there"))
    one, other = task.rows("train", path=here), task.rows("train", 3, path=there)
    assert [row.row_id for row in one[:3]] == [row.row_id for row in other]
    assert panel_hash(one[:3]) == panel_hash(other)
    assert {row.data_source for row in one} == {f"alfworld/{kind}" for kind in TASK_TYPES}
    env = AlfWorld(**one[0].env_kwargs)
    assert "go to desk 1" in World(env.game(one[0])).admissible()


def test_a_changed_source_is_read_anew(released: dict[str, bytes], tmp_path: Path) -> None:
    folder = write_tree(released, tmp_path / "tree")
    assert len(data.entries("train", str(folder))) == 6
    next(folder.rglob("train/*/trial_*/*.tw-pddl")).unlink()
    assert len(data.entries("train", str(folder))) == 5


def test_other_rules_and_missing_games_are_told(released: dict[str, bytes], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="Did you mean 'valid_seen'"):
        data.entries("valid_sen", None)
    with pytest.raises(DataError, match="has no ALFWorld games"):
        data.entries("train", str(tmp_path))
    name, content = next(iter(released.items()))
    for key, what in (("pddl_domain", "domain"), ("grammar", "grammar")):
        game = json.loads(content)
        game[key] += " and more"
        folder = write_tree({name: json.dumps(game).encode()}, tmp_path / what)
        with pytest.raises(DataError, match=f"its {what} has hash .* another release"):
            data.entries("train", str(folder))
    folder = write_tree({name: b"{}"}, tmp_path / "broken")
    with pytest.raises(DataError, match="is not an ALFWorld game"):
        data.entries("train", str(folder))
    folder = write_tree({name.replace("train", "test"): content}, tmp_path / "unknown")
    with pytest.raises(DataError, match="has no solvable game"):
        data.entries("train", str(folder))


def test_prepare_takes_an_archive_that_is_there_and_says_what_it_has(
    released: dict[str, bytes], tmp_path: Path
) -> None:
    write_archive(released, tmp_path / "to" / "release.zip")
    said: list[str] = []
    data.prepare(tmp_path / "to", said.append)
    assert said[0] == "train: 6 games, 3,553 were expected"
    assert "differ in some text" in said[-1]
    assert len(data.entries("train", str(tmp_path / "to"))) == 6
    data.prepare(tmp_path / "to", said.append)  # nothing to do
    assert said[:5] == said[5:]


# The env


def play(env: AlfWorld, row: Any, commands: list[str]) -> list[Any]:
    async def run() -> list[Any]:
        first = await env.reset(row)
        return [first, *[await env.step(Action(text=command, token_ids=[])) for command in commands]]

    return asyncio.run(run())


def shown(observation: Observation | None) -> list[str]:
    assert observation is not None
    assert observation.messages is not None
    return [message["content"] for message in observation.messages]


def test_an_episode_is_a_conversation_that_ends_when_the_task_is_done() -> None:
    row, texts = made.demos(1, seed=3)[0]
    first, *steps = play(made.MadeAlfWorld(**row.env_kwargs), row, texts)
    assert shown(first)[0].startswith("You are in the middle of a room.")
    assert shown(first)[0].endswith(row.prompt[0]["content"])
    assert [step.terminated for step in steps] == [False] * (len(texts) - 1) + [True]
    assert [step.info["won"] for step in steps] == [step.terminated for step in steps]
    assert all(step.reward == 0 for step in steps)
    assert shown(steps[-2].observation)[1::2] == texts[:-1]
    json.dumps([dict(step.info) for step in steps])


def test_the_first_line_counts_without_regard_to_case_and_the_rest_is_nothing() -> None:
    row = made.rows("train", 1)[0]
    _, first, second = play(made.MadeAlfWorld(**row.env_kwargs), row, [" Go to DESK 1 \nopen it", "dance"])
    assert first.feedback.startswith("You arrive at desk 1.")
    assert (second.feedback, second.info["refused"]) == (NOTHING_HAPPENS, True)


def test_hints_are_the_admissible_commands() -> None:
    row = made.rows("train", 1)[0]
    first, step = play(made.MadeAlfWorld(**row.env_kwargs, hints=True), row, ["go to fridge 1"])
    world = World(made.made_game(row.row_id))
    assert shown(first)[0].endswith("\nCommands: " + ", ".join(world.admissible()))
    world.step("go to fridge 1")
    assert shown(step.observation)[-1].endswith("\nCommands: " + ", ".join(world.admissible()))


def test_the_anchor_is_the_scene_the_command_was_given_in_however_one_came_there() -> None:
    row = made.rows("train", 1)[0]
    env = lambda: made.MadeAlfWorld(**row.env_kwargs)  # noqa: E731
    _, *one = play(env(), row, ["go to fridge 1", "go to desk 1", "look"])
    _, *other = play(env(), row, ["dance", "go to cabinet 1", "open cabinet 1", "go to desk 1", "inventory", "look"])
    assert one[0].info["anchor"] == other[0].info["anchor"] == other[1].info["anchor"]
    assert one[2].info["anchor"] == other[4].info["anchor"] == other[5].info["anchor"]
    assert one[1].info["anchor"] != one[2].info["anchor"]


def test_the_env_keeps_the_contract() -> None:
    row, texts = made.demos(1, seed=0)[0]
    row = replace(row, reward_model={"ground_truth": "secret"})
    asyncio.run(check_env(lambda: made.MadeAlfWorld(**row.env_kwargs), row, ["dance", *texts]))
    with pytest.raises(DataError, match="does not say where its game is"):
        AlfWorld(game="x").game(replace(row, extra_info={}))


# Reward and demonstrations


def test_the_reward_is_whether_it_was_won() -> None:
    def episode(*infos: dict[str, Any]) -> Trajectory:
        steps = [Step(prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], info=info) for info in infos]
        return Trajectory(row_id="r", trajectory_id="t", steps=steps, stop=StopReason.MAX_STEPS)

    row = made.rows("train", 1)[0]
    lost, refused, won = ({"won": w, "refused": r} for w, r in ((False, False), (False, True), (True, False)))
    played = [episode(refused, won), episode(lost, refused, {}), episode()]
    scored = [asyncio.run(task.reward(row, one)) for one in played]
    # one of two commands refused; of three one never reached the game, and one of the other two was refused
    assert scored == [{"reward": 1, "refused": 0.5}, {"reward": 0, "refused": 0.5}, {"reward": 0, "refused": 0}]


@pytest.mark.parametrize(
    ("sentence", "wish"),
    [
        ("put some mug on desk.", Wish(kind="mug", place="desk")),
        ("put a mug in desk.", Wish(kind="mug", place="desk")),
        ("put two cd in safe.", Wish(kind="cd", place="safe", count=2)),
        ("find two cd and put them in safe.", Wish(kind="cd", place="safe", count=2)),
        ("put a hot mug in desk.", Wish(kind="mug", place="desk", treatment="heat")),
        ("cool some mug and put it in desk.", Wish(kind="mug", place="desk", treatment="cool")),
        ("clean some mug and put it in desk.", Wish(kind="mug", place="desk", treatment="clean")),
        ("look at cd under the desklamp.", Wish(kind="cd", lamp="desklamp")),
        ("examine the cd with the desklamp.", Wish(kind="cd", lamp="desklamp")),
    ],
)
def test_the_explorer_understands_every_kind_of_task(sentence: str, wish: Wish) -> None:
    assert read_wish(f"You see a desk 1.\n\nYour task is to: {sentence}") == wish


def test_the_explorer_solves_made_games_by_what_it_sees() -> None:
    demos = made.explorer_demos(240, seed=0)
    assert len(demos) == 240
    row, texts = demos[0]
    _, *steps = play(made.MadeAlfWorld(**row.env_kwargs), row, texts)
    assert steps[-1].info["won"]
    with pytest.raises(DataError, match="does not understand"):
        read_wish("Your task is to: dance.")


def test_the_explorer_goes_where_things_were_found_and_gives_up_in_the_end() -> None:
    priors = learn_priors([read_game(GOLDEN["problem"], GOLDEN["task"])])
    intro = "You see a desk 1, a drawer 2, a drawer 1, and a shelf 1.\n\nYour task is to: put a {} in shelf."
    assert Explorer(priors).act(intro.format("bowl")) == "go to desk 1"
    assert Explorer(priors).act(intro.format("butterknife")) == "go to drawer 1"
    explorer = Explorer(priors)
    said = [explorer.act(intro.format("unicorn"))]
    while (command := explorer.act(f"On the {said[-1]}, you see nothing.")) is not None:
        said.append(command)
    assert sorted(map(str, said)) == ["go to desk 1", "go to drawer 1", "go to drawer 2", "go to shelf 1"]


def test_both_demos_are_half_of_each_and_of_different_games(released: dict[str, bytes], tmp_path: Path) -> None:
    kind = TASK_TYPES[0]
    files = {n: c.replace(f"{kind}.".encode(), b"put some mug on desk.") for n, c in released.items() if kind in n}
    path = str(write_tree(files, tmp_path / "tree"))
    assert [texts for _, texts in task.demos(9, seed=0, path=path)] == [["go to countertop 1"]]
    [(_, texts)] = task.explorer_demos(9, seed=0, path=path)
    assert texts[-1] == "move mug 1 to desk 1"
    assert len(task.both_demos(2, seed=0, path=path)) == 1  # there is but one game, and the explorer has it


def test_every_preset_can_be_read() -> None:
    assert load_config("alfworld/explorer", []).sft.demos == "task.explorer_demos"
    assert load_config("alfworld/hints", []).task.env_kwargs == {"hints": True}
    assert load_config("alfworld", []).rollout.max_steps == task.MAX_STEPS
