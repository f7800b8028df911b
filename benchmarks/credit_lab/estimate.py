"""Estimate the gradient from one batch with our code, and compare estimates with the exact gradient.

Shape suffixes: T = trained tokens, P = rows of the policy, A = choices, B = batches, D = all its entries.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from agent_r1.learn.algorithms import Algorithm
from agent_r1.learn.credit import assign_credit, attempts_of, trainable
from agent_r1.learn.losses import Counts, LossInputs
from agent_r1.learn.rewards import ProcessScaling, RewardShaper
from agent_r1.types import CreditedTrajectory, Group
from benchmarks.credit_lab.exact import expected_gradient, token_logits
from benchmarks.credit_lab.play import ROWS_PER_BATCH, Player, token_contexts
from benchmarks.credit_lab.variants import LearnedCritic, ValueFunction, Variant, oracle
from benchmarks.credit_lab.worlds import World

RESPONSE_LIMIT = 16  # no response reaches it
EPISODES = 32  # signal-to-noise is scaled to this size, since dynamic sampling uses larger batches


def shaper_for(algorithm: Algorithm, process: ProcessScaling = "raw") -> RewardShaper:
    return RewardShaper(
        process=process,
        overlong_limit=RESPONSE_LIMIT,
        overlong_buffer=algorithm.overlong_buffer,
        overlong_penalty=algorithm.overlong_penalty,
    )


def credit(
    groups: Sequence[Group], algorithm: Algorithm, *, shaper: RewardShaper, values: ValueFunction | None
) -> list[CreditedTrajectory]:
    """As in the trainer, including dynamic sampling."""
    groups = trainable(groups, algorithm, shaper)
    if algorithm.sampling_rounds > 1:
        groups = groups[:ROWS_PER_BATCH]
    asked = values(attempts_of(groups)) if values is not None and algorithm.needs_critic else None
    return assign_credit(groups, algorithm, shaper=shaper, values=asked)


def loss_of(world: World, policy_PA: Tensor, credited: Sequence[CreditedTrajectory], algorithm: Algorithm) -> Tensor:
    steps = [(item, k, step) for item in credited for k, step in enumerate(item.trajectory.steps)]
    sizes = torch.tensor([len(step.response_ids) for _, _, step in steps])
    lengths = torch.tensor([float(item.trajectory.num_response_tokens) for item, _, _ in steps], dtype=torch.float64)
    contexts_T = torch.tensor([x for _, _, step in steps for x in token_contexts(world, step)])
    choices_T = torch.tensor([choice for _, _, step in steps for choice in step.response_ids])
    advantages_T = torch.tensor([a for item, k, _ in steps for a in item.advantages[k]], dtype=torch.float64)
    inputs = LossInputs(
        logprobs_T=token_logits(world, policy_PA).log_softmax(-1)[contexts_T, choices_T],
        old_logprobs_T=torch.tensor([p for _, _, s in steps for p in s.response_logprobs], dtype=torch.float64),
        advantages_T=advantages_T,
        importance_T=torch.ones_like(advantages_T),
        step_ids_T=torch.arange(len(steps)).repeat_interleave(sizes),
        step_sizes_T=sizes.double().repeat_interleave(sizes),
        trajectory_sizes_T=lengths.repeat_interleave(sizes),
        counts=Counts(tokens=int(sizes.sum()), steps=len(steps), trajectories=len(credited)),
    )
    loss: Tensor = algorithm.loss(inputs).loss
    return loss


@dataclass(frozen=True, slots=True, kw_only=True)
class Gradients:
    """Estimates of one gradient, each from a separate batch."""

    estimates_BD: Tensor
    exact_D: Tensor
    episodes_per_batch: float


def estimate_gradients(
    world: World, variant: Variant, policy_PA: Tensor, *, batches: int, critic_batches: int, seed: int
) -> Gradients:
    """At a fixed policy. A learned critic is first fitted to `critic_batches` other batches, then fixed."""
    algorithm = variant.build()
    shaper = shaper_for(algorithm)
    values = _fixed_critic(world, variant, policy_PA, batches=critic_batches, seed=seed + 1)
    player = Player(world=world, seed=seed)
    leaf_PA = policy_PA.detach().clone().requires_grad_()
    estimates = []
    for _ in range(batches):
        credited = credit(player.batch(policy_PA, algorithm), algorithm, shaper=shaper, values=values)
        if not credited:  # dynamic sampling left nothing to learn from: the update is skipped
            estimates.append(torch.zeros(leaf_PA.numel(), dtype=torch.float64))
            continue
        (gradient_PA,) = torch.autograd.grad(-loss_of(world, leaf_PA, credited, algorithm), leaf_PA)
        estimates.append(gradient_PA.flatten())
    return Gradients(
        estimates_BD=torch.stack(estimates),
        exact_D=expected_gradient(world, policy_PA).flatten(),
        episodes_per_batch=player.episodes / batches,
    )


def _fixed_critic(
    world: World, variant: Variant, policy_PA: Tensor, *, batches: int, seed: int
) -> ValueFunction | None:
    algorithm = variant.build()
    if not algorithm.needs_critic:
        return None
    if variant.critic == "oracle":
        return oracle(world, policy_PA)
    critic, player = LearnedCritic(world), Player(world=world, seed=seed)
    for _ in range(batches):
        groups = player.batch(policy_PA, algorithm)
        critic.fit(credit(groups, algorithm, shaper=shaper_for(algorithm), values=critic.values))
    return critic.values


@dataclass(frozen=True, slots=True, kw_only=True)
class Quality:
    """Quality of the estimates. Both numbers ignore scale, which whitening and the learning rate set anyway."""

    cosine: float | None  # of the expected estimate with the exact gradient; None if noise hides it
    cosine_error: float | None  # standard error
    snr: float  # norm of the expected estimate over its standard deviation, for one batch of `EPISODES`


def judge(gradients: Gradients) -> Quality:
    """Judge estimates without the bias of their mean, whose norm is too large by the remaining noise.

    The mean of <g_i, g_j> over different batches estimates |E g|^2 without bias. The standard error is that of the
    jackknife, leaving out one batch at a time.
    """
    count = len(gradients.estimates_BD)
    gram_BB = gradients.estimates_BD @ gradients.estimates_BD.T
    along_B = gradients.estimates_BD @ (gradients.exact_D / gradients.exact_D.norm())
    own_B = gram_BB.diagonal()
    pairs_B = gram_BB.sum(-1) - own_B  # each batch with all others
    signal = float(pairs_B.sum()) / (count * (count - 1))
    noise = float(own_B.mean()) - signal
    snr = (max(0.0, signal) / max(noise, 1e-30) * EPISODES / gradients.episodes_per_batch) ** 0.5
    left_out_B = (pairs_B.sum() - 2 * pairs_B) / ((count - 1) * (count - 2))
    if signal <= 0 or bool((left_out_B <= 0).any()):
        return Quality(cosine=None, cosine_error=None, snr=snr)
    cosine = float(along_B.mean()) / signal**0.5
    without_B = (along_B.sum() - along_B) / (count - 1) / left_out_B.sqrt()
    error = float(((count - 1) / count * (without_B - without_B.mean()).square().sum()).sqrt())
    return Quality(cosine=cosine, cosine_error=error, snr=snr)
