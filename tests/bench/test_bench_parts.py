"""The parts of `agent-r1 bench`: yardsticks by hand, models, workloads, synthetic trajectories."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.bench.machine import pick_device, slug
from agent_r1.bench.measure import alternate, floor_tokens_per_second
from agent_r1.bench.models import NEVER, SMOLLM2_135M, TINY, LlamaShape, make_tokenizer
from agent_r1.bench.synthetic import SyntheticTrajectories
from agent_r1.bench.workload import Workload
from agent_r1.errors import ConfigError
from agent_r1.plan.formulas import training_flops


def test_the_floor_is_weights_and_keys_and_values_read_once_per_token() -> None:
    # A step reads 1000 + 4 * 50 * 5 = 2000 bytes; at 8000 bytes per second that is 4 steps of 4 tokens each.
    floor = floor_tokens_per_second(
        sequences=4, context=50, weight_bytes=1000, kv_bytes_per_token=5, bytes_per_second=8000
    )
    assert floor == 16


def test_the_floor_of_the_full_benchmark() -> None:
    # Keys and values of 30 layers x 3 heads x 64 in two bytes: 23,040 bytes a token. 256 sequences of 512 tokens:
    # 3.02 GB, and 0.269 GB of weights: 0.765 ms at 4.3 TB/s, 335 thousand tokens per second.
    model = SMOLLM2_135M.model()
    assert model.kv_bytes_per_token(torch.bfloat16) == 23_040
    floor = floor_tokens_per_second(
        sequences=256,
        context=512,
        weight_bytes=2 * model.parameters,
        kv_bytes_per_token=23_040,
        bytes_per_second=4.3e12,
    )
    assert floor == pytest.approx(335e3, rel=0.01)


def test_a_training_step_counts_what_it_needs() -> None:
    # 5 tokens x 10 weights and 2 trained x 7, 6 FLOPs each: 384. Pairs: 1 + 2 + 3 of three tokens, 1 + 2 of two: 9,
    # of width 4, at 12 FLOPs: 432.
    flops = training_flops([3, 2], trained=2, body_parameters=10, head_parameters=7, attention_width=4)
    assert flops == 384 + 432
    # Frozen weights save their own gradient, 2 FLOPs of 6; attention needs the same.
    frozen = training_flops([3, 2], trained=2, body_parameters=10, head_parameters=7, attention_width=4, per_weight=4.0)
    assert frozen == 256 + 432


@given(st.integers(1, 4), st.integers(1, 9))
def test_sides_take_turns_at_going_first(sides: int, repeats: int) -> None:
    calls: list[int] = []
    done = alternate({str(side): partial(calls.append, side) for side in range(sides)}, repeats)
    assert len(done) == repeats
    assert all(list(each) == [str(side) for side in range(sides)] for each in done)
    assert calls[::sides] == [repeat % sides for repeat in range(repeats)]
    assert sorted(calls) == sorted(list(range(sides)) * repeats)


@pytest.mark.parametrize("shape", [TINY, replace(TINY, kv_heads=3, layers=1)])
def test_the_counted_parameters_are_those_of_the_network(shape: LlamaShape) -> None:
    model = shape.model()
    network = model.network(dtype=torch.float32, device=torch.device("cpu"))
    assert model.parameters == network.num_parameters()
    assert model.body_parameters == sum(p.numel() for name, p in network.named_parameters() if "proj" in name)
    assert model.head_parameters == network.get_output_embeddings().weight.numel()
    assert model.attention_width == shape.layers * shape.hidden


def test_the_full_shape_has_135_million_parameters() -> None:
    assert SMOLLM2_135M.model().parameters == 134_515_008


def test_equal_seeds_make_equal_weights_and_leave_the_random_state_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second = (TINY.model().network(dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    assert torch.equal(torch.rand(2), expected)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("vocabulary", [320, 1000])
def test_the_end_of_text_cannot_be_sampled(vocabulary: int) -> None:
    tokenizer = make_tokenizer(vocabulary)
    assert tokenizer.convert_tokens_to_ids(NEVER) == tokenizer.eos_token_id == vocabulary
    assert len(tokenizer("abc")["input_ids"]) == 3  # text is bytes
    assert all(tokenizer.decode([index]) for index in range(vocabulary))


def test_a_workload_counts_its_tokens() -> None:
    work = Workload(
        rows=3, group_size=2, at_once=6, steps=4, prompt_tokens=50, response_tokens=10, observation_tokens=30
    )
    assert work.episodes == 6
    assert work.sampled_tokens == 6 * 4 * 10
    assert work.episode_tokens == 50 + 4 * 10 + 3 * 30
    assert work.mean_context == (50 + 180) / 2


def test_an_observation_too_short_for_the_template_is_refused() -> None:
    work = Workload(rows=1, group_size=1, at_once=1, steps=2, prompt_tokens=50, response_tokens=4, observation_tokens=9)
    with pytest.raises(ConfigError, match="observation_tokens=9"):
        work.answer(320)


def test_accelerator_names_become_file_names() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("Intel(R) Xeon(R) @ 2.80GHz") == "intel-r-xeon-r-2-80ghz"


def test_a_missing_device_is_refused() -> None:
    with pytest.raises(ConfigError, match="gpu"):
        pick_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="--device cuda"):
            pick_device("cuda")
        assert pick_device("auto").type == "cpu"


def test_a_growing_episode_appends_response_and_observation() -> None:
    episode = SyntheticTrajectories(320).growing(steps=3, prompt=6, response=2, observation=4)
    # 6, then 2 + 4 more each time
    assert [len(step.prompt_ids) for step in episode.trajectory.steps] == [6, 12, 18]
    assert episode.trajectory.steps[1].prompt_ids[:8] == [
        *episode.trajectory.steps[0].prompt_ids,
        *episode.trajectory.steps[0].response_ids,
    ]


def test_lengths_are_spread_around_their_mean() -> None:
    lengths = SyntheticTrajectories(320).spread(1000, 13)
    assert (min(lengths), max(lengths)) == (400, 1600)
    assert sum(lengths) == 13_000
