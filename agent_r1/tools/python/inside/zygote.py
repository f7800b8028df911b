"""The zygote: a Python with its libraries loaded, confined, that forks a process for each run in a few milliseconds.

It never runs foreign code itself. Requests come over one socket, each with three descriptors: `talk` (for the run: code
in, error message out), `output` (what the run prints) and `answer` (for the host: a handle on the process, and at the
end how it ended). A run gets to hold the first two only.
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

from agent_r1.tools.python.inside import confine, kernel, runner

RUN, SESSION = b"run", b"session"
ENDED = struct.Struct("!id")  # wait status, CPU seconds
TALK, PROC = 3, 4  # descriptors of a run; the second one is closed before foreign code runs
MAX_SWEEPS = 200


def main() -> None:
    orders = confine.Orders(**json.loads(sys.argv[2]))
    if orders.isolated:
        confine.enter(orders)
    else:
        kernel.adopt_orphans()
    sys.argv = [runner.FILE]
    sys.orig_argv.clear()  # nobody's business inside: paths of the host
    confine.load_all(orders)
    if (count := confine.threads(orders.proc)) != 1:
        raise RuntimeError(
            f"importing {orders.preload} started {count - 1} threads, and a process with threads cannot fork"
        )
    kernel.compiled_filter()  # once, for all runs
    gc.collect()
    gc.freeze()  # what is loaded now stays shared by all runs
    Zygote(orders).serve()


class Zygote:
    def __init__(self, orders: confine.Orders) -> None:
        self._orders = orders
        self._control = socket.socket(fileno=orders.control)
        self._running: dict[int, socket.socket] = {}  # answer by process
        self._base_bytes = confine.own_bytes(orders.proc)
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
                kind, fds, _, _ = socket.recv_fds(self._control, 64, 3)
                if not kind:  # the host is gone, or done with us
                    self._end_all()
                    os._exit(0)
                self._launch(kind, *fds)

    def _launch(self, kind: bytes, talk: int, output: int, answer_fd: int) -> None:
        answer = socket.socket(fileno=answer_fd)
        try:
            pid = self._fork()
        except OSError as error:
            self._tell(answer, b"failed " + str(error).encode())
        else:
            if pid == 0:
                self._become_run(kind, talk, output)
            self._running[pid] = answer
            handle = os.pidfd_open(pid)
            with suppress(OSError):
                socket.send_fds(answer, [b"started"], [handle])
            os.close(handle)
        os.close(talk)
        os.close(output)

    def _fork(self) -> int:
        if not self._orders.isolated:
            return os.fork()
        kernel.unshare(kernel.NEW_PID)  # for the next child, which becomes the first process of it
        try:
            pid = os.fork()
        except OSError:
            kernel.set_pid_namespace(self._own_pids)
            raise
        if pid:
            kernel.set_pid_namespace(self._own_pids)
        return pid

    def _become_run(self, kind: bytes, talk: int, output: int) -> None:
        """Only in the forked process, and never returns."""
        status = 70
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            orders = self._take_descriptors(talk, output)
            channel = socket.socket(fileno=TALK)
            try:
                confine.confine_run(orders, base_bytes=self._base_bytes, session=kind == SESSION)
            except Exception as error:  # noqa: BLE001 (nothing may run that is not confined)
                runner.send(channel, {"broken": f"{type(error).__name__}: {error}"})
            else:
                runner.serve(channel)
                status = 0
        except BaseException:  # noqa: BLE001 (this is the end of the process)
            traceback.print_exc()
        finally:
            os._exit(status)

    def _take_descriptors(self, talk: int, output: int) -> confine.Orders:
        """Keep nothing open but what a run needs; it must not find the sockets of the zygote or of other runs."""
        null = os.open("/dev/null", os.O_RDONLY)
        wanted = (null, output, output, talk, self._orders.proc)  # as 0, 1, 2, TALK, PROC
        for place, fd in enumerate([fcntl.fcntl(fd, fcntl.F_DUPFD, 16) for fd in wanted]):
            os.dup2(fd, place)
        os.closerange(PROC + 1, resource.getrlimit(resource.RLIMIT_NOFILE)[0])
        return replace(self._orders, proc=PROC)

    def _reap(self) -> None:
        while True:
            try:
                pid, status, usage = os.wait4(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            answer = self._running.pop(pid, None)
            if answer is None:
                continue  # an orphan that we adopted
            if not self._orders.isolated:
                self._sweep(pid)
            self._tell(answer, ENDED.pack(status, usage.ru_utime + usage.ru_stime))

    def _tell(self, answer: socket.socket, message: bytes) -> None:
        with suppress(OSError):  # nobody waits for it any more
            answer.send(message)
        answer.close()

    def _end_all(self) -> None:
        """Without a process namespace nothing ends by itself."""
        for pid in [] if self._orders.isolated else list(self._running):
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
            self._sweep(pid)

    def _sweep(self, pid: int) -> None:
        """End the run's process group, and whatever has lost its parent and so become our child."""
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(pid, signal.SIGKILL)
        for _ in range(MAX_SWEEPS):
            orphans = confine.children(self._orders.proc) - set(self._running) - {pid}
            if not orphans:
                return
            for orphan in orphans:
                with suppress(ProcessLookupError):
                    os.kill(orphan, signal.SIGKILL)
                with suppress(ChildProcessError):
                    os.waitpid(orphan, 0)
