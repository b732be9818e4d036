"""HTTP requests to a server that speaks JSON, sent again while it is down or busy."""

from __future__ import annotations

import contextlib
import math
import random
import ssl
import sys
import threading
import time
from email.utils import parsedate_to_datetime
from typing import Any, TypeVar

import httpx
import msgspec

from moa_jax.errors import InputError, TemporaryError, first_line

RETRYABLE = (408, 425, 429)  # in addition to all statuses from 500 on
OF_THE_PROMPT = (400, 413, 422)  # faults of one prompt: other requests still succeed
TRIES = 5  # per request
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 60.0  # the waits between tries double
MOST_SHOWN = 200  # characters of a reply in a message
Reply = TypeVar("Reply")


class PromptRefused(InputError):
    """The server refuses one prompt permanently."""


def address_of(url: str) -> str:
    """The URL of a server without a trailing /v1; raises InputError for an invalid URL."""
    with contextlib.suppress(httpx.InvalidURL, ValueError):  # ValueError: of a name in punycode
        parts = httpx.URL(url.strip())
        valid = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) <= 65535
        if valid and not (parts.userinfo or parts.query or parts.fragment):
            path = parts.raw_path.decode().rstrip("/").removesuffix("/v1")
            return f"{parts.scheme}://{parts.netloc.decode()}{path}"
    raise InputError(  # without the URL, which may hold a password
        "--endpoint is not the URL of a server; write http://HOST:PORT or https://HOST, and a "
        "key in --api-key-file"
    )


class EndpointClient:
    """A client of one server; connections stay open, and all threads share them."""

    def __init__(self, address: str, key: str | None, timeout_s: float, connections: int) -> None:
        """`timeout_s` bounds each wait for the server's next bytes."""
        self.address, self.connections, self._timeout_s = address, connections, timeout_s
        self.stopping = threading.Event()  # ends all waits; no request is sent again
        self._num_replies, self._noticed = 0, set()  # noticed: messages already shown
        self._http = httpx.Client(
            headers={} if key is None else {"Authorization": f"Bearer {key}"},
            timeout=httpx.Timeout(timeout_s, pool=None),
            limits=httpx.Limits(max_connections=connections, keepalive_expiry=None),
            verify=ssl.create_default_context(),  # the system's certificates
            trust_env=False,  # no proxies
        )

    def close(self) -> None:
        """Closes all connections."""
        self.stopping.set()
        self._http.close()

    def request(self, path: str, kind: type[Reply], body: dict[str, Any] | None = None) -> Reply:
        """The reply to a GET, or to a POST of the JSON object `body`; `kind` is a msgspec.Struct.

        Sends the request again after retryable failures. Status 429 uses up no try but the last
        while the server answers other requests. Raises PromptRefused for a refused prompt, and
        InputError for other refusals and unusable replies, and TemporaryError for TRIES failures
        in a row.
        """
        method, tries, wait_s = "GET" if body is None else "POST", 1, FIRST_WAIT_S
        while True:
            before, status, least_s = self._num_replies, None, 0.0
            try:
                response = self._http.request(method, f"{self.address}{path}", json=body)
            except httpx.TimeoutException:
                reason = f"nothing came for {self._timeout_s:g} s"
            except httpx.RequestError as error:
                reason = f"no answer ({first_line(error)})"
                if "CERTIFICATE_VERIFY_FAILED" in reason:
                    line = f"{self.address}: its certificate is wrong ({first_line(error)}); set "
                    raise InputError(f"{line}SSL_CERT_FILE to a file with its issuer") from None
            else:
                status, least_s = response.status_code, _retry_after_s(response)
                reason = f"status {status}: {' '.join(response.text.split())[:MOST_SHOWN]}"
                if status not in RETRYABLE and not response.is_server_error:
                    self._num_replies += 1
                    return self._read(response, kind, reason)
            if tries == TRIES or self.stopping.is_set():
                raise TemporaryError(f"{self.address}: {reason}, {tries} times in a row")
            self._wait(reason, max(wait_s, least_s))
            if status != httpx.codes.TOO_MANY_REQUESTS or self._num_replies == before:
                tries, wait_s = tries + 1, 2 * wait_s

    def _read(self, response: httpx.Response, kind: type[Reply], reason: str) -> Reply:
        status = response.status_code
        if status != httpx.codes.OK:
            hint = "; give its key with --api-key-file" if status in (401, 403) else ""
            refused = PromptRefused if status in OF_THE_PROMPT else InputError
            raise refused(f"{self.address} refuses a request: {reason}{hint}")
        try:
            return msgspec.convert(response.json(), kind)
        except ValueError as error:
            line = f"{self.address} replies with no JSON object of an OpenAI server ({reason}): "
            raise InputError(f"{line}{first_line(error)}; name another server") from error

    def _wait(self, trouble: str, seconds: float) -> None:
        if trouble not in self._noticed:
            self._noticed.add(trouble)
            print(f"{self.address}: {trouble}; again in {seconds:g} s", file=sys.stderr, flush=True)
        self.stopping.wait(seconds * random.uniform(1.0, 1.25))  # not all at the same time


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds to wait by the header Retry-After, a number or a date; 0 without a valid one."""
    text = response.headers.get("Retry-After", "")
    try:
        is_date = ":" in text
        found = parsedate_to_datetime(text).timestamp() - time.time() if is_date else float(text)
    except (ValueError, OverflowError):
        return 0.0
    return min(max(0.0, found), LONGEST_WAIT_S) if math.isfinite(found) else 0.0
