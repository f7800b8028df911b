"""The comparison with verl and TRL detects a wrong loss, and the page shows the stored results."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_r1.learn.algorithms import ALGORITHMS, get_algorithm
from benchmarks.machine import RESULTS
from benchmarks.parity import (
    PAGE,
    Comparison,
    Outcome,
    Side,
    advantages,
    differentiate,
    page_part,
    policy_loss,
    run,
    shared_advantages,
)
from benchmarks.parity_cases import KINDS, USUAL, Case, make_case
from benchmarks.recipes import marks

GRPO = get_algorithm("grpo")


def grpo(case: Case) -> Outcome:
    return policy_loss(case, GRPO)


def problems(theirs: Side, ours: Side = grpo, **settings: Any) -> list[str]:
    row = Comparison(algorithm="grpo", compared="loss", ours=ours, theirs=theirs, **settings).measure([0, 1])
    found: list[str] = row["problems"]
    return found


def by_hand(case: Case, clip_high: float = 0.2, with_clip_gradient: bool = False) -> Outcome:
    """PPO-clip over padded rows: the mean over the unmasked tokens of -min(r A, clip(r) A)."""
    layout = case.episodes

    def loss(leaf_R: Tensor) -> Tensor:
        ratio_BL = (layout.spread(leaf_R) - layout.spread(case.old_R)).exp()
        advantages_BL = layout.spread(shared_advantages(case, GRPO))
        clipped_BL = ratio_BL.clamp(0.8, 1 + clip_high)
        if with_clip_gradient:
            clipped_BL = clipped_BL.detach() + ratio_BL - ratio_BL.detach()
        objective_BL = (ratio_BL * advantages_BL).minimum(clipped_BL * advantages_BL)
        return -(objective_BL * layout.mask_BL).sum() / layout.mask_BL.sum()

    return differentiate(case.logprobs_R, loss)


def test_our_loss_agrees_with_a_padded_one_on_every_kind_of_case() -> None:
    without_signal = {"equal rewards", "groups of one", "critic rounding only"}
    unbounded = {"far"}  # we bound the log-ratio at 20
    assert problems(by_hand, kinds=[kind for kind in KINDS if kind not in without_signal | unbounded]) == []


@pytest.mark.parametrize(
    "mutant",
    [
        lambda case: by_hand(case, clip_high=0.25),
        lambda case: by_hand(case, with_clip_gradient=True),  # the value is right, the gradient is not
        lambda case: policy_loss(case, get_algorithm("grpo", aggregation="trajectory")),
        lambda case: policy_loss(case, get_algorithm("grpo", dual_clip=1.5)),
        lambda case: replace_value(grpo(case), lambda loss: loss * 1.001),
        lambda case: replace_value(grpo(case), lambda loss: loss * float("nan")),
        lambda case: policy_loss(replace(case, old_R=case.sampler_R), GRPO),
    ],
    ids=["clip", "gradient", "aggregation", "dual clip", "one per mille", "nan", "wrong old log-probs"],
)
def test_a_wrong_loss_is_detected(mutant: Side) -> None:
    assert any("is above" in said for said in problems(mutant))


def replace_value(outcome: Outcome, change: Callable[[Tensor], Tensor]) -> Outcome:
    return replace(outcome, value=change(outcome.value))


@pytest.mark.parametrize("name", ALGORITHMS)
def test_wrong_advantages_are_detected(name: str) -> None:
    def ours(case: Case) -> Outcome:
        return Outcome(advantages(case, get_algorithm(name)))

    def wrong(case: Case) -> Outcome:
        return Outcome(1.0001 * ours(case).value)

    assert problems(ours, ours) == []
    assert any("is above" in said for said in problems(wrong, ours))


def test_a_difference_by_design_that_is_gone_is_detected() -> None:
    assert problems(grpo, differs=True) == ["said to differ by design, but does not"]
    assert problems(lambda case: by_hand(case, clip_high=0.25), differs=True) == []


def test_an_empty_comparison_is_detected() -> None:
    def nothing(case: Case) -> Outcome:
        return Outcome(torch.zeros(3))

    assert all("nothing is compared" in said for said in problems(nothing, nothing))
    assert problems(nothing, nothing)


@pytest.mark.parametrize("kind", KINDS)
def test_a_layout_holds_the_tokens_of_a_case_in_their_order(kind: str) -> None:
    case = make_case(kind, 0)
    for layout in (case.episodes, case.steps):
        torch.testing.assert_close(layout.gather(layout.spread(case.old_R)), case.old_R, rtol=0, atol=0)
    rows = case.episodes.mask_BL.sum(1).tolist()
    assert rows == [trajectory.num_response_tokens for trajectory in case.trajectories]
    sampled = [number for t in case.trajectories for step in t.steps for number in step.response_logprobs]
    assert sampled == case.sampler_R.tolist()
    earned = case.episodes.spread(case.rewards_R).sum(1)
    torch.testing.assert_close(earned, torch.tensor([t.total_reward for t in case.trajectories]))
    # The environment's text is masked: a row of two steps or more has a gap.
    assert all(0 in gaps[-1:] and all(gaps[:-1]) for gaps in case.gaps)


def test_cases_have_the_properties_that_their_names_promise() -> None:
    assert {len(t.steps) for t in make_case("one step", 0).trajectories} == {1}
    assert max(len(t.steps) for t in make_case("several steps", 0).trajectories) > 1
    uniform = [len({t.total_reward for t in g.trajectories}) == 1 for g in make_case("success or failure", 0).groups]
    assert uniform == [True, True, False, False]
    case = make_case("success or failure", 0)
    assert len(case.varied().groups) == 2
    assert case.varied().old_R.tolist() == case.old_R.tolist()[-len(case.varied().old_R) :]


@pytest.mark.parametrize(
    ("name", "kind"), [("grpo", "groups of one"), ("grpo", "equal rewards"), ("ppo", "critic rounding only")]
)
def test_a_batch_that_the_page_says_we_give_no_credit_gets_none(name: str, kind: str) -> None:
    assert not advantages(make_case(kind, 0), get_algorithm(name)).any()


def test_the_command_fails_and_stores_nothing_if_something_is_wrong(tmp_path: Path) -> None:
    out, page = tmp_path / "results.json", tmp_path / "page.md"
    page.write_text("<!-- results: against_torch.json -->\n", encoding="utf-8")
    words = ["--seeds", "0", "--out", str(out), "--page", str(page)]
    good = Comparison(algorithm="grpo", compared="loss and gradient", ours=grpo, theirs=by_hand)
    with pytest.raises(SystemExit, match=r"grpo, loss and gradient: float32: .* is above 2e-05"):
        run("torch", [good, replace(good, theirs=lambda case: by_hand(case, clip_high=0.25))], words)
    assert not out.exists()
    run("torch", [good], words)
    stored = json.loads(out.read_text(encoding="utf-8"))
    assert (stored["seeds"], stored["rows"][0]["cases"]) == ([0], len(USUAL))
    assert page_part(stored) in page.read_text(encoding="utf-8")


@pytest.mark.parametrize("library", ["verl", "trl"])
def test_the_page_shows_the_stored_results(library: str) -> None:
    results = json.loads((RESULTS / f"against_{library}.json").read_text(encoding="utf-8"))
    begins, ends = marks(f"against_{library}.json")
    assert f"{begins}\n{page_part(results)}\n{ends}" in PAGE.read_text(encoding="utf-8")
    assert results["versions"][library]


def test_every_algorithm_is_compared_with_verl() -> None:
    rows = json.loads((RESULTS / "against_verl.json").read_text(encoding="utf-8"))["rows"]
    compared = {(row["algorithm"], row["compared"]) for row in rows if not row["differs_by_design"]}
    for name in ALGORITHMS:
        assert {(name, "advantages"), (name, "loss and gradient")} <= compared


@pytest.mark.parametrize("library", ["verl", "trl"])
def test_we_agree_with_the_library_where_it_is_installed(library: str) -> None:
    pytest.importorskip(library)
    from importlib import import_module

    rows = [comparison.measure([7]) for comparison in import_module(f"benchmarks.against_{library}").comparisons()]
    assert [(row["algorithm"], row["compared"], said) for row in rows for said in row["problems"]] == []
