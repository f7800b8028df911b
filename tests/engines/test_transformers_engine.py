"""The transformers engine: the same requests, log-probs and lifetimes as the local engine, computed by `generate`."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch

from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.local.request import Request
from agent_r1.engines.local.sampling import uniform_stream
from agent_r1.engines.transformers_engine import Batcher, TransformersEngine
from agent_r1.errors import DataError, RolloutError, UnsupportedModelError
from tests.engines.engine_sides import assert_logprobs_match, engine, generate
from tests.engines.tiny_models import prompts, tiny

GREEDY = Sampling(max_tokens=6, temperature=0.0)
ENDLESS = Sampling(max_tokens=100, temperature=0.0)


def make(model: Any = None, **settings: Any) -> TransformersEngine:
    sizes = {"max_running": 4, "max_cached_tokens": 512}
    return TransformersEngine(copy.deepcopy(model or tiny("llama")), threads=1, **({"seed": 0} | sizes | settings))


def test_it_samples_what_the_local_engine_samples() -> None:
    model, asked = tiny("qwen3"), prompts(5, 12, 12, 3, 20)
    sampling = Sampling(max_tokens=9, temperature=0.8, top_k=20, top_p=0.9, keep_support=True, stop_ids=(7, 11), seed=5)
    with engine(model) as local:
        expected = generate(local, asked, sampling)
    got = generate(make(model), asked, sampling)  # type: ignore[arg-type]
    assert [(c.token_ids, c.stop, c.support) for c in got] == [(c.token_ids, c.stop, c.support) for c in expected]
    for one, other in zip(got, expected, strict=True):
        assert one.logprobs == pytest.approx(other.logprobs, abs=1e-4)


def test_a_waiting_request_joins_once_as_many_wait_as_run() -> None:
    """Of two requests in the first batch, one ends after 2 tokens; the other goes on beside the one that waited."""
    model, asked = tiny("llama"), prompts(4, 6, 9)
    local, batches = make(model, max_running=2), []
    take = local._batcher.take
    local._batcher.take = lambda: batches.append(taken := take()) or taken  # type: ignore[func-returns-value, method-assign]
    settings = [Sampling(max_tokens=count, seed=count) for count in (20, 2, 5)]

    async def main() -> list[Completion]:
        calls = [
            local.generate(Prompt(p), s, session=str(i)) for i, (p, s) in enumerate(zip(asked, settings, strict=True))
        ]
        return await asyncio.gather(*calls)

    completions = asyncio.run(main())
    assert [len(batch) for batch in batches[:2]] == [2, 2]
    assert batches[1][0] is batches[0][0]  # it keeps its place
    for prompt, completion, sampling in zip(asked, completions, settings, strict=True):
        assert len(completion.token_ids) == sampling.max_tokens
        assert_logprobs_match(model, prompt, completion)


def test_batches_are_bounded_by_their_longest_request_and_of_one_length_without_padding() -> None:
    def request(length: int) -> Request:
        return Request(session="", tokens=[1] * length, sampling=GREEDY, uniforms=uniform_stream(0, 6))

    batcher = Batcher(max_running=3, max_cached_tokens=64)
    for length in (10, 4, 20, 10, 10, 10):
        batcher.submit(request(length))
    # 3 times 16 fit into 64, 3 times 26 do not.
    assert [len(each.tokens) for each in batcher.take()] == [10, 4, 10]
    batcher.pads = False
    assert [[len(each.tokens) for each in batcher.take()] for _ in range(3)] == [[20], [10, 10], []]


def test_an_aborted_request_returns_exactly_what_it_has_and_weights_load_at_once() -> None:
    model, (prompt,) = tiny("llama"), prompts(5)
    local = make(model)
    generator = torch.Generator().manual_seed(1)
    weights = {name: 0.3 * torch.randn(p.shape, generator=generator) for name, p in model.named_parameters()}

    async def main() -> list[Completion]:
        running = asyncio.create_task(local.generate(Prompt(prompt), ENDLESS, session="s"))
        while not (local._futures and next(iter(local._futures)).logprobs):
            await asyncio.sleep(0.001)
        local.abort()
        await local.load_weights(iter(weights.items()), 3)
        return [await running, await local.generate(Prompt(prompt), GREEDY, session="s")]

    before, after = asyncio.run(main())
    assert before.stop == "abort"
    assert 1 <= len(before.token_ids) < 100
    assert (before.versions, after.versions) == (((0, len(before.token_ids)),), ((3, 6),))
    assert_logprobs_match(model, prompt, before)
    model.load_state_dict(weights)
    assert_logprobs_match(model, prompt, after)


def test_cancelled_requests_and_ended_event_loops_leave_a_usable_engine() -> None:
    model, (gone, stays) = tiny("llama"), prompts(9, 5)
    local = make(model)

    async def cancel() -> Completion:
        doomed = asyncio.create_task(local.generate(Prompt(gone), ENDLESS, session="gone"))
        other = asyncio.create_task(local.generate(Prompt(stays), GREEDY, session="stays"))
        await asyncio.sleep(0.005)
        doomed.cancel()
        return await other

    async def leave_early() -> None:
        task = asyncio.create_task(local.generate(Prompt(gone), ENDLESS, session="gone"))
        await asyncio.sleep(0.01)
        assert not task.done()

    async def close() -> None:
        task = asyncio.create_task(local.generate(Prompt(gone), ENDLESS, session="gone"))
        await asyncio.sleep(0.01)
        await local.close()
        with pytest.raises(RolloutError, match="closed"):
            await task
        with pytest.raises(RolloutError, match="closed"):
            await local.generate(Prompt(stays), GREEDY, session="s")

    assert_logprobs_match(model, stays, asyncio.run(cancel()))
    asyncio.run(leave_early())
    assert_logprobs_match(model, stays, generate(local, [stays], GREEDY)[0])  # type: ignore[arg-type]
    asyncio.run(close())
    assert local.num_requests == 0


def test_requests_that_cannot_be_answered_and_broken_weights_fail_alone() -> None:
    model, (prompt,) = tiny("llama"), prompts(5)
    local = make(model)
    with pytest.raises(DataError, match=r"the model's context \(128\)"):
        generate(local, prompts(125), GREEDY)  # type: ignore[arg-type]
    broken = {name: torch.full_like(p, torch.nan) for name, p in model.named_parameters()}
    asyncio.run(local.load_weights(iter(broken.items()), 1))
    with pytest.raises(RolloutError, match=r"version 1\) are not finite"):
        generate(local, [prompt], GREEDY)  # type: ignore[arg-type]
    asyncio.run(local.load_weights(model.named_parameters(), 2))
    assert_logprobs_match(model, prompt, generate(local, [prompt], GREEDY)[0])  # type: ignore[arg-type]


def test_settings_that_a_model_brings_along_do_not_change_what_is_sampled() -> None:
    model, (prompt,) = tiny("llama"), prompts(8)
    model.generation_config.repetition_penalty = 5.0
    model.generation_config.temperature = 0.1
    assert_logprobs_match(model, prompt, generate(make(model), [prompt], GREEDY)[0])  # type: ignore[arg-type]


class Previous(torch.nn.Module):
    """Adds the token before, which a cache that holds only keys and values loses."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden + torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


def test_a_model_whose_cache_loses_something_is_refused() -> None:
    model = tiny("llama")
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, Previous())
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM with its cache differ"):
        make(model)


def test_a_model_that_padding_changes_is_batched_by_length() -> None:
    model, asked = tiny("llama"), prompts(5, 9, 5)
    # Positions that count the padding: exact only for sequences of one length.
    model.model.register_forward_pre_hook(
        lambda _module, arguments, kwargs: (arguments, kwargs | {"attention_mask": None}), with_kwargs=True
    )
    local = make(model)
    assert not local._batcher.pads
    for prompt, completion in zip(asked, generate(local, asked, GREEDY), strict=True):  # type: ignore[arg-type]
        assert_logprobs_match(model, prompt, completion)
