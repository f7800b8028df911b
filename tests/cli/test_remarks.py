"""The remarks at the end of a training run."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.cli.remarks import remarks
from agent_r1.config import load_config
from agent_r1.runs.run_dir import RunDir
from agent_r1.types import Failure, Group, StopReason, TaskRow, Trajectory

MINI = str(Path(__file__).parents[1] / "mini")
ROW = TaskRow(prompt=[{"role": "user", "content": "?"}], row_id="r")


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    return RunDir.create(tmp_path / "run", load_config(MINI, []))


def record(step: int, *, empty: float = 0.0, success: float = 0.5, error: float = 0.0) -> dict[str, float]:
    return {"step": step, "empty_update": empty, "success": success, "stop/error": error, "group/count": 3.0}


def said(run: RunDir, *trained: dict[str, float], start: int = 0, steps: int = 4, total: int = 4) -> list[str]:
    return remarks(run, trained, start=start, steps=steps, total=total)


def failed_episodes(run: RunDir, step: int, *failures: Failure) -> None:
    episodes = [
        Trajectory(row_id="r", trajectory_id=f"{step}-{n}", steps=[], stop=StopReason.ERROR, failure=failure)
        for n, failure in enumerate(failures)
    ]
    run.write_trajectories("train", step, [Group(row=ROW, trajectories=episodes)])


def test_a_run_that_went_well_has_nothing_to_say(run: RunDir) -> None:
    assert said(run, record(1), record(2, empty=1.0)) == []
    assert said(run, steps=0, total=0) == []  # nor one without any step


def test_what_helps_depends_on_what_was_earned(run: RunDir) -> None:
    [hard] = said(run, record(1, empty=1.0, success=0.0), record(2, empty=1.0, success=1.0))
    assert all(name in hard for name in ("sft.count", "sft.epochs", "easier rows", "rollout.group_size"))
    [easy] = said(run, record(1, empty=1.0, success=1.0))
    assert "harder rows" in easy
    [failed] = said(run, record(1, empty=1.0, success=0.0, error=1.0))
    assert failed == "failed      12 of 12 training episodes"


def test_the_cause_is_that_of_the_step_with_most_failures(run: RunDir) -> None:
    other = Failure(kind="timeout", message="too slow")
    failures = [Failure(kind="KeyError", message=f"KeyError: {key}", place="task.py:7") for key in ("x" * 300, "y")]
    failed_episodes(run, 1, other)
    failed_episodes(run, 2, *failures, other)
    [line] = said(run, record(1, error=1 / 12), record(2, error=3 / 12))
    assert line.startswith("failed      4 of 24 training episodes, in step 2 mostly: KeyError: xxx")
    assert line.endswith("x (task.py:7)")
    assert len(line) < 280


def test_episodes_that_cannot_be_read_cost_the_cause_alone(run: RunDir) -> None:
    failed_episodes(run, 1, Failure(kind="timeout", message="too slow"))
    file = run.trajectories_file("train", 1)
    file.write_text("{\n", encoding="utf-8")
    run.log_file.unlink(missing_ok=True)
    [line] = said(run, record(1, error=1 / 12))
    assert line.startswith(f"failed      1 of 12 training episodes ({file} line ")


def summarising(tmp_path: Path) -> RunDir:
    settings = [f"context.{setting}" for setting in ("policy=summary", "max_tokens=40", "summary_tokens=8")]
    return RunDir.create(tmp_path / "summarising", load_config(MINI, ["sft.demos=null", *settings]))


def wrote(step: int, *, summaries: float, actions: float) -> dict[str, float]:
    return {**record(step), "context/summaries": summaries, "episode/steps": actions}


def test_many_summaries_are_counted_and_point_to_the_setting(tmp_path: Path) -> None:
    # 3 groups of 4: 12 episodes a step; 12 * (2 + 1) summaries, 12 * (3 + 3) actions
    [line] = said(summarising(tmp_path), wrote(1, summaries=2.0, actions=3.0), wrote(2, summaries=1.0, actions=3.0))
    assert line.startswith("summaries   36 for 72 actions")
    assert "context.max_tokens=40" in line


def test_summaries_now_and_then_are_nothing_to_remark_on(tmp_path: Path, run: RunDir) -> None:
    assert said(summarising(tmp_path), wrote(1, summaries=1.0, actions=3.0)) == []
    assert said(summarising(tmp_path / "b"), record(1) | {"episode/steps": 0.0}) == []  # no episode came so far
    assert said(run, wrote(1, summaries=3.0, actions=3.0)) == []  # not this run's policy


def showing(tmp_path: Path, *context: str) -> RunDir:
    settings = [f"context.{setting}" for setting in context]
    return RunDir.create(tmp_path / "-".join(context), load_config(MINI, ["sft.demos=null", *settings]))


def showed(step: int, *, hidden: float | None, actions: float = 3.0) -> dict[str, float]:
    told = {} if hidden is None else {"context/hidden_messages": hidden, "context/summaries": 0.0}
    return {**record(step), "episode/steps": actions, **told}


@pytest.mark.parametrize(
    ("settings", "setting"),
    [
        (("policy=window", "turns=20"), "context.turns=20"),
        (("policy=drop_results", "keep=9"), "context.keep=9"),
        (("policy=notes", "turns=8"), "context.turns=8"),
        (("policy=summary", "max_tokens=40", "summary_tokens=8"), "context.max_tokens=40 and context.keep_turns=1"),
    ],
)
def test_a_policy_that_left_nothing_out_is_told_with_what_was_too_large(
    tmp_path: Path, settings: tuple[str, ...], setting: str
) -> None:
    run, policy = showing(tmp_path, *settings), settings[0].removeprefix("policy=")
    [line] = said(run, showed(1, hidden=0.0), showed(2, hidden=0.0))
    assert line.startswith(f"context     {policy} ")
    assert line.endswith(setting)
    assert said(run, showed(1, hidden=0.0), showed(2, hidden=0.1)) == []
    assert said(run, showed(1, hidden=None, actions=0.0)) == []  # nobody acted


def test_replies_without_thinking_have_nothing_to_strip(tmp_path: Path) -> None:
    stripping = showing(tmp_path, "reasoning=strip")
    (line,) = said(stripping, showed(1, hidden=0.0))
    assert line == "context     reasoning=strip left nothing out: no earlier reply held any thinking"
    assert said(stripping, showed(1, hidden=0.5)) == []
    assert said(showing(tmp_path, "reasoning=keep"), showed(1, hidden=None)) == []


def test_a_policy_that_the_flow_never_asked_is_told(tmp_path: Path, run: RunDir) -> None:
    [line] = said(showing(tmp_path, "policy=window"), showed(1, hidden=None))
    assert "agent_env_loop" in line
    assert "episode.act" in line
    assert said(run, showed(1, hidden=None)) == []  # append: there is none


def test_a_rewrite_that_leaves_nothing_out_may_have_added_something(tmp_path: Path) -> None:
    rewriting = showing(tmp_path, "policy=rewrite", "function=task.rewrite")
    assert said(rewriting, showed(1, hidden=0.0)) == []


def test_how_to_continue(run: RunDir) -> None:
    [left] = said(run, record(1), steps=1)
    assert f"train --resume {run.path} " in left
    assert "3 steps" in left
    [done] = said(run, record(1), start=4)
    assert "trainer.steps=N" in done


def test_refused_updates_are_counted_with_their_cause(run: RunDir) -> None:
    [line] = said(run, record(1), record(2) | {"skipped_updates": 2.0, "nonfinite_advantages": 3.0})
    assert "2 optimizer steps in 1 of 2 training steps" in line
    assert "advantages were not finite in 1 of them" in line
    [line] = said(run, record(1), record(2) | {"skipped_updates": 1.0})
    assert "learner.lr" in line


def test_demonstrations_are_advised_only_where_there_are_none(tmp_path: Path) -> None:
    bare = RunDir.create(tmp_path / "bare", load_config(MINI, ["sft.demos=null"]))
    [hard] = said(bare, record(1, empty=1.0, success=0.0))
    assert "sft.demos" in hard
    assert "sft.count" not in hard
