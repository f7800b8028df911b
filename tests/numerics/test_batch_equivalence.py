"""Merged, packed and micro-batched training equals the per-step definition."""

from __future__ import annotations

import random
from collections.abc import Sequence
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.learn import Learner, PolicyModel, get_algorithm
from agent_r1.types import CreditedTrajectory
from tests.learn.builders import random_credited, tiny_model

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen2-sliding", "qwen3", "gemma3"]
MODELS: dict[str, Any] = {family: tiny_model(family) for family in FAMILIES}
TEMPERATURE = 0.9

seeds = st.integers(0, 100_000)
kinds = st.sampled_from(["append", "broken", "mixed"])


def by_definition(model: Any, credited: Sequence[CreditedTrajectory]) -> tuple[float, dict[str, torch.Tensor]]:
    """Every step is its own forward pass, every token its own term, in a plain loop."""
    model = deepcopy(model)
    model.set_attn_implementation("eager")
    num_tokens = sum(item.trajectory.num_response_tokens for item in credited)
    total = torch.zeros(())
    for item in credited:
        for step, advantages in zip(item.trajectory.steps, item.advantages, strict=True):
            logits = model(input_ids=torch.tensor([step.prompt_ids + step.response_ids])).logits[0].float()
            logprobs = (logits / TEMPERATURE).log_softmax(-1)
            for k, token in enumerate(step.response_ids):
                ratio = (logprobs[len(step.prompt_ids) + k - 1, token] - step.response_logprobs[k]).exp()
                clipped = ratio.clamp(0.8, 1.2)
                total = total - torch.minimum(ratio * advantages[k], clipped * advantages[k]) / num_tokens
    total.backward()
    return float(total.detach()), gradients_of(model)


def by_learner(
    model: Any, credited: Sequence[CreditedTrajectory], *, max_tokens: int, **policy_settings: Any
) -> tuple[float, dict[str, torch.Tensor]]:
    policy = PolicyModel(deepcopy(model), **policy_settings)
    learner = Learner(
        policy,
        loss=get_algorithm("grpo").loss,
        lr=1e-9,
        temperature=TEMPERATURE,
        betas=(0.9, 0.999),
        weight_decay=0.0,
        max_grad_norm=float("inf"),
        max_tokens_per_pack=max_tokens,
        max_nonfinite_updates=1,
    )
    loss = learner.update(credited)["loss"]
    return loss, gradients_of(policy.model)


def gradients_of(model: Any) -> dict[str, torch.Tensor]:
    return {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@given(seed=seeds, kind=kinds, family=st.sampled_from(FAMILIES), max_tokens=st.integers(1, 80))
@settings(max_examples=40, deadline=None)
def test_merged_and_packed_training_equals_one_forward_per_step(
    seed: int, kind: str, family: str, max_tokens: int
) -> None:
    credited = random_credited(random.Random(seed), kind=kind, count=3)
    expected_loss, expected = by_definition(MODELS[family], credited)
    loss, gradients = by_learner(MODELS[family], credited, max_tokens=max_tokens)
    assert loss == pytest.approx(expected_loss, rel=1e-5, abs=1e-5)
    # Element by element; the largest of 240 draws over all families used 0.47 of this.
    torch.testing.assert_close(gradients, expected, rtol=1e-5, atol=1e-5)


@given(seed=seeds, kind=kinds, max_tokens=st.integers(1, 60), max_logits=st.sampled_from([32, 96, 2**20]))
@settings(max_examples=30, deadline=None)
def test_pack_size_order_and_chunking_do_not_change_the_gradient(
    seed: int, kind: str, max_tokens: int, max_logits: int
) -> None:
    rng = random.Random(seed)
    credited = random_credited(rng, kind=kind, count=4)
    shuffled = rng.sample(credited, len(credited))
    _, one_pack = by_learner(MODELS["llama-tied"], credited, max_tokens=10_000)
    _, many_packs = by_learner(MODELS["llama-tied"], shuffled, max_tokens=max_tokens, max_logits=max_logits)
    assert distance(many_packs, one_pack) < 2e-6  # rounding of fp32; the largest of 500 draws was 8e-7


def distance(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """Relative to the length of the whole gradient: its size depends on the ratios drawn, rounding grows with it."""
    difference, whole = (torch.cat([x.flatten() for x in g]) for g in ([a[k] - b[k] for k in b], b.values()))
    return float(difference.norm() / whole.norm())
