"""`agent-r1 show`: a run and its episodes in the terminal, and the arguments of `view`."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.runs.run_dir import RunDir
from tests.conftest import Cli
from tests.serve.small_runs import make_run


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> RunDir:
    monkeypatch.setenv("COLUMNS", "140")
    return make_run(tmp_path / "shop")


def test_a_run_is_shown_with_its_curves_and_newest_episodes(run: RunDir, cli: Cli) -> None:
    out = cli("show", run.path, "--limit", "3").out
    assert "shop  shop, grpo, seed 0, step 3, finished" in out
    [line] = [line for line in out.splitlines() if line.startswith("eval success")]
    assert line.split() == ["eval", "success", "0.2", "0.5", "▁█"]
    assert "eval_000003/0  ✓ 1" in out
    assert "eval_000003/1  ✗ 0" in out
    assert "20 episodes match" in out
    assert "What does te" in out  # cut, if the terminal is narrow


def test_episodes_are_found_and_sorted(run: RunDir, cli: Cli) -> None:
    out = cli("show", run.path, "--find", "stop=error", "--find", "step=2", "--sort", "row").out
    assert "1 episodes match" in out
    assert "train_000002/3  ! 0" in out
    assert "5 episodes match" in cli("show", run.path, "--find", "role=seller").out  # one in each of five files
    assert "no episode matches" in cli("show", run.path, "--find", "text=no such words").out


def test_an_episode_is_shown_with_calls_and_tokens(run: RunDir, cli: Cli) -> None:
    out = cli("show", run.path, "train_000002/0").out
    for part in (
        "What does tea cost?",
        "step 1 (buyer), saw 3 tokens",
        "step 2 (buyer), saw 7 tokens",
        "price(item='tea')  0.200 s, reward 0.125",
        "-> 4",
        "reward ✓ 1, answered",
        "expected 4",
    ):
        assert part in out
    assert "failed: no such item" in cli("show", run.path, "train_000002/1").out
    assert "one two</script><b>x</b>" in cli("show", run.path, "train_000002/0", "--tokens", "advantage").out
    assert "tool 'price' raised it broke" in cli("show", run.path, "train_000002/3").out
    assert "more characters" in cli("show", run.path, "train_000002/2").out
    assert "reward ✓ 1" in cli("show", run.path, "tea#0").out  # by its id


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (["show", "RUN", "train_000009/0"], "has no episodes 'train_000009'"),
        (["show", "RUN", "train_000001/9"], "no episode 9 in train_000001"),
        (["show", "RUN", "milk#7"], "has no episode 'milk#7'"),
        (["show", "RUN", "train_000001/0", "--tokens", "surprise"], "--tokens surprise: not recorded"),
        (["show", "RUN", "--tokens", "logprob"], "colours one episode"),
        (["show", "RUN", "--find", "reward>1"], "write NAME=VALUE"),
        (["show", "RUN", "--find", "colour=red"], "Choose one of"),
        (["show", "RUN", "--sort", "colour"], "cannot sort by 'colour'"),
        (["show", "RUN", "train_000001/0", "--find", "step=1"], "filters the list"),
        (["show", "nowhere"], "nowhere is not a run directory"),
        (["view", "nowhere"], "nowhere is not a folder"),
        (["view", "RUN", "--host", "203.0.113.1"], "cannot listen at 203.0.113.1"),
    ],
)
def test_what_cannot_be_shown_says_why(run: RunDir, cli: Cli, words: list[str], problem: str) -> None:
    ended = cli(*(str(run.path) if word == "RUN" else word for word in words))
    assert ended.code == 2
    assert problem in ended.err


def test_control_characters_of_agents_do_not_reach_the_terminal(run: RunDir, cli: Cli) -> None:
    path = run.trajectories_file("train", 1)
    path.write_text(path.read_text(encoding="utf-8").replace("It costs 1 coins", "\\u001b[2Jgone"), encoding="utf-8")
    for words in (["show", run.path], ["show", run.path, "train_000001/0"]):
        out = cli(*words, *(["--find", "step=1"] if len(words) == 2 else [])).out
        assert "\x1b[2J" not in out
        assert "gone" in out
