"""The parts of a run are hidden from the garbage collector only while it runs."""

from __future__ import annotations

import gc
import shutil
import weakref
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from agent_r1.build.plan import build_plan
from agent_r1.build.task import build_task
from agent_r1.cli.commands.play import run_eval, run_sft
from agent_r1.cli.commands.train import run_training
from agent_r1.config import load_config
from agent_r1.runs.run_dir import RunDir
from agent_r1.train.garbage import parts_frozen
from tests.train.test_pipeline import MINI, console

# A reward that notes how much was set aside when it was asked, and an optional failure.
REWARD = """
import gc
from pathlib import Path
from tests.mini.task import reward as plain

def reward(row, trajectory):
    with (Path(__file__).parent / "seen.txt").open("a") as seen:
        seen.write(f"{gc.get_freeze_count()}\\n")
    return plain(row, trajectory)

def failing(row, trajectory):
    raise RuntimeError("out of ideas")
"""


class Cycle:
    def __init__(self) -> None:
        self.itself = self


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.setenv("AGENT_R1_CACHE", str(tmp_path / "cache"))
    torch.set_num_threads(1)
    folder = tmp_path / "recipe"
    shutil.copytree(MINI, folder, ignore=shutil.ignore_patterns("__pycache__"))
    (folder / "noting.py").write_text(REWARD, encoding="utf-8")
    gc.unfreeze()
    yield folder
    gc.unfreeze()


def seen(recipe: Path) -> list[int]:
    note = recipe / "seen.txt"
    counts = [int(line) for line in note.read_text(encoding="utf-8").split()]
    note.unlink()
    return counts


def test_garbage_from_before_is_collected_and_garbage_from_inside_too() -> None:
    before = weakref.ref(Cycle())
    kept = Cycle()
    thresholds = (700, 10, 10)
    gc.set_threshold(*thresholds)  # a benchmark in this process may have changed it
    with parts_frozen():
        assert before() is None
        assert gc.get_threshold()[0] > thresholds[0]  # and collections are rarer
        assert gc.get_freeze_count() > 0
        assert not any(item is kept for item in gc.get_objects())  # no collection looks at it
        inside = weakref.ref(Cycle())
        gc.collect()
        assert inside() is None
    assert (gc.get_freeze_count(), gc.get_threshold()) == (0, thresholds)
    assert any(item is kept for item in gc.get_objects())


def test_parts_are_frozen_only_while_a_run_plays(recipe: Path, tmp_path: Path) -> None:
    few = ("trainer.steps=1", "eval.rows=2", "rollout.rows_per_step=1", "task.reward=noting.reward", "sft.count=4")
    config = load_config(str(recipe), few)
    run = RunDir.create(tmp_path / "run", config)
    run_training(config, build_plan(config), run, console(), resume=False)
    counts = seen(recipe)
    assert len(counts) == 2 + 4 + 2  # held-out rows, attempts at a row, held-out rows
    assert min(counts) > 10_000  # modules, the model, the engine
    assert gc.get_freeze_count() == 0
    run_eval(config, run, console())
    assert min(seen(recipe)) > 10_000
    assert gc.get_freeze_count() == 0
    run_sft(config, build_task(config), RunDir.create(tmp_path / "sft", config), console())
    assert min(seen(recipe)) > 10_000
    assert gc.get_freeze_count() == 0


def test_a_run_that_fails_leaves_the_collector_as_it_was(recipe: Path, tmp_path: Path) -> None:
    config = load_config(str(recipe), ("eval.rows=2", "task.reward=noting.failing"))
    run = RunDir.create(tmp_path / "run", config)
    with pytest.raises(Exception, match="out of ideas"):
        run_training(config, build_plan(config), run, console(), resume=False)
    assert gc.get_freeze_count() == 0
