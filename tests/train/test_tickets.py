"""The ledger of an asynchronous run: every ticket ends exactly once, whatever is killed in between."""

from __future__ import annotations

import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.train.tickets import FATES, Fate, Ledger, oldest_version, staleness_metrics
from agent_r1.types import Versions
from tests.learn.builders import group, step, trajectory

OPEN = 4


def test_tickets_are_started_in_order_and_at_most_so_many_are_open() -> None:
    ledger = Ledger()
    assert ledger.limit(OPEN) == 4
    ledger.start(4)
    assert [ledger.ticket(start) for start in range(4)] == [0, 1, 2, 3]
    ledger.end(2, "trained")
    ledger.end(0, "stale")
    assert ledger.limit(OPEN) == 6  # two more
    assert ledger.open == {1, 3}
    assert ledger.metrics == {
        "groups/started": 4, "groups/trained": 1, "groups/failed": 0, "groups/uniform": 0, "groups/stale": 1,
    }  # fmt: skip


def test_a_ticket_ends_once() -> None:
    ledger = Ledger()
    ledger.start(1)
    ledger.end(0, "trained")
    with pytest.raises(ValueError, match="ticket 0 is not open and cannot end as 'stale'"):
        ledger.end(0, "stale")
    with pytest.raises(ValueError, match="ticket 7 is not open"):
        ledger.end(7, "trained")


def test_a_process_that_continues_plays_what_was_open_first() -> None:
    before = Ledger()
    before.start(6)
    for ticket in (0, 1, 4):
        before.end(ticket, "trained")
    before.commit()
    before.start(8)  # after the step: not in the checkpoint
    before.end(2, "stale")
    after = Ledger()
    after.load_state_dict(before.state_dict())
    assert after.open == {2, 3, 5}
    assert [after.ticket(start) for start in range(6)] == [2, 3, 5, 6, 7, 8]
    assert after.limit(OPEN) == OPEN  # what ended before makes no room now
    after.start(4)
    assert (after.open, after.next) == ({2, 3, 5, 6}, 7)


@given(st.lists(st.one_of(st.integers(1, 5), st.sampled_from([*FATES, "commit", "kill"])), max_size=60), st.data())
def test_no_ticket_is_lost_or_ends_twice_over_kills(events: list[int | str], data: st.DataObject) -> None:
    ledger, playing, ended = Ledger(), set[int](), dict[int, str]()
    committed = dict(ended)
    for event in events:
        if isinstance(event, int):
            fresh = range(ledger.starts, min(ledger.starts + event, ledger.limit(OPEN)))
            ledger.start(max(ledger.starts, fresh.stop))
            started = [ledger.ticket(start) for start in fresh]
            assert not playing & set(started)
            assert not ended.keys() & set(started)
            playing |= set(started)
        elif event == "commit":
            ledger.commit()
            committed = dict(ended)
        elif event == "kill":
            state = json.loads(json.dumps(ledger.state_dict()))
            ledger, playing, ended = Ledger(), set(), dict(committed)
            ledger.load_state_dict(state)
        elif playing:
            ticket = data.draw(st.sampled_from(sorted(playing)))
            fate: Fate = next(each for each in FATES if each == event)
            ledger.end(ticket, fate)
            playing.remove(ticket)
            ended[ticket] = fate
        assert len(playing) <= OPEN
        assert playing <= ledger.open
        # Every ticket below the next one is open or has ended, and never both.
        assert sorted([*ledger.open, *ended]) == list(range(ledger.next))
        assert ledger.ended == Counter(ended.values())
        assert sum(ledger.metrics.values()) == 2 * ledger.metrics["groups/started"] - len(ledger.open)


def sampled(*responses: Versions) -> list[object]:
    from dataclasses import replace

    sizes = [sum(count for _, count in versions) for versions in responses]
    return [replace(step([1], [2] * size), versions=versions)
            for size, versions in zip(sizes, responses, strict=True)]  # fmt: skip


def test_staleness_counts_tokens_by_the_age_of_their_version() -> None:
    # version 7 trains: three tokens of 7, two of 6, one of 5
    mixed = trajectory(*sampled(((5, 1), (6, 2)), ((7, 1),)), reward=1.0)  # type: ignore[arg-type]
    fresh = trajectory(*sampled(((7, 2),)), reward=0.0)  # type: ignore[arg-type]
    nothing = trajectory(step([1], []), reward=0.0)
    groups = [group(mixed, nothing), group(fresh)]
    assert staleness_metrics(groups, 7) == {
        "staleness/mean": pytest.approx((2 * 1 + 1 * 2) / 6),
        "staleness/max": 2,
        "staleness/mixed": pytest.approx(1 / 3),  # of three responses
        "staleness/tokens_0": 3,
        "staleness/tokens_1": 2,
        "staleness/tokens_2": 1,
    }
    assert [oldest_version(each) for each in groups] == [5, 7]
    assert oldest_version(group(nothing)) is None
    assert staleness_metrics([], 3) == {"staleness/mean": 0, "staleness/max": 0, "staleness/mixed": 0}
