"""Worker processes for environments, where something goes wrong: killed, crashed, hanging, leaking, talking nonsense.

Whatever happens, only the episode that did it fails, and the rest goes on.
"""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Coroutine, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_r1.agent.env import AgentEnv
from agent_r1.agent.guard import Escaped
from agent_r1.agent.workers import EnvCrashed, EnvFault, EnvHung, EnvLost, EnvPool, EnvStartError, WorkerEnv
from agent_r1.agent.workers.pool import MAX_REPLAYS
from agent_r1.types import Transition
from tests.agent.worker_worlds import Counting, Fickle, Sure, action, is_alive, play, row, wait_until

ROOT = Path(__file__).parents[2]
STARTED: list[WorkerEnv] = []


@pytest.fixture(scope="module")
def pool() -> Iterator[EnvPool]:
    """One process, so that everybody is everybody's neighbour."""
    made = EnvPool(processes=1, step_seconds=60)
    yield made
    made.close()


@pytest.fixture(scope="module")
def impatient() -> Iterator[EnvPool]:
    made = EnvPool(processes=1, step_seconds=2.0)
    yield made
    made.close()


@pytest.fixture(scope="module")
def narrow() -> Iterator[EnvPool]:
    made = EnvPool(processes=1, step_seconds=60, memory_mb=256)
    yield made
    made.close()


def fail_to_prepare() -> None:
    raise ImportError("no module named 'castle'")


def run(work: Coroutine[Any, Any, None]) -> None:
    """And close what the test has started."""

    async def closing() -> None:
        try:
            await work
        finally:
            while STARTED:
                await STARTED.pop().close()

    asyncio.run(closing())


async def started(pool: EnvPool, cls: type[AgentEnv], row_id: str, *numbers: int) -> WorkerEnv:
    """An env in the middle of an episode."""
    env = pool.env(cls, cls.__name__, {})
    STARTED.append(env)
    await env.reset(row(row_id))
    for number in numbers:
        await env.step(action(str(number)))
    return env


async def outcome(work: Coroutine[Any, Any, Transition]) -> Transition | Exception:
    try:
        return await work
    except Exception as error:  # noqa: BLE001 (looked at by the test)
        return error


async def pid_of(env: AgentEnv) -> int:
    return int((await env.step(action("0"))).info["pid"])


async def kill(pid: int, *, noticed: bool) -> None:
    """`noticed`: by the event loop, before somebody asks the process for something."""
    os.kill(pid, signal.SIGKILL)
    assert wait_until(lambda: not is_alive(pid))
    if noticed:
        await asyncio.sleep(0.05)


# One that crashes


@pytest.mark.parametrize(
    ("trick", "how"),
    [
        ("die", r"was ended by signal 9 \(Killed\)"),
        ("segfault", r"was ended by signal 11 \(Segmentation fault\)"),
        ("exit", "ended itself with exit status 3"),
        ("garbage", r"sent what is no answer \(a frame of 4294967295 bytes\) and was killed"),
    ],
)
def test_a_crash_fails_its_episode_and_the_next_one_has_a_new_process(pool: EnvPool, trick: str, how: str) -> None:
    async def crashed() -> None:
        bomb = await started(pool, Counting, "bomb", 1)
        before = await pid_of(bomb)
        with pytest.raises(EnvCrashed, match=f"the process of the env {how} during step"):
            await bomb.step(action(trick))
        with pytest.raises(EnvCrashed):  # and it stays so
            await bomb.step(action("1"))
        assert not is_alive(before)
        *_, last = await play(pool.env(Counting, "counting", {}), ["3", "end"])
        assert isinstance(last, Transition)
        assert (last.reward, last.info["pid"] != before) == (3.0, True)

    run(crashed())


def test_a_crash_says_in_the_log_where(pool: EnvPool, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EnvCrashed, match="during reset"):
        asyncio.run(pool.env(Counting, "counting", {}).reset(row("here", question="segfault")))
    assert "during reset of Counting of row 'here'" in caplog.text
    assert "in _segfault" in caplog.text  # its Python stack


# Those beside it


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


def test_neighbours_that_cannot_be_played_again_fail_with_the_reason(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb = await started(pool, Counting, "bomb")
        calm, busy = await started(pool, Counting, "calm", 1), await started(pool, Counting, "busy", 1)
        fickle = await started(pool, Fickle, "fickle", 1)
        _, waiting = await asyncio.gather(outcome(bomb.step(action("exit"))), outcome(busy.step(action("1"))))
        reason = (
            "the process of the env ended itself with exit status 3 during step of Counting of row 'bomb'; Counting "
            "cannot be played again, as it is not deterministic"
        )
        for lost in (waiting, await outcome(calm.step(action("1")))):
            assert isinstance(lost, EnvLost)
            assert str(lost) == reason
        with pytest.raises(EnvLost, match=r"failed at call 0 \(reset\): it showed something else"):
            await fickle.step(action("1"))
        assert await play(pool.env(Counting, "counting", {}), ["1"])

    run(crashed())


def test_a_neighbour_that_has_failed_before_is_not_played_again(pool: EnvPool) -> None:
    async def crashed() -> None:
        bomb, hurt = await started(pool, Counting, "bomb"), await started(pool, Sure, "hurt", 1)
        with pytest.raises(KeyError):
            await hurt.step(action("raise"))  # who knows what it did before
        await outcome(bomb.step(action("die")))
        with pytest.raises(EnvLost, match="cannot be played again"):
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


# One that hangs


@pytest.mark.parametrize("trick", ["hang", "hang in c"])
def test_what_hangs_is_killed_and_its_neighbours_go_on(
    impatient: EnvPool, trick: str, caplog: pytest.LogCaptureFixture
) -> None:
    async def hung() -> None:
        stuck, calm = await started(impatient, Counting, "stuck"), await started(impatient, Sure, "calm", 1)
        failed, added = await asyncio.gather(outcome(stuck.step(action(trick))), calm.step(action("2")))
        assert isinstance(failed, EnvHung)
        assert str(failed) == "step took longer than 2 s (task.workers.step_seconds), and its process was killed"
        assert added.observation is not None
        assert added.observation.messages == [{"role": "user", "content": "calm: 3"}]

    run(hung())
    assert "in _hang" in caplog.text  # where it hung


def test_waiting_for_neighbours_is_not_hanging(impatient: EnvPool) -> None:
    async def queued() -> None:
        envs = [await started(impatient, Counting, str(number)) for number in range(11)]
        # 11 calls of 0.2 s one after the other: the last one has its answer after 2.2 s, and took 0.2 s
        shown = await asyncio.gather(*(env.step(action("slow")) for env in envs))
        assert len({item.info["pid"] for item in shown}) == 1

    run(queued())


def test_a_busy_event_loop_is_not_a_hanging_env(impatient: EnvPool) -> None:
    async def blocked() -> None:
        env = await started(impatient, Counting, "r")
        asked = asyncio.create_task(env.step(action("1")))
        await asyncio.sleep(0)
        os.system("sleep 2.3")  # the answer is there long before we look
        assert (await asked).reward == 0.5

    run(blocked())


# One that leaks


def test_a_process_that_has_grown_takes_no_new_episodes_and_ends_with_its_last(narrow: EnvPool) -> None:
    async def leaked() -> None:
        leaky = await started(narrow, Counting, "leaky")
        beside = await started(narrow, Counting, "beside", 1)
        grown = await pid_of(leaky)
        await leaky.step(action("leak"))  # 240 MiB on top of what Python has
        other = await started(narrow, Counting, "other")
        assert await pid_of(other) != grown
        await leaky.close()
        assert (await beside.step(action("end"))).info["pid"] == grown
        assert is_alive(grown)
        await beside.close()
        for _ in range(200):
            if not is_alive(grown):
                break
            await asyncio.sleep(0.02)
        assert not is_alive(grown)
        assert is_alive(await pid_of(other))

    run(leaked())


def test_one_step_cannot_take_all_memory(narrow: EnvPool) -> None:
    async def grabbed() -> None:
        greedy, beside = await started(narrow, Counting, "greedy"), await started(narrow, Counting, "beside", 2)
        with pytest.raises(MemoryError):
            await greedy.step(action("grab"))  # 4 GiB, and 512 MiB are allowed
        assert (await beside.step(action("end"))).reward == 2.0

    run(grabbed())


# One that talks nonsense


@pytest.mark.parametrize(
    ("trick", "error", "message"),
    [
        ("no transition", TypeError, "Counting.step returned dict .* where Transition belongs"),
        ("unpicklable", TypeError, "what Counting returned cannot be pickled: .*lambda"),
        ("unreadable", TypeError, "what the env returned cannot be read in this process: .*not here"),
        ("huge", ValueError, r"Counting returned \d+ bytes; \d+ at most"),
        ("raise", KeyError, "no such move"),
        ("custom", RuntimeError, "Custom: odd"),
        ("leave", Escaped, "SystemExit: bye"),
    ],
)
def test_a_bad_answer_fails_its_episode_and_the_process_goes_on(
    pool: EnvPool, trick: str, error: type[Exception], message: str
) -> None:
    async def answered() -> None:
        beside = await started(pool, Counting, "beside", 4)
        before = await pid_of(beside)
        bad = await started(pool, Counting, "bad", 1)
        with pytest.raises(error, match=message):
            await bad.step(action(trick))
        await bad.close()
        unborn = pool.env(Counting, "counting", {})
        with pytest.raises((error, TypeError)):
            await unborn.reset(row(question=trick))
        await unborn.close()
        last = await beside.step(action("end"))
        assert (last.reward, last.info["pid"]) == (4.0, before)

    run(answered())


# Processes that do not start


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (fail_to_prepare, "ImportError: no module named 'castle'"),
        (partial(os._exit, 5), "ended itself with exit status 5"),
    ],
)
def test_processes_that_do_not_start_are_not_tried_for_ever(prepare: Any, message: str) -> None:
    own = EnvPool(processes=2, step_seconds=60, prepare=prepare)

    async def asked() -> list[Any]:
        envs = [own.env(Counting, "counting", {}) for _ in range(4)]
        resets = [outcome(env.reset(row())) for env in envs]  # type: ignore[arg-type]
        return [*await asyncio.gather(*resets), await outcome(own.env(Counting, "c", {}).reset(row()))]  # type: ignore[arg-type]

    for failed in asyncio.run(asked()):
        assert isinstance(failed, EnvStartError)
        assert "processes for envs in a row did not start; the last one: " in str(failed)
        assert message in str(failed)
    assert own._hosts == []
    own.close()


# When the parent goes


PARENT = """
import asyncio, os, sys
from agent_r1.agent.workers import EnvPool
from tests.agent.worker_worlds import Counting, Sure, action, row

pool = EnvPool(processes=2, step_seconds=600)

async def main(trick):
    first, second = (pool.env(Counting, "counting", {}) for _ in range(2))
    await first.reset(row())
    await second.reset(row())
    with_child = (await first.step(action("child"))).info
    if os.fork() == 0:  # what a fork does at its end is none of the pool's business
        sys.exit(0)
    os.wait()
    other = (await second.step(action("0"))).info
    print(with_child["pid"], with_child["child"], other["pid"], flush=True)
    await second.step(action(trick))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("trick", ["hang in c", "raise"])
def test_nothing_is_left_when_the_parent_ends(trick: str) -> None:
    """Killed while an env hangs in a place where Python cannot be interrupted; or by itself."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, trick],
        env=environment,
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
    )
    assert parent.stdout is not None
    pids = [int(word) for word in parent.stdout.readline().split()]
    assert len(pids) == 3  # two processes, and a process that one of them started
    if trick == "hang in c":
        assert all(map(is_alive, pids))
        parent.kill()
    parent.wait(30)
    parent.stdout.close()
    assert wait_until(lambda: not any(map(is_alive, pids)))


def test_all_of_it_is_one_kind_of_error() -> None:
    assert all(issubclass(kind, EnvFault) for kind in (EnvCrashed, EnvHung, EnvLost, EnvStartError))
