"""Compare our learner with another library: the same tensors in, the largest difference out.

`against_verl.py` and `against_trl.py` list what is compared. Our side runs the code of a training step:
`assign_credit`, the packs and columns of `minibatch.py`, and an algorithm's own loss. The other side is called as its
trainer calls it.

Shape suffixes: R = response tokens of a case.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from agent_r1.learn.algorithms import Algorithm, get_algorithm
from agent_r1.learn.batch.minibatch import MiniBatch, prepare, with_own_logprobs
from agent_r1.learn.batch.packs import column, column_with_gaps, nested
from agent_r1.learn.credit import assign_credit
from agent_r1.learn.losses import KL_PENALTIES, Correction, KLEstimator, value_loss
from agent_r1.learn.rewards import KLInReward, RewardShaper
from agent_r1.ranks.crew import OneProcess
from agent_r1.types import CreditedTrajectory
from benchmarks.machine import RESULTS, machine
from benchmarks.parity_cases import USUAL, Case, make_case
from benchmarks.recipes import ROOT, fill

SEEDS = tuple(range(5))
# Largest difference that passes, relative where the compared numbers exceed 1. Formulas differ by constants such as
# 1e-6 beside a standard deviation, so fp64 does not agree to its own precision.
TOLERANCES = {torch.float32: 2e-5, torch.float64: 1e-5}
PAGE = ROOT / "docs" / "algorithms" / "parity.md"
KL_COEF, KL_TARGET = 0.05, 0.1
PACK_TOKENS = 64  # several packs per case


@dataclass(frozen=True, slots=True)
class Outcome:
    """The results of one side for a case."""

    value: Tensor
    gradient_R: Tensor | None = None


Side = Callable[[Case], Outcome]


def differentiate(at_R: Tensor, function: Callable[[Tensor], Tensor]) -> Outcome:
    """A loss and its gradient with respect to one number per token."""
    leaf_R = at_R.clone().requires_grad_()
    loss = function(leaf_R)
    loss.backward()
    assert leaf_R.grad is not None
    return Outcome(loss.detach(), leaf_R.grad)


def credit(case: Case, algorithm: Algorithm) -> list[CreditedTrajectory]:
    return assign_credit(case.groups, algorithm, values=case.values if algorithm.needs_critic else None)


def trained_case(case: Case, algorithm: Algorithm) -> Case:
    """The part of a case that an algorithm trains on."""
    return case.varied() if algorithm.sampling_rounds > 1 else case


def advantages(case: Case, algorithm: Algorithm) -> Tensor:
    flat = [number for item in credit(case, algorithm) for step in item.advantages for number in step]
    return torch.tensor(flat, dtype=torch.float64)


def policy_loss(case: Case, algorithm: Algorithm, correction: Correction | None = None) -> Outcome:
    """As the learner computes it, summed over packs."""
    trained = trained_case(case, algorithm)
    batch = pack(credit(case, algorithm), trained, correction)

    def loss(leaf_R: Tensor) -> Tensor:
        shares = [
            algorithm.loss(
                batch.columns.at(part.columns_T).loss_inputs(leaf_R[part.columns_T], part.step_ids_T, batch.counts)
            ).loss
            for part in batch.packs
        ]
        return torch.stack(shares).sum()

    return differentiate(trained.logprobs_R, loss)


def pack(credited: Sequence[CreditedTrajectory], case: Case, correction: Correction | None) -> MiniBatch:
    batch = prepare(credited, max_tokens=PACK_TOKENS, device=torch.device("cpu"), ranks=OneProcess(), keep_idle=False)
    batch = with_own_logprobs(batch, lambda part: case.old_R[part.columns_T], correction)
    present = [each.name for each in fields(batch.columns) if getattr(batch.columns, each.name) is not None]
    columns = {name: getattr(batch.columns, name) for name in present}
    floats = {name: column.to(case.old_R.dtype) for name, column in columns.items() if column.is_floating_point()}
    return batch.with_columns(**floats)


def shared_advantages(case: Case, algorithm: Algorithm) -> Tensor:
    """Our advantages, as the loss reads them: given to both sides, so that only losses are compared."""
    return column([item.advantages for item in credit(case, algorithm)]).to(case.old_R.dtype)


def kl_loss(case: Case, estimator: KLEstimator) -> Outcome:
    penalty = KL_PENALTIES[estimator]
    return differentiate(case.logprobs_R, lambda leaf_R: penalty(leaf_R, case.reference_R, case.old_R).mean())


def kl_in_reward(case: Case, name: str) -> Outcome:
    """Advantages with a KL penalty on the reward of every token."""
    ratios = nested(case.old_R - case.reference_R, case.trajectories)
    shaper = RewardShaper(kl=KLInReward(coef=KL_COEF, target=None, horizon=1))
    credited = assign_credit(case.groups, get_algorithm(name), shaper=shaper, kl=ratios)
    return Outcome(column([item.advantages for item in credited]).double())


def kl_coefficients(case: Case) -> Outcome:
    """The adaptive coefficient of the KL penalty."""
    penalty, found = KLInReward(coef=KL_COEF, target=KL_TARGET, horizon=100), []
    for kl in observed_kls(case):
        penalty.adapt(kl, 16)
        found.append(penalty.coef)
    return Outcome(torch.tensor(found, dtype=torch.float64))


def observed_kls(case: Case) -> list[float]:
    """From well below the target to well above it."""
    return [KL_TARGET * abs(number) * 2 for number in case.values_R.tolist()]


def value_targets(case: Case, name: str) -> Tensor:
    """The targets of our critic; NaN at tokens without one."""
    credited = credit(case, get_algorithm(name, gamma=1.0))
    return column_with_gaps([item.value_targets or [] for item in credited]).to(case.values_R.dtype)


def critic_loss(case: Case, name: str, clip: float | None) -> Outcome:
    targets_R = value_targets(case, name)
    asked = int((~targets_R.isnan()).sum())
    return differentiate(
        case.new_values_R, lambda leaf_R: value_loss(leaf_R, case.values_R, targets_R, num_targets=asked, clip=clip)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """One line of the table."""

    algorithm: str
    compared: str
    kinds: Sequence[str] = USUAL
    ours: Side
    theirs: Side
    note: str = ""
    differs: bool = False  # by design; the note explains why, and when both agree

    def measure(self, seeds: Sequence[int]) -> dict[str, Any]:
        """The largest differences, by number format."""
        row: dict[str, Any] = {
            "algorithm": self.algorithm,
            "compared": self.compared,
            "kinds": list(self.kinds),
            "cases": len(self.kinds) * len(seeds),
            "differs_by_design": self.differs,
            "note": self.note,
        }
        problems = []
        for dtype, tolerance in TOLERANCES.items():
            name = str(dtype).removeprefix("torch.")
            pairs = [
                (self.ours(case), self.theirs(case))
                for case in (make_case(kind, seed).to(dtype) for kind in self.kinds for seed in seeds)
            ]
            gaps = [_gap(ours.value, theirs.value) for ours, theirs in pairs]
            values = [ours.value.sub(theirs.value).abs().max().item() for ours, theirs in pairs]
            slopes = [
                _gap(ours.gradient_R, theirs.gradient_R, relative=True)
                for ours, theirs in pairs
                if ours.gradient_R is not None and theirs.gradient_R is not None
            ]
            row[name] = {"difference": max(values), "gradient_difference": max(slopes, default=None)}
            agrees = [gap <= tolerance for gap in gaps + slopes]  # False for NaN
            if not self.differs and not all(agrees):
                problems.append(f"{name}: {max(gaps + slopes):.1e} is above {tolerance:.0e}")
            if not self.differs and not any(theirs.value.abs().max() > 0 for _, theirs in pairs):
                problems.append(f"{name}: all numbers of the other side are 0, so nothing is compared")
            if self.differs and dtype is torch.float32 and all(agrees):
                problems.append("said to differ by design, but does not")
        return row | {"problems": problems}


def _gap(ours: Tensor, theirs: Tensor, *, relative: bool = False) -> float:
    """The largest difference, relative to the largest number of the other side; below 1 absolute unless `relative`."""
    if ours.shape != theirs.shape:
        raise ValueError(f"cannot compare shapes {tuple(ours.shape)} and {tuple(theirs.shape)}")
    scale = theirs.abs().max().item()
    largest = ours.sub(theirs).abs().max().item()
    if relative:
        return largest / scale if scale else largest
    return largest / max(1.0, scale)


def tables(rows: Sequence[dict[str, Any]]) -> str:
    """Markdown: what agrees, then what differs by design."""
    same = [row for row in rows if not row["differs_by_design"]]
    other = [row for row in rows if row["differs_by_design"]]
    return f"{_table(same)}\n\nWhat differs by design:\n\n{_table(other)}"


def _table(rows: Sequence[dict[str, Any]]) -> str:
    head = ["algorithm", "what is compared", "cases", "max abs difference", "max relative gradient difference", "note"]
    lines = [head, ["---", "---", "---:", "---:", "---:", "---"], *map(_cells, rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _cells(row: dict[str, Any]) -> list[str]:
    figures = [
        " / ".join("" if row[name][figure] is None else f"{row[name][figure]:.0e}" for name in ("float32", "float64"))
        for figure in ("difference", "gradient_difference")
    ]
    shown = [figure.replace("0e+00", "0") if figure != " / " else "" for figure in figures]
    return [f"`{row['algorithm']}`", row["compared"], str(row["cases"]), *shown, row["note"]]


def setting(results: dict[str, Any]) -> str:
    """The command, versions and hardware, as one line."""
    changed = f" with {results['changed_files']} changed files" if results["changed_files"] else ""
    versions = ", ".join(f"{name} {number}" for name, number in results["versions"].items())
    limits = ", ".join(f"{limit:.0e} in {name}" for name, limit in results["tolerances"].items())
    return (
        f"`{results['command']}` at commit {results['commit']}{changed}; {versions}, torch {results['torch']}, "
        f"transformers {results['transformers']}, Python {results['python']}, {results['processor']}; "
        f"seeds {', '.join(map(str, results['seeds']))}. Differences are fp32 / fp64; the command fails above {limits}."
    )


def run(library: str, comparisons: Sequence[Comparison], words: Sequence[str]) -> None:
    """The command line of both scripts."""
    name = f"against_{library}"
    parser = argparse.ArgumentParser(prog=f"python -m benchmarks.{name}")
    parser.add_argument("--seeds", default=",".join(map(str, SEEDS)))
    parser.add_argument("--out", type=Path, default=RESULTS / f"{name}.json")
    parser.add_argument("--page", type=Path, default=PAGE, help="a page with a mark for the table")
    options = parser.parse_args(words)
    seeds = [int(seed) for seed in options.seeds.split(",")]
    rows = [comparison.measure(seeds) for comparison in comparisons]
    problems = [f"{row['algorithm']}, {row['compared']}: {said}" for row in rows for said in row.pop("problems")]
    results = {
        "command": " ".join([f"python -m benchmarks.{name}", *words]),
        **machine(),
        "versions": {library: version(library)},
        "seeds": seeds,
        "tolerances": {str(dtype).removeprefix("torch."): limit for dtype, limit in TOLERANCES.items()},
        "rows": rows,
    }
    print(tables(rows))
    if problems:
        raise SystemExit("\n".join(problems))
    options.out.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    fill(options.page, f"{name}.json", page_part(results))


def page_part(results: dict[str, Any]) -> str:
    return f"\n{tables(results['rows'])}\n\n{setting(results)}\n"
