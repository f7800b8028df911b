"""Memory and time of the driver of a run on verl, for one step with many long trajectories. Needs neither verl nor Ray.

    python -m benchmarks.verl_driver --trajectories 10000 --steps 8 --prompt 1500 --response 64

Makes trajectories one by one as agent loops would send them (packed and pickled), then does what the driver does with
all of them: unpack, assign credit, lay out rows for the workers, build the columns of an update, gather what workers
would return, and write the trajectories. Prints CPU seconds and the memory of the process after each part.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import pickle
import random
import resource
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch

from agent_r1.backends.verl.inside.losses import POLICY_COLUMNS
from agent_r1.backends.verl.learner import RemoteModel, VerlLearner
from agent_r1.backends.verl.rows import RowBatch, pack, unpack
from agent_r1.learn.algorithms import get_algorithm
from agent_r1.learn.credit import assign_credit
from agent_r1.runs.trajectories import write_groups
from agent_r1.types import Group, Step, StopReason, TaskRow, Trajectory

GROUP = 8
WORKERS = 32
Report = dict[str, dict[str, float]]


def memory() -> float:
    """Of this process, in GiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**30


@contextmanager
def measured(name: str, report: Report) -> Iterator[None]:
    gc.collect()
    began = time.process_time()  # of this process: other programs on the machine do not count
    yield
    seconds = time.process_time() - began
    gc.collect()
    report[name] = {"CPU seconds": round(seconds, 1), "GiB after": round(memory(), 2)}
    print(f"{name:28} {seconds:8.1f} s {memory():8.2f} GiB", flush=True)


def long_trajectory(number: int, *, steps: int, prompt: int, response: int) -> Trajectory:
    """An append-only episode: `prompt` tokens at first, then as many again in the answers of its tools."""
    rng = random.Random(number)
    more, context, made = prompt // steps, [rng.randrange(32_000) for _ in range(prompt)], []
    for _ in range(steps):
        ids = [rng.randrange(32_000) for _ in range(response)]
        made.append(Step(prompt_ids=list(context), response_ids=ids, response_logprobs=[-rng.random() for _ in ids]))
        context += [*ids, *(rng.randrange(32_000) for _ in range(more))]
    return Trajectory(
        row_id=str(number // GROUP),
        trajectory_id=str(number),
        steps=made,
        stop=StopReason.ANSWERED,
        outcome_reward=float(rng.random() < 0.5),
    )


class Idle:
    """Stands for the workers: takes what it is given."""

    size = WORKERS

    def __getattr__(self, name: str) -> None:
        raise AttributeError(name)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trajectories", type=int, default=10_000)
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--prompt", type=int, default=1500)
    parser.add_argument("--response", type=int, default=64)
    parser.add_argument("--out", type=Path)
    given = parser.parse_args()
    sizes = {"steps": given.steps, "prompt": given.prompt, "response": given.response}
    report: Report = {"start": {"CPU seconds": 0.0, "GiB after": round(memory(), 2)}}
    with tempfile.TemporaryFile() as sent:
        sent_bytes, tokens = 0, 0
        for number in range(given.trajectories):  # on the agent loops, not measured
            made = long_trajectory(number, **sizes)
            packed = pickle.dumps(pack(made))
            sent.write(packed)
            sent_bytes += len(packed)
            tokens += len(made.steps[-1].prompt_ids) + given.response
        print(f"{given.trajectories} trajectories, {tokens / 1e6:.1f} M tokens, {sent_bytes / 2**30:.2f} GiB sent")
        sent.seek(0)
        with measured("unpack", report):
            arrived = [unpack(pickle.load(sent)) for _ in range(given.trajectories)]
    groups = [
        Group(row=TaskRow(prompt=[], row_id=str(i)), trajectories=arrived[i * GROUP : (i + 1) * GROUP])
        for i in range(given.trajectories // GROUP)
    ]
    with measured("credit", report):
        credited = assign_credit(groups, get_algorithm("grpo"))
    learner = VerlLearner(
        RemoteModel(),  # type: ignore[arg-type]
        workers=Idle(),  # type: ignore[arg-type]
        loss=get_algorithm("grpo").loss,
        lr=1e-6,
        temperature=1.0,
        betas=(0.9, 0.99),
        weight_decay=0.0,
        max_grad_norm=1.0,
        max_tokens_per_pack=32_768,
        max_nonfinite_updates=3,
    )
    with measured("lay out rows", report):
        batch = learner._prepare(credited, range(len(credited)))
        rows = RowBatch.of(batch.packs, WORKERS)
    with measured("columns for the workers", report):
        columns = {name: getattr(batch.columns, name) for name in POLICY_COLUMNS}
        sent_rows = rows.token_columns() | rows.spread(columns) | {"step_ids": rows.step_ids()}
    with measured("gather an answer", report):
        rows.gather(torch.zeros(rows.num_tokens), batch.columns.old_logprobs_R)
    del sent_rows
    with measured("write trajectories", report), tempfile.TemporaryDirectory() as folder:
        write_groups(Path(folder) / "train.jsonl", groups)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    print(f"peak {peak:.2f} GiB")
    if given.out is not None:
        facts = {"trajectories": given.trajectories, **sizes, "tokens": tokens, "GiB sent": sent_bytes / 2**30}
        given.out.write_text(json.dumps(facts | {"parts": report, "peak GiB": round(peak, 2)}, indent=2) + "\n")


if __name__ == "__main__":
    main()
