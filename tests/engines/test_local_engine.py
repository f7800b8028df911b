"""The local engine computes what the model computes by itself, however requests are batched and cached."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from agent_r1.compute.attention import Scoring, read_scoring
from agent_r1.engines.base import Completion, Prompt, Sampling
from agent_r1.engines.local import attention_interface
from agent_r1.engines.local.cpu.cpu_attention import CpuCache, group_similar
from agent_r1.engines.local.cpu.cpu_runner import CpuRunner
from agent_r1.engines.local.local_engine import LocalEngine
from agent_r1.engines.local.request import Chunk, Request
from agent_r1.engines.local.weights import cast_weights
from agent_r1.errors import ConfigError, DataError, UnsupportedModelError
from tests.engines.engine_sides import CPU, assert_logprobs_match, both, engine, generate, make_engine
from tests.engines.tiny_models import prompts, tiny

FAMILIES = ["llama", "qwen3", "mistral_windowed", "gemma3", "gpt2"]  # tests/models has more
GREEDY = Sampling(max_tokens=12, temperature=0.0)


@both
@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_decoding_equals_generate_id_by_id(family: str, side: dict[str, Any]) -> None:
    model, asked = tiny(family), prompts(1, 5, 17, 30)
    with engine(model, **side, max_batch_tokens=16) as local:  # the longer prompts take several steps
        completions = generate(local, asked, GREEDY)
    for prompt, completion in zip(asked, completions, strict=True):
        ids = torch.tensor([prompt])
        expected = model.generate(
            ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=12, eos_token_id=None
        )
        assert completion.token_ids == expected[0, len(prompt) :].tolist()
        assert completion.stop == "length"
        assert_logprobs_match(model, prompt, completion)


@both
def test_a_session_of_several_steps_computes_only_what_is_new(side: dict[str, Any]) -> None:
    model, (prompt, *additions) = tiny("qwen3"), prompts(9, 6, 1, 7)
    sampling = Sampling(max_tokens=8, temperature=0.7, seed=3)

    async def episode(local: LocalEngine) -> list[tuple[list[int], Completion]]:
        steps, seen = [], prompt
        for addition in [*additions, []]:
            completion = await local.generate(Prompt(seen), sampling, session="episode")
            steps.append((seen, completion))
            seen = seen + completion.token_ids + addition
        return steps

    with engine(model, **side) as local:
        steps = asyncio.run(episode(local))
        stats = local.stats
    for seen, completion in steps:
        assert_logprobs_match(model, seen, completion, temperature=0.7)
    # Each later prompt finds all but the last sampled token: 9+7, then 9+8+6+7, then 9+8+6+8+1+7.
    assert stats.reused_tokens == 16 + 30 + 39
    # So prefill is the first prompt, then that token and the addition each time.
    assert stats.prefilled_tokens == 9 + (1 + 6) + (1 + 1) + (1 + 7)
    assert stats.decoded_tokens == 4 * 8


@both
@pytest.mark.parametrize("family", ["llama", "mistral_windowed", "gemma3"])
def test_prompts_and_additions_of_many_sessions_are_computed_together_correctly(
    family: str, side: dict[str, Any]
) -> None:
    model = tiny(family)
    # Lengths on both sides of powers of two, where groups of similar chunks end.
    asked, additions = prompts(9, 15, 16, 17, 8, 12, 30), prompts(3, 2, 7, 8, 5, 1, 4, seed=1)
    with engine(model, **side, max_batch_tokens=256, max_cached_tokens=2048) as local:
        first = generate(local, asked, GREEDY)
        extended = [p + c.token_ids + added for p, c, added in zip(asked, first, additions, strict=True)]
        second = generate(local, extended, GREEDY)
        # All of each prompt and response but its last token.
        assert local.stats.reused_tokens == sum(map(len, asked)) + 7 * 11
    for prompt, completion in zip(asked + extended, first + second, strict=True):
        assert_logprobs_match(model, prompt, completion)


def test_chunks_computed_together_are_similar_and_not_too_many() -> None:
    def part(row: int, start: int, count: int) -> tuple[Chunk, int]:
        request = Request(session="", tokens=[0], sampling=GREEDY, uniforms=np.zeros(1))
        return Chunk(request, [0] * count, start, [], 1), row

    # Sizes 4..7 belong together, and so do lengths of 2..3 blocks (of 32: 33..96 tokens); prompts stay among prompts.
    parts = [part(row, *at) for row, at in enumerate([(0, 4), (0, 7), (0, 8), (40, 5), (80, 7), (120, 7)])]
    assert [[row for _, row in group] for group in group_similar(parts, 32)] == [[0, 1], [2], [3, 4], [5]]
    # Up to 255 blocks of 32 tokens are 8,160: two of these are more than MAX_GATHERED, 8,192.
    long = [part(row, 8000, 5) for row in range(3)]
    assert [len(group) for group in group_similar(long, 32)] == [1, 1, 1]


@both
@pytest.mark.parametrize("max_batch_tokens", [1, 2, 5])
def test_the_result_does_not_depend_on_where_prompts_are_split(max_batch_tokens: int, side: dict[str, Any]) -> None:
    model, asked = tiny("llama"), prompts(9, 7, 1, 12)  # with 5 tokens a step: 5, 4 + 1, ...: single tokens too
    with engine(model, **side, max_batch_tokens=max_batch_tokens) as local:
        for prompt, completion in zip(asked, generate(local, asked, GREEDY), strict=True):
            assert_logprobs_match(model, prompt, completion)
        assert local.stats.prefilled_tokens == 9 + 7 + 1 + 12


@both
def test_a_rewritten_history_is_recomputed_from_where_it_differs(side: dict[str, Any]) -> None:
    model, (prompt, other) = tiny("llama"), prompts(10, 12)
    changed = prompt[:6] + other
    with engine(model, **side) as local:
        for asked in (prompt, changed):
            (completion,) = generate(local, [asked], GREEDY)
            assert_logprobs_match(model, asked, completion)
        assert local.stats.reused_tokens == 6


@both
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_preemption_changes_the_work_but_not_the_result(family: str, side: dict[str, Any]) -> None:
    model, asked = tiny(family), prompts(12, 15, 9, 20, 11)
    sampling = Sampling(max_tokens=20, seed=1)
    with engine(model, **side) as roomy:
        expected = generate(roomy, asked, sampling)
    with engine(model, **side, max_cached_tokens=72) as tight:  # five sequences of up to 40 tokens in room for 72
        got = generate(tight, asked, sampling)
        assert tight.stats.preemptions > 0
    for prompt, one, other in zip(asked, expected, got, strict=True):
        assert one.token_ids == other.token_ids
        assert_logprobs_match(model, prompt, other)


@both
def test_blocks_that_are_far_apart_are_read_correctly(side: dict[str, Any]) -> None:
    model, asked = tiny("llama"), prompts(*[20] * 8)
    with engine(model, **side) as local:
        first = generate(local, asked, GREEDY)
        # Seven idle sessions hold the lower blocks, so those of the last session are a small part of the pool.
        extended = [*asked[7], *first[7].token_ids, 5, 6]
        again = asyncio.run(local.generate(Prompt(extended), GREEDY, session="7"))
    assert_logprobs_match(model, extended, again)


@both
def test_sampling_depends_on_the_seed_and_not_on_other_requests(side: dict[str, Any]) -> None:
    model, asked = tiny("llama"), prompts(4, 9, 14, 6, 21)
    sampling = Sampling(max_tokens=10, temperature=0.9, top_p=0.95, top_k=40, seed=11)
    with engine(model, **side) as local:
        alone = [generate(local, [prompt], sampling)[0].token_ids for prompt in asked]
    with engine(model, **side, max_running=2, max_batch_tokens=5) as crowded:
        together = [completion.token_ids for completion in generate(crowded, asked, sampling)]
    assert alone == together


@both
def test_requests_without_a_seed_follow_the_engines_seed_in_order_of_submission(side: dict[str, Any]) -> None:
    model, sampling = tiny("llama"), Sampling(max_tokens=10)
    asked = prompts(5) * 3

    def drawn(seed: int) -> list[list[int]]:
        with engine(model, **side, seed=seed) as local:
            return [completion.token_ids for completion in generate(local, asked, sampling)]

    assert drawn(1) == drawn(1)
    assert drawn(1) != drawn(2)
    assert drawn(1)[0] != drawn(1)[1]


@both
@pytest.mark.parametrize("family", ["llama", "mistral_windowed", "gemma3", "gpt2"])
def test_members_of_a_group_are_computed_together_and_sampled_separately(family: str, side: dict[str, Any]) -> None:
    model, (prompt, other) = tiny(family), prompts(22, 9)
    settings = [Sampling(max_tokens=10, temperature=0.5, seed=seed) for seed in range(6)]

    async def group(local: LocalEngine) -> list[Completion]:
        members = [local.generate(Prompt(prompt), each, session=str(i)) for i, each in enumerate(settings)]
        return (await asyncio.gather(*members, local.generate(Prompt(other), settings[0], session="other")))[:-1]

    with engine(model, **side) as local:
        together = asyncio.run(group(local))
        if side is CPU:  # once for all six; the five others run its last token, as one
            assert local.stats.prefilled_tokens == 22 + 9 + 1
            assert local.stats.shared_tokens >= 5 * 21 + 4  # and equal sampled tokens
        else:  # in one step: five blocks are shared, and each of the five others runs the two tokens after them
            assert local.stats.prefilled_tokens == 22 + 9 + 5 * 2
            assert local.stats.shared_tokens == 5 * 20
    alone = []
    for each in settings:
        with engine(model, **side) as local:
            alone += generate(local, [prompt], each)
    assert [one.token_ids for one in together] == [one.token_ids for one in alone]
    assert len({tuple(one.token_ids) for one in together}) > 1
    for completion in together:
        assert_logprobs_match(model, prompt, completion, temperature=0.5)


@both
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_a_prompt_that_another_session_has_computed_is_not_computed_again(family: str, side: dict[str, Any]) -> None:
    model, (prompt, addition) = tiny(family), prompts(13, 5)

    async def episode(local: LocalEngine, session: str) -> list[tuple[list[int], Completion]]:
        first = await local.generate(Prompt(prompt), GREEDY, session=session)
        extended = prompt + first.token_ids + addition
        return [(prompt, first), (extended, await local.generate(Prompt(extended), GREEDY, session=session))]

    with engine(model, **side) as local:
        episodes = [asyncio.run(episode(local, session)) for session in ("early", "late")]
        # The early one runs its prompt, then its last sampled token and the addition; the late one a token each time.
        assert local.stats.prefilled_tokens == (13 + 1 + 5) + (1 + 1)
        assert local.stats.shared_tokens == 12 + 5
    assert [one.token_ids for _, one in episodes[0]] == [one.token_ids for _, one in episodes[1]]
    for seen, completion in episodes[0] + episodes[1]:
        assert_logprobs_match(model, seen, completion)


def test_all_blocks_are_read_before_any_is_copied() -> None:
    cache = CpuCache(num_blocks=4, block_size=2)
    pools = [cache.layer(index, torch.zeros(1, 1, 3), torch.zeros(1, 1, 3)) for index in range(2)]
    for pool in pools:
        pool.keys_PKDS[:] = pool.values_PKSD.transpose(2, 3)[:] = torch.arange(4.0)[:, None, None, None]
    cache.copy([(1, 2), (2, 3)])
    for pool in pools:
        assert pool.keys_PKDS[:, 0, 0, 0].tolist() == pool.values_PKSD[:, 0, 0, 0].tolist() == [0, 1, 1, 2]


@both
def test_the_stop_token_is_part_of_the_response_with_its_logprob(side: dict[str, Any]) -> None:
    model, (prompt,) = tiny("llama"), prompts(5)
    with engine(model, **side) as local:
        (whole,) = generate(local, [prompt], GREEDY)
        stop = whole.token_ids[4]
        stopped = generate(local, [prompt], Sampling(max_tokens=12, temperature=0.0, stop_ids=(stop, 96)))[0]
    end = whole.token_ids.index(stop) + 1
    assert (stopped.token_ids, stopped.stop) == (whole.token_ids[:end], "stop")
    assert stopped.logprobs == pytest.approx(whole.logprobs[:end], abs=1e-4)


@both
def test_half_precision_models_run_in_their_own_precision(side: dict[str, Any]) -> None:
    model = cast_weights(tiny("llama"), torch.bfloat16)
    asked = prompts(7, 3)
    with engine(model, **side) as local:
        for prompt, completion in zip(asked, generate(local, asked, GREEDY), strict=True):
            with torch.no_grad():
                logits = model(torch.tensor([prompt])).logits[0, -1].double()
            # bfloat16 has 8 bits of precision; logits here are of the order of 10.
            chosen = torch.log_softmax(logits, dim=-1)[completion.token_ids[0]].item()
            assert completion.logprobs[0] == pytest.approx(chosen, abs=0.3)


@both
def test_frequencies_of_rotary_embeddings_in_half_precision_are_refused(side: dict[str, Any]) -> None:
    """As model.to(bfloat16) leaves them: the angles of position 2,000 would be off by a radian."""
    with pytest.raises(ConfigError, match="inv_freq"):
        make_engine(tiny("llama").to(torch.bfloat16), **side)


def test_casting_weights_leaves_the_frequencies_alone() -> None:
    model = tiny("llama")
    frequencies = model.model.rotary_emb.inv_freq.clone()
    cast = cast_weights(model, torch.bfloat16)
    assert {parameter.dtype for parameter in cast.parameters()} == {torch.bfloat16}
    assert torch.equal(cast.model.rotary_emb.inv_freq, frequencies)


@both
def test_positions_that_depend_on_the_longest_sequence_are_allowed_up_to_the_original_length(
    side: dict[str, Any],
) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    model, asked = tiny("llama", rope_parameters=rope), prompts(9, 30)
    with engine(model, **side) as local:
        for prompt, completion in zip(asked, generate(local, asked, GREEDY), strict=True):
            assert_logprobs_match(model, prompt, completion)
        with pytest.raises(DataError, match=r"the model's context \(128\)"):
            generate(local, prompts(120), GREEDY)


@both
def test_a_long_window_that_is_ignored_is_noticed(side: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def without_window(*arguments: Any) -> Scoring:
        return replace(read_scoring(*arguments), window=None)

    model = tiny("mistral_windowed", sliding_window=4096)  # far longer than the sequences it is checked with
    with engine(model, **side):
        assert model.config.sliding_window == 4096
    monkeypatch.setattr(attention_interface, "read_scoring", without_window)
    with pytest.raises(UnsupportedModelError, match="MistralForCausalLM differ"), engine(model, **side):
        pass


def test_a_model_that_agrees_on_one_probe_is_accepted_and_otherwise_refused(
    caplog: pytest.LogCaptureFixture,
) -> None:
    runner = CpuRunner(tiny("llama"), num_blocks=16, block_size=4)
    right = runner.plain_logits()
    wrong = [logits_2V + 100 for logits_2V in right]
    runner.verify(right)
    assert not caplog.text
    runner.verify([*wrong[:-1], right[-1]])
    assert "on a later probe" in caplog.text
    with pytest.raises(ConfigError, match="by 100 where"):
        runner.verify(wrong)


@both
def test_a_model_whose_logits_would_differ_is_refused(side: dict[str, Any]) -> None:
    model = tiny("llama")
    # An attention layer that mixes in its neighbour in the row: right for one sequence, wrong for several in a row.
    attention = model.model.layers[1].self_attn.o_proj
    attention.register_forward_hook(lambda _module, _inputs, output: output + output.roll(1, dims=1))
    with (
        pytest.raises(ConfigError, match="LlamaForCausalLM differ"),
        engine(model, **side),
    ):
        pass
