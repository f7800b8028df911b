"""A live run watched in a browser: the pages that follow it keep nothing of what they no longer show."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.browser import why_no_browser
from benchmarks.watch import Sample, summary, watch

REASON = why_no_browser()


def sample(polls: int, episodes: int, server_mb: float, heap_mb: float, nodes: int) -> Sample:
    return Sample(polls=polls, episodes=episodes, server_mb=server_mb, heap_mb=heap_mb, nodes=nodes)


def test_the_summary_separates_growth_with_the_run_from_growth_after_it() -> None:
    live = [sample(5, 100, 70.0, 2.0, 900), sample(10, 200, 71.0, 2.5, 1000), sample(15, 300, 72.0, 2.75, 1010)]
    idle = [sample(20, 300, 72.5, 2.75, 1010), sample(25, 300, 72.5, 3.0, 1000)]
    assert summary(live, idle) == {
        "server_kb_per_episode": 10.0,  # 2 MB for 200 episodes
        "heap_mb_second_half": 0.25,
        "nodes_second_half": 10,
        "server_mb_after_the_end": 0.0,
        "heap_mb_after_the_end": 0.25,
        "nodes_after_the_end": -10,
    }


@pytest.mark.browser
@pytest.mark.skipif(REASON is not None, reason=str(REASON))
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_the_pages_do_not_grow_with_the_number_of_updates(tmp_path: Path) -> None:
    found = watch(tmp_path, steps=9, idle_polls=20, episodes=8, speed=100, every=2)
    (_, *_, last), idle = found["live"], found["idle"]
    assert last.polls > 30
    assert last.episodes == 56  # of seven steps
    # A page of this run has 1 MB. Each poll builds the rows in sight anew, so a leak of them would be far larger.
    assert last.heap_mb - found["live"][0].heap_mb < 1.0
    assert idle[-1].heap_mb - idle[0].heap_mb < 0.5
    assert max(one.nodes for one in (last, *idle)) < 2 * found["live"][0].nodes + 1000
