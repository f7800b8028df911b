"""The result of a check: a light, what was checked, the evidence, and what to do."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from agent_r1.errors import AgentR1Error


class Level(StrEnum):
    GREEN = "green"  # as it should be, or nothing to check
    YELLOW = "yellow"  # it will run, but deserves a look
    RED = "red"  # it will fail, or learn nothing


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    level: Level
    name: str  # what was checked
    evidence: str  # with numbers
    fix: str = ""  # what to do; empty if nothing


def green(name: str, evidence: str) -> Finding:
    return Finding(level=Level.GREEN, name=name, evidence=evidence)


def yellow(name: str, evidence: str, fix: str) -> Finding:
    return Finding(level=Level.YELLOW, name=name, evidence=evidence, fix=fix)


def red(name: str, evidence: str, fix: str) -> Finding:
    return Finding(level=Level.RED, name=name, evidence=evidence, fix=fix)


def refused(name: str, error: AgentR1Error) -> Finding:
    """An error that would stop a run. Its last sentence says what to do, if it has several."""
    lines = " ".join(str(error).split())
    evidence, dot, fix = lines.rpartition(". ")
    return red(name, evidence, fix) if dot else red(name, lines, "Correct this first; other checks need it")
