"""The levels of isolation: what each one guarantees, and whether this machine has it.

A guarantee is something the tests attack. Which level is to be had is found out by running code at it: a kernel may
forbid namespaces, an installed bubblewrap may not be allowed to work. A level that was asked for by name is used or
refused, never replaced; `auto` takes the strongest that isolates, so never `process`.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from functools import cache

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.tools.python.backends import Backend, ZygoteBackend
from agent_r1.tools.python.limits import Limits, SandboxError
from agent_r1.tools.python.monty import MontyBackend
from agent_r1.tools.python.zygote import Wish


class Guarantee(StrEnum):
    """What code in a sandbox cannot do, whatever it tries."""

    TIME = "time"  # run longer than its wall time
    MEMORY = "memory"  # take more than memory_mb in a process, and processes * memory_mb + scratch_mb in all
    OUTPUT = "output"  # hand back more than output_chars
    ENDS = "ends"  # leave a process behind
    PROCESSES = "processes"  # have more processes and threads than its limit
    NETWORK = "network"  # reach any network, any socket of the host, or another run
    FILES = "files"  # read anything but Python and the chosen libraries: no environment, no other process
    WRITES = "writes"  # write anything but a /tmp that nobody else sees and that ends with it


LIMITED = frozenset({Guarantee.TIME, Guarantee.MEMORY, Guarantee.OUTPUT})
ALL = frozenset(Guarantee)


@dataclass(frozen=True, slots=True, kw_only=True)
class Level:
    name: str
    summary: str
    guarantees: frozenset[Guarantee]
    libraries: bool  # can offer packages such as numpy
    needs: str  # what to do where it is missing

    @property
    def isolates(self) -> bool:
        return {Guarantee.NETWORK, Guarantee.FILES, Guarantee.WRITES} <= self.guarantees


LEVELS: dict[str, Level] = {  # strongest first
    level.name: level
    for level in (
        Level(
            name="bubblewrap",
            summary="CPython in namespaces of its own; bubblewrap builds the file system it sees",
            guarantees=ALL,
            libraries=True,
            needs="install bubblewrap (apt-get install bubblewrap) where user namespaces are allowed",
        ),
        Level(
            name="namespaces",
            summary="CPython in namespaces of its own; we build the file system it sees",
            guarantees=ALL,
            libraries=True,
            needs="allow user namespaces (user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns)",
        ),
        Level(
            name="monty",
            summary="a small interpreter of a part of Python, without system calls and without libraries",
            guarantees=ALL,
            libraries=False,
            needs="pip install pydantic-monty",
        ),
        Level(
            name="process",
            summary="CPython as the same user, with limits and nothing hidden: for a container you would give away",
            guarantees=LIMITED,
            libraries=True,
            needs="run on Linux, on x86_64 or aarch64",
        ),
    )
}


def choose_level(wanted: str, libraries: Sequence[str]) -> Level:
    """The level to use; ConfigError when it cannot be had, with what is missing."""
    if wanted != "auto":
        if str(wanted) not in LEVELS:
            raise ConfigError(f"unknown sandbox level {wanted!r}.{did_you_mean(str(wanted), ['auto', *LEVELS])}")
        level = LEVELS[wanted]
        if libraries and not level.libraries:
            raise ConfigError(
                f"the sandbox level {wanted!r} has no libraries, and is to offer {', '.join(libraries)}: set libraries "
                "to [], or take another level"
            )
        missing = what_is_missing(wanted)
        if missing is not None:
            raise ConfigError(
                f"the sandbox level {wanted!r} is not available here: {missing}. To get it, {level.needs}"
            )
        return level
    reasons = []
    for level in LEVELS.values():
        if level.isolates:
            missing = what_is_missing(level.name, bool(libraries))
            if missing is None:
                return level
            reasons.append(f"{level.name}: {missing}")
    raise ConfigError(
        f"no sandbox level isolates Python code here ({'; '.join(reasons)}). To get one, {LEVELS['bubblewrap'].needs}; "
        "or take level=process, which hides nothing of this machine, inside a container you would give away"
    )


@cache
def what_is_missing(level: str, libraries: bool = False) -> str | None:
    """None if code ran at this level just now."""
    if libraries and not LEVELS[level].libraries:
        return "it has no libraries; set libraries to []"
    try:
        backend = make_backend(level, Limits(seconds=20), ())
        try:
            run = backend.open(session=False)
            try:
                with Wish() as wish:
                    outcome = run.call("print(6 * 7)", wish)
            finally:
                run.close()
        finally:
            backend.close()
    except (SandboxError, ConfigError, OSError) as error:
        return str(error)
    return None if outcome.stdout == "42\n" else f"a first program failed: {outcome.error or outcome.stdout!r}"


def make_backend(level: str, limits: Limits, libraries: Sequence[str], zygotes: int = 1) -> Backend:
    if level == "monty":
        return MontyBackend(limits)
    bubblewrap = shutil.which("bwrap")
    if level == "bubblewrap" and bubblewrap is None:
        raise ConfigError("there is no program bwrap")
    return ZygoteBackend(
        limits,
        libraries,
        zygotes=zygotes,
        isolated=level != "process",
        bubblewrap=bubblewrap if level == "bubblewrap" else None,
    )
