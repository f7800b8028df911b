"""A mini-batch: what one optimizer step trains on, laid out in packs and columns, and a rank's share of it.

With sharded weights every forward and backward pass is a collective operation, so all ranks must make the same number
of passes. A rank with fewer packs makes up for them with tiny packs of weight 0. Nothing here knows models.

Shape suffixes: R = response tokens of the mini-batch, T = trained tokens of a pack.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor

from agent_r1.learn.batch.packs import (
    Pack,
    Segment,
    column,
    column_with_gaps,
    merge_steps,
    nested,
    pack,
    step_sizes,
    trajectory_sizes,
)
from agent_r1.learn.losses import (
    KL_PENALTIES,
    Correction,
    Counts,
    KLEstimator,
    LossInputs,
    LossOutput,
    ratio_report,
)
from agent_r1.ranks.crew import OneProcess
from agent_r1.types import CreditedTrajectory, PerToken, Trajectory

FILLER = Segment(trajectory_id=0, token_ids=[0] * 4, trained=[1, 2, 3], columns=[0] * 3, step_indices=[0] * 3)
NOTES = ("ratios", "entropies")  # per token: new to old probability in the loss; entropy of its distribution


@dataclass(frozen=True, slots=True, kw_only=True)
class Columns:
    """Data about each response token. After `at` has selected the tokens of a pack, R is the pack's T."""

    old_logprobs_R: Tensor
    advantages_R: Tensor
    step_sizes_R: Tensor
    trajectory_sizes_R: Tensor
    importance_R: Tensor
    values_R: Tensor | None = None  # the critic's values before the update
    targets_R: Tensor | None = None  # the critic's target; NaN where it is not trained
    reference_logprobs_R: Tensor | None = None
    sampler_logprobs_R: Tensor | None = None  # set if the old log-probs are the learner's

    def at(self, columns_T: Tensor) -> Columns:
        return self._map(lambda tensor_R: tensor_R[columns_T])

    @staticmethod
    def join(parts: Sequence[Columns]) -> Columns:
        """Concatenate the columns of several mini-batches."""
        present = [f.name for f in fields(Columns) if getattr(parts[0], f.name) is not None]
        return Columns(**{name: torch.cat([getattr(part, name) for part in parts]) for name in present})

    def to(self, device: torch.device) -> Columns:
        return self._map(lambda tensor_R: tensor_R.to(device))

    def loss_inputs(self, logprobs_T: Tensor, step_ids_T: Tensor, counts: Counts) -> LossInputs:
        """Return the inputs of the loss of a pack, whose tokens `at` has selected."""
        return LossInputs(
            logprobs_T=logprobs_T,
            old_logprobs_T=self.old_logprobs_R,
            advantages_T=self.advantages_R,
            importance_T=self.importance_R,
            step_ids_T=step_ids_T,
            step_sizes_T=self.step_sizes_R,
            trajectory_sizes_T=self.trajectory_sizes_R,
            counts=counts,
        )

    def _map(self, function: Callable[[Tensor], Tensor]) -> Columns:
        present = {f.name: getattr(self, f.name) for f in fields(self) if getattr(self, f.name) is not None}
        return Columns(**{name: function(tensor) for name, tensor in present.items()})


@dataclass(frozen=True, slots=True, kw_only=True)
class MiniBatch:
    share: Share  # this rank's
    columns: Columns  # over all ranks
    counts: Counts  # over all ranks
    num_segments: int  # over all ranks
    num_targets: int  # tokens at which the critic is trained, over all ranks
    has_advantages: bool  # whether any token of any rank has an advantage
    trajectories: list[Trajectory]
    notes: dict[str, Tensor]  # R: what the last pass computed at each token; NaN where there was none

    @property
    def trajectory_names(self) -> list[str]:
        return [trajectory.trajectory_id for trajectory in self.trajectories]

    @property
    def packs(self) -> list[Pack]:
        """The packs of this rank."""
        return self.share.packs

    def with_columns(self, **columns: Any) -> MiniBatch:
        return replace(self, columns=replace(self.columns, **columns))

    def note(self, columns_T: Tensor, **numbers_T: Tensor) -> None:
        for name, values_T in numbers_T.items():
            self.notes[name][columns_T] = values_T.detach().float()

    def noted(self) -> dict[str, dict[str, PerToken]]:
        """Return the notes of all ranks by trajectory."""
        found = {name: nested(self.share.exchange(notes_R), self.trajectories) for name, notes_R in self.notes.items()}
        names = enumerate(self.trajectory_names)
        return {name: {note: values[index] for note, values in found.items()} for index, name in names}


def prepare(
    credited: Sequence[CreditedTrajectory],
    *,
    max_tokens: int,
    device: torch.device,
    ranks: OneProcess,
    keep_idle: bool,
    **settings: Any,
) -> MiniBatch:
    """Merge and pack; `settings` are for `pack`. A segment without advantage adds exactly 0 to a policy loss, so it is
    counted but not computed, unless something else (a KL, an entropy, a critic) needs it: `keep_idle`."""
    trajectories = [item.trajectory for item in credited]
    columns = _columns(credited)
    advantages = columns.advantages_R.tolist()

    def matters(segment: Segment) -> bool:
        return keep_idle or any(advantages[index] for index in segment.columns)

    segments = [segment for segment in merge_steps(trajectories) if matters(segment)]
    rows = [trajectory.row_id for trajectory in trajectories]
    return MiniBatch(
        share=share_out(segments, rows, ranks, max_tokens=max_tokens, device=device, **settings),
        columns=columns.to(device),
        counts=Counts(
            tokens=len(advantages),
            steps=sum(1 for each in trajectories for step in each.steps if step.response_ids),
            trajectories=sum(1 for each in trajectories if each.num_response_tokens),
        ),
        num_segments=len(segments),
        num_targets=0 if columns.targets_R is None else int((~columns.targets_R.isnan()).sum()),
        has_advantages=any(advantages),
        trajectories=trajectories,
        notes={name: torch.full((len(advantages),), math.nan, device=device) for name in NOTES},
    )


def reshuffle(credited: Sequence[CreditedTrajectory], key: str) -> list[int]:
    """Shuffle the rows, and the attempts at each row, in an order that depends only on `key`; return positions.

    Attempts at a row stay together, so that they can still share the prefix of their prompts.
    """
    rows: dict[str, list[int]] = {}
    for position, item in enumerate(credited):
        rows.setdefault(item.trajectory.row_id, []).append(position)
    rng, groups = random.Random(key), list(rows.values())
    rng.shuffle(groups)
    return [position for group in groups for position in rng.sample(group, len(group))]


def columns_at(columns: Columns, credited: Sequence[CreditedTrajectory], order: Sequence[int]) -> Columns:
    """Select the columns of the trajectories at these positions from the columns of all `credited`."""
    sizes = [item.trajectory.num_response_tokens for item in credited]
    ends = list(accumulate(sizes))
    index = [column for position in order for column in range(ends[position] - sizes[position], ends[position])]
    return columns.at(torch.tensor(index, dtype=torch.int64, device=columns.advantages_R.device))


def _columns(credited: Sequence[CreditedTrajectory]) -> Columns:
    trajectories = [item.trajectory for item in credited]
    advantages_R = column([item.advantages for item in credited])
    has_values = bool(credited) and all(item.values is not None for item in credited)
    return Columns(
        old_logprobs_R=column([[step.response_logprobs for step in each.steps] for each in trajectories]),
        advantages_R=advantages_R,
        step_sizes_R=step_sizes(trajectories),
        trajectory_sizes_R=trajectory_sizes(trajectories),
        importance_R=torch.ones_like(advantages_R),
        values_R=column([item.values or [] for item in credited]) if has_values else None,
        targets_R=column_with_gaps([item.value_targets or [] for item in credited]) if has_values else None,
    )


def with_own_logprobs(batch: MiniBatch, logprobs: Callable[[Pack], Tensor], correction: Correction | None) -> MiniBatch:
    """Replace the old log-probs by the learner's; `correction` weights tokens by the disagreement."""
    sampler_R = batch.columns.old_logprobs_R
    learner_R = batch.share.column(logprobs, sampler_R)
    importance_R = batch.columns.importance_R.clone()
    if correction is not None:
        for part in batch.packs:
            index_T = part.columns_T
            importance_R[index_T] = correction.weights(learner_R[index_T], sampler_R[index_T], part.step_ids_T)
        importance_R = batch.share.exchange(importance_R)
    return batch.with_columns(old_logprobs_R=learner_R, importance_R=importance_R, sampler_logprobs_R=sampler_R)


@dataclass(frozen=True, slots=True, kw_only=True)
class RegularizedLoss:
    """An algorithm's loss of a pack, with a KL to the reference and an entropy bonus."""

    loss: Callable[[LossInputs], LossOutput]
    kl_coef: float
    kl_estimator: KLEstimator | None  # required with kl_coef
    entropy_coef: float

    def of(
        self, columns: Columns, logprobs_T: Tensor, entropy_T: Tensor | None, step_ids_T: Tensor, counts: Counts
    ) -> LossOutput:
        """Return the loss of one pack, whose tokens are in `columns`."""
        output = self.loss(columns.loss_inputs(logprobs_T, step_ids_T, counts))
        loss, sums, maxima = output.loss, dict(output.sums), output.maxima
        if entropy_T is not None:
            sums["entropy"] = entropy_T.detach().sum()
            if self.entropy_coef > 0:
                loss = loss - self.entropy_coef * entropy_T.sum() / counts.tokens
        if self.kl_coef > 0:
            assert self.kl_estimator is not None
            assert columns.reference_logprobs_R is not None
            kl_T = KL_PENALTIES[self.kl_estimator](logprobs_T, columns.reference_logprobs_R, columns.old_logprobs_R)
            # The KL is estimated from the sampler's tokens, so it is corrected like the loss. The entropy is exact.
            loss = loss + self.kl_coef * (columns.importance_R * kl_T).sum() / counts.tokens
            sums["kl_to_reference"] = kl_T.detach().sum()
        if columns.sampler_logprobs_R is not None and len(logprobs_T):
            more, most = mismatch_report(columns)
            sums, maxima = sums | more, maxima | most
        return LossOutput(loss=loss, sums=sums, maxima=maxima)


def mismatch_report(columns: Columns) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Sums and maxima over a pack's tokens: the disagreement of sampler and learner, and the correcting weights."""
    assert columns.sampler_logprobs_R is not None
    sums, maxima = ratio_report(columns.old_logprobs_R - columns.sampler_logprobs_R)
    return {
        "mismatch_kl": sums["approx_kl"],
        "importance_mean": columns.importance_R.sum(),
        "importance_rejected": (columns.importance_R == 0).sum(),
    }, {"mismatch_max": maxima["log_ratio_max"]}


def layout(packs: Sequence[Pack]) -> dict[str, int]:
    return {
        "packs": len(packs),
        "segments": sum(len(part.lengths) for part in packs),
        "steps": sum(int(part.step_ids_T.max()) + 1 for part in packs),
        "tokens_trained": sum(part.num_trained for part in packs),
        "tokens_computed": sum(part.num_tokens for part in packs),
        "tokens_flat": sum(sum(part.lengths) for part in packs),
    }


def layout_metrics(
    credited: Sequence[CreditedTrajectory], ranks: Sequence[dict[str, int]], max_tokens: int
) -> dict[str, float]:
    """How the batch was laid out, on all ranks together; counts are per epoch."""
    total = {name: float(sum(one[name] for one in ranks)) for name in ranks[0]}
    steps, room = total.pop("steps"), total["packs"] * max_tokens
    return total | {
        "trajectories": float(len(credited)),
        "tokens": float(sum(item.trajectory.num_response_tokens for item in credited)),
        "steps_per_segment": steps / total["segments"] if total["segments"] else 0.0,
        "packing_efficiency": total["tokens_computed"] / room if room else 0.0,
    }


def culprits(batch: MiniBatch, logprobs: Sequence[Tensor]) -> list[str]:
    """This rank's trajectories with a number that is not finite; none if only the gradient overflowed."""
    bad: set[int] = set()
    for part, logprobs_T in zip(batch.packs, logprobs, strict=True):
        columns = batch.columns.at(part.columns_T)
        suspect_T = logprobs_T + columns.old_logprobs_R + columns.advantages_R + columns.importance_R
        if columns.values_R is not None and columns.targets_R is not None:
            suspect_T = suspect_T + columns.values_R + columns.targets_R.nan_to_num(0.0, math.inf, -math.inf)
        bad.update(part.trajectory_ids_T[~suspect_T.isfinite()].tolist())
    return [batch.trajectory_names[i] for i in sorted(bad)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Share:
    packs: list[Pack]
    fillers: list[Pack]
    ranks: OneProcess

    def column(self, model: Callable[[Pack], Tensor], like_R: Tensor) -> Tensor:
        """Run a model on the packs of all ranks and put its numbers into a column like `like_R`; NaN for tokens in none
        of the packs."""
        result_R = torch.full_like(like_R, float("nan"))
        for part in self.packs:
            result_R[part.columns_T] = model(part).float()
        for part in self.fillers:
            model(part)
        return self.exchange(result_R)

    def exchange(self, column_R: Tensor) -> Tensor:
        """Complete a column with the numbers of the other ranks at their tokens."""
        if self.ranks.size > 1:
            indices = [part.columns_T for part in self.packs]
            index = torch.cat(indices) if indices else torch.empty(0, dtype=torch.int64, device=column_R.device)
            for theirs, numbers in self.ranks.gather((index.cpu(), column_R[index].cpu())):
                column_R[theirs.to(column_R.device)] = numbers.to(column_R.device)
        return column_R


def share_out(
    segments: Sequence[Segment], rows: Sequence[str], ranks: OneProcess, *, max_tokens: int, **settings: Any
) -> Share:
    """Pack the segments of this rank's rows. `rows` has the row of each trajectory; `settings` are for `pack`."""
    owners = assign_rows(segments, rows, ranks.size)
    packs = pack([s for s in segments if owners[rows[s.trajectory_id]] == ranks.rank], max_tokens, **settings)
    missing = max(ranks.gather(len(packs))) - len(packs)
    fillers = pack([FILLER], max_tokens, device=settings["device"]) * missing if missing else []
    return Share(packs=packs, fillers=fillers, ranks=ranks)


def assign_rows(segments: Sequence[Segment], rows: Sequence[str], size: int) -> dict[str, int]:
    """The rank of each row: large rows first, each to the rank with the fewest tokens so far. Attempts at a row stay
    together, so that they can share a prefix."""
    tokens: dict[str, int] = {}
    for segment in segments:
        row = rows[segment.trajectory_id]
        tokens[row] = tokens.get(row, 0) + len(segment.token_ids)
    owners, loads = {}, [0] * size
    for row in sorted(tokens, key=lambda row: -tokens[row]):  # stable: rows of equal size stay in order
        owners[row] = loads.index(min(loads))
        loads[owners[row]] += tokens[row]
    return owners
