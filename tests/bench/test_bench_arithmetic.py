"""The sums behind the benchmarks' tables, by hand."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.bench.arithmetic import break_even, floor_tokens_per_second, medians, training_flops
from agent_r1.bench.episodes import Workload
from agent_r1.bench.machine import pick_device, slug
from agent_r1.bench.measure import alternate
from agent_r1.bench.models import NEVER, SMOLLM2_135M, TINY, Shape, make_network, make_tokenizer
from agent_r1.errors import ConfigError


def test_the_floor_is_weights_and_keys_and_values_read_once_per_token() -> None:
    # A step reads 1000 + 4 * 50 * 5 = 2000 bytes; at 8000 bytes per second that is 4 steps of 4 tokens each.
    floor = floor_tokens_per_second(
        sequences=4, context=50, weight_bytes=1000, kv_bytes_per_token=5, bytes_per_second=8000
    )
    assert floor == 16


def test_the_floor_of_the_full_benchmark() -> None:
    # Keys and values of 30 layers x 3 heads x 64 in two bytes: 23,040 bytes a token. 256 sequences of 512 tokens:
    # 3.02 GB, and 0.269 GB of weights: 0.765 ms at 4.3 TB/s, 335 thousand tokens per second.
    assert SMOLLM2_135M.kv_bytes_per_token(torch.bfloat16) == 23_040
    floor = floor_tokens_per_second(
        sequences=256,
        context=512,
        weight_bytes=2 * SMOLLM2_135M.parameters,
        kv_bytes_per_token=23_040,
        bytes_per_second=4.3e12,
    )
    assert floor == pytest.approx(335e3, rel=0.01)


def test_a_training_step_counts_what_it_needs() -> None:
    # 5 tokens x 10 weights and 2 trained x 7, 6 FLOPs each: 384. Pairs: 1 + 2 + 3 of three tokens, 1 + 2 of two: 9,
    # of width 4, at 12 FLOPs: 432.
    flops = training_flops([3, 2], trained=2, body_parameters=10, head_parameters=7, attention_width=4)
    assert flops == 384 + 432


def test_medians_are_taken_figure_by_figure() -> None:
    repeats = [{"a": 1.0, "ratio": 5.0}, {"a": 3.0, "ratio": 1.0}, {"a": 2.0, "ratio": 2.0}]
    assert medians(repeats) == {"a": 2.0, "ratio": 2.0}


def test_the_break_even_lies_where_the_speed_up_last_crosses_one() -> None:
    # Between factor 1.2 at 0.9 and factor 1.6 at 1.1: half way.
    assert break_even([(1.1, 1.05), (1.6, 1.1), (1.2, 0.9), (2.0, 1.5)]) == pytest.approx(1.4)
    assert break_even([(1.5, 1.2), (1.1, 1.0)]) == 1.1
    assert break_even([(1.1, 0.8), (4.0, 0.9)]) is None


@given(st.lists(st.tuples(st.floats(1, 10), st.floats(0.1, 10)), min_size=1, max_size=8, unique_by=lambda p: p[0]))
def test_a_break_even_is_a_factor_that_was_measured_around(points: list[tuple[float, float]]) -> None:
    found = break_even(points)
    if found is not None:
        assert min(points)[0] <= found <= max(points)[0]


@given(st.integers(1, 4), st.integers(1, 9))
def test_sides_take_turns_at_going_first(sides: int, repeats: int) -> None:
    calls: list[int] = []
    done = alternate({str(side): partial(calls.append, side) for side in range(sides)}, repeats)
    assert len(done) == repeats
    assert all(list(each) == [str(side) for side in range(sides)] for each in done)
    assert calls[::sides] == [repeat % sides for repeat in range(repeats)]
    assert sorted(calls) == sorted(list(range(sides)) * repeats)


@pytest.mark.parametrize("shape", [TINY, replace(TINY, kv_heads=3, layers=1)])
def test_a_shape_knows_its_parameters(shape: Shape) -> None:
    network = make_network(shape, dtype=torch.float32, device=torch.device("cpu"))
    assert network.num_parameters() == shape.parameters
    layers = sum(p.numel() for name, p in network.named_parameters() if "proj" in name)
    assert layers == shape.body_parameters


def test_the_full_shape_has_135_million_parameters() -> None:
    assert SMOLLM2_135M.parameters == 134_515_008


def test_equal_seeds_make_equal_weights_and_leave_the_random_numbers_alone() -> None:
    torch.manual_seed(3)
    expected = torch.rand(2)
    torch.manual_seed(3)
    first, second = (make_network(TINY, dtype=torch.float32, device=torch.device("cpu")) for _ in range(2))
    assert torch.equal(torch.rand(2), expected)
    pairs = zip(first.parameters(), second.parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in pairs)


@pytest.mark.parametrize("vocabulary", [320, 1000])
def test_the_end_of_text_cannot_be_sampled(vocabulary: int) -> None:
    tokenizer = make_tokenizer(vocabulary)
    assert tokenizer.convert_tokens_to_ids(NEVER) == tokenizer.eos_token_id == vocabulary
    assert len(tokenizer("abc")["input_ids"]) == 3  # text is bytes
    assert all(tokenizer.decode([index]) for index in range(vocabulary))


def test_a_workload_adds_up() -> None:
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


def test_names_of_machines_become_names_of_files() -> None:
    assert slug("NVIDIA H200") == "nvidia-h200"
    assert slug("Intel(R) Xeon(R) @ 2.80GHz") == "intel-r-xeon-r-2-80ghz"


def test_a_device_that_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="choose auto, cpu or cuda"):
        pick_device("gpu")
    if not torch.cuda.is_available():
        with pytest.raises(ConfigError, match="no CUDA device"):
            pick_device("cuda")
        assert pick_device("auto").type == "cpu"
