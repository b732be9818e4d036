"""HTTP requests to a server that speaks JSON, sent again while it is down or busy."""

from __future__ import annotations

import contextlib
import email.utils
import math
import random
import ssl
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any

import httpx

from moa_jax.errors import InputError, first_line

RETRYABLE = (408, 425, 429)  # in addition to all statuses from 500 on
TOO_MANY = 429
NO_KEY = (401, 403)
OF_THE_PROMPT = (400, 413, 422)  # faults of one prompt: other requests still succeed
TRIES = 5  # per request
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 60.0  # the waits between tries double
MOST_SHOWN = 200  # characters of a reply in a message


class RefusedByServer(InputError):
    """A request that the server refuses permanently."""

    def __init__(self, line: str, status: int) -> None:
        """`status` is the HTTP status of the reply."""
        super().__init__(line)
        self.status = status


def address_of(url: str) -> str:
    """The URL of a server without a trailing /v1; raises InputError for an invalid URL."""
    try:
        parts = httpx.URL(url.strip())
        valid = parts.scheme in ("http", "https") and parts.host and (parts.port or 0) <= 65535
    except (httpx.InvalidURL, ValueError):  # ValueError: of a name in punycode
        valid = False
    if not valid or parts.userinfo or parts.query or parts.fragment:
        raise InputError(  # without the URL, which may hold a password
            "--endpoint is not the URL of a server; write http://HOST:PORT or https://HOST, and a "
            "key in --api-key-file"
        )
    path = parts.raw_path.decode().rstrip("/").removesuffix("/v1")
    return f"{parts.scheme}://{parts.netloc.decode()}{path}"


class EndpointClient:
    """A client of one server; connections stay open, and all threads share them."""

    def __init__(self, address: str, key: str | None, timeout_s: float, connections: int) -> None:
        """`timeout_s` bounds each wait for the server's next bytes."""
        self.address, self._timeout_s = address, timeout_s
        self.stopping = threading.Event()  # ends all waits; no request is sent again
        self._num_replies = 0
        self._noticed: set[str] = set()  # messages already shown
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

    def request(
        self, method: str, path: str, content: Mapping[str, Any] | None = None
    ) -> dict[str, Any]:
        """The JSON object that the server replies; retryable failures are sent again after waits.

        Status 429 uses up no try but the last while the server answers other requests. Raises
        RefusedByServer for other statuses, and InputError after TRIES failures in a row.
        """
        tries, wait_s = 1, FIRST_WAIT_S
        while True:
            before = self._num_replies
            response, reason = self._send(method, path, content)
            status = None if response is None else response.status_code
            if status and status not in RETRYABLE and status < httpx.codes.INTERNAL_SERVER_ERROR:
                self._num_replies += 1
                return self._read(response, reason)
            if tries == TRIES or self.stopping.is_set():
                raise InputError(f"{self.address}: {reason}, {tries} times in a row")
            asked_s = 0.0 if response is None else _retry_after_s(response)
            self._wait(reason, max(wait_s, asked_s))
            if not (status == TOO_MANY and self._num_replies > before):
                tries, wait_s = tries + 1, 2 * wait_s

    def _send(self, method: str, path: str, content: Any) -> tuple[httpx.Response | None, str]:
        """The response, None if there is none, and a description for messages."""
        try:
            response = self._http.request(method, f"{self.address}{path}", json=content)
        except httpx.TimeoutException:
            return None, f"nothing came for {self._timeout_s:g} s"
        except httpx.RequestError as error:
            if "CERTIFICATE_VERIFY_FAILED" in str(error):
                line = f"{self.address}: its certificate is wrong ({first_line(error)}); "
                raise InputError(
                    f"{line}set SSL_CERT_FILE to a file that has its issuer"
                ) from error
            return None, f"no answer ({first_line(error)})"
        text = " ".join(response.text.split())
        return response, f"status {response.status_code}: {text[:MOST_SHOWN]}"

    def _read(self, response: httpx.Response, reason: str) -> dict[str, Any]:
        if response.status_code != httpx.codes.OK:
            hint = "; give its key with --api-key-file" if response.status_code in NO_KEY else ""
            line = f"{self.address} refuses a request: {reason}{hint}"
            raise RefusedByServer(line, response.status_code)
        with contextlib.suppress(ValueError):
            if isinstance(found := response.json(), dict):
                return found
        raise InputError(
            f"{self.address} replies with no JSON object ({reason}); name an API server"
        )

    def _wait(self, trouble: str, seconds: float) -> None:
        if trouble not in self._noticed:
            self._noticed.add(trouble)
            line = f"{self.address}: {trouble}; again in {seconds:g} s"
            print(line, file=sys.stderr, flush=True)
        self.stopping.wait(seconds * random.uniform(1.0, 1.25))  # not all at the same time


def _retry_after_s(response: httpx.Response) -> float:
    """Seconds to wait by the header Retry-After, a number or a date; 0 without one."""
    asked = response.headers.get("Retry-After", "")
    try:
        found = float(asked)
    except ValueError:
        try:
            found = email.utils.parsedate_to_datetime(asked).timestamp() - time.time()
        except ValueError:
            found = 0.0
    return min(max(found, 0.0), LONGEST_WAIT_S) if math.isfinite(found) else 0.0
