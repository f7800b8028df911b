"""The asynchronous loop with fakes: what starts when, what a step trains on, and what is saved when it stops."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any, cast

import pytest

from agent_r1.ranks.crew import Crew, OneProcess
from agent_r1.runs.metrics import Metrics
from agent_r1.train.async_loop import Rollout, train_async
from agent_r1.train.loop import Schedule
from agent_r1.train.tickets import Ledger
from agent_r1.types import CreditedTrajectory, Group, Step, StopReason, TaskRow, Trajectory

ROW = TaskRow(prompt=[{"role": "user", "content": "?"}], row_id="r")
N = 2  # groups per step


class Fake:
    """Groups take as many turns as `turns` says, counted in swaps of weights; 0: ready at once."""

    def __init__(self, turns: Callable[[int], int] = lambda ticket: 0, *, fail: str | None = None) -> None:
        self.crew: Crew = Crew()
        self.ledger, self.rows_per_step, self.max_rounds = Ledger(), N, 1
        self.turns, self.fail = turns, fail
        self.useless: set[int] = set()
        self.broken: set[int] = set()
        self.events: list[str] = []
        self.played: list[int] = []
        self.trained: list[list[int]] = []
        self.reported: list[tuple[list[int], Metrics]] = []
        self.saved: list[dict[str, object]] = []
        self.version = 0
        self.swapped = asyncio.Event()
        self.evaluating = False
        self.most_open = 0

    def _note(self, event: str) -> None:
        self.events.append(event)
        if self.fail == event:
            raise asyncio.CancelledError

    async def play(self, ticket: int) -> Group:
        assert not self.evaluating
        self._note(f"play {ticket}")
        self.played.append(ticket)
        self.most_open = max(self.most_open, len(self.ledger.open))
        began = self.version
        while self.version - began < self.turns(ticket):
            self.swapped.clear()
            await self.swapped.wait()
        versions = ((began, 1),) if began == self.version else ((began, 1), (self.version, 1))
        ids = [1] * len(versions)
        step = Step(prompt_ids=[0], response_ids=ids, response_logprobs=[0.0] * len(ids), versions=versions)
        stop = StopReason.ERROR if ticket in self.broken else StopReason.ANSWERED
        return Group(row=ROW, trajectories=[
            Trajectory(row_id=str(ticket), trajectory_id=str(ticket), steps=[step], stop=stop)
        ])  # fmt: skip

    def drops(self, group: Group) -> bool:
        return int(group.trajectories[0].row_id) in self.useless

    def check(self, groups: list[Group]) -> None:
        self._note("check")

    def learn(self, groups: list[Group]) -> tuple[list[CreditedTrajectory], Metrics]:
        self.trained.append([int(group.trajectories[0].row_id) for group in groups])
        if self.fail == f"learn {len(self.trained)}":
            raise RuntimeError("no")
        return [], {"loss": 1.0}

    async def swap_weights(self, version: int) -> None:
        self.version = version
        self.swapped.set()
        self._note(f"weights {version}")

    def report(self, step: int, groups: list[Group], batch: list[CreditedTrajectory], metrics: Metrics) -> None:
        self.reported.append(([int(group.trajectories[0].row_id) for group in groups], metrics))
        self._note(f"report {step}")

    def tell(self, step: int, groups: list[Group], metrics: Metrics) -> None:
        self._note(f"tell {step}")

    async def evaluate(self, step: int) -> None:
        self.evaluating = True
        self._note(f"evaluate {step}")
        await asyncio.sleep(0.001)
        self.evaluating = False

    def save(self, step: int) -> None:
        self.events.append(f"save {step}")
        self.saved.append(dict(self.ledger.state_dict()))


def run(parts: Fake, *, steps: int = 4, max_staleness: int = 1, eval_every: int = 2, **settings: Any) -> int:
    async def main() -> int:
        async with asyncio.timeout(20):  # instead of hanging
            schedule = Schedule(steps=steps, eval_every=eval_every, save_every=2, **settings)
            return await train_async(cast(Any, parts), schedule, max_staleness=max_staleness)

    return asyncio.run(main())


def important(parts: Fake) -> list[str]:
    return [event for event in parts.events if not event.startswith(("play", "check", "tell"))]


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_groups_are_trained_in_order_once_and_no_more_are_started_than_needed(staleness: int) -> None:
    parts = Fake()
    assert run(parts, max_staleness=staleness) == 4
    assert parts.trained == [[0, 1], [2, 3], [4, 5], [6, 7]]
    assert parts.played == list(range(8))
    assert parts.most_open == min(1 + staleness, 4) * N
    assert parts.ledger.metrics["groups/trained"] == 8
    assert not parts.ledger.open
    assert important(parts) == [
        "weights 1", "report 1", "weights 2", "report 2", "evaluate 2", "save 2",
        "weights 3", "report 3", "weights 4", "report 4", "evaluate 4", "save 4",
    ]  # fmt: skip


def test_without_staleness_nothing_starts_before_the_weights_are_new() -> None:
    parts = Fake()
    run(parts, max_staleness=0, steps=2)
    assert [event for event in parts.events if event.startswith(("play", "weights"))] == [
        "play 0", "play 1", "weights 1", "play 2", "play 3", "weights 2",
    ]  # fmt: skip


def test_a_slow_group_is_overtaken_and_trained_later() -> None:
    parts = Fake(turns=lambda ticket: int(ticket == 0))
    run(parts, eval_every=9)
    assert parts.trained == [[1, 2], [0, 3], [4, 5], [6, 7]]
    _, metrics = parts.reported[1]
    assert metrics["staleness/max"] == 1  # its first token is of version 0, trained on by version 1
    assert metrics["staleness/mixed"] == pytest.approx(1 / 2)


def test_a_group_that_grows_too_old_is_dropped_counted_and_shown() -> None:
    parts = Fake(turns=lambda ticket: 2 * (ticket == 0))
    run(parts, steps=6, eval_every=9)
    assert parts.ledger.metrics["groups/stale"] == 1
    assert parts.trained == [[1, 2], [3, 4], [5, 6], [7, 8], [9, 10], [11, 12]]  # another group takes its place
    assert [0 in played for played, _ in parts.reported] == [False, False, True, False, False, False]
    assert not parts.ledger.open


def test_groups_that_the_algorithm_drops_are_replaced_up_to_a_number_of_rounds() -> None:
    parts = Fake()
    parts.max_rounds, parts.useless = 2, {0, 2, 4, 5, 6, 7}
    parts.broken = {7}
    run(parts, steps=3, max_staleness=0)
    # step 2 considers two rounds of groups, finds none, and does not look further
    assert parts.trained == [[1, 3], [], [8, 9]]
    assert [played for played, _ in parts.reported] == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9]]
    ended = {name: count for name, count in parts.ledger.metrics.items() if count}
    assert ended == {"groups/started": 10, "groups/trained": 4, "groups/uniform": 5, "groups/failed": 1}


def test_a_failed_group_is_not_replaced() -> None:
    """As in the synchronous loop: the step has fewer trajectories."""
    parts = Fake()
    parts.broken = {1}
    run(parts, steps=2)
    assert parts.trained == [[0, 1], [2, 3]]
    assert (parts.ledger.metrics["groups/trained"], parts.ledger.metrics["groups/failed"]) == (3, 1)


def test_groups_in_play_end_before_an_evaluation() -> None:
    parts = Fake()
    original, playing = parts.play, 0

    async def play(ticket: int) -> Group:
        nonlocal playing
        playing += 1
        await asyncio.sleep(0.01 * (ticket % 3))
        playing -= 1
        return await original(ticket)

    async def evaluate(step: int) -> None:
        assert playing == 0
        await asyncio.sleep(0.02)
        assert playing == 0
        parts.events.append(f"evaluate {step}")

    parts.play, parts.evaluate = play, evaluate  # type: ignore[method-assign]
    run(parts, steps=6, max_staleness=2)
    assert sorted(parts.played) == list(range(12))
    assert [event[-1] for event in parts.events if event.startswith("evaluate")] == ["2", "4", "6"]


def test_the_time_limit_ends_the_run_and_leaves_tickets_open(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0, 0, 60, 60, 60])
    monkeypatch.setattr("agent_r1.train.loop.time", SimpleNamespace(monotonic=lambda: next(now)))
    parts = Fake(turns=lambda ticket: 99 * (ticket == 5))
    assert run(parts, steps=9, max_minutes=1, eval_every=9) == 2
    assert important(parts)[-3:] == ["report 2", "evaluate 2", "save 2"]
    [state] = parts.saved
    assert state["open"] == [4, 5]
    again = Fake()
    again.ledger.load_state_dict(state)
    again.version = 2
    assert run(again, start=2, steps=4) == 4
    assert again.trained == [[4, 5], [6, 7]]


def test_an_error_while_sampling_saves_the_last_finished_step() -> None:
    parts = Fake()
    original = parts.play

    async def play(ticket: int) -> Group:
        if ticket == 6:
            raise RuntimeError("a bug in play")
        return await original(ticket)

    parts.play = play  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="a bug in play"):
        run(parts, steps=9)
    assert important(parts)[-1] in ("save 2", "save 3")
    state: Any = parts.saved[-1]
    assert 6 in [*state["open"], state["next"]]
    trained = {ticket for batch in parts.trained for ticket in batch}
    assert {*state["open"], *trained} == set(range(state["next"]))


@pytest.mark.parametrize(
    ("fail", "error"),
    [("check", asyncio.CancelledError), ("learn 2", RuntimeError)],  # no step has finished; weights may be torn
)
def test_nothing_is_saved_without_a_finished_step_or_after_a_failed_update(
    fail: str, error: type[BaseException]
) -> None:
    parts = Fake(fail=fail)
    with pytest.raises(error):
        run(parts)
    assert parts.saved == []


def test_a_cancellation_while_the_learner_works_completes_the_step() -> None:
    parts = Fake(turns=lambda ticket: 99 * (ticket > 1))
    learn = parts.learn

    async def main() -> None:
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def slow(groups: list[Group]) -> tuple[list[CreditedTrajectory], Metrics]:
            loop.call_soon_threadsafe(begun.set)
            time.sleep(0.05)
            return learn(groups)

        parts.learn = slow  # type: ignore[method-assign]
        schedule = Schedule(steps=4, eval_every=2, save_every=2)
        task = asyncio.create_task(train_async(cast(Any, parts), schedule, max_staleness=1))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(main())
    assert important(parts) == ["weights 1", "report 1", "save 1"]
    [state] = parts.saved
    assert (state["next"], state["open"], state["ended"]) == (4, [2, 3], {"trained": 2})


class Thread(OneProcess):
    """A rank in a thread of this process."""

    def __init__(self, rank: int, size: int, meeting: threading.Barrier, board: dict[int, Any]) -> None:
        self.rank, self.size, self._meeting, self._board = rank, size, meeting, board

    def gather(self, value: Any) -> list[Any]:
        self._meeting.wait(10)
        self._board[self.rank] = value
        self._meeting.wait(10)
        return [self._board[rank] for rank in range(self.size)]

    def broadcast(self, value: Any) -> Any:
        return self.gather(value)[0]


class ThreadCrew(Crew):
    def __init__(self, ranks: Thread, totals: list[int], lock: threading.Lock) -> None:
        self.ranks, self._totals, self._lock, self._used = ranks, totals, lock, 0

    async def all(self, part: Coroutine[Any, Any, Any]) -> list[Any]:
        value, failure = None, None
        try:
            value = await part
        except Exception as error:  # noqa: BLE001 (raised on all ranks)
            failure = error
        outcomes = self.ranks.gather((value, failure))
        for _, raised in outcomes:
            if raised is not None:
                raise raised
        return [value for value, _ in outcomes]

    def counter(self) -> Callable[[int], int]:
        place, self._used = self._used, self._used + 1

        def add(amount: int) -> int:
            with self._lock:
                self._totals[place] += amount
                return self._totals[place]

        return add

    def share(self, rows: int) -> int | None:
        return -(-rows // self.ranks.size)


@pytest.mark.parametrize("size", [2, 3])
def test_ranks_share_the_tickets_and_train_on_the_same_groups(size: int) -> None:
    meeting, board, totals, lock = threading.Barrier(size), dict[int, Any](), [0, 0], threading.Lock()

    def rank(number: int) -> Fake:
        parts = Fake(turns=lambda ticket: 2 * (ticket in (3, 9)))
        parts.max_rounds, parts.useless = 3, {5, 6}
        parts.crew = ThreadCrew(Thread(number, size, meeting, board), totals, lock)
        run(parts, steps=7, eval_every=9)
        return parts

    with ThreadPoolExecutor(size) as pool:
        ranks = list(pool.map(rank, range(size)))
    everywhere = [ticket for parts in ranks for ticket in parts.played]
    assert len(everywhere) == len(set(everywhere))  # none is played twice
    first = ranks[0]
    trained = [ticket for batch in first.trained for ticket in batch]
    assert [len(batch) for batch in first.trained] == [N] * 7
    assert len(trained) == len(set(trained))
    for parts in ranks:
        assert parts.trained == first.trained
        assert parts.saved == first.saved
        assert (parts.ledger.ended, parts.ledger.open) == (first.ledger.ended, set())
        assert parts.most_open <= 2 * N
    assert first.ledger.ended["uniform"] == 2
    assert sorted(everywhere) == list(range(first.ledger.next))


def test_an_error_on_one_rank_ends_the_wait_of_the_others() -> None:
    meeting, board, totals, lock = threading.Barrier(2), dict[int, Any](), [0, 0], threading.Lock()

    def rank(number: int) -> Fake:
        parts = Fake()
        parts.crew = ThreadCrew(Thread(number, 2, meeting, board), totals, lock)

        async def play(ticket: int) -> Group:
            raise RuntimeError("a bug in play")

        if number == 1:
            parts.play = play  # type: ignore[method-assign]
        with pytest.raises(RuntimeError, match="a bug in play"):
            run(parts, max_staleness=0, steps=2)
        return parts

    with ThreadPoolExecutor(2) as pool:
        first, _ = pool.map(rank, range(2))
    assert len(first.played) < N  # so it waited for the other rank


def test_a_rank_starts_the_group_it_has_claimed_although_its_share_has_shrunk() -> None:
    async def main() -> None:
        totals, lock = [0, 0], threading.Lock()

        def rollout(rank: int) -> Rollout:
            parts = Fake(turns=lambda ticket: 99 * (ticket != 3))
            parts.crew = ThreadCrew(Thread(rank, 2, threading.Barrier(2), {}), totals, lock)
            return Rollout(parts=cast(Any, parts), steps=10, max_staleness=1)

        other, rank = rollout(0), rollout(1)
        other.fill(0)
        rank.fill(0)
        assert (list(other._playing), list(rank._playing)) == ([0, 1], [2, 3])
        while 3 in rank._playing:
            await asyncio.sleep(0)
        rank.fill(0)  # has room for ticket 4, which may not start yet
        assert list(rank._playing) == [2]
        for ticket in (0, 1, 3):
            rank.parts.ledger.end(ticket, "trained")
        rank.fill(9)  # the last step: its groups are tickets 2 and 4, and each rank's share is one
        assert list(rank._playing) == [2, 4]
        await asyncio.gather(other.stop(), rank.stop())

    asyncio.run(main())


class StoppedCrew(Crew):
    """Ends what it does together as soon as it was asked to stop, as a crew of several ranks does."""

    stopping = False

    async def all(self, part: Coroutine[Any, Any, Any]) -> list[Any]:
        if self.stopping:
            part.close()
            raise asyncio.CancelledError
        return [await part]


def test_a_stop_of_several_ranks_while_the_learner_works_saves_the_step() -> None:
    parts = Fake()
    parts.crew = crew = StoppedCrew()
    learn = parts.learn

    def stop(groups: list[Group]) -> tuple[list[CreditedTrajectory], Metrics]:
        crew.stopping = len(parts.trained) == 1
        return learn(groups)

    parts.learn = stop  # type: ignore[method-assign]
    with pytest.raises(asyncio.CancelledError):
        run(parts)
    assert important(parts) == ["weights 1", "report 1", "weights 2", "report 2", "save 2"]


def test_a_step_whose_observer_fails_is_saved() -> None:
    parts = Fake(fail="tell 2")
    with pytest.raises(asyncio.CancelledError):
        run(parts)
    assert important(parts) == ["weights 1", "report 1", "weights 2", "report 2", "save 2"]


def test_no_group_starts_after_an_evaluation_that_used_up_the_time(monkeypatch: pytest.MonkeyPatch) -> None:
    now = iter([0, 0, 0, 60])
    monkeypatch.setattr("agent_r1.train.loop.time", SimpleNamespace(monotonic=lambda: next(now)))
    parts = Fake()
    assert run(parts, steps=9, max_minutes=1, max_staleness=0) == 2
    assert parts.played == [0, 1, 2, 3]
