"""The tool "python", and the environment that keeps its variables, as an episode uses them."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest

from agent_r1.envs.check import check_env, check_tool
from agent_r1.envs.python_env import PythonEnv
from agent_r1.envs.tool_env import ToolEnv
from agent_r1.errors import ConfigError
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.python.tool import NO_OUTPUT, PythonTool
from agent_r1.types import Action, TaskRow
from tests.tools.python_boxes import require

ROW = TaskRow(prompt=[{"role": "user", "content": "What is 6 * 7?"}], reward_model={"ground_truth": "42"})


@pytest.fixture(scope="module")
def python() -> Iterator[PythonTool]:
    require("namespaces")
    tool = PythonTool(libraries=[], seconds=2, output_chars=200)
    yield tool
    asyncio.run(tool.sandbox.close())


def play_programs(env: ToolEnv, *programs: str) -> list[str]:
    async def play() -> list[str]:
        await env.reset(ROW)
        answers = []
        for program in programs:
            text = FORMATS["hermes"].write_call("python", {"code": program})
            transition = await env.step(Action(text=text, token_ids=[]))
            answers += [call.result for call in transition.calls]
        await env.close()
        return answers

    return asyncio.run(play())


def test_the_tool_keeps_the_contract(python: PythonTool) -> None:
    asyncio.run(check_tool(python, {"code": "6 * 7"}, deterministic=True))
    asyncio.run(check_tool(python, {"code": "6 * 7"}, {"session": "s"}))
    asyncio.run(python.sandbox.release("s"))


def test_the_output_comes_before_the_error(python: PythonTool) -> None:
    [text] = play_programs(ToolEnv(tools=[python]), "print('so far')\n1 / 0")
    assert text.startswith("so far\nTraceback")
    assert text.endswith("ZeroDivisionError: division by zero")
    assert play_programs(ToolEnv(tools=[python]), "x = 1") == [NO_OUTPUT]
    assert play_programs(ToolEnv(tools=[python]), "print('x' * 500)")[0].endswith("printed more than 200 characters")


def test_the_retool_format_calls_it(python: PythonTool) -> None:
    async def play() -> str:
        env = ToolEnv(tools=[python], tool_format="retool")
        await env.reset(ROW)
        transition = await env.step(Action(text="<code>\nprint(6 * 7)\n</code>", token_ids=[]))
        return transition.calls[0].result

    assert asyncio.run(play()) == "42"


def test_variables_last_for_an_episode_of_a_python_env_only(python: PythonTool) -> None:
    assert play_programs(PythonEnv(tools=[python]), "x = 41", "x + 1") == [NO_OUTPUT, "42"]
    assert "NameError" in play_programs(ToolEnv(tools=[python]), "x = 41", "x + 1")[1]
    assert "NameError" in play_programs(PythonEnv(tools=[python]), "x + 1")[0], "each episode starts empty"
    assert python.sandbox._sessions == {}, "sessions are released"


def test_both_environments_keep_the_contract(python: PythonTool) -> None:
    call = FORMATS["hermes"].write_call("python", {"code": "import random\nprint(random.random())"})
    for env in (ToolEnv, PythonEnv):
        asyncio.run(check_env(lambda env=env: env(tools=[python]), ROW, [call, call, "42"]))  # type: ignore[misc]


def test_a_python_env_needs_the_tool() -> None:
    with pytest.raises(ConfigError, match=r"one PythonTool .* got 0"):
        PythonEnv(tools=[])


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"seconds": 0}, "seconds"),
        ({"seconds": 1e9}, "seconds .* 1048576"),
        ({"seconds": float("nan")}, "seconds"),
        ({"seconds": "5"}, "seconds .* got '5'"),
        ({"memory_mb": 4.5}, r"memory_mb .* integer"),
        ({"processes": True}, "processes .* integer"),
        ({"slots": 0}, "slots .* got 0"),
        ({"libraries": "numpy"}, "libraries .* got 'numpy'"),
        ({"level": 3}, "level 3"),
    ],
)
def test_settings_that_make_no_sense_are_refused_when_the_tool_is_made(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PythonTool(**({"libraries": []} | settings))
