"""Rows claimed by several collectors: each row once, by a collector with room, with the same episodes."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from dataclasses import replace
from itertools import count

from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.envs.base import AgentEnv
from agent_r1.rollout.collect import Collector, RowQueue
from agent_r1.types import Action, Group, Observation, TaskRow, Transition
from tests.chatml import collector, row, tokenizer

ROWS = [row(f"row-{number}") for number in range(8)]


class Gated(AgentEnv):
    """Ends after one step, as soon as its gate is open."""

    def __init__(self, gate: asyncio.Event) -> None:
        self.gate = gate

    async def reset(self, row: TaskRow) -> Observation:
        return Observation(messages=[dict(message) for message in row.prompt])

    async def step(self, action: Action) -> Transition:
        await self.gate.wait()
        return Transition(terminated=True)


def player(gate: asyncio.Event, *, group_size: int = 2, max_concurrent: int = 100) -> Collector:
    engine = ScriptedEngine(lambda call: "x", tokenizer=tokenizer())
    played = collector(engine, make_env=lambda _: Gated(gate), group_size=group_size)
    return replace(played, max_concurrent=max_concurrent)


def names(groups: dict[int, Group]) -> dict[int, list[str]]:
    return {ticket: [each.trajectory_id for each in group.trajectories] for ticket, group in groups.items()}


def test_a_slow_collector_keeps_its_share_and_the_other_one_takes_the_rest() -> None:
    async def main() -> None:
        shut, wide = asyncio.Event(), asyncio.Event()
        wide.set()
        tickets = count().__next__
        slow = asyncio.create_task(player(shut).claimed(RowQueue(ROWS, tickets, share=3), seed=7))
        await asyncio.sleep(0.01)  # it claims first, but not everything
        fast = await player(wide).claimed(RowQueue(ROWS, tickets, share=3), seed=7)
        assert sorted(fast) == [3, 4, 5, 6, 7]
        shut.set()
        alone = await player(wide).claimed(RowQueue(ROWS), seed=7)
        assert names(await slow) | names(fast) == names(alone)  # the same episodes, whoever plays them

    asyncio.run(main())


def test_rows_that_cannot_start_yet_are_left_to_others() -> None:
    async def main() -> None:
        shut, wide = asyncio.Event(), asyncio.Event()
        wide.set()
        tickets = count().__next__
        # Room for three episodes: the first row fills two places, the second one the last.
        narrow = player(shut, max_concurrent=3)
        slow = asyncio.create_task(narrow.claimed(RowQueue(ROWS, tickets, share=4), seed=0))
        await asyncio.sleep(0.01)
        fast = await player(wide).claimed(RowQueue(ROWS, tickets, share=4), seed=0)
        assert sorted(fast) == [2, 3, 4, 5, 6, 7]
        shut.set()
        assert sorted(await slow) == [0, 1]

    asyncio.run(main())


def test_rows_are_claimed_as_groups_are_taken() -> None:
    async def main() -> None:
        wide = asyncio.Event()
        wide.set()
        claimed: list[int] = []

        def next_ticket() -> int:
            claimed.append(len(claimed) + 5)
            return claimed[-1]

        taken: list[int] = []
        queue = RowQueue(ROWS * 10, next_ticket, share=2, first=5)
        async with aclosing(player(wide, group_size=1).stream(queue, seed=0)) as groups:
            async for ticket, _ in groups:
                taken.append(ticket)
                if len(taken) == 20:
                    break
        assert sorted(taken) == list(range(5, 25))
        assert len(claimed) <= len(taken) + 2

    asyncio.run(main())
