"""Training with top-k and top-p, from the recipe to the metrics."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent_r1.build.task import build_task
from agent_r1.cli.commands.play import run_sft
from agent_r1.runs.run_dir import RunDir
from agent_r1.runs.trajectories import read_trajectories
from tests.train.test_pipeline import console, mini, trained

SAMPLING = ("rollout.temperature=0.8", "rollout.top_p=0.9", "rollout.top_k=12")
KL = ("algorithm.kl_coef=0.1", "algorithm.entropy_coef=0.01")

pytestmark = pytest.mark.usefixtures("cache")


@pytest.mark.parametrize(
    "overrides", [KL, ("correction.kind=truncate",), ("algorithm.name=remax",)], ids=["kl", "correction", "remax"]
)
def test_a_run_with_top_p_agrees_with_its_sampler(overrides: tuple[str, ...], tmp_path: Path) -> None:
    metrics = trained(tmp_path / "run", "trainer.steps=2", *SAMPLING, *overrides).run.read_metrics("train")
    assert len(metrics) == 2
    assert all(record["mismatch_max"] < 1e-4 for record in metrics)
    steps = [step for t in read_trajectories(tmp_path / "run" / "trajectories", "train_*") for step in t.steps]
    supports = [step.support for step in steps]
    assert {(step.temperature, step.top_p, step.top_k) for step in steps} == {(0.8, 0.9, 12)}
    assert all(support is not None and 0 < len(support.ids) <= 12 * len(support.counts) for support in supports)
    for step, support in zip(steps, supports, strict=True):
        assert support is not None
        assert all(token in kept for token, kept in zip(step.response_ids, support.per_token(), strict=True))
    [evaluated, *_] = read_trajectories(tmp_path / "run" / "trajectories", "eval_*")
    assert (evaluated.steps[0].temperature, evaluated.steps[0].support) == (0.0, None)


def test_trajectories_of_a_run_can_be_imitated(tmp_path: Path) -> None:
    trained(tmp_path / "run", "trainer.steps=2", *SAMPLING)
    source = (f"sft.trajectories={tmp_path / 'run'}", "sft.demos=null", "sft.min_reward=-9", "sft.epochs=1")
    config = mini(*SAMPLING, *source)
    run_sft(config, build_task(config), RunDir.create(tmp_path / "sft", config), console())
    records = [record for record in RunDir.open(tmp_path / "sft").read_metrics() if record["kind"] == "sft"]
    assert sum(record["trajectories"] for record in records) > 0
