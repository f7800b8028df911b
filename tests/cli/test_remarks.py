"""What a run says for itself at its end, each remark by itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.cli.remarks import remarks
from agent_r1.config import load_config
from agent_r1.runs.run_dir import RunDir
from agent_r1.types import Failure, Group, Step, StopReason, SummaryQuality, TaskRow, Trajectory

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
    larger = "easier rows, or a larger group (rollout.group_size)"
    assert hard.endswith(f"What helps: more demonstrations (sft.count, sft.epochs), {larger}")
    [easy] = said(run, record(1, empty=1.0, success=1.0))
    assert easy.endswith("What helps: harder rows")
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
    file.write_bytes(file.read_bytes()[:20])
    run.log_file.unlink(missing_ok=True)
    [line] = said(run, record(1, error=1 / 12))
    assert line.startswith(f"failed      1 of 12 training episodes ({file} line ")


def summarising(tmp_path: Path) -> RunDir:
    settings = [f"context.{setting}" for setting in ("policy=summary", "max_tokens=40", "summary_tokens=8")]
    return RunDir.create(tmp_path / "summarising", load_config(MINI, ["sft.demos=null", *settings]))


def wrote(step: int, *, summaries: float, actions: float) -> dict[str, float]:
    return {**record(step), "context/summaries": summaries, "episode/steps": actions}


def sampled(prompt_tokens: int, summary: SummaryQuality | None = None) -> Step:
    return Step(prompt_ids=[1] * prompt_tokens, response_ids=[2], response_logprobs=[0.0], summary=summary)


def test_many_summaries_are_told_with_what_they_leave_and_what_to_do(tmp_path: Path) -> None:
    run = summarising(tmp_path)
    steps = [sampled(30), sampled(50, "whole"), sampled(44), sampled(60, "cut"), sampled(48), sampled(61, "cut")]
    episode = Trajectory(row_id="r", trajectory_id="t", steps=steps, stop=StopReason.MAX_TOKENS)
    run.write_trajectories("train", 2, [Group(row=ROW, trajectories=[episode])])
    # 3 groups of 4: 12 episodes a step; 12 * (2 + 1) summaries, 12 * (3 + 3) actions; (44 + 48) / 2 tokens
    [line] = said(run, wrote(1, summaries=2.0, actions=3.0), wrote(2, summaries=1.0, actions=3.0))
    assert line == (
        "summaries   36 for 72 actions: context.max_tokens=40 leaves little room, as prompts right after one have 46 "
        "tokens (median). Raise context.max_tokens"
    )


def test_summaries_now_and_then_are_nothing_to_remark_on(tmp_path: Path, run: RunDir) -> None:
    assert said(summarising(tmp_path), wrote(1, summaries=1.0, actions=3.0)) == []
    assert said(summarising(tmp_path / "b"), record(1) | {"episode/steps": 0.0}) == []  # no episode came so far
    assert said(run, wrote(1, summaries=3.0, actions=3.0)) == []  # not this run's policy


def test_without_episodes_that_can_be_read_many_summaries_are_told_all_the_same(tmp_path: Path) -> None:
    run = summarising(tmp_path)
    [line] = said(run, wrote(1, summaries=3.0, actions=3.0))
    assert line.endswith("36 for 36 actions: context.max_tokens=40 leaves little room. Raise context.max_tokens")
    run.write_trajectories("train", 1, [])
    run.trajectories_file("train", 1).write_bytes(b"no such thing")
    [line] = said(run, wrote(1, summaries=3.0, actions=3.0))
    assert str(run.trajectories_file("train", 1)) in line


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
        (
            ("policy=summary", "max_tokens=40", "summary_tokens=8"),
            "context.max_tokens=40 and context.keep_turns=1",
        ),
    ],
)
def test_a_policy_that_left_nothing_out_is_told_with_what_was_too_large(
    tmp_path: Path, settings: tuple[str, ...], setting: str
) -> None:
    run, policy = showing(tmp_path, *settings), settings[0].removeprefix("policy=")
    assert said(run, showed(1, hidden=0.0), showed(2, hidden=0.0)) == [
        f"context     {policy} showed everything, as append does: no conversation was too long for {setting}"
    ]
    assert said(run, showed(1, hidden=0.0), showed(2, hidden=0.1)) == []
    assert said(run, showed(1, hidden=None, actions=0.0)) == []  # nobody acted


def test_a_policy_that_the_flow_never_asked_is_told(tmp_path: Path, run: RunDir) -> None:
    [line] = said(showing(tmp_path, "policy=window"), showed(1, hidden=None))
    assert line == (
        "context     window was not used: agent_env_loop says uses_context = True, and does not pass "
        "context=self.context to episode.act"
    )
    assert said(run, showed(1, hidden=None)) == []  # append: there is none


def test_a_rewrite_that_leaves_nothing_out_may_have_added_something(tmp_path: Path) -> None:
    rewriting = showing(tmp_path, "policy=rewrite", "function=task.rewrite")
    assert said(rewriting, showed(1, hidden=0.0)) == []


def test_how_to_go_on(run: RunDir) -> None:
    [left] = said(run, record(1), steps=1)
    assert left.endswith(f"train --resume {run.path} (trainer.max_minutes ran out, steps left: 3)")
    assert said(run, record(1), start=4) == ["go on       already at step 4 of 4; trainer.steps=N goes on"]


def test_refused_updates_are_counted_with_their_cause(run: RunDir) -> None:
    refused = record(2) | {"skipped_updates": 2.0, "nonfinite_advantages": 3.0}
    what = "in 1 of 2 training steps, loss or gradient not finite"
    assert said(run, record(1), refused) == [
        f"refused     2 optimizer steps {what}; advantages were not finite in 1 of them"
    ]
    assert said(run, record(1), record(2) | {"skipped_updates": 1.0}) == [
        f"refused     1 optimizer steps {what}; look for a lower lr"
    ]


def test_demonstrations_are_advised_only_where_there_are_none(tmp_path: Path) -> None:
    bare = RunDir.create(tmp_path / "bare", load_config(MINI, ["sft.demos=null"]))
    [hard] = said(bare, record(1, empty=1.0, success=0.0))
    assert "What helps: demonstrations (sft.demos), easier rows" in hard
