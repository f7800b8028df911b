"""Checkpointed and compiled layers compute what the layers compute."""

from __future__ import annotations

import random
import shutil
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from agent_r1.compute.compiling import repeated_layers
from agent_r1.errors import ConfigError
from agent_r1.learn.model.layers import checkpoint_layers, compile_layers, require_compiler
from agent_r1.learn.model.policy import PolicyModel
from tests.learn.builders import credit_for, gradients_of, learner_for, on_policy, random_groups, tiny_model
from tests.learn.test_policy import one_pack

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")


def gradients(policy: PolicyModel, seeds: tuple[int, ...] = (0,)) -> dict[str, Tensor]:
    """Of packs of different lengths."""
    for seed in seeds:
        policy.logprobs(one_pack(seed), temperature=1.0)[0].square().sum().backward()
    return {name: p.grad for name, p in policy.model.named_parameters() if p.grad is not None}


def count_calls(policy: PolicyModel) -> list[str]:
    calls: list[str] = []
    repeated_layers(policy.model)[0].self_attn.register_forward_hook(lambda *_: calls.append("attention"))
    return calls


@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_checkpointed_layers_are_computed_twice_and_give_the_same_gradients(family: str) -> None:
    plain, thrifty = PolicyModel(tiny_model(family)), PolicyModel(tiny_model(family), checkpoint_activations=True)
    counted = [count_calls(plain), count_calls(thrifty)]
    torch.testing.assert_close(gradients(thrifty), gradients(plain), rtol=0, atol=0)
    assert [len(calls) for calls in counted] == [1, 2]
    with torch.no_grad():
        thrifty.logprobs(one_pack(0), temperature=1.0)
    assert len(counted[1]) == 3  # nothing to go back through, nothing to compute again


def test_checkpointing_leaves_dropout_off() -> None:
    model = tiny_model("llama", attention_dropout=0.5)
    torch.testing.assert_close(
        gradients(PolicyModel(model, checkpoint_activations=True)), gradients(PolicyModel(tiny_model())), rtol=0, atol=0
    )
    training = {name for name, module in model.named_modules() if module.training}
    assert training == {"model.layers.0", "model.layers.1"}


def test_a_copy_is_checkpointed_too() -> None:
    copy = PolicyModel(tiny_model(), checkpoint_activations=True).copy()
    calls = count_calls(copy)
    gradients(copy)
    assert len(calls) == 2


@pytest.mark.slow
@needs_compiler
def test_compiled_layers_give_the_same_gradients_and_are_compiled_once_for_packs_of_any_length() -> None:
    torch._dynamo.reset()
    compiled = PolicyModel(tiny_model(), compiled=True)
    expected = gradients(PolicyModel(tiny_model()), seeds=(0, 1, 2))
    gradients(compiled, seeds=(0,))
    before = torch._dynamo.utils.counters["stats"]["unique_graphs"]
    assert before > 0
    got = gradients(compiled, seeds=(1, 2))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == before
    for name, gradient in expected.items():
        assert float((got[name] - gradient).norm() / gradient.norm()) < 1e-5, name


@needs_compiler
def test_a_copy_is_compiled_too() -> None:
    copy = PolicyModel(tiny_model(), compiled=True).copy()
    assert all(layer._compiled_call_impl is not None for layer in repeated_layers(copy.model))


def test_a_whole_update_does_not_depend_on_checkpointing() -> None:
    def update(**settings: Any) -> dict[str, Tensor]:
        policy, rng = PolicyModel(tiny_model(), **settings), random.Random(2)
        learner = learner_for("ppo", policy)
        learner.update(credit_for("ppo", on_policy(random_groups(rng), policy, rng, noise=0.1), learner))
        return gradients_of(learner)

    torch.testing.assert_close(update(checkpoint_activations=True), update(), rtol=1e-6, atol=1e-7)


def test_a_model_whose_layers_cannot_be_found_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"Linear: set learner\.compile=false"):
        compile_layers(nn.Linear(1, 1))
    with pytest.raises(ConfigError, match=r"Linear: set learner\.activation_checkpointing=false"):
        checkpoint_layers(nn.Linear(1, 1))


def test_without_a_compiler_compiling_is_refused_before_the_first_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    for name in ("CC", "CXX"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ConfigError, match=r"learner\.compile needs a C\+\+ compiler"):
        require_compiler(torch.device("cpu"))
