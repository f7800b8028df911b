"""The host's side of a zygote: start one, have it fork, and see one run through to its end.

Blocking, one thread per run: a run is a conversation over descriptors that belong to it alone, so nothing is shared and
nothing has to be told apart. What a run says about itself is its error message; that it is over, after how long and by
what, is seen from here.
"""

from __future__ import annotations

import codecs
import json
import os
import select
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress

from agent_r1.tools.python import cgroup
from agent_r1.tools.python.inside.runner import HEADER
from agent_r1.tools.python.inside.zygote import ENDED, RUN, SESSION
from agent_r1.tools.python.limits import KilledBy, Limits, Outcome, SandboxError

START_SECONDS = 60.0  # to start Python and import the libraries, on a busy machine
FORK_SECONDS = 20.0  # to fork and confine a process
END_SECONDS = 10.0  # from killing a process until the zygote has seen it dead
MAX_REPORT_BYTES = 64 * 1024


class Cancelled(Exception):
    """Whoever asked does not want to know any more."""


class Wish:
    """That a call be given up, told from another thread. Has a descriptor, to be waited for, only while a call runs."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._given_up = False
        self.fd = -1

    def give_up(self) -> None:
        with self._lock:
            self._given_up = True
            if self.fd >= 0:
                os.eventfd_write(self.fd, 1)

    def __enter__(self) -> Wish:
        with self._lock:
            if self._given_up:
                raise Cancelled
            self.fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return self

    def __exit__(self, *_: object) -> None:
        with self._lock:
            os.close(self.fd)
            self.fd = -1


class Zygote:
    """One zygote process."""

    def __init__(self, command: Sequence[str], control: socket.socket, given: Sequence[int], limits: Limits) -> None:
        """`command` is started with the descriptors `given`; `control` is our end of the socket among them.

        The other end must then be closed here: only so is it noticed that the process has ended.
        """
        self._limits = limits
        self._control = control
        self._errors = os.memfd_create("errors", os.MFD_CLOEXEC)
        environment = {
            "PATH": "/usr/bin:/bin",
            "HOME": "/tmp",
            "TMPDIR": "/tmp",
            "LANG": "C.UTF-8",
            "PYTHONHASHSEED": "0",  # sets come in the same order in every run
            # A process with threads cannot be forked, and one run has no claim on all cores.
            **dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1"),
        }
        try:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=self._errors,
                stderr=self._errors,
                pass_fds=given,
                env=environment,
                cwd="/",
                start_new_session=True,
            )
        except OSError as error:
            self.close()
            raise SandboxError(f"the Python sandbox did not start: {error or type(error).__name__}") from error

    def wait_until_ready(self) -> None:
        """Until it is confined and has its libraries; SandboxError, with what it said, when it ends before that."""
        try:
            self._control.settimeout(START_SECONDS)
            ready = self._control.recv(64)
        except OSError as error:
            self.close()
            raise SandboxError(f"the Python sandbox did not start: {error or type(error).__name__}") from error
        if ready != b"ready":
            said = self._said()
            self.close()
            raise SandboxError(f"the Python sandbox did not start: {said}")

    @property
    def alive(self) -> bool:
        return self._control.fileno() >= 0 and self._process.poll() is None

    def fork(self, *, session: bool) -> Run:
        """A process that waits for code."""
        try:
            talk, talk_inside = socket.socketpair()
            answer, answer_inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
            output, output_inside = os.pipe()
        except OSError as error:
            raise SandboxError(
                f"no descriptors are left for another process of the Python sandbox ({error}). Each running call and "
                "each session takes 4: raise the limit (ulimit -n)"
            ) from error
        cpu = self._limits.session_cpu_seconds if session else self._limits.cpu_seconds
        run = Run(talk=talk, answer=answer, output=output, limits=self._limits, cpu_seconds=cpu)
        try:
            fds = [talk_inside.fileno(), output_inside, answer_inside.fileno()]
            socket.send_fds(self._control, [SESSION if session else RUN], fds)
        except OSError as error:
            run.close()
            raise SandboxError(f"the Python sandbox has ended: {error}. {self._said()}") from error
        finally:
            talk_inside.close()
            answer_inside.close()
            os.close(output_inside)
        run.wait_until_ready()
        return run

    def close(self) -> None:
        """End it and everything it forked; may be called twice."""
        self._control.close()  # which it notices, and all of its runs end with it
        process = getattr(self, "_process", None)
        if process is not None:
            try:
                process.wait(END_SECONDS)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        fd, self._errors = self._errors, -1
        if fd >= 0:
            os.close(fd)

    def _said(self) -> str:
        if self._errors < 0:
            return ""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)  # what it has to say comes before its end
        text = os.pread(self._errors, 4000, 0).decode(errors="replace").strip()
        return text.splitlines()[-1] if text else "it said nothing"


class Run:
    """One forked process: a single call, or a session of them."""

    def __init__(
        self, *, talk: socket.socket, answer: socket.socket, output: int, limits: Limits, cpu_seconds: int
    ) -> None:
        self._talk, self._answer, self._output = talk, answer, output
        self._limits, self._cpu_seconds = limits, cpu_seconds
        self._handle = -1  # a pidfd: unlike a number, it can never mean another process
        self._group: cgroup.Group | None = None
        self._over = False
        self._lock = threading.Lock()
        os.set_blocking(output, False)
        talk.setblocking(False)

    def wait_until_ready(self) -> None:
        """Until it is confined. Not a moment of this is the code's."""
        try:
            self._answer.settimeout(FORK_SECONDS)
            said, fds, _, _ = socket.recv_fds(self._answer, 4096, 1)
            if said != b"started":
                raise SandboxError(f"the Python sandbox could not fork: {said.decode(errors='replace') or 'it ended'}")
            self._handle = fds[0]
            os.set_inheritable(self._handle, False)
            report = _Report()
            deadline = time.monotonic() + FORK_SECONDS
            while not report.done:
                if not _readable(self._talk.fileno(), deadline - time.monotonic()):
                    raise SandboxError(f"a process of the Python sandbox was not ready within {FORK_SECONDS:g} s")
                if not report.read(self._talk):
                    raise SandboxError("a process of the Python sandbox ended before it ran anything")
            if "ready" not in report.message:
                raise SandboxError(f"a process of the Python sandbox could not be confined: {report.message}")
            if (parent := cgroup.parent_for_runs()) is not None:
                self._group = cgroup.Group(parent, self._limits)
                self._group.add(cgroup.pid_of(self._handle))  # it waits for code, and has forked nothing yet
        except OSError as error:
            self.close()
            raise SandboxError(f"the Python sandbox did not answer: {error or type(error).__name__}") from error
        except SandboxError:
            self.close()
            raise

    def call(self, code: str, wish: Wish) -> Outcome:
        """Run `code`. A run that was killed, or has ended itself, takes no further calls."""
        began = time.monotonic()
        call = _Call(self, code, wish)
        killed_by, status = call.watch(began + self._limits.seconds)
        seconds = time.monotonic() - began
        if killed_by is None and call.report.done:
            call.drain()
            if not call.too_long:
                self._over = call.report.has_more and self._end()
                return Outcome(stdout=call.text, error=call.report.error, seconds=seconds)
            killed_by = KilledBy.OUTPUT
        if status is None:
            self.kill()
            status = self.wait()
        self._over = True
        call.drain()
        killed_by, error = self._ended(killed_by, *status)
        return Outcome(stdout=call.text, error=error, seconds=seconds, killed_by=killed_by)

    def _ended(self, killed_by: KilledBy | None, status: int, cpu_seconds: float) -> tuple[KilledBy | None, str]:
        limits = self._limits
        if killed_by is KilledBy.TIME:
            return killed_by, f"stopped: it ran for more than {limits.seconds:g} s"
        if killed_by is KilledBy.OUTPUT:
            return killed_by, f"stopped: it printed more than {limits.output_chars} characters"
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return None, f"the process ended itself with exit status {code}"
        # The limit counts ticks, and what is accounted is time: on a machine that is shared they differ widely.
        if -code == signal.SIGKILL and cpu_seconds > 0.5 * self._cpu_seconds:
            return KilledBy.CPU, f"stopped: it used {cpu_seconds:.0f} s of CPU time"
        return KilledBy.SIGNAL, f"the process was ended by signal {-code} ({signal.strsignal(-code)})"

    def _end(self) -> bool:
        self.kill()
        self.wait()
        return True

    @property
    def usable(self) -> bool:
        return not self._over

    def kill(self) -> None:
        """From any thread. With its first process, a process namespace ends."""
        with self._lock, suppress(OSError):  # it has ended already
            if self._handle >= 0:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def wait(self) -> tuple[int, float]:
        """The wait status and CPU seconds of a process that has ended or is about to."""
        try:
            self._answer.settimeout(END_SECONDS)
            message = self._answer.recv(64)
        except OSError as error:
            raise SandboxError(f"the Python sandbox did not end a process: {error or type(error).__name__}") from error
        if len(message) != ENDED.size:
            raise SandboxError("the Python sandbox ended while code was running in it")
        status, cpu_seconds = ENDED.unpack(message)
        return status, cpu_seconds

    def close(self) -> None:
        """End it, see it dead, and let go of its descriptors."""
        if not self._over:
            self._over = True
            self.kill()
            if self._handle >= 0:
                with suppress(SandboxError):
                    self.wait()
        self._talk.close()
        self._answer.close()
        if self._group is not None:
            self._group.remove()
        with self._lock:  # a number that was let go of may soon mean another process
            for fd in (self._output, self._handle):
                if fd >= 0:
                    os.close(fd)
            self._output = self._handle = -1


def _readable(fd: int, seconds: float) -> bool:
    waiting = select.poll()  # unlike select, it does not stop at descriptor 1024
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))


class _Call:
    """What passes between host and run during one call."""

    def __init__(self, run: Run, code: str, wish: Wish) -> None:
        self._run = run
        self._wish = wish
        data = code.encode("utf-8", errors="replace")
        self._outgoing = HEADER.pack(len(data)) + data
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._pieces: list[str] = []
        self._room = run._limits.output_chars
        self.too_long = False
        self.report = _Report()

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def watch(self, deadline: float) -> tuple[KilledBy | None, tuple[int, float] | None]:
        """Until a report, an end or a limit: by what it is to be killed, and its wait status if it has ended."""
        run, poll = self._run, select.poll()
        talk, answer = run._talk.fileno(), run._answer.fileno()
        poll.register(talk, select.POLLIN | select.POLLOUT)
        for fd in (run._output, answer, self._wish.fd):
            poll.register(fd, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = dict(poll.poll(max(0.0, left) * 1000))
            if self._wish.fd in ready:
                raise Cancelled
            if run._output in ready and not self._read_output():
                poll.unregister(run._output)
            if self.too_long:
                return KilledBy.OUTPUT, None
            if talk in ready and not self._talk(ready[talk], poll):
                poll.unregister(talk)
            if self.report.done:
                return None, None
            if answer in ready:
                return None, run.wait()
            if left <= 0:
                return KilledBy.TIME, None

    def drain(self) -> None:
        """What was printed and not yet read."""
        while self._read_output() and not self.too_long and _readable(self._run._output, 0):
            pass

    def _talk(self, events: int, poll: select.poll) -> bool:
        """False when the run has closed its end."""
        talk = self._run._talk
        if events & select.POLLOUT and self._outgoing:
            with suppress(OSError):  # it has closed its end; the next read says so
                self._outgoing = self._outgoing[talk.send(self._outgoing) :]
            if not self._outgoing:
                poll.modify(talk, select.POLLIN)
        return self.report.read(talk) if events & ~select.POLLOUT else True

    def _read_output(self) -> bool:
        """False at its end. Never reads much more than is allowed."""
        try:
            data = os.read(self._run._output, min(65536, 4 * self._room + 4))
        except BlockingIOError:
            return True
        text = self._decoder.decode(data, final=not data)
        self._pieces.append(text[: self._room])
        self.too_long = self.too_long or len(text) > self._room
        self._room -= min(self._room, len(text))
        return bool(data)


class _Report:
    """A message of a run, which may be anything: it is read within bounds and believed in nothing but its own error."""

    def __init__(self) -> None:
        self._data = b""
        self.done = False
        self.has_more = False  # than one message: the code speaks for itself, so the next one could not be trusted
        self.message: dict[str, object] = {}

    @property
    def error(self) -> str | None:
        error = self.message.get("error")
        return error[:MAX_REPORT_BYTES] if isinstance(error, str) else None

    def read(self, talk: socket.socket) -> bool:
        """False when there will be no more."""
        try:
            data = talk.recv(MAX_REPORT_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._data += data
        if len(self._data) > MAX_REPORT_BYTES:
            return False  # not one of ours: it counts as none
        if len(self._data) >= HEADER.size:
            end = HEADER.size + HEADER.unpack_from(self._data)[0]
            if len(self._data) >= end:
                self._parse(self._data[HEADER.size : end])
                self.has_more = len(self._data) > end
        return bool(data)

    def _parse(self, data: bytes) -> None:
        try:
            message = json.loads(data)
        except (ValueError, RecursionError):
            message = None
        self.message = message if isinstance(message, dict) else {"error": "the process sent an unreadable report"}
        self.done = True
