"""Environments that crash, hang, leak or send nonsense in a worker process fail only their own episode."""

from __future__ import annotations

import asyncio
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_r1.envs.processes import pool as pool_module
from agent_r1.envs.processes import process
from agent_r1.envs.processes.pool import EnvPool
from agent_r1.envs.processes.protocol import EnvCrashed, EnvHung, EnvRaised, EnvStartError
from agent_r1.guard import Escaped
from agent_r1.types import Transition
from tests.envs.worker_envs import Counting, Library, Sure, action, row
from tests.envs.worker_helpers import is_alive, outcome, pid_of, play, pool_of, run, started, wait_until

ROOT = Path(__file__).parents[2]


pool = pool_of(processes=1)


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


def fail_sometimes(folder: str, bad: set[int]) -> None:
    """In the starts of these numbers, from 0."""
    number = len(os.listdir(folder))
    Path(folder, str(number)).touch()
    if number in bad:
        fail_to_prepare()


@pytest.mark.parametrize(
    ("trick", "how"),
    [
        ("die", r"was ended by signal 9 \(Killed\)"),
        ("segfault", r"was ended by signal 11 \(Segmentation fault\)"),
        ("exit", "exited with status 3"),
        ("garbage", r"sent something that is not an answer \(a frame of \d+ bytes\) and was killed"),
        ("forge", r"sent something that is not an answer \(answer 0 instead of \d+\) and was killed"),
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


def test_crashes_in_the_first_call_of_a_process_are_no_bad_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_BAD_STARTS", 1)
    own = EnvPool(processes=1, step_seconds=60)
    with pytest.raises(EnvCrashed, match="during reset"):
        run(own.env(Counting, "counting", {}).reset(row(question="exit")))
    assert run(play(own.env(Counting, "counting", {}), ["1"]))
    own.close()


def test_the_log_says_where_a_process_crashed(pool: EnvPool, caplog: pytest.LogCaptureFixture) -> None:
    with pytest.raises(EnvCrashed, match="during reset"):
        run(pool.env(Counting, "counting", {}).reset(row("here", question="segfault")))
    assert "during reset of Counting of row 'here'" in caplog.text
    assert "in _segfault" in caplog.text  # its Python stack


@pytest.mark.parametrize("trick", ["hang", "hang in c"])
def test_a_hanging_env_is_killed_and_the_others_continue(
    impatient: EnvPool, trick: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "TRACE_SECONDS", 60.0)  # this machine may be busy

    async def hung() -> None:
        stuck, calm = await started(impatient, Counting, "stuck"), await started(impatient, Sure, "calm", 1)
        failed, added = await asyncio.gather(outcome(stuck.step(action(trick))), calm.step(action("2")))
        assert isinstance(failed, EnvHung)
        assert str(failed) == "step took longer than 2 s (task.workers.step_seconds), and its process was killed"
        assert added.observation is not None
        assert added.observation.messages == [{"role": "user", "content": "calm: 3"}]

    run(hung())
    assert "in _hang" in caplog.text  # where it hung


def test_importing_an_env_may_take_longer_than_a_step(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    late = "import sys, time\nfrom tests.envs.worker_envs import Counting\nclass Late(Counting): pass\n"
    late += 'if "agent_r1.envs.processes.worker" in sys.modules: time.sleep(1.5)\n'
    (tmp_path / "late_env.py").write_text(late, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    own = EnvPool(processes=1, step_seconds=0.5)
    env = own.env(__import__("late_env").Late, "late", {})
    assert run(env.reset(row())).messages == [{"role": "user", "content": "r: 0"}]
    own.close()


def test_waiting_for_other_episodes_does_not_count_as_hanging(impatient: EnvPool) -> None:
    async def queued() -> None:
        envs = [await started(impatient, Counting, str(number)) for number in range(11)]
        # 11 calls of 0.2 s in a row: the last answer comes after 2.2 s, but its call took 0.2 s
        shown = await asyncio.gather(*(env.step(action("slow")) for env in envs))
        assert len({item.info["pid"] for item in shown}) == 1

    run(queued())


def test_a_busy_event_loop_does_not_count_as_hanging(impatient: EnvPool) -> None:
    async def blocked() -> None:
        env = await started(impatient, Counting, "r")
        asked = asyncio.create_task(env.step(action("1")))
        await asyncio.sleep(0)
        os.system("sleep 2.3")  # the answer comes long before it is read
        assert (await asked).reward == 0.5

    run(blocked())


def test_a_process_above_memory_mb_takes_no_new_episodes_and_ends_with_its_last(narrow: EnvPool) -> None:
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


def test_there_are_at_most_twice_as_many_processes(caplog: pytest.LogCaptureFixture) -> None:
    """memory_mb is less than the env needs, so every process outgrows it with its first episode."""
    own = EnvPool(processes=1, step_seconds=60, memory_mb=100)

    async def grown() -> None:
        envs = [await started(own, Library, str(number)) for number in range(5)]
        hosts = [await pid_of(env) for env in envs]
        assert len(set(hosts)) == 2
        assert sorted(hosts.count(pid) for pid in set(hosts)) == [2, 3]  # the one with the fewest takes the next

    run(grown())
    own.close()
    assert "more than task.workers.memory_mb=100" in caplog.text


@pytest.mark.parametrize(
    ("trick", "error", "message"),
    [
        ("no transition", TypeError, "Counting.step returned str .* instead of Transition"),
        ("function", TypeError, "Counting returned something that cannot be sent from a worker process: function <"),
        ("deep", TypeError, "cannot be sent from a worker process: maximum recursion depth"),
        ("huge", ValueError, r"Counting returned \d+ bytes; at most \d+"),
        ("raise", KeyError, "no such move"),
        ("custom", ValueError, "odd"),
        ("unprintable", EnvRaised, r"\(its message cannot be printed\)"),
        ("leave", Escaped, "SystemExit: bye"),
        ("interrupt", Escaped, "KeyboardInterrupt"),
    ],
)
def test_a_bad_answer_fails_its_episode_and_the_process_continues(
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
        with pytest.raises((error, TypeError)):  # TypeError: none of them is an observation
            await unborn.reset(row(question=trick))
        await unborn.close()
        last = await beside.step(action("end"))
        assert (last.reward, last.info["pid"]) == (4.0, before)

    run(answered())


@pytest.mark.parametrize(("trick", "error"), [("bomb", EnvCrashed), ("bomb inside", TypeError), ("liar", TypeError)])
def test_a_pickle_from_a_process_is_never_loaded_here(tmp_path: Path, trick: str, error: type[Exception]) -> None:
    async def bombed() -> Transition | Exception:
        env = await started(own, Counting, str(tmp_path / "made"))
        return await outcome(env.step(action(trick)))

    own = EnvPool(processes=1, step_seconds=60)
    try:
        assert isinstance(run(bombed()), error)
    finally:
        own.close()
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize("trick", ["stop loop", "exit later"])
def test_an_env_that_stops_the_event_loop_of_its_process_fails_no_episode(pool: EnvPool, trick: str) -> None:
    async def stopped() -> None:
        calm, bomb = await started(pool, Counting, "calm", 4), await started(pool, Counting, "bomb", 1)
        before = await pid_of(calm)
        assert (await bomb.step(action(trick))).info["pid"] == before
        last = await calm.step(action("end"))
        assert (last.reward, last.info["pid"]) == (4.0, before)
        assert (await bomb.step(action("end"))).reward == 1.0

    run(stopped())


@pytest.mark.parametrize(
    ("prepare", "message"),
    [
        (fail_to_prepare, "ImportError: no module named 'castle'"),
        (partial(os._exit, 5), "exited with status 5"),
    ],
)
def test_after_three_bad_starts_in_a_row_no_more_are_tried(
    prepare: Any, message: str, caplog: pytest.LogCaptureFixture
) -> None:
    own = EnvPool(processes=2, step_seconds=60, prepare=prepare)

    async def asked() -> list[Any]:
        envs = [own.env(Counting, "counting", {}) for _ in range(4)]
        resets = [outcome(env.reset(row())) for env in envs]  # type: ignore[arg-type]
        return [*await asyncio.gather(*resets), await outcome(own.env(Counting, "c", {}).reset(row()))]  # type: ignore[arg-type]

    for failed in run(asked()):
        assert isinstance(failed, EnvStartError)
        assert "env processes in a row did not start" in str(failed)
        assert message in str(failed)
    assert "during start;" in caplog.text
    assert own._hosts == []
    own.close()


def test_bad_starts_that_are_not_in_a_row_are_tolerated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "MAX_BAD_STARTS", 2)
    own = EnvPool(processes=1, step_seconds=60, prepare=partial(fail_sometimes, str(tmp_path), {0, 2}))

    async def asked() -> None:
        bomb = await started(own, Counting, "bomb")
        assert isinstance(await outcome(bomb.step(action("die"))), EnvCrashed)
        assert await play(own.env(Counting, "counting", {}), ["1"])

    run(asked())
    own.close()
    assert sorted(os.listdir(tmp_path)) == [str(number) for number in range(4)]


@pytest.mark.parametrize("others", [0, 1])
def test_if_no_more_processes_can_be_started_the_others_host_more(
    others: int, caplog: pytest.LogCaptureFixture
) -> None:
    own = EnvPool(processes=2, step_seconds=60)

    async def crowded() -> None:
        hosts = {await pid_of(await started(own, Counting, "first")) for _ in range(others)}
        before = len(os.listdir("/proc/self/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + 3, hard))  # a process needs 6 at its start
            second = own.env(Counting, "counting", {})
            for _ in range(1 if others else 2):  # a call that was never sent does not stop the next one
                with nullcontext() if others else pytest.raises(EnvStartError, match="open files"):
                    await second.reset(row("second"))
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(os.listdir("/proc/self/fd")) == before
        assert not hosts or {await pid_of(second)} == hosts
        await started(own, Counting, "third")

    run(crowded())
    own.close()
    assert ("another env process cannot be started" in caplog.text) == bool(others)


def test_workers_do_not_import_modules_from_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('not the json you meant')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    own = EnvPool(processes=1, step_seconds=60)
    assert run(play(own.env(Counting, "counting", {}), ["1"]))
    own.close()


PARENT = """
import asyncio, os, sys
from agent_r1.envs.processes.pool import EnvPool
from tests.envs.worker_envs import Counting, Sure, action, row

pool = EnvPool(processes=2, step_seconds=600)

async def main(trick):
    first, second = (pool.env(Counting, "counting", {}) for _ in range(2))
    await first.reset(row())
    await second.reset(row())
    with_child = (await first.step(action("child"))).info
    if os.fork() == 0:  # the end of a fork must not end the processes
        sys.exit(0)
    os.wait()
    other = (await second.step(action("0"))).info
    print(with_child["pid"], with_child["child"], other["pid"], flush=True)
    await second.step(action(trick))

asyncio.run(main(sys.argv[1]))
"""


@pytest.mark.parametrize("trick", ["hang in c", "raise"])
def test_nothing_is_left_when_the_parent_ends(trick: str) -> None:
    """Killed while an env hangs where Python cannot be interrupted, or by an exception."""
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
