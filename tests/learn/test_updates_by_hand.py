"""Several updates of a batch, against a plain loop: one forward pass per step, no packs, no columns, no stop-gradients.

Everything that belongs to a token has to follow it through mini-batches that are reshuffled between epochs: its old
log-prob, its weight from the correction, the ids it was sampled from, and the log-prob of the reference.
"""

from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import dataclass, replace
from typing import Any, Literal

import pytest
import torch
from torch import Tensor

from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.learn.batch.minibatch import reshuffle
from agent_r1.learn.losses import Correction
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.learn.optimizer import schedule
from agent_r1.types import CreditedTrajectory, Step, Support
from tests.learn.builders import VOCABULARY, learner_for, random_credited, tiny_model
from tests.learn.test_support import by_definition

FAMILY = "llama-tied"
LR, MAX_NORM, KL, EPOCHS, UPDATES, COUNT = 3e-3, 0.5, 0.2, 3, 2, 7
RATE = schedule("linear", warmup_steps=2, total=UPDATES * EPOCHS * 2, floor=0.1)


def batch(rng: random.Random) -> list[CreditedTrajectory]:
    """Sampled from truncated distributions by a sampler that disagrees. The third attempt teaches nothing."""
    model = tiny_model(FAMILY)

    def kept(token: int) -> list[int]:
        return sorted({token, *rng.sample(range(VOCABULARY), rng.randint(1, 6))})

    def sampled(made: Step) -> Step:
        made = replace(made, temperature=1.0, top_k=8, support=Support.of(map(kept, made.response_ids)))
        with torch.no_grad():
            own = by_definition(model, made)[0].tolist() if made.response_ids else []
        return replace(made, response_logprobs=[value + rng.gauss(0, 0.3) for value in own])

    credited = [
        replace(
            item, trajectory=replace(item.trajectory, row_id=f"r{n // 2}", steps=[*map(sampled, item.trajectory.steps)])
        )
        for n, item in enumerate(random_credited(rng, kind="mixed", count=COUNT))
    ]
    credited[2] = replace(credited[2], advantages=[[0.0] * len(row) for row in credited[2].advantages])
    return credited


@dataclass(frozen=True, kw_only=True)
class Known:
    """About one step, before an update."""

    made: Step
    advantages: Tensor
    old: Tensor
    weights: Tensor
    reference: Tensor


def steps_of(item: CreditedTrajectory, model: Any, reference: Any, correction: Correction | None) -> list[Known]:
    found = []
    for made, advantages in zip(item.trajectory.steps, item.advantages, strict=True):
        if made.response_ids:
            with torch.no_grad():
                own, other = (by_definition(each, made)[0] for each in (model, reference))
            ratio = own - torch.tensor(made.response_logprobs)
            weights = torch.ones_like(own)
            if correction is not None:
                weights = (ratio.sum().expand_as(ratio) if correction.level == "step" else ratio).exp()
                above = weights > correction.cap
                weights[above] = correction.cap if correction.kind == "truncate" else 0.0
            known = Known(made=made, advantages=torch.tensor(advantages), old=own, weights=weights, reference=other)
            found.append(known)
    return found


def loss_of(trajectories: list[list[Known]], model: Any, name: str) -> Tensor:
    """The mean over steps (gspo) or tokens (grpo) of the clipped objective, plus the KL per token."""
    settings: dict[str, Any] = ALGORITHMS[name].settings
    low, high = 1 - settings["clip_low"], 1 + settings["clip_high"]
    steps = [step for trajectory in trajectories for step in trajectory]
    tokens, loss = sum(len(step.old) for step in steps), torch.zeros(())
    for step in steps:
        logprobs, _ = by_definition(model, step.made)
        change = logprobs - step.old
        distance = step.reference - logprobs
        loss = loss + KL * (step.weights * (distance.exp() - 1 - distance)).sum() / tokens
        if name == "grpo":
            ratio = change.exp()
            gain = (ratio * step.advantages).minimum(ratio.clamp(low, high) * step.advantages)
            loss = loss - (step.weights * gain).sum() / tokens
        else:  # each token has the gradient of its own log-prob, times the ratio of the step
            ratio = change.detach().mean().exp()
            stopped = ((ratio > high) & (step.advantages > 0)) | ((ratio < low) & (step.advantages < 0))
            gain = torch.where(stopped, 0.0, ratio * step.advantages) * logprobs
            loss = loss - (step.weights * gain).sum() / (len(steps) * len(step.old))
    return loss


CORRECTIONS: list[tuple[Literal["truncate", "reject"], Literal["token", "step"]]] = [
    ("truncate", "token"),
    ("reject", "token"),
    ("truncate", "step"),
]


@pytest.mark.parametrize("name", ["gspo", "grpo"])
@pytest.mark.parametrize(("kind", "level"), CORRECTIONS, ids=[f"{kind} {level}s" for kind, level in CORRECTIONS])
def test_three_epochs_of_two_mini_batches_end_where_a_plain_loop_does(
    name: str, kind: Literal["truncate", "reject"], level: Literal["token", "step"]
) -> None:
    credited, reference = batch(random.Random(1)), tiny_model(FAMILY, seed=7)
    correction = Correction(kind=kind, level=level, cap=1.3, floor=0.0)
    learner = learner_for(
        name,
        PolicyModel(tiny_model(FAMILY)),
        reference=PolicyModel(deepcopy(reference)),
        lr=LR,
        schedule=RATE,
        max_grad_norm=MAX_NORM,
        num_epochs=EPOCHS,
        num_minibatches=2,
        kl_coef=KL,
        kl_estimator="k3",
        correction=correction,
        max_tokens_per_pack=60,
        prefix_sharing="on",
    )
    for _ in range(UPDATES):
        assert learner.update(credited)["importance_mean"] != pytest.approx(1.0, abs=1e-3)

    model, start = tiny_model(FAMILY), tiny_model(FAMILY).state_dict()
    parameters = list(model.parameters())
    adam = torch.optim.AdamW(parameters, betas=learner.betas, eps=learner.adam_eps, weight_decay=0.0)
    taken = 0
    for update in range(UPDATES):
        known = [steps_of(item, model, reference, correction) for item in credited]
        later = [reshuffle(credited, f"epoch:0:{update}:{epoch}") for epoch in range(1, EPOCHS)]
        for order in [list(range(COUNT)), *later]:
            for part in (order[: COUNT // 2], order[COUNT // 2 :]):
                adam.zero_grad()
                loss_of([known[position] for position in part], model, name).backward()
                torch.nn.utils.clip_grad_norm_(parameters, MAX_NORM)
                taken += 1
                adam.param_groups[0]["lr"] = LR * RATE(taken, taken)
                adam.step()
    expected = model.state_dict()
    assert max((expected[key] - start[key]).abs().max().item() for key in start) > 1e-2
    for key, weight in learner.weights().items():
        torch.testing.assert_close(weight, expected[key], rtol=0, atol=1e-4)
