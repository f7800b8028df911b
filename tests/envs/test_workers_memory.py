"""Worker processes with a memory limit: the episode that fills one fails, and the others continue.

All limits are twice 100 MiB, of which Python takes about 30.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path

import pytest

from agent_r1.envs.processes.pool import MAX_ALIVE, EnvPool
from agent_r1.envs.processes.protocol import EnvLost, EnvOutOfMemory
from agent_r1.guard import explain
from agent_r1.types import Transition
from tests.envs.worker_envs import action, row
from tests.envs.worker_helpers import outcome, pid_of, play, run, started
from tests.envs.worker_leaks import Growing, Hungry, Loading, SureHungry

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
        before = await pid_of(leaky)
        for _ in range(2):
            await leaky.step(action("keep 60"))
        # 30 + 120 + 80 > 200: the calm ones are refused memory, through no fault of theirs
        await asyncio.gather(*(env.step(action("use 80")) for env in calm))
        hosts = {await pid_of(env) for env in calm}
        assert len(hosts) == 1
        assert before not in hosts
        for _ in range(2):  # and it stays so
            with pytest.raises(EnvOutOfMemory, match=f"{LIMIT}.*'leaky' .* 12. MiB.*SureHungry"):
                await leaky.step(action("1"))
        assert [(await env.step(action("end"))).reward for env in calm] == [0.0, 1.0, 2.0]

    run(leaked())


@pytest.mark.parametrize("leak", ["keep 50", "fill"])
def test_several_leaks_at_once_fail_their_own_episodes_only(pool: EnvPool, leak: str) -> None:
    """Two of six leak."""
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
        assert isinstance(shown[-1], EnvOutOfMemory)  # and it stays so
        return next(item for item in shown if isinstance(item, Exception))

    async def together() -> None:
        failures = asyncio.gather(*map(leaky, range(2)))
        assert await asyncio.gather(*map(calm, range(4))) == [6.0 * number for number in range(4)]
        for error in await failures:
            assert isinstance(error, EnvOutOfMemory)
            assert LIMIT in str(error)

    run(together())
    assert max(alive) <= MAX_ALIVE


def test_what_episodes_that_have_ended_left_is_blamed_on_no_other(pool: EnvPool) -> None:
    async def leaked() -> None:
        calm, leaky = await started(pool, SureHungry, "calm", 1), await started(pool, SureHungry, "leaky")
        before = await pid_of(calm)
        await leaky.step(action("keep 120"))
        await leaky.close()
        await calm.step(action("use 80"))
        last = await calm.step(action("end"))
        assert last.reward == 1.0
        assert last.info["pid"] != before

    run(leaked())


def test_memory_of_an_import_is_not_attributed_to_the_first_episode() -> None:
    own = EnvPool(processes=1, step_seconds=60, memory_mb=150)

    async def leaked() -> None:
        loader, leaky, calm = [await started(own, Loading, name) for name in ("loader", "leaky", "calm")]
        await leaky.step(action("keep 95"))
        await calm.step(action("use 90"))  # 30 + 100 + 95 + 90 > 300
        assert await pid_of(loader) == await pid_of(calm)
        with pytest.raises(EnvOutOfMemory):
            await leaky.step(action("1"))

    run(leaked())
    own.close()


def test_episodes_that_cannot_be_replayed_are_lost_with_a_full_process(pool: EnvPool) -> None:
    async def leaked() -> None:
        leaky, plain = await started(pool, Hungry, "leaky"), await started(pool, Hungry, "plain", 1)
        sure = await started(pool, SureHungry, "sure", 5)
        await leaky.step(action("claim 120"))  # counts, although it is not resident
        with pytest.raises(EnvLost, match=f"{LIMIT}.*'leaky' .*; Hungry was not replayed"):
            await plain.step(action("use 80"))
        with pytest.raises(EnvOutOfMemory):
            await leaky.step(action("1"))
        assert (await sure.step(action("end"))).reward == 5.0

    run(leaked())


def test_a_single_call_that_asks_for_most_of_the_memory_is_to_blame(pool: EnvPool) -> None:
    async def greedy() -> None:
        grabs, beside = await started(pool, SureHungry, "grabs"), await started(pool, SureHungry, "beside", 2)
        before = await pid_of(beside)
        with pytest.raises(EnvOutOfMemory, match=f"may take {LIMIT}"):
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
        with pytest.raises(EnvOutOfMemory, match=f"may take {LIMIT}"):
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
