"""The host's side of one sandboxed process: send it code, enforce limits, see how it ends.

Blocking, one thread per call. A process can forge what it reports, so only its error message is taken from the
report; whether it has ended, when and why, is observed from here.
"""

from __future__ import annotations

import codecs
import json
import os
import select
import signal
import socket
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, fields
from enum import StrEnum

from agent_r1.errors import AgentR1Error, ConfigError
from agent_r1.tools.python.inside.interpreter import HEADER
from agent_r1.tools.python.inside.zygote import ENDED

MAX_LIMIT = 1 << 20  # upper bound of every limit (12 days, a terabyte): 25 days in milliseconds overflow in the kernel
FORK_SECONDS = 20.0  # time to fork and confine a process
END_SECONDS = 10.0  # time from killing a process until the zygote has seen it end
MAX_REPORT_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one call, unless a comment says otherwise."""

    seconds: float = 5.0  # wall time
    cpu_seconds: int = 60  # per process, over all calls of a session
    memory_mb: int = 512  # per process, beyond the loaded libraries
    processes: int = 8  # processes and threads together
    file_mb: int = 16  # per file
    scratch_mb: int = 64  # size of /tmp, which is held in memory
    open_files: int = 64
    output_chars: int = 8000
    code_chars: int = 100_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = int if field.type == "int" else int | float
            if isinstance(value, bool) or not isinstance(value, kind) or not 0 < value <= MAX_LIMIT:
                wanted = "an integer" if kind is int else "a number"
                raise ConfigError(f"Limits.{field.name} must be {wanted} above 0, at most {MAX_LIMIT}, got {value!r}")


class KilledBy(StrEnum):
    """Why a run did not end by itself."""

    TIME = "time"
    CPU = "cpu"
    OUTPUT = "output"
    SIGNAL = "signal"  # it crashed, or the kernel ran out of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """The result of running a piece of code."""

    stdout: str  # stdout and stderr, interleaved as written
    error: str | None = None  # the end of a traceback, or the limit that was exceeded
    seconds: float = 0.0
    killed_by: KilledBy | None = None


class SandboxError(AgentR1Error, RuntimeError):
    """The sandbox itself failed, not the code in it. The episode fails; the next call gets a new process."""


class SandboxProcess:
    """One forked process, for a single call or for a session of them."""

    def __init__(self, *, channel: socket.socket, status: socket.socket, output: int, limits: Limits) -> None:
        self._channel = channel  # to the process: carries code in and reports out
        self._status = status  # to the zygote: sends a handle on the process, and later how it ended
        self._output = output  # what the process prints
        self._limits = limits
        self._handle = -1  # a pidfd: unlike a pid, it never refers to another process
        self._lock = threading.Lock()
        self.usable = True
        os.set_blocking(output, False)
        channel.setblocking(False)

    def wait_until_ready(self) -> None:
        """Wait until the process is confined."""
        try:
            self._status.settimeout(FORK_SECONDS)
            message, fds, _, _ = socket.recv_fds(self._status, 4096, 1)
            if message != b"started":
                raise OSError(message.decode(errors="replace"))
            if not fds:
                raise OSError("too few file descriptors: raise the limit (ulimit -n)")
            self._handle = fds[0]
            os.set_inheritable(self._handle, False)
            report, deadline = _Report(), time.monotonic() + FORK_SECONDS
            while not report.done:
                readable = _is_readable(self._channel.fileno(), deadline - time.monotonic())
                if not readable or not report.read(self._channel):
                    raise TimeoutError("it ended or hung before it was confined")
            if "ready" not in report.message:
                raise OSError(report.message)
        except OSError as error:
            self.close()
            raise SandboxError(f"the Python sandbox could not start a process: {error}") from error

    def call(self, code: str) -> Outcome:
        """Run `code`. A process that was killed, or has ended itself, is no longer `usable`."""
        began = time.monotonic()
        exchange = _Exchange(self._output, self._limits.output_chars)
        self._send(code)
        killed_by, ended = self._watch(exchange, began + self._limits.seconds)
        seconds = time.monotonic() - began
        if killed_by is None and exchange.report.done:
            exchange.drain()
            if not exchange.too_long:
                if exchange.report.has_more:
                    self._end()
                return Outcome(stdout=exchange.text, error=exchange.report.error, seconds=seconds)
            killed_by = KilledBy.OUTPUT
        status, cpu_seconds = ended or self._end()
        self.usable = False
        exchange.drain()
        killed_by, error = self._explain_end(killed_by, status, cpu_seconds)
        return Outcome(stdout=exchange.text, error=error, seconds=seconds, killed_by=killed_by)

    def kill(self) -> None:
        """Kill the process and, with it, its process namespace. Safe to call from any thread."""
        with self._lock, suppress(OSError):  # it has ended already
            if self._handle >= 0:
                signal.pidfd_send_signal(self._handle, signal.SIGKILL)

    def close(self) -> None:
        """Kill the process, wait for its end, and close its descriptors."""
        if self.usable and self._handle >= 0:
            with suppress(SandboxError):
                self._end()
        self.usable = False
        self._channel.close()
        self._status.close()
        with self._lock:  # the number of a closed descriptor may soon refer to another process
            for fd in (self._output, self._handle):
                if fd >= 0:
                    os.close(fd)
            self._output = self._handle = -1

    def _send(self, code: str) -> None:
        data = code.encode("utf-8", errors="replace")
        self._channel.settimeout(self._limits.seconds)
        with suppress(OSError):  # it does not read, or has closed its end: `_watch` notices both
            self._channel.sendall(HEADER.pack(len(data)) + data)
        self._channel.setblocking(False)

    def _watch(self, exchange: _Exchange, deadline: float) -> tuple[KilledBy | None, tuple[int, float] | None]:
        """Wait for a report, an end or a limit. Returns the limit that was exceeded, and the status if it has ended."""
        poll, channel, status = select.poll(), self._channel.fileno(), self._status.fileno()
        poll.register(channel, select.POLLIN)
        poll.register(self._output, select.POLLIN)
        poll.register(status, select.POLLIN)
        while True:
            left = deadline - time.monotonic()
            ready = dict(poll.poll(max(0.0, left) * 1000))
            if self._output in ready and not exchange.read_output():
                poll.unregister(self._output)
            if exchange.too_long:
                return KilledBy.OUTPUT, None
            if channel in ready and not exchange.report.read(self._channel):
                poll.unregister(channel)
            if exchange.report.done:
                return None, None
            if status in ready:
                return None, self._wait()
            if left <= 0:
                return KilledBy.TIME, None

    def _end(self) -> tuple[int, float]:
        self.usable = False
        self.kill()
        return self._wait()

    def _wait(self) -> tuple[int, float]:
        """Return the wait status and CPU seconds of a process that has ended or is about to."""
        try:
            self._status.settimeout(END_SECONDS)
            message = self._status.recv(64)
        except OSError as error:
            raise SandboxError(f"the Python sandbox did not end a process: {error!r}") from error
        if len(message) != ENDED.size:
            raise SandboxError("the Python sandbox ended while code was running in it")
        status, cpu_seconds = ENDED.unpack(message)
        return status, cpu_seconds

    def _explain_end(self, killed_by: KilledBy | None, status: int, cpu_seconds: float) -> tuple[KilledBy | None, str]:
        if killed_by is KilledBy.TIME:
            return killed_by, f"stopped: it ran for more than {self._limits.seconds:g} s"
        if killed_by is KilledBy.OUTPUT:
            return killed_by, f"stopped: it printed more than {self._limits.output_chars} characters"
        code = os.waitstatus_to_exitcode(status)
        if code >= 0:
            return None, f"the process ended itself with exit status {code}"
        # The limit counts clock ticks, but usage is measured in time: on a shared machine they differ widely.
        if -code == signal.SIGKILL and cpu_seconds > 0.5 * self._limits.cpu_seconds:
            return KilledBy.CPU, f"stopped: it used {cpu_seconds:.0f} s of CPU time"
        return KilledBy.SIGNAL, f"the process was ended by signal {-code} ({signal.strsignal(-code)})"


def _is_readable(fd: int, seconds: float) -> bool:
    waiting = select.poll()  # unlike select, it works for descriptors above 1024
    waiting.register(fd, select.POLLIN)
    return bool(waiting.poll(max(0.0, seconds) * 1000))


class _Exchange:
    """What a process prints and reports during one call."""

    def __init__(self, output: int, output_chars: int) -> None:
        self._output = output
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._room = output_chars
        self.text = ""
        self.too_long = False
        self.report = _Report()

    def read_output(self) -> bool:
        """Read some output, little more than is allowed; False at its end."""
        try:
            data = os.read(self._output, min(65536, 4 * self._room + 4))
        except BlockingIOError:
            return True
        text = self._decoder.decode(data, final=not data)
        self.text += text[: self._room]
        self.too_long = self.too_long or len(text) > self._room
        self._room -= min(self._room, len(text))
        return bool(data)

    def drain(self) -> None:
        """Read what was printed before the process reported or ended."""
        while self.read_output() and not self.too_long and _is_readable(self._output, 0):
            pass


class _Report:
    """A message from the process, which may contain anything: it is bounded, and only its error is used."""

    def __init__(self) -> None:
        self._data = b""
        self.done = False
        self.has_more = False  # the code wrote messages itself, so later ones could not be trusted
        self.message: dict[str, object] = {}

    @property
    def error(self) -> str | None:
        error = self.message.get("error")
        return error if isinstance(error, str) else None

    def read(self, channel: socket.socket) -> bool:
        """Read what has arrived; False if there will be no more."""
        try:
            data = channel.recv(MAX_REPORT_BYTES)
        except BlockingIOError:
            return True
        except OSError:
            return False
        self._data += data
        if len(self._data) > MAX_REPORT_BYTES:
            return False
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
