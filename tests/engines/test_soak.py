"""Many concurrent episodes in a cache that is too small for them: nothing is lost and nothing stays allocated."""

from __future__ import annotations

import asyncio
import gc
import random
from pathlib import Path
from typing import Any

import pytest

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.engines.local.request import Request
from tests.engines.engine_sides import both, engine
from tests.engines.scheduler_steps import has_requests
from tests.engines.tiny_models import VOCAB, prompts, tiny

EPISODES = 40  # in each half
AT_ONCE = 12
MAX_RUNNING = 8
TOKENS = 128  # 32 blocks of 4; an episode grows to 50 tokens and more
STOPS = (1, 2, 3)  # about one token in thirty
LENGTHS = (1, 2, 3, 4, 24)
SYSTEM = prompts(5, 8)
ENOUGH_MB = 16


async def episode(local: LocalEngine, number: int, counts: dict[str, int]) -> None:
    """Some turns with an instant tool; some requests are cancelled, and some sessions are never released."""
    draw = random.Random(number)
    seen = [*draw.choice(SYSTEM), *(draw.randrange(VOCAB) for _ in range(draw.randrange(3)))]
    for _ in range(draw.randint(2, 6)):
        sampling = Sampling(max_tokens=draw.choice(LENGTHS), stop_ids=STOPS, seed=draw.randrange(50))
        asked = asyncio.ensure_future(local.generate(Prompt(seen), sampling, session=str(number)))
        if draw.random() < 0.08:
            for _ in range(draw.randrange(draw.choice([4, 40]))):
                await asyncio.sleep(0)
            asked.cancel()
        (answer,) = await asyncio.gather(asked, return_exceptions=True)
        if not isinstance(answer, Completion):
            assert isinstance(answer, asyncio.CancelledError)
            counts["cancelled"] += 1
            break
        check(answer, sampling)
        counts["answered"] += 1
        seen = [*seen, *answer.token_ids, *(draw.randrange(VOCAB) for _ in range(draw.randrange(3)))]
    if draw.random() < 0.9:
        local.release(str(number))


def check(answer: Completion, sampling: Sampling) -> None:
    assert 1 <= len(answer.token_ids) == len(answer.logprobs) <= sampling.max_tokens
    assert not set(answer.token_ids[:-1]) & set(STOPS)
    assert (answer.token_ids[-1] in STOPS) == (answer.stop == "stop")


def play(local: LocalEngine, first: int) -> dict[str, int]:
    """Play half of the episodes, a few at once."""
    counts = {"answered": 0, "cancelled": 0}

    async def worker(numbers: Any) -> None:
        for number in numbers:
            await episode(local, number, counts)

    async def main() -> None:
        numbers = iter(range(first, first + EPISODES))
        await asyncio.gather(*(worker(numbers) for _ in range(AT_ONCE)))

    asyncio.run(main())
    return counts


def requests_alive() -> int:
    gc.collect()
    return sum(type(each) is Request for each in gc.get_objects())


def resident_mb() -> float:
    """Resident memory of this process."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        pytest.skip("this system has no /proc/self/statm")
    return int(statm.read_text().split()[1]) * 4096 / 2**20


@both
def test_hundreds_of_requests_leave_nothing_behind(side: dict[str, Any]) -> None:
    before = requests_alive()
    model = tiny("llama", num_hidden_layers=1, hidden_size=16, intermediate_size=16)
    settings = {"max_running": MAX_RUNNING, "max_cached_tokens": TOKENS, "max_batch_tokens": 48}
    with engine(model, **side, **settings) as local:
        scheduler = local._scheduler
        halves, memory = [], []
        for half in range(2):
            halves.append(play(local, half * EPISODES))
            assert not local._futures
            assert not has_requests(scheduler)
            memory.append((requests_alive(), resident_mb()))
        # 40 episodes of 2 to 6 requests, some of them cancelled.
        assert all(counts["answered"] > 100 and counts["cancelled"] > 1 for counts in halves)
        assert min(local.stats.preemptions, local.stats.evictions, local.stats.shared_tokens) > 0
        # The requests of the last step may still be referenced.
        assert all(alive - before <= MAX_RUNNING for alive, _ in memory)
        assert memory[1][1] - memory[0][1] < ENOUGH_MB

        for number in range(2 * EPISODES):
            local.release(str(number))
        assert scheduler.free_blocks == TOKENS // 4
        assert not scheduler._idle
        assert not scheduler._being_computed
        assert not scheduler._pool._held
        assert not scheduler._pool._names
