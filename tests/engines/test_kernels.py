"""The Triton kernels agree with `torch_kernels.py`: on a GPU if there is one, otherwise in Triton's interpreter.

The interpreter has to be chosen before Triton is imported, so without a GPU the tests run in a separate process.

Shape suffixes as in `triton_kernels.py`.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from agent_r1.compute.attention import Scoring
from agent_r1.engines.local.gpu import torch_kernels
from agent_r1.engines.local.gpu.gpu_attention import Tiles

if find_spec("triton") is None:
    pytest.skip("Triton is not installed", allow_module_level=True)

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
HERE = DEVICE == "cuda" or os.environ.get("TRITON_INTERPRET") == "1"
here = pytest.mark.skipif(not HERE, reason="runs in a process of its own")
DTYPES = [torch.float32, torch.bfloat16] if DEVICE == "cuda" else [torch.float32]
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}

kernels: Any = None
if HERE:
    from agent_r1.engines.local.gpu import triton_kernels as kernels


@pytest.mark.skipif(HERE, reason="everything runs here")
def test_the_kernels_in_tritons_interpreter() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", str(Path(__file__))],
        env=os.environ | {"TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


@dataclass(frozen=True)
class Shape:
    heads: int
    key_heads: int
    size: int
    block_size: int = 16
    window: int | None = None
    splits: int = 1
    softcap: float | None = None
    sinks: bool = False


BLOCKS, WIDTH = 80, 14  # a sequence of 14 blocks of 16 tokens takes several turns of the kernel's loop


@dataclass
class Call:
    """The arguments of `attend` for sequences whose blocks lie anywhere in the pool."""

    shape: Shape
    dtype: torch.dtype
    positions: list[int]
    tiles: list[tuple[int, int, int]]  # sequence, first row, count
    tokens: int

    def __post_init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        shape, rows = self.shape, len(self.positions)
        pool = torch.randn(2, BLOCKS, shape.key_heads, shape.block_size, shape.size, generator=generator)
        self.pool = pool.to(DEVICE, self.dtype)
        # As a model passes it: heads first in memory.
        query = torch.randn(shape.heads, rows, shape.size, generator=generator).to(DEVICE, self.dtype)
        self.query_NHD = query.transpose(0, 1)
        self.sinks_H = torch.randn(shape.heads, generator=generator).to(DEVICE, self.dtype)
        order = torch.randperm(BLOCKS, generator=generator)
        self.table_QW = order[: 5 * WIDTH].view(5, WIDTH).int().to(DEVICE)

    def of(self, module: Any) -> Tensor:
        """The result of each used row."""
        sequence, row, count = torch.tensor(self.tiles, device=DEVICE).T.contiguous()
        out_NHD: Tensor = module.attend(
            self.query_NHD,
            *self.pool,
            Tiles(
                position_N=torch.tensor(self.positions, device=DEVICE),
                table_QW=self.table_QW,
                sequence_T=sequence,
                row_T=row,
                count_T=count.int(),
                tokens=self.tokens,
                splits=self.shape.splits,
            ),
            Scoring(
                scale=self.shape.size**-0.5,
                window=self.shape.window,
                softcap=self.shape.softcap,
                sinks_H=self.sinks_H if self.shape.sinks else None,
            ),
        )
        used = [index for _, first, rows in self.tiles for index in range(first, first + rows)]
        return out_NHD[used].float()

    def check(self) -> None:
        tolerance = TOLERANCE[self.dtype]
        torch.testing.assert_close(self.of(kernels), self.of(torch_kernels), rtol=tolerance, atol=tolerance)


SHAPES = [
    Shape(4, 4, 16),  # every query head has its own keys
    Shape(9, 3, 64),  # 3 share them, padded to 4
    Shape(14, 2, 48, block_size=4),  # 7, padded to 8; a size padded to 64
    Shape(8, 1, 128, block_size=32),
    Shape(2, 1, 256),
]


def decoding(shape: Shape, dtype: torch.dtype) -> Call:
    """The first token of a sequence, some in the middle, the last that fits its blocks, and a padding row."""
    last = WIDTH * shape.block_size - 1
    tiles = [(row, row, int(row != 2)) for row in range(5)]
    return Call(shape, dtype, [0, 3, 7, last // 2, last], tiles, tokens=1)


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("shape", SHAPES)
def test_single_tokens_see_all_of_their_sequence(shape: Shape, splits: int, dtype: torch.dtype) -> None:
    decoding(replace(shape, splits=splits), dtype).check()


@here
def test_a_sequence_may_be_split_into_more_parts_than_it_has_blocks() -> None:
    decoding(Shape(2, 1, 32, splits=16), torch.float32).check()


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("splits", [1, 4])
@pytest.mark.parametrize("window", [1, 5, 70, 1000])
def test_single_tokens_see_no_more_than_their_window(window: int, splits: int, dtype: torch.dtype) -> None:
    decoding(Shape(9, 3, 64, window=window, splits=splits), dtype).check()


def prefill(shape: Shape, dtype: torch.dtype, tokens: int) -> Call:
    """Tiles with different numbers of tokens, at the start and inside of sequences; two of one sequence; padding rows
    and empty tiles."""
    parts = [(0, 5, 1), (1, 0, tokens), (1, tokens, max(1, tokens // 2)), (3, 47, min(3, tokens)), (4, 30, tokens)]
    positions: list[int] = []
    tiles = []
    for sequence, start, count in parts:
        tiles.append((sequence, len(positions), count))
        positions += range(start, start + count)
    return Call(shape, dtype, [*positions, 0, 0, 0], [*tiles, (0, 0, 0), (0, 0, 0)], tokens)


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_tokens_of_longer_chunks_see_what_is_before_them(shape: Shape, dtype: torch.dtype) -> None:
    tokens = kernels.tokens_per_tile(shape.heads, shape.key_heads)
    assert tokens * shape.heads // shape.key_heads <= 64
    prefill(replace(shape, block_size=16), dtype, tokens).check()


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("tokens", [1, 2, 4, 16])
@pytest.mark.parametrize("window", [None, 1, 6, 40])
def test_tiles_of_any_size_and_window_agree(window: int | None, tokens: int, dtype: torch.dtype) -> None:
    prefill(Shape(6, 2, 32, window=window), dtype, tokens).check()


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scores", [{"softcap": 0.5}, {"sinks": True}, {"softcap": 2.0, "sinks": True, "window": 6}])
def test_soft_caps_and_sinks_agree(scores: dict[str, Any], dtype: torch.dtype) -> None:
    prefill(Shape(6, 2, 32, **scores), dtype, 4).check()
    for splits in (1, 4):
        decoding(Shape(9, 3, 64, splits=splits, **scores), dtype).check()


@here
@pytest.mark.parametrize("splits", [1, 4])
def test_values_outside_all_sequences_do_not_matter(splits: int) -> None:
    call = decoding(Shape(4, 2, 32, splits=splits), torch.float32)
    expected = call.of(kernels)
    seen = torch.zeros(BLOCKS, 16, dtype=torch.bool)
    for sequence, row, count in call.tiles:
        for position in range(call.positions[row] + 1 if count else 0):
            seen[int(call.table_QW[sequence, position // 16]), position % 16] = True
    call.pool.masked_fill_(~seen[None, :, None, :, None].to(DEVICE), torch.nan)
    call.query_NHD[2] = torch.nan  # the padding row
    assert torch.equal(call.of(kernels), expected)


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (40, 40), (48, 16)])
def test_keys_and_values_go_to_their_slots_and_nowhere_else(size: int, value_size: int, dtype: torch.dtype) -> None:
    key_NKD = torch.randn(3, 6, size).to(DEVICE, dtype).transpose(0, 1)  # heads first in memory
    value_NKD = torch.randn(6, 3, 2, value_size).to(DEVICE, dtype)[:, :, 1]  # and with gaps
    slot_N = torch.tensor([3, 8, 35, 12, 13, 0], device=DEVICE)
    pools = []
    for module in (kernels, torch_kernels):
        keys_PKSD, values_PKSD = (torch.zeros(9, 3, 4, each, dtype=dtype, device=DEVICE) for each in (size, value_size))
        module.write(key_NKD, value_NKD, keys_PKSD, values_PKSD, slot_N)
        pools.append((keys_PKSD, values_PKSD))
    for got, expected in zip(*pools, strict=True):
        assert torch.equal(got, expected)


def assert_drawn_right(logits_BV: Tensor, temperature_B: Tensor, uniform_B: Tensor) -> None:
    """The uniform number lies in the token's part of the unit interval, up to rounding; log-probs are the token's."""
    token_B, logprob_B = (each.cpu() for each in kernels.draw(logits_BV, temperature_B, uniform_B))
    logits_BV, temperature_B, uniform_B = logits_BV.cpu().double(), temperature_B.cpu(), uniform_B.cpu()
    scores_BV = logits_BV / torch.where(temperature_B == 0, 1, temperature_B)[:, None]
    logprobs_BV = torch.log_softmax(scores_BV, dim=-1)
    expected_B = logprobs_BV.gather(1, token_B[:, None])[:, 0]
    assert expected_B.isfinite().all()  # it can be drawn at all
    torch.testing.assert_close(logprob_B.double(), expected_B, rtol=1e-5, atol=1e-5)
    greedy_B = temperature_B == 0
    assert torch.equal(expected_B[greedy_B], logprobs_BV.amax(dim=-1)[greedy_B])
    upto_B = logprobs_BV.exp().cumsum(dim=-1).gather(1, token_B[:, None])[:, 0]
    assert (greedy_B | (uniform_B <= upto_B + 1e-5)).all()
    assert (greedy_B | (uniform_B >= upto_B - expected_B.exp() - 1e-5)).all()


@here
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("vocab", [5, 97, 4096, 9000])  # within a tile, one, and several of 4,096
def test_tokens_are_drawn_by_temperature_and_number(vocab: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(vocab)
    logits_BV = (3 * torch.randn(32, vocab, generator=generator)).to(DEVICE, dtype)
    temperature_B = torch.tensor([0.0, 1.0, 0.7, 2.0] * 8, device=DEVICE)
    assert_drawn_right(logits_BV, temperature_B, torch.rand(32, generator=generator).to(DEVICE))


@here
@pytest.mark.parametrize("vocab", [97, 9000])
def test_only_tokens_with_a_probability_are_drawn_even_on_the_edges(vocab: int) -> None:
    """Two of three logits are -inf, as after top-k, the first and the last among them; numbers at the very edges."""
    generator = torch.Generator().manual_seed(1)
    logits_BV = 2 * torch.randn(16, vocab, generator=generator)
    logits_BV[torch.rand(16, vocab, generator=generator) < 2 / 3] = -torch.inf
    logits_BV[:, : vocab // 10] = logits_BV[:, -vocab // 5 :] = -torch.inf
    edges_B = torch.softmax(logits_BV.double(), dim=-1).cumsum(dim=-1)[:, torch.arange(1, 6) * vocab // 6]
    numbers = [torch.zeros(16), torch.full((16,), 2.0**-24), torch.full((16,), 1 - 2.0**-24), *edges_B.float().T]
    for uniform_B in numbers:
        at_most_one_B = uniform_B.clamp(max=1 - 2.0**-24)
        assert_drawn_right(logits_BV.to(DEVICE), torch.ones(16, device=DEVICE), at_most_one_B.to(DEVICE))


@here
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("vocab", [97, 9000])
def test_logits_that_are_not_finite_show_in_the_log_prob_of_their_row(
    vocab: int, temperature: float, value: float
) -> None:
    logits_BV = torch.randn(3, vocab, generator=torch.Generator().manual_seed(2))
    logits_BV[1, vocab - 2] = value
    numbers_B = torch.tensor([0.2, 0.5, 0.9], device=DEVICE)
    token_B, logprob_B = kernels.draw(logits_BV.to(DEVICE), torch.full((3,), temperature, device=DEVICE), numbers_B)
    assert logprob_B.isfinite().tolist() == [True, False, True]
    assert ((token_B >= 0) & (token_B < vocab)).all()
