"""Counters of the server in the text format of Prometheus."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Mapping

BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 300.0)  # seconds
PREFIX = "agent_r1_"

HELP = {
    "requests_total": ("counter", "Requests by route and outcome: ok, refused, failed, left (the client closed it)."),
    "requests_active": ("gauge", "Requests that are being answered."),
    "prompt_tokens_total": ("counter", "Tokens of prompts."),
    "completion_tokens_total": ("counter", "Sampled tokens of complete answers."),
    "tool_calls_total": ("counter", "Calls that an agent's tools answered."),
    "request_seconds": ("histogram", "Time from the body of a request to the end of its answer."),
    "first_token_seconds": ("histogram", "Time from the body of a request to the first part of its answer."),
    "engine": ("gauge", "Counts of the engine since it started."),
}


class Histogram:
    """How often a time fell into each bucket."""

    def __init__(self) -> None:
        self._counts = [0] * (len(BUCKETS) + 1)
        self._sum = 0.0

    def observe(self, seconds: float) -> None:
        self._counts[bisect_left(BUCKETS, seconds)] += 1
        self._sum += seconds

    def lines(self, name: str) -> list[str]:
        total, lines = 0, []
        for bound, count in zip((*map(str, BUCKETS), "+Inf"), self._counts, strict=True):
            total += count
            lines.append(f'{name}_bucket{{le="{bound}"}} {total}')
        return [*lines, f"{name}_sum {self._sum}", f"{name}_count {total}"]


class Counters:
    """All counts of one server."""

    def __init__(self) -> None:
        self._counts: Counter[tuple[str, str]] = Counter()
        self._times = {name: Histogram() for name, (kind, _) in HELP.items() if kind == "histogram"}

    def add(self, name: str, count: int = 1, **labels: str) -> None:
        self._counts[name, _write_labels(labels)] += count

    def observe(self, name: str, seconds: float) -> None:
        self._times[name].observe(seconds)

    def text(self, *, active: int, engine: Mapping[str, float]) -> str:
        """The page for `/metrics`."""
        lines: list[str] = []
        for name, (kind, about) in HELP.items():
            full = f"{PREFIX}{name}"
            lines += [f"# HELP {full} {about}", f"# TYPE {full} {kind}"]
            if kind == "histogram":
                lines += self._times[name].lines(full)
            elif name == "requests_active":
                lines.append(f"{full} {active}")
            elif name == "engine":
                lines += [f'{full}{{count="{key}"}} {value}' for key, value in engine.items()]
            else:
                counts = {labels: count for (one, labels), count in self._counts.items() if one == name}
                lines += [f"{full}{labels} {count}" for labels, count in sorted(counts.items())]
        return "\n".join(lines) + "\n"


def _write_labels(labels: Mapping[str, str]) -> str:
    return "{" + ",".join(f'{key}="{value}"' for key, value in sorted(labels.items())) + "}" if labels else ""
