"""Engines return the ids that top-k and top-p left to choose from, and the learner agrees with their log-probs."""

from __future__ import annotations

import asyncio
import copy
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.local.gpu.gpu_state import cut_supports
from agent_r1.engines.local.sampling import as_support, nucleus, ragged, sample, support_ids
from agent_r1.engines.scripted import ScriptedEngine
from agent_r1.errors import DataError
from agent_r1.flows.flow import SingleStepFlow
from agent_r1.learn.batch.packs import merge_steps, pack
from agent_r1.learn.batch.support import supports_of
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import CreditedTrajectory, Support
from tests.chatml import _no_env, collector, row, tokenizer
from tests.engines.engine_sides import CPU, GPU, both, engine, generate
from tests.engines.tiny_models import prompts, tiny
from tests.learn.builders import learner_for, step, tiny_model, trajectory

# log of 0.5, 0.3, 0.15, 0.05, in the order of ids 2, 0, 3, 1
LOGITS = torch.tensor([0.3, 0.05, 0.5, 0.15]).log()


def kept_by(logits: torch.Tensor, **given: Any) -> list[int]:
    _, _, (kept,) = sample(logits[None], [Sampling(max_tokens=1, keep_support=True, **given)], [0.0])
    assert kept is not None
    assert kept[0].tolist() == [len(kept[1])]
    return [int(token) for token in kept[1]]


def test_the_support_of_four_tokens_by_hand() -> None:
    assert kept_by(LOGITS, top_k=4) == [0, 1, 2, 3]
    assert kept_by(LOGITS, top_k=3) == [0, 2, 3]
    assert kept_by(LOGITS, top_k=1) == [2]
    # 0.5 < 0.6, so id 0 is still needed; then 0.8 >= 0.6
    assert kept_by(LOGITS, top_k=4, top_p=0.6) == [0, 2]
    # after top_k=2 id 2 has 0.625 >= 0.6, alone
    assert kept_by(LOGITS, top_k=2, top_p=0.6) == [2]
    assert kept_by(LOGITS, top_k=1000) == [0, 1, 2, 3]  # more than there are
    assert kept_by(torch.tensor([0.0, -torch.inf, 1.0, -torch.inf]), top_k=4) == [0, 2]  # never sampled by the model
    assert kept_by(torch.zeros(4), top_k=2) == [0, 1]  # of equal ones the lower ids


@settings(deadline=None)
@given(
    st.integers(0, 999),
    st.lists(st.tuples(st.integers(1, 9), st.sampled_from([0.2, 0.8, 1.0]), st.booleans()), min_size=1, max_size=5),
)
def test_asking_for_the_support_does_not_change_the_draw(seed: int, asked: list[tuple[int, float, bool]]) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits_BV = torch.randn(len(asked), 7, generator=generator).mul(3).round()  # with equal ones among them
    uniforms = torch.rand(len(asked), generator=generator).tolist()
    kinds = [Sampling(max_tokens=1, top_k=k, top_p=p, keep_support=keep) for k, p, keep in asked]
    tokens, logprobs, kept = sample(logits_BV, kinds, uniforms)
    plain = sample(logits_BV, [replace(kind, keep_support=False) for kind in kinds], uniforms)
    assert (tokens, logprobs, [None] * len(asked)) == plain
    for logits_V, token, logprob, part, kind in zip(logits_BV.double(), tokens, logprobs, kept, kinds, strict=True):
        assert (part is not None) == kind.keep_support
        if part is not None:
            ids = part[1].tolist()
            assert logits_V[ids].log_softmax(-1)[ids.index(token)].item() == pytest.approx(logprob, abs=1e-12)


def test_wide_buffers_hold_supports_of_any_size() -> None:
    scores_FV = nucleus(LOGITS.expand(2, 4), torch.tensor([1, 3]), torch.tensor([1.0, 1.0]))
    assert support_ids(scores_FV, 3).tolist() == [[2, -1, -1], [0, 2, 3]]
    assert support_ids(scores_FV, 64).tolist() == [[2, -1, -1, -1], [0, 2, 3, -1]]
    counts, ids = ragged(support_ids(scores_FV, 3).numpy())
    assert (counts.tolist(), ids.tolist()) == ([1, 3], [2, 0, 2, 3])


def test_what_was_not_drawn_has_no_support() -> None:
    drawn_RC = np.array([[5, 6], [-1, -1], [7, -1]])
    ids_RCK = np.array([[[5, 9], [6, -1]], [[1, 2], [3, 4]], [[0, 7], [8, 8]]], dtype=np.int32)
    parts = cut_supports(drawn_RC, ids_RCK)
    assert [(counts.tolist(), ids.tolist()) for counts, ids in parts] == [([2, 1], [5, 9, 6]), ([], []), ([2], [0, 7])]
    assert as_support([parts[0], parts[2]]).per_token() == [[5, 9], [6], [0, 7]]


@pytest.mark.parametrize("wrong", [{"top_k": 0}, {"top_k": 1025}, {"top_k": 5, "temperature": 0.0}])
def test_a_support_needs_a_bound_and_a_temperature(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r"keep_support.*1024"):
        Sampling(max_tokens=1, top_p=0.9, keep_support=True, **wrong)


SETTINGS = [
    Sampling(max_tokens=9, temperature=0.7, top_k=5, keep_support=True, seed=2),
    Sampling(max_tokens=7, temperature=2.0, top_k=20, top_p=0.8, keep_support=True, seed=3),
    Sampling(
        max_tokens=9, temperature=1.3, top_k=300, top_p=0.9, keep_support=True, seed=4
    ),  # more than the vocabulary
    Sampling(max_tokens=9, temperature=1.3, top_k=6, seed=5),
    Sampling(max_tokens=9, temperature=0.0),
    Sampling(max_tokens=5, temperature=1.3, seed=6),
]
PROMPTS = (5, 9, 2, 14, 7, 6)


def answers(model: Any, side: dict[str, Any], **sizes: Any) -> list[Completion]:
    """The answers to concurrent requests with all kinds of settings."""

    async def main() -> list[Completion]:
        asked = zip(prompts(*PROMPTS), SETTINGS, strict=True)
        return await asyncio.gather(
            *(local.generate(Prompt(ids), each, session=str(i)) for i, (ids, each) in enumerate(asked))
        )

    with engine(model, **side, **sizes) as local:
        return asyncio.run(main())


@both
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_supports_and_logprobs_are_those_of_a_plain_forward(side: dict[str, Any], family: str) -> None:
    model = tiny(family)
    for prompt, sampling, answer in zip(prompts(*PROMPTS), SETTINGS, answers(model, side), strict=True):
        if not sampling.keep_support:
            assert answer.support is None
            continue
        with torch.no_grad():
            logits = model(torch.tensor([prompt + answer.token_ids])).logits[0, len(prompt) - 1 : -1].double()
        assert answer.support is not None
        kept = answer.support.per_token()
        assert len(kept) == len(answer.token_ids) == len(answer.logprobs)
        for logits_V, token, logprob, ids in zip(logits, answer.token_ids, answer.logprobs, kept, strict=True):
            scores_V = logits_V / sampling.temperature
            width = min(sampling.top_k, len(scores_V))
            probs_K = scores_V.topk(width).values.softmax(-1)
            size = int(((probs_K.cumsum(-1) - probs_K) < sampling.top_p).sum())
            assert sorted(scores_V.topk(size).indices.tolist()) == ids
            assert scores_V[ids].log_softmax(-1)[ids.index(token)].item() == pytest.approx(logprob, abs=1e-4)


def test_both_sides_and_a_full_pool_keep_the_same_ids() -> None:
    model = tiny("qwen3")
    expected = answers(model, CPU)
    for sizes in ({}, {"max_cached_tokens": 48}):  # too small for all six: some are recomputed
        for side in (CPU, GPU):
            for one, other in zip(expected, answers(model, side, **sizes), strict=True):
                assert (one.token_ids, one.support) == (other.token_ids, other.support)


@both
def test_at_unchanged_weights_every_ratio_is_one(side: dict[str, Any]) -> None:
    model, sampling = tiny("llama"), Sampling(max_tokens=12, temperature=0.8, top_k=9, top_p=0.85, keep_support=True)
    with engine(model, **side) as local:
        asked = prompts(*PROMPTS)
        sampled = generate(local, asked, sampling)
    settings = {"temperature": 0.8, "top_p": 0.85, "top_k": 9}
    attempts = [
        trajectory(replace(step(prompt, one.token_ids, one.logprobs), support=one.support, **settings), name=str(i))  # type: ignore[arg-type]
        for i, (prompt, one) in enumerate(zip(asked, sampled, strict=True))
    ]
    supports = supports_of(attempts, temperature=0.8)
    [whole] = pack(merge_steps(attempts), 10_000, supports=supports)
    with torch.no_grad():
        logprobs_T, _ = PolicyModel(copy.deepcopy(model)).logprobs(whole, temperature=0.8)
    old_R = torch.tensor([value for answer in sampled for value in answer.logprobs])
    torch.testing.assert_close((logprobs_T - old_R[whole.columns_T]).exp(), torch.ones(72), rtol=0, atol=1e-4)
    # Over the whole vocabulary they would differ.
    [blind] = pack(merge_steps(attempts), 10_000)
    with torch.no_grad():
        logprobs_T, _ = PolicyModel(copy.deepcopy(model)).logprobs(blind, temperature=0.8)
    assert (logprobs_T - old_R[blind.columns_T]).exp().mean() < 0.95


def test_a_script_may_come_with_supports() -> None:
    said = Completion(token_ids=[1, 2, 3], logprobs=[0.0] * 3, stop="stop", support=Support.of([[1], [2, 4], [3]]))
    answer = asyncio.run(ScriptedEngine([said]).generate(Prompt([0]), Sampling(max_tokens=2), session="s"))
    assert answer.support == Support.of([[1], [2, 4]])


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        ({"top_p": 0.9}, r"step 0 of .* with top_p=0\.9 and top_k=0, but the ids that these kept were not recorded"),
        ({"top_k": 5, "keep_support": True}, r"top_k=5, but the ids"),  # and its sampler does not return supports
        ({"temperature": 0.5}, r"at temperature 0\.5, but the learner computes log-probs at 1"),
    ],
)
def test_episodes_that_cannot_be_trained_on_are_refused(asked: dict[str, Any], message: str) -> None:
    played = collector(["hello"], make_flow=lambda _: SingleStepFlow(_no_env))
    played = replace(played, sampling=replace(played.sampling, **asked))
    [group] = asyncio.run(played([row()], seed=0))
    [attempt] = group.trajectories
    assert attempt.steps[0].response_ids
    credited = CreditedTrajectory(trajectory=attempt, advantages=[[1.0] * len(attempt.steps[0].response_ids)])
    with pytest.raises(DataError, match=message):
        learner_for("grpo", PolicyModel(tiny_model("llama", vocab_size=len(tokenizer())))).update([credited])
