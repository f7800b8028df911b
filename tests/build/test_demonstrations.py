"""Demonstrations are played in the recipe's environment; those that exceed a limit are left out and counted."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from agent_r1.build.resolve import resolve
from agent_r1.build.start import sft_trajectories
from agent_r1.build.task import build_task
from agent_r1.config import load_config
from agent_r1.errors import DataError
from agent_r1.tokens.rendering import Renderer
from agent_r1.types import Trajectory
from tests.chatml import tokenizer
from tests.cli.test_cli import recipe
from tests.mini.task import demos

MINI = str(Path(__file__).parents[1] / "mini")
RENDERER = Renderer(tokenizer())


def played(*overrides: str, recipe: str = MINI) -> tuple[list[Trajectory], list[str]]:
    config, said = load_config(recipe, overrides), list[str]()
    trajectories = asyncio.run(sft_trajectories(config, build_task(config), RENDERER, said.append))
    return trajectories, said


def length_of_call(number: int) -> int:
    _, texts = demos(20, 0)[number]
    return len(RENDERER.encode_response(texts[0]))


def test_all_episodes_are_played_to_their_end() -> None:
    trajectories, said = played("sft.count=12")
    assert [len(trajectory.steps) for trajectory in trajectories] == [2] * 12
    assert said == []


def test_demonstrations_with_long_texts_are_left_out_and_counted() -> None:
    short, long = length_of_call(9), length_of_call(10)  # a number of two digits is one byte longer
    assert long == short + 1
    trajectories, said = played("sft.count=12", f"rollout.max_response_tokens={short}")
    assert [trajectory.row_id for trajectory in trajectories] == [f"train-{i}" for i in range(10)]
    [line] = said
    assert line.startswith("2 of 12 demonstrations")
    assert f"row train-10: rollout.max_response_tokens is {short}" in line
    assert len(played("sft.count=12", f"rollout.max_response_tokens={long}")[0]) == 12


def test_it_is_an_error_if_most_demonstrations_do_not_fit() -> None:
    with pytest.raises(DataError, match=r"12 of 12 demonstrations .* row train-0: rollout\.max_steps is 1"):
        played("sft.count=12", "rollout.max_steps=1")


def test_demonstrations_that_exceed_the_context_do_not_fit() -> None:
    [trajectory] = played("sft.count=1")[0]
    last = trajectory.steps[-1]
    needed = len(last.prompt_ids) + len(last.response_ids)
    assert len(played("sft.count=1", f"rollout.max_context_tokens={needed}")[0]) == 1
    with pytest.raises(DataError, match=rf"1 of 1 demonstrations .*max_context_tokens is {needed - 1}"):
        played("sft.count=1", f"rollout.max_context_tokens={needed - 1}")


def test_demonstrations_that_exceed_the_limit_of_a_role_name_it() -> None:
    with pytest.raises(DataError, match=r"2 of 2 .* rollout\.roles\.planner\.max_response_tokens is 2\."):
        played("sft.count=2", "rollout.roles.planner.max_response_tokens=2", recipe="planner_worker")


@pytest.mark.parametrize(
    ("made", "message"),
    [
        ("None", r"sft\.demos='task\.mine' returned None, not demonstrations$"),
        ("[]", r"sft\.demos='task\.mine' returned \[\]"),
        ("[*good, good[0][0]]", r"demonstration 2 of sft\.demos='task\.mine' is TaskRow\("),
        ("[({'prompt': 'x'}, ['a'])]", r"demonstration 0 .* is \(\{'prompt': 'x'\}, \['a'\]\)"),
        ("[*good, (good[0][0], 'it')]", r"demonstration 2 .* is \(TaskRow\("),
        ("[(good[0][0], ['it', 3])]", r"demonstration 0 .* is \(TaskRow\("),
        ("good[7]", r"sft\.demos='task\.mine' raised IndexError: list index out of range \(task\.py:\d+\)$"),
        ("(good[i] for i in range(9))", r"sft\.demos='task\.mine' raised IndexError: .* \(task\.py:\d+\)$"),
    ],
)
def test_invalid_demonstrations_are_refused_with_their_index(tmp_path: Path, made: str, message: str) -> None:
    folder = recipe(tmp_path / "recipe", f"def mine(count, seed):\n    good = demos(2, seed)\n    return {made}\n")
    with pytest.raises(DataError, match=message):
        played("sft.demos=task.mine", recipe=str(folder))


IMPATIENT = """

from agent_r1 import StopReason, Transition


class Impatient(Endless):
    async def step(self, action):
        return Transition(terminated=True, stop=StopReason.MAX_STEPS)


def mine(count, seed):
    return [(row, ["a", "b"][:count]) for row in rows("train", 2)]
"""


def test_an_env_that_ends_a_demonstration_at_a_budget_of_its_own_has_reached_none_of_the_run_s(tmp_path: Path) -> None:
    folder = recipe(tmp_path / "recipe", IMPATIENT)
    mine = ["sft.demos=task.mine", "task.env=task.Impatient", "task.tools=[]"]
    with pytest.raises(DataError, match="has 2 texts but its episode ended after 1 steps with 'max_steps'"):
        played(*mine, "sft.count=2", recipe=str(folder))
    assert len(played(*mine, "sft.count=1", recipe=str(folder))[0]) == 2


WAITING = """

class Waiting(Endless):
    opened, closed = 0, 0

    async def reset(self, row):
        Waiting.opened += 1
        return await super().reset(row)

    async def step(self, action):
        import asyncio

        if action.text == "break":
            while Waiting.opened < 3:
                await asyncio.sleep(0)
            raise KeyError("broken")
        await asyncio.sleep(60)

    async def close(self):
        Waiting.closed += 1


def mine(count, seed):
    return [(row, [text]) for row, text in zip(rows("train", 3), ("wait", "break", "wait"))]
"""


def test_when_one_fails_the_others_end_and_close_their_envs(tmp_path: Path) -> None:
    folder = recipe(tmp_path / "recipe", WAITING)
    config = load_config(str(folder), ["sft.demos=task.mine", "task.env=task.Waiting", "task.tools=[]"])
    env = resolve("task.Waiting", recipe=str(folder))

    async def play() -> int:
        with pytest.raises(DataError, match=r"^demonstration 1 \(train-1\) failed when played: KeyError: 'broken'"):
            await sft_trajectories(config, build_task(config), RENDERER, print)
        closed: int = env.closed  # before the loop ends, which would cancel what is left
        return closed

    assert asyncio.run(play()) == env.opened == 3


def test_demonstrations_whose_first_prompt_is_too_long_are_left_out(tmp_path: Path) -> None:
    folder = recipe(
        tmp_path / "recipe",
        "def mine(count, seed):\n"
        "    long = TaskRow(prompt=[{'role': 'user', 'content': '1' * 600}], row_id='long')\n"
        "    return [*demos(3, seed), (long, ['it is long']), *demos(2, seed)]\n",
    )
    trajectories, said = played("sft.demos=task.mine", "rollout.max_context_tokens=512", recipe=str(folder))
    assert [trajectory.row_id for trajectory in trajectories] == [f"train-{i}" for i in (0, 1, 2, 0, 1)]
    assert [line[:22] for line in said] == ["1 of 6 demonstrations "]
    assert said[0].endswith("row long: rollout.max_context_tokens is 512")
    assert len({trajectory.trajectory_id for trajectory in trajectories}) == 5  # rows may be shown more than once
