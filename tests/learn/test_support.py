"""Training on tokens that were sampled with top-k or top-p: log-probs over exactly the ids that the sampler kept."""

from __future__ import annotations

import math
import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from agent_r1.errors import DataError
from agent_r1.learn.batch.support import Supports
from agent_r1.learn.credit import as_demonstrations
from agent_r1.learn.losses import KL_PENALTIES, supervised_loss
from agent_r1.learn.model.head import token_logprobs
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import CreditedTrajectory, Group, Step, Support, Trajectory
from tests.learn.builders import (
    VOCABULARY,
    correction,
    credit_for,
    gradients_of,
    learner_for,
    random_groups,
    step,
    tiny_model,
    trajectory,
)
from tests.learn.test_head import LargestTensor, T, V, inputs, settings

CPU = torch.device("cpu")


def ragged(lists: list[list[int]]) -> Supports:
    starts = np.concatenate([[0], np.cumsum([len(ids) for ids in lists])]).astype(np.int64)
    return Supports(starts=starts, ids=np.array([token for ids in lists for token in ids], dtype=np.int32))


def test_four_tokens_by_hand() -> None:
    # probabilities 0.3, 0.05, 0.5, 0.15; ids 0 and 2 were kept: 0.3 / 0.8 = 0.375 and 0.5 / 0.8 = 0.625
    logits_14 = torch.tensor([[0.3, 0.05, 0.5, 0.15]]).log().requires_grad_()
    made = settings(entropy_gradient=True)
    logprobs_T, entropy_T = token_logprobs(logits_14, torch.eye(4), None, torch.tensor([0]), made, ragged([[0, 2]]))
    assert logprobs_T.item() == pytest.approx(math.log(0.375))
    assert entropy_T.item() == pytest.approx(-0.375 * math.log(0.375) - 0.625 * math.log(0.625))
    (slope,) = torch.autograd.grad(logprobs_T.sum(), logits_14, retain_graph=True)
    # 1 - 0.375 at the sampled token, -0.625 at the other one, and nothing at the ids that were cut off
    torch.testing.assert_close(slope, torch.tensor([[0.625, 0.0, -0.625, 0.0]]))
    (slope,) = torch.autograd.grad(entropy_T.sum(), logits_14)
    # -p (log p + H) = -0.375 * 0.625 * (log 0.375 - log 0.625), with the opposite sign at id 2
    at_0 = -0.375 * 0.625 * math.log(0.375 / 0.625)
    torch.testing.assert_close(slope, torch.tensor([[at_0, 0.0, -at_0, 0.0]]))


def some_supports(targets_T: Tensor) -> list[list[int]]:
    """Of 1 to all ids, the target always among them."""
    rng = random.Random(0)
    lists = [sorted({int(t), *rng.sample(range(V), rng.randint(0, V))}) for t in targets_T]
    lists[0], lists[-1] = [int(targets_T[0])], list(range(V))
    return lists


def definition(logits_TV: Tensor, targets_T: Tensor, lists: list[list[int]]) -> tuple[Tensor, Tensor]:
    """The softmax over the kept ids, token by token."""
    rows = [logits_V[ids].log_softmax(-1) for logits_V, ids in zip(logits_TV, lists, strict=True)]
    logprobs = [row[ids.index(int(t))] for row, ids, t in zip(rows, lists, targets_T, strict=True)]
    return torch.stack(logprobs), torch.stack([-(row.exp() * row).sum() for row in rows])


@pytest.mark.parametrize("entropy_gradient", [False, True])
@pytest.mark.parametrize(("temperature", "softcap", "chunk"), [(1.0, None, 4), (0.7, None, 100), (1.3, 2.0, 1)])
def test_values_and_gradients_are_those_of_the_truncated_softmax(
    temperature: float, softcap: float | None, chunk: int, entropy_gradient: bool
) -> None:
    made = settings(
        temperature=temperature,
        softcap=softcap,
        chunk=chunk,
        entropy_gradient=entropy_gradient,
        dtype=torch.float64,
    )
    weights_T = torch.linspace(-1, 2, T, dtype=torch.float64)

    def results(ours: bool) -> list[Tensor]:
        hidden_TD, weight_VD, bias_V, targets_T = inputs(torch.float64)
        assert bias_V is not None
        lists = some_supports(targets_T)
        if ours:
            values = token_logprobs(hidden_TD, weight_VD, bias_V, targets_T, made, ragged(lists))
        else:
            logits_TV = nn.functional.linear(hidden_TD, weight_VD, bias_V)
            if softcap is not None:
                logits_TV = softcap * (logits_TV / softcap).tanh()
            values = definition(logits_TV / temperature, targets_T, lists)
        loss = (weights_T * values[0]).sum() + (weights_T.flip(0) * values[1]).sum() * entropy_gradient
        loss.backward()
        return [*(value.detach() for value in values), hidden_TD.grad, weight_VD.grad, bias_V.grad]  # type: ignore[list-item]

    torch.testing.assert_close(results(ours=True), results(ours=False), rtol=1e-10, atol=1e-12)


def test_supports_add_nothing_larger_than_the_logits_of_a_chunk() -> None:
    tokens, vocabulary = 64, 128
    hidden_TD, weight_VD = torch.randn(tokens, 2, requires_grad=True), torch.randn(vocabulary, 2, requires_grad=True)
    with LargestTensor() as watch:
        made = settings(chunk=8, entropy_gradient=True)
        supports = ragged([[0, *range(i, i + 40)] for i in range(1, tokens + 1)])
        targets_T = torch.zeros(tokens, dtype=torch.long)
        logprobs_T, entropy_T = token_logprobs(hidden_TD, weight_VD, None, targets_T, made, supports)
        (logprobs_T + entropy_T).sum().backward()
    assert watch.numel == 8 * vocabulary


@given(st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=5), min_size=1, max_size=8), st.data())
def test_supports_are_selected_in_the_requested_order(lists: list[list[int]], data: st.DataObject) -> None:
    places = data.draw(st.lists(st.integers(0, len(lists) - 1), min_size=1, max_size=9))
    taken = ragged(lists).at(np.array(places))
    start = data.draw(st.integers(0, len(places)))
    chunk = taken.chunk(slice(start, start + 3), CPU)
    expected = [lists[place] for place in places[start : start + 3]]
    assert [[token for token in row if token >= 0] for row in chunk.tolist()] == expected
    assert chunk.shape == (len(expected), max(map(len, expected), default=1))


# What may be trained on.


def kept_step(prompt: list[int], response: list[int], kept: list[list[int]], **more: Any) -> Step:
    settings: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "top_k": 4, "support": Support.of(kept)}
    return replace(step(prompt, response), **(settings | more))


@pytest.mark.parametrize(
    ("made", "message"),
    [
        (replace(step([1], [2]), temperature=0.7), r"step 1 .* temperature 0\.7,.* at 1:"),
        (replace(step([1], [2]), temperature=0.0, top_p=0.9), "step 1 .* temperature 0,"),
        (kept_step([1], [2], [[2]], support=None), r"top_p=0\.9 and top_k=4"),
        (kept_step([1], [2], [[2]], support=None, top_k=0), r"Sampling\(keep_support=True\)"),
        (kept_step([1], [2, 3], [[2], [1, 4]]), "token 3 of step 1 of trajectory 't' occurs 0 times"),
        (kept_step([1], [2], [[2, 2]]), "token 2 .* occurs 2 times"),
        (step([1], [2]), "step 1 .* whole vocabulary"),
    ],
)
def test_steps_whose_logprobs_cannot_be_reproduced_are_refused(made: Step, message: str) -> None:
    attempt = trajectory(kept_step([5], [6], [[6, 7]]), made)
    learner = learner_for("grpo", reference=PolicyModel(tiny_model("llama-tied")))
    credited = CreditedTrajectory(trajectory=attempt, advantages=[[1.0], [1.0] * len(made.response_ids)])
    with pytest.raises(DataError, match=message):
        learner.update([credited])
    with pytest.raises(DataError, match=message):
        learner.kl_to_reference([attempt])


def test_a_support_has_one_entry_per_token() -> None:
    for counts, ids in ((b"abcd", b""), (b"abc", b"")):
        with pytest.raises(ValueError, match=r"Support\.counts and Support\.ids"):
            Support(counts=counts, ids=ids)
    whole = Support.of([[1, 2], [3], [4, 5, 6]])
    assert (len(whole), whole.per_token()) == (3, [[1, 2], [3], [4, 5, 6]])
    assert whole.first(2) == Support.of([[1, 2], [3]])


def test_demonstrations_are_learned_from_the_whole_vocabulary() -> None:
    attempt = trajectory(kept_step([1], [2, 3], [[2], [3, 4]], temperature=0.7))
    [taken] = as_demonstrations([attempt])
    assert taken.trajectory.steps == [step([1], [2, 3])]
    plain = learner_for("grpo", loss=supervised_loss).update(as_demonstrations([trajectory(step([1], [2, 3]))]))
    assert learner_for("grpo", loss=supervised_loss).update([taken])["loss"] == plain["loss"]


# The learner.


def with_supports(groups: list[Group], rng: random.Random) -> list[Group]:
    """The same attempts, as if every token had been one of a few."""

    def kept(token: int) -> list[int]:
        return sorted({token, *rng.sample(range(VOCABULARY), rng.randint(0, 6))})

    def changed(made: Step) -> Step:
        return kept_step(made.prompt_ids, made.response_ids, [kept(token) for token in made.response_ids])

    return [
        replace(each, trajectories=[replace(t, steps=[changed(s) for s in t.steps]) for t in each.trajectories])
        for each in groups
    ]


def batch(seed: int, name: str = "grpo") -> list[CreditedTrajectory]:
    rng = random.Random(seed)
    credited = credit_for(name, with_supports(random_groups(rng, rows=2), rng), learner_for(name))
    assert any(a for item in credited for row in item.advantages for a in row)
    return [sampled_by(tiny_model("llama-tied"), item) for item in credited]


def sampled_by(model: Any, item: CreditedTrajectory) -> CreditedTrajectory:
    """With the log-probs that the model gives to the tokens on their supports."""
    with torch.no_grad():
        steps = [
            replace(s, response_logprobs=[float(p) for p in by_definition(model, s)[0]]) for s in item.trajectory.steps
        ]
    return replace(item, trajectory=replace(item.trajectory, steps=steps))


def by_definition(model: Any, made: Step) -> tuple[Tensor, Tensor]:
    """Log-probs and entropies of one step, from one plain forward pass over it alone."""
    ids = torch.tensor([made.prompt_ids + made.response_ids])
    model.set_attn_implementation("eager")
    logits_TV = model(input_ids=ids).logits[0, len(made.prompt_ids) - 1 : -1]
    if not made.response_ids:
        return logits_TV.sum(-1), logits_TV.sum(-1)
    assert made.support is not None
    return definition(logits_TV, torch.tensor(made.response_ids), made.support.per_token())


def trajectories(credited: list[CreditedTrajectory]) -> list[Trajectory]:
    return [item.trajectory for item in credited]


LAYOUTS: list[dict[str, Any]] = [
    {"max_tokens_per_pack": 10_000},
    {"max_tokens_per_pack": 1},
    {"max_tokens_per_pack": 60, "prefix_sharing": "on"},
]


@pytest.mark.parametrize("layout", LAYOUTS, ids=["merged", "apart", "tree"])
@pytest.mark.parametrize("seed", [0, 1])
def test_the_gradient_is_that_of_the_truncated_policy_one_forward_per_step(seed: int, layout: dict[str, Any]) -> None:
    """With a KL to a reference on the same supports, and an entropy bonus."""
    credited, other = batch(seed), tiny_model("llama-tied", seed=7)
    settings: dict[str, Any] = {"kl_coef": 0.3, "entropy_coef": 0.2, "lr": 1e-9, "max_grad_norm": math.inf}
    learner = learner_for("grpo", reference=PolicyModel(deepcopy(other)), **settings, **layout)
    metrics = learner.update(credited)
    model, total, kl_sum, entropy_sum = tiny_model("llama-tied"), torch.zeros(()), 0.0, 0.0
    count = sum(t.num_response_tokens for t in trajectories(credited))
    for item in credited:
        for made, advantages in zip(item.trajectory.steps, item.advantages, strict=True):
            logprobs_T, entropy_T = by_definition(model, made)
            reference_T = by_definition(other, made)[0].detach()
            old_T, advantages_T = torch.tensor(made.response_logprobs), torch.tensor(advantages)
            kl_T = KL_PENALTIES["k3"](logprobs_T, reference_T, old_T)
            # At unchanged weights all ratios are 1, so nothing is clipped.
            gain_T = (logprobs_T - old_T).exp() * advantages_T
            total = total + (0.3 * kl_T - 0.2 * entropy_T - gain_T).sum() / count
            kl_sum, entropy_sum = kl_sum + kl_T.sum().item(), entropy_sum + entropy_T.sum().item()
    total.backward()
    expected = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    for name, gradient in gradients_of(learner).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-4, atol=1e-5)
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["entropy"] == pytest.approx(entropy_sum / count, rel=1e-4)
    assert metrics["kl_to_reference"] == pytest.approx(kl_sum / count, rel=1e-4)
    assert kl_sum > 0


@pytest.mark.parametrize("name", ["gspo", "steppo", "ppo"])
def test_step_ratios_and_critics_see_no_change_before_the_first_step(name: str) -> None:
    metrics = learner_for(name).update(batch(2, name))
    assert metrics["mismatch_kl"] == pytest.approx(0.0, abs=1e-7)
    assert metrics["ratio_max"] == pytest.approx(1.0, abs=1e-5)


def test_a_correction_weights_every_token_by_one_where_both_agree() -> None:
    metrics = learner_for("grpo", correction=correction("truncate", cap=1.5)).update(batch(3))
    assert metrics["importance_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["mismatch_max"] == pytest.approx(0.0, abs=1e-5)


def test_the_kl_for_the_reward_is_taken_on_the_same_support() -> None:
    attempts, other = trajectories(batch(4)), tiny_model("llama-tied", seed=7)
    learner = learner_for("grpo", reference=PolicyModel(deepcopy(other)))
    for attempt, got in zip(attempts, learner.kl_to_reference(attempts), strict=True):
        for made, row in zip(attempt.steps, got, strict=True):
            with torch.no_grad():
                expected_T = torch.tensor(made.response_logprobs) - by_definition(other, made)[0]
            torch.testing.assert_close(torch.tensor(row), expected_T, rtol=0, atol=1e-5)


def test_values_of_a_critic_need_no_support() -> None:
    learner = learner_for("ppo")
    attempts = trajectories(batch(6))
    bare = [replace(t, steps=[s.without_sampling() for s in t.steps]) for t in attempts]
    assert learner.values(attempts) == learner.values(bare)
