"""HTTP requests to a server that speaks JSON, and their errors.

A request may succeed later after a RetryableError, but not after an InputError.
"""

from __future__ import annotations

import contextlib
import email.utils
import json
import ssl
import time
from collections.abc import Mapping
from typing import Any

import httpx

from moa_jax.errors import InputError, first_line

RETRYABLE = (408, 425, 429)  # in addition to all statuses from 500 on
TOO_MANY = 429
NO_KEY = (401, 403)
OF_THE_PROMPT = (400, 413, 422)  # faults of one prompt: other requests still succeed


class RetryableError(Exception):
    """A request that failed and may succeed later."""

    def __init__(self, what: str, *, wait_s: float = 0.0, busy: bool = False) -> None:
        """`wait_s` is the server's own Retry-After; `busy` means that the status is 429."""
        super().__init__(what)
        self.wait_s, self.busy = wait_s, busy


class RefusedByServer(InputError):
    """A request that the server refuses permanently."""

    def __init__(self, line: str, status: int) -> None:
        """`status` is the HTTP status of the reply."""
        super().__init__(line)
        self.status = status


def address_of(url: str) -> str:
    """The URL of a server without a trailing /v1; raises InputError for an invalid URL."""
    url = url.strip()
    if not all("!" <= letter <= "~" for letter in url):
        raise InputError("a URL with blanks or letters outside ASCII; write http://HOST:PORT")
    try:
        parts = httpx.URL(url)
        host = parts.host
    except (httpx.InvalidURL, ValueError) as error:  # ValueError: of a name in punycode
        raise InputError(f"{url} is no URL ({error}); write http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not host:
        raise InputError(f"{url} is no URL of a server; write http://HOST:PORT or https://HOST")
    if parts.userinfo or parts.query or parts.fragment:
        raise InputError(
            f"the URL of {host} has a user, a query or a fragment; give the URL alone, and "
            "a key with --api-key-file"
        )
    if parts.port is not None and not 0 <= parts.port <= 65535:
        raise InputError(f"{url} is no URL (port {parts.port}); write http://HOST:PORT")
    path = parts.raw_path.decode().rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc.decode()}{path}"


class EndpointClient:
    """A client of one server; connections stay open, and all threads share them."""

    def __init__(self, address: str, key: str | None, timeout_s: float, connections: int) -> None:
        """`timeout_s` bounds each wait for the server's next bytes."""
        self.address, self._has_key, self._timeout_s = address, key is not None, timeout_s
        self._http = httpx.Client(
            headers={"Accept": "application/json"}
            | ({} if key is None else {"Authorization": f"Bearer {key}"}),
            timeout=httpx.Timeout(timeout_s, pool=None),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=None),
            verify=ssl.create_default_context(),  # the system's certificates
            trust_env=False,  # no proxies
        )

    def close(self) -> None:
        """Closes all connections."""
        self._http.close()

    def get(self, path: str) -> dict[str, Any]:
        """The JSON object at a path; raises RetryableError, RefusedByServer and InputError."""
        return self._object("GET", path)

    def post(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to a posted object; raises RetryableError, RefusedByServer and InputError."""
        headers = {"Content-Type": "application/json"}
        return self._object("POST", path, content=json.dumps(content), headers=headers)

    def _object(self, method: str, path: str, **options: Any) -> dict[str, Any]:
        response = self._response(method, f"{self.address}{path}", **options)
        if response.status_code != httpx.codes.OK:
            raise self._error(response)
        try:
            found = json.loads(response.content)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RetryableError("a reply that is no JSON object")
        return found

    def _response(self, method: str, url: str, **options: Any) -> httpx.Response:
        """Sends a request and returns the reply; resends if an idle connection had been closed.

        The trace of httpx lists the steps of a request, such as a new connection or the headers
        of the reply.
        """
        steps: list[str] = []
        trace = {"trace": lambda step, _: steps.append(step)}
        try:
            return self._http.request(method, url, extensions=trace, **options)
        except httpx.TimeoutException as error:
            raise RetryableError(f"nothing came for {self._timeout_s:g} s") from error
        except httpx.ConnectError as error:
            reason = first_line(error)
            if "CERTIFICATE_VERIFY_FAILED" in reason:
                reason = reason.partition("verify failed: ")[2]
                raise InputError(f"{self.address}: its certificate is wrong: {reason}") from error
            raise RetryableError(f"no connection ({reason})") from error
        except httpx.RequestError as error:
            if "http11.receive_response_headers.complete" in steps:
                raise RetryableError("the connection was cut in mid-answer") from error
            if "connection.connect_tcp.started" in steps:
                raise RetryableError(f"no answer ({first_line(error)})") from error
        return self._response(method, url, **options)

    def _error(self, response: httpx.Response) -> Exception:
        """The exception for a reply with a status other than 200."""
        status, headers = response.status_code, response.headers
        reply = f"status {status}{_message(response.content)}"
        if status in RETRYABLE or status >= httpx.codes.INTERNAL_SERVER_ERROR:
            wait_s = _seconds(headers.get("Retry-After", ""))
            return RetryableError(reply, wait_s=wait_s, busy=status == TOO_MANY)
        if status in NO_KEY:
            other = "refuses the key; give another" if self._has_key else "wants a key; give one"
            return InputError(f"{self.address}: it {other} with --api-key-file ({reply})")
        if location := headers.get("Location"):
            return InputError(f"{self.address} has moved to {location}; give --endpoint that URL")
        return RefusedByServer(f"{self.address} refuses a request: {reply}", status)


def _message(data: bytes) -> str:
    """The message of an error in OpenAI's format or as plain text, cut to 200 characters."""
    text = data.decode(errors="replace")
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        for key in ("error", "message", "detail"):
            found = found.get(key, found) if isinstance(found, dict) else found
        text = found if isinstance(found, str) else json.dumps(found)
    line = " ".join(text.split())
    return f": {line[:197] + '...' if len(line) > 200 else line}" if line else ""


def _seconds(retry_after: str) -> float:
    """The seconds to wait for a Retry-After, a number or a date; 0 for any other value."""
    with contextlib.suppress(ValueError):
        return max(float(retry_after), 0.0)
    with contextlib.suppress(ValueError):
        return max(email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    return 0.0
