"""The gradient of the model is that of the per-step definition, whatever the layout of the batch.

By definition: one forward pass per step through the model's own attention, and the slow reference of the
loss (`loss_reference.py`). The learner's fp32 gradients must be near it, and next to each other: neither packing,
micro-batches, padding, order nor chunks may show. Ranks: tests/learn/test_parallel.py.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from copy import deepcopy
from typing import Any

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from torch import Tensor

from agent_r1.learn.algorithms import ALGORITHMS
from agent_r1.learn.batch.minibatch import prepare
from agent_r1.learn.batch.packs import Pack
from agent_r1.learn.learner import Learner
from agent_r1.learn.losses import value_loss
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.ranks.crew import OneProcess
from agent_r1.types import CreditedTrajectory, Group
from tests.learn.builders import credit_for, critic_of, gradients_of, learner_for, on_policy, random_groups, tiny_model
from tests.numerics import loss_reference
from tests.numerics.loss_reference import REFERENCES, Slopes, Token

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen2-sliding", "qwen3", "gemma3"]
MODELS: dict[str, Any] = {family: tiny_model(family) for family in FAMILIES}
# (algorithm, whether its critic shares the backbone)
CASES = [(name, False) for name in ALGORITHMS] + [(n, True) for n, row in ALGORITHMS.items() if row.needs_critic]
IDS = [f"{name}{'-shared' if shared else ''}" for name, shared in CASES]
# (of any element, of the whole relative to its length), for gradients of order 1. The largest of 90 draws or more were
# 3e-7 and 3e-7 between layouts of ours, 6e-7 and 9e-7 to padded rows, whose attention is another kernel.
# Largest and relative difference. Sums in another order differ by about 1e-6 in float32 (1.05e-6 was seen).
LAYOUT_BOUNDS, PADDING_BOUNDS, DEFINITION_BOUNDS = (1e-6, 2e-6), (1e-6, 2e-6), (1e-5, 1e-5)
Gradients = dict[str, Tensor]

seeds = st.integers(0, 100_000)
kinds = st.sampled_from(["append", "broken", "mixed"])
case = pytest.mark.parametrize(("name", "shared"), CASES, ids=IDS)


def sampled(seed: int, kind: str, family: str = "llama-tied", rows: int = 2) -> list[Group]:
    rng = random.Random(seed)
    groups = random_groups(rng, rows=rows, kind=kind)
    return on_policy(groups, PolicyModel(deepcopy(MODELS[family])), rng, noise=0.2)


def learner_of(name: str, shared: bool, family: str = "llama-tied", *, max_logits: int = 2**20, **more: Any) -> Learner:
    policy = PolicyModel(deepcopy(MODELS[family]), max_logits=max_logits)
    critic = critic_of(policy, shared=shared) if ALGORITHMS[name].needs_critic else None
    return learner_for(name, policy, **({"critic": critic, "lr": 1e-9, "max_grad_norm": math.inf} | more))


def credited_for(name: str, shared: bool, groups: list[Group], family: str = "llama-tied") -> list[CreditedTrajectory]:
    """Dr.GRPO divides by a constant that is large for these short episodes: back to order 1."""
    credited = credit_for(name, groups, learner_of(name, shared, family))
    if name != "dr_grpo":
        return credited
    return [
        CreditedTrajectory(trajectory=item.trajectory, advantages=[[100 * a for a in row] for row in item.advantages])
        for item in credited
    ]


def gradient(learner: Learner, credited: list[CreditedTrajectory]) -> Gradients:
    learner.update(credited)
    return gradients_of(learner)


def by_definition(name: str, shared: bool, credited: list[CreditedTrajectory], family: str) -> Gradients:
    """Plain forward passes with the model's own attention, one per step. In fp32 as well: against float64 one would
    measure the rounding of the model, which for gemma3 is larger than all that merging and packing change."""
    learner = learner_of(name, shared, family)
    policy: Any = learner.policy.model
    policy.set_attn_implementation("eager")
    logprobs, hidden = _one_forward_per_step(policy, credited)
    episodes = [
        [
            [Token(logprob=lp.item(), old=old, advantage=a) for lp, old, a in zip(*row, strict=True)]
            for row in zip(rows, [s.response_logprobs for s in item.trajectory.steps], item.advantages, strict=True)
        ]
        for item, rows in zip(credited, logprobs, strict=True)
    ]
    total = weighted_sum(logprobs, REFERENCES[name](episodes)[1])
    if learner.critic is not None:
        critic = learner.critic
        if not shared:
            backbone: Any = critic.backbone.model
            backbone.set_attn_implementation("eager")
            _, hidden = _one_forward_per_step(backbone, credited)
        values = [[[critic.head(h)[0] for h in row] for row in rows] for rows in hidden]
        total = total + weighted_sum(values, _value_slopes(credited, values))
    total.backward()
    return gradients_of(learner)


def _one_forward_per_step(model: Any, credited: list[CreditedTrajectory]) -> tuple[Any, Any]:
    """[trajectory][step][token]: the log-prob of the token, and the hidden state it was predicted from."""
    logprobs: list[list[list[Tensor]]] = []
    hidden: list[list[list[Tensor]]] = []
    for item in credited:
        logprobs.append([])
        hidden.append([])
        for step in item.trajectory.steps:
            ids = torch.tensor([step.prompt_ids + step.response_ids])
            output = model(input_ids=ids, output_hidden_states=True)
            places = range(len(step.prompt_ids) - 1, ids.shape[1] - 1)
            logp = output.logits[0].log_softmax(-1)
            logprobs[-1].append([logp[place, ids[0, place + 1]] for place in places])
            hidden[-1].append([output.hidden_states[-1][0, place] for place in places])
    return logprobs, hidden


def _value_slopes(credited: list[CreditedTrajectory], values: Any) -> Slopes:
    flat = [v.item() for rows in values for row in rows for v in row]
    old = [v for item in credited for row in item.values or [] for v in row]
    targets = [t for item in credited for row in item.value_targets or [] for t in row]
    numbers = iter(loss_reference.value_loss(flat, old, targets)[1])
    return [[[next(numbers) for _ in row] for row in rows] for rows in values]


def weighted_sum(tensors: Any, slopes: Slopes) -> Tensor:
    """Its gradient is that of a loss with these slopes."""
    total = torch.zeros((), dtype=torch.float64)
    for rows, row_slopes in zip(tensors, slopes, strict=True):
        for row, per_token in zip(rows, row_slopes, strict=True):
            for tensor, slope in zip(row, per_token, strict=True):
                total = total + slope * tensor
    return total


def distances(got: Gradients, expected: Gradients) -> tuple[float, float]:
    """The largest element of the difference, and the length of the difference relative to that of the gradient."""
    assert got.keys() == expected.keys()
    difference, whole = (
        torch.cat([g.double().flatten() for g in gradients])
        for gradients in ([got[k].double() - expected[k].double() for k in got], expected.values())
    )
    return float(difference.abs().max()), float(difference.norm() / whole.norm()) if whole.any() else 0.0


def assert_near(got: Gradients, expected: Gradients, bounds: tuple[float, float]) -> None:
    largest, relative = distances(got, expected)
    order = max(1.0, *(float(g.abs().max()) for g in expected.values()))
    assert largest < bounds[0] * (1 + order)  # absolute plus relative tolerance, as torch.testing has it
    assert relative < bounds[1]


@case
@given(seed=seeds, kind=kinds, family=st.sampled_from(FAMILIES), max_tokens=st.integers(1, 80))
@settings(max_examples=2, deadline=None)
def test_merged_and_packed_training_equals_one_forward_per_step(
    name: str, shared: bool, seed: int, kind: str, family: str, max_tokens: int
) -> None:
    credited = credited_for(name, shared, sampled(seed, kind, family, rows=1), family)
    assume(has_something_to_teach(credited))
    got = gradient(learner_of(name, shared, family, max_tokens_per_pack=max_tokens), credited)
    assert_near(got, by_definition(name, shared, credited, family), DEFINITION_BOUNDS)


@case
@given(
    seed=seeds,
    kind=kinds,
    max_tokens=st.sampled_from([1, 20, 40]),
    max_logits=st.sampled_from([32, 96, 2**20]),
)
@settings(max_examples=4, deadline=None)
def test_packs_micro_batches_order_and_chunks_do_not_change_the_gradient(
    name: str, shared: bool, seed: int, kind: str, max_tokens: int, max_logits: int
) -> None:
    credited = credited_for(name, shared, sampled(seed, kind))
    assume(has_something_to_teach(credited))
    shuffled = random.Random(seed).sample(credited, len(credited))
    one_pack = gradient(learner_of(name, shared, max_tokens_per_pack=10_000), credited)
    others = learner_of(name, shared, max_tokens_per_pack=max_tokens, max_logits=max_logits)
    assert 1e-3 < max(float(g.abs().max()) for g in one_pack.values()) < 10  # an absolute bound means something
    assert_near(gradient(others, shuffled), one_pack, LAYOUT_BOUNDS)


def has_something_to_teach(credited: list[CreditedTrajectory]) -> bool:
    return any(a for item in credited for row in item.advantages for a in row)


# Padding: there is none here, so it is the definition that gets some.


def padded_gradient(name: str, shared: bool, credited: list[CreditedTrajectory], extra: int) -> Gradients:
    """One row per step, all as long as the longest plus `extra`, with a mask: the usual layout elsewhere."""
    learner = learner_of(name, shared)
    steps = [step for item in credited for step in item.trajectory.steps if step.response_ids]
    width = max(len(step.prompt_ids) + len(step.response_ids) for step in steps) + extra
    rows = [step.prompt_ids + step.response_ids for step in steps]
    ids = torch.tensor([row + [0] * (width - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (width - len(row)) for row in rows])
    places = [(i, len(s.prompt_ids) + n - 1) for i, s in enumerate(steps) for n in range(len(s.response_ids))]
    at_T, before_T = torch.tensor([i for i, _ in places]), torch.tensor([place for _, place in places])

    def forward(model: Any) -> Any:
        model.set_attn_implementation("sdpa")
        return model(input_ids=ids, attention_mask=mask, output_hidden_states=True)

    batch = prepare(
        credited, max_tokens=1, device=torch.device("cpu"), ranks=OneProcess(), keep_idle=True
    )  # for its columns: they are in the order of the response tokens
    output = forward(learner.policy.model)
    logprobs_T = output.logits[at_T, before_T].log_softmax(-1)[torch.arange(len(places)), ids[at_T, before_T + 1]]
    loss = learner.loss(batch.columns.loss_inputs(logprobs_T, at_T, batch.counts)).loss
    if learner.critic is not None:
        critic = learner.critic
        hidden = (output if shared else forward(critic.backbone.model)).hidden_states[-1][at_T, before_T]
        old_T, targets_T = batch.columns.values_R, batch.columns.targets_R
        assert old_T is not None
        assert targets_T is not None
        values_T = critic.head(hidden)[:, 0]
        loss = loss + value_loss(values_T, old_T, targets_T, num_targets=batch.num_targets, clip=0.5)
    loss.backward()
    return gradients_of(learner)


@case
@pytest.mark.parametrize("seed", [0, 1])
def test_padding_does_not_change_the_gradient(name: str, shared: bool, seed: int) -> None:
    credited = credited_for(name, shared, sampled(seed, "mixed"))
    packed = gradient(learner_of(name, shared), credited)
    assert_near(packed, padded_gradient(name, shared, credited, extra=0), PADDING_BOUNDS)
    assert_near(packed, padded_gradient(name, shared, credited, extra=9), PADDING_BOUNDS)


# What tools and the env wrote.


def watch(policy: PolicyModel, change: Callable[[Pack, Tensor], Tensor]) -> list[tuple[Pack, Tensor]]:
    """Put `change` between the body of a model and whatever reads its hidden states; returns what passes by."""
    seen: list[tuple[Pack, Tensor]] = []
    original = policy._hidden

    def watched(pack: Pack) -> Tensor:
        hidden_ND = original(pack)
        if hidden_ND.requires_grad:
            hidden_ND.retain_grad()
            seen.append((pack, hidden_ND))
        return change(pack, hidden_ND)

    policy._hidden = watched  # type: ignore[method-assign]
    return seen


def off_policy_tokens(pack: Pack) -> Tensor:
    """True at the positions that predict a token which the policy did not sample: prompts and tool text."""
    others_N = torch.ones(pack.num_tokens, dtype=torch.bool)
    others_N[pack.sources_T] = False
    return others_N


def scramble(pack: Pack, hidden_ND: Tensor) -> Tensor:
    """Every token of the env gets another log-prob: what it is predicted from is replaced by noise."""
    noise_ND = torch.randn(hidden_ND.shape, generator=torch.Generator().manual_seed(0))
    return torch.where(off_policy_tokens(pack)[:, None], noise_ND, hidden_ND)


@case
def test_the_logprobs_of_tool_text_never_reach_the_gradient(name: str, shared: bool) -> None:
    credited = credited_for(name, shared, sampled(3, "append"))
    plain, scrambled = learner_of(name, shared), learner_of(name, shared)
    seen = watch(plain.policy, lambda pack, hidden_ND: hidden_ND)
    watch(scrambled.policy, scramble)
    if scrambled.critic is not None and not shared:
        watch(scrambled.critic.backbone, scramble)
    expected, got = gradient(plain, credited), gradient(scrambled, credited)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[key], expected[key]) for key in expected)  # not one bit
    for pack, hidden_ND in seen:
        assert hidden_ND.grad is not None
        others_N = off_policy_tokens(pack)
        assert not hidden_ND.grad[others_N].any()
        assert int(others_N.sum()) >= len(pack.lengths)
    assert any(hidden_ND.grad.any() for _, hidden_ND in seen if hidden_ND.grad is not None)
