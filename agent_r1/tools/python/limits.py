"""How much a piece of code may use, and how its run ended. Plain data."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from agent_r1.errors import AgentR1Error, ConfigError

MAX_LIMIT = 1 << 20  # upper bound of every limit (12 days, a terabyte): 25 days in milliseconds overflow in the kernel


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
