"""Exceptions that programs print as one line: input to fix (code 2), and what may pass (75)."""

from __future__ import annotations

import errno

# A full disk or quota, and a network file system that has lost its server.
PASSING = (errno.ENOSPC, errno.EDQUOT, errno.EIO, errno.ESTALE)
# Modules of HTTP errors in the hub's libraries; `httpx2` begins alike.
HTTP_CLIENTS = ("httpx", "httpcore", "requests", "urllib3", "aiohttp")


class InputError(ValueError):
    """Invalid input; the message is one line: the value, what is wrong with it, and the fix."""


class TemporaryError(InputError):
    """A fault of the surroundings that may pass: the same command may succeed later."""


def is_temporary(error: BaseException | None) -> bool:
    """Whether an error, or an error that caused it, may pass without a change of the input.

    Such errors are a TemporaryError, a full disk, a network that is away and a busy server, but
    not a hub that HF_HUB_OFFLINE turns off. `raise ... from None` hides a cause.
    """
    causes: list[BaseException] = []
    while error is not None and error not in causes:
        causes.append(error)
        error = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    is_off = any(type(each).__name__ == "OfflineModeIsEnabled" for each in causes)
    return not is_off and any(map(_may_pass, causes))


def _may_pass(error: BaseException) -> bool:
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status is not None:  # of an HTTP reply
        return status in (408, 429) or status >= 500
    if isinstance(error, TemporaryError | ConnectionError | TimeoutError):
        return True
    if type(error).__module__.startswith(HTTP_CLIENTS):
        return True
    return isinstance(error, OSError) and error.errno in PASSING


def first_line(error: BaseException) -> str:
    """Returns the first line of an error's message, or the error's type if the message is empty."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]
