"""FlashAttention as an operator: what it computes, what its kernels are given, and that compiled layers keep it whole.

The kernels need a GPU. On a CPU torch has none, so slow ones (`plain_kernels.py`) take the empty places in its table of
kernels, and all of the package runs as it is.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._dynamo.utils import counters
from torch.utils._python_dispatch import TorchDispatchMode

from agent_r1.compute.attention import Scoring, read_scoring
from agent_r1.compute.compiling import repeated_layers
from agent_r1.compute.flash import flash_runs, flash_runs_backward, sum_rows
from agent_r1.learn.batch.packs import Pack, merge_steps, pack
from agent_r1.learn.batch.tree import PackLayout, PrefixSharing, lay_out
from agent_r1.learn.model.packed_attention import packed_attention_for, segments, varlen
from agent_r1.learn.model.policy import PolicyModel
from tests.learn.builders import VOCABULARY, step, tiny_model, trajectory
from tests.learn.plain_kernels import PlainKernels, plain_kernels

CPU = torch.device("cpu")
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def kernels() -> Iterator[PlainKernels]:
    with plain_kernels() as made:
        yield made


# What goes in.


def tree_of(*trees: list[list[int]]) -> PackLayout:
    return lay_out([[np.array(ids) for ids in sorted(tree)] for tree in trees]).layout


FLAT = PackLayout.flat([7, 1, 12, 3])
# rows on three paths and on two, segments that go on where others end, and a tree of one path
TREE = tree_of([[1, 2, 3, 4, 5], [1, 2, 3, 8], [1, 2, 3, 8, 9, 9], [1, 2, 6]], [[4, 4, 4]], [[5, 1], [5, 2], [5, 2, 7]])
LAYOUTS = {"flat": FLAT, "tree": TREE}


def inputs(
    layout: PackLayout,
    *,
    dtype: torch.dtype = torch.float32,
    device: torch.device = CPU,
    heads: tuple[int, int] = (4, 2),
    head_dim: int = 8,
) -> list[Tensor]:
    """Query, key and value as a model hands them over: heads outermost, rows inside."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, sum(layout.query_lengths), head_dim, generator=generator) for n in (*heads, heads[1])]
    return [tensor.to(device, dtype).transpose(0, 1).detach().requires_grad_() for tensor in made]


def computed(kernel: Any, tensors: list[Tensor], layout: PackLayout, window: int | None) -> list[Tensor]:
    """Output, and gradients of query, key and value."""
    generator = torch.Generator().manual_seed(1)
    weights = torch.randn(tensors[0].shape, generator=generator).to(tensors[0])
    output = kernel(*tensors, layout, Scoring(scale=0.3, window=window))
    return [output.detach(), *torch.autograd.grad(output, tensors, weights)]


# What comes out.


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
@pytest.mark.parametrize("window", [None, 1, 3, 100])
@pytest.mark.parametrize("heads", [(4, 4), (4, 2), (3, 1)])
@pytest.mark.usefixtures("kernels")
def test_the_operator_computes_what_segments_computes(
    layout: PackLayout, window: int | None, heads: tuple[int, int]
) -> None:
    tensors = inputs(layout, heads=heads)
    torch.testing.assert_close(
        computed(varlen, tensors, layout, window), computed(segments, tensors, layout, window), rtol=1e-4, atol=1e-5
    )


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    trees=st.lists(
        st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=6), min_size=1, max_size=5), min_size=1, max_size=3
    ),
    window=st.none() | st.integers(1, 7),
)
@pytest.mark.usefixtures("kernels")
def test_the_operator_computes_what_segments_computes_on_any_trees(
    trees: list[list[list[int]]], window: int | None
) -> None:
    layout = tree_of(*trees)
    tensors = inputs(layout)
    torch.testing.assert_close(
        computed(varlen, tensors, layout, window), computed(segments, tensors, layout, window), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=needs_cuda)])
@pytest.mark.usefixtures("kernels")
def test_small_gradients_of_a_shared_row_are_not_lost(device: str) -> None:
    # Row 0 is a run of its own and the start of 255 others of one row each. All scores are 0, so row 0 weighs 1 in its
    # own output and 1/2 in each of the others, and its value gets 1 + 255 * 2^-8 / 2 = 1.498. In bf16, every addition
    # of 2^-9 to 1 would be lost; 1.5 is the bf16 next to the sum.
    paths = torch.tensor([0, *(row for leaf in range(1, 256) for row in (0, leaf))])
    layout = PackLayout.of([1] * 256, [1] + [2] * 255, paths).to(torch.device(device))
    like: dict[str, Any] = {"dtype": torch.bfloat16, "device": device}
    query, key, value = (torch.zeros(256, 1, 64, requires_grad=True, **like) for _ in range(3))
    weights = torch.full((256, 1, 64), 2.0**-8, **like)
    weights[0] = 1.0
    varlen(query, key, value, layout, Scoring(scale=0.3)).backward(weights)
    assert value.grad is not None
    assert value.grad[0].unique().tolist() == [1.5]
    assert value.grad[1:].unique().tolist() == [2.0**-9]


def test_gradients_of_shared_rows_are_summed_in_single_precision() -> None:
    # torch's sum on a CPU is exact enough in half precision too, that on a GPU is not: so look at what it sums in
    class Sums(TorchDispatchMode):
        dtypes: ClassVar[list[torch.dtype]] = []

        def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            if function is torch.ops.aten.index_add_.default:
                self.dtypes.append(args[0].dtype)
            return function(*args, **(kwargs or {}))

    with Sums():
        total = sum_rows(torch.ones(3, 1, 8, dtype=torch.bfloat16), torch.tensor([0, 0, 1]), 2)
    assert Sums.dtypes == [torch.float32]
    assert total.dtype == torch.bfloat16
    assert total[:, 0, 0].tolist() == [2.0, 1.0]


def test_shared_rows_are_kept_once_for_the_backward_pass(kernels: PlainKernels) -> None:
    tensors = inputs(TREE, dtype=torch.bfloat16)
    kept: list[Tensor] = []

    def keep(tensor: Tensor) -> Tensor:
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        varlen(*tensors, TREE, Scoring(scale=0.3))  # type: ignore[call-arg, arg-type]
    rows = sum(TREE.query_lengths)
    assert kernels.forwards[0]["keys"] > rows  # gathered for the kernel, and for it alone
    assert {len(tensor) for tensor in kept if tensor.ndim == 3} == {rows}


# What the kernels are asked for.


def test_the_kernels_are_given_lengths_as_numbers_and_the_window_without_the_query_itself(
    kernels: PlainKernels,
) -> None:
    tensors = inputs(TREE, dtype=torch.bfloat16)
    for window in (None, 5):
        varlen(*tensors, TREE, Scoring(scale=0.3, window=window)).sum().backward()  # type: ignore[call-arg, arg-type]
    always = {
        "dtypes": {torch.bfloat16},
        "keys": 5 + 6 + 3 + 3 + 2 + 3,  # [1 2 3 4 5], [1 2 3 8 9 9], [1 2 6], [4 4 4], [5 1], [5 2 7]
        "longest": (5, 6),
        "scale": 0.3,
        "window_size_right": 0,
    }
    # five positions: the query's own and four before it
    assert kernels.forwards == [always | {"window_size_left": left} for left in (None, 4)]
    assert kernels.backwards == kernels.forwards


def test_the_default_scale_is_that_of_the_head_size(kernels: PlainKernels) -> None:
    tensors = inputs(FLAT, dtype=torch.bfloat16, head_dim=16)
    varlen(*tensors, FLAT, read_scoring(torch.nn.Identity(), tensors[0], None, None, None, {}))  # type: ignore[call-arg, arg-type]
    assert kernels.forwards[0]["scale"] == 0.25  # 1 / sqrt(16)
    assert kernels.forwards[0]["longest"] == (12, 12)


def test_under_autocast_the_kernels_get_what_autocast_asks_for(kernels: PlainKernels) -> None:
    query, key, value = inputs(TREE)  # as rotary embeddings leave the first two
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = varlen(query, key, value.bfloat16(), TREE, Scoring(scale=0.3))
    output.float().sum().backward()
    assert output.dtype == torch.bfloat16
    assert [call["dtypes"] for call in kernels.forwards + kernels.backwards] == [{torch.bfloat16}] * 2
    assert query.grad is not None
    assert query.grad.dtype == torch.float32


def test_torch_takes_these_arguments_and_promises_the_shapes_that_the_operator_promises() -> None:
    # On the meta device nothing is computed, but arguments are matched with torch's own declaration of the kernels. The
    # longest lengths stay on the CPU, where they can be read.
    meta = torch.device("meta")
    layout = PackLayout.flat([20, 11]).to(meta)
    query, key, value = (each.detach() for each in inputs(layout, dtype=torch.bfloat16, device=meta))
    rest = (layout.query_starts, layout.key_starts, None, layout.longest, 0.3, 5, True)
    kept, promised = (run(query, key, value, *rest) for run in (flash_runs._init_fn, flash_runs))
    assert described(kept) == described(promised)
    inner, outer = (
        run(query, query, key, value, *kept, *rest) for run in (flash_runs_backward._init_fn, flash_runs_backward)
    )
    assert described(inner) == described(outer)


def described(tensors: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(each.shape, each.dtype) for each in tensors]


# What torch.compile relies on.


@pytest.mark.parametrize("layout", [*LAYOUTS.values(), PackLayout.flat([1])], ids=[*LAYOUTS, "one row"])
@pytest.mark.parametrize(("window", "causal"), [(0, True), (3, True), (0, False)])
@pytest.mark.usefixtures("kernels")
def test_the_operators_keep_the_promises_that_compilation_relies_on(
    layout: PackLayout, window: int, causal: bool
) -> None:
    tensors, starts = inputs(layout), (layout.query_starts, layout.key_starts)
    rest = (*starts, layout.gather_K, layout.longest, 0.3, window, causal)
    torch.library.opcheck(flash_runs, (*tensors, *rest))
    output, logsumexp = flash_runs(*tensors, *rest)
    given_back = [each.detach() for each in (output, *tensors, output, logsumexp)]
    torch.library.opcheck(flash_runs_backward, (*given_back, *rest))


def packed(rng: random.Random, prefix_sharing: PrefixSharing, device: torch.device = CPU, longest: int = 9) -> Pack:
    """Attempts at a few rows; everything after the prompt is a response."""
    said = []
    for _ in range(rng.randint(1, 3)):
        start = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, longest))]
        for _ in range(rng.randint(2, 4)):
            response = [rng.randrange(VOCABULARY) for _ in range(rng.randint(2, longest))]
            said.append(trajectory(step(start, response)))
    (made,) = pack(merge_steps(said), 10_000, prefix_sharing=prefix_sharing, device=device)
    assert (made.layout.gather_K is None) == (prefix_sharing == "off")
    return made


def gradients_of(policy: PolicyModel, made: Pack) -> Tensor:
    policy.model.zero_grad()
    policy.logprobs(made, temperature=1.0)[0].sum().backward()
    return torch.cat([p.grad.flatten() for p in policy.model.parameters() if p.grad is not None])


def compile_layers(policy: PolicyModel, backend: str) -> None:
    """What is traced, and when again, is the same for all backends; "eager" does not trace backwards, and is fast."""
    torch._dynamo.reset()
    counters.clear()
    for layer in repeated_layers(policy.model):
        layer.compile(dynamic=True, backend=backend)


@pytest.mark.parametrize(
    ("family", "kinds", "backend", "checkpoint_activations"),
    [("llama", 1, "aot_eager", False), ("qwen2-sliding", 2, "eager", False), ("gemma3", 2, "eager", True)],
)
@pytest.mark.usefixtures("kernels")
def test_compiled_layers_are_one_graph_for_every_kind_of_layer_and_of_layout(
    family: str, kinds: int, backend: str, checkpoint_activations: bool
) -> None:
    eager = PolicyModel(tiny_model(family), attention="segments")
    compiled = PolicyModel(tiny_model(family), attention="varlen", checkpoint_activations=checkpoint_activations)
    compile_layers(compiled, backend)
    rng, graphs = random.Random(0), []
    for _ in range(6):
        for prefix_sharing in ("off", "on"):
            made = packed(rng, prefix_sharing)
            expected, got = gradients_of(eager, made), gradients_of(compiled, made)
            assert float((got - expected).norm() / expected.norm()) < 1e-5
            graphs.append(counters["stats"]["unique_graphs"])
    assert graphs == [kinds] + [2 * kinds] * 11  # flat, and from the first tree on both
    assert not counters["graph_break"]


@pytest.mark.usefixtures("kernels")
def test_layers_are_not_recompiled_after_a_first_pack_of_one_run() -> None:
    policy = PolicyModel(tiny_model(), attention="varlen")
    compile_layers(policy, "eager")
    for count in (1, 3, 5):  # 7, 21 and 35 rows: none is a size of the model
        said = [trajectory(step([1, 2, 3], [4, 5, 6, last])) for last in range(count)]
        (made,) = pack(merge_steps(said), 10_000)
        gradients_of(policy, made)
    assert counters["stats"]["unique_graphs"] == 1


# On a GPU.


@needs_cuda
@pytest.mark.parametrize("layout", ["flat", "tree", "single rows"])
@pytest.mark.parametrize("window", [None, 5, 100])
@pytest.mark.parametrize("head_dim", [64, 128])
@pytest.mark.parametrize("deterministic", [False, True])
def test_on_a_gpu_the_operator_computes_what_segments_computes(
    layout: str, window: int | None, head_dim: int, deterministic: bool
) -> None:
    assert packed_attention_for(torch.device("cuda"), torch.bfloat16, head_dim) == "varlen"
    rng, cuda = random.Random(0), torch.device("cuda")
    start = [rng.randrange(VOCABULARY) for _ in range(300)]
    tree = [start[: rng.randint(1, 300)] + [rng.randrange(VOCABULARY) for _ in range(150)] for _ in range(16)]
    made = {
        "flat": PackLayout.flat([300, 1, 129, 7]),
        "tree": tree_of(tree, [start[:50]]),
        "single rows": tree_of([[1], [2], [3]]),
    }[layout].to(cuda)
    tensors = inputs(made, dtype=torch.bfloat16, device=cuda, head_dim=head_dim)
    torch.use_deterministic_algorithms(deterministic)
    try:
        got, again = computed(varlen, tensors, made, window), computed(varlen, tensors, made, window)
    finally:
        torch.use_deterministic_algorithms(False)
    expected = computed(segments, [tensor.detach().float().requires_grad_() for tensor in tensors], made, window)
    for name, a, b in zip(["output", "query", "key", "value"], got, expected, strict=True):
        error, scale = (a.float() - b).norm(), b.norm()
        assert error <= 2e-2 * scale + 1e-3, name  # a single key leaves no gradient but what rounding makes of 0
    if deterministic:
        assert all(torch.equal(a, b) for a, b in zip(got, again, strict=True))


@needs_cuda
@pytest.mark.slow
def test_on_a_gpu_compiling_adds_nothing_to_the_error_of_half_precision() -> None:
    rng, cuda = random.Random(0), torch.device("cuda")
    packs = [packed(rng, sharing, cuda, longest=100) for sharing in ("off", "on", "off", "on")]
    torch._dynamo.reset()
    counters.clear()

    def policy(dtype: torch.dtype | None, name: str, *, compiled: bool = False) -> PolicyModel:
        model = tiny_model("qwen2-sliding", head_dim=64, hidden_size=64).to(cuda)
        return PolicyModel(model, attention=name, autocast_dtype=dtype, compiled=compiled)

    exact, eager = policy(None, "segments"), policy(torch.bfloat16, "segments")
    compiled = policy(torch.bfloat16, "varlen", compiled=True)
    for each in packs:
        expected = gradients_of(exact, each)
        got, other = (float((gradients_of(p, each) - expected).norm() / expected.norm()) for p in (compiled, eager))
        assert got < 1.5 * other + 1e-3
    assert not counters["graph_break"]
    # Layers with a window and without, flat and tree; and what is done to logits, forwards and backwards.
    assert counters["stats"]["unique_graphs"] == 4 + 2
