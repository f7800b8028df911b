"""User code under guard: results, exceptions, deadlines, and what would have ended the program."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from agent_r1.agent.guard import MAX_ERROR_CHARS, Escaped, TimedOut, call, describe, guarded


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


def test_a_timeout_of_the_code_itself_is_not_ours() -> None:
    with pytest.raises(TimeoutError, match="the server was slow"):
        asyncio.run(guarded(throw(TimeoutError("the server was slow")), seconds=5))
    with pytest.raises(TimedOut, match=r"not finished after 0\.05 s"):
        asyncio.run(guarded(asyncio.sleep(60), seconds=0.05))


@pytest.mark.parametrize("error", [SystemExit(3), asyncio.CancelledError(), GeneratorExit()], ids=repr)
def test_what_would_end_the_program_becomes_an_exception(error: BaseException) -> None:
    with pytest.raises(Escaped, match=type(error).__name__):
        asyncio.run(guarded(throw(error), seconds=5))


def test_code_that_cancels_itself_cancels_nobody_else() -> None:
    with pytest.raises(Escaped, match="CancelledError"):
        asyncio.run(guarded(cancel_itself(), seconds=5))


def test_cancelling_the_caller_cancels_the_code_and_waits_for_its_cleaning_up() -> None:
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


class AsyncCallable:
    async def __call__(self, x: int) -> int:
        return 2 * x


def test_sync_async_and_callable_objects_are_called_alike() -> None:
    async def double(x: int) -> int:
        return 2 * x

    for function in (lambda x: 2 * x, double, AsyncCallable(), lambda x: double(x)):
        assert asyncio.run(call(function, 3)) == 6


def test_an_error_is_described_whatever_it_does_when_printed() -> None:
    class Rude(Exception):
        def __str__(self) -> str:
            raise RuntimeError("no")

    assert describe(Rude()) == "Rude: (its message cannot be printed)"
    assert describe(ValueError("half \ud800")) == "ValueError: half ?"
    assert len(describe(ValueError("x" * 10**6))) < MAX_ERROR_CHARS + 100
