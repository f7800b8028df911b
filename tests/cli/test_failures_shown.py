"""Episodes that fail are no secret: what the screen says of them, step by step, at the end and when a run breaks."""

from __future__ import annotations

import json
import logging
import re
import shutil
import traceback
from pathlib import Path

import pytest

from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.runs.run_log import MAX_RECORD_CHARS, logging_to
from tests.conftest import Cli

MINI = Path(__file__).parents[1] / "mini"
CODE = '''

class Moody(Endless):
    """Does not know every third row."""

    async def reset(self, row: TaskRow) -> Observation:
        known = {f"{split}-{i}" for split in ("train", "test") for i in range(20) if i % 3 != 1}
        if row.row_id not in known:
            raise KeyError(f"[/b] {row.row_id}")  # what rich would take for markup
        return await super().reset(row)


class Slow(Endless):
    """Never begins."""

    async def reset(self, row: TaskRow) -> Observation:
        import asyncio

        await asyncio.sleep(60)
        raise AssertionError
'''
# Every step plays all 12 rows, of which 1, 4, 7 and 10 fail.
WHOLE = ("task.tools=[]", "task.train_count=12", "sft.demos=null", "rollout.rows_per_step=12", "rollout.group_size=2")
MOODY = ("task.env=task.Moody", *WHOLE, "rollout.max_response_tokens=8", "trainer.steps=2")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory, cache: None) -> Path:
    made = tmp_path_factory.mktemp("recipes") / "moody"
    shutil.copytree(MINI, made, ignore=shutil.ignore_patterns("__pycache__"))
    with (made / "task.py").open("a", encoding="utf-8") as file:
        file.write(CODE)
    return made


BROKEN = '''
import math

from agent_r1.learn.algorithms import ALGORITHMS, Algorithm, get_algorithm
from agent_r1.learn.credit import Credit


def doubtful(groups):
    """Not a number for the first attempt at each row but one."""
    return [
        [
            Credit(advantages=item.spread([math.nan if first and n == 0 else 1.0] * len(item.decisions)))
            for n, item in enumerate(group)
        ]
        for first, group in enumerate(groups)
    ]


ALGORITHMS["doubtful"] = Algorithm(name="doubtful", paper="none", credit=doubtful, loss=get_algorithm("grpo").loss)
'''


def test_advantages_that_are_not_finite_are_shown_with_their_rows_and_counted(
    cli: Cli, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ALGORITHMS, "doubtful", ALGORITHMS["grpo"])  # removes what the recipe registers when undone
    recipe = shutil.copytree(folder, tmp_path / "recipe")
    (recipe / "broken.py").write_text(BROKEN, encoding="utf-8")
    with (recipe / "task.py").open("a", encoding="utf-8") as task:
        task.write("\nfrom . import broken\n")
    run = tmp_path / "run"
    few = ("rollout.rows_per_step=3", "rollout.group_size=2", "trainer.steps=2", "rollout.max_response_tokens=8")
    plain = ("task.env=task.Endless", "task.tools=[]", "sft.demos=null", "algorithm.name=doubtful", *few)
    ended = cli("train", recipe, *plain, "--run", run)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    told = [line for line in lines if line.startswith("doubtful: 2 of 6 trajectories")]
    assert len(told) == 2
    assert all(re.search(r"\(rows train-\d+, train-\d+\)", line) for line in told)
    assert all("  updates refused 1  " in line for line in lines if line.startswith("training "))
    assert "  refused     2 optimizer steps in 2 of 2 training steps, loss or gradient not finite" in ended.out
    records = [json.loads(line) for line in (run / "metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    assert [r["nonfinite_advantages"] for r in records if r["kind"] == "train"] == [2.0, 2.0]


def raising_line(folder: Path) -> int:
    lines = (folder / "task.py").read_text(encoding="utf-8").splitlines()
    [number] = [number for number, line in enumerate(lines, 1) if "raise KeyError" in line]
    return number


def test_failed_episodes_are_shown_at_every_step_and_at_the_end(cli: Cli, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    ended = cli("train", folder, *MOODY, "--run", run)
    assert ended.code == 0, ended.err
    lines = ended.out.splitlines()
    steps = [line for line in lines if line.startswith("training ")]
    assert len(steps) == 2
    assert all("  errors 33.3%  steps/episode" in line for line in steps)  # 4 of 12 rows
    held_out = [line for line in lines if line.startswith("step ")]
    assert len(held_out) == 2  # before and after
    assert all(line.endswith("of 4 rows  errors 25%") for line in held_out)  # row 1 of 0 to 3
    [failed] = [line for line in lines if line.startswith("  failed")]
    # 2 steps x 4 rows x 2 attempts, of 2 x 12 x 2
    begins, place = "  failed      16 of 48 training episodes, in step 1 mostly: KeyError: ", raising_line(folder)
    assert failed.startswith(f"{begins}'[/b] train-")
    assert failed.endswith(f"' (task.py:{place}); details in {run}/run.log")
    assert lines[-1] == f"  look inside {run}/metrics.jsonl, {run}/trajectories/, {run}/run.log"


def test_a_run_that_breaks_by_failures_says_the_common_cause_and_where_tracebacks_are(
    cli: Cli, folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    ended = cli("train", folder, *MOODY, "rollout.max_error_fraction=0.3", "eval.rows=1", "--run", run)
    assert ended.code != 0
    said = "error: 8 of 24 episodes failed (rollout.max_error_fraction is 0.3); most common cause, 8 times: KeyError: "
    assert ended.err.startswith(f"{said}'[/b] train-")  # of four rows: one bug all the same
    assert ended.err.endswith(f"' (task.py:{raising_line(folder)}); details in {run}/run.log\n")
    log = (run / "run.log").read_text(encoding="utf-8")
    assert log.count("in reset\n    raise KeyError") == 8


def test_what_ran_out_of_time_left_no_traceback_and_none_is_promised(cli: Cli, folder: Path, tmp_path: Path) -> None:
    slow = ("task.env=task.Slow", *MOODY[1:], "rollout.episode_seconds=0.1", "eval.rows=1")
    ended = cli("train", folder, *slow, "--run", tmp_path / "run")
    assert ended.err == (
        "error: 1 of 1 episodes failed (rollout.max_error_fraction is 0.5); most common cause, 1 times: "
        "the episode was not finished after 0.1 s (rollout.episode_seconds)\n"
    )


def test_a_run_that_learned_nothing_says_why(cli: Cli, folder: Path, tmp_path: Path) -> None:
    short = ("sft.demos=null", "rollout.max_response_tokens=4", "trainer.steps=1", "eval.rows=2")
    alike = cli("train", folder, *short, "rollout.temperature=0.001", "--run", tmp_path / "alike").out
    assert "  learned     nothing: attempts at the same row never earned different rewards" in alike


def test_an_evaluation_logs_the_failures_of_its_episodes_to_the_run(cli: Cli, folder: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", folder, *MOODY, "trainer.steps=0", "eval.rows=1", "--run", run).code == 0  # row 0 is known
    (run / "run.log").unlink(missing_ok=True)
    ended = cli("eval", run, "eval.rows=3")
    assert ended.code == 0, ended.err
    assert "Traceback" not in ended.out + ended.err
    assert "KeyError" in (run / "run.log").read_text(encoding="utf-8")
    [line] = [line for line in ended.out.splitlines() if line.startswith("  failed ")]
    assert " of 3 episodes, mostly: " in line
    assert "KeyError" in line
    assert line.endswith(f"; details in {run / 'run.log'}")


def fail_deeply(levels: int) -> None:
    """A traceback whose lines all differ, so that Python does not shorten it."""
    if levels == 0:
        raise ValueError("the innermost " + "x" * 10_000_000 + " failure")
    exec("fail_deeply(levels - 1)\n" if levels % 2 else "\nfail_deeply(levels - 1)", globals(), {"levels": levels})


def test_long_tracebacks_are_cut_in_the_middle(tmp_path: Path) -> None:
    with logging_to(tmp_path / "run.log"):
        try:
            fail_deeply(200)
        except ValueError:
            logging.getLogger("agent_r1.rollout").exception("episode 3 failed")
    text = (tmp_path / "run.log").read_text(encoding="utf-8")
    assert len(text) < MAX_RECORD_CHARS + 100
    assert " episode 3 failed\nTraceback (most recent call last):\n" in text
    assert re.search(r"\n\[\d+ characters cut\]\nx", text)
    assert text.endswith("xxx failure\n")


def test_a_short_traceback_is_kept_as_it_is(tmp_path: Path) -> None:
    with logging_to(tmp_path / "run.log"):
        try:
            raise KeyError("a")
        except KeyError:
            logging.getLogger("agent_r1.rollout").exception("episode 3 failed")
            expected = traceback.format_exc()
    assert (tmp_path / "run.log").read_text(encoding="utf-8").partition("\n")[2] == expected


def test_failures_that_never_end_do_not_fill_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("agent_r1.runs.run_log.MAX_CHARS", 10_000)
    with logging_to(tmp_path / "run.log"):
        for number in range(100):
            logging.getLogger("agent_r1.rollout").error("episode %d failed\n%s", number, "line\n" * 50)
    text = (tmp_path / "run.log").read_text(encoding="utf-8")
    lines = text.splitlines()
    assert sum(" failed" in line for line in lines) == 100  # every one is mentioned
    assert 0 < text.count("line\n") * len("line\n") <= 10_000  # all of them would be 25,000
    assert lines[-1].endswith("episode 99 failed")
    assert text.count("10,000 characters") == 1


def test_text_that_is_no_unicode_reaches_the_log(tmp_path: Path) -> None:
    with logging_to(tmp_path / "run.log"):
        logging.getLogger("agent_r1.rollout").error("half a pair: \ud800")
    assert (tmp_path / "run.log").read_text(encoding="utf-8").endswith("half a pair: \\ud800\n")


def test_what_cannot_be_logged_to_the_run_is_still_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with logging_to(tmp_path / "read only" / "run.log"):
        logging.getLogger("agent_r1.rollout").error("episode 3 failed")
    assert "episode 3 failed" in capsys.readouterr().err
