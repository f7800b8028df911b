"""One worker process, seen from its parent: start it, talk to it, end it. Knows no episode.

Nothing here waits, except for a process that has been killed.
"""

from __future__ import annotations

import asyncio
import atexit
import json
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import ExitStack, suppress
from itertools import count
from weakref import WeakSet

from agent_r1.envs.processes.protocol import Answer, Message, read_answer, take_frames, write_message
from agent_r1.places import anchored

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 18
MAX_READS = 16  # reads of output before other events get their turn: a process may print faster than we read
TAIL_CHARS = 4000  # how much of the output is shown when the process dies
TRACE_SECONDS = 0.5  # time for a hanging process to print where it hangs
END_SECONDS = 2.0  # time for a process to exit before it is killed
KILL_SECONDS = 10.0  # time for the kernel to end a killed process

BOOT = """\
import json, sys
path, *orders = json.loads(sys.argv.pop())
sys.path[:] = path
from agent_r1.envs.processes.worker import main
main(*orders)
"""


class WorkerProcess:
    """Reports answers, and when there can be no more, to the running event loop. Raises OSError if it cannot start."""

    def __init__(
        self,
        *,
        max_bytes: int | None,  # `worker.main` explains this and `prepare`
        prepare: Callable[[], object],
        on_answer: Callable[[Answer], None],
        on_lost: Callable[[], None],
    ) -> None:
        with ExitStack() as ours, ExitStack() as theirs:
            self._channel, channel = socket.socketpair()
            ours.callback(self._channel.close)
            theirs.callback(channel.close)
            watched, lifeline = os.pipe()  # closes when we end, however that happens, and takes the process along
            ours.callback(os.close, lifeline)
            theirs.callback(os.close, watched)
            self._output, output = os.pipe()
            ours.callback(os.close, self._output)
            theirs.callback(os.close, output)
            orders = json.dumps([sys.path, channel.fileno(), watched, max_bytes, pickle.dumps(prepare).hex()])
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-u", "-c", BOOT, orders],  # -P: json must not come from the working directory
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                pass_fds=(channel.fileno(), watched),
                env=_environment(),
                cwd=anchored("."),
                start_new_session=True,  # Ctrl-C is ours to handle, and all it starts can be killed with it
            )
            self._descriptors = ours.pop_all()
        _ALL.add(self)
        self.pid = self._process.pid
        self.tail = ""  # the end of its output
        self._on_answer, self._on_lost = on_answer, on_lost
        self._outgoing, self._incoming = bytearray(), bytearray()
        self._numbers = count()
        self._nonsense = ""
        self.is_ending = False
        self._ending_since = 0.0
        self._channel.setblocking(False)
        os.set_blocking(self._output, False)
        self._loop = asyncio.get_running_loop()
        self._loop.add_reader(self._channel, self.read)
        self._loop.add_reader(self._output, self._listen)

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    def send(self, message: Message) -> None:
        """Send a message. If the process has ended, the event loop reports that."""
        self._outgoing += write_message(message)
        self._flush()

    def _flush(self) -> None:
        try:
            while self._outgoing:
                del self._outgoing[: self._channel.send(self._outgoing)]
        except BlockingIOError:
            self._loop.add_writer(self._channel, self._flush)
            return
        except OSError:  # `read` finds out
            self._outgoing.clear()
        self._loop.remove_writer(self._channel)

    def read(self) -> None:
        """Report the answers that have come, and then whether the process is lost."""
        is_open = self._receive()
        try:
            for data in take_frames(self._incoming):
                answer, number = read_answer(data), next(self._numbers)
                if answer.number != number:
                    raise ValueError(f"answer {answer.number} instead of {number}")
                self._on_answer(answer)
        except ValueError as error:
            self._nonsense, is_open = f"sent something that is not an answer ({error}) and was killed", False
        if not is_open:
            self._on_lost()

    def _receive(self) -> bool:
        while True:
            try:
                data = self._channel.recv(READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._incoming += data

    def _listen(self) -> None:
        """Log the output. If it were not read, the process would block once the pipe is full."""
        with suppress(BlockingIOError):
            for _ in range(MAX_READS):
                data = os.read(self._output, READ_BYTES)
                if not data:
                    self._detach(self._output)
                    return
                text = data.decode("utf-8", errors="replace")
                if not text.isspace():  # the end of a line may come alone
                    logger.info("printed by env process %d: %s", self.pid, text.rstrip())
                self.tail = (self.tail + text)[-TAIL_CHARS:]

    def kill(self, *, ask_where: bool = False) -> str:
        """End the process and all it has started, once, and return how it ended. `ask_where`: let it print where it
        hangs."""
        if ask_where:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.kill(self.pid, signal.SIGABRT)  # answered by faulthandler, whatever the process is busy with
                self._process.wait(TRACE_SECONDS)
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(KILL_SECONDS)
        self._listen()
        self._detach(self._channel, self._output)
        self.close_descriptors()
        _ALL.discard(self)  # its process id may be another's from now on
        if self._nonsense or code is None:
            return self._nonsense or "cannot even be killed"
        return f"exited with status {code}" if code >= 0 else f"was ended by signal {-code} ({signal.strsignal(-code)})"

    def end(self) -> None:
        """Let the process finish its calls and exit; `has_ended` does the rest."""
        with suppress(OSError):  # it has ended already
            self._channel.shutdown(socket.SHUT_WR)
        self._detach(self._channel)
        self.is_ending, self._ending_since = True, time.monotonic()

    def has_ended(self) -> bool:
        """Whether the process has exited after `end`; kills it if that takes too long."""
        self._listen()
        if not self.is_dead and time.monotonic() - self._ending_since < END_SECONDS:
            return False
        self.kill()
        return True

    def _detach(self, *files: socket.socket | int) -> None:
        if not self._loop.is_closed():
            for file in files:
                self._loop.remove_reader(file)
                self._loop.remove_writer(file)

    def close_descriptors(self) -> None:
        """May be called twice."""
        self._descriptors.close()


_ALL: WeakSet[WorkerProcess] = WeakSet()


def _forget_all() -> None:
    """Runs in a fork of this program: the fork must not keep the processes alive when this program ends."""
    for process in _ALL:
        process.close_descriptors()
    _ALL.clear()


os.register_at_fork(after_in_child=_forget_all)


def end_all(processes: Iterable[WorkerProcess]) -> None:
    """End all processes at the same time, within the time limit of one."""
    ending = list(processes)
    for process in ending:
        process.end()
    while ending := [process for process in ending if not process.has_ended()]:
        time.sleep(0.005)


# For pools that nobody closes. Left to the interpreter, a channel may close first: then a process exits by itself, and
# what it has started lives on.
atexit.register(lambda: end_all(_ALL))


def _environment() -> dict[str, str]:
    """Return the environment of a process. Sets have the same order in all processes, so that an env can be replayed in
    another one, and a process does not use all cores. Variables that are already set take precedence."""
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PYTHONHASHSEED": "0", **threads, **os.environ}
