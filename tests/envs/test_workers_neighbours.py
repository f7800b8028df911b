"""Episodes that lose their worker process to another episode are replayed elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from agent_r1.envs.processes.pool import MAX_REPLAYS, EnvPool
from agent_r1.envs.processes.protocol import EnvCrashed, EnvFault, EnvHung, EnvLost
from agent_r1.types import Transition
from tests.envs.worker_envs import Counting, Fickle, Stalling, Sure, Unordered, action, row
from tests.envs.worker_helpers import is_alive, outcome, pid_of, play, pool_of, run, started, wait_until

pool = pool_of(processes=1)


def text_of(shown: Transition | Exception) -> str:
    assert isinstance(shown, Transition), shown
    assert shown.observation is not None
    assert shown.observation.messages is not None
    return str(shown.observation.messages[0]["content"])


async def kill(pid: int, *, noticed: bool) -> None:
    """`noticed`: wait until the event loop has noticed, before the next call."""
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pid))
    if noticed:
        await asyncio.sleep(0.05)


def test_deterministic_episodes_are_replayed_and_continue(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb = await started(pool, Counting, "bomb")
        calm = await started(pool, Sure, "calm", 1, 2)
        busy = await started(pool, Sure, "busy", 10)
        before = await pid_of(calm)
        fresh = pool.env(Counting, "counting", {})
        ended, added, reset = await asyncio.gather(
            outcome(bomb.step(action("die"))),
            busy.step(action("20")),  # queued behind it
            fresh.reset(row("fresh")),  # its first call, so any class can be moved
        )
        assert isinstance(ended, EnvCrashed)
        assert added.observation is not None
        assert added.observation.messages == [{"role": "user", "content": "busy: 30"}]
        assert reset.messages == [{"role": "user", "content": "fresh: 0"}]
        # 1 + 2 + 0 (`pid_of`) before it was moved, 4 after
        assert (await calm.step(action("4"))).info["pid"] != before
        assert (await calm.step(action("end"))).reward == 7.0
        assert [schema["function"]["name"] for schema in calm.tool_schemas] == ["add"]

    run(crashed())


def test_episodes_that_cannot_be_replayed_fail_with_the_reason(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb = await started(pool, Counting, "bomb")
        calm, busy = await started(pool, Counting, "calm", 1), await started(pool, Counting, "busy", 1)
        fickle = await started(pool, Fickle, "fickle", 1)
        _, waiting = await asyncio.gather(outcome(bomb.step(action("exit"))), outcome(busy.step(action("1"))))
        for lost in (waiting, await outcome(calm.step(action("1")))):
            assert isinstance(lost, EnvLost)
            assert isinstance(lost, EnvFault)
            assert "exited with status 3 during step of Counting of row 'bomb'" in str(lost)
            assert "deterministic = True" in str(lost)
        with pytest.raises(EnvLost, match=r"reset \(replayed\) failed: it showed something else"):
            await fickle.step(action("1"))
        assert await play(pool.env(Counting, "counting", {}), ["1"])

    run(crashed())


def test_sets_have_the_same_order_in_the_next_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONHASHSEED", raising=False)
    own = EnvPool(processes=1, step_seconds=60)

    async def crashed() -> None:
        unordered, bomb = await started(own, Unordered, "unordered", 1, 2), await started(own, Counting, "bomb")
        before = await pid_of(bomb)
        assert isinstance(await outcome(bomb.step(action("die"))), EnvCrashed)
        assert await pid_of(unordered) != before

    run(crashed())
    own.close()


def test_an_episode_that_has_failed_before_is_not_replayed(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb, hurt = await started(pool, Counting, "bomb"), await started(pool, Sure, "hurt", 1)
        with pytest.raises(KeyError):
            await hurt.step(action("raise"))  # its state is unknown from here on
        await outcome(bomb.step(action("die")))
        with pytest.raises(EnvLost, match="Sure was not replayed: an earlier call failed"):
            await hurt.step(action("1"))

    run(crashed())


def test_a_process_that_dies_between_calls_is_replaced_up_to_a_limit(pool: EnvPool) -> None:
    async def killed() -> None:
        sure, counting = await started(pool, Sure, "sure", 5), await started(pool, Counting, "plain", 5)
        for turn in range(MAX_REPLAYS):
            await kill(await pid_of(sure), noticed=turn % 2 == 0)
        assert (await sure.step(action("end"))).reward == 5.0
        with pytest.raises(EnvLost, match=r"was ended by signal 9 \(Killed\) during no call; Counting"):
            await counting.step(action("1"))
        await kill(await pid_of(sure), noticed=True)
        with pytest.raises(EnvLost, match=f"Sure was replayed {MAX_REPLAYS} times already"):
            await sure.step(action("1"))

    run(killed())


def test_any_number_of_crashes_fails_no_other_episode(pool: EnvPool) -> None:
    async def crashed() -> None:
        calm = [await started(pool, Sure, str(number)) for number in range(5)]
        for turn in range(MAX_REPLAYS + 2):
            bomb = await started(pool, Counting, f"bomb {turn}")
            assert isinstance(await outcome(bomb.step(action("die"))), EnvCrashed)
            shown = await asyncio.gather(*(outcome(env.step(action("1"))) for env in calm))
            assert [text_of(item) for item in shown] == [f"{number}: {turn + 1}" for number in range(5)]

    run(crashed())


def test_cancelled_calls_are_replayed_too(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb, calm = await started(pool, Counting, "bomb"), await started(pool, Sure, "calm", 1)
        slow = await started(pool, Counting, "slow")
        waits = asyncio.create_task(slow.step(action("slow")))
        dies = asyncio.create_task(outcome(bomb.step(action("die"))))
        await asyncio.sleep(0)
        for number in (10, 100):  # queued behind both
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
        with pytest.raises(RuntimeError, match="await one call at a time"):
            await env.step(action("1"))
        assert text_of(await first) == "twice: 0"
        assert text_of(await env.step(action("1"))) == "twice: 1"

    run(twice())


def test_a_call_fails_when_its_env_is_closed_and_the_process_dies(pool: EnvPool) -> None:
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


def test_every_replayed_call_has_its_own_time_limit(tmp_path: Path) -> None:
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
        assert "step (replayed) took longer than 2 s (task.workers.step_seconds)" in str(failed)
        assert text_of(added) == "calm: 2"

    run(hung())
    own.close()
