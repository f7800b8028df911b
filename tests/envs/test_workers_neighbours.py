"""Worker processes for environments: those that lose their process to a neighbour, and go on elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agent_r1.envs.processes import EnvCrashed, EnvFault, EnvHung, EnvLost, EnvPool
from agent_r1.envs.processes.pool import MAX_REPLAYS
from agent_r1.types import Transition
from tests.envs.worker_envs import (
    Counting,
    Fickle,
    Stalling,
    Sure,
    Unordered,
    action,
    is_alive,
    outcome,
    pid_of,
    play,
    row,
    run,
    started,
    wait_until,
)
from tests.envs.worker_pools import pool_of
from tests.envs.worker_values import Once

pool = pool_of(processes=1)


def text_of(shown: Transition | Exception) -> str:
    assert isinstance(shown, Transition), shown
    assert shown.observation is not None
    assert shown.observation.messages is not None
    return str(shown.observation.messages[0]["content"])


async def kill(pid: int, *, noticed: bool) -> None:
    """`noticed`: by the event loop, before somebody asks the process for something."""
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pid))
    if noticed:
        await asyncio.sleep(0.05)


def test_neighbours_are_played_again_and_never_notice(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb = await started(pool, Counting, "bomb")
        calm = await started(pool, Sure, "calm", 1, 2)
        busy = await started(pool, Sure, "busy", 10)
        before = await pid_of(calm)
        fresh = pool.env(Counting, "counting", {})
        ended, added, reset = await asyncio.gather(
            outcome(bomb.step(action("die"))),
            busy.step(action("20")),  # waits behind it, and has not begun
            fresh.reset(row("fresh")),  # has no past, so nothing is lost that could not be had again
        )
        assert isinstance(ended, EnvCrashed)
        assert added.observation is not None
        assert added.observation.messages == [{"role": "user", "content": "busy: 30"}]
        assert reset.messages == [{"role": "user", "content": "fresh: 0"}]
        # 1 + 2 + 0 (asked for its process) before it was moved, 4 after
        assert (await calm.step(action("4"))).info["pid"] != before
        assert (await calm.step(action("end"))).reward == 7.0
        assert [schema["function"]["name"] for schema in calm.tool_schemas] == ["add"]

    run(crashed())


def test_neighbours_that_cannot_be_played_again_fail_with_the_reason(
    pool: EnvPool, caplog: pytest.LogCaptureFixture
) -> None:
    async def crashed() -> None:
        bomb = await started(pool, Counting, "bomb")
        calm, busy = await started(pool, Counting, "calm", 1), await started(pool, Counting, "busy", 1)
        fickle = await started(pool, Fickle, "fickle", 1)
        _, waiting = await asyncio.gather(outcome(bomb.step(action("exit"))), outcome(busy.step(action("1"))))
        reason = (
            "the process of the env ended itself with exit status 3 during step of Counting of row 'bomb'; Counting "
            "cannot be played again, as its class does not say deterministic = True"
        )
        for lost in (waiting, await outcome(calm.step(action("1")))):
            assert isinstance(lost, EnvLost)
            assert str(lost) == reason
        with pytest.raises(EnvLost, match=r"failed at reset: it showed something else"):
            await fickle.step(action("1"))
        assert await play(pool.env(Counting, "counting", {}), ["1"])

    run(crashed())
    # Two were lost, and whoever reads the log is told once.
    assert caplog.text.count("Counting was lost through no fault of its own. If the same row and actions show") == 1


def test_sets_come_in_the_same_order_in_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    own = EnvPool(processes=1, step_seconds=60)

    async def crashed() -> None:
        unordered, bomb = await started(own, Unordered, "unordered", 1, 2), await started(own, Counting, "bomb")
        before = await pid_of(bomb)
        assert isinstance(await outcome(bomb.step(action("die"))), EnvCrashed)
        assert await pid_of(unordered) != before

    run(crashed())
    own.close()


def test_a_neighbour_that_has_failed_before_is_not_played_again(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb, hurt = await started(pool, Counting, "bomb"), await started(pool, Sure, "hurt", 1)
        with pytest.raises(KeyError):
            await hurt.step(action("raise"))  # who knows what it did before
        await outcome(bomb.step(action("die")))
        with pytest.raises(EnvLost, match="Sure cannot be played again, as a call of it has failed"):
            await hurt.step(action("1"))

    run(crashed())


def test_a_process_that_dies_between_calls_is_replaced_but_not_for_ever(pool: EnvPool) -> None:
    async def killed() -> None:
        sure, counting = await started(pool, Sure, "sure", 5), await started(pool, Counting, "plain", 5)
        for turn in range(MAX_REPLAYS):
            await kill(await pid_of(sure), noticed=turn % 2 == 0)
        assert (await sure.step(action("end"))).reward == 5.0
        with pytest.raises(EnvLost, match=r"was ended by signal 9 \(Killed\) during no call; Counting cannot"):
            await counting.step(action("1"))
        await kill(await pid_of(sure), noticed=True)
        with pytest.raises(EnvLost, match=f"Sure was played again {MAX_REPLAYS} times already"):
            await sure.step(action("1"))

    run(killed())


def test_any_number_of_crashes_next_door_fails_nobody_else(pool: EnvPool) -> None:
    async def crashed() -> None:
        calm = [await started(pool, Sure, str(number)) for number in range(20)]
        for turn in range(MAX_REPLAYS + 2):
            bomb = await started(pool, Counting, f"bomb {turn}")
            assert isinstance(await outcome(bomb.step(action("die"))), EnvCrashed)
            shown = await asyncio.gather(*(outcome(env.step(action("1"))) for env in calm))
            assert [text_of(item) for item in shown] == [f"{number}: {turn + 1}" for number in range(20)]

    run(crashed())


def test_a_neighbour_that_cannot_be_sent_again_fails_alone(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb, before = await started(pool, Counting, "bomb"), await started(pool, Sure, "before", 1)
        once = pool.env(Sure, "once", {})
        await once.reset(row("once", question=Once("?")))
        after = await started(pool, Sure, "after", 2)
        asked = [env.step(action(text)) for env, text in ((bomb, "die"), (before, "1"), (once, "1"), (after, "1"))]
        _, first, failed, last = await asyncio.gather(*map(outcome, asked))
        assert isinstance(failed, EnvLost)
        assert "Sure cannot be sent to another: TypeError: once is enough" in str(failed)
        assert [text_of(first), text_of(last)] == ["before: 2", "after: 3"]
        await once.close()
        assert text_of(await after.step(action("1"))) == "after: 4"

    run(crashed())


def test_calls_that_were_given_up_are_played_again_with_the_others(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb, calm = await started(pool, Counting, "bomb"), await started(pool, Sure, "calm", 1)
        slow = await started(pool, Counting, "slow")
        waits = asyncio.create_task(slow.step(action("slow")))
        dies = asyncio.create_task(outcome(bomb.step(action("die"))))
        await asyncio.sleep(0)
        for number in (10, 100):  # behind both, so neither has begun
            given_up = asyncio.create_task(calm.step(action(str(number))))
            await asyncio.sleep(0)
            given_up.cancel()
            await asyncio.gather(given_up, return_exceptions=True)
        assert text_of(await calm.step(action("1000"))) == "calm: 1111"
        await waits
        assert isinstance(await dies, EnvCrashed)

    run(crashed())


def test_one_call_at_a_time(pool: EnvPool) -> None:
    async def twice() -> None:
        env = await started(pool, Sure, "twice")
        first = asyncio.create_task(env.step(action("slow")))
        await asyncio.sleep(0)
        with pytest.raises(RuntimeError, match="Sure of row 'twice' was called while its step was not answered yet"):
            await env.step(action("1"))
        assert text_of(await first) == "twice: 0"
        assert text_of(await env.step(action("1"))) == "twice: 1"

    run(twice())


def test_who_closes_an_env_during_a_call_is_told_when_its_process_dies(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb, left = await started(pool, Counting, "bomb"), await started(pool, Sure, "left")
        pid = await pid_of(bomb)
        dies = asyncio.create_task(outcome(bomb.step(action("hang"))))
        waits = asyncio.create_task(outcome(left.step(action("1"))))
        await asyncio.sleep(0)
        await left.close()
        await kill(pid, noticed=False)
        assert isinstance(await waits, EnvLost)
        assert isinstance(await dies, EnvCrashed)

    run(crashed())


def test_every_call_that_is_played_again_has_its_own_limit(tmp_path: Path) -> None:
    own = EnvPool(processes=1, step_seconds=2)

    async def hung() -> None:
        stalling = own.env(Stalling, "stalling", {"flag": str(tmp_path / "flag")})
        await stalling.reset(row("stalling"))
        for _ in range(8):
            await stalling.step(action("1"))
        calm, bomb = await started(own, Sure, "calm", 1), await started(own, Counting, "bomb")
        (tmp_path / "flag").touch()
        asked = [env.step(action(text)) for env, text in ((bomb, "die"), (stalling, "1"), (calm, "1"))]
        _, failed, added = await asyncio.gather(*map(outcome, asked))
        assert isinstance(failed, EnvHung)
        limit = "step (played again) took longer than 2 s (task.workers.step_seconds)"
        assert str(failed) == f"{limit}, and its process was killed"
        assert text_of(added) == "calm: 2"

    run(hung())
    own.close()


def test_every_fault_of_a_process_is_an_env_fault(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb, beside = await started(pool, Counting, "bomb"), await started(pool, Counting, "beside")
        for env, text in ((bomb, "die"), (beside, "1")):
            with pytest.raises(EnvFault):
                await env.step(action(text))

    run(crashed())
