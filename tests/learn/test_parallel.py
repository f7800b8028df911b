"""Two real processes train as one: same gradients, metrics, decisions and weights."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from agent_r1.learn.parallel import OneProcess
from tests.forked import start
from tests.learn.rank import CASES, WORLD, main, train_all

CASE_NAMES = [f"{name} {shared}" for name, shared in CASES]
# What a layout says of itself: two ranks fill other packs than one process.
LAYOUT = {"packs", "packing_efficiency"}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """(what one process did, what each of two ranks did)"""
    folder = tmp_path_factory.mktemp("ranks")
    ranks = [start(main, rank, folder) for rank in range(WORLD)]
    one = train_all(OneProcess())
    for rank in ranks:
        rank.join(240)
    assert [rank.exitcode for rank in ranks] == [0] * WORLD
    return one, [torch.load(folder / f"rank{rank}.pt", weights_only=True) for rank in range(WORLD)]


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Of any element, and of the whole relative to its length."""
    assert a.keys() == b.keys()
    difference, whole = (
        torch.cat([t.flatten() for t in each]) for each in ([a[k] - b[k] for k in a], list(b.values()))
    )
    return float(difference.abs().max()), float(difference.norm() / whole.norm())


@pytest.mark.parametrize("name", [*CASE_NAMES, "corrected", "warming up", "one trajectory"])
def test_the_number_of_ranks_does_not_change_the_gradient(runs: Any, name: str) -> None:
    one, ranks = runs
    for rank in ranks:
        absolute, relative = largest_difference(rank[name]["gradient"], one[name]["gradient"])
        assert absolute < 1e-6
        assert relative < 1e-6
    largest = max(float(gradient.abs().max()) for gradient in one[name]["gradient"].values())
    assert 1e-2 < largest < 10  # of order 1, so that an absolute bound means something


@pytest.mark.parametrize("name", [*CASE_NAMES, "corrected", "stopped", "warming up", "one trajectory", "nothing"])
def test_all_ranks_have_bit_for_bit_the_same_weights(runs: Any, name: str) -> None:
    one, (first, second) = runs
    assert first[name]["weights"].keys() == second[name]["weights"].keys() == one[name]["weights"].keys()
    for key, tensor in first[name]["weights"].items():
        assert torch.equal(tensor, second[name]["weights"][key])
        # Adam divides by the size of a gradient, so rounding of a tiny one may show in the weights: lr 1e-3, 8 steps
        torch.testing.assert_close(tensor, one[name]["weights"][key], rtol=0, atol=1e-3)


@pytest.mark.parametrize("name", [*CASE_NAMES, "corrected", "stopped", "warming up", "one trajectory", "nothing"])
def test_all_ranks_report_the_metrics_of_one_process(runs: Any, name: str) -> None:
    one, (first, second) = runs
    assert first[name]["metrics"] == second[name]["metrics"]
    for got, expected in zip(first[name]["metrics"], one[name]["metrics"], strict=True):
        assert got.keys() == expected.keys()
        for key in got.keys() - LAYOUT:
            assert got[key] == pytest.approx(expected[key], rel=1e-3, abs=1e-5), key


def test_a_rank_without_a_trajectory_takes_part(runs: Any) -> None:
    one, ranks = runs
    assert one["one trajectory"]["metrics"][0]["packs"] == 1
    for rank in ranks:
        assert rank["one trajectory"]["metrics"][0]["packs"] == 1
        assert rank["one trajectory"]["metrics"][0]["grad_norm"] > 0


def test_gradients_add_up_and_unused_parameters_have_none(runs: Any) -> None:
    # [1, 2] + [2, 4]; rank 1's alone; and none rather than zero, which an optimizer would take for a gradient
    for rank in runs[1]:
        assert rank["partial"] == [[3.0, 6.0], [5.0, 7.0], None]
        assert rank["gathered"] == [(0, None), (1, None)]


def test_all_ranks_stop_at_the_same_step(runs: Any) -> None:
    for result in (runs[0], *runs[1]):
        assert [update["kl_dropped_updates"] > 0 for update in result["stopped"]["metrics"]] == [True, True]


def test_with_nothing_to_learn_all_ranks_do_nothing(runs: Any) -> None:
    for result in (runs[0], *runs[1]):
        assert [update["empty_update"] for update in result["nothing"]["metrics"]] == [1, 1]
        assert result["nothing"]["gradient"] == {}


def test_all_ranks_skip_and_name_what_one_rank_cannot_train_on(runs: Any) -> None:
    for result in (runs[0], *runs[1]):
        poisoned = result["poisoned"]
        assert [update["skipped_updates"] for update in poisoned["metrics"]] == [1, 1]
        assert all(math.isnan(update["loss"]) for update in poisoned["metrics"])
        assert "3 optimizer steps in a row were not finite" in poisoned["error"]
        assert f"trajectories {poisoned['name']}, or" in poisoned["error"]
