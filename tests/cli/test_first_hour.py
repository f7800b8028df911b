"""Mistakes of a newcomer's first hour are answered fast: settings and runs are read before torch is imported."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from agent_r1 import __version__
from agent_r1.algorithm_names import PAPERS
from agent_r1.build.recipe import TEMPLATES
from agent_r1.config import load_config
from agent_r1.errors import ConfigError, nearest
from agent_r1.learn.algorithms import ALGORITHMS

OWN = str(TEMPLATES / "init")
WITHOUT_TORCH = """
import contextlib, io, json, sys
from agent_r1.cli.app import command_line

for words in json.loads(sys.argv[1]):
    sys.argv, said = ["agent-r1", *words], io.StringIO()
    with contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            command_line()
        except SystemExit as end:
            code = end.code
    print(json.dumps([code, said.getvalue(), "torch" in sys.modules]))
"""
ANSWERS: list[tuple[list[str], int, str]] = [
    (["--version"], 0, __version__),
    (["train", "quickstrat"], 2, "'quickstart'"),
    (["train", "gsm8k_tol/tiny"], 2, "'gsm8k_tool/tiny'"),
    (["train", "quickstart", "lr=1e-4"], 2, "'learner.lr'"),
    (["train", "quickstart", "algorithm.name=gpro"], 2, "'grpo'"),
    (["train", OWN, "algorithm.name=gpro"], 2, "'grpo'"),  # a recipe that could have its own algorithms
    (["doctor", OWN, "algorithm.name=gpro"], 1, "'grpo'"),
    (["sft", "quickstart", "rollout.group_sise=4"], 2, "'group_size'"),
    (["collect", "quickstart", "algorithm=ppo"], 2, "algorithm.name=ppo"),
    (["check", "quickstart", "rollout.max_stepz=4"], 2, "'max_steps'"),
    (["eval", "runs/no_such_run"], 2, "runs/no_such_run"),
    (["chat", "runs/no_such_run"], 2, "runs/no_such_run"),
    (["train", "--resume", "runs/no_such_run"], 2, "runs/no_such_run"),
]


def test_misspelt_words_are_answered_without_torch() -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps([words for words, _, _ in ANSWERS])]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    for line, (words, code, said) in zip(ended.stdout.splitlines(), ANSWERS, strict=True):
        found, text, has_torch = json.loads(line)
        assert (words, found, has_torch, said in text) == (words, code, False, True), text


def test_every_algorithm_is_known_without_torch() -> None:
    assert list(PAPERS) == list(ALGORITHMS)


@pytest.mark.parametrize(
    ("typed", "meant"), [("gpro", "grpo"), ("gsop", "gspo"), ("steppoo", "steppo"), ("something else", None)]
)
def test_swapped_letters_are_recognised_before_similar_names(typed: str, meant: str | None) -> None:
    assert nearest(typed, ["gspo", "grpo", "steppo"]) == meant


@pytest.mark.parametrize(
    ("override", "meant"),
    [("temperature=1.0", "rollout.temperature"), ("steps=3", "trainer.steps"), ("schedule=cosine", "learner.schedule")],
)
def test_a_key_without_its_section_is_pointed_to_reinforcement_learning(override: str, meant: str) -> None:
    with pytest.raises(ConfigError, match=f"Did you mean '{meant}'"):
        load_config("quickstart", [override])
