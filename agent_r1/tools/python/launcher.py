"""Starts zygotes and has them fork processes. All of this blocks.

A zygote (`inside/zygote.py`) is a confined Python with the libraries loaded; forking it takes milliseconds.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

from agent_r1.errors import ConfigError
from agent_r1.tools.python.inside.confine import Orders
from agent_r1.tools.python.inside.zygote import FORK
from agent_r1.tools.python.process import Limits, SandboxError, SandboxProcess
from agent_r1.tools.python.view import PACKAGES, WARM_UP, find_interpreter, make_view, module_names

FOLDER = Path(__file__).parent
START_SECONDS = 60.0  # time to start Python and import the libraries, on a busy machine
END_SECONDS = 10.0

# Import our modules by their full names, but not the packages around them, which load far more than a zygote needs:
# empty modules stand in for those.
BOOT = """\
import sys, types
for name in ("agent_r1", "agent_r1.tools", "agent_r1.tools.python"):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [sys.argv[1]]
from agent_r1.tools.python.inside.zygote import main
main()
"""
ENVIRONMENT = {
    "PATH": "/usr/bin:/bin",
    "HOME": "/tmp",
    "TMPDIR": "/tmp",
    "LANG": "C.UTF-8",
    "PYTHONHASHSEED": "0",  # sets have the same order in every run
    # A process with threads cannot be forked, and one run must not take all cores.
    **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
}


class Launcher:
    """A zygote, started when first needed and again after it has died."""

    def __init__(self, limits: Limits, libraries: tuple[str, ...], *, isolated: bool) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(f"the Python sandbox needs Linux, and this is {sys.platform}")
        view = make_view(libraries)  # fails now if a library is missing
        limited = asdict(limits)
        self._limits = limits
        self._orders = Orders(
            isolated=isolated,
            **asdict(view),
            preload=module_names(libraries),
            warm_up=[WARM_UP[name] for name in libraries if name in WARM_UP],
            search=[PACKAGES] if isolated else [path for path in sys.path if path],
            **{name: limited[name] for name in Orders.__dataclass_fields__ if name in limited},
        )
        self._process: subprocess.Popen[bytes] | None = None  # the zygote
        self._lock = threading.Lock()
        self._closed = False

    def fork(self) -> SandboxProcess:
        """Return a process that waits for code."""
        with self._lock:
            if self._closed:
                raise SandboxError("the Python sandbox is closed")
            if self._process is None or self._process.poll() is not None:
                self._end()
                self._start()
            control = self._control
        try:
            channel, channel_inside = socket.socketpair()
            status, status_inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            output, output_inside = os.pipe()
        except OSError as error:
            raise SandboxError(
                f"too few file descriptors for another sandboxed process ({error}). Each running call and each session "
                "takes 4: raise the limit (ulimit -n)"
            ) from error
        process = SandboxProcess(channel=channel, status=status, output=output, limits=self._limits)
        try:
            fds = [channel_inside.fileno(), output_inside, status_inside.fileno()]
            socket.send_fds(control, [FORK], fds)
        except OSError as error:
            process.close()
            raise SandboxError(f"the Python sandbox has ended: {error}") from error
        finally:
            channel_inside.close()
            status_inside.close()
            os.close(output_inside)
        process.wait_until_ready()
        return process

    def close(self) -> None:
        """End the zygote and everything it has forked."""
        with self._lock:
            self._closed = True
            self._end()

    def _start(self) -> None:
        """Start a zygote and wait until it is confined and has loaded its libraries."""
        self._control, control_inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        orders = replace(self._orders, control=control_inside.fileno(), proc=proc)
        try:
            self._process = subprocess.Popen(
                _command(orders),
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=(orders.control, orders.proc),
                env=ENVIRONMENT,
                cwd="/",
                start_new_session=True,
            )
        finally:
            control_inside.close()  # otherwise the end of the zygote would go unnoticed
            os.close(proc)
        try:
            self._control.settimeout(START_SECONDS)
            if self._control.recv(64) != b"ready":
                raise OSError(self._read_errors())
        except OSError as error:
            self._end()
            raise SandboxError(f"the Python sandbox did not start: {error}") from error

    def _end(self) -> None:
        if self._process is None:
            return
        self._control.close()  # the zygote notices and exits
        try:
            self._process.wait(END_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._errors)
        self._process = None

    def _read_errors(self) -> str:
        assert self._process is not None
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)
        text = os.pread(self._errors, 4000, 0).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "it ended without a message"


def _command(orders: Orders) -> list[str]:
    # Not -I, which would also ignore PYTHONHASHSEED; no other variable of the environment concerns Python.
    return [find_interpreter(), "-P", "-s", "-S", "-c", BOOT, str(FOLDER), json.dumps(asdict(orders))]
