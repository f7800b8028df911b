"""User code under guard: results, exceptions, deadlines, and attempts to end the program."""

from __future__ import annotations

import asyncio
import os
import signal
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import agent_r1
from agent_r1.envs.processes.protocol import dump_error, load_error
from agent_r1.guard import (
    MAX_ERROR_CHARS,
    Escaped,
    TimedOut,
    blame,
    call,
    describe,
    explain,
    guarded,
    is_async,
    run_through,
)


async def give(value: Any) -> Any:
    return value


async def throw(error: BaseException) -> None:
    raise error


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


def test_a_result_and_an_ordinary_exception_pass_through() -> None:
    assert asyncio.run(guarded(give(3), seconds=5)) == 3
    with pytest.raises(KeyError, match="gone"):
        asyncio.run(guarded(throw(KeyError("gone")), seconds=5))


def test_a_timeout_error_of_user_code_is_not_our_deadline() -> None:
    with pytest.raises(TimeoutError, match="the server was slow"):
        asyncio.run(guarded(throw(TimeoutError("the server was slow")), seconds=5))
    with pytest.raises(TimedOut, match=r"not finished after 0\.05 s"):
        asyncio.run(guarded(asyncio.sleep(60), seconds=0.05))


@pytest.mark.parametrize(
    "error", [SystemExit(3), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()], ids=repr
)
def test_an_attempt_to_end_the_program_becomes_an_exception(error: BaseException) -> None:
    with pytest.raises(Escaped, match=type(error).__name__):
        asyncio.run(guarded(throw(error), seconds=5))


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()], ids=repr)
def test_an_attempt_to_end_the_program_in_a_thread_becomes_an_exception(error: BaseException) -> None:
    def leave() -> None:
        raise error

    with pytest.raises(Escaped, match=type(error).__name__):
        asyncio.run(guarded(call(leave), seconds=5))


def test_a_second_ctrl_c_is_not_blamed_on_the_code_it_interrupts() -> None:
    async def deaf() -> None:
        os.kill(os.getpid(), signal.SIGINT)  # asyncio cancels what runs
        os.kill(os.getpid(), signal.SIGINT)  # and raises

    with pytest.raises(KeyboardInterrupt):
        asyncio.run(guarded(deaf(), seconds=5))


def test_the_event_loop_continues_when_user_code_stops_it() -> None:
    async def hostile() -> str:
        loop = asyncio.get_running_loop()
        loop.stop()
        await asyncio.sleep(0)
        loop.call_soon(throw_now, SystemExit(3))
        stray = [loop.create_task(throw(KeyboardInterrupt())), loop.create_task(throw(SystemExit(4)))]
        await asyncio.sleep(0.01)
        return f"{sum(task.exception() is not None for task in stray)} strays"

    with asyncio.Runner() as runner:
        loop = runner.get_loop()
        ours = signal.signal(signal.SIGINT, lambda *_: None)  # as `interruptible` does
        try:
            assert run_through(loop, loop.create_task(hostile())) == "2 strays"
            with pytest.raises(RuntimeError, match="its own"):
                run_through(loop, loop.create_task(throw(RuntimeError("its own"))))
        finally:
            signal.signal(signal.SIGINT, ours)


def throw_now(error: BaseException) -> None:
    raise error


def test_code_that_cancels_itself_does_not_cancel_its_caller() -> None:
    with pytest.raises(Escaped, match="CancelledError"):
        asyncio.run(guarded(cancel_itself(), seconds=5))


def test_cancelling_the_caller_cancels_the_code_and_waits_for_its_cleanup() -> None:
    cleaned: list[str] = []

    async def careful() -> None:
        try:
            await asyncio.sleep(60)
        finally:
            await asyncio.sleep(0.01)
            cleaned.append("yes")

    async def main() -> None:
        task = asyncio.create_task(guarded(careful(), seconds=60))
        await asyncio.sleep(0.01)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert cleaned == ["yes"]


def test_sync_async_and_callable_objects_are_called_alike() -> None:
    async def double(x: int) -> int:
        return 2 * x

    for function in (lambda x: 2 * x, double, lambda x: double(x)):
        assert asyncio.run(call(function, 3)) == 6


def test_any_exception_can_be_described() -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert describe(Rude()) == "Rude: (its message cannot be printed)"
    assert describe(ValueError("half \ud800")) == "ValueError: half ?"
    assert len(describe(ValueError("x" * 10**6))) < MAX_ERROR_CHARS + 100


def raised(error: Exception) -> Exception:
    try:
        raise error
    except Exception as caught:  # noqa: BLE001 (the point of it)
        return caught


HERE = f"test_guard.py:{raised.__code__.co_firstlineno + 2}"


def test_a_failure_has_kind_source_and_place() -> None:
    error = raised(KeyError("ab"))
    assert str(explain(error)) == f"KeyError: 'ab' ({HERE})"
    blame(error, "tool 'reverse'")
    assert str(explain(error)) == f"tool 'reverse' raised KeyError: 'ab' ({HERE})"
    assert explain(error).key == ("KeyError", "tool 'reverse'", HERE)
    assert str(explain(KeyError("ab"))) == "KeyError: 'ab'"  # never raised, so it has no place


@dataclass(frozen=True)
class Frozen(Exception):
    text: str


def test_a_frozen_exception_can_be_blamed_on_its_source() -> None:
    error = Frozen("a")
    blame(error, "tool 'reverse'")
    assert explain(error).source == "tool 'reverse'"


def test_the_place_is_in_user_code() -> None:
    for file, expected in (
        (Path(agent_r1.__file__).parent / "recipes" / "mine" / "task.py", "task.py:1"),
        (Path(agent_r1.__file__).parent / "run" / "train.py", HERE_CALLING),
        (Path(pytest.__file__), HERE_CALLING),
        (Path(asyncio.__file__), HERE_CALLING),
        ("<string>", HERE_CALLING),
    ):
        with pytest.raises(KeyError) as caught:
            run_code("raise KeyError(1)", str(file))
        assert explain(caught.value).place == expected


def run_code(text: str, file: str) -> None:
    exec(compile(text, file, "exec"), {})


HERE_CALLING = f"test_guard.py:{run_code.__code__.co_firstlineno + 1}"


def test_an_exception_from_another_process_keeps_its_place() -> None:
    arrived = load_error(dump_error(raised(KeyError("ab"))))
    assert arrived.__traceback__ is None
    assert str(explain(arrived)) == f"KeyError: 'ab' ({HERE})"


class Worded:
    """An object with an async call; creating one is an ordinary call."""

    async def __call__(self) -> str:
        return "said"


def test_callable_objects_may_be_async() -> None:
    assert is_async(give)
    assert is_async(Worded())
    assert not is_async(Worded)
    assert not is_async(len)
    assert asyncio.run(call(Worded())) == "said"
    assert isinstance(asyncio.run(call(Worded)), Worded)
