"""MLPs in chunks of tokens compute what whole MLPs compute, as often, and keep less."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from agent_r1.compute.compiling import repeated_layers
from agent_r1.errors import ConfigError
from agent_r1.learn.memory import line_through, synthetic_batch
from agent_r1.learn.model.layers import chunk_mlps
from agent_r1.learn.model.lora import LoRA
from agent_r1.learn.model.policy import PolicyModel
from tests.learn.builders import learner_for, tiny_model
from tests.learn.test_layers import gradients, needs_compiler
from tests.learn.test_policy import one_pack

CHUNK = 7  # packs have some dozens of tokens


def relative(got: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    assert got.keys() == expected.keys()
    return max(float((got[name] - expected[name]).norm() / expected[name].norm()) for name in expected)


def count_tokens(policy: PolicyModel) -> dict[str, list[int]]:
    """Tokens of each call of the first layer's attention and of its MLP's first matrix."""
    seen: dict[str, list[int]] = {"attention": [], "mlp": []}
    layer = repeated_layers(policy.model)[0]
    for name, module in (("attention", layer.self_attn.q_proj), ("mlp", layer.mlp.gate_proj)):
        module.register_forward_hook(lambda _m, inputs, _o, name=name: seen[name].append(inputs[0].shape[-2]))
    return seen


@pytest.mark.parametrize("family", ["llama", "gemma3"])
@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_chunks_give_the_same_gradients_to_rounding(family: str, checkpoint_activations: bool) -> None:
    settings: dict[str, Any] = {"checkpoint_activations": checkpoint_activations}
    plain, chunked = (PolicyModel(tiny_model(family), **settings, mlp_chunk_tokens=size) for size in (None, CHUNK))
    with torch.no_grad():
        whole, parts = (each.logprobs(one_pack(0), temperature=1.0)[0] for each in (plain, chunked))
    torch.testing.assert_close(parts, whole, rtol=1e-5, atol=1e-5)
    assert relative(gradients(chunked, (0, 1)), gradients(plain, (0, 1))) < 1e-5


def test_in_bfloat16_chunks_differ_by_rounding() -> None:
    expected = gradients(PolicyModel(tiny_model()))
    got, whole = (
        gradients(PolicyModel(tiny_model(), autocast_dtype=torch.bfloat16, mlp_chunk_tokens=size))
        for size in (CHUNK, None)
    )
    assert 1e-4 < relative(got, expected) < 1.5 * relative(whole, expected)  # no worse than bfloat16 as such


@pytest.mark.parametrize("checkpoint_activations", [False, True])
def test_an_mlp_is_computed_twice_with_or_without_a_checkpoint(checkpoint_activations: bool) -> None:
    policy = PolicyModel(tiny_model(), checkpoint_activations=checkpoint_activations, mlp_chunk_tokens=CHUNK)
    seen, tokens = count_tokens(policy), one_pack(0).num_tokens
    gradients(policy)
    assert sum(seen["attention"]) == tokens * (1 + checkpoint_activations)
    assert sum(seen["mlp"]) == 2 * tokens
    assert max(seen["mlp"]) == CHUNK


def test_a_layer_with_a_norm_after_its_mlp_computes_the_mlp_once_more() -> None:
    # Gemma's norm needs the output of the MLP, so a checkpoint has to go through it.
    policy = PolicyModel(tiny_model("gemma3"), checkpoint_activations=True, mlp_chunk_tokens=CHUNK)
    seen = count_tokens(policy)
    gradients(policy)
    assert sum(seen["mlp"]) == 3 * one_pack(0).num_tokens


def test_adapters_in_the_first_mlp_alone_are_trained() -> None:
    # The input of the first layer's MLP needs no gradient then.
    pytest.importorskip("peft")
    lora = LoRA(rank=2, alpha=4.0, target_modules=("up_proj", "down_proj"), seed=1)
    for checkpointing in (False, True):
        plain, chunked = (
            PolicyModel(tiny_model(), lora=lora, mlp_chunk_tokens=size, checkpoint_activations=checkpointing)
            for size in (None, CHUNK)
        )
        expected = {name: g for name, g in gradients(plain).items() if "lora_B" in name}  # A's are 0 while B is 0
        assert len(expected) == 4
        assert relative({name: g for name, g in gradients(chunked).items() if name in expected}, expected) < 1e-5


def test_a_copy_is_chunked_and_trains_its_own_weights() -> None:
    policy = PolicyModel(tiny_model(), mlp_chunk_tokens=CHUNK)
    copy = policy.copy()
    seen = count_tokens(copy)
    expected = gradients(PolicyModel(tiny_model()))
    assert relative(gradients(copy), expected) < 1e-5
    assert max(seen["mlp"]) == CHUNK
    assert all(p.grad is None for p in policy.model.parameters())


@pytest.mark.slow
@needs_compiler
def test_compiled_layers_take_chunks_too() -> None:
    torch._dynamo.reset()
    compiled = PolicyModel(tiny_model(), compiled=True, mlp_chunk_tokens=CHUNK, checkpoint_activations=True)
    seen = count_tokens(compiled)
    assert relative(gradients(compiled, (0, 1)), gradients(PolicyModel(tiny_model()), (0, 1))) < 1e-5
    assert max(seen["mlp"]) == CHUNK


def test_models_whose_mlp_cannot_be_found_or_divided_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"MLP of Linear: leave out learner\.mlp_chunk_tokens"):
        chunk_mlps([nn.Linear(1, 1)], 10)
    model = tiny_model()
    mlp = model.model.layers[0].mlp
    mlp.__class__ = type("Router", (type(mlp),), {"forward": lambda _, x: (x, x)})
    with pytest.raises(ConfigError, match=r"Router returns more than hidden states: leave out"):
        PolicyModel(model, mlp_chunk_tokens=10)


class Peak(TorchDispatchMode):
    """The largest number of bytes that were allocated inside and lived at the same time."""

    def __init__(self) -> None:
        super().__init__()
        self.live: dict[int, int] = {}
        self.bytes: int = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for tensor in tree_iter(out):
            if isinstance(tensor, Tensor) and (key := (storage := tensor.untyped_storage())._cdata) not in self.live:
                self.live[key] = storage.nbytes()
                weakref.finalize(storage, self.live.pop, key)
        self.bytes = max(self.bytes, sum(self.live.values()))
        return out


def peak(tokens: int, **settings: Any) -> float:
    """MiB of one pack, in layers with the proportions of a model of 8B."""
    shape = {"hidden_size": 128, "intermediate_size": 448, "num_attention_heads": 4, "num_key_value_heads": 1}
    model = tiny_model("llama", num_hidden_layers=4, head_dim=32, **shape)
    policy = PolicyModel(model, autocast_dtype=torch.bfloat16, max_logits=2**14, **settings)
    learner = learner_for("grpo", policy, max_tokens_per_pack=tokens)
    batch = synthetic_batch(tokens, policy.vocabulary_size, with_values=False, shared=False)
    learner.rehearse(batch)  # gradients exist, as between packs
    with Peak() as found:
        learner.rehearse(batch)
    return float(found.bytes / 2**20)


def test_less_memory_is_in_use_at_once() -> None:
    # Each wide vector of the MLP takes 2,048 x 448 x 2 bytes = 1.75 MiB, or 0.2 MiB in chunks of 256. A layer keeps
    # four of them in eager mode: the outputs of gate, activation and up, and their product.
    plain, chunked = peak(2048), peak(2048, mlp_chunk_tokens=256)
    checkpointed = peak(2048, checkpoint_activations=True)
    both = peak(2048, checkpoint_activations=True, mlp_chunk_tokens=256)
    assert chunked < plain - 4 * 4 * 1.5  # four layers
    assert both < checkpointed - 4 * 1.5  # one layer
    assert both < 0.75 * checkpointed


@pytest.mark.parametrize("settings", [{}, {"checkpoint_activations": True, "mlp_chunk_tokens": 128}])
def test_a_line_through_two_packs_predicts_a_larger_one(settings: dict[str, Any]) -> None:
    # What the estimate before the first step does on a GPU: packs of four chunks and of half of what fits.
    small, large, whole = (round(2**20 * peak(tokens, **settings)) for tokens in (512, 1024, 2048))
    slope, once = line_through((512, small), (1024, large))
    assert once + 2048 * slope == pytest.approx(whole, rel=0.1)
