"""What a call of the Python sandbox costs at each level that this machine supports.

    python -m benchmarks.sandbox            # writes results/sandbox.json

Two programs, one that prints a number and one that uses sympy, each run alone and by eight concurrent callers, which
keep all slots busy. The first call, which starts the sandbox, is measured separately.
"""

from __future__ import annotations

import asyncio
import json
import os
import statistics
import time
from typing import Any

from agent_r1.tools.python.sandbox import LEVELS, Sandbox, what_is_missing
from benchmarks.machine import RESULTS, machine

CALLS = 200
CALLERS = (1, 8)
PROGRAMS = {
    "print": "print(sum(range(100)))",
    "sympy": "import sympy\nx = sympy.Symbol('x')\nprint(sympy.solve(x**2 - 5*x + 6, x))",
}


async def measure(box: Sandbox, program: str, callers: int) -> dict[str, float]:
    """Milliseconds per call, and calls per second of all callers together."""
    taken: list[float] = []

    async def caller() -> None:
        for _ in range(CALLS // callers):
            began = time.perf_counter()
            outcome = await box.run(program)
            taken.append(time.perf_counter() - began)
            assert outcome.error is None, outcome

    began = time.perf_counter()
    await asyncio.gather(*(caller() for _ in range(callers)))
    wall = time.perf_counter() - began
    quantiles = statistics.quantiles(taken, n=20)
    return {
        "median_ms": round(statistics.median(taken) * 1e3, 2),
        "p95_ms": round(quantiles[18] * 1e3, 2),
        "min_ms": round(min(taken) * 1e3, 2),
        "calls_per_second": round(len(taken) / wall, 1),
    }


async def measure_session(box: Sandbox) -> dict[str, float]:
    taken = []
    for _ in range(CALLS):
        began = time.perf_counter()
        await box.run(PROGRAMS["print"], session="s")
        taken.append(time.perf_counter() - began)
    await box.release("s")
    return {"median_ms": round(statistics.median(taken) * 1e3, 2)}


async def measure_level(name: str) -> dict[str, Any]:
    missing = what_is_missing(name)
    if missing is not None:
        return {"missing": missing}
    box = Sandbox(level=name)
    began = time.perf_counter()
    await box.run(PROGRAMS["print"])
    result: dict[str, Any] = {"first_call_seconds": round(time.perf_counter() - began, 2)}
    for program in PROGRAMS:
        for callers in CALLERS:
            result[f"{program}, {callers} at once"] = await measure(box, PROGRAMS[program], callers)
    result["print, in a session"] = await measure_session(box)
    await box.close()
    return result


def main() -> None:
    levels = {}
    for name in LEVELS:
        levels[name] = asyncio.run(measure_level(name))
        print(name, json.dumps(levels[name], indent=1))
    result = {
        "command": "python -m benchmarks.sandbox",
        **machine(),
        "user": "root" if os.getuid() == 0 else "ordinary",
        "load_average": os.getloadavg()[0],
        "calls": CALLS,
        "levels": levels,
    }
    RESULTS.mkdir(exist_ok=True)
    (RESULTS / "sandbox.json").write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
