"""The sandbox in ordinary use: results, levels, sessions, cancellation, and that nothing is left behind."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import weakref
from pathlib import Path

import pytest

from agent_r1.errors import ConfigError
from agent_r1.tools.python.launcher import Launcher
from agent_r1.tools.python.process import KilledBy, Limits, SandboxError, SandboxProcess
from agent_r1.tools.python.sandbox import LEVELS, LOST_STATE, Sandbox, _run, _Session
from tests.tools.python_boxes import LIMITS, fresh_box, run, together
from tests.tools.python_boxes import box as box
from tests.tools.python_boxes import boxes as boxes
from tests.tools.python_boxes import isolated as isolated
from tests.tools.python_boxes import roomy as roomy

# -- results ---------------------------------------------------------------------------------------------------------


def test_a_last_expression_is_printed_as_in_a_notebook(box: Sandbox) -> None:
    outcome = run(box, "x = 20\nprint('first')\nx * 2 + 2")
    assert outcome.stdout == "first\n42\n"
    assert outcome.error is None
    assert outcome.killed_by is None


def test_an_error_shows_the_line_of_the_code_and_keeps_the_output(box: Sandbox) -> None:
    outcome = run(box, "print('before')\ndef f(n):\n    return 1 / n\nf(0)")
    assert outcome.stdout == "before\n"
    assert outcome.error is not None
    assert "line 3" in outcome.error
    assert outcome.error.endswith("ZeroDivisionError: division by zero")
    assert "/" not in outcome.error.replace("1 / n", ""), "only frames of the code itself"
    assert "SyntaxError" in (run(box, "x = (1 +").error or "")


def test_pickle_and_dataclasses_find_what_the_code_defines(box: Sandbox) -> None:
    code = """
    import pickle
    from dataclasses import dataclass
    @dataclass
    class P:
        x: "int"
    print(pickle.loads(pickle.dumps(P(3))), __name__)
    exit()
    """
    outcome = run(box, code)
    assert (outcome.stdout, outcome.error) == ("P(x=3) __main__\n", None)


def test_random_numbers_are_the_same_in_every_run(box: Sandbox) -> None:
    code = "import random\nprint(random.random())"
    assert run(box, code).stdout == run(box, code).stdout


def test_sets_have_the_same_order_in_every_sandbox(box: Sandbox) -> None:
    code = "print(hash('a'), set('abcdefgh'))"
    with fresh_box(box.level, LIMITS) as other:
        assert run(box, code).stdout == run(other, code).stdout


def test_many_calls_at_once_each_get_their_own_answer(box: Sandbox) -> None:
    outcomes = together(*(box.run(f"print({n} * {n})") for n in range(60)))
    assert [outcome.stdout for outcome in outcomes] == [f"{n * n}\n" for n in range(60)]


def test_only_the_chosen_libraries_are_there(roomy: Sandbox) -> None:
    if roomy.level == "namespaces":
        assert "ModuleNotFoundError" in (run(roomy, "import torch").error or "")
    assert (
        run(roomy, "import sys\nprint('numpy' in sys.modules, 'numpy.random' in sys.modules)").stdout == "True True\n"
    )


def test_packages_beside_the_standard_library_are_hidden(isolated: Sandbox) -> None:
    code = """
    import os, sysconfig
    folder = sysconfig.get_path("stdlib")
    beside = [f"{folder}/site-packages", f"{folder}/dist-packages", "/usr/lib/python3/dist-packages"]
    seen = [path for path in beside if os.path.exists(path)]
    print(os.path.exists(f"{folder}/os.py"), [name for path in seen for name in os.listdir(path)])
    """
    assert run(isolated, code).stdout == "True []\n"


# -- levels ----------------------------------------------------------------------------------------------------------


def test_a_level_or_library_that_does_not_work_is_refused_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match=r"'namespace'.*Did you mean 'namespaces'"):
        Sandbox(level="namespace")
    with pytest.raises(ConfigError, match="pip install no_such_thing"):
        Sandbox(level="process", libraries=["no_such_thing"])
    monkeypatch.setattr("agent_r1.tools.python.sandbox.what_is_missing", lambda level: "unshare: not permitted")
    with pytest.raises(ConfigError, match=r"'namespaces'.*unshare: not permitted.*level=process"):
        Sandbox(libraries=())


# -- sessions ---------------------------------------------------------------------------------------------------------


def test_a_session_keeps_its_variables_until_it_is_released(box: Sandbox) -> None:
    async def play() -> list[str]:
        said = [(await box.run(code, session="a")).stdout for code in ("x = 41", "def f(): return x + 1", "f()")]
        other = await box.run("x", session="b")
        assert "NameError" in (other.error or "")
        await box.release("a")
        assert "NameError" in ((await box.run("x", session="a")).error or "")
        for name in ("a", "b", "never used"):
            await box.release(name)
        return said

    assert asyncio.run(play()) == ["", "", "42\n"]


def test_a_session_survives_an_error_and_reports_lost_state(box: Sandbox) -> None:
    async def play() -> None:
        await box.run("x = 1", session="s")
        assert (await box.run("1 / 0", session="s")).error is not None
        assert (await box.run("x", session="s")).stdout == "1\n"
        assert (await box.run("while True: pass", session="s")).killed_by is KilledBy.TIME
        after = await box.run("print('new')", session="s")
        assert after.stdout == f"[{LOST_STATE}]\nnew\n"
        await box.release("s")

    asyncio.run(play())


def test_a_session_that_forges_reports_is_ended(isolated: Sandbox) -> None:
    async def play() -> None:
        code = "import os, struct\nd = b'{\"error\": null}'\n_ = os.write(3, 2 * (struct.pack('!I', len(d)) + d))"
        await isolated.run(code, session="f")
        assert LOST_STATE in (await isolated.run("print(1)", session="f")).stdout
        await isolated.release("f")

    asyncio.run(play())


# -- lifecycle --------------------------------------------------------------------------------------------------------


def test_a_cancelled_call_is_killed_and_a_waiting_one_never_starts(isolated: Sandbox) -> None:
    async def play(box: Sandbox) -> None:
        running = asyncio.create_task(box.run("import time\ntime.sleep(60)"))
        waiting = asyncio.create_task(box.run("import time\ntime.sleep(60)"))
        await asyncio.sleep(0.5)
        for task in (waiting, running):
            task.cancel()
        only_slot = box.run("print(1)")  # free long before the 60 seconds of either
        assert (await asyncio.wait_for(only_slot, 40)).stdout == "1\n"

    with fresh_box(isolated.level, Limits(seconds=60)) as box:
        asyncio.run(play(box))


def test_a_session_keeps_its_state_if_a_call_is_cancelled_before_it_runs(isolated: Sandbox) -> None:
    async def play(box: Sandbox) -> None:
        await box.run("x = 1", session="kept")
        other = asyncio.create_task(box.run("import time\ntime.sleep(1)"))
        await asyncio.sleep(0.3)
        waiting = asyncio.create_task(box.run("x = 2", session="kept"))
        await asyncio.sleep(0)
        waiting.cancel()
        await asyncio.wait({waiting, other})
        assert (await box.run("print(x)", session="kept")).stdout == "1\n"

    with fresh_box(isolated.level, Limits(seconds=60)) as box:
        asyncio.run(play(box))


def test_a_session_that_is_released_while_a_call_is_cancelled_leaves_nothing(isolated: Sandbox) -> None:
    async def play(box: Sandbox) -> None:
        call = asyncio.create_task(box.run("import time\ntime.sleep(60)", session="gone"))
        await asyncio.sleep(0.3)
        released = asyncio.create_task(box.release("gone"))
        await asyncio.sleep(0)
        call.cancel()
        await asyncio.wait({call, released})
        assert not box._sessions

    with fresh_box(isolated.level, Limits(seconds=60)) as box:
        asyncio.run(play(box))


def test_a_zygote_that_dies_fails_its_callers_and_is_replaced(isolated: Sandbox) -> None:
    async def play(box: Sandbox) -> None:
        call = asyncio.create_task(box.run("import time\ntime.sleep(20)"))
        await asyncio.sleep(0.7)
        zygote = box._launchers[0]._process
        assert zygote is not None
        zygote.send_signal(signal.SIGKILL)
        with pytest.raises(SandboxError, match="ended while code was running"):
            await call
        assert (await box.run("print(1)")).stdout == "1\n"

    with fresh_box(isolated.level, Limits(seconds=30), slots=2) as box:
        asyncio.run(play(box))


def test_a_zygote_that_fails_to_start_is_reported_with_its_last_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.tools.python.launcher.BOOT", "raise SystemExit('no such luck')")
    with pytest.raises(SandboxError, match="did not start: no such luck"):
        Launcher(LIMITS, (), isolated=False).fork()


def test_a_session_released_while_its_process_starts_runs_nothing() -> None:
    held = _Session()

    class ReleasedMeanwhile(Launcher):
        def fork(self) -> SandboxProcess:
            process = super().fork()
            held.released = True
            return process

    launcher = ReleasedMeanwhile(LIMITS, (), isolated=False)
    with pytest.raises(SandboxError, match="released"):
        _run(launcher, held, "print(1)", keep=True)
    launcher.close()
    assert held.process is None


def test_a_handle_that_does_not_fit_among_the_open_files_is_reported() -> None:
    channel, channel_inside = socket.socketpair()
    status, status_inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    output, output_inside = os.pipe()
    with channel_inside, status_inside:
        status_inside.send(b"started")  # the kernel drops a descriptor for which there is no room
        process = SandboxProcess(channel=channel, status=status, output=output, limits=LIMITS)
        with pytest.raises(SandboxError, match="ulimit"):
            process.wait_until_ready()
    os.close(output_inside)
    assert (channel.fileno(), status.fileno()) == (-1, -1)


def test_a_sandbox_can_be_garbage_collected_while_a_call_runs(
    isolated: Sandbox, monkeypatch: pytest.MonkeyPatch
) -> None:
    problems: list[object] = []
    monkeypatch.setattr(sys, "unraisablehook", problems.append)

    async def play() -> weakref.ref[Sandbox]:
        box = Sandbox(level=isolated.level, limits=Limits(seconds=60), libraries=(), slots=1)
        call = asyncio.create_task(box.run("import time\ntime.sleep(60)"))
        await asyncio.sleep(0.5)
        call.cancel()
        await asyncio.wait({call})
        return weakref.ref(box)

    gone = asyncio.run(play())
    gc.collect()
    assert (gone(), problems) == (None, [])


@pytest.mark.parametrize("level", LEVELS)
def test_nothing_is_left_when_a_sandbox_is_closed(level: str) -> None:
    before = len(os.listdir("/proc/self/fd"))
    started = descendants(os.getpid())

    async def play(box: Sandbox) -> None:
        await asyncio.gather(*(box.run(f"print({n})") for n in range(20)))
        await box.run("x = 1", session="never released")
        await box.run("while True: pass")
        await box.close()
        await box.close()
        with pytest.raises(SandboxError, match="closed"):
            await box.run("1")

    with fresh_box(level, LIMITS, slots=2) as box:
        asyncio.run(play(box))
    assert len(os.listdir("/proc/self/fd")) == before
    assert descendants(os.getpid()) <= started


def test_closing_a_sandbox_fails_its_waiting_calls(isolated: Sandbox) -> None:
    async def play(box: Sandbox) -> list[object]:
        calls = [asyncio.create_task(box.run("import time\ntime.sleep(60)")) for _ in range(3)]
        await asyncio.sleep(0.5)
        await box.close()
        return list(await asyncio.gather(*calls, return_exceptions=True))

    with fresh_box(isolated.level, Limits(seconds=60)) as box:
        assert [type(ended) for ended in asyncio.run(play(box))] == [SandboxError] * 3


PROGRAM = """
import asyncio, sys
from agent_r1.tools.python.process import Limits
from agent_r1.tools.python.sandbox import Sandbox
box = Sandbox(level=sys.argv[1], limits=Limits(seconds=600, code_chars=10**6), libraries=(), slots=2)
async def play():
    call = asyncio.create_task(box.run("import time\\ntime.sleep(600)"))
    await box.run("x = 1", session="s")
    print("running", flush=True)
    await call
asyncio.run(play())
"""


def test_no_process_is_left_when_the_program_is_killed(isolated: Sandbox) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", PROGRAM, isolated.level], stdout=subprocess.PIPE, text=True
    ) as program:
        assert program.stdout is not None
        assert program.stdout.readline() == "running\n"
        started = descendants(program.pid)
        program.kill()
    assert len(started) >= 3, "a zygote, a call and a session"
    for _ in range(200):  # they end on their own a moment later
        if not any(Path(f"/proc/{pid}").exists() for pid in started):
            return
        time.sleep(0.05)
    raise AssertionError(f"still there: {[pid for pid in started if Path(f'/proc/{pid}').exists()]}")


def descendants(pid: int) -> set[int]:
    parents = {}
    for entry in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # the process has just ended
            after_name = Path(f"/proc/{entry}/stat").read_text(encoding="utf-8").rpartition(")")[2]
            parents[int(entry)] = int(after_name.split()[1])
    found = {pid}
    while more := {child for child, parent in parents.items() if parent in found} - found:
        found |= more
    return found - {pid}


def test_code_that_is_too_long_is_refused(box: Sandbox) -> None:
    assert "longer than" in (run(box, "x = 1\n" * 50_000).error or "")


AS_USER = """
import asyncio, os, sys
os.setgroups([]); os.setgid(12345); os.setuid(12345)
sys.path.insert(0, sys.argv[1])
from agent_r1.tools.python.process import Limits
from agent_r1.tools.python.sandbox import Sandbox
async def play():
    box = Sandbox(limits=Limits(seconds=1), libraries=())
    outcome = await box.run("import os\\nprint(os.getuid(), os.path.exists('/etc'), os.listdir('/tmp'))")
    bomb = await box.run("import os\\nwhile True: os.fork()")
    loop = await box.run("while True: pass")
    await box.close()
    print(outcome.stdout.strip(), "BlockingIOError" in (bomb.error or ""), loop.killed_by)
asyncio.run(play())
"""


@pytest.mark.skipif(os.getuid() != 0, reason="the other tests already run as an ordinary user")
def test_an_ordinary_user_is_isolated_like_root(isolated: Sandbox, tmp_path: Path) -> None:
    python = shutil.which("python3", path="/usr/bin:/usr/local/bin")
    if python is None or subprocess.run([python, "-c", "import sys; assert sys.version_info >= (3, 11)"]).returncode:
        pytest.skip("no Python that every user may run")
    package = Path(__file__).parents[2] / "agent_r1"
    shutil.copytree(package / "tools" / "python", tmp_path / "agent_r1" / "tools" / "python")
    shutil.copy(package / "errors.py", tmp_path / "agent_r1")
    for folder in (tmp_path, *tmp_path.parents[:3]):
        folder.chmod(folder.stat().st_mode | 0o055)
    said = subprocess.run(
        [python, "-c", AS_USER, str(tmp_path)], capture_output=True, text=True, timeout=60, check=False
    )
    assert said.stdout == "12345 False [] True time\n", said.stderr[-2000:]
