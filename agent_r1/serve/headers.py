"""Headers that a server adds to every answer."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.types import Send


def adding_headers(send: Send, headers: Mapping[str, str]) -> Send:
    """Return `send`, which adds the headers to the start of each answer."""
    added = [(name.lower().encode(), value.encode()) for name, value in headers.items()]

    async def send_with_headers(message: Any) -> None:
        if message["type"] == "http.response.start":
            message = {**message, "headers": [*message["headers"], *added]}
        await send(message)

    return send_with_headers
