"""The zygote: a confined Python with its libraries loaded, which forks a process for each run in milliseconds.

It never runs untrusted code itself. Requests arrive on one socket, each with three descriptors: `channel` (for the run:
code in, error message out), `output` (what the run prints) and `status` (for the host: a handle on the process, and
later how it ended). A run holds only the first two.
"""

from __future__ import annotations

import fcntl
import gc
import json
import os
import resource
import select
import signal
import socket
import struct
import sys
import traceback
from contextlib import suppress
from dataclasses import replace

from agent_r1.tools.python.inside import confine, interpreter, kernel

FORK = b"fork"  # the only request
ENDED = struct.Struct("!id")  # wait status, CPU seconds
CHANNEL, PROC = 3, 4  # descriptors of a run; the second is closed before untrusted code runs
MAX_SWEEPS = 200


def main() -> None:
    orders = confine.Orders(**json.loads(sys.argv[2]))
    if orders.isolated:
        confine.enter(orders)
    else:
        kernel.adopt_orphans()
    sys.argv = [interpreter.FILE]
    sys.orig_argv.clear()  # contains paths of the host
    confine.load_libraries(orders)
    if (count := confine.count_threads(orders.proc)) != 1:
        raise RuntimeError(
            f"importing {orders.preload} started {count - 1} threads, and a process with threads cannot fork"
        )
    kernel.compile_filter()  # once for all runs
    gc.collect()
    gc.freeze()  # keep what is loaded in memory that all runs share
    Zygote(orders).serve()


class Zygote:
    def __init__(self, orders: confine.Orders) -> None:
        self._orders = orders
        self._control = socket.socket(fileno=orders.control)
        self._running: dict[int, socket.socket] = {}  # status socket by process
        self._base_bytes = confine.address_space(orders.proc)
        self._own_pids = os.open("self/ns/pid", os.O_RDONLY, dir_fd=orders.proc) if orders.isolated else -1
        self._wake, wake = os.pipe()
        for fd in (self._wake, wake):
            os.set_blocking(fd, False)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def serve(self) -> None:
        self._control.send(b"ready")
        waiting = select.poll()
        waiting.register(self._control, select.POLLIN)
        waiting.register(self._wake, select.POLLIN)
        while True:
            ready = {fd for fd, _ in waiting.poll()}
            if self._wake in ready:
                os.read(self._wake, 4096)
                self._reap()
            if self._control.fileno() in ready:
                request, fds, _, _ = socket.recv_fds(self._control, 64, 3)
                if not request:  # the host has closed the socket or died
                    self._end_all()
                    os._exit(0)
                self._launch(*fds)

    def _launch(self, channel: int, output: int, status_fd: int) -> None:
        status = socket.socket(fileno=status_fd)
        try:
            pid = self._fork()
        except OSError as error:
            _send_last(status, str(error).encode())
        else:
            if pid == 0:
                self._become_run(channel, output)
            self._running[pid] = status
            handle = os.pidfd_open(pid)
            with suppress(OSError):
                socket.send_fds(status, [b"started"], [handle])
            os.close(handle)
        os.close(channel)
        os.close(output)

    def _fork(self) -> int:
        if not self._orders.isolated:
            return os.fork()
        kernel.unshare(kernel.NEW_PID)  # the next child becomes the first process of a new namespace
        pid = -1
        try:
            pid = os.fork()
        finally:
            if pid != 0:
                kernel.set_pid_namespace(self._own_pids)
        return pid

    def _become_run(self, channel_fd: int, output: int) -> None:
        """Run code in the forked process. Never returns."""
        status = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders = self._take_descriptors(channel_fd, output)
            channel = socket.socket(fileno=CHANNEL)
            try:
                confine.confine_run(orders, self._base_bytes)
            except Exception as error:  # noqa: BLE001 (nothing may run unconfined)
                interpreter.send(channel, {"broken": f"{type(error).__name__}: {error}"})
            else:
                interpreter.serve(channel)
                status = 0
        except BaseException:  # noqa: BLE001 (the process ends here)
            traceback.print_exc()
        finally:
            os._exit(status)

    def _take_descriptors(self, channel: int, output: int) -> confine.Orders:
        """Close everything a run does not need: it must not reach the sockets of the zygote or of other runs."""
        null = os.open("/dev/null", os.O_RDONLY)
        wanted = (null, output, output, channel, self._orders.proc)  # as 0, 1, 2, CHANNEL, PROC
        for place, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in wanted]):
            os.dup2(fd, place)
        os.closerange(PROC + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return replace(self._orders, proc=PROC)

    def _reap(self) -> None:
        while True:
            try:
                pid, wait_status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            status = self._running.pop(pid, None)
            if status is None:
                continue  # an orphan that we adopted
            if not self._orders.isolated:
                self._sweep(pid)
            _send_last(status, ENDED.pack(wait_status, usage.ru_utime + usage.ru_stime))

    def _end_all(self) -> None:
        """End all runs. With namespaces, the kernel does this when the zygote exits."""
        for pid in [] if self._orders.isolated else list(self._running):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._sweep(pid)

    def _sweep(self, pid: int) -> None:
        """Kill the process group of a run, and orphans, which have become our children."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for _ in range(MAX_SWEEPS):
            orphans = confine.find_children(self._orders.proc) - set(self._running) - {pid}
            if not orphans:
                return
            for orphan in orphans:
                with suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(orphan, 0)


def _send_last(status: socket.socket, message: bytes) -> None:
    with suppress(OSError):  # the host no longer listens
        status.send(message)
    status.close()
