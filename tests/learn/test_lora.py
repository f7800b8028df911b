"""Adapters: the merged weights compute what the adapted model computes, and nothing but adapters is trained."""

from __future__ import annotations

import io
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from agent_r1.errors import ConfigError
from agent_r1.learn.learner import Learner
from agent_r1.learn.model.lora import LoRA
from agent_r1.learn.model.policy import PolicyModel
from tests.engines.tiny_models import tiny
from tests.learn.builders import credit_for, critic_of, learner_for, on_policy, random_groups, tiny_model
from tests.learn.test_policy import one_pack

pytest.importorskip("peft")


def lora(**changes: Any) -> LoRA:
    settings: dict[str, Any] = {"rank": 3, "alpha": 6.0, "target_modules": None, "seed": 0}
    return LoRA(**(settings | changes))


def adapted(family: str = "llama", **changes: Any) -> PolicyModel:
    """With adapters that do something: B is 0 in the beginning."""
    policy = PolicyModel(tiny_model(family), lora=lora(**changes))
    state = policy.adapter_state()
    assert state is not None
    generator = torch.Generator().manual_seed(1)
    for name, tensor in state.items():
        if "lora_B" in name:
            tensor.copy_(0.3 * torch.randn(tensor.shape, generator=generator))
    return policy


def logprobs(policy: PolicyModel) -> torch.Tensor:
    with torch.no_grad():
        return policy.logprobs(one_pack(0), temperature=0.9)[0]


def trained(policy: PolicyModel, name: str = "grpo", **settings: Any) -> tuple[Learner, dict[str, float]]:
    learner, rng = learner_for(name, policy, lr=1e-2, **settings), random.Random(3)
    groups = on_policy(random_groups(rng), policy, rng, noise=0.1)
    return learner, learner.update(credit_for(name, groups, learner))


@pytest.mark.parametrize("family", ["llama", "llama-tied", "qwen2", "gemma3"])
def test_a_plain_model_with_the_merged_weights_computes_the_same(family: str) -> None:
    policy, plain = adapted(family), PolicyModel(tiny_model(family, seed=9))
    assert policy.weights().keys() == plain.weights().keys()
    assert {name: w.shape for name, w in policy.weights().items()} == {n: w.shape for n, w in plain.weights().items()}
    plain.load_trained_state(policy.weights())
    torch.testing.assert_close(logprobs(plain), logprobs(policy), rtol=0, atol=1e-5)
    assert (logprobs(policy) - logprobs(PolicyModel(tiny_model(family)))).abs().max() > 0.1


def test_a_merged_matrix_is_w_plus_scale_times_b_a_by_hand() -> None:
    policy, name = adapted(), "model.layers.0.self_attn.q_proj"
    state: Any = policy.adapter_state()
    # scale = alpha / rank = 6 / 3
    expected = tiny_model().get_submodule(name).weight + 2 * state[f"{name}.lora_B"] @ state[f"{name}.lora_A"]
    torch.testing.assert_close(policy.weights()[f"{name}.weight"], expected)


def test_new_adapters_change_nothing_and_depend_only_on_the_seed() -> None:
    model = tiny_model()
    torch.manual_seed(5)
    first, drawn = PolicyModel(model, lora=lora()), torch.rand(())
    torch.manual_seed(6)
    second, other = PolicyModel(tiny_model(), lora=lora()), PolicyModel(tiny_model(), lora=lora(seed=1))
    torch.testing.assert_close(logprobs(first), logprobs(PolicyModel(tiny_model())), rtol=0, atol=0)
    states: list[Any] = [each.adapter_state() for each in (first, second, other)]
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])
    assert not all(torch.equal(states[0][name], states[2][name]) for name in states[0])
    torch.manual_seed(5)
    assert torch.rand(()) == drawn  # nobody else's random numbers were used up


def test_only_adapters_are_trained_and_the_optimizer_knows_nothing_else() -> None:
    policy = PolicyModel(tiny_model(), lora=lora(target_modules=("q_proj", "v_proj")))
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    learner, metrics = trained(policy)
    assert metrics["grad_norm"] > 0
    changed = {name for name, p in policy.model.named_parameters() if not torch.equal(p, before[name])}
    assert changed
    assert all("lora_" in name for name in changed)
    # two layers; q: 16 -> 32, v: 16 -> 16; rank 3
    trained_numbers = 2 * (3 * (16 + 32) + 3 * (16 + 16))
    saved = learner.state_dict()["optimizer"]["adam"]["state"]
    assert sum(state["exp_avg"].numel() for state in saved.values()) == trained_numbers
    moved = {
        name for name, tensor in policy.weights().items() if not torch.equal(tensor, tiny_model().state_dict()[name])
    }
    assert {name.split(".")[-2] for name in moved} == {"q_proj", "v_proj"}


def test_without_adapters_it_is_the_initial_policy_and_training_it_goes_on() -> None:
    policy = adapted()
    reference = policy.without_adapters()
    torch.testing.assert_close(logprobs(reference), logprobs(PolicyModel(tiny_model())), rtol=0, atol=0)
    _, metrics = trained(policy, kl_coef=0.1, reference=reference)
    assert metrics["kl_to_reference"] > 0
    assert metrics["grad_norm"] > 0
    torch.testing.assert_close(logprobs(reference), logprobs(PolicyModel(tiny_model())), rtol=0, atol=0)


def test_a_checkpoint_is_a_plain_model_that_anyone_can_load(tmp_path: Path) -> None:
    for family in ("llama", "llama-tied"):
        policy = adapted(family)
        before = logprobs(policy)
        policy.save_pretrained(str(tmp_path / family))
        loaded = PolicyModel(AutoModelForCausalLM.from_pretrained(str(tmp_path / family)))
        torch.testing.assert_close(logprobs(loaded), before, rtol=0, atol=1e-5)
        assert torch.equal(logprobs(policy), before)  # saving has not touched it
        assert not list((tmp_path / family).glob("adapter*"))


@pytest.mark.parametrize("name", ["grpo", "ppo"])
def test_training_goes_on_exactly_from_base_and_saved_adapter(name: str) -> None:
    """ppo has a critic with a backbone, and so adapters, of its own."""

    def fresh(policy: PolicyModel) -> Learner:
        critic = critic_of(policy, shared=False) if name == "ppo" else None
        return learner_for(name, policy, lr=1e-2, critic=critic)

    policy, rng = PolicyModel(tiny_model(), lora=lora()), random.Random(3)
    groups = on_policy(random_groups(rng), policy, rng, noise=0.1)
    learner = fresh(policy)
    learner.update(credit_for(name, groups, learner))
    file = io.BytesIO()
    torch.save(learner.state_dict(), file)
    file.seek(0)
    restored = fresh(PolicyModel(tiny_model(), lora=lora(seed=7)))
    restored.load_state_dict(torch.load(file, weights_only=True))
    expected, got = (each.update(credit_for(name, groups, each)) for each in (learner, restored))
    assert got == expected
    assert all(torch.equal(tensor, restored.weights()[key]) for key, tensor in learner.weights().items())


@pytest.mark.parametrize("target", ["lm_head", "embed_tokens", "query"])
def test_modules_that_cannot_be_adapted_are_refused(target: str) -> None:
    with pytest.raises(ConfigError, match=rf"lora\.target_modules=\('{target}',\)"):
        PolicyModel(tiny_model(), lora=lora(target_modules=(target,)))
    with pytest.raises(ConfigError, match=r"lora\.target_modules=auto: .* of GPT2LMHeadModel"):  # has only Conv1D
        PolicyModel(tiny("gpt2"), lora=lora())


def test_an_adapter_that_does_not_fit_is_refused() -> None:
    small, large = (PolicyModel(tiny_model(), lora=lora(rank=rank)) for rank in (2, 3))
    for model, state in (
        (large, small.adapter_state()),
        (large, None),
        (PolicyModel(tiny_model()), small.adapter_state()),
    ):
        with pytest.raises(ConfigError, match=r"adapter.*lora"):
            model.load_adapter_state(state)
