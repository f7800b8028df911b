from __future__ import annotations

import random
from copy import deepcopy
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import GraniteConfig, GraniteForCausalLM

from agent_r1.compute.attention import Scoring, read_scoring
from agent_r1.errors import ConfigError, UnsupportedModelError
from agent_r1.learn.batch.packs import Pack, merge_steps, pack
from agent_r1.learn.model import packed_attention
from agent_r1.learn.model.policy import PolicyModel
from tests.learn.builders import VOCABULARY, random_trajectory, step, tiny_model, trajectory

FAMILIES = ["llama", "llama-tied", "qwen2", "qwen2-sliding", "qwen3", "gemma3"]


def one_pack(seed: int, *, count: int = 5) -> Pack:
    rng = random.Random(seed)
    (packed,) = pack(merge_steps(random_trajectory(rng, kind="mixed", name="t") for _ in range(count)), 10_000)
    return packed


def pack_of(*sequences: list[int]) -> Pack:
    """Everything after the first token of each sequence is a response."""
    (packed,) = pack(merge_steps(trajectory(step(ids[:1], ids[1:])) for ids in sequences), 10_000)
    return packed


def expected_logprobs(model: Any, packed: Pack, temperature: float) -> Tensor:
    """The definition: each segment through the whole model on its own, with the model's own attention."""
    model.set_attn_implementation("eager")
    logits = torch.cat([model(input_ids=ids[None]).logits[0] for ids in packed.input_ids_N.split(packed.lengths)])
    scaled = (logits[packed.sources_T].float() / temperature).log_softmax(-1)
    return scaled.gather(-1, packed.targets_T[:, None])[:, 0]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_packed_logprobs_are_those_of_each_segment_alone(family: str, temperature: float) -> None:
    model = tiny_model(family)
    packed = pack_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [4, 5], [7, 7, 7, 1, 2, 9])
    with torch.no_grad():
        expected = expected_logprobs(deepcopy(model), packed, temperature)
        got, entropy = PolicyModel(model).logprobs(packed, temperature=temperature)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert entropy.shape == got.shape
    assert (entropy > 0).all()


class Doubled(torch.nn.Linear):
    """A head that is more than a matrix."""

    def forward(self, hidden: Tensor) -> Tensor:
        return 2 * super().forward(hidden)


def test_a_head_that_is_more_than_a_matrix_is_refused() -> None:
    model = tiny_model("llama")
    model.lm_head = Doubled(16, VOCABULARY, bias=False)
    with pytest.raises(ConfigError, match="Doubled"):
        PolicyModel(model)


def test_tied_weights_get_the_gradient_of_both_their_uses() -> None:
    tied, untied = tiny_model("llama-tied"), tiny_model("llama")
    untied.load_state_dict(tied.state_dict())
    for model in (tied, untied):
        PolicyModel(model).logprobs(one_pack(0), temperature=1.0)[0].sum().backward()
    both = untied.model.embed_tokens.weight.grad + untied.lm_head.weight.grad
    torch.testing.assert_close(tied.lm_head.weight.grad, both)


def test_logits_that_are_scaled_and_softly_capped_need_no_names(monkeypatch: pytest.MonkeyPatch) -> None:
    """log p = log_softmax(5 tanh(0.4 x / 5)): the factor is folded into temperature and cap."""
    model = tiny_model("llama")
    model.config.final_logit_softcapping = None
    policy, packed = PolicyModel(model), one_pack(0)
    monkeypatch.setattr(policy, "_softcap", 5.0)
    monkeypatch.setattr(policy, "_logit_scale", 0.4)
    with torch.no_grad():
        raw = policy.model.lm_head(policy.hidden(packed))  # type: ignore[operator]
        got, _ = policy.logprobs(packed, temperature=0.7)
    expected = (5 * (0.4 * raw / 5).tanh() / 0.7).log_softmax(-1).gather(-1, packed.targets_T[:, None])[:, 0]
    torch.testing.assert_close(got, expected)


def test_the_factor_between_head_and_logits_is_measured() -> None:
    config = GraniteConfig(
        vocab_size=VOCABULARY,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=2,
        logits_scaling=4.0,
    )
    assert PolicyModel(GraniteForCausalLM(config))._logit_scale == pytest.approx(0.25)
    assert PolicyModel(tiny_model("gemma3"))._logit_scale == 1.0


def test_logits_that_change_in_an_unknown_way_are_refused() -> None:
    model = tiny_model("llama")
    model.register_forward_hook(lambda _model, _inputs, output: replace(output, logits=output.logits.square()))
    with pytest.raises(UnsupportedModelError, match="LlamaForCausalLM cannot be trained: log-probs are off by"):
        PolicyModel(model)


class Mixing(torch.nn.Module):
    """Adds the previous token, like a convolution: right for a segment alone, wrong across a pack."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + torch.nn.functional.pad(hidden, (0, 0, 1, 0))[:, :-1]


def test_a_model_that_mixes_tokens_outside_attention_computes_one_segment_at_a_time(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = tiny_model("llama")
    model.model.layers[0].mlp = torch.nn.Sequential(model.model.layers[0].mlp, Mixing())
    packed = pack_of([1, 2, 3, 4, 5, 6, 7, 8, 9, 10], [4, 5], [7, 7, 7, 1, 2, 9])
    with torch.no_grad():
        expected = expected_logprobs(deepcopy(model), packed, 0.7)
        policy = PolicyModel(model)
        got, _ = policy.logprobs(packed, temperature=0.7)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)
    assert not policy.packs
    assert "one segment at a time" in caplog.text


def test_a_long_window_that_is_ignored_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_window(*arguments: Any) -> Scoring:
        return replace(read_scoring(*arguments), window=None)

    assert PolicyModel(tiny_model("qwen2-sliding", sliding_window=4096)).packs
    monkeypatch.setattr(packed_attention, "read_scoring", without_window)
    assert not PolicyModel(tiny_model("qwen2-sliding", sliding_window=4096)).packs


def test_tied_weights_are_handed_over_once_under_their_own_names() -> None:
    tied, untied = PolicyModel(tiny_model("llama-tied")), PolicyModel(tiny_model("llama"))
    assert "lm_head.weight" not in tied.weights()
    assert "lm_head.weight" in untied.weights()
    assert set(tied.weights()) | {"lm_head.weight"} == set(untied.weights())
    other: Any = tiny_model("llama-tied", seed=1)
    missing = other.load_state_dict(tied.weights(), strict=False).missing_keys
    assert missing == ["lm_head.weight"]
    torch.testing.assert_close(other.lm_head.weight, tied.weights()["model.embed_tokens.weight"], rtol=0, atol=0)


@pytest.mark.parametrize("family", ["llama", "llama-tied"])
def test_a_copy_does_not_follow_the_policy(family: str) -> None:
    policy = PolicyModel(tiny_model(family))
    copy = policy.copy()
    packed = one_pack(0)
    with torch.no_grad():
        before = copy.logprobs(packed, temperature=1.0)[0]
        for parameter in policy.model.parameters():
            parameter.add_(0.1)
        assert copy.logprobs(packed, temperature=1.0)[0].tolist() == before.tolist()
    # and what is tied in the one is tied in the other
    assert copy.weights().keys() == policy.weights().keys()


@pytest.mark.parametrize("family", FAMILIES)
def test_weights_can_be_handed_over_exactly(family: str) -> None:
    policy, other = PolicyModel(tiny_model(family)), PolicyModel(tiny_model(family, seed=1))
    other.load_trained_state(policy.weights())
    with torch.no_grad():
        got, expected = (each.logprobs(one_pack(0), temperature=1.0)[0].tolist() for each in (other, policy))
    assert got == expected


def test_weights_of_another_model_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"weights .* do not fit"):
        PolicyModel(tiny_model("llama")).load_trained_state(PolicyModel(tiny_model("llama-tied")).weights())


@pytest.mark.parametrize("family", FAMILIES)
def test_hidden_states_depend_on_the_body_and_on_nothing_else(family: str) -> None:
    policy = PolicyModel(tiny_model(family))
    hidden_TD = policy.hidden(one_pack(0))
    assert hidden_TD.shape == (one_pack(0).num_trained, policy.hidden_size)
    hidden_TD.sum().backward()
    body = {id(p) for p in policy.body_parameters()}
    assert {id(p) for p in policy.model.parameters() if p.grad is not None} == body


def test_half_precision_weights_become_fp32_masters() -> None:
    policy = PolicyModel(tiny_model().to(torch.bfloat16), autocast_dtype=torch.bfloat16)
    assert {p.dtype for p in policy.model.parameters()} == {torch.float32}
    logprobs, entropy = policy.logprobs(one_pack(0), temperature=1.0)
    assert (logprobs.dtype, entropy.dtype) == (torch.float32, torch.float32)
