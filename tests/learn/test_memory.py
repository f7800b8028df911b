"""The estimate before the first step: what is counted, what is measured, and when it refuses."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from agent_r1.compute.compiling import repeated_layers
from agent_r1.errors import ConfigError
from agent_r1.learn import memory
from agent_r1.learn.batch.packs import merge_steps, pack
from agent_r1.learn.memory import (
    Measured,
    estimate,
    fitting_pack,
    fixed_bytes,
    line_through,
    measure,
    readable,
    size_of,
    synthetic_batch,
)
from agent_r1.learn.model.lora import LoRA
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.ranks.crew import OneProcess
from tests.learn.builders import VOCABULARY, learner_for, tiny_model

FIXED = "weights 1.0 GiB"
MEASURED = Measured(
    bytes_per_token=2.0**20,
    bytes_once=2.0**28,
    bytes_in_step=2**20,
    available=2**33 + 2**28,
    elsewhere=2**29,
    first_seconds=31.4,
    second_seconds=0.25,
)


def test_a_line_through_two_peaks_by_hand() -> None:
    # 100 tokens took 1,500 bytes, 200 took 2,500: 10 a token, and 500 whatever the size
    assert line_through((100, 1500), (200, 2500)) == (10.0, 500.0)


@given(st.integers(1, 1000), st.integers(1, 1000), st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_line_goes_through_what_was_measured_and_never_down(first: int, more: int, small: int, large: int) -> None:
    slope, once = line_through((first, small), (first + more, large))
    assert slope >= 1
    assert once >= 0
    if slope > 1:
        assert slope * (first + more) + once >= large * (1 - 1e-9)


def test_how_many_tokens_fit_by_hand() -> None:
    # 8 GiB and 256 MiB are available, 256 MiB are needed once, 1 MiB per token
    assert MEASURED.tokens_that_fit == 8192
    assert replace(MEASURED, available=2**28 - 1).tokens_that_fit == 0
    # The optimizer's step needs 9 GiB for itself.
    assert replace(MEASURED, bytes_in_step=9 * 2**30).tokens_that_fit == 0


def test_memory_held_by_other_processes_is_mentioned() -> None:
    crowded = replace(MEASURED, available=0, elsewhere=116 * 2**30)
    for longest in (None, 4096):
        with pytest.raises(ConfigError, match=r"\. 116\.0 GiB of the GPU are held by other processes"):
            fitting_pack(FIXED, crowded, 8192, longest)
        with pytest.raises(ConfigError) as alone:
            fitting_pack(FIXED, replace(crowded, elsewhere=2**30), 8192, longest)
        assert "held by" not in str(alone.value)


def test_packs_are_made_smaller_until_they_fit_by_hand() -> None:
    # room for 8,192
    assert fitting_pack(FIXED, MEASURED, 8192, 4096) == 8192
    assert fitting_pack(FIXED, MEASURED, 32_768, 4096) == 8192
    # 100 MiB less: room for 8,092, and 7 * 1,024 = 7,168
    tight = replace(MEASURED, available=MEASURED.available - 100 * 2**20)
    assert fitting_pack(FIXED, tight, 32_768, 4096) == 7168
    assert fitting_pack(FIXED, tight, 32_768, 8000) == 8000  # a segment is never cut
    assert fitting_pack(FIXED, tight, 100, 8000) == 100
    for longest in (None, 8092):  # without a longest segment, packs are not made smaller
        assert fitting_pack(FIXED, tight, 8092, longest) == 8092
    with pytest.raises(ConfigError, match=rf"room for packs of 8092 tokens.* 1\.0 MiB .* {FIXED} .*_per_pack=8093"):
        fitting_pack(FIXED, tight, 8093, None)
    with pytest.raises(ConfigError, match=r"8092 tokens.* 8093 \(rollout\.max_context_tokens\)"):
        fitting_pack(FIXED, tight, 100, 8093)


@given(st.integers(0, 10**5), st.integers(1, 10**5), st.integers(1, 10**5))
def test_a_pack_is_never_larger_than_wanted_or_than_fits(room: int, wanted: int, longest: int) -> None:
    measured = replace(MEASURED, bytes_once=0.0, available=room * 2**20)
    if room < longest:
        with pytest.raises(ConfigError):
            fitting_pack(FIXED, measured, wanted, longest)
        return
    size = fitting_pack(FIXED, measured, wanted, longest)
    assert 1 <= size <= min(wanted, room)
    assert size == wanted or size > room - 1024


@pytest.mark.parametrize(("size", "text"), [(0, "0 B"), (1023, "1023 B"), (1536, "1.5 KiB"), (3 * 2**40, "3072.0 GiB")])
def test_sizes_are_readable(size: int, text: str) -> None:
    assert readable(size) == text


def test_fixed_memory_is_counted_once() -> None:
    policy = PolicyModel(tiny_model("llama-tied"))
    weights = size_of(policy.model.parameters())
    body = size_of(policy.body_parameters())
    assert weights == 4 * sum(p.numel() for p in policy.model.parameters())
    plain = fixed_bytes(learner_for("grpo", policy))
    assert list(plain.values()) == [weights, weights, 2 * weights, 0, 0]
    head = 4 * (16 + 1)
    separate = fixed_bytes(learner_for("ppo", policy, kl_coef=0.1, reference=policy.copy()))
    trained = weights + body + head
    assert separate == {
        "weights": weights,
        "gradients": trained,
        "optimizer": 2 * trained,
        "reference": weights,
        "critic": weights + head,
    }
    shared = fixed_bytes(learner_for("ppo", policy, shared=True, offload_optimizer=True))
    assert list(shared.values()) == [weights, weights + head, 0, 0, head]
    small = fixed_bytes(learner_for("grpo", policy, eight_bit_optimizer=True))
    # Matrices: 2 bytes a number and 2 scales of 4 bytes for each row, which is shorter than a block. Vectors: 8 bytes.
    shapes = [p.shape for p in policy.model.parameters()]
    assert small["optimizer"] == sum(
        2 * shape[0] * (shape[1] + 4) if len(shape) == 2 else 8 * shape[0] for shape in shapes
    )


class Gpu:
    """Stands in for a GPU: a policy that claims to be on one, and measurements by whether layers are checkpointed."""

    def __init__(self, patch: pytest.MonkeyPatch, *, plain: Measured | None, checkpointed: Measured) -> None:
        self.asked: list[bool] = []
        patch.setattr(PolicyModel, "device", property(lambda _: torch.device("cuda")))

        def measure(learner: Any) -> Measured:
            models = [learner.policy.model, *([learner.critic.backbone.model] if learner.critic else [])]
            found = {layer.training for model in models for layer in repeated_layers(model)}
            assert len(found) == 1  # policy and critic alike
            self.asked += found
            if not found == {True} and plain is None:
                raise torch.cuda.OutOfMemoryError
            return checkpointed if found == {True} or plain is None else plain

        patch.setattr(memory, "measure", measure)
        patch.setattr(memory, "_elsewhere", lambda _: 0)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
@pytest.mark.parametrize(("open_size", "wanted", "asked"), [
    (False, 8192, [False]),  # fits as it is
    (False, 8193, [False, True]),
    (True, 8192, [False]),  # the longest segment fits; packs become smaller
    (True, 8193, [False, True]),
])  # fmt: skip
def test_activation_checkpointing_is_chosen_if_packs_do_not_fit_without(
    monkeypatch: pytest.MonkeyPatch, name: str, open_size: bool, wanted: int, asked: list[bool]
) -> None:
    # room for 8,192 tokens, or for four times as many with checkpointing
    learner = learner_for(name, PolicyModel(tiny_model()), max_tokens_per_pack=50_000 if open_size else wanted)
    gpu = Gpu(monkeypatch, plain=MEASURED, checkpointed=replace(MEASURED, bytes_per_token=2.0**18))
    line = estimate(learner, longest=wanted if open_size else None, may_checkpoint=True)
    assert gpu.asked == asked
    is_on = asked[-1]
    assert ("activation checkpointing is on: packs of 8193 tokens do not fit without it" in line) == is_on
    assert learner.max_tokens_per_pack == (wanted if not open_size else 32_768 if is_on else 8192)


def test_running_out_of_memory_turns_checkpointing_on_or_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    one, other, several = (learner_for("grpo", PolicyModel(tiny_model()), max_tokens_per_pack=8192) for _ in range(3))
    Gpu(monkeypatch, plain=None, checkpointed=MEASURED)
    line = estimate(one, may_checkpoint=True)
    assert "activation checkpointing is on: packs of 8192 tokens do not fit without it" in line
    with pytest.raises(ConfigError, match=r"do not fit into the GPU's memory.*activation_checkpointing=true"):
        estimate(other)
    several.ranks = OneProcess()
    several.ranks.size = 2  # a rank that has not run out would wait for this one
    with pytest.raises(ConfigError, match=r"do not fit into the GPU's memory"):
        estimate(several, may_checkpoint=True)


def test_without_a_choice_packs_that_do_not_fit_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    learner = learner_for("grpo", PolicyModel(tiny_model()), max_tokens_per_pack=8193)
    gpu = Gpu(monkeypatch, plain=MEASURED, checkpointed=MEASURED)
    with pytest.raises(ConfigError, match=r"room for packs of 8192 tokens.* learner\.max_tokens_per_pack=8193"):
        estimate(learner)
    assert gpu.asked == [False]


def test_a_policy_with_adapters_is_its_own_reference_and_has_small_gradients() -> None:
    pytest.importorskip("peft")
    policy = PolicyModel(tiny_model(), lora=LoRA(rank=1, alpha=1.0, target_modules=("q_proj",), seed=0))
    fixed = fixed_bytes(learner_for("grpo", policy, kl_coef=0.1, reference=policy.without_adapters()))
    # two layers, q_proj: 16 -> 32, rank 1
    assert fixed["gradients"] == 4 * 2 * (16 + 32)
    assert (fixed["optimizer"], fixed["reference"]) == (2 * fixed["gradients"], 0)


def test_on_a_cpu_the_estimate_has_only_fixed_memory() -> None:
    learner = learner_for("grpo", max_tokens_per_pack=100)
    line = estimate(learner, longest=200, may_checkpoint=True)
    assert not any(layer.training for layer in repeated_layers(learner.policy.model))
    assert line.startswith("learner memory: weights ")
    assert "per token" not in line
    assert learner.max_tokens_per_pack == 100


@pytest.mark.parametrize(("wanted", "sizes"), [
    (131_072, [2048, 2048, 4096, 59 * 512]),  # (20,000 - 1,600) / 0.3 = 61,333 seem to fit; half of them, in segments
    (16_384, [2048, 2048, 4096, 16_384]),  # never more than a pack may have
    (4096, [2048, 2048, 4096]),
])  # fmt: skip
def test_a_third_pack_shows_what_small_ones_hide(
    monkeypatch: pytest.MonkeyPatch, wanted: int, sizes: list[int]
) -> None:
    # In MB: 0.3 per token kept by all layers, and either 1,600 for logits or 0.2 per token for one layer, whichever is
    # more. Beyond 8,000 tokens that is 0.5 per token; packs of 2,048 and 4,096 alone would say 0.3 + 1,600.
    seen: list[int] = []

    def peak(_learner: Any, rows: int, _shared: bool) -> memory._Pass:
        seen.append(rows)
        return memory._Pass(rows, round(1e6 * (0.3 * rows + max(1600, 0.2 * rows))), 1.0)

    monkeypatch.setattr(memory, "_peak", peak)
    monkeypatch.setattr(memory, "_available", lambda _: int(20e9))
    monkeypatch.setattr(memory, "_elsewhere", lambda _: 0)
    learner = learner_for("grpo", PolicyModel(tiny_model()), max_tokens_per_pack=wanted, prefix_sharing="off")
    measured = measure(learner)
    assert seen == sizes
    if wanted > 20_000:  # 20,000 / 0.5 fit
        assert measured.tokens_that_fit == pytest.approx(40_000, rel=0.06)
    far = 0.3 * wanted + max(1600, 0.2 * wanted)
    if wanted < 20_000:  # the pack itself was measured
        assert measured.bytes_once + wanted * measured.bytes_per_token == pytest.approx(1e6 * far)


@pytest.mark.parametrize("tokens", [2, 512, 513, 2048])
def test_a_synthetic_pack_has_the_requested_size_and_shares_no_prefix(tokens: int) -> None:
    batch = synthetic_batch(tokens, VOCABULARY, with_values=True, shared=False)
    steps = [item.trajectory.steps[0] for item in batch]
    assert tokens <= sum(len(step.prompt_ids) + len(step.response_ids) for step in steps) <= tokens + 1
    assert len({step.prompt_ids[0] for step in steps}) == len(steps)


def test_a_synthetic_batch_of_groups_has_the_rows_of_its_trees() -> None:
    # Two groups of 8 attempts, each with 448 tokens in common and 64 of its own: 2 x (448 + 8 x 64) = 1,920 rows.
    batch = synthetic_batch(2000, 50_000, with_values=False, shared=True)
    segments = merge_steps([item.trajectory for item in batch])
    (tree,) = pack(segments, 4096, prefix_sharing="on")
    assert (len(batch), tree.num_tokens, sum(tree.lengths), tree.num_trained) == (16, 1920, 16 * 512, 16 * 64)


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_a_rehearsal_leaves_gradients_and_changes_nothing_else(name: str) -> None:
    learner = learner_for(name, PolicyModel(tiny_model()), max_tokens_per_pack=4096)
    before: dict[str, Any] = {key: tensor.clone() for key, tensor in learner.weights().items()}
    learner.rehearse(synthetic_batch(600, VOCABULARY, with_values=name == "ppo", shared=False))
    assert any(p.grad is not None for p in learner.policy.model.parameters())
    learner.zero_grad()
    assert all(p.grad is None for p in learner.policy.model.parameters())
    assert all(torch.equal(tensor, before[key]) for key, tensor in learner.weights().items())
    assert learner.optimizer_steps == learner.updates == 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is measured on a GPU")
def test_on_a_gpu_packs_are_made_smaller_if_allowed() -> None:
    learner = learner_for("grpo", PolicyModel(tiny_model().cuda()), max_tokens_per_pack=10**12)
    with pytest.raises(ConfigError, match=r"max_tokens_per_pack=1000000000000"):
        estimate(learner)
    line = estimate(learner, longest=512)
    assert 512 <= learner.max_tokens_per_pack < 10**12
    assert f"({learner.max_tokens_per_pack} allowed)" in line


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is measured on a GPU")
@pytest.mark.parametrize("tokens", [1, 2, 5])
def test_on_a_gpu_packs_of_a_few_tokens_can_be_measured(tokens: int) -> None:
    learner = learner_for("grpo", PolicyModel(tiny_model().cuda()), max_tokens_per_pack=tokens)
    assert "per token" in estimate(learner)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="memory is measured on a GPU")
def test_on_a_gpu_the_line_predicts_a_larger_pack() -> None:
    model = tiny_model("llama", hidden_size=256, intermediate_size=512, vocab_size=4096).cuda()
    learner = learner_for("grpo", PolicyModel(model, autocast_dtype=torch.bfloat16), max_tokens_per_pack=16_384)
    measured = measure(learner)
    learner.rehearse(synthetic_batch(1024, 4096, with_values=False, shared=False))  # gradients, as in the measurement
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    learner.rehearse(synthetic_batch(16_384, 4096, with_values=False, shared=False))
    peak = torch.cuda.max_memory_allocated() - before
    assert peak == pytest.approx(measured.bytes_once + 16_384 * measured.bytes_per_token, rel=0.15)
