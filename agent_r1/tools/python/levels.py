"""Levels of isolation: what each one guarantees, and whether this machine supports it.

The tests attack every guarantee. Support is found out by running code, because a kernel or a container may forbid
namespaces. A level that is missing is an error, never replaced by another one.
"""

from __future__ import annotations

from enum import StrEnum
from functools import cache

from agent_r1.errors import ConfigError, did_you_mean
from agent_r1.tools.python.launcher import Launcher
from agent_r1.tools.python.limits import Limits, SandboxError


class Guarantee(StrEnum):
    """What sandboxed code cannot do, whatever it tries."""

    TIME = "time"  # run longer than its wall time
    MEMORY = "memory"  # take more than memory_mb in a process, and processes * memory_mb + scratch_mb in all
    OUTPUT = "output"  # return more than output_chars
    ENDS = "ends"  # leave a process behind
    PROCESSES = "processes"  # have more processes and threads than its limit
    NETWORK = "network"  # reach a network, a socket of the host, or another run
    FILES = "files"  # read anything but Python and the chosen libraries: no environment, no other process
    WRITES = "writes"  # write anywhere but to a private /tmp, which is deleted with the run


LEVELS = {
    "namespaces": frozenset(Guarantee),
    "process": frozenset({Guarantee.TIME, Guarantee.MEMORY, Guarantee.OUTPUT}),  # runs as the same user, hides nothing
}


def check_level(level: str) -> None:
    """Raise ConfigError if this machine does not support `level`."""
    if level not in LEVELS:
        raise ConfigError(f"unknown sandbox level {level!r}.{did_you_mean(str(level), LEVELS)}")
    missing = what_is_missing(level)
    if missing is not None:
        raise ConfigError(
            f"the sandbox level {level!r} does not work here: {missing}. Allow user namespaces "
            "(user.max_user_namespaces, kernel.apparmor_restrict_unprivileged_userns), or set level=process, which "
            "hides nothing of this machine, in a container that holds nothing of value"
        )


@cache
def what_is_missing(level: str) -> str | None:
    """Run a program at this level. Returns None if it works, else the reason."""
    try:
        launcher = Launcher(Limits(seconds=20), (), isolated=level != "process")
        try:
            process = launcher.fork()
            try:
                outcome = process.call("print(6 * 7)")
            finally:
                process.close()
        finally:
            launcher.close()
    except (SandboxError, ConfigError, OSError) as error:
        return str(error)
    return None if outcome.stdout == "42\n" else f"a first program failed: {outcome.error or outcome.stdout!r}"
