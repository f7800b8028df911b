"""Correction for the sampler: weights for tokens drawn by a policy that is not quite the one being trained.

Sampler and learner compute the same log-probs with other kernels, other number formats or older weights. Weighting a
token by learner / sampler makes its gradient unbiased again; truncating (TIS) or rejecting large weights bounds the
variance. Pure functions.

Shape suffixes: T = trained tokens of one pack.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from agent_r1.learn.losses import MAX_LOG_RATIO


@dataclass(frozen=True, slots=True, kw_only=True)
class Correction:
    """The old log-probs of the loss are then the learner's own, taken before the first optimizer step."""

    kind: Literal["truncate", "reject"]  # weights above the cap: cut to it, or the token is left out
    level: Literal["token", "step"]  # one weight per token, or the product over the response
    cap: float
    floor: float  # reject only: weights below it are left out too

    def weights(self, learner_T: Tensor, sampler_T: Tensor, step_ids_T: Tensor) -> Tensor:
        log_ratio_T = learner_T - sampler_T
        if self.level == "step":
            sums_S = torch.zeros_like(log_ratio_T).index_add(0, step_ids_T, log_ratio_T)  # not more steps than tokens
            log_ratio_T = sums_S[step_ids_T]
        ratio_T = log_ratio_T.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()
        if self.kind == "truncate":
            return ratio_T.clamp(max=self.cap)
        keep_T = (ratio_T >= self.floor) & (ratio_T <= self.cap)
        return torch.where(keep_T, ratio_T, torch.zeros_like(ratio_T))
