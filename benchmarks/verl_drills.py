"""Kill processes of a run on verl, and show that the cause is named and nothing is lost.

    python -m benchmarks.verl_drills run [DRILL ...] --out FOLDER
    python -m benchmarks.verl_drills table --out FOLDER               # writes the table of docs/verl.md

Each drill starts a run of the quickstart on two CPU workers, ends one process after the second step, waits for the end
of the run, continues it, and compares it with an uninterrupted run: metrics, trajectories, evaluations. It also checks
that no process is left behind. Needs the environment with verl (docs/verl.md).
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from agent_r1.runs.reader import RunReader

PAGE = Path(__file__).parents[1] / "docs" / "verl.md"
STEPS = 4
SETTINGS = [f"trainer.steps={STEPS}", "trainer.save_every=2", "trainer.eval_every=4", "eval.rows=50"]
COMMAND = [sys.executable, "-m", "agent_r1.cli", "train"]
START = ["quickstart", "backend=verl", "verl.cpu=true", *SETTINGS]
LIMIT_SECONDS = 60.0
# drill -> name of the process as Ray shows it, or the signal for the program itself
DRILLS: dict[str, str | int] = {
    "training worker": "ray::WorkerDict",
    "agent loop": "ray::AgentLoop",
    "engine server": "ray::Server",
    "Ctrl-C": signal.SIGINT,
    "SIGTERM": signal.SIGTERM,
    "SIGKILL": signal.SIGKILL,
}
TIMES = ("time", "time/", "tokens_per_second")


def processes(session: int) -> dict[int, str]:
    """The running processes that this session started: pid -> command line."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text()
            environment = (folder / "environ").read_bytes()
            line = (folder / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if f"AGENT_R1_DRILL={session}".encode() in environment and stat.rpartition(")")[2].split()[0] != "Z":
            found[int(folder.name)] = line.strip()
    return found


def wait_for_steps(run: Path, count: int, program: subprocess.Popen[str], seconds: float = 400.0) -> None:
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        if program.poll() is not None:
            raise SystemExit(f"the run ended before step {count}:\n{program.communicate()[0]}")
        if (run / "metrics.jsonl").exists() and len(RunReader(run).read_metrics("train")) >= count:
            return
        time.sleep(0.2)
    raise SystemExit(f"no step {count} within {seconds:.0f} s")


def start(words: list[str], session: int) -> subprocess.Popen[str]:
    environment = os.environ | {"AGENT_R1_DRILL": str(session)}
    return subprocess.Popen(
        [*COMMAND, *words],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=environment,
        start_new_session=True,
    )


def drill(name: str, folder: Path, session: int) -> dict[str, Any]:
    run, target = folder / name.replace(" ", "_").lower(), DRILLS[name]
    program = start([*START, "--run", str(run)], session)
    wait_for_steps(run, 3 if name == "SIGKILL" else 2, program)
    if isinstance(target, str):
        victim = next(pid for pid, line in sorted(processes(session).items()) if line.startswith(target))
        os.kill(victim, signal.SIGKILL)
    elif name == "Ctrl-C":
        os.killpg(program.pid, target)  # as a terminal does: every process of the group gets it
    else:
        os.kill(program.pid, target)
    began = time.monotonic()
    output = program.communicate(timeout=300)[0]
    ended = time.monotonic() - began
    left = processes(session)
    while left and time.monotonic() - began < LIMIT_SECONDS:
        time.sleep(0.5)
        left = processes(session)
    done = len(RunReader(run).read_metrics("train"))
    again = start(["--resume", str(run)], session)
    resumed = again.communicate(timeout=600)[0]
    return {
        "drill": name,
        "exit code": program.returncode,
        "seconds to the end": round(ended, 1),
        "steps done": done,
        "message": [line for line in output.splitlines() if line.startswith("error:") or "continue with:" in line],
        "left behind": sorted(left.values()),
        "resumed with exit code": again.returncode,
        "run": str(run),
        "output": resumed[-500:] if again.returncode else "",
    }


def same(run: Path, other: Path) -> dict[str, bool]:
    """Whether two runs hold the same numbers and the same episodes."""
    a, b = RunReader.open(run), RunReader.open(other)
    metrics = [[_plain(record) for record in each.read_metrics()] for each in (a, b)]
    files = [[[_episode(record) for record in file] for file in each.files()] for each in (a, b)]
    return {"metrics": _close(*metrics), "episodes": files[0] == files[1]}


def _plain(record: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in record.items() if not name.startswith(TIMES)}


def _episode(record: dict[str, Any]) -> list[Any]:
    return [record["trajectory_id"], record["outcome_reward"], [step["response_ids"] for step in record["steps"]]]


def _close(a: list[dict[str, Any]], b: list[dict[str, Any]]) -> bool:
    """Equal up to the order in which floats were added: processes that start anew may batch requests differently."""
    if [list(each) for each in a] != [list(each) for each in b]:
        return False
    pairs = [(x[name], y[name]) for x, y in zip(a, b, strict=True) for name in x]
    return all(x == y or (isinstance(x, float) and abs(x - y) <= 1e-4 + 1e-3 * abs(x)) for x, y in pairs)


def write_table(folder: Path) -> None:
    lines = [
        "| killed | the run ended after | it said | finished steps | left behind | after `--resume` |",
        "|---|---:|---|---:|---:|---|",
    ]
    for name in DRILLS:
        path = folder / f"{name.replace(' ', '_').lower()}.json"
        if not path.exists():
            continue
        found = json.loads(path.read_text())
        is_same = all(found["same as uninterrupted"].values()) and found["resumed with exit code"] == 0
        said = re.sub(r"pid: \d+, ip: [0-9.]+, ", "", found["message"][0]) if found["message"] else "(nothing)"
        said = re.sub(r"; continue with:.*", "; continue with: ...", said)
        lines.append(
            f"| {name} | {found['seconds to the end']:.0f} s | `{said}` | {found['steps done']} | "
            f"{len(found['left behind'])} processes | {'same as uninterrupted' if is_same else 'DIFFERS'} |"
        )
    text = PAGE.read_text(encoding="utf-8")
    begin, end = "<!-- drills -->\n", "<!-- end of drills -->"
    before, _, rest = text.partition(begin)
    table = "\n".join(lines)
    PAGE.write_text(f"{before}{begin}\n{table}\n\n{end}{rest.partition(end)[2]}", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("action", choices=["run", "table"])
    parser.add_argument("drills", nargs="*", metavar="DRILL")
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    if given.action == "table":
        write_table(given.out)
        return
    whole = given.out / "uninterrupted"
    if not (whole / "curve.png").exists():
        program = start([*START, "--run", str(whole)], 0)
        print(program.communicate()[0][-300:])
    for number, name in enumerate(given.drills or DRILLS, 1):
        result = drill(name, given.out, 1000 * os.getpid() + number)
        result["same as uninterrupted"] = same(Path(result["run"]), whole)
        (given.out / f"{name.replace(' ', '_').lower()}.json").write_text(json.dumps(result, indent=2))
        print(json.dumps(result, indent=2), flush=True)


if __name__ == "__main__":
    main()
