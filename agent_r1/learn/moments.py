"""AdamW's two moments in 8 bits each, between steps.

A step divides the first moment by the root of the second, so these two are stored: the root, and the ratio of the first
moment to the stored root. The levels of the root are a constant factor apart, so its relative error is the same for all
sizes, and it never becomes 0, which would make the next step huge. The levels of the ratio are squares, so that small
ones still decay. Both are relative to the largest of a block. A block never crosses a row: sharding by rows, over any
number of ranks, keeps the same numbers.

Shape suffixes: R = rows of a parameter, C = the numbers of a row, B = blocks of a row, K = the numbers of a block.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import torch
from torch import Tensor
from torch.nn.functional import pad

from agent_r1.learn.sizes import BLOCK

State = dict[str, Tensor]  # state of one parameter: its moments and how many steps it has taken
FACTOR = 1e5 ** (1 / 254)  # between two levels of the root: 255 levels reach down to 1e-5 of the largest
CHUNK = 2**24  # numbers converted at a time, which bounds the memory of a conversion
TINY = torch.finfo(torch.float32).tiny


def compress(state: State) -> State:
    """Replace the moments of one parameter by codes and the scales of their blocks."""
    shape = state["exp_avg"].shape
    parts = [_codes(*part) for part in _chunks(state["exp_avg"], state["exp_avg_sq"])]
    ratio, ratio_scale, root, root_scale = (torch.cat(column) for column in zip(*parts, strict=True))
    codes = {"exp_avg": ratio.view(shape), "exp_avg_sq": root.view(shape)}
    return state | codes | {"exp_avg_scale": ratio_scale, "exp_avg_sq_scale": root_scale}


def expand(state: State) -> State:
    """The inverse of `compress`, to rounding. A state that is not compressed stays as it is."""
    if "exp_avg_scale" not in state:
        return state
    ratio, root = state["exp_avg"], state["exp_avg_sq"]
    first, second = (torch.empty(ratio.shape, dtype=torch.float32, device=ratio.device) for _ in range(2))
    scales = state["exp_avg_scale"], state["exp_avg_sq_scale"]
    for ratio_RC, root_RC, ratio_scale_RB, root_scale_RB, m_RC, v_RC in _chunks(ratio, root, *scales, first, second):
        root_RBK = _root(_blocks(root_RC), root_scale_RB)
        signed_RBK = _blocks(ratio_RC).float() / 127
        m_RC.copy_(_rows(signed_RBK * signed_RBK.abs() * ratio_scale_RB[..., None] * root_RBK, m_RC))
        v_RC.copy_(_rows(root_RBK.square(), v_RC))
    return {"step": state["step"], "exp_avg": first, "exp_avg_sq": second}


def _codes(m_RC: Tensor, v_RC: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """(codes of the ratio, their scales, codes of the root, their scales)."""
    root_RBK = _blocks(v_RC).sqrt()
    root_scale_RB = root_RBK.amax(-1)
    levels_RBK = 255 + (root_RBK / root_scale_RB[..., None].clamp_min(TINY)).log() / math.log(FACTOR)
    codes_RBK = torch.where(root_RBK > 0, levels_RBK.round().clamp(1, 255), 0.0).to(torch.uint8)
    stored_RBK = _root(codes_RBK, root_scale_RB)
    ratio_RBK = torch.where(stored_RBK > 0, _blocks(m_RC) / stored_RBK, 0.0)
    ratio_scale_RB = ratio_RBK.abs().amax(-1)
    size_RBK = (ratio_RBK.abs() / ratio_scale_RB[..., None].clamp_min(TINY)).sqrt()
    signed_RBK = (127 * size_RBK * ratio_RBK.sign()).round().to(torch.int8)
    return _rows(signed_RBK, m_RC), ratio_scale_RB, _rows(codes_RBK, m_RC), root_scale_RB


def _root(codes_RBK: Tensor, scale_RB: Tensor) -> Tensor:
    levels_RBK = ((codes_RBK.float() - 255) * math.log(FACTOR)).exp() * scale_RB[..., None]
    return torch.where(codes_RBK > 0, levels_RBK, 0.0)


def _chunks(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Some rows of each tensor at a time, as matrices. The first is the largest."""
    matrices = [tensor.view(len(tensor), math.prod(tensor.shape[1:])) for tensor in tensors]
    return zip(*(matrix.split(max(1, CHUNK // matrices[0].shape[1])) for matrix in matrices), strict=True)


def _blocks(rows_RC: Tensor) -> Tensor:
    """[R, B, K]: rows in blocks, the last one padded with zeros."""
    rows, columns = rows_RC.shape
    return pad(rows_RC, (0, -columns % BLOCK)).view(rows, math.ceil(columns / BLOCK), BLOCK)


def _rows(blocks_RBK: Tensor, like_RC: Tensor) -> Tensor:
    """[R, C]: the inverse of `_blocks`."""
    return blocks_RBK.flatten(1)[:, : like_RC.shape[1]]
