"""Compare: the right evaluations are found, only like is compared with like, and the verdict says what was shown."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from agent_r1.config import parse_config
from agent_r1.data.panels import panel_hash
from agent_r1.errors import ConfigError, DataError
from agent_r1.runs.compare import find_sides, show_comparisons
from agent_r1.runs.outcomes import EvalRecord, Subject, by_row, eval_file, keep, row_outcomes, stem_of
from agent_r1.runs.run_dir import RunDir
from agent_r1.types import Group, Step, StopReason, Trajectory
from tests.chatml import row

CONFIG = parse_config({"recipe": "x", "task": {"rows": "task.rows", "reward": "task.reward"}, "model": {"path": "a/b"}})
SETTINGS = CONFIG.model_dump(mode="json")
SUBJECT = Subject.of(SETTINGS, model="a/b", panel="p")


def episode(row_id: str, reward: float, *, attempt: int = 0, failed: bool = False, **parts: float) -> Trajectory:
    step = Step(prompt_ids=[1], response_ids=[2], response_logprobs=[-1.0], reward=0.25)
    return Trajectory(
        row_id=row_id,
        trajectory_id=f"{row_id}#{attempt}",
        steps=[step],
        stop=StopReason.ERROR if failed else StopReason.ANSWERED,
        outcome_reward=reward,
        reward_components={"reward": reward, **parts},
    )


def evaluated(run: RunDir, step: int, rewards: Sequence[float]) -> None:
    """As a trainer leaves an evaluation behind."""
    rows = [row(f"r{i:02d}") for i in range(len(rewards))]
    groups = [Group(row=r, trajectories=[episode(r.row_id, reward)]) for r, reward in zip(rows, rewards, strict=True)]
    run.append_metrics("eval", step, {"success": sum(rewards) / len(rewards)}, panel=panel_hash(rows))
    run.write_trajectories("eval", step, groups)


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """20 rows; of them 2 are solved at first, 4 after 5 steps, 14 after 10."""
    made = RunDir.create(tmp_path / "run", CONFIG)
    for step, solved in ((0, 2), (5, 4), (10, 14)):
        evaluated(made, step, [float(i < solved) for i in range(20)])
    return made


def stored(path: Path, rewards: Mapping[str, float], **changes: object) -> Path:
    outcomes = row_outcomes({name: [episode(name, reward)] for name, reward in rewards.items()}, success_reward=1.0)
    subject = replace(SUBJECT, **changes)  # type: ignore[arg-type]
    EvalRecord(subject=subject, outcomes=outcomes, metrics={"success": 0.5}).save(path)
    return path


def shown(places: Sequence[Path], *, measure: str = "success", step: str | None = None, name: str | None = None) -> str:
    console = Console(file=io.StringIO(), width=40)
    show_comparisons(find_sides(places, step=step, name=name), console, measure=measure)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_outcomes_by_hand() -> None:
    attempts = by_row(
        [
            episode("a", 1.0, f1=0.5),
            episode("b", 0.5),
            episode("a", 0.0, attempt=1, f1=0.25),
            episode("b", 1.0, attempt=1, failed=True, f1=1.0),
        ]
    )
    assert row_outcomes(attempts, success_reward=0.5) == {
        # success: 1 and 0; reward: 0.25 for the step, then 1 and 0; f1: 0.5 and 0.25
        "a": {"success": 0.5, "reward": 0.75, "reward_part/f1": 0.375},
        # the second attempt failed and counts 0 in everything; the first has no f1
        "b": {"success": 0.5, "reward": 0.375, "reward_part/f1": 0.0},
    }


def test_before_and_after_training_are_told_apart(run: RunDir) -> None:
    text = shown([run.path, run.path], step="first,last")
    # 12 of 20 rows differ, all won: mean 0.6, variance 0.24 * 20 / 19, error 0.1124, t(19) = 2.093: +- 23.5 points
    assert "B is better than A: +60.0 points of success, 95 % interval 36.5 to 83.5" in text
    assert f"A  {run.path}, step 0\nB  {run.path}, step 10\n" in text  # not wrapped: paths are there to be copied
    line = next(line for line in text.splitlines() if line.startswith("A -> B  success"))
    assert line.split()[4:] == ["10.0", "70.0", "+60.0", "+36.5", "to", "+83.5", "12", "0", "8"]
    assert "A is better than B: +60.0 points of success, 95 % interval 36.5 to 83.5" in shown(
        [run.path, run.path], step="last,first"
    )
    assert shown([run.path], step="first,last") == text  # a run alone is compared with itself


def test_two_rows_more_show_no_difference(run: RunDir) -> None:
    text = shown([run.path, run.path], step="0,5")
    assert "no difference shown, B against A: +10.0 points of success, 95 % interval -4.4 to 24.4" in text
    assert "only 2 rows differ" in text
    assert "no difference shown, B against A: -10.0 points" in shown([run.path, run.path], step="5,0")
    assert shown([run.path], step="0,5") == text  # a run may be named once


def test_a_run_with_itself_is_no_different(run: RunDir) -> None:
    assert "+0.0 points of success, 95 % interval 0.0 to 0.0; only 0 rows differ" in shown([run.path, run.path])


def test_several_runs_are_each_compared_with_the_first(run: RunDir) -> None:
    text = shown([run.path] * 3, step="0,5,10", measure="reward")
    assert "no difference shown, B against A: +0.100 of reward" in text
    assert "C is better than A: +0.600 of reward, 95 % interval 0.365 to 0.835" in text
    assert [line.split("  ")[0] for line in text.splitlines() if "->" in line] == ["A -> B"] * 2 + ["A -> C"] * 2


def test_files_and_runs_mix_and_named_evaluations_are_found(run: RunDir) -> None:
    rewards = {f"r{i:02d}": float(i < 14) for i in range(20)}
    panel = panel_hash([row(name) for name in rewards])
    file = stored(run.evals / "best.json", rewards, panel=panel)
    assert f"A  {run.path}, step 10\nB  {file}\n" in shown([run.path, file])
    assert f"A  {file}\nB  {file}\n" in shown([run.path, run.path], name="best")
    with pytest.raises(ConfigError, match=r"has no evaluation 'bset'. Did you mean 'best'\?"):
        shown([run.path, run.path], name="bset")
    with pytest.raises(ConfigError, match=r"best\.json is a single evaluation"):
        shown([file, run.path], step="last")


def test_other_rows_are_refused_with_both_panels(run: RunDir, tmp_path: Path) -> None:
    other = RunDir.create(tmp_path / "other", CONFIG)
    evaluated(other, 0, [1.0] * 19)
    with pytest.raises(ConfigError, match=r"\w{12} \(20 rows of 'test'\), B .* \w{12} \(19 rows"):
        shown([run.path, other.path])


def test_a_side_that_lost_rows_is_refused(tmp_path: Path) -> None:
    whole = stored(tmp_path / "whole.json", {"a": 1.0, "b": 0.0})
    torn = stored(tmp_path / "torn.json", {"a": 1.0})
    with pytest.raises(DataError, match="damaged"):
        shown([whole, torn])
    with pytest.raises(ConfigError, match="single row"):
        shown([torn, torn])


def test_what_else_differs_is_said(tmp_path: Path) -> None:
    rewards = {"a": 1.0, "b": 0.0}
    hot = {**SUBJECT.settings, "temperature": 1.0}
    greedy, sampled = stored(tmp_path / "a.json", rewards), stored(tmp_path / "b.json", rewards, settings=hot, seed=3)
    note = "note: settings differ: temperature 0.0 (A), 1.0 (B); seed 0 (A), 3 (B)"
    assert note in shown([greedy, sampled])
    tools = Subject.of({**SETTINGS, "task": {**SETTINGS["task"], "tools": ["task.oracle"]}}, model="a/b", panel="p")
    helped = stored(tmp_path / "d.json", rewards, settings=tools.settings)
    assert "note: settings differ: tools [] (A), ['task.oracle'] (B)" in shown([greedy, helped])
    other_seed = stored(tmp_path / "c.json", rewards, seed=3)
    assert "note" not in shown([greedy, other_seed])  # greedy attempts have no use for a seed


def test_the_number_format_and_the_time_of_an_episode_make_another_evaluation(tmp_path: Path) -> None:
    def of(dtype: str, seconds: float) -> Subject:
        rollout = {**SETTINGS["rollout"], "episode_seconds": seconds}
        return Subject.of({**SETTINGS, "rollout": rollout}, model="a/b", panel="p", dtype=dtype)

    rewards = {"a": 1.0, "b": 0.0}
    usual, other = of("float32", 300.0), of("bfloat16", 1.0)
    first = stored(eval_file(tmp_path, usual, name=None, stem="m"), rewards, settings=usual.settings)
    second = stored(eval_file(tmp_path, other, name=None, stem="m"), rewards, settings=other.settings)
    assert (first.name, second.name) == ("m.json", "m-2.json")
    note = "settings differ: episode_seconds 300.0 (A), 1.0 (B); dtype float32 (A), bfloat16 (B)\n"
    assert f"\nnote: {note}" in shown([first, second])


def test_workers_limit_episodes_too_but_their_number_does_not_matter() -> None:
    def settings(**workers: float) -> Mapping[str, object]:
        config = parse_config(SETTINGS | {"task": SETTINGS["task"] | {"workers": workers}})
        return Subject.of(config.model_dump(mode="json"), model="m", panel="p").settings

    assert settings(processes=2) == settings(processes=4) != settings(processes=2, step_seconds=1)


def test_limits_of_roles_make_another_evaluation_but_their_temperatures_do_not() -> None:
    def settings(**roles: Mapping[str, float]) -> Mapping[str, object]:
        config = parse_config(SETTINGS | {"rollout": {**SETTINGS["rollout"], "roles": roles}})
        return Subject.of(config.model_dump(mode="json"), model="m", panel="p").settings

    assert settings() == settings(critic={"temperature": 2.0})
    assert settings() != settings(critic={"max_response_tokens": 8}) != settings(critic={"max_response_tokens": 9})


def test_what_one_side_does_not_say_is_no_known_difference(run: RunDir, tmp_path: Path) -> None:
    rewards = {f"r{i:02d}": float(i < 14) for i in range(20)}
    panel = panel_hash([row(name) for name in rewards])
    told = Subject.of(SETTINGS, model="a/b", panel=panel, dtype="float32").settings
    older = {name: value for name, value in told.items() if name not in ("dtype", "episode_seconds")}
    new = stored(tmp_path / "new.json", rewards, panel=panel, settings=told)
    old = stored(tmp_path / "old.json", rewards, panel=panel, settings=older)
    assert "\nnote: settings differ: dtype auto (A), float32 (B)\n" in shown([run.path, new])
    text = shown([old, new])
    assert "note: settings differ: " in text
    assert "episode_seconds not recorded (A), 300.0 (B)" in text
    assert "note" not in shown([old, old])
    with pytest.raises(ConfigError, match=r"old\.json holds a different evaluation"):  # as far as anybody knows
        eval_file(tmp_path, EvalRecord.load(new).subject, name="old", stem="m")


def test_of_what_a_run_notes_down_only_measurements_are_metrics(run: RunDir) -> None:
    side, _ = find_sides([run.path, run.path], step="last", name=None)
    assert side.record.metrics == {"success": 0.7}
    assert side.record.time == run.read_metrics("eval")[-1]["time"]


def test_steps_and_measures_that_do_not_exist_are_refused(run: RunDir) -> None:
    two = [run.path, run.path]
    for problem, message in (
        ({"step": "7"}, r"--step 7: .* 0, 5, 10;"),
        ({"step": "frist"}, r"--step frist: .* 0, 5, 10;"),
        ({"step": "0,5,10"}, r"--step 0,5,10: .* each of the 2 "),
        ({"step": "0", "name": "best"}, r"--step .* --name"),
        ({"measure": "sucess"}, r"'sucess'. Did you mean 'success'\?"),
    ):
        with pytest.raises(ConfigError, match=message):
            shown(two, **problem)
    with pytest.raises(ConfigError, match="--step first,last"):
        shown([run.path])


def test_a_run_without_evaluations_says_where_they_come_from(tmp_path: Path) -> None:
    run = RunDir.create(tmp_path / "run", CONFIG)
    with pytest.raises(ConfigError, match=r"never evaluated .* agent-r1 eval "):
        shown([run.path, run.path])
    stored(run.evals / "later.json", {"a": 1.0})
    with pytest.raises(ConfigError, match=r"later\.json"):
        shown([run.path, run.path])


def test_an_evaluation_round_trips_through_its_file(tmp_path: Path) -> None:
    path = stored(tmp_path / "evals" / "a.json", {"ü": 1 / 3, "b": 0.0})
    record = EvalRecord.load(path)
    assert (record.subject, record.metrics) == (SUBJECT, {"success": 0.5})
    assert record.outcomes["ü"]["reward"] == 1 / 3 + 0.25
    assert record.mean_and_error("success") == (0.0, 0.0)
    again = tmp_path / "again.json"
    record.save(again)
    assert again.read_bytes() == path.read_bytes()


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"format": 9}', '{"format": 1, "outcomes": {}}'])
def test_a_file_that_is_no_evaluation_is_a_clear_error(tmp_path: Path, text: str) -> None:
    (tmp_path / "x.json").write_text(text, encoding="utf-8")
    with pytest.raises(DataError, match=r"x\.json is not an evaluation"):
        EvalRecord.load(tmp_path / "x.json")


def test_an_evaluation_takes_its_own_place_again_and_never_another_ones(tmp_path: Path) -> None:
    def place(subject: Subject, name: str | None = None) -> str:
        path = eval_file(tmp_path, subject, name=name, stem="step_000040")
        EvalRecord(subject=subject, outcomes={"a": {"success": 1.0}}, metrics={}).save(path)
        return path.name

    other = replace(SUBJECT, panel="q")
    assert [place(SUBJECT), place(SUBJECT), place(other), place(other)] == [
        "step_000040.json",
        "step_000040.json",
        "step_000040-2.json",
        "step_000040-2.json",
    ]
    assert place(SUBJECT, "best") == "best.json"
    with pytest.raises(ConfigError, match=r"best\.json holds a different evaluation"):
        place(other, "best")
    with pytest.raises(ConfigError, match=r"--name '\.\./x'"):
        place(other, "../x")


def test_an_evaluation_that_ended_meanwhile_is_not_overwritten(tmp_path: Path) -> None:
    """Two programs evaluate one checkpoint in two ways: when they begin, the place is free for both."""

    def record(panel: str) -> EvalRecord:
        subject = replace(SUBJECT, panel=panel)
        return EvalRecord(subject=subject, outcomes={"a": {"success": 1.0}}, metrics={})

    assert [keep(record(panel), tmp_path / "evals", stem="best").name for panel in "pqp"] == [
        "best.json",
        "best-2.json",
        "best.json",
    ]
    assert EvalRecord.load(tmp_path / "evals" / "best-2.json").subject.panel == "q"


def test_models_have_short_names_for_files() -> None:
    names = [stem_of(model) for model in ("runs/x/checkpoints/step_000040", "Qwen/Qwen2.5-0.5B", "my runs/a b", "..")]
    assert names == ["step_000040", "Qwen2.5-0.5B", "a-b", "model"]


def test_comparing_needs_no_torch(run: RunDir) -> None:
    words = json.dumps(["agent-r1", "compare", str(run.path), str(run.path), "--step", "first,last"])
    code = (
        f"import sys, json; sys.argv = json.loads({words!r})\nfrom agent_r1.cli.app import main\n"
        "try:\n    main()\nexcept SystemExit as end:\n    assert not end.code\nassert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=300, check=True)
    assert "B is better than A: +60.0 points of success" in done.stdout
