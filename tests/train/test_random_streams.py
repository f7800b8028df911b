"""The global random streams, which user code may use, repeat with the run."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from agent_r1.errors import DataError, RolloutError
from agent_r1.runs.run_dir import RunDir
from tests.train.test_pipeline import MINI, resumed, trained

CODE = """

import random
from pathlib import Path

import torch

DOWN = Path(__file__).parent / "down"  # while it is there, only so many more rewards are given
given = 0


async def lucky(row, trajectory):
    global given
    given += 1
    if DOWN.exists() and given > int(DOWN.read_text()):
        raise RuntimeError("the judge is down")
    return random.random() + float(torch.rand(()))
"""
LUCKY = ("task.reward=task.lucky", "rollout.max_error_fraction=0.1", "eval.rows=1")
# An evaluation gives 1 reward and a step 4 x 3: the second step begins after 1 + 12.
FEW = ("rollout.rows_per_step=4", "rollout.group_size=3", "trainer.eval_every=100", "trainer.save_every=100")


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    made = tmp_path / "lucky"
    shutil.copytree(MINI, made, ignore=shutil.ignore_patterns("__pycache__"))
    with (made / "task.py").open("a", encoding="utf-8") as file:
        file.write(CODE)
    return made


def rewards(run: Path) -> list[dict[str, Any]]:
    kept = ("kind", "step", "reward/mean", "loss")
    return [{name: record.get(name) for name in kept} for record in RunDir.open(run).read_metrics()]


def test_random_streams_do_not_depend_on_a_cached_warm_start(recipe: Path, tmp_path: Path) -> None:
    settings = (*LUCKY, *FEW, "trainer.steps=1")
    for name in ("first", "second"):
        trained(tmp_path / name, *settings, recipe=recipe)
    assert rewards(tmp_path / "second") == rewards(tmp_path / "first")


def test_a_failed_step_draws_the_same_numbers_after_resuming(recipe: Path, tmp_path: Path) -> None:
    settings = (*LUCKY, *FEW, "sft.demos=null", "trainer.steps=2")
    trained(tmp_path / "whole", *settings, recipe=recipe)
    whole = rewards(tmp_path / "whole")
    # That was 1 + 12 + 12 + 1 rewards; the second run gets through its first step and breaks within the second.
    (recipe / "down").write_text(str(26 + 13 + 5), encoding="utf-8")
    with pytest.raises(RolloutError, match=r"the judge is down(?s:.*)\nsaved after step 1; continue with: .* --resume"):
        trained(tmp_path / "broken", *settings, recipe=recipe)
    assert rewards(tmp_path / "broken") == whole[:2]
    (recipe / "down").unlink()
    resumed(RunDir.open(tmp_path / "broken"))
    assert rewards(tmp_path / "broken") == whole


def test_a_run_without_its_reference_cannot_be_resumed(recipe: Path, tmp_path: Path) -> None:
    settings = ("algorithm.kl_coef=0.1", "sft.demos=null", "eval.rows=1", *FEW)
    run = trained(tmp_path / "run", *settings, "trainer.steps=1", recipe=recipe).run
    shutil.rmtree(run.reference)
    with pytest.raises(DataError, match="reference is missing"):
        resumed(run)
