"""Bytes to JSON fields: a body of bounded size and time, and typed access to its fields.

Every field of a request is taken once; what is left at the end is unknown and refused. null counts as absent.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import AsyncIterator, Mapping
from typing import Any, Literal

from agent_r1.data.files import is_nested_deeper
from agent_r1.errors import brief, nearest
from agent_r1.wire.api_error import ApiError, invalid

MAX_NESTING = 100  # levels of lists and objects; templates, copies and logs recurse into them
CLOSE = {"Connection": "close"}  # the unread rest of a body must not be parsed as the next request


async def read_body(
    chunks: AsyncIterator[bytes], *, max_bytes: int, seconds: float, length: str | None = None
) -> bytes:
    """Read a whole body. `length` is the Content-Length header: a body that is too large need not be read."""
    too_large = ApiError(
        413,
        f"the body has more than {max_bytes:,} bytes, the limit of this server",
        code="body_too_large",
        headers=CLOSE,
    )
    if length is not None and length.isdecimal() and int(length) > max_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(seconds):
            async for chunk in chunks:
                body += chunk
                if len(body) > max_bytes:
                    raise too_large
    except TimeoutError:
        message = f"the body did not arrive within {seconds:g} s"
        raise ApiError(408, message, code="body_timeout", headers=CLOSE) from None
    return bytes(body)


def parse_object(body: bytes) -> dict[str, Any]:
    """Read a body that must be one JSON object."""
    try:
        text = body.decode("utf-8")
        value = json.loads(text, parse_constant=_refuse_constant)
    except RecursionError:
        raise invalid("the body is nested too deeply", code="invalid_json") from None
    except ValueError as error:  # not UTF-8, not JSON, NaN, or a number of thousands of digits
        raise invalid(f"the body is not valid JSON: {str(error)[:200]}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid(f"the body must be a JSON object, got {_kind(value)}", code="invalid_json")
    if is_nested_deeper(value, MAX_NESTING, text=text):
        raise invalid(f"the body is nested more than {MAX_NESTING} levels deep", code="invalid_json")
    return value


def _refuse_constant(name: str) -> None:
    raise ValueError(f"{name} is not a JSON number")


_KINDS = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}


def _kind(value: Any) -> str:
    return _KINDS.get(type(value), "a number")


class Fields:
    """The fields of one JSON object, with the path to it for messages."""

    def __init__(self, value: Any, path: str = "") -> None:
        if not isinstance(value, Mapping):
            raise invalid(f"{path} must be an object, got {_kind(value)}", path, code="invalid_type")
        self._left = {key: item for key, item in value.items() if item is not None}
        self._path = path

    def name(self, key: str) -> str:
        """The field as messages name it."""
        return f"{self._path}.{key}" if self._path else key

    def take(self, key: str) -> Any:
        """The value, or None if it is absent or null."""
        return self._left.pop(key, None)

    def keys(self) -> list[str]:
        """The fields that have not been taken."""
        return list(self._left)

    def text(self, key: str, *, required: bool = False, choices: tuple[str, ...] = ()) -> str | None:
        value = self.take(key)
        if value is None and not required:
            return None
        if value is None:
            raise self.missing(key)
        if not isinstance(value, str):
            raise self.wrong(key, "a string", value)
        if choices and value not in choices:
            raise self.refuse(key, f"must be one of {', '.join(choices)}, got {value[:80]!r}")
        return value

    def flag(self, key: str, default: bool) -> bool:
        value = self.take(key)
        if value is not None and not isinstance(value, bool):
            raise self.wrong(key, "true or false", value)
        return default if value is None else value

    def integer(self, key: str, low: int | None = None, high: int | None = None) -> int | None:
        value = self.take(key)
        if isinstance(value, float) and value.is_integer():
            value = int(value)  # clients in JavaScript may write 16.0
        if value is None:
            return None
        if type(value) is not int:
            raise self.wrong(key, "an integer", value)
        return int(self._within(key, value, low, high))

    def number(self, key: str, low: float, high: float) -> float | None:
        value = self.take(key)
        if value is None:
            return None
        if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
            raise self.wrong(key, "a number", value)
        return float(self._within(key, value, low, high))

    def _within(self, key: str, value: float, low: float | None, high: float | None) -> float:
        if low is not None and value < low:
            raise self.refuse(key, f"must be at least {low:g}, got {brief(value)}")
        if high is not None and value > high:
            raise self.refuse(key, f"must be at most {high:g}, got {brief(value)}")
        return value

    def list(self, key: str) -> list[Any]:
        value = self.take(key)
        if value is not None and not isinstance(value, list):
            raise self.wrong(key, "a list", value)
        return value or []

    def object(self, key: str) -> Fields | None:
        value = self.take(key)
        return None if value is None else Fields(value, self.name(key))

    def finish(self, kind: Literal["field", "option"] = "field", known: tuple[str, ...] = ()) -> None:
        """Refuse fields that have not been taken."""
        for key in self._left:
            near = nearest(key, known)
            hint = f" Did you mean {near!r}?" if near else ""
            message = f"unknown {kind} {self.name(key)[:200]!r}.{hint}"
            raise invalid(message, self.name(key)[:200], code="unknown_parameter")

    def missing(self, key: str) -> ApiError:
        return invalid(f"{self.name(key)} is missing", self.name(key), code="missing_required_parameter")

    def wrong(self, key: str, wanted: str, value: Any) -> ApiError:
        return invalid(f"{self.name(key)} must be {wanted}, got {_kind(value)}", self.name(key), code="invalid_type")

    def refuse(self, key: str, problem: str) -> ApiError:
        return invalid(f"{self.name(key)} {problem}", self.name(key))
