"""Several ranks against one process through the real command: the same run, and what happens when a rank fails."""

from __future__ import annotations

import os
import re
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from subprocess import Popen
from typing import Any

import pytest
import torch
from rich.console import Console
from safetensors.torch import load_file
from torch.distributed import HashStore  # type: ignore[attr-defined]

from agent_r1.build.plan import build_plan
from agent_r1.cli.commands.train import run_training
from agent_r1.config import load_config, parse_config
from agent_r1.ranks.launch import Launched, launch
from agent_r1.runs.reader import latest_checkpoint, list_checkpoints
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from tests.forked import start_program
from tests.ranks_started import MINI, ends, start_nodes, start_ranks, wait_for

TIMING = ("time", "tokens_per_second")
# How the learner cuts its work depends on the number of ranks; what it learns does not.
PACKING = ("packs", "tokens_computed", "packing_efficiency")


@pytest.fixture(scope="module", autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """Share one warm start among the tests of this file."""
    with pytest.MonkeyPatch.context() as patch:
        folder = tmp_path_factory.mktemp("cache")
        patch.setenv("AGENT_R1_CACHE", str(folder))
        torch.set_num_threads(1)
        yield folder


def train_here(path: Path, *overrides: str) -> Path:
    config = load_config(MINI, overrides)
    run_training(config, build_plan(config), RunDir.create(path, config), Console(quiet=True), resume=False)
    return path


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory, cache: Path) -> Path:
    """Six steps in one process."""
    return train_here(tmp_path_factory.mktemp("runs") / "whole", "trainer.steps=6", "trainer.keep_checkpoints=9")


def records(run: Path) -> dict[tuple[str, int], dict[str, Any]]:
    return {
        (record["kind"], record["step"]): {
            name: value for name, value in record.items() if not name.startswith((*TIMING, *PACKING))
        }
        for record in RunDir.open(run).read_metrics()
    }


def sampled(run: Path, pattern: str) -> list[tuple[str, list[list[int]], float]]:
    return [
        (each.trajectory_id, [step.response_ids for step in each.steps], each.total_reward)
        for each in read_trajectories(run / "trajectories", pattern)
    ]


def assert_same_run(run: Path, other: Path, *, steps: int) -> None:
    """The same episodes, and metrics and weights that differ by rounding only."""
    for step in range(1, steps + 1):
        assert sampled(run, f"train_{step:06d}*") == sampled(other, f"train_{step:06d}*")
    ours, theirs = records(run), records(other)
    assert {("train", step) for step in range(1, steps + 1)} <= ours.keys() & theirs.keys()
    for key in ours.keys() & theirs.keys():  # a resumed run may have evaluated more often
        assert ours[key] == pytest.approx(theirs[key], abs=1e-6)
    weights = [load_file(each / "checkpoints" / f"step_{steps:06d}" / "model.safetensors") for each in (run, other)]
    for name, weight in weights[0].items():
        torch.testing.assert_close(weight, weights[1][name], rtol=0, atol=1e-5)


def said(log: Path) -> str:
    return log.read_text(encoding="utf-8")


def test_two_ranks_train_and_evaluate_like_one_process(whole: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "two", tmp_path / "log"
    codes = ends(start_ranks(2, [MINI, "--run", str(run), "trainer.steps=4"], log))
    assert codes == [0, 0], said(log)
    assert_same_run(run, whole, steps=4)
    assert len(sampled(run, "eval_*")) == 3 * 4  # before, half-way, at the end
    assert said(log).count("training 4/4") == 1  # only rank 0 prints
    assert (run / "rank_1.log").is_file()


@pytest.mark.slow
def test_torchrun_on_two_nodes_trains_like_one_process(whole: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "nodes", tmp_path / "log"
    codes = ends(start_nodes(2, [MINI, "--run", str(run), "trainer.steps=2"], log))
    assert codes == [0, 0], said(log)
    assert_same_run(run, whole, steps=2)
    assert said(log).count("training 2/2") == 1
    assert (run / "rank_1.log").is_file()


@pytest.mark.slow
def test_a_killed_rank_ends_the_run_which_resumes_with_another_number_of_ranks(whole: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "killed", tmp_path / "log"
    words = ["train", MINI, "--run", str(run), "--gpus", "2", "trainer.steps=6", "trainer.keep_checkpoints=9"]
    launcher = start_program(words, {**os.environ, "OMP_NUM_THREADS": "1"}, log)
    wait_for(run / "metrics.jsonl", 3, log)
    victim = next(pid for pid in children(launcher.pid or 0) if variable(pid, "RANK") == "1")
    os.kill(victim, signal.SIGKILL)
    [code] = ends([launcher])
    text = said(log)
    assert code not in (0, None)
    assert text.count("error:") == 1, text
    assert re.search(rf"error: rank 1 \(.*, pid {victim}\) was killed by SIGKILL\nsaved after step \d; continue", text)
    assert f"train --resume {run} --gpus 2" in text
    done, _ = latest_checkpoint(run / "checkpoints")
    assert 2 <= done < 6
    # One more step in one process, the rest on three ranks.
    directory = RunDir.open(run)
    config = parse_config({**directory.settings, "trainer": {**directory.settings["trainer"], "steps": 5}})
    run_training(config, build_plan(config), directory, Console(quiet=True), resume=True)
    assert ends(start_ranks(3, ["--resume", str(run)], log)) == [0, 0, 0], said(log)
    assert_same_run(run, whole, steps=6)


def children(pid: int) -> list[int]:
    return [int(each) for each in Path(f"/proc/{pid}/task/{pid}/children").read_text(encoding="utf-8").split()]


def variable(pid: int, name: str) -> str | None:
    content = Path(f"/proc/{pid}/environ").read_bytes().decode()
    found = dict(item.partition("=")[::2] for item in content.split("\0"))
    return found.get(name)


@pytest.mark.slow
def test_a_rank_that_does_not_answer_ends_the_run(whole: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "stopped", tmp_path / "log"
    ranks = start_ranks(2, [MINI, "--run", str(run), "trainer.steps=500"], log, AGENT_R1_SILENT_SECONDS="3")
    wait_for(run / "metrics.jsonl", 1, log)
    stopped = ranks[1].pid
    assert stopped is not None
    os.kill(stopped, signal.SIGSTOP)
    assert ends(ranks[:1]) == [1]
    os.kill(stopped, signal.SIGKILL)
    assert re.search(rf"error: rank 1 \(.*, pid {stopped}\) has not answered for 3 s\n.*continue with", said(log))


def test_sigterm_to_all_ranks_saves_the_last_finished_step(whole: Path, tmp_path: Path) -> None:
    run, log = tmp_path / "term", tmp_path / "log"
    ranks = start_ranks(2, [MINI, "--run", str(run), "trainer.steps=500", "trainer.save_every=500"], log)
    wait_for(run / "metrics.jsonl", 2, log)
    for rank in ranks:
        rank.terminate()
    assert ends(ranks) == [128 + signal.SIGTERM, 0], said(log)
    [(done, _)] = list_checkpoints(run / "checkpoints")
    assert done >= 2
    assert said(log).count(f"stopped by SIGTERM; saved after step {done}; continue with: agent-r1 train --resume") == 1
    assert "error" not in said(log)


def test_ranks_with_other_settings_are_refused(tmp_path: Path) -> None:
    run, log = tmp_path / "run", tmp_path / "log"
    codes = ends(start_ranks(2, [MINI, "--run", str(run)], log, own={1: ["learner.lr=0.5"]}))
    assert 0 not in codes
    assert re.search(r"error: rank 1 \(.*\) differs from rank 0 \(.*\): learner.lr is 0.5, not 0.001", said(log))
    assert said(log).count("error:") == 1
    assert not (run / "config.json").exists()


def test_an_error_of_all_ranks_is_printed_once_and_one_of_a_single_rank_names_it(tmp_path: Path) -> None:
    log = tmp_path / "log"
    words = [MINI, "--run", str(tmp_path / "all"), "task.success_reward=oops"]
    assert ends(start_ranks(2, words, log)) == [2, 1]
    assert said(log).count("error:") == 1
    alone = tmp_path / "alone"
    assert 0 not in ends(start_ranks(2, [MINI, "--run", str(tmp_path / "one")], alone, own={1: ["--gpus", "2"]}))
    assert re.search(r"error: rank 1 \(.*\) failed: --gpus starts the ranks itself", said(alone))
    assert said(alone).count("error:") == 1


SCRIPT = """
import os, signal, sys, time
signal.signal(signal.SIGTERM, lambda *_: {on_term})
rank = int(os.environ["RANK"])
{body}
"""


def script(body: str, on_term: str = "sys.exit(0)") -> list[str]:
    return [sys.executable, "-S", "-c", SCRIPT.format(body=body, on_term=on_term)]


def test_the_launcher_gives_each_rank_its_place_and_returns_the_code_of_rank_0() -> None:
    body = "sys.exit(0 if rank else int(os.environ['LOCAL_RANK'] + os.environ['WORLD_SIZE']))"
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    assert launch(script(body), 3)[0] == 3  # of "03"
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before


def test_the_launcher_says_how_a_rank_ended_that_could_not_speak(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.ranks.launch.END_SECONDS", 0.2)
    code, cause = launch(script("os.kill(os.getpid(), signal.SIGSEGV) if rank else time.sleep(60)"), 2)
    assert code == 1
    assert re.fullmatch(r"rank 1 \(pid \d+\) was killed by SIGSEGV", cause or "")


def test_ranks_that_end_by_the_signal_that_was_passed_on_have_not_failed() -> None:
    """It may come while they start, before they can save; the exit code tells a job to come back."""
    body = "signal.signal(signal.SIGTERM, signal.SIG_DFL)\nif rank == 0: time.sleep(1); os.kill(os.getppid(), 15)"
    assert launch(script(f"{body}\ntime.sleep(60)"), 2) == (128 + signal.SIGTERM, None)


def test_a_second_signal_that_interrupts_a_look_at_a_rank_ends_the_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """`Popen.poll` holds a lock while it looks, so a signal handler must not wait for the process."""
    monkeypatch.setattr("agent_r1.ranks.launch.SAME_SECONDS", -1.0)
    with Popen(script("time.sleep(60)", on_term="None"), env={"RANK": "0"}) as process:
        launched = Launched(HashStore(), {0: process})
        launched._pass_on(signal.SIGTERM, None)
        with process._waitpid_lock:  # type: ignore[attr-defined]
            second = threading.Thread(target=launched._pass_on, args=(signal.SIGTERM, None), daemon=True)
            second.start()
            second.join(10)
            assert not second.is_alive()
        launched.wait()
        assert process.returncode < 0
