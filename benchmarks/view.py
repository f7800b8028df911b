"""The viewer on a run of 100,000 episodes: time to the first answers, to read everything, and to filter.

    python -m benchmarks.view --out benchmarks/results/view.json

The run is generated: 400 steps of 256 episodes with three steps each, and one episode with a tool result of 10 MB. The
questions go over HTTP to a server in its own process, as a browser asks them. With Chromium and playwright installed,
the times until a fresh page shows the runs and the first episodes, and from a key in the field for searching to the
rows, are measured too. Processor times of the server are given beside the times on the clock, which depend on what else
the machine is doing.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any

import httpx

from agent_r1.config import parse_config
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import COMPUTED
from agent_r1.types import Group, Step, StopReason, TaskRow, ToolCallRecord, Trajectory
from benchmarks.browser import browser_or_none
from benchmarks.machine import machine

CONFIG = {"recipe": "generated", "task": {"rows": "task.rows", "reward": "task.reward"}, "model": {"path": "a/b"}}
GROUP_SIZE, EPISODE_STEPS, RESPONSE_TOKENS, PROMPT_TOKENS = 8, 3, 60, 150
VOCABULARY = 50_000
WORDS = [
    "river", "stone", "lamp", "quiet", "copper", "window", "harbour", "winter", "orchard", "signal", "basket", "velvet",
]  # fmt: skip
HUGE = 10_000_000  # characters of one tool result
REPEATS, PAINTS = 7, 5
QUESTIONS: dict[str, dict[str, str]] = {
    "reward at least 0.5": {"reward_min": "0.5"},
    "stop reason and tool": {"stop": "max_steps", "tool": "search"},
    "common word": {"text": "harbour"},
    "rare word": {"text": "needle-77"},
    "absent word": {"text": "nothing says this"},
    "word, reward, sorted by tokens": {"text": "winter", "reward_max": "0.2", "sort": "-tokens"},
    "last page of all": {"offset": "100000"},
}


def make_step(random_: random.Random, number: int, *, result: str) -> Step:
    prompt = [random_.randrange(VOCABULARY) for _ in range(PROMPT_TOKENS + 120 * number)]
    text = " ".join(random_.choices(WORDS, k=40))
    call = ToolCallRecord(name=random_.choice(["search", "calculate"]), arguments={"query": text[:40]}, result=result,
                          text_span=(0, 20), token_span=(0, 5), seconds=random_.random())  # fmt: skip
    return Step(
        prompt_ids=prompt,
        response_ids=[random_.randrange(VOCABULARY) for _ in range(RESPONSE_TOKENS)],
        response_logprobs=[-random_.expovariate(2.0) for _ in range(RESPONSE_TOKENS)],
        calls=(call,) if number < EPISODE_STEPS - 1 else (),
        action_text=text,
        feedback=f"{call.name}: {result}",
        versions=((0, RESPONSE_TOKENS),),
        generate_seconds=random_.random(),
        env_seconds=random_.random(),
    )


def make_group(random_: random.Random, row: str) -> Group:
    question = f"{' '.join(random_.choices(WORDS, k=12))} {f'needle-{random_.randrange(1000)}'}?"
    episodes = []
    for attempt in range(GROUP_SIZE):
        result = " ".join(random_.choices(WORDS, k=60))
        steps = [make_step(random_, number, result=result) for number in range(EPISODE_STEPS)]
        stop = random_.choice([StopReason.ANSWERED, StopReason.ANSWERED, StopReason.MAX_STEPS])
        reward = round(random_.random(), 2)
        episodes.append(
            Trajectory(row_id=row, trajectory_id=f"{row}#{attempt}", steps=steps, stop=stop, outcome_reward=reward)
        )
    return Group(row=TaskRow(prompt=[{"role": "user", "content": question}], row_id=row), trajectories=episodes)


def make_run(path: Path, *, files: int, per_file: int) -> None:
    run = RunDir.create(path, parse_config(CONFIG))
    for step in range(1, files + 1):
        random_ = random.Random(step)
        groups = [make_group(random_, f"row-{step}-{n}") for n in range(per_file // GROUP_SIZE)]
        numbers = {name: [[0.5] * RESPONSE_TOKENS] * EPISODE_STEPS for name in COMPUTED}
        run.write_trajectories(
            "train", step, groups, {t.trajectory_id: numbers for g in groups for t in g.trajectories}
        )
        run.append_metrics("train", step, {"reward/mean": random_.random(), "success": random_.random()})
    huge = make_step(random.Random(0), 0, result="lamp " * (HUGE // 5))
    episode = Trajectory(row_id="huge", trajectory_id="huge#0", steps=[huge], stop=StopReason.ANSWERED)
    run.write_trajectories("eval", 0, [Group(row=TaskRow(prompt=[], row_id="huge"), trajectories=[episode])])


@contextmanager
def serving(place: Path) -> Iterator[tuple[str, int]]:
    """Start a server; yield its address and its process id."""
    command = [sys.executable, "-m", "agent_r1.cli", "view", str(place), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as server:
        try:
            assert server.stdout is not None
            line = server.stdout.readline()
            yield line[line.index("http://") :].split()[0], server.pid
        finally:
            server.terminate()


def ask(client: httpx.Client, name: str, **params: str) -> tuple[float, Any]:
    """Return the seconds until the whole answer was there, and the answer."""
    began = time.perf_counter()
    answer = client.get(f"api/{name}", params=params)
    answer.raise_for_status()
    return time.perf_counter() - began, answer.json()


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used, in steps of 10 ms. Only on Linux."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def resident_bytes(pid: int) -> int:
    """Return the memory of a process that is not shared with files. Only on Linux."""
    found = re.search(r"RssAnon:\s+(\d+) kB", Path(f"/proc/{pid}/status").read_text(encoding="ascii"))
    assert found is not None
    return 1024 * int(found[1])


def measure(url: str, pid: int, run: str) -> dict[str, Any]:
    with httpx.Client(base_url=url, timeout=60) as client:
        empty = resident_bytes(pid)
        began = time.perf_counter()
        first_runs, _ = ask(client, "runs")
        first_rows, _ = ask(client, "episodes", run=run, limit="100")
        while True:
            _, answer = ask(client, "episodes", run=run, limit="1")
            if answer["read"] == answer["total"]:
                break
            time.sleep(0.1)
        reading, reading_cpu = time.perf_counter() - began, cpu_seconds(pid)
        indexed = resident_bytes(pid)
        filters = {}
        for name, params in QUESTIONS.items():
            before = cpu_seconds(pid)
            taken = [ask(client, "episodes", run=run, limit="100", **params) for _ in range(REPEATS)]
            seconds = [one for one, _ in taken]
            cpu = (cpu_seconds(pid) - before) / REPEATS
            filters[name] = {
                "median_ms": _ms(median(seconds)), "worst_ms": _ms(max(seconds)), "cpu_ms": _ms(cpu),
                "matches": taken[0][1]["matches"],
            }  # fmt: skip
        opened = [ask(client, "episode", run=run, file="train_000001", n=str(n))[0] for n in range(0, 200, 20)]
        huge, page = ask(client, "episode", run=run, file="eval_000000", n="0")
        assert page["steps"][0]["calls"][0]["result"]["length"] == HUGE
        return {
            "episodes": answer["total"],
            "first_list_of_runs_ms": _ms(first_runs),
            "first_page_of_episodes_ms": _ms(first_rows),
            "everything_read_s": round(reading, 1),
            "everything_read_cpu_s": round(reading_cpu, 1),
            "memory_mb": {"empty": _mb(empty), "indexed": _mb(indexed), "after_questions": _mb(resident_bytes(pid))},
            "memory_bytes_per_episode": round((indexed - empty) / answer["total"]),
            "filter": filters,
            "open_episode_ms": _ms(median(opened)),
            "open_episode_with_10_MB_result_ms": _ms(huge),
        }


def paint(browser: Any, place: Path) -> dict[str, Any]:
    """Return the milliseconds until a fresh page shows the runs, and the episodes, of a server just started."""
    wanted = {"runs": ("", "li.run"), "episodes": (f"#/run/{place.name}/episodes", ".row .texts")}
    result = {}
    for name, (address, selector) in wanted.items():
        taken = []
        for _ in range(PAINTS):
            with serving(place) as (url, _):
                page = browser.new_page()
                began = time.perf_counter()
                page.goto(url + address)
                page.wait_for_selector(selector)
                taken.append(_ms(time.perf_counter() - began))
                page.close()
        result[f"{name}_ms"] = {"median": median(taken), "all": taken}
    return result


# From the last key until the new rows are drawn. The page waits 150 ms for further keys.
TYPE = """(text) => new Promise((done) => {
  const [input, count] = [document.getElementById("search"), document.querySelector(".count")];
  const before = count.textContent;
  const began = performance.now();
  const look = () => {
    const isShown = document.querySelector("a.row, .empty") && !document.querySelector(".pending");
    if (count.textContent !== before && isShown) requestAnimationFrame(() => done(performance.now() - began));
    else requestAnimationFrame(look);
  };
  input.value = text;
  input.dispatchEvent(new Event("input", { bubbles: true }));
  look();
})"""


def type_words(browser: Any, url: str, run: str) -> dict[str, int]:
    """Return the milliseconds from a key in the field for searching to the rows that match, in a browser."""
    page = browser.new_page()
    page.goto(f"{url}#/run/{run}/episodes")
    page.wait_for_selector("main[data-state=ready] a.row")
    taken = []
    for number in range(REPEATS):
        for text in (f"needle-{70 + number}", f"harbour {WORDS[number]}", f"nothing says this {number}", ""):
            taken.append(_ms(page.evaluate(TYPE, text) / 1000))
    page.close()
    return {"median": round(median(taken)), "worst": max(taken), "of": len(taken)}


def _mb(size: int) -> float:
    return round(size / 1e6, 1)


def _ms(seconds: float) -> int:
    return round(1000 * seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--files", type=int, default=400)
    parser.add_argument("--per-file", type=int, default=256)
    parser.add_argument("--run", type=Path, help="keep the generated run here, or use it again")
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    scratch = Path(tempfile.mkdtemp())
    place: Path = args.run or scratch / "generated"
    try:
        if not (place / "config.json").exists():
            make_run(place, files=args.files, per_file=args.per_file)
        size = sum(path.stat().st_size for path in (place / "trajectories").glob("*.jsonl"))
        facts = {"command": "python -m benchmarks.view", "machine": machine(), "load_average": os.getloadavg()[0]}
        with browser_or_none() as browser, serving(place) as (url, pid):
            painted = browser and paint(browser, place)
            result = {**facts, "bytes": size, "first_paint": painted, **measure(url, pid, place.name)}
            result["typing_to_rows_ms"] = browser and type_words(browser, url, place.name)
    finally:
        shutil.rmtree(scratch)
    text = json.dumps(result, indent=1)
    print(text)
    if args.out is not None:
        args.out.write_text(f"{text}\n", encoding="utf-8")


if __name__ == "__main__":
    main()
