"""Errors in OpenAI's format: {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

BAD, UNAUTHORIZED, NO_SUCH, BAD_METHOD, SLOW_BODY = 400, 401, 404, 405, 408
TOO_LARGE, BAD_TYPE, TOO_MANY = 413, 415, 429
FAULT, UNAVAILABLE, TOO_LONG = 500, 503, 504


class APIError(Exception):
    """An error that is sent as the response."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        """`param` is the invalid field, and `code` a machine-readable name."""
        super().__init__(message)
        self.status, self.param, self.code = status, param, code
        self.headers = dict(headers or {})

    def content(self) -> dict[str, Any]:
        """The error as a JSON-ready dictionary."""
        kind = "invalid_request_error"
        if self.status >= FAULT:
            kind = "server_error"
        elif self.status == TOO_MANY:
            kind = "rate_limit_error"
        line = " ".join(str(self).split())
        return {"error": {"message": line, "type": kind, "param": self.param, "code": self.code}}


def bad(param: str | None, message: str, code: str | None = None) -> APIError:
    """The error for an invalid field."""
    return APIError(BAD, message, param=param, code=code)


def stopping() -> APIError:
    """The error of a server that shuts down; Retry-After is short, for a replacement server."""
    message = "the server is stopping; ask another one, or later"
    return APIError(UNAVAILABLE, message, headers={"Retry-After": "1"})


def as_json(content: Any) -> bytes:
    """Compact JSON in ASCII; lone surrogates of user text are escaped too."""
    return json.dumps(content, separators=(",", ":"), allow_nan=False).encode()


def shown(value: Any) -> str:
    """A value of a request as JSON for an error message, cut to 60 characters."""
    try:
        text = json.dumps(value)
    except RecursionError:  # some levels before that of the parser
        text = "a value that is nested too deeply"
    return text if len(text) <= 60 else f"{text[:57]}..."
