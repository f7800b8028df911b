"""Python's cyclic garbage collector, kept from walking through the model in the middle of a rollout.

A full collection looks at every object there is, and torch, transformers and a model of 30 layers are half a million
that never go away: 0.2 to 0.4 s each time, in which neither tools nor the engine's host side go on. Episodes make and
drop objects all the time, so such collections keep coming; on a GPU, steps that met one sampled at a third of their
speed. So what a run is made of is set aside once it is all there, and collections look at what came after.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def set_parts_aside() -> None:
    """From now on collections leave alone what is there. Call it with all parts built: what is made later is looked at
    as ever. Objects without cycles are freed at once, set aside or not. `gc.unfreeze` undoes it."""
    gc.collect()  # first, so that no garbage is set aside with the rest
    gc.freeze()


@contextmanager
def parts_set_aside() -> Iterator[None]:
    """Inside, collections leave alone what was there before."""
    set_parts_aside()
    try:
        yield
    finally:
        gc.unfreeze()
