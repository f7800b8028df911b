"""How calls are run: results, errors, timeouts, threads, batches."""

from __future__ import annotations

import asyncio
import gc
import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Sequence
from typing import Any

import pytest
from pydantic import BaseModel

from agent_r1 import guard
from agent_r1.guard import Escaped
from agent_r1.tools.base import BaseTool, Returned, ToolCall, ToolError, ToolResult, tool
from agent_r1.tools.runner import ToolOutcome, run_tool


def run(one: BaseTool, arguments: dict[str, Any]) -> ToolOutcome:
    return asyncio.run(run_tool(one, arguments, {}))


class Echo(BaseTool):
    name = "echo"
    description = "Echo."
    parameters = {"type": "object", "properties": {"text": {"type": "string"}}}  # noqa: RUF012 (the seeds' spelling)

    async def execute(self, args: dict[str, Any], **context: Any) -> str:
        return str(args["text"])


def test_results_are_text_numbers_or_tool_results_and_nothing_else() -> None:
    def returning(value: Any) -> ToolOutcome:
        @tool
        def give() -> Any:
            """Give."""
            return value

        return run(give, {})

    assert returning("a").text == "a"
    assert returning(2.5).text == "2.5"
    rich = returning(ToolResult("b", reward=0.5, info={"k": 1}))
    assert (rich.text, rich.reward, rich.info, rich.error) == ("b", 0.5, {"k": 1}, None)
    assert returning(ToolResult("b")).reward == 0.0
    for value in (None, ["a"], {"a": 1}, b"a"):
        with pytest.raises(TypeError, match=f"tool 'give' returned {type(value).__name__}"):
            returning(value)
    for wrong in ({"reward": float("nan")}, {"reward": "1"}, {"info": [("k", 1)]}):
        with pytest.raises(TypeError, match=f"ToolResult.{next(iter(wrong))}"):
            ToolResult("x", **wrong)


@pytest.mark.parametrize("kind", ["sync", "async"])
def test_a_tool_error_is_text_and_any_other_exception_propagates(kind: str) -> None:
    def fail(how: str) -> str:
        """Fail."""
        if how == "refuse":
            raise ToolError("no such page")
        if how == "exit":
            sys.exit(3)
        if how == "own timeout":
            raise TimeoutError("upstream")
        raise KeyError(how)

    async def fail_async(how: str) -> str:
        """Fail."""
        return fail(how)

    failing = tool(fail if kind == "sync" else fail_async)
    outcome = run(failing, {"how": "refuse"})
    assert (outcome.text, outcome.error, outcome.refused) == ("no such page", "no such page", False)
    with pytest.raises(KeyError, match="bug"):
        run(failing, {"how": "bug"})
    with pytest.raises(Escaped, match="SystemExit"):  # not the end of the run
        run(failing, {"how": "exit"})
    with pytest.raises(TimeoutError, match="upstream"):  # what the tool waited for, not our limit
        run(failing, {"how": "own timeout"})


def test_a_tool_error_may_cost_a_process_reward() -> None:
    @tool
    def fail(cost: float) -> str:
        """Fail."""
        raise ToolError("no such page", reward=-cost)

    outcome = run(fail, {"cost": 0.5})
    assert (outcome.text, outcome.fault, outcome.reward) == ("no such page", "failed", -0.5)
    with pytest.raises(TypeError, match=r"ToolError\.reward"):
        ToolError("no such page", reward=math.nan)

    class NotFound(ToolError):
        def __init__(self, page: int) -> None:
            self.page = page

    @tool
    def read(page: int) -> str:
        """Read."""
        raise NotFound(page)

    outcome = run(read, {"page": 3})
    assert (outcome.text, outcome.reward) == ("3", 0.0)  # an `__init__` of its own


def test_a_tool_that_hangs_times_out() -> None:
    forever = threading.Event()

    @tool(timeout=0.05)
    def hang() -> str:
        """Hang."""
        forever.wait()
        return "late"

    @tool(name="sleepy", timeout=0.05)
    async def sleep() -> str:
        """Sleep."""
        await asyncio.sleep(3600)
        return "late"

    try:
        assert run(hang, {}).error == "tool 'hang' did not answer within 0.05 s"
        assert run(sleep, {}).error == "tool 'sleepy' did not answer within 0.05 s"
    finally:
        forever.set()


def test_hung_tools_neither_starve_others_nor_keep_the_interpreter_alive() -> None:
    # 100 hung calls are more than any default thread pool has; the process must still end by itself.
    program = """
import asyncio, threading
from agent_r1.tools.base import tool
from agent_r1.tools.runner import run_tool

@tool(timeout=0.2)
def hang() -> str:
    "Hang."
    threading.Event().wait()

@tool
def quick() -> str:
    "Answer."
    return "done"

async def main():
    hung = [run_tool(hang, {}, {}) for _ in range(100)]
    return (await asyncio.gather(*hung, run_tool(quick, {}, {})))[-1].text

print(asyncio.run(main()))
"""
    finished = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=True)
    assert finished.stdout == "done\n"


# batching


class Query(BaseModel):
    number: int
    power: int = 2


def batched(log: list[list[int]], **options: Any) -> BaseTool:
    @tool(batch=True, **options)
    def powers(calls: list[Query]) -> list[Any]:
        """Raise numbers to a power."""
        log.append([call.number for call in calls])
        if any(call.number == 13 for call in calls):
            raise ValueError("13 breaks the batch")
        return [ToolError("is negative") if c.number < 0 else c.number**c.power for c in calls]

    return powers


def together(one: BaseTool, numbers: Sequence[int]) -> list[Any]:
    async def main() -> list[Any]:
        return await asyncio.gather(*(run_tool(one, {"number": n}, {}) for n in numbers), return_exceptions=True)

    return asyncio.run(main())


def test_concurrent_calls_become_one_batch_and_one_refusal_fails_alone() -> None:
    log: list[list[int]] = []
    powers = batched(log)
    assert powers.parameters["required"] == ["number"]
    assert [(o.text, o.error) for o in together(powers, [3, -1, 4])] == [
        ("9", None),
        ("is negative", "is negative"),
        ("16", None),
    ]
    assert log == [[3, -1, 4]]
    assert together(powers, [5])[0].text == "25"  # another event loop, the same tool
    assert run(powers, {"number": "x"}).refused


def test_a_batch_that_breaks_is_run_call_by_call() -> None:
    log: list[list[int]] = []
    three, thirteen, four = together(batched(log), [3, 13, 4])
    assert (three.text, four.text) == ("9", "16")
    assert repr(thirteen) == "ValueError('13 breaks the batch')"
    assert log[0] == [3, 13, 4]
    assert sorted(log[1:]) == [[3], [4], [13]]


def test_max_batch_splits_and_max_wait_holds_a_batch_open() -> None:
    log: list[list[int]] = []
    together(batched(log, max_batch=2), [1, 2, 3, 4, 5])
    assert sorted(log) == [[1, 2], [3, 4], [5]]  # batches run in separate threads, so the log has no order

    log.clear()
    patient = batched(log, max_wait=60, max_batch=2)  # the second call completes the batch, so nothing waits a minute

    async def late(number: int) -> None:
        await asyncio.sleep(0.01 * number)
        await run_tool(patient, {"number": number}, {})

    async def main() -> None:
        await asyncio.gather(late(0), late(1))

    asyncio.run(main())
    assert log == [[0, 1]]
    assert together(batched(log, max_wait=0.01), [6])[0].text == "36"


def test_a_batch_that_hangs_times_out_once() -> None:
    starts: list[int] = []

    class Hanging(Echo):
        timeout = 0.05

        async def batch_execute(self, calls: list[ToolCall]) -> Sequence[Returned | BaseException]:
            starts.append(len(calls))
            await asyncio.sleep(3600)
            return []

    async def main() -> list[ToolOutcome]:
        hanging = Hanging()
        return await asyncio.gather(*(run_tool(hanging, {"text": "x"}, {}) for _ in range(3)))

    assert {o.error for o in asyncio.run(main())} == {"tool 'echo' did not answer within 0.05 s"}
    assert starts == [3]


@pytest.mark.parametrize("returned", [[], "a"])
def test_a_batch_must_return_a_list_with_one_result_per_call(returned: Any) -> None:
    class Short(Echo):
        async def batch_execute(self, calls: list[ToolCall]) -> Sequence[Returned | BaseException]:
            return returned  # type: ignore[no-any-return]

    with pytest.raises(TypeError, match=r"'echo'.*1 results"):
        run(Short(), {"text": "x"})


def test_the_default_batch_execute_runs_each_call_and_keeps_its_exception_in_place() -> None:
    async def main() -> Sequence[Returned | BaseException]:
        return await Echo().batch_execute([ToolCall(args={"text": "a"}), ToolCall(args={})])

    good, bad = asyncio.run(main())
    assert good == "a"
    assert isinstance(bad, KeyError)


class Stubborn(BaseException):
    """Not an Exception, like the panics of extension modules."""


@pytest.mark.parametrize("error", [asyncio.CancelledError(), Stubborn("panic"), SystemExit(3)], ids=repr)
def test_a_batch_that_raises_a_base_exception_fails_every_call(error: BaseException) -> None:
    @tool(batch=True, timeout=5)
    async def broken(calls: list[Query]) -> list[Any]:
        """Break."""
        raise error

    async def two() -> list[Any]:
        runs = [run_tool(broken, {"number": number}, {}) for number in (1, 2)]
        return await asyncio.wait_for(asyncio.gather(*runs, return_exceptions=True), 20)

    outcomes = asyncio.run(two())
    assert all(isinstance(outcome, Escaped) for outcome in outcomes)


def test_a_tool_that_swallows_its_cancellation_cannot_outlive_its_timeout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guard, "CANCEL_SECONDS", 0.2)

    @tool(timeout=0.1)
    async def deaf() -> str:
        """Do not listen."""
        for _ in range(2):
            try:
                await asyncio.sleep(3600)
            except asyncio.CancelledError:
                continue
        return "done after all"

    outcome = asyncio.run(run_tool(deaf, {}, {}))
    assert outcome.error == "tool 'deaf' did not answer within 0.1 s"


def test_batching_keeps_neither_event_loops_nor_tools_alive() -> None:
    loops: list[weakref.ref[Any]] = []
    tools: list[weakref.ref[Any]] = []

    async def once() -> None:
        made = batched([])
        tools.append(weakref.ref(made))
        loops.append(weakref.ref(asyncio.get_running_loop()))
        await run_tool(made, {"number": 2}, {})

    for _ in range(3):
        asyncio.run(once())
    for _ in range(100):  # the thread of the last call may need a moment to end
        gc.collect()
        if all(ref() is None for ref in loops + tools):
            break
        time.sleep(0.05)
    assert [ref() for ref in loops + tools] == [None] * 6


def test_execute_must_be_async() -> None:
    class Sync(Echo):
        def execute(self, args: dict[str, Any], **context: Any) -> str:  # type: ignore[override]
            return "a"

    class SyncBatch(Echo):
        def batch_execute(self, calls: list[ToolCall]) -> list[str]:  # type: ignore[override]
            return ["a"] * len(calls)

    for wrong in (Sync(), SyncBatch()):
        with pytest.raises(TypeError, match=r"'echo'.*async def"):
            run(wrong, {"text": "a"})
