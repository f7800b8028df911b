"""Where processes come from: zygotes of CPython, or workers of monty (`monty.py`). All of this blocks."""

from __future__ import annotations

import json
import os
import socket
import sys
import threading
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import PurePosixPath
from typing import Protocol

from agent_r1.errors import ConfigError
from agent_r1.tools.python.inside.confine import Orders
from agent_r1.tools.python.limits import Limits, Outcome, SandboxError
from agent_r1.tools.python.view import CODE, INSIDE, PACKAGES, WARM_UP, View, interpreter, make_view, module_names
from agent_r1.tools.python.zygote import Wish, Zygote

# Our modules are found under their own names without the packages around them, which import far more than a zygote
# needs: those are empty stand-ins that lead to one folder.
BOOT = """\
import sys, types
for name in ("agent_r1", "agent_r1.tools", "agent_r1.tools.python"):
    sys.modules[name] = module = types.ModuleType(name)
    module.__path__ = [sys.argv[1]]
from agent_r1.tools.python.inside.zygote import main
main()
"""


class Process(Protocol):
    """One process that runs code: once, or again and again in the same variables."""

    @property
    def usable(self) -> bool: ...
    def call(self, code: str, wish: Wish) -> Outcome: ...
    def kill(self) -> None: ...
    def close(self) -> None: ...


class Backend(Protocol):
    def open(self, *, session: bool) -> Process: ...
    def close(self) -> None: ...


class ZygoteBackend:
    """Some zygotes, started when first needed and again when they have died; runs go round among them."""

    def __init__(
        self, limits: Limits, libraries: Sequence[str], *, zygotes: int, isolated: bool, bubblewrap: str | None
    ) -> None:
        if not sys.platform.startswith("linux"):
            raise ConfigError(f"it needs Linux, and this is {sys.platform}")
        self._limits = limits
        self._libraries = tuple(libraries)
        self._isolated, self._bubblewrap = isolated, bubblewrap
        self._view = make_view(libraries)  # says now if a library is missing
        self._zygotes: list[Zygote | None] = [None] * zygotes
        self._locks = [threading.Lock() for _ in range(zygotes)]
        self._turn = 0
        self._closed = False

    def open(self, *, session: bool) -> Process:
        self._turn = turn = (self._turn + 1) % len(self._zygotes)
        with self._locks[turn]:
            if self._closed:
                raise SandboxError("the Python sandbox is closed")
            zygote = self._zygotes[turn]
            if zygote is None or not zygote.alive:
                if zygote is not None:
                    zygote.close()
                zygote = self._zygotes[turn] = self._start()
        return zygote.fork(session=session)

    def close(self) -> None:
        self._closed = True
        for index, lock in enumerate(self._locks):
            with lock:
                zygote, self._zygotes[index] = self._zygotes[index], None
                if zygote is not None:
                    zygote.close()

    def _start(self) -> Zygote:
        control, control_inside = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        proc = os.open("/proc", os.O_RDONLY | os.O_DIRECTORY)
        try:
            given = (control_inside.fileno(), proc)
            zygote = Zygote(self._command(*given), control, given, self._limits)
        finally:
            control_inside.close()
            os.close(proc)
        zygote.wait_until_ready()
        return zygote

    def _command(self, control: int, proc: int) -> list[str]:
        build_view = self._isolated and self._bubblewrap is None
        limits = asdict(self._limits)
        orders = Orders(
            isolated=self._isolated,
            build_view=build_view,
            folders=self._view.folders if build_view else [],
            links=self._view.links if build_view else [],
            hidden=self._view.hidden if build_view else [],
            preload=module_names(self._libraries),
            warm_up=[WARM_UP[name] for name in self._libraries if name in WARM_UP],
            search=[PACKAGES] if self._isolated else [path for path in sys.path if path],
            proc=proc,
            control=control,
            **{name: limits[name] for name in Orders.__dataclass_fields__ if name in limits},
        )
        code = CODE if self._bubblewrap else str(INSIDE.parent)
        # Not -I, which would ignore PYTHONHASHSEED, too; nothing else of the environment is about Python.
        python = [interpreter(), "-P", "-s", "-S", "-c", BOOT, code, json.dumps(asdict(orders))]
        return python if self._bubblewrap is None else [*wrapped(self._bubblewrap, self._view), *python]


def wrapped(bubblewrap: str, view: View) -> list[str]:
    """bubblewrap's own command line for this view."""
    command = [bubblewrap, "--die-with-parent", "--unshare-ipc", "--unshare-pid", "--unshare-net", "--unshare-uts"]
    # Root needs no user namespace; it is made nobody inside, which takes these two.
    as_root = ["--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]
    command += as_root if os.getuid() == 0 else ["--unshare-user"]
    places = [place for _, place in (*view.folders, *view.links)]
    # Folders that it makes by itself are for their owner only, and that is not who we will be.
    for folder in sorted({str(parent) for place in places for parent in PurePosixPath(place).parents} - {"/"}):
        command += ["--dir", folder]
    for source, place in view.folders:
        command += ["--dev-bind" if place.startswith("/dev/") else "--ro-bind", source, place]
    for place in view.hidden:
        command += ["--tmpfs", place, "--remount-ro", place]
    for target, place in view.links:
        command += ["--symlink", target, place]
    return [*command, "--dir", "/tmp", "--remount-ro", "/", "--chdir", "/"]
