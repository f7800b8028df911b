"""The pool of a test file. Apart from the worlds, which worker processes import, and which need no pytest there."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agent_r1.envs.processes import EnvPool


def pool_of(processes: int) -> Any:
    """A fixture for all tests of a file, each of which has an event loop of its own. With one process everybody is
    everybody's neighbour."""

    @pytest.fixture(scope="module")
    def pool() -> Iterator[EnvPool]:
        made = EnvPool(processes=processes, step_seconds=60)
        yield made
        made.close()

    return pool
