"""Worker processes with a memory limit: the episode that fills one fails, and the others continue.

All limits are twice 100 MiB, of which Python takes about 30.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.envs.processes.pool import MAX_ALIVE, MAX_REPLAYS, EnvPool
from agent_r1.envs.processes.protocol import EnvFault, EnvLost, EnvOutOfMemory
from agent_r1.guard import explain
from agent_r1.types import Transition
from tests.envs.worker_envs import action, row
from tests.envs.worker_helpers import outcome, pid_of, play, run, started
from tests.envs.worker_leaks import Growing, Hungry, Loading, Slamming, SureHungry

LIMIT = "200 MiB, twice task.workers.memory_mb=100"


@pytest.fixture
def pool() -> Iterator[EnvPool]:
    made = EnvPool(processes=1, step_seconds=60, memory_mb=100)
    yield made
    made.close()


def test_a_leak_fails_its_own_episode_only(pool: EnvPool) -> None:
    async def leaked() -> None:
        calm = [await started(pool, SureHungry, f"calm {number}", number) for number in range(3)]
        leaky = await started(pool, SureHungry, "leaky")
        for _ in range(2):
            await leaky.step(action("keep 60"))
        # 30 + 120 + 80 > 200: the calm ones are refused memory, through no fault of theirs
        await asyncio.gather(*(env.step(action("use 80")) for env in calm))
        hosts = {await pid_of(env) for env in calm}
        assert len(hosts) == 1
        assert await pid_of(leaky) not in hosts
        with pytest.raises(EnvOutOfMemory, match=f"1 episodes and may take {LIMIT}.*SureHungry"):
            await leaky.step(action("keep 60"))  # alone: 30 + 120 + 60 > 200
        await leaky.close()
        assert [(await env.step(action("end"))).reward for env in calm] == [0.0, 1.0, 2.0]
        assert {await pid_of(env) for env in calm} == hosts

    run(leaked())


@pytest.mark.parametrize("leak", ["keep 50", "fill"])
def test_several_leaks_at_once_fail_their_own_episodes_only(pool: EnvPool, leak: str) -> None:
    """Three of nine leak."""
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
        shown = [await outcome(env.step(action(leak))) for _ in range(6)]  # 300 MiB
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


def test_an_episode_that_fills_process_after_process_fails_after_three_replays(pool: EnvPool) -> None:
    async def leaked() -> None:
        calm, first = await started(pool, SureHungry, "calm"), await started(pool, SureHungry, "first")
        await first.step(action("keep 120"))
        await calm.step(action("use 80"))
        apart = await pid_of(first)  # has the only process for a suspect
        second = await started(pool, SureHungry, "second")
        await second.step(action("keep 110"))
        for turn in range(MAX_REPLAYS + 1):
            assert isinstance(await outcome(second.step(action("1"))), Transition), turn
            await calm.step(action("use 80"))
        with pytest.raises(EnvLost) as failed:
            await second.step(action("1"))
        assert "(200 MiB, twice task.workers.memory_mb=100)" in str(failed.value)
        assert f"SureHungry was replayed {MAX_REPLAYS} times already" in str(failed.value)
        assert await pid_of(first) == apart
        assert (await calm.step(action("end"))).reward == 0.0

    run(leaked())


def test_memory_of_an_import_is_not_attributed_to_the_first_episode() -> None:
    own = EnvPool(processes=1, step_seconds=60, memory_mb=150)

    async def leaked() -> None:
        loader, leaky, calm = [await started(own, Loading, name) for name in ("loader", "leaky", "calm")]
        await leaky.step(action("keep 95"))
        await calm.step(action("use 90"))  # 30 + 100 + 95 + 90 > 300
        assert await pid_of(loader) == await pid_of(calm)
        assert await pid_of(leaky) != await pid_of(calm)

    run(leaked())
    own.close()


def test_an_episode_that_cannot_be_replayed_fails_when_it_is_refused_memory(pool: EnvPool) -> None:
    async def leaked() -> None:
        leaky = await started(pool, Hungry, "leaky")
        envs = [await started(pool, Hungry, str(number), number) for number in range(3)]
        sure = await started(pool, SureHungry, "sure", 5)
        before = await pid_of(leaky)
        await leaky.step(action("claim 120"))  # counts, although it is not resident
        for env in envs[:2]:
            with pytest.raises(EnvOutOfMemory, match=f"[45] episodes and may take {LIMIT}"):
                await env.step(action("use 80"))
            with pytest.raises(EnvOutOfMemory):  # its state is unknown from here on
                await env.step(action("1"))
            await env.close()
        await sure.step(action("use 80"))  # this one can leave
        assert await pid_of(sure) != before
        assert [await pid_of(leaky), await pid_of(envs[2])] == [before, before]
        assert (await envs[2].step(action("end"))).reward == 2.0
        assert (await sure.step(action("end"))).reward == 5.0
        others = [await started(pool, Hungry, str(number)) for number in range(3)]
        assert {await pid_of(other) for other in others} == {await pid_of(sure)}

    run(leaked())


def test_an_episode_that_has_left_a_full_process_does_not_depend_on_its_close_there(pool: EnvPool) -> None:
    async def leaked() -> None:
        leaky = await started(pool, Hungry, "leaky")  # stays, and with it the process
        moved = await started(pool, Slamming, "moved", 5)
        before = await pid_of(moved)
        await leaky.step(action("claim 120"))
        await moved.step(action("use 80"))
        with pytest.raises(EnvLost, match="during close; Hungry was not replayed"):
            await leaky.step(action("1"))
        last = await moved.step(action("end"))
        assert last.reward == 5.0
        assert last.info["pid"] != before

    run(leaked())


def test_a_single_call_that_asks_for_most_of_the_memory_is_to_blame(pool: EnvPool) -> None:
    async def greedy() -> None:
        grabs, beside = await started(pool, SureHungry, "grabs"), await started(pool, SureHungry, "beside", 2)
        before = await pid_of(beside)
        with pytest.raises(EnvOutOfMemory, match=f"2 episodes and may take {LIMIT}"):
            await grabs.step(action("use 180"))
        await grabs.close()
        last = await beside.step(action("end"))
        assert (last.reward, last.info["pid"]) == (2.0, before)

    run(greedy())


def test_a_replay_without_memory_fails_its_own_episode_only(pool: EnvPool, tmp_path: Path) -> None:
    async def crashed() -> None:
        growing = pool.env(Growing, "growing", {"flag": str(tmp_path / "flag")})
        await growing.reset(row("growing"))
        await growing.step(action("7"))
        calm, bomb = await started(pool, SureHungry, "calm", 2), await started(pool, Hungry, "bomb")
        (tmp_path / "flag").touch()  # from now on, that step needs too much
        asked = [env.step(action(text)) for env, text in ((bomb, "die"), (growing, "1"), (calm, "1"))]
        _, failed, added = await asyncio.gather(*map(outcome, asked))
        assert isinstance(failed, EnvOutOfMemory)
        assert str(failed).startswith("step (replayed) got no memory")
        assert isinstance(added, Transition)
        assert (await calm.step(action("end"))).reward == 3.0
        await growing.close()

    run(crashed())


def test_an_episode_that_needs_more_than_a_new_process_has_is_not_moved(pool: EnvPool) -> None:
    """Python and the class take more than half of the limit from the start."""

    async def hungry() -> None:
        calm = await started(pool, Loading, "calm", 4)
        before = await pid_of(calm)
        with pytest.raises(EnvOutOfMemory, match=f"1 episodes and may take {LIMIT}"):
            await (await started(pool, Loading, "hungry")).step(action("use 90"))
        last = await calm.step(action("end"))
        assert (last.reward, last.info["pid"]) == (4.0, before)

    run(hungry())


def test_without_a_limit_a_memory_error_is_the_error_of_the_env() -> None:
    own = EnvPool(processes=1, step_seconds=60)
    with pytest.raises(MemoryError, match="no more"):
        run(play(own.env(SureHungry, "hungry", {}), ["refuse"]))
    own.close()


def test_the_failure_has_the_place_in_the_env(pool: EnvPool) -> None:
    async def asked() -> str:
        env = pool.env(Hungry, "hungry", {})
        await env.reset(row())
        with pytest.raises(EnvOutOfMemory) as failed:
            await env.step(action("use 300"))
        await env.close()
        return explain(failed.value.with_traceback(None)).place

    assert run(asked()).startswith("worker_leaks.py:")
