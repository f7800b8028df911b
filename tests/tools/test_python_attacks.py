"""Attacks on the sandbox, at every level that this machine supports. The tests attack every guarantee in the table."""

from __future__ import annotations

import os
import socket
import sys
import textwrap
from pathlib import Path

import pytest

from agent_r1.tools.python.process import KilledBy, Limits
from agent_r1.tools.python.sandbox import Sandbox
from tests.tools.python_boxes import SECRET, fresh_box, run, together, works
from tests.tools.python_boxes import box as box
from tests.tools.python_boxes import boxes as boxes
from tests.tools.python_boxes import isolated as isolated


def processes_with(mark: str) -> list[int]:
    """Return the processes of the host whose command line contains `mark`."""
    found = []
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                if mark.encode() in (entry / "cmdline").read_bytes():
                    found.append(int(entry.name))
            except OSError:
                continue
    return found


# -- time, memory, output --------------------------------------------------------------------------------------------


def test_code_that_runs_forever_is_killed(box: Sandbox) -> None:
    endless = (
        "while True: pass",
        "import time\nwhile True:\n    time.sleep(0.3)",
        "while True:\n    try:\n        while True: pass\n    except BaseException: pass",
    )
    for outcome in together(*(box.run(f"print('on the way')\n{code}") for code in endless)):
        assert outcome.killed_by is KilledBy.TIME
        assert "1.5 s" in (outcome.error or "")
    assert works(box)


def test_ignoring_signals_does_not_help(box: Sandbox) -> None:
    code = """
    import signal
    for number in set(signal.Signals) - {signal.SIGKILL, signal.SIGSTOP}:
        try:
            signal.signal(number, signal.SIG_IGN)
        except (OSError, ValueError):
            pass
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.Signals)
    while True: pass
    """
    assert run(box, code).killed_by is KilledBy.TIME
    assert works(box)


def test_cpu_time_is_limited_when_wall_time_is_not(isolated: Sandbox) -> None:
    with fresh_box(isolated.level, Limits(seconds=20, cpu_seconds=1)) as box:
        assert run(box, "while True: pass").killed_by is KilledBy.CPU


def test_too_much_memory_raises_memory_error(box: Sandbox) -> None:
    assert "MemoryError" in (run(box, "x = [0] * 10**9").error or "")
    assert "MemoryError" in (run(box, "x = []\nwhile True:\n    x.append('a' * 10**6 + str(len(x)))").error or "")
    assert works(box)


def test_the_memory_limit_cannot_be_bypassed(isolated: Sandbox) -> None:
    code = """
    import ctypes, os
    libc = ctypes.CDLL(None, use_errno=True)
    print(libc.shmget(0, 1 << 30, 0o1666), libc.memfd_create(b"x", 0), libc.unshare(0x10000000 | 0x20000))
    try:
        for number in range(100):
            with open(f"/tmp/{number}", "wb") as file:
                file.write(bytes(10_000_000))
    except OSError as error:
        print(error.strerror)
    """
    # No shared segments, no anonymous files, no user namespace to mount in; and /tmp holds 64 MB.
    assert run(isolated, code).stdout == "-1 -1 -1\nNo space left on device\n"
    assert "File too large" in (run(isolated, "open('/tmp/x', 'wb').write(bytes(30_000_000))").error or "")


def test_output_stops_at_the_limit_and_says_so(box: Sandbox) -> None:
    outcome = run(box, "while True:\n    print('x' * 999)")
    assert outcome.killed_by is KilledBy.OUTPUT
    assert len(outcome.stdout) == 1000
    assert "1000 characters" in (outcome.error or "")
    assert works(box)


def test_a_gigabyte_of_output_is_not_read(box: Sandbox) -> None:
    code = "import os\nblock = b'y' * 2**20\nfor _ in range(1000):\n    os.write(1, block)"
    assert run(box, code).killed_by is KilledBy.OUTPUT
    # A last line that is too long is killed as well, although it is printed just before the report.
    assert run(box, "'z' * 5000").killed_by is KilledBy.OUTPUT


def test_output_that_is_not_utf8_is_replaced(box: Sandbox) -> None:
    assert run(box, "import os\n_ = os.write(1, b'a\\xff\\xfeb')").stdout == "a\ufffd\ufffdb"


# -- ways to end ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "error"),
    [
        ("import os\nos._exit(3)", "exit status 3"),
        ("import ctypes\nctypes.string_at(0)", "signal 11"),
        ("import sys\nsys.exit('because')", "SystemExit: because"),
        ("raise KeyboardInterrupt", "KeyboardInterrupt"),
        ("import os\nos.close(3)\nprint('closed')", "ended itself"),
        ("class E(Exception):\n    def __str__(self): raise RuntimeError\nraise E", "E"),
        ("def f(): return f()\nf()", "RecursionError"),
    ],
)
def test_a_crash_is_reported_and_affects_no_other_run(box: Sandbox, code: str, error: str) -> None:
    outcome = run(box, code)
    assert error in (outcome.error or "")
    assert works(box)


def test_exiting_or_closing_the_output_is_not_an_error(box: Sandbox) -> None:
    assert run(box, "print('x')\nraise SystemExit").error is None
    assert run(box, "import os, sys\nsys.stdout.close()\nos.close(2)\n_ = 1").error is None
    assert run(box, "import sys\nsys.stdout = None\nx = 1").error is None


def test_a_forged_report_affects_only_its_own_run(isolated: Sandbox) -> None:
    code = """
    import os, struct, time
    data = {sent!r}.encode()
    for fd in range(3, 20):
        try:
            os.write(fd, struct.pack("!I", len(data)) + data)
        except OSError:
            pass
    time.sleep(60)
    """
    forgeries = ('{"error": null}', "[]", "not json", '{"error": 7}', "[" * 30000)
    forged = [isolated.run(textwrap.dedent(code).format(sent=sent)) for sent in forgeries]
    *lies, honest = together(*forged, isolated.run("print('honest')"))
    assert (honest.stdout, honest.error) == ("honest\n", None)
    assert [lie.stdout for lie in lies] == [""] * len(forgeries)
    assert works(isolated)


def test_an_endless_report_is_cut_off(isolated: Sandbox) -> None:
    code = "import os\nwhile True:\n    os.write(3, b'\\x7f' * 65536)"
    assert run(isolated, code).error is not None
    assert works(isolated)


# -- processes --------------------------------------------------------------------------------------------------------


def test_a_fork_bomb_is_limited(isolated: Sandbox) -> None:
    code = "import os\nwhile True:\n    try:\n        os.fork()\n    except OSError:\n        pass"
    assert run(isolated, code).killed_by is KilledBy.TIME
    counted = "import os\nfor n in range(1, 99):\n    if os.fork() == 0:\n        os._exit(0)\n    print(n, flush=True)"
    # 6 are allowed: the run itself and 5 children, which are not waited for.
    assert run(isolated, counted).stdout.split() == ["1", "2", "3", "4", "5"]
    assert works(isolated)


def test_thousands_of_threads_do_not_start(isolated: Sandbox) -> None:
    code = """
    import threading, time
    for number in range(5000):
        threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
    """
    assert "can't start new thread" in (run(isolated, code).error or "")
    assert works(isolated)


DAEMON = """
import os, sys, time
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        for fd in range(3):
            os.close(fd)
        os.execv("{python}", ["{python}", "-I", "-S", "-c", "import time; time.sleep(600)", "{mark}"])
    os._exit(0)
time.sleep(0.3)
print("left it behind")
"""


def test_a_daemon_does_not_outlive_its_run(box: Sandbox) -> None:
    mark = f"daemon-{box.level}-{os.getpid()}"
    python = os.path.realpath(getattr(sys, "_base_executable", sys.executable))
    began = together(box.run(DAEMON.format(python=python, mark=mark)))[0]
    assert began.stdout == "left it behind\n", began
    assert processes_with(mark) == []


def test_signals_reach_no_other_process(isolated: Sandbox) -> None:
    code = """
    import os, signal
    reached = []
    for target in (os.getppid(), -1, -os.getpgrp(), 2, 17, *range(1000, 1100)):
        for number in (signal.SIGTERM, signal.SIGKILL, signal.SIGSTOP):
            try:
                os.kill(target, number)
                reached.append(target)
            except OSError:
                pass
    os.kill(os.getpid(), signal.SIGSTOP)
    print("here", os.getpid())
    """
    first, second = together(isolated.run(textwrap.dedent(code)), isolated.run("import time\ntime.sleep(0.5)\n'alive'"))
    assert first.stdout in ("here 1\n", ""), "a run may signal itself"
    assert second.stdout == "'alive'\n"
    assert works(isolated)


# -- files, environment, privileges -----------------------------------------------------------------------------------


def test_files_of_the_host_are_not_visible(isolated: Sandbox, tmp_path: Path) -> None:
    (tmp_path / "secret").write_text(SECRET, encoding="utf-8")
    here = Path(__file__).resolve()
    paths = ["/etc/passwd", "/etc/shadow", str(Path.home() / ".bashrc"), "/proc/1/environ", "/proc/self/environ"]
    paths += [str(here), str(tmp_path / "secret"), "/sys/kernel", "/dev/mem", "/dev/kmsg", "/var", "/run", "/home"]
    paths += [f"/proc/{os.getpid()}/mem", f"/proc/{os.getppid()}/cmdline"]
    code = f"""
    import os
    for path in {paths!r}:
        try:
            os.stat(path)
            print("sees", path)
        except OSError:
            pass
    print(sorted(os.listdir("/tmp")), os.path.exists("/proc/self"))
    """
    assert run(isolated, code).stdout == "[] False\n"


def test_only_a_private_tmp_can_be_written(isolated: Sandbox) -> None:
    code = """
    import os, sys
    written = []
    for folder, folders, files in os.walk("/"):
        for path in [folder] + [os.path.join(folder, f) for f in files]:
            if path.startswith(("/tmp", "/dev/shm")) or os.path.islink(path):
                continue
            if os.access(path, os.W_OK) and not path.startswith("/dev/"):
                written.append(path)
        if os.path.isdir(folder) and folder.count("/") > 3:
            folders.clear()
    for path in ("/x", "/usr/lib/x", "/sandbox/x", "/sandbox/code/inside/interpreter.py", sys.executable, "/dev/x"):
        try:
            open(path, "ab").close()
            written.append(path)
        except OSError:
            pass
    print(written)
    open("/tmp/mine", "w").write("x")
    print(os.listdir("/tmp"))
    """
    assert run(isolated, code).stdout == "[]\n['mine']\n"
    assert run(isolated, "import os\nos.listdir('/tmp')").stdout == "[]\n", "deleted with its run"


def test_environment_variables_of_the_host_are_not_visible(isolated: Sandbox) -> None:
    code = "import os, gc\nprint(sorted(os.environ))\nprint([v for v in os.environ.values() if 'SECRET' in v])"
    outcome = run(isolated, code)
    assert SECRET not in outcome.stdout
    assert "SANDBOX_TEST_SECRET" not in outcome.stdout


def test_a_run_holds_only_its_own_descriptors(isolated: Sandbox) -> None:
    code = """
    import os
    kept = []
    for fd in range(4096):
        try:
            os.fstat(fd)
            kept.append(fd)
        except OSError:
            pass
    print(kept)
    """
    assert run(isolated, code).stdout == "[0, 1, 2, 3]\n"


def test_a_run_has_no_privileges(isolated: Sandbox) -> None:
    code = """
    import ctypes, os, struct
    libc = ctypes.CDLL(None, use_errno=True)
    print(os.getuid() != 0, os.geteuid() != 0)
    header, data = struct.pack("Ii", 0x20080522, 0), ctypes.create_string_buffer(24)
    libc.capget(header, data)
    print(any(data.raw))
    print(libc.mount(b"tmpfs", b"/tmp", b"tmpfs", 0, None), libc.ptrace(0, 0, 0, 0), libc.chroot(b"/tmp"))
    print(libc.unshare(0x10000000), libc.setns(0, 0))
    try:
        os.setuid(0)
        print("root")
    except OSError:
        print("no root")
    """
    assert run(isolated, code).stdout == "True True\nFalse\n-1 -1 -1\n-1 -1\nno root\n"


# -- network ----------------------------------------------------------------------------------------------------------


def test_no_network_and_no_socket_of_the_host(isolated: Sandbox, tmp_path: Path) -> None:
    name = f"sandbox-test-{os.getpid()}"
    with socket.socket() as tcp, socket.socket(socket.AF_UNIX) as unix, socket.socket(socket.AF_UNIX) as abstract:
        tcp.bind(("127.0.0.1", 0))
        unix.bind(str(tmp_path / "s"))
        abstract.bind(f"\0{name}")
        for server in (tcp, unix, abstract):
            server.listen()
        code = f"""
        import socket
        def tried(what, *arguments, family=socket.AF_INET, kind=socket.SOCK_STREAM):
            try:
                with socket.socket(family, kind) as s:
                    s.settimeout(0.5)
                    getattr(s, what)(*arguments)
                    return "REACHED"
            except OSError as error:
                return "no"
        print(
            tried("connect", ("127.0.0.1", {tcp.getsockname()[1]})),
            tried("connect", ("1.1.1.1", 53)),
            tried("sendto", b"x", ("1.1.1.1", 53), kind=socket.SOCK_DGRAM),
            tried("sendto", b"x", ("255.255.255.255", 9), kind=socket.SOCK_DGRAM),
            tried("connect", {str(tmp_path / "s")!r}, family=socket.AF_UNIX),
            tried("connect", "\\0{name}", family=socket.AF_UNIX),
            tried("connect", ("::1", 80), family=socket.AF_INET6),
            tried("connect", (2, 1024), family=40),  # vsock: the host of a virtual machine
            tried("bind", (0, 0), family=16, kind=socket.SOCK_RAW),  # netlink
        )
        try:
            print(socket.getaddrinfo("example.com", 80))
        except OSError:
            print("no names")
        a, b = socket.socketpair()
        """
        outcome = run(isolated, code)
    assert outcome.stdout.split("\n")[0] == " ".join(["no"] * 9), outcome
    assert outcome.stdout.endswith("no names\n")
    assert outcome.error is None, "a socketpair is allowed"


def test_runs_at_the_same_time_do_not_see_each_other(isolated: Sandbox) -> None:
    left = """
    import os, time
    open("/tmp/shared", "w").write("x")
    time.sleep(0.6)
    print(sorted(os.listdir("/tmp")))
    """
    right = """
    import os, time
    time.sleep(0.3)
    print(os.listdir("/tmp"), os.getpid())
    for pid in range(2, 300):
        try:
            os.kill(pid, 9)
            print("killed", pid)
        except OSError:
            pass
    """
    first, second = together(isolated.run(textwrap.dedent(left)), isolated.run(textwrap.dedent(right)))
    assert first.stdout == "['shared']\n"
    assert second.stdout == "[] 1\n"


def test_one_run_leaves_nothing_for_the_next(box: Sandbox) -> None:
    spoiled = "import builtins, math, sys\nbuiltins.print = None\nmath.pi = 3\nsys.path.clear()\nx = 1"
    assert run(box, spoiled).error is None
    assert run(box, "import math\nprint(math.pi > 3.1, 'x' in globals())").stdout == "True False\n"
