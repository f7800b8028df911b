"""With an output head in float32, a sampler and a learner in bfloat16 agree better."""

from __future__ import annotations

import asyncio
import copy
from typing import Any

import pytest
import torch
from torch import nn

from agent_r1.engines.base import Sampling
from agent_r1.engines.local.weights import Fp32Head, cast_weights, use_fp32_head
from agent_r1.errors import ConfigError
from agent_r1.learn.batch.packs import merge_steps, pack
from agent_r1.learn.model.policy import PolicyModel
from tests.engines.engine_sides import both, engine, generate
from tests.engines.tiny_models import prompts, tiny
from tests.learn.builders import step, trajectory

families = pytest.mark.parametrize("family", ["llama", "llama_tied", "gemma3"])
SAMPLING = Sampling(max_tokens=16, temperature=1.0, seed=1)


def offset(family: str) -> Any:
    """A model whose logits are around 20, as those of trained models are. An error of that offset cancels in a softmax;
    rounding each logit to a multiple of 1/8, as bfloat16 does, does not."""
    model = tiny(family)
    with torch.no_grad():
        for weight in {model.get_input_embeddings().weight, model.get_output_embeddings().weight}:
            weight[:, 0] = 4.0
        for name, weight in model.named_parameters():  # so that the offset still reaches the head
            if name.endswith(("o_proj.weight", "down_proj.weight")):
                weight.mul_(0.1)
    return model


def in_bfloat16(model: Any, *, fp32_head: bool) -> Any:
    sampler = cast_weights(copy.deepcopy(model), torch.bfloat16)
    if fp32_head:
        use_fp32_head(sampler, model.get_output_embeddings())
    return sampler


def mismatch(model: Any, side: dict[str, Any], *, fp32_head: bool) -> float:
    """Mean distance of the sampler's log-probs from the learner's."""
    with engine(in_bfloat16(model, fp32_head=fp32_head), **side) as local:
        asked = prompts(*range(3, 12))
        said = generate(local, asked, SAMPLING)
    policy = PolicyModel(copy.deepcopy(model), autocast_dtype=torch.bfloat16, fp32_head=fp32_head)
    distances = []
    for prompt, completion in zip(asked, said, strict=True):
        (part,) = pack(merge_steps([trajectory(step(prompt, completion.token_ids))]), 10_000)
        with torch.no_grad():
            learned_T, _ = policy.logprobs(part, temperature=1.0)
        distances.append((learned_T - torch.tensor(completion.logprobs)).abs())
    return float(torch.cat(distances).mean())


@both
@families
def test_sampler_and_learner_agree_better(family: str, side: dict[str, Any]) -> None:
    model = offset(family)
    coarse, fine = (mismatch(model, side, fp32_head=fp32_head) for fp32_head in (False, True))
    assert fine < 0.7 * coarse


@both
@families
def test_new_weights_reach_the_head_in_float32_and_the_rest_in_bfloat16(family: str, side: dict[str, Any]) -> None:
    model, other = tiny(family), tiny(family)
    with torch.no_grad():
        for weight in other.parameters():
            weight.add_(0.01)
    masters = PolicyModel(copy.deepcopy(other)).weights()  # tied ones once
    with engine(in_bfloat16(model, fp32_head=True), **side) as local:
        asyncio.run(local.load_weights(masters.items(), 1))
        sampler = local._runner.model
        expected = other.get_output_embeddings().weight
        assert torch.equal(sampler.get_output_embeddings().weight.cpu(), expected)
        assert torch.equal(sampler.get_input_embeddings().weight.cpu(), other.get_input_embeddings().weight.bfloat16())
        fresh = in_bfloat16(other, fp32_head=True)
        with engine(fresh, **side) as same:
            asked = prompts(3, 7)
            assert [c.logprobs for c in generate(local, asked, SAMPLING)] == [
                c.logprobs for c in generate(same, asked, SAMPLING)
            ]


class Doubled(nn.Linear):
    """A head that is more than a matrix."""

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(hidden)


def test_the_learner_multiplies_the_masters_in_float32() -> None:
    model = offset("llama")
    (part,) = pack(merge_steps([trajectory(step([1, 2, 3], [4, 5, 6]))]), 10_000)
    for fp32_head in (True, False):
        policy = PolicyModel(copy.deepcopy(model), autocast_dtype=torch.bfloat16, fp32_head=fp32_head)
        logprobs_T, _ = policy.logprobs(part, temperature=1.0)
        with torch.no_grad():
            exact_TV = model.lm_head(policy.hidden(part).float())
        expected_T = exact_TV.log_softmax(-1).gather(1, part.targets_T[:, None])[:, 0]
        error = (logprobs_T - expected_T).abs().max().item()
        assert error < 1e-5 if fp32_head else error > 1e-3
        logprobs_T.sum().backward()
        assert {p.grad.dtype for p in policy.model.parameters() if p.grad is not None} == {torch.float32}


def test_only_a_linear_head_can_be_replaced() -> None:
    model = tiny("llama")
    model.lm_head = Doubled(32, 97, bias=False)
    with pytest.raises(ConfigError, match=r"model\.fp32_head.*LlamaForCausalLM has Doubled"):
        use_fp32_head(cast_weights(copy.deepcopy(model), torch.bfloat16), model.lm_head)


def test_a_bias_is_kept() -> None:
    head = nn.Linear(3, 2)
    hidden = torch.randn(4, 3, generator=torch.Generator().manual_seed(0)).bfloat16()
    assert torch.equal(Fp32Head(head)(hidden), head(hidden.float()))
