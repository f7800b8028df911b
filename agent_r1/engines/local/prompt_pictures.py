"""Where the pictures of a step stand, and the positions that a model which takes pictures gives to its tokens.

A picture moves the positions of what follows it, so they are not places in the sequence. The cache goes on counting
places. Shape suffixes: A = numbers of a position, N = tokens of a step.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from agent_r1.engines.local.request import Chunk, Request
from agent_r1.vision.eyes import Sight
from agent_r1.vision.picture_format import PictureFormat
from agent_r1.vision.pictures import by_key


def shift_of(request: Request) -> int:
    """The position of a sampled token minus its place: the same for all of a response."""
    known_AL = request.positions_AL
    return 0 if known_AL is None else int(known_AL.max(initial=-1)) + 1 - known_AL.shape[1]


def positions_of(chunks: Sequence[Chunk], form: PictureFormat) -> NDArray[np.int64]:
    """Return the positions of the chunks' tokens, [A, N]."""
    parts = []
    for chunk in chunks:
        known_AL, sampled = chunk.request.positions_AL, chunk.start
        if known_AL is not None:
            parts.append(known_AL[:, chunk.start : chunk.end])
            sampled = max(sampled, known_AL.shape[1])
        parts.append(np.tile(np.arange(sampled, chunk.end) + shift_of(chunk.request), (form.axes, 1)))
    return np.concatenate(parts, axis=1)


def sight_of(chunks: Sequence[Chunk], form: PictureFormat) -> Sight | None:
    """The pictures that the chunks show."""
    shown = [chunk for chunk in chunks if chunk.ids and min(chunk.ids) < 0]
    if not shown:
        return None
    ids_N = np.array([token for chunk in chunks for token in chunk.ids or (0,)], np.int64)
    return Sight.of(ids_N, by_key(picture for chunk in shown for picture in chunk.request.pictures.values()), form)
