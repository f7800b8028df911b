"""A compiled tower makes the same features, and is not compiled again for other numbers of pictures."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch import Tensor
from torch._dynamo.utils import counters

from agent_r1.compute import compiling
from agent_r1.vision import eyes as eyes_module
from agent_r1.vision.eyes import Eyes
from agent_r1.vision.picture_format import IDEFICS
from agent_r1.vision.pictures import Picture
from tests.learn.plain_kernels import PlainKernels, plain_kernels
from tests.vision.tiny_models import KINDS, make_model, make_tokenizer, picture

PICTURES = [picture(1, 64, 24), picture(2, 40, 96), picture(3, 16, 16), picture(4, 64, 64), picture(5, 24, 64)]
AT_ONCE = [kind for kind in KINDS if kind not in IDEFICS]
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@pytest.fixture
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[PlainKernels]:
    """FlashAttention on the CPU, in any precision, and a compiler that only traces."""
    monkeypatch.setattr(eyes_module, "has_flash", lambda *_: True)
    compile_each = compiling.compile_each

    def trace_each(layers: Iterator[torch.nn.Module]) -> None:
        kept = list(layers)
        compile_each(kept)  # keeps torch's limits as they are in use
        for layer in kept:
            layer.compile(dynamic=True, backend="aot_eager")

    monkeypatch.setattr(eyes_module, "compile_each", trace_each)
    torch._dynamo.reset()
    counters.clear()
    with plain_kernels() as made:
        yield made


def features(eyes: Eyes, pictures: list[Picture], dtype: torch.dtype | None = None) -> tuple[Tensor, Tensor]:
    """Of the pictures, and the gradient of the tower."""
    tower = [p for part in eyes.tower for p in part.parameters()]
    with torch.autocast(tower[0].device.type, dtype=dtype, enabled=dtype is not None):
        made = eyes.features(pictures)
    weights = torch.linspace(-1, 1, made.numel(), device=made.device).reshape(made.shape)
    gradients = torch.autograd.grad((made.float() * weights).sum(), tower, allow_unused=True)
    return made.detach(), torch.cat([gradient.flatten() for gradient in gradients if gradient is not None])


def difference(got: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> float:
    """Relative to the norms."""
    pairs = zip(got, expected, strict=True)
    return max(float((one.float() - other).norm() / other.norm()) for one, other in pairs)


@pytest.mark.parametrize("kind", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])  # idefics3 has the tower of smolvlm
def test_a_compiled_tower_is_the_tower_for_any_number_of_pictures(kind: str, kernels: PlainKernels) -> None:
    plain, compiled = (Eyes(*make_model(kind, make_tokenizer(kind))) for _ in range(2))
    compiled.compile(torch.float32)
    graphs = []
    for count in (2, 1, 5):
        kernels.forwards.clear()
        assert difference(features(compiled, PICTURES[:count]), features(plain, PICTURES[:count])) < 1e-5
        graphs.append(counters["stats"]["unique_graphs"])
        # A layer attends to all pictures in one call, and patches see later ones too.
        assert len(kernels.forwards) == (len(compiling.repeated_layers(compiled.tower[0])) if kind in AT_ONCE else 0)
        assert all(call["window_size_right"] is None for call in kernels.forwards)
    assert graphs[-1] == graphs[1]  # torch compiles for one picture and for several


@pytest.mark.parametrize("kind", AT_ONCE)
def test_a_tower_without_flash_attention_is_not_compiled(kind: str) -> None:
    eyes = Eyes(*make_model(kind, make_tokenizer(kind)))
    eyes.compile(torch.float32)
    assert all(layer._compiled_call_impl is None for layer in compiling.repeated_layers(eyes.tower[0]))


@needs_cuda
@pytest.mark.parametrize("kind", KINDS)
def test_on_a_gpu_a_compiled_tower_in_half_precision_is_close_to_the_tower_in_single(kind: str) -> None:
    plain, compiled = (Eyes(*make_model(kind, make_tokenizer(kind))) for _ in range(2))
    for part in (*plain.tower, *compiled.tower):
        part.cuda()
    compiled.compile(torch.bfloat16)
    for count in (2, 5, 1):
        expected = features(plain, PICTURES[:count])
        assert difference(features(compiled, PICTURES[:count], torch.bfloat16), expected) < 0.05
