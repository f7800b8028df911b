"""Mistakes of a newcomer's first hour are answered fast: settings and runs are read before torch is imported."""

from __future__ import annotations

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
import sys
from agent_r1 import cli
sys.argv = ["agent-r1", *{words!r}]
try:
    cli.main()
except SystemExit as end:
    print("code", end.code)
print("torch" in sys.modules)
"""


@pytest.mark.parametrize(
    ("words", "code", "said"),
    [
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
    ],
    ids=lambda value: " ".join(value).replace(OWN, "OWN") if isinstance(value, list) else None,
)
def test_a_misspelt_word_is_answered_without_torch(words: list[str], code: int, said: str) -> None:
    command = [sys.executable, "-c", WITHOUT_TORCH.format(words=words)]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=300, check=True)
    assert said in ended.stdout + ended.stderr
    assert ended.stdout.splitlines()[-2:] == [f"code {code}", "False"]


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
