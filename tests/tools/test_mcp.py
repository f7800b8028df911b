"""Tools of MCP servers: real servers in processes of their own, over stdio and streamable HTTP."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest

from agent_r1 import MCPTools, ToolEnv, replay
from agent_r1.errors import ConfigError
from agent_r1.resources import opened
from agent_r1.tokens.formats.table import FORMATS
from agent_r1.tools.base import BaseTool
from agent_r1.tools.runner import ToolOutcome, run_tool
from agent_r1.types import TaskRow, ToolCallRecord
from tests.tools.small_search import free_port

pytest.importorskip("mcp", reason="pip install 'agent-r1[mcp]'")

SERVER = Path(__file__).with_name("mcp_server.py")
STDIO = ["python", str(SERVER)]
write_call = FORMATS["hermes"].write_call


@contextmanager
def http_server(port: int | None = None) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    port = port or free_port()
    process = subprocess.Popen(
        [sys.executable, SERVER, "http", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        for _ in range(200):
            try:
                httpx.get(f"http://127.0.0.1:{port}/mcp", timeout=1)
                break
            except httpx.TransportError:
                time.sleep(0.1)
        yield f"http://127.0.0.1:{port}/mcp", process
    finally:
        process.kill()
        process.wait()


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with http_server() as (address, _):
        yield address


@cache
def listed() -> Any:
    return MCPTools(command=STDIO)._list()


def over_stdio(**settings: Any) -> MCPTools:
    """Return the tools of the server over stdio, which it lists once for all tests."""
    made = MCPTools(command=STDIO, **settings)
    vars(made)["_list"] = listed
    return made


def by_name(tools: MCPTools) -> dict[str, BaseTool]:
    return {tool.name: tool for tool in tools.tools()}


async def call(tool: BaseTool, **arguments: Any) -> ToolOutcome:
    return await run_tool(tool, arguments, {})


def with_tools(tools: MCPTools, work: Callable[[dict[str, BaseTool]], Coroutine[Any, Any, None]]) -> None:
    """Run `work` with the server's tools open, as a run has them."""
    named = by_name(tools)

    async def run() -> None:
        async with opened(named.values()):
            await work(named)

    asyncio.run(run())


def played(tools: MCPTools, *steps: Sequence[tuple[str, dict[str, Any]]]) -> list[ToolCallRecord]:
    """Play an episode in which each step makes some calls."""
    row = TaskRow(prompt=[{"role": "user", "content": "go"}], row_id="r")
    texts = ["\n".join(write_call(name, args) for name, args in step) for step in steps]
    trajectory = asyncio.run(replay(ToolEnv, row, texts, tools=[tools]))
    return [record for step in trajectory.steps for record in step.calls]


def test_tools_of_a_server_over_http_are_listed_and_called(url: str) -> None:
    tools = MCPTools(url=url)
    named = by_name(tools)
    assert named["add"].description == "Add two numbers."
    assert named["add"].parameters["properties"]["a"]["type"] == "integer"
    assert [record.result for record in played(tools, [("add", {"a": 40})])] == ["41"]  # in an event loop of its own
    records = played(tools, [("add", {"a": 2}), ("add", {"a": 2, "b": 5})], [("add", {"a": "x", "c": 1})])
    assert [record.result for record in records[:2]] == ["3", "7"]
    assert records[2].fault == "bad_arguments"
    assert "unknown argument 'c'" in records[2].result
    assert "'a'" in records[2].result


def test_schemas_reach_the_model_unchanged(url: str) -> None:
    put = by_name(MCPTools(url=url))["put"]
    assert "$defs" in put.parameters
    assert put.schema["function"]["parameters"] == put.parameters
    assert put.validate({"title": "Ulysses", "place": {"shelf": 3}}) == {"title": "Ulysses", "place": {"shelf": 3}}


def test_pictures_resources_and_structured_content_are_results(url: str) -> None:
    async def work(named: dict[str, BaseTool]) -> None:
        shown = await call(named["picture"])
        assert shown.text == "here it is"
        assert [(picture.width, picture.height) for picture in shown.pictures] == [(1, 1)]
        mixed = await call(named["mixed"])
        assert (mixed.text, mixed.info, len(mixed.pictures)) == ("two parts\na note", {"structured": {"count": 2}}, 1)
        refused = await call(named["refuse"])
        assert (refused.text, refused.fault) == ("the shelf is full", "failed")

    with_tools(MCPTools(url=url), work)


def test_many_calls_at_once_share_a_connection(url: str) -> None:
    async def work(named: dict[str, BaseTool]) -> None:
        outcomes = await asyncio.gather(*(call(named["add"], a=number) for number in range(200)))
        assert [outcome.text for outcome in outcomes] == [str(number + 1) for number in range(200)]

    with_tools(MCPTools(url=url), work)


def test_tools_can_be_chosen_and_renamed(url: str) -> None:
    assert list(by_name(MCPTools(url=url, only=["wait", "add"], prefix="shelf_"))) == ["shelf_wait", "shelf_add"]
    with pytest.raises(ConfigError, match=r"'ad'.*'add'"):
        MCPTools(url=url, only=["ad"]).tools()
    with pytest.raises(ConfigError, match="'add'"):
        ToolEnv(tools=[MCPTools(url=url, only=["add"]), MCPTools(url=url, only=["add"])])


def test_a_call_that_takes_too_long_is_text_for_the_model_and_harms_no_other(url: str) -> None:
    async def work(named: dict[str, BaseTool]) -> None:
        slow, quick = await asyncio.gather(call(named["wait"], seconds=30), call(named["wait"], seconds=0))
        assert (slow.fault, quick.text) == ("failed", "done")
        assert "0.5 s" in slow.text
        assert (await call(named["add"], a=1)).text == "2"

    with_tools(MCPTools(url=url, timeout=0.5), work)


def test_a_server_over_http_that_is_restarted_costs_the_calls_made_meanwhile() -> None:
    port = free_port()

    async def work(named: dict[str, BaseTool]) -> None:
        process.kill()
        process.wait()
        failed = await call(named["add"], a=1)
        assert failed.fault == "failed"
        with http_server(port):
            assert (await call(named["add"], a=1)).text == "2"

    with http_server(port) as (address, process):
        tools = MCPTools(url=address)
        tools.tools()
        with_tools(tools, work)


def test_calls_are_shared_among_several_connections() -> None:
    async def work(named: dict[str, BaseTool]) -> None:
        first, second = await asyncio.gather(call(named["pid"]), call(named["pid"]))
        assert first.text != second.text

    with_tools(over_stdio(connections=2), work)


def test_a_server_that_hangs_is_replaced_after_the_call_that_timed_out(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.tools.mcp.connection.CHECK_SECONDS", 0.3)

    async def work(named: dict[str, BaseTool]) -> None:
        hung = await call(named["hang"])
        assert hung.fault == "failed"
        assert (await call(named["add"], a=1)).text == "2"

    with_tools(over_stdio(timeout=1.0), work)


def test_an_episode_with_its_own_session_has_its_own_state(url: str) -> None:
    tools = MCPTools(url=url, sessions="episode")
    for _ in range(2):
        assert [record.result for record in played(tools, [("put", {"title": "Emma"})])] == ["Emma"]
    tools = over_stdio(sessions="episode")
    for _ in range(2):
        records = played(tools, [("put", {"title": "Emma"})], [("put", {"title": "Ada", "place": {"shelf": 2}})])
        assert [record.result for record in records] == ["Emma", "Emma, Ada"]  # nothing of the episode before


def test_calls_of_one_episode_that_need_a_new_server_at_once_share_it() -> None:
    async def work(named: dict[str, BaseTool]) -> None:
        mine = {name: tool.for_episode("one") for name, tool in named.items()}
        assert (await call(mine["crash"])).fault == "failed"
        first = asyncio.create_task(call(mine["pid"]))
        await asyncio.sleep(0.2)  # it is starting the server
        assert (await call(mine["pid"])).text == (await first).text
        await mine["pid"].end_episode()

    with_tools(over_stdio(sessions="episode", parallel=True), work)


def test_a_server_that_cannot_start_is_an_error_that_quotes_its_stderr() -> None:
    with pytest.raises(ConfigError, match="no shelf at /mnt/shelf"):
        MCPTools(command=[*STDIO, "fail"]).tools()
    with pytest.raises(ConfigError, match="no-such-program"):
        MCPTools(command=["no-such-program"]).tools()
    with pytest.raises(ConfigError, match="start_seconds"):
        MCPTools(command=["sleep", "30"], start_seconds=0.2).tools()
    with pytest.raises(ConfigError, match="reached"):
        MCPTools(url=f"http://127.0.0.1:{free_port()}/mcp").tools()


def test_variables_fill_in_secrets_that_the_settings_only_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MY_SHELF_KEY", "hunter2")
    tools = over_stdio(env={"SHELF_KEY": "$MY_SHELF_KEY"}, only=["secret"])
    assert [record.result for record in played(tools, [("secret", {})])] == ["hunter2"]
    monkeypatch.delenv("MY_SHELF_KEY")
    with pytest.raises(ConfigError, match="MY_SHELF_KEY"):
        MCPTools(command=STDIO, env={"SHELF_KEY": "$MY_SHELF_KEY"}).tools()


@pytest.mark.parametrize(
    ("settings", "named"),
    [
        ({}, "command"),
        ({"command": ["x"], "url": "http://localhost"}, "command"),
        ({"command": ["x"], "headers": {"A": "b"}}, "headers"),
        ({"url": "http://localhost", "env": {"A": "b"}}, "env"),
        ({"url": "localhost:80"}, "url"),
        ({"command": ["x"], "env": {"A": 1}}, r"^env\.A of an MCP server: .*; put the value in quotes$"),
        ({"command": []}, "command"),
        ({"command": ["x"], "sessions": "step"}, "sessions"),
        ({"command": ["x"], "connections": 2, "sessions": "episode"}, "connections"),
        ({"command": ["x"], "timeout": 0}, "timeout"),
        ({"command": ["x"], "timeout": "30"}, "^timeout of an MCP server: [^\n]* got '30'$"),
        ({"command": ["x"], "cwd": 3}, "^cwd of"),
        ({"command": ["x"], "time_out": 3}, "^time_out of"),
        ({"command": ["x"], "connections": 1.5}, "connections"),
        ({"command": ["x"], "only": "search"}, "only"),
        ({"command": ["x"], "env": ["A"]}, "env"),
    ],
)
def test_wrong_settings_are_named(settings: dict[str, Any], named: str) -> None:
    with pytest.raises(ConfigError, match=named):
        MCPTools(**settings)


def test_a_process_that_dies_costs_the_calls_in_it_and_is_started_again(tmp_path: Path) -> None:
    marker = tmp_path / "pid"
    code = f"import os; open({str(marker)!r}, 'w').write(str(os.getpid())); import runpy; "
    code += f"runpy.run_path({str(SERVER)!r}, run_name='__main__')"

    async def work(named: dict[str, BaseTool]) -> None:
        crashed, other = await asyncio.gather(call(named["crash"]), call(named["wait"], seconds=20))
        assert {crashed.fault, other.fault} == {"failed"}  # the other call ran in the same process
        assert (await call(named["add"], a=1)).text == "2"
        os.kill(int(marker.read_text()), signal.SIGKILL)
        assert (await call(named["add"], a=1)).fault == "failed"
        assert (await call(named["add"], a=1)).text == "2"

    with_tools(MCPTools(command=["python", "-c", code]), work)
    with pytest.raises(ProcessLookupError):
        os.kill(int(marker.read_text()), 0)


@pytest.mark.skipif(
    subprocess.run([sys.executable, "-c", "import mcp_server_time"], capture_output=True, check=False).returncode != 0,
    reason="pip install mcp-server-time",
)
def test_a_published_server_works_as_it_is() -> None:
    tools = MCPTools(command=["python", "-m", "mcp_server_time", "--local-timezone", "UTC"], prefix="clock_")
    (record,) = played(tools, [("clock_get_current_time", {"timezone": "Asia/Tokyo"})])
    assert json.loads(record.result)["timezone"] == "Asia/Tokyo"
