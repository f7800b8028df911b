"""What training needs from inference: a `Sampler` whose weights can be replaced.

Implementations live in `engines/`. Nothing here knows how tokens are computed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Protocol

from agent_r1.agent.sampler import Sampler

if TYPE_CHECKING:
    from torch import Tensor


class Engine(Sampler, Protocol):
    """Token ids in, token ids out, under weights that carry a version."""

    def load_weights(self, weights: Mapping[str, Tensor], version: int) -> None:
        """Sample with these weights from now on; completions carry `version`. Not allowed while requests run."""
        ...

    async def close(self) -> None:
        """Free what the engine holds. May be called twice."""
        ...
