"""Two and three real processes train as one: same gradients, metrics, decisions and weights, less memory each."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch

from agent_r1.ranks.crew import OneProcess
from tests.forked import start
from tests.learn.rank import CASES, LONG, SAVED, THREE, main, resume_all, train_all

pytestmark = pytest.mark.timeout(900)  # five processes train at the same time

# What a layout says of itself: several ranks fill other packs than one process.
LAYOUT = {"packs", "packing_efficiency"}
# Packs filled differently are rounded differently. By case: the same in fp32, and the gradients to compare. A clipped
# policy would not do, because rounding moves tokens across the edge. MLPs in chunks are those of ppo after one update.
ROUNDED = {"bfloat16 policy": ("reinforce", "model."), "bfloat16 critic": ("MLPs in chunks", "critic.")}
# Relative, for what is computed from differences of log-probs: numbers between 4 and 8 are 4.8e-7 apart in fp32, so a
# difference of two, and a ratio, may change by twice that from one order of summation to another, and the KL of a token
# by more. 3e-6 was measured.
RATIO_BOUND = 5e-6
EXACT = [*((2, name) for name in CASES if name not in ROUNDED), *((3, name) for name in THREE)]
DECISIONS = [*EXACT, *((world, name) for world in (2, 3) for name in ("stopped", "nothing"))]


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[dict[str, Any]]]:
    """What each rank did, by the number of ranks."""
    folders = {world: tmp_path_factory.mktemp(f"ranks{world}") for world in (2, 3)}
    checkpoints = tmp_path_factory.mktemp("checkpoints")
    numbers = [(rank, world) for world in folders for rank in range(world)]
    ranks = [start(main, rank, world, folders[world], checkpoints) for rank, world in numbers]
    one = train_all(OneProcess(), list(CASES)) | {"resumed": resume_all(OneProcess(), checkpoints)}
    for rank in ranks:
        rank.join(800)
    assert [rank.exitcode for rank in ranks] == [0] * 5
    return {1: [one]} | {world: [read(folder, rank) for rank in range(world)] for world, folder in folders.items()}


def read(folder: Path, rank: int) -> dict[str, Any]:
    result: dict[str, Any] = torch.load(folder / f"rank{rank}.pt", weights_only=True)
    return result


def largest_difference(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> tuple[float, float]:
    """Of any element, and of the whole relative to its length."""
    assert a.keys() == b.keys()
    difference, whole = (
        torch.cat([t.flatten() for t in each]) for each in ([a[k] - b[k] for k in a], list(b.values()))
    )
    return float(difference.abs().max()), float(difference.norm() / whole.norm())


def bounds(name: str) -> tuple[float, float]:
    """The largest difference allowed to one process. With a state in 8 bits, a moment between two levels may be stored
    as the other one, which changes the next update of that one number by some percent of lr, 1e-4 here and ten times
    that for a critic. The weights move by 1e-3 of their length, so 1e-5 of it is 1 % of that."""
    return (1e-4, 1e-5) if name.startswith("8-bit") else (1e-6, 1e-6)


@pytest.mark.parametrize(("world", "name"), EXACT)
def test_the_number_of_ranks_changes_neither_gradient_nor_weights(runs: Any, world: int, name: str) -> None:
    (one,) = runs[1]
    for rank in runs[world]:
        for what in ("gradient", "weights"):
            absolute, relative = largest_difference(rank[name][what], one[name][what])
            assert absolute < bounds(name)[0]
            assert relative < bounds(name)[1]
    largest = max(float(gradient.abs().max()) for gradient in one[name]["gradient"].values())
    assert 1e-2 < largest < 10  # of order 1, so that an absolute bound means something


@pytest.mark.parametrize(("world", "name"), DECISIONS)
def test_all_ranks_report_the_metrics_of_one_process(runs: Any, world: int, name: str) -> None:
    (one,) = runs[1]
    first, *others = runs[world]
    for other in others:
        assert first[name]["metrics"] == other[name]["metrics"]
        assert first[name]["kl"] == other[name]["kl"]
        assert first[name]["values"] == other[name]["values"]
        assert flat(first[name]["noted"]) == pytest.approx(flat(other[name]["noted"]), abs=0, nan_ok=True)
        for key, tensor in first[name]["weights"].items():
            assert torch.equal(tensor, other[name]["weights"][key])
    for got, expected in zip(first[name]["metrics"], one[name]["metrics"], strict=True):
        assert got.keys() == expected.keys()
        for key in got.keys() - LAYOUT:
            allowed = RATIO_BOUND if "ratio" in key or "mismatch" in key or "kl" in key else 1e-6
            assert got[key] == pytest.approx(expected[key], rel=allowed, abs=1e-6), key
    assert flat(first[name]["values"]) == pytest.approx(flat(one[name]["values"]), abs=1e-6)
    assert flat(first[name]["kl"]) == pytest.approx(flat(one[name]["kl"]), abs=1e-6)
    noted = flat(one[name]["noted"])
    assert flat(first[name]["noted"]) == pytest.approx(noted, rel=RATIO_BOUND, abs=1e-6, nan_ok=True)


@pytest.mark.parametrize("name", [*LONG, "adapters, grpo", "adapters, ppo", "trees", "rewritten contexts"])
def test_what_matters_most_is_compared_after_three_updates_of_two_optimizer_steps(runs: Any, name: str) -> None:
    for first, *_ in runs.values():
        assert [update["optimizer_steps"] for update in first[name]["metrics"]] == [2, 4, 6]


def flat(nested: Any) -> list[float]:
    return [number for part in nested for number in flat(part)] if isinstance(nested, list) else [nested or 0.0]


@pytest.mark.parametrize("name", ROUNDED)
def test_half_precision_differs_by_no_more_than_its_rounding(runs: Any, name: str) -> None:
    # A bfloat16 has 8 significant bits, so 2**-9 per rounding: of activations, of the gradient of every pack and, on
    # several ranks, of the weights of norms.
    exact, part = ROUNDED[name]
    two, one, reference = (
        {key: tensor for key, tensor in run["gradient"].items() if key.startswith(part)}
        for run in (runs[2][0][name], runs[1][0][name], runs[1][0][exact])
    )
    assert 1e-3 < largest_difference(two, one)[1] < 0.05
    assert 1e-3 < largest_difference(one, reference)[1] < 0.05
    assert all(tensor.dtype == torch.float32 for tensor in runs[2][0][name]["weights"].values())


@pytest.mark.parametrize(("world", "name"), EXACT)
def test_each_rank_holds_its_share_of_parameters_and_moments(runs: Any, world: int, name: str) -> None:
    (one,) = runs[1]
    for what, whole in one[name]["sizes"].items():
        held = [rank[name]["sizes"][what] for rank in runs[world]]
        assert sum(held) == whole
        assert max(held) < 1.3 * whole / world  # rows of tiny matrices cannot be divided evenly


@pytest.mark.parametrize("case", SAVED)
@pytest.mark.parametrize("saved", [1, 2, 3])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_any_number_of_ranks_continues_a_checkpoint_of_any_other(runs: Any, world: int, saved: int, case: str) -> None:
    (one,) = runs[1]
    for rank in runs[world]:
        absolute, relative = largest_difference(
            rank["resumed"][f"{case} from {saved}"], one["resumed"][f"{case} straight"]
        )
        assert absolute < bounds(case)[0]
        assert relative < bounds(case)[1]
    if world == saved:
        for rank in runs[world]:
            for key, tensor in rank["resumed"][f"{case} straight"].items():
                assert torch.equal(tensor, rank["resumed"][f"{case} from {saved}"][key])


def test_a_rank_without_a_trajectory_takes_part(runs: Any) -> None:
    for results in runs.values():
        for rank in results:
            if "one trajectory" in rank:
                assert rank["one trajectory"]["metrics"][0]["packs"] == 1  # fillers are not counted
                assert rank["one trajectory"]["metrics"][0]["grad_norm"] > 0


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_exchange_objects(runs: Any, world: int) -> None:
    for rank in runs[world]:
        assert rank["gathered"] == [(number, None) for number in range(world)]
        assert rank["broadcast"] == f"from 0 of {world}, main: True"


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_stop_at_the_same_step(runs: Any, world: int) -> None:
    for result in runs[world]:
        assert [update["kl_dropped_updates"] > 0 for update in result["stopped"]["metrics"]] == [True] * 2


@pytest.mark.parametrize("world", [1, 2, 3])
def test_with_nothing_to_learn_all_ranks_do_nothing(runs: Any, world: int) -> None:
    for result in runs[world]:
        assert [update["empty_update"] for update in result["nothing"]["metrics"]] == [1, 1]
        assert result["nothing"]["gradient"] == {}


@pytest.mark.parametrize("world", [1, 2, 3])
def test_all_ranks_skip_and_name_what_one_rank_cannot_train_on(runs: Any, world: int) -> None:
    for result in runs[world]:
        poisoned = result["poisoned"]
        assert [update["skipped_updates"] for update in poisoned["metrics"]] == [1, 1]
        assert all(math.isnan(update["loss"]) for update in poisoned["metrics"])
        assert "3 optimizer steps in a row were not finite" in poisoned["error"]
        assert f"trajectories {poisoned['name']}, or" in poisoned["error"]
