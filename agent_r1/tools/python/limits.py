"""How much a piece of code may use, and what became of it. Plain data; knows nothing of how either is brought about."""

from __future__ import annotations

from dataclasses import dataclass, fields
from enum import StrEnum

from agent_r1.errors import AgentR1Error, ConfigError

MOST = 1 << 20  # of anything: 12 days, a terabyte. 25 days in milliseconds are more than the kernel takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Of one call, unless a comment says otherwise. What a level does not limit: `levels.py`."""

    seconds: float = 5.0  # wall time
    cpu_seconds: int = 6  # of each process of a run
    session_cpu_seconds: int = 60  # of each process of a session, over all its calls
    session_seconds: float = 900.0  # a session's life
    idle_seconds: float = 600.0  # a session's time between two calls
    memory_mb: int = 512  # of each process, on top of the loaded libraries
    processes: int = 8  # and threads, counted together
    file_mb: int = 16  # of one file
    scratch_mb: int = 64  # of /tmp, which is in memory
    open_files: int = 64
    output_chars: int = 8000
    code_chars: int = 100_000

    def __post_init__(self) -> None:
        for field in fields(self):
            value, kind = getattr(self, field.name), field.type
            if isinstance(value, bool) or not isinstance(value, int if kind == "int" else int | float):
                wanted = "a whole number" if kind == "int" else "a number"
                raise ConfigError(f"Limits.{field.name} must be {wanted}, got {value!r}")
            if not 0 < value <= MOST:
                raise ConfigError(f"Limits.{field.name} must be more than 0 and at most {MOST}, got {value}")
        if self.open_files < 16:
            raise ConfigError(
                f"Limits.open_files must be at least 16, which Python itself needs, got {self.open_files}"
            )


class KilledBy(StrEnum):
    """Why a run did not end by itself."""

    TIME = "time"
    CPU = "cpu"
    OUTPUT = "output"
    SIGNAL = "signal"  # it crashed, or the kernel took it for want of memory


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What became of a piece of code."""

    stdout: str  # and stderr, as they were written
    error: str | None = None  # the end of a traceback, or what stopped it
    seconds: float = 0.0
    killed_by: KilledBy | None = None


class SandboxError(AgentR1Error, RuntimeError):
    """The sandbox itself failed, not the code in it: the caller's episode fails, the next call gets a new process."""
