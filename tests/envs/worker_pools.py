"""The pool of a test file. Not in `worker_envs.py`, which worker processes import without pytest."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from agent_r1.envs.processes import EnvPool


def pool_of(processes: int) -> Any:
    """Return a fixture for all tests of a file. With one process, all episodes share it."""

    @pytest.fixture(scope="module")
    def pool() -> Iterator[EnvPool]:
        made = EnvPool(processes=processes, step_seconds=60)
        yield made
        made.close()

    return pool
