from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from agent_r1.compute.attention import Scoring
from agent_r1.errors import ConfigError
from agent_r1.learn.batch.packs import Pack, merge_steps, pack
from agent_r1.learn.batch.tree import PackLayout, PrefixSharing
from agent_r1.learn.model.packed_attention import (
    PACKED_ATTENTIONS,
    packed_attention_for,
    segments,
    use_packed_attention,
)
from agent_r1.learn.model.policy import PolicyModel
from tests.learn.builders import VOCABULARY, step, tiny_model, trajectory

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
# (queries, keys) of each run: alone, after a shared start, a single row, and one longer than the windows below
RUNS = [(7, 7), (3, 9), (1, 12), (20, 31)]


def grouped(rng: random.Random, *, prompt: int, attempts: int, longest: int) -> Pack:
    """Attempts at one row, of different lengths; everything after the prompt is a response."""
    start = [rng.randrange(VOCABULARY) for _ in range(prompt)]
    said = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, longest))] for _ in range(attempts)]
    (packed,) = pack(merge_steps(trajectory(step(start, each)) for each in said), 10_000, prefix_sharing="on")
    return packed


def by_definition(
    query_NHD: Tensor, key_KGD: Tensor, value_KGD: Tensor, runs: list[tuple[int, int]], scoring: Scoring
) -> Tensor:
    """Query by query and head by head."""
    window, softcap, sinks = scoring.window, scoring.softcap, scoring.sinks_H
    outputs, first_query, first_key = [], 0, 0
    share = query_NHD.shape[1] // key_KGD.shape[1]  # how many heads read the same keys
    for rows, past in runs:
        for i in range(rows):
            end = first_key + past - rows + i + 1
            start = first_key if window is None else max(first_key, end - window)
            heads = []
            for head, query_D in enumerate(query_NHD[first_query + i]):
                scores = key_KGD[start:end, head // share] @ query_D * scoring.scale
                scores = scores if softcap is None else softcap * (scores / softcap).tanh()
                scores = scores if sinks is None else torch.cat([scores, sinks[head, None]])
                weights = scores.softmax(-1)[: end - start]
                heads.append(weights @ value_KGD[start:end, head // share])
            outputs.append(torch.stack(heads))
        first_query, first_key = first_query + rows, first_key + past
    return torch.stack(outputs)


def inputs(runs: list[tuple[int, int]], dtype: torch.dtype = torch.float64) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(sum(q for q, _ in runs), 4), (sum(k for _, k in runs), 2), (sum(k for _, k in runs), 2)]
    made = [torch.randn(n, heads, 8, generator=generator) for n, heads in shapes]
    return [tensor.to(dtype).requires_grad_() for tensor in made]


def layout_of(runs: list[tuple[int, int]]) -> PackLayout:
    return PackLayout.of([q for q, _ in runs], [k for _, k in runs], None)


@pytest.mark.parametrize("window", [None, 1, 5, 100])
@pytest.mark.parametrize("softcap", [None, 0.5])
@pytest.mark.parametrize("sinks", [False, True])
def test_each_query_sees_its_path_up_to_itself(window: int | None, softcap: float | None, sinks: bool) -> None:
    tensors = inputs(RUNS)
    sinks_H = torch.tensor([-1.0, 0.0, 0.5, 2.0], dtype=torch.float64, requires_grad=True) if sinks else None
    scoring = Scoring(scale=0.3, window=window, softcap=softcap, sinks_H=sinks_H)
    got = segments(*tensors, layout_of(RUNS), scoring)
    expected = by_definition(*tensors, RUNS, scoring)  # type: ignore[call-arg, arg-type]
    tensors += [sinks_H] if sinks_H is not None else []
    torch.testing.assert_close(got, expected)
    weights = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=got.dtype)
    torch.testing.assert_close(
        torch.autograd.grad(got, tensors, weights), torch.autograd.grad(expected, tensors, weights)
    )


def test_the_attention_is_chosen_by_device_and_dtype() -> None:
    assert packed_attention_for(CPU, torch.bfloat16, 64) == "segments"
    assert packed_attention_for(torch.device("cuda"), torch.float32, 64) == "segments"  # no kernel for it
    model = tiny_model()
    use_packed_attention(model, None, torch.bfloat16)
    assert model.config._attn_implementation == "agent_r1_segments"
    assert set(PACKED_ATTENTIONS) == {"segments", "varlen"}


def test_a_model_that_loses_the_layout_is_refused() -> None:
    model = tiny_model()
    use_packed_attention(model, "segments")
    with pytest.raises(ConfigError, match=r"LlamaAttention .*`packed`"):
        model(input_ids=torch.tensor([[1, 2]]))


@needs_cuda
@pytest.mark.parametrize("family", ["llama", "qwen2-sliding", "qwen3"])
@pytest.mark.parametrize("prefix_sharing", ["off", "on"])
def test_on_a_gpu_neither_kernel_nor_tree_adds_to_the_error_of_half_precision(
    family: str, prefix_sharing: PrefixSharing
) -> None:
    rng = random.Random(0)
    start = [rng.randrange(VOCABULARY) for _ in range(200)]
    attempts = [trajectory(step(start, [rng.randrange(VOCABULARY) for _ in range(40)])) for _ in range(4)]
    device = torch.device("cuda")
    (packed,) = pack(merge_steps(attempts), 10_000, prefix_sharing=prefix_sharing, device=device)
    (flat,) = pack(merge_steps(attempts), 10_000, device=device)

    def gradient(given: Pack, attention: str | None, dtype: torch.dtype | None) -> Tensor:
        model = tiny_model(family, head_dim=64, hidden_size=64).to(device)
        policy = PolicyModel(model, attention=attention, autocast_dtype=dtype)
        assert model.config._attn_implementation == f"agent_r1_{attention or 'varlen'}"
        policy.logprobs(given, temperature=1.0)[0].mean().backward()
        return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])

    exact = gradient(flat, "segments", None)
    got, other = (
        float((gradient(given, name, torch.bfloat16) - exact).norm() / exact.norm())
        for given, name in ((packed, None), (flat, "segments"))
    )
    # Half precision costs what it costs; this kernel, and trees, may not add to it.
    assert got < 1.5 * other + 1e-3


# Compiled layers.


def test_compiled_layers_serve_every_layout_after_one_compilation() -> None:
    rng = random.Random(0)
    packs = [
        grouped(rng, prompt=prompt, attempts=attempts, longest=longest)
        for prompt, attempts, longest in [(5, 2, 4), (9, 1, 7), (3, 5, 6), (20, 3, 2)]
    ]
    assert {packed.layout.gather_K is None for packed in packs} == {True, False}

    def gradients(policy: PolicyModel, packed: Pack) -> list[Tensor]:
        policy.model.zero_grad()
        policy.logprobs(packed, temperature=1.0)[0].sum().backward()
        return [p.grad.clone() for p in policy.model.parameters() if p.grad is not None]

    eager, compiled = (PolicyModel(tiny_model("qwen3"), attention="segments") for _ in range(2))
    torch._dynamo.reset()
    counters.clear()
    body: Any = compiled.model.model
    for layer in body.layers:
        layer.compile(dynamic=True, backend="eager")  # what is traced, and when again, does not depend on the backend
    graphs = []
    for packed in packs:
        expected, got = gradients(eager, packed), gradients(compiled, packed)
        graphs.append(counters["stats"]["unique_graphs"])
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5 * max(1.0, b.abs().max().item()))
    # each of three functions, one inside the other, falls into what is before and after what it calls: the layer, the
    # attention module, and the function that hands over to `segments`
    assert graphs == [graphs[0]] * len(packs)
    assert 0 < graphs[0] <= 6
