"""Things that a run opens once and always closes: connections, servers, indexes.

Tools are resources. A recipe names others in `task.resources`.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager

from agent_r1.errors import AgentR1Error, RolloutError
from agent_r1.guard import explain

logger = logging.getLogger(__name__)

CLOSE_SECONDS = 10.0  # a resource that cannot close in this time is abandoned


class Resource:
    """Something that all episodes of a run share. By default, opening and closing do nothing."""

    async def open(self) -> None:
        """Acquire it. Called once per run, before the first episode; an exception stops the run."""

    async def close(self) -> None:
        """Release it. Called once after `open`, even if `open`, an episode or the run failed or was interrupted."""


@asynccontextmanager
async def opened(resources: Iterable[Resource]) -> AsyncIterator[None]:
    """Open the resources in order. Close them in reverse order, whatever happens."""
    async with AsyncExitStack() as stack:
        for resource in resources:
            # Registered before `open` runs, because an interrupted `open` may already have started a process.
            stack.push_async_callback(_close, resource)
            try:
                await resource.open()
            except AgentR1Error:
                raise
            except Exception as error:
                raise RolloutError(f"{type(resource).__qualname__} could not be opened: {explain(error)}") from error
        yield


async def _close(resource: Resource) -> None:
    try:
        async with asyncio.timeout(CLOSE_SECONDS):
            await resource.close()
    except Exception:  # the others are closed too, and the result of the run is kept
        logger.exception("%s could not be closed", type(resource).__qualname__)
