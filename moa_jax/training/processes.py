"""What the processes of one run must agree on: process 0 finds it out and tells the others."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from moa_jax.errors import InputError

T = TypeVar("T")


def is_first() -> bool:
    """Whether this process writes files and speaks for all."""
    return jax.process_index() == 0


def on_first(function: Callable[[], T]) -> T:
    """Calls `function` on process 0; all processes get its result, or raise its InputError.

    The result must be made of JSON's types. All processes must call this at the same point.
    """
    if jax.process_count() == 1:
        return function()
    found: dict[str, object] = {}
    if is_first():
        try:
            found = {"result": function()}
        except InputError as error:
            found = {"refused": str(error)}
    found = json.loads(_told(json.dumps(found).encode()))
    if "refused" in found:
        raise InputError(found["refused"])
    return found["result"]


def gathered(tree: Any) -> Any:
    """Whole arrays on the host, the same in every process."""
    if jax.process_count() == 1:
        return jax.device_get(tree)
    return multihost_utils.process_allgather(tree, tiled=True)


def _told(data: bytes) -> bytes:
    """The bytes of process 0, on all processes."""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    buffer = np.zeros(length, np.uint8)
    if is_first():
        buffer[:] = np.frombuffer(data, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes()
