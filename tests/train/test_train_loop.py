"""The order of events in the loop, checked with fakes that record their calls."""

from __future__ import annotations

import asyncio
import time
from types import SimpleNamespace

import pytest

from agent_r1.ranks.crew import Crew
from agent_r1.runs.metrics import Metrics
from agent_r1.train.loop import Schedule, train
from agent_r1.types import CreditedTrajectory, Group, TaskRow

ROW = TaskRow(prompt=[{"role": "user", "content": "?"}], row_id="r")


class Fake:
    def __init__(self, fail: str | None = None) -> None:
        self.events: list[str] = []
        self.fail = fail

    def _note(self, event: str) -> None:
        self.events.append(event)
        again = self.events.count(event) > 1
        if self.fail == (f"second {event}" if again else event):
            raise asyncio.CancelledError

    async def collect(self, step: int) -> list[Group]:
        self._note(f"collect {step}")
        return [Group(row=ROW, trajectories=[])]

    def assign_credit(self, groups: list[Group]) -> list[CreditedTrajectory]:
        self._note("credit")
        return []

    def update(self, credited: list[CreditedTrajectory]) -> Metrics:
        self._note("update")
        return {"loss": 1.0}

    async def sync_weights(self, version: int) -> None:
        self._note(f"weights {version}")

    async def evaluate(self, step: int) -> None:
        self._note(f"evaluate {step}")

    def save(self, step: int) -> None:
        self._note(f"save {step}")

    def report(self, step: int, groups: list[Group], batch: list[CreditedTrajectory], metrics: Metrics) -> None:
        assert metrics["loss"] == 1.0
        assert metrics["time/collect"] >= 0
        self._note(f"report {step}")

    def tell(self, step: int, groups: list[Group], metrics: Metrics) -> None:
        self._note(f"tell {step}")


def run(parts: Fake, *, start: int = 0, steps: int = 3, max_minutes: float | None = None) -> int:
    schedule = Schedule(start=start, steps=steps, eval_every=2, save_every=2, max_minutes=max_minutes)
    return asyncio.run(train(parts, schedule, Crew()))


def one_step(step: int) -> list[str]:
    return [f"collect {step}", "credit", "update", f"weights {step}", f"report {step}", f"tell {step}"]


def test_each_step_samples_scores_updates_and_only_then_changes_the_sampler() -> None:
    parts = Fake()
    run(parts)
    assert parts.events == [
        *one_step(1),
        *one_step(2),
        "evaluate 2",
        "save 2",
        *one_step(3),
        "evaluate 3",  # the last step is always evaluated and saved
        "save 3",
    ]


@pytest.mark.parametrize(
    ("times", "last"),
    [
        ([0, 400, 599, 599.5, 600], 3),  # the end of step 1, of step 2, of its evaluation, of step 3
        ([0, 400, 500, 600], 2),  # in the evaluation: step 2 has been judged, so there is no other
        ([0, 600], 1),
    ],
)
def test_the_step_in_which_the_time_runs_out_is_the_last(
    times: list[float], last: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = iter(times)
    clock = SimpleNamespace(monotonic=lambda: next(now), perf_counter=time.perf_counter)
    monkeypatch.setattr("agent_r1.train.loop.time", clock)
    parts = Fake()
    assert run(parts, steps=9, max_minutes=10) == last
    judged = [f"evaluate {last}", f"save {last}"]
    before = [*one_step(1), *one_step(2), "evaluate 2", "save 2", *one_step(3)]
    assert parts.events == [*before[: before.index(f"tell {last}") + 1], *judged]
    assert next(now, None) is None


def test_a_run_with_time_to_spare_ends_after_its_steps() -> None:
    assert run(Fake(), max_minutes=1e9) == 3
    assert run(Fake(), start=3) == 3


def test_a_resumed_loop_starts_after_the_saved_step() -> None:
    parts = Fake()
    run(parts, start=2)
    assert parts.events == [*one_step(3), "evaluate 3", "save 3"]


@pytest.mark.parametrize(
    ("fail", "events"),
    [
        ("collect 1", ["collect 1"]),  # no step has finished
        ("collect 2", [*one_step(1), "collect 2", "save 1"]),  # while sampling, the last finished step is saved
        ("second update", [*one_step(1), "collect 2", "credit", "update"]),  # the weights may be torn
        ("report 2", [*one_step(1), *one_step(2)[:-1]]),  # resuming repeats a step whose metrics were not written
        ("tell 2", [*one_step(1), *one_step(2), "save 2"]),  # an observer that fails costs no step
    ],
)
def test_what_is_saved_depends_on_where_a_run_is_stopped(fail: str, events: list[str]) -> None:
    parts = Fake(fail=fail)
    with pytest.raises(asyncio.CancelledError):
        run(parts)
    assert parts.events == events
