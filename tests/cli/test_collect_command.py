"""Collect, imitate the good episodes, train from there, evaluate, compare: the commands one after the other."""

from __future__ import annotations

import shlex
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.runs.outcomes import EvalRecord
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from agent_r1.train.sft import select
from agent_r1.types import Step, StopReason, Trajectory
from tests.conftest import Cli

MINI = str(Path(__file__).parents[1] / "mini")
SHORT = ("rollout.max_response_tokens=12", "rollout.max_steps=2", "sft.demos=null")

pytestmark = pytest.mark.usefixtures("cache")


def trajectory(name: str, row_id: str, reward: float, *, said: int, failed: bool = False) -> Trajectory:
    step = Step(prompt_ids=[1], response_ids=[said], response_logprobs=[-1.0])
    stop = StopReason.ERROR if failed else StopReason.ANSWERED
    return Trajectory(row_id=row_id, trajectory_id=name, steps=[step], stop=stop, outcome_reward=reward)


def test_what_is_imitated_by_hand() -> None:
    played = [
        trajectory("a1", "a", 1.0, said=1),
        trajectory("a2", "a", 2.0, said=2),
        trajectory("a3", "a", 1.0, said=1),  # says what a1 said
        trajectory("b1", "b", 0.5, said=3),  # earned too little
        trajectory("b2", "b", 9.0, said=4, failed=True),
        trajectory("a4", "a", 1.0, said=5),
        trajectory("b3", "b", 1.0, said=6),
    ]
    every = select(played, min_reward=1.0, max_per_row=None)
    assert [t.trajectory_id for t in every.trajectories] == ["a1", "a2", "a4", "b3"]
    assert (every.read, every.good, every.distinct) == (7, 5, 4)
    # of row a the best, which is a2, then the later one of two equals
    two = select(played, min_reward=1.0, max_per_row=2)
    assert [t.trajectory_id for t in two.trajectories] == ["a2", "a4", "b3"]
    assert [t.trajectory_id for t in select(played, min_reward=1.0, max_per_row=1).trajectories] == ["a2", "b3"]


def test_the_same_words_after_another_prompt_are_another_example() -> None:
    one = trajectory("a1", "a", 1.0, said=1)
    other = replace(one, steps=[replace(one.steps[0], prompt_ids=[7])])
    assert select([one, other], min_reward=1.0, max_per_row=None).distinct == 2


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 3), st.integers(0, 9)), max_size=30),
    st.integers(1, 4),
    st.integers(0, 3),
)
def test_no_row_has_more_than_its_share_and_nothing_better_was_left_out(
    drawn: list[tuple[str, int, int]], limit: int, least: int
) -> None:
    played = [trajectory(str(i), row, reward, said=said) for i, (row, reward, said) in enumerate(drawn)]
    chosen = select(played, min_reward=least, max_per_row=limit)
    everything = select(played, min_reward=least, max_per_row=None).trajectories
    for row in "abc":
        kept = [t.total_reward for t in chosen.trajectories if t.row_id == row]
        possible = sorted((t.total_reward for t in everything if t.row_id == row), reverse=True)
        assert sorted(kept, reverse=True) == possible[:limit]
    assert [int(t.trajectory_id) for t in chosen.trajectories] == sorted(
        int(t.trajectory_id) for t in chosen.trajectories
    )


def going_on(said: str, title: str) -> list[str]:
    """The words of the command that is proposed under this title."""
    [line] = [line for line in said.splitlines() if line.strip().startswith(title)]
    return shlex.split(line.partition(title)[2])


def test_collect_then_imitate_then_train_evaluate_and_compare(cli: Cli, tmp_path: Path) -> None:
    own, warm, rl = tmp_path / "own", tmp_path / "warm", tmp_path / "rl"
    ended = cli("collect", MINI, *SHORT, "--rows", 5, "--samples", 3, "--run", own)
    assert (ended.code, ended.err) == (0, "")
    assert "of 5 rows x 3 episodes" in ended.out
    collected = list(read_trajectories(own / "trajectories" / "train_000000.jsonl"))
    assert [t.row_id for t in collected] == [f"train-{i}" for i in range(5) for _ in range(3)]
    assert len({tuple(t.steps[0].response_ids) for t in collected}) > 5  # sampled, not greedy
    [record] = RunDir.open(own).read_metrics("collect")
    assert record["episodes"] == 15

    best = ("sft.epochs=1", f"sft.trajectories={own}", "sft.min_reward=0.01", "sft.max_per_row=1")
    ended = cli("sft", MINI, *SHORT, *best, "rollout.max_steps=3", "task.tools=[task.double]", "--run", warm)
    assert (ended.code, ended.err) == (0, "")
    words = going_on(ended.out, "train from it")  # with what was typed, but for where training begins
    assert words[1:] == [
        "train",
        f"{MINI}/base.yaml",
        *(word for word in SHORT if not word.startswith("sft.")),
        "rollout.max_steps=3",
        "task.tools=[task.double]",
        f"model.path={warm}",
        "sft.demos=null",
        "sft.trajectories=null",
    ]
    assert cli(*words[1:], "--dry-run").code == 0
    rows = {t.row_id for t in collected if t.total_reward >= 0.01}
    assert f"imitating {len(rows)} of 15 trajectories" in ended.out
    assert ended.out.count("% of 4 rows") == 2  # held-out success before and after
    evaluations = RunDir.open(warm).read_metrics("eval")
    assert f"compare {warm} --step first,last" in ended.out
    assert f"B  {warm}, step {evaluations[1]['step']}" in cli("compare", warm, "--step", "first,last").out
    assert evaluations[0]["step"] == 0
    assert evaluations[0]["panel"] == evaluations[1]["panel"]

    # the warm start is a model to train, evaluate, talk to and compare
    ended = cli("train", MINI, *SHORT, f"model.path={warm}", "trainer.steps=1", "--run", rl)
    assert (ended.code, ended.err) == (0, "")
    assert RunDir.open(rl).read_metrics("eval")[0]["reward/mean"] == pytest.approx(evaluations[1]["reward/mean"])
    assert cli("chat", warm, "model.device=cpu", "--ask", "double 3").code == 0
    ended = cli("compare", warm, rl)
    assert (ended.code, ended.err) == (0, "")
    assert f"panel {evaluations[0]['panel']}, 4 rows" in ended.out


def test_an_evaluation_is_kept_with_its_panel_and_its_rows(cli: Cli, tmp_path: Path) -> None:
    run = tmp_path / "run"
    assert cli("train", MINI, *SHORT, "trainer.steps=1", "--run", run).code == 0
    [*_, last] = RunDir.open(run).read_metrics("eval")
    ended = cli("eval", run)
    assert (ended.code, ended.err) == (0, "")
    record = EvalRecord.load(run / "evals" / "step_000001.json")
    assert record.subject.panel == last["panel"]
    assert record.subject.settings["dtype"] == "float32"  # what auto comes to on a CPU
    assert f"panel                      {last['panel']} (split test)" in ended.out
    assert sorted(record.outcomes) == [f"test-{i}" for i in range(4)]
    assert record.mean_and_error("reward")[0] == pytest.approx(last["reward/mean"])
    ended = cli("compare", run, run / "evals" / "step_000001.json", "--measure", "reward")
    assert "no difference shown, B against A: +0.000 of reward" in ended.out  # the same weights on the same rows

    other = cli("eval", run, "--split", "train", "eval.rows=3", "--name", "seen")
    assert (other.code, other.err) == (0, "")
    seen = EvalRecord.load(run / "evals" / "seen.json")
    assert sorted(seen.outcomes) == [f"train-{i}" for i in range(3)]
    assert cli("eval", run, "task.test_split=train", "eval.rows=3", "--name", "seen").code == 0  # the same again
    assert "seen.json holds a different evaluation" in cli("eval", run, "--name", "seen").err
    assert "(3 rows of 'train')" in cli("compare", run, run / "evals" / "seen.json").err

    start = tmp_path / "start"
    assert cli("train", MINI, *SHORT, "trainer.steps=0", "--run", start).code == 0
    assert cli("eval", run, "--model", start).code == 0
    assert EvalRecord.load(run / "evals" / "start.json").subject.model == str(start / "checkpoints" / "step_000000")


def test_collected_episodes_are_not_trained_over(cli: Cli, tmp_path: Path) -> None:
    own = tmp_path / "own"
    words = ("collect", MINI, *SHORT, "--rows", 2, "--samples", 2, "--run", own)
    assert cli(*words).code == 0
    ended = cli("train", "--resume", own)
    assert ended.code == 2
    assert "holds collected episodes" in ended.err
    assert "already holds a run" in cli(*words).err


def test_an_interrupted_collection_keeps_whole_files(cli: Cli, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, own = tmp_path / "stops", tmp_path / "own"
    shutil.copytree(MINI, folder, ignore=shutil.ignore_patterns("__pycache__"))
    with (folder / "task.py").open("a", encoding="utf-8") as file:
        file.write(
            "\nimport os\n\ndef stop(row, trajectory):\n"
            "    if row.row_id == 'train-3':\n        os.kill(os.getpid(), 15)\n    return 0.0\n"
        )
    monkeypatch.setattr("agent_r1.cli.commands.play.EPISODES_PER_FILE", 4)  # two rows of two episodes
    ended = cli("collect", folder, *SHORT, "task.reward=task.stop", "--rows", 6, "--samples", 2, "--run", own)
    assert ended.code == 128 + 15
    assert ended.err == f"stopped by SIGTERM; 4 episodes are in {own}\n"
    assert [t.row_id for t in read_trajectories(own / "trajectories")] == ["train-0"] * 2 + ["train-1"] * 2


def test_a_misspelt_name_is_found_before_there_is_a_run_directory(cli: Cli, tmp_path: Path) -> None:
    ended = cli("collect", MINI, "task.reward=task.rewrad", "--run", tmp_path / "own")
    assert ended.code == 2
    assert "Did you mean 'reward'?" in ended.err
    ended = cli("collect", MINI, "model.path=/no/such/model", "--run", tmp_path / "own")
    assert ended.code == 2
    assert "model '/no/such/model': there is no such directory" in ended.err
    assert not (tmp_path / "own").exists()
