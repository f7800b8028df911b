"""How a request is refused or fails: one exception that carries the API's own error object and HTTP status."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

INVALID = "invalid_request_error"
SERVER = "server_error"


class ApiError(Exception):
    """The error that answers a request. `param` names the field of the request that is wrong."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        code: str | None = None,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status, self.message, self.kind, self.code, self.param = status, message, kind, code, param
        self.headers = dict(headers or {})

    def as_json(self) -> dict[str, Any]:
        """OpenAI's error object; other APIs write their own from the fields."""
        return {"error": {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}}


def invalid(message: str, param: str | None = None, *, code: str = "invalid_value") -> ApiError:
    """A field of the request has a wrong value."""
    return ApiError(400, message, code=code, param=param)


def unsupported(param: str, message: str) -> ApiError:
    """The request is correct, but asks for something that this server does not do."""
    return ApiError(400, message, code="unsupported_parameter", param=param)


def context_length_exceeded(message: str, *, param: str = "messages") -> ApiError:
    """The prompt does not fit. Clients recognise this code, for example to shorten their history."""
    return ApiError(400, message, code="context_length_exceeded", param=param)


def overloaded(message: str, *, retry_after: int = 1) -> ApiError:
    """Too many requests at once. Official clients wait and try again."""
    headers = {"Retry-After": str(retry_after)}
    return ApiError(429, message, kind="rate_limit_error", code="rate_limit_exceeded", headers=headers)
