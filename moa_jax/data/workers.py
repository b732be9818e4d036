"""An ordered map over several processes.

    items --> process 0 .. process n --> results, in the order of the items

Processes are spawned, so they do not inherit the threads or devices of this process. Only a few
items are in flight at a time, so memory does not grow with the number of items.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future
from concurrent.futures.process import BrokenProcessPool, ProcessPoolExecutor
from typing import Any, TypeVar

from moa_jax.errors import InputError

Item, Shared, Result = TypeVar("Item"), TypeVar("Shared"), TypeVar("Result")
AHEAD = 4  # items in flight per process


def ordered_map(
    function: Callable[[Item, Shared], Result],
    items: Iterable[Item],
    shared: Shared,
    workers: int,
) -> Iterator[Result]:
    """Yield `function(item, shared)` per item, in order; `shared` is sent once to each process.

    `function` is pickled by name, so it must be defined at the top level of a module. Raises the
    exceptions of `function`, and InputError if processes are killed or cannot start.
    """
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(workers, context, initializer=_start, initargs=(shared,))
    waiting: deque[Future] = deque()
    try:
        for item in items:
            waiting.append(pool.submit(_call, function, item))
            if len(waiting) > AHEAD * workers:
                yield waiting.popleft().result()
        while waiting:
            yield waiting.popleft().result()
    except BrokenProcessPool as error:
        raise InputError(
            f"a process of {workers} that tokenise ended, perhaps out of memory; "
            "lower data.workers (1 starts no process)"
        ) from error
    finally:
        pool.shutdown(cancel_futures=True)


def num_cores() -> int:
    """Number of CPU cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


# ---- in a worker process --------------------------------------------------------------------

_shared: Any = None


def _start(shared: Any) -> None:
    global _shared
    _shared = shared
    for number in (signal.SIGINT, signal.SIGTERM):  # the parent handles these
        signal.signal(number, signal.SIG_IGN)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process after its parent, since a killed parent cannot end its children."""
    multiprocessing.parent_process().join()
    os._exit(1)


def _call(function: Callable[[Any, Any], Any], item: Any) -> Any:
    return function(item, _shared)
