"""Environment steps per second: in the event loop, in threads, and in worker processes.

    python -m benchmarks.env_workers            # writes results/env_workers.json

Three environments: one that does nothing (the cost of a call), one that computes for 2 ms in Python, and one that
blocks for 5 ms. 32 episodes play at once; `asyncio.to_thread` has 4 more threads than cores. The variants take turns,
several times, so that a background load affects all of them; medians are reported. Processes start before the clock.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from agent_r1.envs.base import AgentEnv
from agent_r1.envs.processes.pool import EnvPool
from agent_r1.types import Action, TaskRow
from benchmarks.machine import RESULTS, machine
from benchmarks.slow_envs import Blocking, Computing, InThread, Trivial

EPISODES = 32
STEPS = {Trivial: 100, Computing: 10, Blocking: 10}  # of each episode
PROCESSES = (1, 2, 4)
REPEATS = 7
NAMES = {Trivial: "does nothing", Computing: "computes for 2 ms", Blocking: "blocks for 5 ms"}
ROW = TaskRow(prompt=[{"role": "user", "content": "?"}])
ACTION = Action(text="go north", token_ids=list(range(10)))

MakeEnv = Callable[[], AgentEnv]


async def steps_per_second(make: MakeEnv, steps: int) -> float:
    """All episodes are reset before the clock starts."""
    envs = [make() for _ in range(EPISODES)]
    await asyncio.gather(*(env.reset(ROW) for env in envs))

    async def play(env: AgentEnv) -> None:
        for _ in range(steps):
            await env.step(ACTION)

    began = time.perf_counter()
    await asyncio.gather(*map(play, envs))
    seconds = time.perf_counter() - began
    await asyncio.gather(*(env.close() for env in envs))
    return EPISODES * steps / seconds


def measure(runner: asyncio.Runner, world: type[Trivial], pools: dict[str, EnvPool]) -> dict[str, dict[str, float]]:
    ways: dict[str, MakeEnv] = {"in the event loop": world, "in threads": lambda: InThread(world())}
    ways |= {name: lambda pool=pool: pool.env(world, world.__name__, {}) for name, pool in pools.items()}  # type: ignore[misc]
    rates: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(REPEATS):
        for name, make in ways.items():
            rates[name].append(runner.run(steps_per_second(make, STEPS[world])))
    return {
        name: {
            "steps_per_second": round(statistics.median(found)),
            "least": round(min(found)),
            "most": round(max(found)),
        }
        for name, found in rates.items()
    }


def table(worlds: dict[str, dict[str, dict[str, float]]]) -> str:
    names = list(worlds)
    lines = ["| steps/s | " + " | ".join(names) + " |", "|---|" + "---:|" * len(names)]
    for way in worlds[names[0]]:
        cells = [f"{worlds[name][way]['steps_per_second']:,.0f}" for name in names]
        lines.append(f"| {way} | " + " | ".join(cells) + " |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--to", type=Path, default=RESULTS / "env_workers.json")
    arguments = parser.parse_args()
    pools = {f"{count} process{'es' * (count > 1)}": EnvPool(processes=count, step_seconds=60) for count in PROCESSES}
    load = os.getloadavg()[0]
    with asyncio.Runner() as runner:  # a pool belongs to one event loop
        worlds = {name: measure(runner, world, pools) for world, name in NAMES.items()}
        for pool in pools.values():
            pool.close()
    result: dict[str, Any] = {
        "command": "python -m benchmarks.env_workers",
        **machine(),
        "load_before": round(load, 2),
        "episodes": EPISODES,
        "repeats": REPEATS,
        "worlds": worlds,
    }
    print(table(worlds))
    arguments.to.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
