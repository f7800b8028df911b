"""The benchmarks of the recipe `alfworld`: stopped comparisons resume, and demonstrations are measured.

Our engine replaces the official one: the tests check how plays are stored, not their content.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

import pytest

from benchmarks import alfworld, alfworld_demos
from tests.recipes.alfworld_release import Files, synthetic_release, write_tree

STAND_IN = """
import json, re, sys
from agent_r1.recipes.alfworld.engine import World
from agent_r1.recipes.alfworld.game import read_game

def said(game, commands):
    world = World(read_game(game["pddl_problem"], re.search(r'Your task is to: [^"]*', game["grammar"]).group()))
    yield world.intro, world.admissible(), world.won
    for command in commands:
        yield world.step(command), world.admissible(), world.won

for line in sys.stdin:
    asked = json.loads(line)
    print(json.dumps([list(said(asked["game"], play)) for play in asked["plays"]]), flush=True)
"""


@pytest.fixture
def released(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Files:
    monkeypatch.setattr(alfworld, "RESULTS", tmp_path)
    files = synthetic_release(monkeypatch, tmp_path / "cache")
    return {name: content for name, content in files.items() if "/trial_" in name and b"task is to: x." not in content}


def test_a_stopped_comparison_resumes(released: Files, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    python, state = tmp_path / "python", tmp_path / "state.jsonl"
    python.write_text(f"#!{sys.executable}\n{STAND_IN}", encoding="utf-8")
    python.chmod(0o755)
    tree = write_tree(released, tmp_path / "tree")
    words = ["compare", "--data", tree, "--python", python, "--state", state, "--games", 4, "--workers", 2, "--seed"]
    alfworld.main([*map(str, words), "1"])
    lines = state.read_bytes().splitlines(keepends=True)
    state.write_bytes(b"".join(lines)[:-20])  # as if it had been stopped while it wrote
    alfworld.main([*map(str, words), "1"])
    assert "4 games, 3 of them compared before" in capsys.readouterr().out
    again = state.read_bytes().splitlines(keepends=True)
    assert (again[:3], json.loads(again[3])["game"], len(again)) == (lines[:3], json.loads(lines[3])["game"], 4)
    assert {json.loads(line)["seed"] for line in again} == {1}
    result = json.loads((tmp_path / "alfworld_engine.json").read_text(encoding="utf-8"))
    assert (result["games"], result["games_with_mismatches"], result["seed"]) == (4, 0, 1)
    with pytest.raises(SystemExit, match="seed 1, not 0"):
        alfworld.main([*map(str, words), "0"])


def test_records_without_a_seed_count_as_seed_0(tmp_path: Path) -> None:
    state = tmp_path / "state.jsonl"
    assert alfworld.resumed(state, 0) == {}
    state.write_text('{"game": "a"}\n', encoding="utf-8")
    assert list(alfworld.resumed(state, 0)) == ["a"]
    with pytest.raises(SystemExit, match="seed 0, not 7"):
        alfworld.resumed(state, 7)


def test_tokens_are_counted_with_a_model_that_must_be_made_first(
    released: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("gguf", reason="the optional package gguf is not installed")
    from tests.tiny_gguf import Tiny

    monkeypatch.setenv("AGENT_R1_MODELS", str(tmp_path / "models"))
    model, tree = Tiny().write(tmp_path / "tiny.gguf"), write_tree(released, tmp_path / "tree")
    alfworld_demos.tokens(argparse.Namespace(data=str(tree), tokenizer=str(model), episodes=9))
    told = capsys.readouterr().out
    assert "walkthroughs, hints: 6 episodes, tokens: mean" in told
    assert "explorer: 5 episodes" in told
    assert "30 random moves: 6 episodes" in told
