"""Watch a live run with the viewer for as many updates as an hour has, and follow the memory of server and page.

    python -m benchmarks.watch                # an hour: 1,800 polls, 360 training steps; writes results/watch.json

A page asks for news every two seconds. Here its timers run `--speed` times as fast, and this program writes a training
step of a generated run after every fifth poll, so an hour's updates take minutes. Two pages are open: the curves and
the table of episodes. Then the run is over, and the pages go on asking: whatever grows now is a leak. The server's
index grows with the episodes by design; the result has its size per episode.

Needs Linux, playwright and Chromium (see `browser.py`).
"""

from __future__ import annotations

import argparse
import random
import re
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from agent_r1.config import parse_config
from agent_r1.runs.run_dir import RunDir
from benchmarks.browser import browser_or_none, why_no_browser
from benchmarks.machine import RESULTS, machine
from benchmarks.recipes import keep
from benchmarks.view import CONFIG, GROUP_SIZE, make_group, serving

POLLS_PER_STEP = 5  # a training step of ten seconds
PAGES = ("#/", "#/run/live/episodes")
METRICS = ("reward/mean", "success", "entropy", "grad_norm", "episode/steps", "time/collect", "time/update")


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """The memory after so many polls. Heap and nodes are sums over the pages, after a garbage collection."""

    polls: int
    episodes: int
    server_mb: float
    heap_mb: float
    nodes: int


class Watch:
    """The open pages and the server that they ask."""

    def __init__(self, browser: Any, url: str, pid: int, *, speed: int) -> None:
        self.polls = self.episodes = 0
        self._pid, self._speed = pid, speed
        context = browser.new_context(viewport={"width": 1280, "height": 800})
        context.add_init_script(
            f"const late = setTimeout; setTimeout = (work, ms, ...args) => late(work, ms / {speed}, ...args);"
        )
        self._pages = [context.new_page() for _ in PAGES]
        self._sessions = [context.new_cdp_session(page) for page in self._pages]
        # Both pages ask for the runs at every poll.
        self._pages[0].on("requestfinished", lambda request: self._count(request.url))
        for page, address in zip(self._pages, PAGES, strict=True):
            page.goto(url + address)

    def _count(self, url: str) -> None:
        self.polls += "api/runs" in url

    def wait_for(self, polls: int) -> None:
        while self.polls < polls:
            self._pages[0].wait_for_timeout(2000 / self._speed)

    def sample(self) -> Sample:
        heap, nodes = 0, 0
        for session in self._sessions:
            session.send("HeapProfiler.collectGarbage")
            heap += session.send("Runtime.getHeapUsage")["usedSize"]
            nodes += session.send("Memory.getDOMCounters")["nodes"]
        status = Path(f"/proc/{self._pid}/status").read_text(encoding="ascii")
        found = re.search(r"VmRSS:\s+(\d+) kB", status)
        assert found is not None
        return Sample(
            polls=self.polls,
            episodes=self.episodes,
            server_mb=round(int(found[1]) / 1000, 1),
            heap_mb=round(heap / 1e6, 2),
            nodes=nodes,
        )


def add_step(run: RunDir, step: int, episodes: int) -> None:
    random_ = random.Random(step)
    groups = [make_group(random_, f"row-{step}-{n}") for n in range(episodes // GROUP_SIZE)]
    run.write_trajectories("train", step, groups)
    run.append_metrics("train", step, {name: random_.random() for name in METRICS})


def watch(place: Path, *, steps: int, idle_polls: int, episodes: int, speed: int, every: int) -> dict[str, Any]:
    """Return samples while the run is written, and after its end; one per `every` steps, or the polls of as many."""
    config = parse_config({**CONFIG, "trainer": {"steps": steps}})
    run, began = RunDir.create(place / "live", config), time.perf_counter()
    add_step(run, 1, episodes)
    with serving(place) as (url, pid), browser_or_none() as browser:
        pages = Watch(browser, url, pid, speed=speed)
        pages.episodes = episodes
        live, idle = list[Sample](), list[Sample]()
        for step in range(2, steps + 1):
            pages.wait_for(pages.polls + POLLS_PER_STEP)
            if step % every == 0:
                live.append(pages.sample())
            add_step(run, step, episodes)
            pages.episodes += episodes
        for _ in range(max(2, idle_polls // (every * POLLS_PER_STEP))):
            pages.wait_for(pages.polls + every * POLLS_PER_STEP)
            idle.append(pages.sample())
        return {"seconds": round(time.perf_counter() - began), "live": live, "idle": idle}


def summary(live: Sequence[Sample], idle: Sequence[Sample]) -> dict[str, float]:
    """Growth of the server per episode; of the pages over the second half of the run; and of both after its end."""
    first, middle, last = live[0], live[len(live) // 2], live[-1]
    return {
        "server_kb_per_episode": round(1000 * (last.server_mb - first.server_mb) / (last.episodes - first.episodes), 2),
        "heap_mb_second_half": round(last.heap_mb - middle.heap_mb, 2),
        "nodes_second_half": last.nodes - middle.nodes,
        "server_mb_after_the_end": round(idle[-1].server_mb - idle[0].server_mb, 1),
        "heap_mb_after_the_end": round(idle[-1].heap_mb - idle[0].heap_mb, 2),
        "nodes_after_the_end": idle[-1].nodes - idle[0].nodes,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=360)
    parser.add_argument("--idle-polls", type=int, default=600)
    parser.add_argument("--episodes", type=int, default=64, help="of a step")
    parser.add_argument("--speed", type=int, default=20)
    parser.add_argument("--every", type=int, default=20, help="steps between two samples")
    parser.add_argument("--out", type=Path, default=RESULTS / "watch.json")
    args = parser.parse_args()
    if (reason := why_no_browser()) is not None:
        raise SystemExit(reason)
    settings = {name: value for name, value in vars(args).items() if name != "out"}
    with tempfile.TemporaryDirectory() as folder:
        found = watch(Path(folder), **settings)
    live, idle = found["live"], found["idle"]
    result = {"command": "python -m benchmarks.watch", **machine(), "settings": settings, "seconds": found["seconds"]}
    result |= summary(live, idle) | {"live": [asdict(one) for one in live], "idle": [asdict(one) for one in idle]}
    keep(args.out, result)
    for one in (*live, *idle):
        print(f"{one.polls:6,} polls  {one.episodes:7,} episodes  server {one.server_mb:7.1f} MB  "
              f"pages {one.heap_mb:6.2f} MB, {one.nodes:,} nodes")  # fmt: skip
    print(summary(live, idle))


if __name__ == "__main__":
    main()
