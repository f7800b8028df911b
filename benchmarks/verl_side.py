"""verl's side of `against_verl.py`: its registered functions, called with the tensors of a case.

Shape suffixes: R = response tokens of a case, D = its steps, B, L = padded rows.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from verl.protocol import DataProto
from verl.trainer.config import AlgoConfig
from verl.trainer.ppo import core_algos
from verl.trainer.ppo.ray_trainer import apply_kl_penalty
from verl.trainer.ppo.rollout_corr_helper import compute_rollout_correction_and_rejection_mask
from verl.workers.config import ActorConfig

from agent_r1.learn.algorithms import Algorithm
from benchmarks.parity import KL_COEF, KL_TARGET, Outcome, differentiate, observed_kls, shared_advantages, trained_case
from benchmarks.parity import value_targets as our_value_targets
from benchmarks.parity_cases import Case, Layout

NO_DUAL_CLIP = 1e20  # always present in verl
AGGREGATIONS = {
    "token": "token-mean",
    "step": "seq-mean-token-mean",  # on a row per step
    "trajectory": "seq-mean-token-mean",
    "constant": "seq-mean-token-sum-norm",
}
LOSSES = {"token_clip": "vanilla", "step_clip": "gspo", "capped_weight": "cispo", "reinforce": "gpg"}
CLIPS = {"clip_low": "clip_ratio_low", "clip_high": "clip_ratio_high"}


# Advantages.


def estimate(estimator: str, layout: Layout, rewards_R: Tensor, **more: Any) -> tuple[Tensor, Tensor]:
    """Advantages and returns of a registered estimator, in the layout."""
    found_BL, returns_BL = core_algos.get_adv_estimator_fn(estimator)(
        token_level_rewards=layout.spread(rewards_R), response_mask=layout.mask_BL.to(rewards_R.dtype), **more
    )
    return layout.gather(found_BL), layout.gather(returns_BL)


def by_group(case: Case, estimator: str, **more: Any) -> Tensor:
    return estimate(estimator, case.episodes, case.rewards_R, index=np.array(case.group_of), **more)[0]


def remax(case: Case) -> Tensor:
    greedy = [group.greedy.total_reward for group in case.groups if group.greedy for _ in group.trajectories]
    baselines_B = torch.tensor(greedy, dtype=case.rewards_R.dtype)
    return estimate("remax", case.episodes, case.rewards_R, reward_baselines=baselines_B)[0]


def token_returns(case: Case, gamma: float = 1.0) -> Tensor:
    config = AlgoConfig(gamma=gamma)
    return estimate("reinforce_plus_plus", case.episodes, case.rewards_R, config=config)[0]


def token_gae(case: Case, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    return _gae(case, gamma, lam)[0]


def token_value_targets(case: Case) -> Tensor:
    return _gae(case, 1.0, 1.0)[1]


def _gae(case: Case, gamma: float, lam: float) -> tuple[Tensor, Tensor]:
    values_BL = case.episodes.spread(case.values_R, fill=9.0)  # verl has to skip text of the environment
    return estimate("gae", case.episodes, case.rewards_R, values=values_BL, gamma=gamma, lam=lam)


def step_returns(case: Case) -> Tensor:
    return _per_step(case, "reinforce_plus_plus", config=AlgoConfig(gamma=1.0))


def step_gae(case: Case, gamma: float = 1.0, lam: float = 1.0) -> Tensor:
    values_BL = case.decisions.spread(case.values_R[case.is_first_R])
    return _per_step(case, "gae", values=values_BL, gamma=gamma, lam=lam)


def _per_step(case: Case, estimator: str, **more: Any) -> Tensor:
    """A step as one token for verl: the sum of its rewards, and the value of its first token."""
    rewards_D = torch.zeros(int(case.is_first_R.sum()), dtype=case.rewards_R.dtype)
    rewards_D = rewards_D.index_add(0, case.step_of_R, case.rewards_R)
    return estimate(estimator, case.decisions, rewards_D, **more)[0][case.step_of_R]


# Losses.


def loss_name(algorithm: Algorithm) -> str:
    function: Any = algorithm.loss
    while isinstance(function, partial):
        function = function.func
    return LOSSES[function.__name__]


def actor(settings: Mapping[str, Any], **changes: Any) -> ActorConfig:
    clip = {key: settings[name] for name, key in CLIPS.items() if name in settings}
    config = {**clip, "clip_ratio_c": settings.get("dual_clip") or NO_DUAL_CLIP, **changes}
    scale = {"loss_scale_factor": settings["horizon"]} if settings["aggregation"] == "constant" else {}
    return ActorConfig(strategy="fsdp", rollout_n=1, use_dynamic_bsz=True, global_batch_info=scale, **config)


def policy_loss(
    case: Case, algorithm: Algorithm, correction: Mapping[str, Any] | None = None, layout: Layout | None = None
) -> Outcome:
    """The registered loss with the settings of our algorithm, on our advantages."""
    settings: dict[str, Any] = dict(algorithm.settings)
    name = loss_name(algorithm)
    trained = trained_case(case, algorithm)
    by_step = settings["aggregation"] == "step" or (correction or {}).get("rollout_is") == "sequence"
    layout = layout or (trained.steps if by_step else trained.episodes)
    advantages_BL = layout.spread(shared_advantages(case, algorithm))
    mask_BL = layout.mask_BL.to(trained.old_R.dtype)
    weights_BL = None
    if correction is not None:
        weights_BL, mask_BL = rollout_correction(trained, layout, correction)
    capped = {"clip_ratio_low": 1.0, "clip_ratio_high": settings["weight_cap"] - 1} if name == "cispo" else {}

    def loss(leaf_R: Tensor) -> Tensor:
        result: Tensor = core_algos.get_policy_loss_fn(name)(
            old_log_prob=layout.spread(trained.old_R, fill=-1.0),
            log_prob=layout.spread(leaf_R, fill=-2.0),
            advantages=advantages_BL,
            response_mask=mask_BL,
            loss_agg_mode=AGGREGATIONS[str(settings["aggregation"])],
            config=actor(settings, **capped),
            rollout_is_weights=weights_BL,
        )[0]
        return result

    return differentiate(trained.logprobs_R, loss)


def rollout_correction(case: Case, layout: Layout, settings: Mapping[str, Any]) -> tuple[Tensor, Tensor]:
    proto, mask_BL, _ = compute_rollout_correction_and_rejection_mask(
        old_log_prob=layout.spread(case.old_R),
        rollout_log_prob=layout.spread(case.sampler_R),
        response_mask=layout.mask_BL.to(case.old_R.dtype),
        **settings,
    )
    return proto.batch["rollout_is_weights"], mask_BL


# KL and critic.


def kl_loss(case: Case, penalty: str) -> Outcome:
    layout = case.episodes
    reference_BL = layout.spread(case.reference_R)

    def loss(leaf_R: Tensor) -> Tensor:
        kl_BL = core_algos.kl_penalty(layout.spread(leaf_R), reference_BL, penalty)
        result: Tensor = core_algos.agg_loss(kl_BL, layout.mask_BL.to(kl_BL.dtype), "token-mean")
        return result

    return differentiate(case.logprobs_R, loss)


def kl_in_reward(case: Case) -> Outcome:
    layout = case.episodes
    data = DataProto.from_dict(
        tensors={
            "response_mask": layout.mask_BL.to(case.old_R.dtype),
            "token_level_scores": layout.spread(case.rewards_R),
            "old_log_probs": layout.spread(case.old_R),
            "ref_log_prob": layout.spread(case.reference_R),
        }
    )
    data, _ = apply_kl_penalty(data, core_algos.FixedKLController(KL_COEF), kl_penalty="kl")
    rewards_R = layout.gather(data.batch["token_level_rewards"])
    found = estimate("reinforce_plus_plus", layout, rewards_R, config=AlgoConfig(gamma=1.0))[0]
    return Outcome(found.double())


def kl_coefficients(case: Case) -> Outcome:
    theirs = core_algos.AdaptiveKLController(init_kl_coef=KL_COEF, target_kl=KL_TARGET, horizon=100)
    found = []
    for kl in observed_kls(case):
        theirs.update(kl, 16)
        found.append(theirs.value)
    return Outcome(torch.tensor(found, dtype=torch.float64))


def critic_loss(case: Case, name: str, clip: float | None) -> Outcome:
    """verl's loss at the tokens that our critic evaluates."""
    layout, targets_R = case.episodes, our_value_targets(case, name)
    mask_BL = layout.spread((~targets_R.isnan()).to(targets_R.dtype))

    def loss(leaf_R: Tensor) -> Tensor:
        result: Tensor = core_algos.compute_value_loss(
            vpreds=layout.spread(leaf_R),
            returns=layout.spread(targets_R.nan_to_num()),
            values=layout.spread(case.values_R),
            response_mask=mask_BL,
            cliprange_value=1e6 if clip is None else clip,
        )[0]
        return result

    return differentiate(case.new_values_R, loss)
