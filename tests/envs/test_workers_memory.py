"""Worker processes with a limit of memory: who fills one fails, and its neighbours never notice.

All limits are twice 100 MiB, of which Python takes some 30.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.envs.processes import EnvFault, EnvLost, EnvOutOfMemory, EnvPool
from agent_r1.envs.processes.pool import MAX_ALIVE, MAX_REPLAYS
from agent_r1.guard import explain
from agent_r1.types import Transition
from tests.envs.worker_envs import action, outcome, pid_of, play, row, run, started
from tests.envs.worker_leaks import Growing, Hungry, Loading, SureHungry

LIMIT = "it may take 200 MiB, twice task.workers.memory_mb=100"


@pytest.fixture
def pool() -> Iterator[EnvPool]:
    made = EnvPool(processes=1, step_seconds=60, memory_mb=100)
    yield made
    made.close()


def test_a_leak_costs_the_neighbours_nothing_and_the_leaker_its_episode(pool: EnvPool) -> None:
    async def leaked() -> None:
        calm = [await started(pool, SureHungry, f"calm {number}", number) for number in range(3)]
        leaky = await started(pool, SureHungry, "leaky")
        for _ in range(2):
            await leaky.step(action("keep 60"))
        # 30 + 120 + 80 are more than 200: one of the calm is refused, and cannot help it
        await asyncio.gather(*(env.step(action("use 80")) for env in calm))
        hosts = {await pid_of(env) for env in calm}
        assert len(hosts) == 1
        assert await pid_of(leaky) not in hosts
        with pytest.raises(EnvOutOfMemory) as failed:  # alone: 30 + 120 + 60 are more than 200, too
            await leaky.step(action("keep 60"))
        assert str(failed.value).startswith(
            f"step got no memory in a process which one episode had to itself: {LIMIT}, and had taken "
        )
        assert str(failed.value).endswith("MiB before. Raise that, or look for what SureHungry keeps")
        await leaky.close()
        assert [(await env.step(action("end"))).reward for env in calm] == [0.0, 1.0, 2.0]
        assert {await pid_of(env) for env in calm} == hosts

    run(leaked())


@pytest.mark.parametrize("leak", ["keep 50", "fill"])
def test_any_number_of_leaks_at_once_end_as_failures_of_those_who_leak(pool: EnvPool, leak: str) -> None:
    """Three of nine: there is one process of its own to be had at a time."""
    alive = []

    async def calm(number: int) -> float:
        env = await started(pool, SureHungry, f"calm {number}")
        for _ in range(6):
            await env.step(action("use 50"))
            await env.step(action(str(number)))
            alive.append(len(pool._hosts))
        return (await env.step(action("end"))).reward

    async def leaky(number: int) -> Exception:
        env = await started(pool, SureHungry, f"leaky {number}")
        shown = [await outcome(env.step(action(leak))) for _ in range(6)]  # 300 MiB; who fills needs no second step
        await env.close()
        assert isinstance(shown[-1], EnvFault)  # and it stays so
        return next(item for item in shown if isinstance(item, Exception))

    async def together() -> None:
        failures = asyncio.gather(*map(leaky, range(3)))
        assert await asyncio.gather(*map(calm, range(6))) == [6.0 * number for number in range(6)]
        for error in await failures:
            assert isinstance(error, EnvOutOfMemory | EnvLost)
            assert "200 MiB, twice task.workers.memory_mb=100" in str(error)

    run(together())
    assert max(alive) <= MAX_ALIVE


def test_who_fills_process_after_process_fails_where_there_is_none_of_its_own(pool: EnvPool) -> None:
    async def leaked() -> None:
        calm, first = await started(pool, SureHungry, "calm"), await started(pool, SureHungry, "first")
        await first.step(action("keep 120"))
        await calm.step(action("use 80"))
        apart = await pid_of(first)  # and there it stays, in the only one there may be
        second = await started(pool, SureHungry, "second")
        await second.step(action("keep 110"))
        for turn in range(MAX_REPLAYS + 1):
            assert isinstance(await outcome(second.step(action("1"))), Transition), turn
            await calm.step(action("use 80"))
        with pytest.raises(EnvLost) as failed:
            await second.step(action("1"))
        assert "(200 MiB, twice task.workers.memory_mb=100)" in str(failed.value)
        assert f"SureHungry was played again {MAX_REPLAYS} times already" in str(failed.value)
        assert await pid_of(first) == apart
        assert (await calm.step(action("end"))).reward == 0.0

    run(leaked())


def test_what_a_class_loads_is_not_held_against_its_first_episode() -> None:
    own = EnvPool(processes=1, step_seconds=60, memory_mb=150)

    async def leaked() -> None:
        loader, leaky, calm = [await started(own, Loading, name) for name in ("loader", "leaky", "calm")]
        await leaky.step(action("keep 95"))
        await calm.step(action("use 90"))  # 30 + 100 + 95 + 90 are more than 300
        assert await pid_of(loader) == await pid_of(calm)
        assert await pid_of(leaky) != await pid_of(calm)

    run(leaked())
    own.close()


def test_who_cannot_be_played_again_fails_when_refused_and_else_goes_on(
    pool: EnvPool, caplog: pytest.LogCaptureFixture
) -> None:
    async def leaked() -> None:
        leaky = await started(pool, Hungry, "leaky")
        envs = [await started(pool, Hungry, str(number), number) for number in range(3)]
        sure = await started(pool, SureHungry, "sure", 5)
        before = await pid_of(leaky)
        await leaky.step(action("claim 120"))  # which counts, although it is nowhere yet
        for env in envs[:2]:
            with pytest.raises(EnvOutOfMemory, match=f"in a process which [45] episodes shared: {LIMIT}"):
                await env.step(action("use 80"))
            with pytest.raises(EnvOutOfMemory):  # and it stays so: who knows what it had done before
                await env.step(action("1"))
            await env.close()
        await sure.step(action("use 80"))  # this one can leave
        assert await pid_of(sure) != before
        assert [await pid_of(leaky), await pid_of(envs[2])] == [before, before]
        assert (await envs[2].step(action("end"))).reward == 2.0
        assert (await sure.step(action("end"))).reward == 5.0
        others = [await started(pool, Hungry, str(number)) for number in range(3)]  # more than there are left
        assert {await pid_of(other) for other in others} == {await pid_of(sure)}

    run(leaked())
    assert caplog.text.count("say `deterministic = True` in the class") == 1


def test_who_asks_for_more_than_half_of_it_at_once_is_to_blame(pool: EnvPool) -> None:
    async def greedy() -> None:
        grabs, beside = await started(pool, SureHungry, "grabs"), await started(pool, SureHungry, "beside", 2)
        before = await pid_of(beside)
        with pytest.raises(EnvOutOfMemory, match=f"in a process which 2 episodes shared: {LIMIT}"):
            await grabs.step(action("use 180"))
        await grabs.close()
        last = await beside.step(action("end"))
        assert (last.reward, last.info["pid"]) == (2.0, before)

    run(greedy())


def test_no_memory_while_playing_again_fails_who_asked_for_it_and_nobody_else(pool: EnvPool, tmp_path: Path) -> None:
    async def crashed() -> None:
        growing = pool.env(Growing, "growing", {"flag": str(tmp_path / "flag")})
        await growing.reset(row("growing"))
        await growing.step(action("7"))
        calm, bomb = await started(pool, SureHungry, "calm", 2), await started(pool, Hungry, "bomb")
        (tmp_path / "flag").touch()  # from now on, that step needs more than there is
        asked = [env.step(action(text)) for env, text in ((bomb, "die"), (growing, "1"), (calm, "1"))]
        _, failed, added = await asyncio.gather(*map(outcome, asked))
        assert isinstance(failed, EnvOutOfMemory)
        assert str(failed).startswith("step (played again) got no memory")
        assert isinstance(added, Transition)
        assert (await calm.step(action("end"))).reward == 3.0
        await growing.close()

    run(crashed())


def test_who_needs_more_than_a_new_process_has_is_not_sent_from_one_to_the_next(pool: EnvPool) -> None:
    """Here Python and the class take more than half of what there is, before anybody has done anything."""

    async def hungry() -> None:
        calm = await started(pool, Loading, "calm", 4)
        before = await pid_of(calm)
        with pytest.raises(EnvOutOfMemory, match=f"in a process which one episode had to itself: {LIMIT}"):
            await (await started(pool, Loading, "hungry")).step(action("use 90"))
        last = await calm.step(action("end"))
        assert (last.reward, last.info["pid"]) == (4.0, before)

    run(hungry())


def test_without_a_limit_it_is_the_error_of_the_env() -> None:
    own = EnvPool(processes=1, step_seconds=60)
    with pytest.raises(MemoryError, match="no more"):
        asyncio.run(play(own.env(SureHungry, "hungry", {}), ["refuse"]))
    own.close()


def test_it_says_where_in_the_env(pool: EnvPool) -> None:
    async def asked() -> str:
        env = pool.env(Hungry, "hungry", {})
        await env.reset(row())
        with pytest.raises(EnvOutOfMemory) as failed:
            await env.step(action("use 300"))
        await env.close()
        return explain(failed.value.with_traceback(None)).place

    assert asyncio.run(asked()).startswith("worker_leaks.py:")
