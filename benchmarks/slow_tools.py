"""The tools of the quickstart with heavy-tailed latencies, for `async_training.py`.

Lognormal with a mean of 500 ms: half of the calls take less than 170 ms, one in a hundred more than 5 s.
"""

from __future__ import annotations

import asyncio
import math
import random

from agent_r1.recipes.quickstart import task
from agent_r1.tools.base import FromRow, tool

MEAN_SECONDS, SIGMA = 0.5, 1.47
MAX_SECONDS = 20.0  # below the time limit of a tool call
_LATENCIES = random.Random(0)


async def wait() -> None:
    await asyncio.sleep(min(MAX_SECONDS, _LATENCIES.lognormvariate(math.log(MEAN_SECONDS) - SIGMA**2 / 2, SIGMA)))


@tool
async def lookup(name: str, table: FromRow[dict[str, int]]) -> str:
    """How many coins a person has, by full name."""
    await wait()
    return str(await task.lookup(name, table))


@tool
async def calculate(expression: str) -> str:
    """The value of a + b, a - b or a * b for two integers."""
    await wait()
    return str(await task.calculate(expression))
