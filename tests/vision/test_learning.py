"""The learner and pictures: what is cached and when it is forgotten, what is trained, and what a step takes."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from agent_r1.errors import ConfigError
from agent_r1.learn import memory
from agent_r1.learn.batch.packs import merge_steps, pack
from agent_r1.learn.estimators import _state
from agent_r1.learn.memory import SEGMENT_TOKENS, fixed_bytes, measure, picture_batch
from agent_r1.learn.model.lora import LoRA
from agent_r1.learn.model.policy import PolicyModel
from agent_r1.types import Step, StopReason, ToolCallRecord, Trajectory
from agent_r1.vision import eyes
from agent_r1.vision.eyes import Eyes
from agent_r1.vision.pictures import Picture
from tests.learn.builders import learner_for
from tests.vision.test_exact import logprobs, trajectories
from tests.vision.tiny_models import KINDS, make_model, make_tokenizer, picture


def policy_for(kind: str = "qwen3_vl", **settings: Any) -> PolicyModel:
    model, form = make_model(kind, make_tokenizer(kind))
    return PolicyModel(model, pictures=form, **settings)


def packs_for(policy: PolicyModel) -> Any:
    return pack(merge_steps(trajectories("qwen3_vl")), 10_000, pictures=policy.pictures)


def towers(policy: PolicyModel) -> list[torch.nn.Parameter]:
    assert policy._eyes is not None
    return [parameter for part in policy._eyes.tower for parameter in part.parameters()]


def test_a_tower_that_is_trained_looks_again_after_every_update() -> None:
    policy = policy_for(train_vision=True)
    packs = packs_for(policy)
    assert policy.kept_features == 0
    with torch.no_grad():
        before = logprobs(policy, packs)
        for parameter in towers(policy):
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
        after = logprobs(policy, packs)
        fresh = logprobs(PolicyModel(policy.model, pictures=policy.pictures), packs)
    assert not torch.allclose(before, after, atol=1e-4)
    torch.testing.assert_close(after, fresh, rtol=0, atol=0)


@pytest.mark.parametrize("trained", [True, False])
def test_what_a_critic_depends_on_includes_a_trained_tower(trained: bool) -> None:
    policy = policy_for(train_vision=trained)
    body = {id(parameter) for parameter in policy.body_parameters()}
    assert all((id(parameter) in body) is trained for parameter in towers(policy))


@pytest.mark.parametrize("kind", KINDS)
def test_adapters_are_on_the_decoder_only(kind: str) -> None:
    policy = policy_for(kind, lora=LoRA(rank=2, alpha=4.0, target_modules=None, seed=0))
    trained = [name for name, parameter in policy.model.named_parameters() if parameter.requires_grad]
    assert trained
    assert all("lora" in name for name in trained)
    assert not any("vis" in name or "connector" in name for name in trained)


def test_the_features_that_are_kept_are_bounded_and_those_of_a_pass_are_always_there(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model, form = make_model("qwen3_vl", make_tokenizer("qwen3_vl"))
    shown = [picture(seed, 16, 16) for seed in range(6)]
    seeing = Eyes(model, form)
    seeing.freeze()
    with torch.no_grad():
        each = seeing.features(shown[:1]).nbytes
        monkeypatch.setattr(eyes, "MAX_CACHED_BYTES", 2 * each)
        seeing.features(shown[1:4])  # three in one pass, though only two may be kept
        assert seeing.looked == 4
        seeing.features(shown[4:5])
        assert seeing.features([shown[4]]).nbytes == each
        assert seeing.looked == 5
        assert sum(kept.nbytes for kept in seeing._known.values()) <= 2 * each
        seeing.features(shown[:1])  # the oldest is gone
        assert seeing.looked == 6


@pytest.mark.parametrize("kind", KINDS)
def test_kept_features_do_not_keep_those_of_other_pictures_in_memory(kind: str) -> None:
    seeing = Eyes(*make_model(kind, make_tokenizer(kind)))
    seeing.freeze()
    seeing.features([picture(seed, 16, 16) for seed in range(3)])
    assert all(kept.untyped_storage().nbytes() == kept.nbytes for kept in seeing._known.values())


def test_a_sharded_learner_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="--gpus"):
        policy_for().shard(None)  # type: ignore[arg-type]


# memory


@pytest.mark.parametrize(("kind", "rows"), [*((kind, 300) for kind in KINDS), ("qwen3_vl", 1100)])
def test_a_measured_pack_of_pictures_is_full_of_different_ones(kind: str, rows: int) -> None:
    policy = policy_for(kind)
    assert policy.pictures is not None
    segments = merge_steps([item.trajectory for item in picture_batch(rows, policy.pictures, with_values=False)])
    shown = [p for segment in segments for p in segment.pictures.values()]
    tokens = sum(len(segment.token_ids) for segment in segments)
    assert len(set(shown)) == len(shown) == sum(len(segment.pictures) for segment in segments)
    assert all(len(segment.token_ids) <= SEGMENT_TOKENS for segment in segments)
    assert tokens <= rows
    assert sum(token < 0 for segment in segments for token in segment.token_ids) == tokens - 2 * len(segments)


@pytest.mark.parametrize("train_vision", [True, False])
def test_a_measurement_rehearses_pictures_and_keeps_room_for_their_features(
    monkeypatch: pytest.MonkeyPatch, train_vision: bool
) -> None:
    learner = learner_for("grpo", policy_for(train_vision=train_vision), max_tokens_per_pack=4096)
    tried: list[str] = []
    original: Callable[..., int] = learner.rehearse

    def peak(_: Any, rows: int, layout: Any) -> Any:
        tried.append(layout)
        if layout == "pictures" and rows < 4000:
            assert learner.policy.pictures is not None
            original(picture_batch(64, learner.policy.pictures, with_values=False))
            assert any(p.grad is not None for p in towers(learner.policy)) is train_vision
        return SimpleNamespace(rows=rows, peak=rows * (1000 if layout == "pictures" else 10), seconds=1.0)

    monkeypatch.setattr(memory, "_peak", peak)
    monkeypatch.setattr(memory, "_available", lambda _: 10**9)
    monkeypatch.setattr(memory, "_elsewhere", lambda _: 0)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    measured = measure(learner)
    assert "pictures" in tried
    assert measured.bytes_per_token == 1000  # the dearer layout counts


def test_the_weights_of_the_tower_are_counted_once() -> None:
    learner = learner_for("grpo", policy_for(), max_tokens_per_pack=4096)
    counted = fixed_bytes(learner)
    everything = sum(p.numel() * 4 for p in learner.policy.model.parameters())
    assert counted["weights"] == everything
    assert counted["gradients"] == everything - sum(p.numel() * 4 for p in towers(learner.policy))


# credit


def seen(pictures: tuple[Picture, ...], *, by_call: bool) -> Any:
    """An episode whose second decision follows an answer with these pictures and no words."""
    call = ToolCallRecord(name="look", arguments={}, result="", pictures=pictures, text_span=(0, 0))
    first = Step(
        prompt_ids=[1], response_ids=[2], response_logprobs=[0.0], calls=(call,) if by_call else (), feedback="same"
    )
    ids = [-1 - (each.key << 15) for each in pictures]
    second = Step(prompt_ids=[1, 2, *ids], response_ids=[3], response_logprobs=[0.0], pictures=pictures)
    made = Trajectory(row_id="r", trajectory_id="t", steps=[first, second], stop=StopReason.ANSWERED)
    return SimpleNamespace(trajectory=made, others_acted=False)


@pytest.mark.parametrize("by_call", [True, False])
def test_states_with_the_same_words_and_different_pictures_are_different(by_call: bool) -> None:
    a, b = picture(1, 16, 16), picture(2, 16, 16)
    states = [_state(seen(shown, by_call=by_call), 1, "observation") for shown in ((a,), (b,), (a,), ())]
    assert states[0] == states[2] != states[1]
    assert states[3] == "same"
