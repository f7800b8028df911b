"""Batching of concurrent calls: when a batch starts, how many run at once, and who gets which failure."""

from __future__ import annotations

import asyncio

import pytest

from agent_r1.batching import Batcher


class Squares:
    """Squares numbers and records its batches; each batch waits until `go` is set."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.go = asyncio.Event()

    async def run(self, numbers: list[int]) -> list[int]:
        self.batches.append(numbers)
        await self.go.wait()
        return [number**2 for number in numbers]


def test_a_batch_starts_when_it_is_full_or_the_loop_is_idle() -> None:
    async def play() -> None:
        squares = Squares()
        squares.go.set()
        batcher = Batcher(squares.run, max_items=2)
        assert await asyncio.gather(*map(batcher.submit, range(5))) == [0, 1, 4, 9, 16]
        assert squares.batches == [[0, 1], [2, 3], [4]]
        assert (batcher.num_waiting, batcher.num_unanswered) == (0, 0)

    asyncio.run(play())


def test_while_all_slots_are_busy_later_items_gather_into_the_next_batch() -> None:
    async def play() -> None:
        squares = Squares()
        batcher = Batcher(squares.run, max_items=3, max_concurrent=1)
        answers = []
        for number in range(6):
            answers.append(batcher.submit(number))
            await asyncio.sleep(0.001)  # the event loop becomes idle, so each item is due alone
        assert squares.batches == [[0]]
        assert batcher.num_waiting == 5
        squares.go.set()
        assert await asyncio.gather(*answers) == [0, 1, 4, 9, 16, 25]
        assert squares.batches == [[0], [1, 2, 3], [4, 5]]

    asyncio.run(play())


def test_items_of_cancelled_callers_are_dropped() -> None:
    async def play() -> None:
        squares = Squares()
        squares.go.set()
        batcher = Batcher(squares.run)
        gone, stays = batcher.submit(2), batcher.submit(3)
        gone.cancel()
        assert await stays == 9
        assert squares.batches == [[3]]
        assert batcher.num_unanswered == 0

    asyncio.run(play())


@pytest.mark.parametrize("results", [None, [1]])
def test_a_batch_that_raises_or_misses_results_fails_its_callers_and_no_others(results: list[int] | None) -> None:
    async def play() -> None:
        async def run(numbers: list[int]) -> list[int]:
            if 13 not in numbers:
                return numbers
            if results is None:
                raise ValueError("13")
            return results

        batcher = Batcher(run, max_items=2)
        answers = await asyncio.gather(*map(batcher.submit, (13, 2, 3, 4)), return_exceptions=True)
        assert answers[-2:] == [3, 4]
        assert isinstance(answers[1], ValueError)

    asyncio.run(play())


def test_closing_cancels_running_batches_and_all_callers() -> None:
    async def play() -> None:
        squares = Squares()
        batcher = Batcher(squares.run, max_items=1, max_concurrent=1)
        answers = [batcher.submit(1), batcher.submit(2)]
        while not squares.batches:
            await asyncio.sleep(0)
        assert batcher.num_waiting == 1
        batcher.close()
        await asyncio.wait(answers, timeout=10)
        assert all(answer.cancelled() for answer in answers)

    asyncio.run(play())
