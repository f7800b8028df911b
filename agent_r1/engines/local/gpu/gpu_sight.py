"""Positions of a model that takes pictures, in device tensors at fixed addresses, as captured passes need them.

Shape suffixes: A = numbers of a position, N = tokens of a first pass, R = rows that sample.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from agent_r1.engines.local.gpu.gpu_state import put
from agent_r1.engines.local.prompt_pictures import positions_of, shift_of, sight_of
from agent_r1.engines.local.request import Chunk
from agent_r1.vision.eyes import Sight
from agent_r1.vision.picture_format import PictureFormat


class GpuSight:
    def __init__(self, form: PictureFormat, *, tokens: int, rows: int, device: torch.device) -> None:
        self._form = form
        self._positions_AN = torch.zeros(form.axes, tokens, dtype=torch.int64, device=device)
        self._shift_R = torch.zeros(rows, dtype=torch.int64, device=device)

    def load_rows(self, ordered: Sequence[Chunk]) -> None:
        """Load the rows of the next step."""
        shifts = [shift_of(chunk.request) for chunk in ordered if chunk.count]
        put(self._shift_R[: len(shifts)], np.array(shifts, np.int64))

    def load_first(self, ordered: Sequence[Chunk]) -> Sight | None:
        """Load the tokens of a first pass; returns the pictures among them."""
        positions_AN = positions_of(ordered, self._form)
        put(self._positions_AN[:, : positions_AN.shape[1]], positions_AN)
        sight = sight_of(ordered, self._form)
        return None if sight is None else sight.to(self._shift_R.device)

    def positions(self, tokens: int) -> Tensor:
        """Return the positions of a first pass, [A, N]."""
        return self._positions_AN[:, :tokens]

    def later(self, place_R: Tensor) -> Tensor:
        """Return the positions of sampled tokens, [A, R], from their places in the sequences."""
        return (place_R + self._shift_R[: len(place_R)]).expand(self._form.axes, -1)
