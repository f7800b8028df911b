"""The token ids that the sampler could choose from, for every trained token (its support).

With top-k or top-p a token is drawn from a truncated and renormalised distribution. The ratio is correct only if the
learner renormalises over exactly the ids that the sampler kept (DeepSeek-V3.2, arXiv:2512.02556, "Keep Sampling Mask").
The lists stay in host memory and are copied to the device chunk by chunk, so they do not reduce the memory for packs.

Shape suffixes: T = tokens, C = tokens of a chunk, K = most ids that a token of the chunk has.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from agent_r1.errors import DataError
from agent_r1.types import ByRole, Step, Trajectory, of_role


@dataclass(frozen=True, slots=True, kw_only=True)
class Supports:
    """Ragged lists of ids: token t has `ids[starts[t] : starts[t + 1]]`."""

    starts: NDArray[np.int64]  # one more than there are tokens
    ids: NDArray[np.int32]

    def at(self, columns_T: NDArray[np.int64]) -> Supports:
        """The lists of these tokens, in this order."""
        first_T, counts_T = self.starts[columns_T], np.diff(self.starts)[columns_T]
        starts = np.concatenate([[0], counts_T.cumsum()])
        places = np.repeat(first_T - starts[:-1], counts_T) + np.arange(starts[-1])
        return Supports(starts=starts, ids=self.ids[places])

    def chunk(self, rows: slice, device: torch.device) -> Tensor:
        """[C, K], padded with -1."""
        starts = self.starts[rows.start : rows.stop + 1]
        counts_C = np.diff(starts)
        ids_CK = np.full((len(counts_C), counts_C.max(initial=1)), -1, dtype=np.int64)
        ids_CK[np.arange(ids_CK.shape[1]) < counts_C[:, None]] = self.ids[starts[0] : starts[-1]]
        return torch.from_numpy(ids_CK).to(device, non_blocking=True)


def supports_of(trajectories: Sequence[Trajectory], *, temperature: ByRole) -> Supports | None:
    """Return the supports of all response tokens; None if they were sampled from the whole vocabulary.

    Raises `DataError` for steps whose log-probs the learner cannot reproduce: another temperature, or a truncated
    distribution whose support is unknown.
    """
    steps = list(_steps(trajectories))
    for place, step in steps:
        _check(step, place, of_role(temperature, step.role))
    kept = [step.support for _, step in steps if step.support is not None]
    if not kept:
        return None
    if len(kept) < len(steps):
        place = next(place for place, step in steps if step.support is None)
        raise DataError(f"{place} was sampled from the whole vocabulary, but other steps of the batch were not")
    counts_T = np.concatenate([np.frombuffer(support.counts, dtype="<i4") for support in kept]).astype(np.int64)
    supports = Supports(
        starts=np.concatenate([[0], counts_T.cumsum()]),
        ids=np.concatenate([np.frombuffer(support.ids, dtype="<i4") for support in kept]),
    )
    _check_members(supports, steps)
    return supports


def _steps(trajectories: Sequence[Trajectory]) -> Iterator[tuple[str, Step]]:
    """The steps with response tokens, each with a name for errors."""
    for trajectory in trajectories:
        for index, step in enumerate(trajectory.steps):
            if step.response_ids:
                yield f"step {index} of trajectory {trajectory.trajectory_id!r}", step


def _check(step: Step, place: str, temperature: float) -> None:
    if step.temperature is not None and step.temperature != temperature:
        raise DataError(
            f"{place} was sampled at temperature {step.temperature:g}, but the learner computes log-probs at "
            f"{temperature:g}: use the same temperature"
        )
    if step.is_restricted and step.support is None:
        raise DataError(
            f"{place} was sampled with top_p={step.top_p:g} and top_k={step.top_k}, but the ids that these kept were "
            "not recorded. Set rollout.top_k, or sample with Sampling(keep_support=True)"
        )


def _check_members(supports: Supports, steps: Sequence[tuple[str, Step]]) -> None:
    """Refuse a sampled token outside its support: its probability would be 0."""
    sampled_T = np.concatenate([np.asarray(step.response_ids) for _, step in steps])
    owner = np.repeat(np.arange(len(sampled_T)), np.diff(supports.starts))
    found_T = np.bincount(owner[supports.ids == sampled_T[owner]], minlength=len(sampled_T))
    if (found_T != 1).any():
        bad = int((found_T != 1).argmax())
        step_of_T = np.repeat(np.arange(len(steps)), [len(step.response_ids) for _, step in steps])
        raise DataError(
            f"the sampled token {sampled_T[bad]} of {steps[step_of_T[bad]][0]} occurs {found_T[bad]} times in its "
            "support instead of once"
        )
