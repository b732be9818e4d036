"""One HTTP connection to a server that speaks JSON, and what may go wrong with it.

What may pass is a RetryableError, and can be tried again; what will not is an InputError.
"""

from __future__ import annotations

import contextlib
import email.utils
import http.client
import json
import ssl
import time
import urllib.parse
from collections.abc import Mapping
from typing import Any, NamedTuple

from moa_jax.errors import InputError, first_line

MAY_PASS = (408, 425, 429)  # beside all from 500 on
TOO_MANY = 429
NO_KEY = (401, 403)
OF_THE_PROMPT = (400, 413, 422)  # where other requests of the same kind are answered


class RetryableError(Exception):
    """What went wrong and may go well the next time."""

    def __init__(self, what: str, *, wait_s: float = 0.0, busy: bool = False) -> None:
        """`wait_s` is how long the server wants to be left alone; `busy`: it has others to serve"""
        super().__init__(what)
        self.wait_s, self.busy = wait_s, busy


class RefusedByServer(InputError):
    """The server will not answer such a request."""

    def __init__(self, line: str, status: int) -> None:
        """`status` is that of the reply."""
        super().__init__(line)
        self.status = status


class Address(NamedTuple):
    """Where a server is."""

    secure: bool
    host: str
    port: int | None
    path: str  # that all paths begin with

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        port = "" if self.port is None else f":{self.port}"
        return f"http{'s' * self.secure}://{host}{port}{self.path}"


def address_of(url: str) -> Address:
    """The address in a URL, which may end in /v1 or not; raises InputError."""
    url = url.strip()
    if not all("!" <= letter <= "~" for letter in url):
        raise InputError("a URL with blanks or letters outside ASCII: write http://HOST:PORT")
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise InputError(f"{url} is no URL ({error}): write http://HOST:PORT") from error
    if parts.scheme not in ("http", "https") or not parts.hostname:
        raise InputError(f"{url} is no URL of a server: write http://HOST:PORT or https://HOST")
    if parts.username is not None or parts.query or parts.fragment:
        raise InputError(f"{parts.hostname}: give the URL alone, and a key with --api-key-file")
    path = parts.path.rstrip("/").removesuffix("/v1")
    return Address(parts.scheme == "https", parts.hostname, port, path)


class EndpointConnection:
    """A connection that stays open, and is opened anew where it broke; for one thread."""

    def __init__(self, address: Address, key: str | None, timeout_s: float) -> None:
        """`timeout_s` bounds each wait for the server's next bytes."""
        self._address, self._timeout_s = address, timeout_s
        self._headers = {"Accept": "application/json"}
        if key is not None:
            self._headers["Authorization"] = f"Bearer {key}"
        place: dict[str, Any] = {"host": address.host, "port": address.port, "timeout": timeout_s}
        if address.secure:
            place["context"] = ssl.create_default_context()
        kind = http.client.HTTPSConnection if address.secure else http.client.HTTPConnection
        self._http = kind(**place)

    def close(self) -> None:
        """Closes what is open; the next request opens it again."""
        self._http.close()

    def get(self, path: str) -> dict[str, Any]:
        """The object at a path; raises RetryableError, RefusedByServer, and InputError."""
        return self._object("GET", path, None)

    def post(self, path: str, content: Mapping[str, Any]) -> dict[str, Any]:
        """The reply to an object; raises RetryableError, RefusedByServer, and InputError."""
        return self._object("POST", path, json.dumps(content).encode())

    def _object(self, method: str, path: str, body: bytes | None) -> dict[str, Any]:
        try:
            response, data = self._reply(method, self._address.path + path, body)
        except RetryableError:
            self.close()
            raise
        if response.status != http.client.OK:
            raise self._error(response, data)
        try:
            found = json.loads(data)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise RetryableError("a reply that is no JSON object")
        return found

    def _reply(
        self, method: str, path: str, body: bytes | None
    ) -> tuple[http.client.HTTPResponse, bytes]:
        kind = {} if body is None else {"Content-Type": "application/json"}
        while True:
            kept_open = self._http.sock is not None
            begun = False
            try:
                self._http.request(method, path, body, self._headers | kind)
                response = self._http.getresponse()
                begun = True
                return response, response.read()
            except TimeoutError as error:
                raise RetryableError(f"nothing came for {self._timeout_s:g} s") from error
            except ssl.SSLCertVerificationError as error:
                reason = error.verify_message
                raise InputError(f"{self._address}: its certificate is wrong: {reason}") from error
            except (http.client.HTTPException, OSError) as error:
                self.close()
                idle = (http.client.RemoteDisconnected, ConnectionResetError, BrokenPipeError)
                if kept_open and not begun and isinstance(error, idle):
                    continue  # servers close what was idle for long
                raise RetryableError(_what_broke(error, begun)) from error

    def _error(self, response: http.client.HTTPResponse, data: bytes) -> Exception:
        """What to raise for a reply with another status than 200."""
        status, at = response.status, self._address
        said = f"status {status}{_message(data)}"
        if status in MAY_PASS or status >= http.client.INTERNAL_SERVER_ERROR:
            wait_s = _seconds(response.headers.get("Retry-After"))
            return RetryableError(said, wait_s=wait_s, busy=status == TOO_MANY)
        if status in NO_KEY:
            has_key = "Authorization" in self._headers
            other = "it refuses the key: give another" if has_key else "it wants a key: give one"
            return InputError(f"{at}: {other} with --api-key-file ({said})")
        if location := response.headers.get("Location"):
            return InputError(f"{at} has moved: give --endpoint the URL behind {location}")
        return RefusedByServer(f"{at} refuses a request: {said}", status)


def _what_broke(error: Exception, begun: bool) -> str:
    if begun:
        return "the connection was cut in mid-answer"
    if isinstance(error, http.client.RemoteDisconnected | ConnectionResetError | BrokenPipeError):
        return "the connection was cut before an answer"
    if isinstance(error, http.client.HTTPException):
        return f"a reply that is no HTTP ({type(error).__name__})"
    return f"no connection ({error.strerror or first_line(error)})"


def _message(data: bytes) -> str:
    """What an error says for people, in OpenAI's shape or as plain text, at most a line of it."""
    text = data.decode(errors="replace")
    with contextlib.suppress(ValueError):
        found = json.loads(text)
        for key in ("error", "message", "detail"):
            found = found.get(key, found) if isinstance(found, dict) else found
        text = found if isinstance(found, str) else json.dumps(found)
    line = " ".join(text.split())
    return f": {line[:197] + '...' if len(line) > 200 else line}" if line else ""


def _seconds(retry_after: str | None) -> float:
    """The seconds that Retry-After names, as a number or as a date; 0 where it names none."""
    if retry_after is None:
        return 0.0
    try:
        return max(float(retry_after), 0.0)
    except ValueError:
        pass
    try:
        return max(email.utils.parsedate_to_datetime(retry_after).timestamp() - time.time(), 0.0)
    except ValueError:
        return 0.0
