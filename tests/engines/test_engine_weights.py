"""New weights and aborted requests: no response mixes weights unless its versions say so, and none is lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from agent_r1.engines.base import Completion, Engine, Prompt, Sampling, generate_all
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.errors import DataError, RolloutError
from tests.engines.engine_sides import assert_logprobs_match, both, make_engine
from tests.engines.tiny_models import prompts, tiny

GREEDY = Sampling(max_tokens=6, temperature=0.0)
ENDLESS = Sampling(max_tokens=100, temperature=0.0)
Weights = dict[str, torch.Tensor]


def ask(local: Engine, prompt: list[int], sampling: Sampling = GREEDY) -> Completion:
    return asyncio.run(local.generate(Prompt(prompt), sampling, session="s"))


def load(local: Engine, weights: Weights, version: int) -> None:
    asyncio.run(local.load_weights(iter(weights.items()), version))


def other_weights(model: Any, seed: int = 1) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    return {
        name: 0.3 * torch.randn(parameter.shape, generator=generator) for name, parameter in model.named_parameters()
    }


def with_weights(family: str, weights: Weights) -> Any:
    model = tiny(family)
    model.load_state_dict(weights, strict=False)
    model.tie_weights()
    return model


async def until(local: LocalEngine, tokens: int) -> None:
    while local.stats.decoded_tokens < tokens:
        await asyncio.sleep(0)


@both
@pytest.mark.parametrize("family", ["llama", "llama_tied"])
def test_loaded_weights_are_sampled_from_and_old_cache_is_dropped(family: str, side: dict[str, Any]) -> None:
    model, (prompt,) = tiny(family), prompts(6)
    local = make_engine(model, **side)
    before = ask(local, prompt)
    weights = other_weights(model)
    load(local, weights, version=3)
    after = ask(local, prompt)
    assert (before.versions, after.versions) == (((0, 6),), ((3, 6),))
    assert local.stats.reused_tokens == 0
    fresh = make_engine(with_weights(family, weights), **side)
    assert after.token_ids == ask(fresh, prompt).token_ids != before.token_ids


def test_a_state_dict_with_tied_names_loads_as_well() -> None:
    model = tiny("llama_tied")
    local = make_engine(model)
    state = {name: tensor + 0.1 for name, tensor in model.state_dict().items()}
    assert "lm_head.weight" in state
    load(local, state, version=1)
    state["lm_head.weight"] = state["lm_head.weight"] + 1
    with pytest.raises(DataError, match=r"lm_head\.weight"):
        load(local, state, version=2)


@both
def test_wrong_weights_are_refused_and_nothing_is_sampled_until_right_ones_are_loaded(side: dict[str, Any]) -> None:
    model, (prompt,) = tiny("llama"), prompts(6)
    local = make_engine(model, **side)
    before, name = ask(local, prompt), "model.norm.weight"
    weights = other_weights(model)
    missing = {key: value for key, value in weights.items() if key != name}
    for wrong, reason in [
        (missing, f"1 .* missing, '{name}'"),
        (weights | {"model.nrom.weight": weights[name]}, f"'model.nrom.weight'. Did you mean '{name}'"),
        (weights | {name: torch.zeros(3)}, rf"'{name}' has shape \[3\].*\[32\]"),
    ]:
        with pytest.raises(DataError, match=reason):
            load(local, wrong, version=9)
        with pytest.raises(RolloutError, match="load_weights"):
            ask(local, prompt)
    load(local, {key: parameter.detach() for key, parameter in model.named_parameters()}, version=1)
    after = ask(local, prompt)
    assert (after.token_ids, after.versions) == (before.token_ids, ((1, 6),))


@both
def test_weights_wait_for_running_requests_and_hold_new_ones_back(side: dict[str, Any]) -> None:
    """Two loads while requests come and go: every response is that of an engine with one set of weights."""
    model, asked = tiny("llama"), prompts(6, 9, 4, 7, 5, 8)
    versions: list[Weights] = [dict(model.named_parameters()), other_weights(model, 1), other_weights(model, 2)]
    expected = []
    for weights in versions:
        alone = make_engine(with_weights("llama", weights), **side)
        expected.append([ask(alone, prompt, Sampling(max_tokens=20, temperature=0.0)).token_ids for prompt in asked])
    local = make_engine(model, **side, max_running=3)
    order: list[str] = []

    async def request(index: int) -> Completion:
        sampling = Sampling(max_tokens=20, temperature=0.0)
        completion = await local.generate(Prompt(asked[index]), sampling, session=str(index))
        order.append(str(index))
        return completion

    async def sync(version: int) -> None:
        await local.load_weights(iter(versions[version].items()), version)
        order.append(f"weights {version}")

    async def main() -> list[Completion]:
        early = [asyncio.create_task(request(index)) for index in range(2)]
        await until(local, 4)
        loads = [asyncio.create_task(sync(version)) for version in (1, 2)]
        await asyncio.sleep(0)
        late = [asyncio.create_task(request(index)) for index in range(2, 6)]
        await asyncio.sleep(0)
        late[-1].cancel()  # a waiting request can be cancelled
        await asyncio.gather(*loads)
        assert local.num_requests <= 3
        return await asyncio.gather(*early, *late[:-1])

    answers = asyncio.run(main())
    sampled = [answer.versions for answer in answers]
    assert sampled[:2] == [((0, 20),)] * 2
    assert sorted(order[:3]) == ["0", "1", "weights 1"]
    for index, answer in enumerate(answers):
        ((version, count),) = answer.versions
        assert (answer.token_ids, count) == (expected[version][index], 20)
    assert {version for ((version, _),) in sampled[2:]} <= {1, 2}
    assert local.num_requests == 0


Tasks = tuple[asyncio.Task[Completion], asyncio.Task[None], asyncio.Task[Completion]]


async def load_behind(local: LocalEngine, model: Any, prompt: list[int]) -> Tasks:
    """A running request, weights that wait for it, and a request that waits for them."""
    running = asyncio.create_task(local.generate(Prompt(prompt), ENDLESS, session="a"))
    await until(local, 3)
    loading = asyncio.create_task(local.load_weights(other_weights(model).items(), version=2))
    await asyncio.sleep(0)
    held = asyncio.create_task(local.generate(Prompt(prompt), GREEDY, session="b"))
    await asyncio.sleep(0)
    assert not loading.done()
    return running, loading, held


@both
def test_weights_can_be_loaded_after_a_request_is_cancelled(side: dict[str, Any]) -> None:
    model, (prompt,) = tiny("llama"), prompts(6)

    async def main() -> Completion:
        running, loading, held = await load_behind(make_engine(model, **side), model, prompt)
        running.cancel()
        await loading  # even if the last step is still being computed
        return await held

    assert asyncio.run(main()).versions == ((2, 6),)


@both
def test_after_a_cancelled_load_waiting_requests_use_the_old_weights(side: dict[str, Any]) -> None:
    model, (prompt,) = tiny("llama"), prompts(6)

    async def main() -> tuple[Completion, Completion]:
        running, loading, held = await load_behind(make_engine(model, **side), model, prompt)
        loading.cancel()
        return await asyncio.gather(running, held)

    first, second = asyncio.run(main())
    assert (first.versions, second.versions) == (((0, 100),), ((0, 6),))
    assert second.token_ids == first.token_ids[:6]


@both
def test_closing_fails_a_waiting_load_and_the_requests_behind_it(side: dict[str, Any]) -> None:
    model, (prompt,) = tiny("llama"), prompts(6)
    local = make_engine(model, **side)

    async def main() -> Any:
        tasks = await load_behind(local, model, prompt)
        await local.close()
        return await asyncio.wait_for(asyncio.gather(*tasks, return_exceptions=True), 10)

    assert [type(each) for each in asyncio.run(main())] == [RolloutError] * 3


@both
def test_weights_that_are_not_finite_fail_their_requests_and_leave_nothing_behind(side: dict[str, Any]) -> None:
    model, (prompt,) = tiny("llama"), prompts(6)
    local, expected = make_engine(model, **side), ask(make_engine(model, **side), prompt)
    good = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    load(local, {name: tensor * torch.nan for name, tensor in good.items()}, version=1)
    with pytest.raises(RolloutError, match=r"version 1\b.* not finite"):
        ask(local, prompt)
    load(local, good, version=2)
    assert ask(local, prompt).token_ids == expected.token_ids


@both
def test_a_source_is_read_one_tensor_at_a_time(side: dict[str, Any]) -> None:
    """A learner with adapters merges each matrix on request: all at once would take the memory of a second model."""
    model, alive, most = tiny("llama"), 0, 0

    class Counted(torch.Tensor):
        def __del__(self) -> None:
            nonlocal alive
            alive -= 1

    def source() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal alive, most
        for name, parameter in model.named_parameters():
            alive += 1
            most = max(most, alive)
            yield name, parameter.detach().as_subclass(Counted)

    asyncio.run(make_engine(model, **side).load_weights(source(), version=1))
    assert most <= 2


@both
@pytest.mark.parametrize("tokens", [0, 5, 30])
def test_an_aborted_request_returns_exactly_what_it_has(tokens: int, side: dict[str, Any]) -> None:
    model, (gone, stays) = tiny("llama"), prompts(9, 5)
    sampling = Sampling(max_tokens=60, top_k=4, keep_support=True, seed=3)
    local = make_engine(model, **side)
    whole = asyncio.run(local.generate(Prompt(gone), sampling, session="whole"))
    expected = ask(make_engine(model, **side), stays)
    local = make_engine(model, **side)

    async def main() -> tuple[Completion, Completion]:
        doomed = asyncio.create_task(local.generate(Prompt(gone), sampling, session="gone"))
        other = asyncio.create_task(local.generate(Prompt(stays), GREEDY, session="stays"))
        await asyncio.sleep(0)
        await until(local, tokens)
        local.abort("gone")
        local.abort("unknown")
        return await doomed, await other

    aborted, other = asyncio.run(main())
    count = len(aborted.token_ids)
    assert (aborted.stop, other.stop) == ("abort", "length")
    assert (count == 0) == (tokens == 0)
    assert aborted.token_ids == whole.token_ids[:count]
    assert aborted.logprobs == pytest.approx(whole.logprobs[:count], abs=1e-5)
    assert aborted.versions == (((0, count),) if count else ())
    assert whole.support is not None
    assert aborted.support == whole.support.first(count)
    assert other.token_ids == expected.token_ids
    local.release("stays")
    assert local.free_blocks == 512 // 4
    assert local.num_requests == 0


@both
def test_aborted_responses_continue_under_new_weights_and_record_both_versions(side: dict[str, Any]) -> None:
    model, asked = tiny("llama"), prompts(6, 9, 4)
    weights = other_weights(model)
    local = make_engine(model, **side)
    sampling = Sampling(max_tokens=40, seed=5)

    async def main() -> list[Completion]:
        runs = [
            asyncio.create_task(generate_all(local, Prompt(prompt), sampling, session=str(index)))
            for index, prompt in enumerate(asked)
        ]
        await until(local, 30)
        local.abort()
        await local.load_weights(weights.items(), version=1)  # does not wait: nothing runs
        return await asyncio.gather(*runs)

    for prompt, completion in zip(asked, asyncio.run(main()), strict=True):
        (old, before), (new, after) = completion.versions
        assert (old, new, before + after, completion.stop) == (0, 1, 40, "length")
        halves = [(tiny("llama"), 0, before), (with_weights("llama", weights), before, 40)]
        for policy, start, end in halves:
            part = Completion(token_ids=completion.token_ids[start:end], logprobs=completion.logprobs[start:end],
                              stop="length")  # fmt: skip
            assert_logprobs_match(policy, prompt + completion.token_ids[:start], part)
