"""One worker process as its parent sees it: started, spoken to, listened to, ended. Knows no event loop and no episode.

Nothing here waits, except for a process that has been killed. Whoever holds one calls `receive` when `channel` is
readable and `flush` when it is writable and something is left to send.
"""

from __future__ import annotations

import json
import logging
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from weakref import WeakSet

from agent_r1.envs.processes.channel import Answer, read_answer, take_frames
from agent_r1.places import anchored

logger = logging.getLogger(__name__)

READ_BYTES = 1 << 18
MAX_READS = 16
TAIL_CHARS = 4000  # of what a process printed, to be shown when it dies
TRACE_SECONDS = 0.5  # for a process that hangs to say where
END_SECONDS = 2.0  # for one that is told to end to do so before it is killed
KILL_SECONDS = 10.0  # from killing a process until it is given up: the kernel may be busy for it

BOOT = """\
import json, sys
path, channel, lifeline = json.loads(sys.argv.pop())
sys.path[:] = path
from agent_r1.envs.processes.inside import main
main(channel, lifeline)
"""


class WorkerProcess:
    """OSError if it cannot be started."""

    def __init__(self) -> None:
        with ExitStack() as ours, ExitStack() as theirs:
            self.channel, channel = socket.socketpair()
            ours.callback(self.channel.close)
            theirs.callback(channel.close)
            watched, self._lifeline = os.pipe()  # closes with us, however we end, and takes the process along
            ours.callback(os.close, self._lifeline)
            theirs.callback(os.close, watched)
            self.output, output = os.pipe()
            ours.callback(os.close, self.output)
            theirs.callback(os.close, output)
            orders = json.dumps([sys.path, channel.fileno(), watched])
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
        self.is_open = True
        self.channel.setblocking(False)
        os.set_blocking(self.output, False)
        self._outgoing, self._incoming = bytearray(), bytearray()
        self.tail = ""
        self._nonsense = ""
        self._ending_since: float | None = None

    def send(self, frames: bytes) -> None:
        """What does not go out at once is left to `flush`. OSError: nobody is there."""
        if self.is_dead:  # a process that it has started may keep the channel open
            raise BrokenPipeError(f"process {self.pid} has ended")
        self._outgoing += frames
        self.flush()

    @property
    def is_dead(self) -> bool:
        return self._process.poll() is not None

    @property
    def has_more_to_send(self) -> bool:
        return bool(self._outgoing)

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self._outgoing:
                del self._outgoing[: self.channel.send(self._outgoing)]

    def receive(self) -> Iterator[Answer]:
        """The answers that have come. `is_open` says afterwards whether there can be more."""
        self.is_open = self._read()
        try:
            for data in take_frames(self._incoming):
                yield read_answer(data)
        except ValueError as error:
            self.distrust(str(error))

    def distrust(self, problem: str) -> None:
        """It talks nonsense: nothing that it still says is heard."""
        self._nonsense, self.is_open = f"sent what is no answer ({problem}) and was killed", False

    def _read(self) -> bool:
        while True:
            try:
                data = self.channel.recv(READ_BYTES)
            except BlockingIOError:
                return True
            except OSError:
                return False
            if not data:
                return False
            self._incoming += data

    def listen(self) -> bool:
        """Log what it printed, and keep the end of it; False if there will be no more. A process that nobody listens to
        blocks when it has printed enough."""
        with suppress(BlockingIOError):
            for _ in range(MAX_READS):  # it may print faster than we read
                data = os.read(self.output, READ_BYTES)
                if not data:
                    return False
                text = data.decode("utf-8", errors="replace")
                if not text.isspace():  # the end of a line may come alone
                    logger.info("printed by env process %d: %s", self.pid, text.rstrip())
                self.tail = (self.tail + text)[-TAIL_CHARS:]
        return True

    def kill(self, *, ask_where: bool = False) -> str:
        """End it and all it has started; returns how it ended. `ask_where`: it hangs, and may print where first.
        Once: then nothing is left of it but `tail`."""
        if ask_where:
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.kill(self.pid, signal.SIGABRT)  # answered by faulthandler, whatever the process is busy with
                self._process.wait(TRACE_SECONDS)
        # At once, so that its number cannot mean another yet. One that has ended keeps its own status.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(self.pid, signal.SIGKILL)
        return self._reaped()

    def end(self) -> None:
        """Let it finish what it was asked for and leave; `has_ended` sees to the rest."""
        with suppress(OSError):  # it has ended already
            self.channel.shutdown(socket.SHUT_WR)
        self._ending_since = time.monotonic()

    def has_ended(self) -> bool:
        """Whether a process that was told to end has done so; kills it when it takes too long."""
        assert self._ending_since is not None
        self.listen()
        if self._process.poll() is None and time.monotonic() - self._ending_since < END_SECONDS:
            return False
        self.kill()
        return True

    def close_descriptors(self) -> None:
        """Twice is allowed."""
        self._descriptors.close()

    def _reaped(self) -> str:
        code = None
        with suppress(subprocess.TimeoutExpired):
            code = self._process.wait(KILL_SECONDS)
        self.listen()
        self.close_descriptors()
        if self._nonsense or code is None:
            return self._nonsense or "cannot even be killed"
        if code >= 0:
            return f"ended itself with exit status {code}"
        return f"was ended by signal {-code} ({signal.strsignal(-code)})"


_ALL: WeakSet[WorkerProcess] = WeakSet()


def _forget_all() -> None:
    """In a fork of this program, which must not keep them alive when this program ends."""
    for process in _ALL:
        process.close_descriptors()


os.register_at_fork(after_in_child=_forget_all)


def end_all(processes: Iterable[WorkerProcess]) -> None:
    """Together they take no longer than one."""
    ending = list(processes)
    while ending := [process for process in ending if not process.has_ended()]:
        time.sleep(0.005)


def _environment() -> dict[str, str]:
    """Ours. Sets come in the same order in every process, so that an env can be played again in another; and one of
    many processes has no claim on all cores. Who says otherwise is heard."""
    threads = dict.fromkeys(("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    return {"PYTHONHASHSEED": "0", **threads, **os.environ}
