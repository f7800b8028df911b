"""Worker processes for environments, where something goes wrong: killed, crashed, hanging, leaking, talking nonsense.

Whatever happens, only the episode that did it fails, and the rest goes on.
"""

from __future__ import annotations

import asyncio
import os
import re
import resource
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from agent_r1.envs.processes import EnvCrashed, EnvHung, EnvOutOfMemory, EnvPool, EnvRaised, EnvStartError, process
from agent_r1.errors import ConfigError
from agent_r1.guard import Escaped, explain
from agent_r1.types import Transition
from tests.envs.worker_envs import (
    Counting,
    Library,
    Sure,
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


# One that crashes


@pytest.mark.parametrize(
    ("trick", "how"),
    [
        ("die", r"was ended by signal 9 \(Killed\)"),
        ("segfault", r"was ended by signal 11 \(Segmentation fault\)"),
        ("exit", "ended itself with exit status 3"),
        ("garbage", r"sent what is no answer \(a frame of 4294967295 bytes\) and was killed"),
        ("forge", r"sent what is no answer \(number 0 where \d+ of \d+ have come\) and was killed"),
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


# One that hangs


@pytest.mark.parametrize("trick", ["hang", "hang in c"])
def test_what_hangs_is_killed_and_its_neighbours_go_on(
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


def test_the_first_import_of_its_module_is_not_hanging(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever comes first would pay for it, and then the next one, in a process that has imported nothing either."""
    late = "import sys, time\nfrom tests.envs.worker_envs import Counting\nclass Late(Counting): pass\n"
    late += 'if "agent_r1.envs.processes.inside" in sys.modules: time.sleep(1.5)\n'
    (tmp_path / "late_world.py").write_text(late, encoding="utf-8")
    monkeypatch.syspath_prepend(tmp_path)
    own = EnvPool(processes=1, step_seconds=0.5)
    env = own.env(__import__("late_world").Late, "late", {})
    assert asyncio.run(env.reset(row())).messages == [{"role": "user", "content": "r: 0"}]
    own.close()


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


def test_there_are_twice_as_many_processes_at_most(caplog: pytest.LogCaptureFixture) -> None:
    """Where memory_mb is less than what the env needs, every process has outgrown it with its first episode."""
    own = EnvPool(processes=1, step_seconds=60, memory_mb=100)

    async def grown() -> None:
        envs = [await started(own, Library, str(number)) for number in range(5)]
        hosts = [await pid_of(env) for env in envs]
        assert len(set(hosts)) == 2
        assert sorted(hosts.count(pid) for pid in set(hosts)) == [2, 3]  # the one with the fewest takes the next

    run(grown())
    own.close()
    assert "Library takes that much for its first reset" in caplog.text
    assert "raise task.workers.memory_mb=100" in caplog.text


def test_one_step_cannot_take_all_memory(narrow: EnvPool) -> None:
    async def grabbed() -> None:
        greedy, beside = await started(narrow, Counting, "greedy"), await started(narrow, Counting, "beside", 2)
        with pytest.raises(EnvOutOfMemory, match=r"it may take 512 MiB, twice task.workers.memory_mb=256"):
            await greedy.step(action("grab"))  # 4 GiB
        assert (await beside.step(action("end"))).reward == 2.0

    run(grabbed())


# One that talks nonsense


@pytest.mark.parametrize(
    ("trick", "error", "message"),
    [
        ("no transition", TypeError, "Counting.step returned dict .* instead of Transition"),
        (
            "function",
            TypeError,
            r"Counting returned function <.*lambda.*> in info\['moves'\]\[0\]\['apply'\], which cannot",
        ),
        ("deep", TypeError, r"in info\['inner'\].*cannot be sent from a worker process: it is nested more than 96"),
        ("longer", TypeError, "Counting returned Longer .* which cannot be sent"),
        ("huge", ValueError, r"Counting returned \d+ bytes; at most \d+"),
        ("raise", KeyError, "no such move"),
        ("custom", ValueError, "odd"),
        ("unprintable", EnvRaised, r"\(its message cannot be printed\)"),
        ("leave", Escaped, "SystemExit: bye"),
        ("interrupt", Escaped, "KeyboardInterrupt"),
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
        with pytest.raises((error, TypeError)):  # TypeError, as none of them is an observation
            await unborn.reset(row(question=trick))
        await unborn.close()
        last = await beside.step(action("end"))
        assert (last.reward, last.info["pid"]) == (4.0, before)

    run(answered())


def test_what_an_env_raises_keeps_its_name_and_where_it_was_raised(pool: EnvPool) -> None:
    async def raised() -> Exception:
        env = await started(pool, Counting, "custom")
        with pytest.raises(ValueError, match="odd") as failed:
            await env.step(action("custom"))
        return failed.value

    error = asyncio.run(raised()).with_traceback(None)  # which is this test's
    assert re.fullmatch(r"Custom: odd \(worker_envs\.py:\d+\)", str(explain(error)))


@pytest.mark.parametrize("trick", ["bomb", "bomb inside"])
def test_a_pickle_from_a_process_is_never_loaded_here(tmp_path: Path, trick: str) -> None:
    """Each in a pool of its own, whose process it leaves changed."""

    async def bombed() -> Transition | Exception:
        env = await started(own, Counting, str(tmp_path / "made"))
        return await outcome(env.step(action(trick)))

    own = EnvPool(processes=1, step_seconds=60)
    try:
        assert isinstance(asyncio.run(bombed()), EnvCrashed if trick == "bomb" else TypeError)
    finally:
        own.close()
    assert not (tmp_path / "made").exists()


def test_an_answer_makes_no_object_but_those_an_env_answers_with() -> None:
    async def lied() -> None:
        env = await started(own, Counting, "liar")
        with pytest.raises(TypeError, match="cannot decode what the env returned: KeyError: 'Popen'"):
            await env.step(action("liar"))

    own = EnvPool(processes=1, step_seconds=60)
    try:
        asyncio.run(lied())
    finally:
        own.close()


@pytest.mark.parametrize("trick", ["stop loop", "exit later"])
def test_an_env_that_stops_the_event_loop_fails_nobody(pool: EnvPool, trick: str) -> None:
    async def stopped() -> None:
        calm, bomb = await started(pool, Counting, "calm", 4), await started(pool, Counting, "bomb", 1)
        before = await pid_of(calm)
        assert (await bomb.step(action(trick))).info["pid"] == before
        last = await calm.step(action("end"))
        assert (last.reward, last.info["pid"]) == (4.0, before)
        assert (await bomb.step(action("end"))).reward == 1.0

    run(stopped())


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


def test_bad_starts_that_are_not_in_a_row_are_borne(tmp_path: Path) -> None:
    """Bad, bad, good; bad, bad, good: three in a row are too many, and there are never more than two."""
    own = EnvPool(processes=1, step_seconds=60, prepare=partial(fail_sometimes, str(tmp_path), {0, 1, 3, 4}))

    async def asked() -> None:
        bomb = await started(own, Counting, "bomb")
        assert isinstance(await outcome(bomb.step(action("die"))), EnvCrashed)
        assert await play(own.env(Counting, "counting", {}), ["1"])

    run(asked())
    own.close()
    assert sorted(os.listdir(tmp_path)) == [str(number) for number in range(6)]


def test_without_another_process_those_there_are_host_more(caplog: pytest.LogCaptureFixture) -> None:
    own = EnvPool(processes=2, step_seconds=60)

    async def crowded() -> None:
        first = await started(own, Counting, "first")
        before = len(os.listdir("/proc/self/fd"))
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        try:
            resource.setrlimit(resource.RLIMIT_NOFILE, (before + 3, hard))  # a process needs 6 at its start
            second = await started(own, Counting, "second")
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        assert len(os.listdir("/proc/self/fd")) == before
        assert await pid_of(second) == await pid_of(first)

    run(crowded())
    own.close()
    assert "another process for envs cannot be started, so the others host more" in caplog.text


def test_modules_of_the_working_directory_do_not_get_in_the_way(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "json.py").write_text("raise ImportError('not the json you meant')", encoding="utf-8")
    monkeypatch.chdir(tmp_path)
    own = EnvPool(processes=1, step_seconds=60)
    assert asyncio.run(play(own.env(Counting, "counting", {}), ["1"]))
    own.close()


# When the parent goes


PARENT = """
import asyncio, os, sys
from agent_r1.envs.processes import EnvPool
from tests.envs.worker_envs import Counting, Sure, action, row

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


def test_settings_are_checked_for_every_env_and_not_only_for_the_first_of_a_kind(impatient: EnvPool) -> None:
    impatient.env(Counting, "counting", {"start": 1})
    with pytest.raises(ConfigError, match=r"env_kwargs\.start of Counting must be a whole number, not str '3'"):
        impatient.env(Counting, "counting", {"start": "3"})
