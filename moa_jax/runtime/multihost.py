"""What the processes of one run do together: agree on what process 0 finds, and end if one fails.

jax alone lets the others wait: those in a collective for its network's fault, the one that failed
for all others to be done; one that was killed, or whose machine is gone, may break nothing at all.
Here who fails leaves word with jax's coordination service, which process 0 runs. Every process
gives a sign of life there twice a second, and looks for words and for signs. The death of a process
ends its line to process 0 (`meeting`), where a machine that is gone only falls silent.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from jax._src.distributed import global_state  # no public name leads to the coordination service
from jax.experimental import multihost_utils

from moa_jax.errors import InputError
from moa_jax.runtime.rendezvous import Lines

T = TypeVar("T")

# Keys and a barrier of the coordination service.
FAILURE, ENDED, DONE = "moa_jax/failure", "moa_jax/ended", "moa_jax/done"
WORD, ALIVE = "moa_jax/word", "moa_jax/alive"
SECONDS_BETWEEN_LOOKS = 0.5
# After so many, which take 20 seconds, a process is given up. They are counted, not timed: one that
# was stopped itself, as by a busy machine, first looks again.
LOOKS_IN_SILENCE = 40
SECONDS_FOR_A_WORD = 2.0  # from a process whose end is noticed otherwise, too
PATIENCE = 10.0  # seconds for the others to read of a failure, and for last words to be said
LONGEST_END = 20.0  # seconds: whoever is asked on the way may be silent
A_DAY_MS = 24 * 60 * 60 * 1000


def count() -> int:
    """How many processes have met.

    It starts no devices. Jax's own count does, and then each process waits for all the others.
    """
    return global_state.num_processes or 1


def index() -> int:
    """Which of them this is, from 0. It starts no devices."""
    return global_state.process_id


def is_first() -> bool:
    """Whether this process writes files and speaks for all."""
    return index() == 0


def on_first(function: Callable[[], T]) -> T:
    """Calls `function` on process 0; all processes get its result, or raise what it raised.

    The result must be made of JSON's types. All processes must call this at the same point.
    An InputError and an OSError are raised anew, any other exception as a RuntimeError that
    tells it.
    """
    if jax.process_count() == 1:
        return function()
    found: dict[str, Any] = {}
    if is_first():
        try:
            found = {"result": function()}
        except Exception as error:
            _told(json.dumps(_packed(error)).encode())
            raise
    found = json.loads(_told(json.dumps(found).encode()))
    if "result" not in found:
        raise _unpacked(found)
    return found["result"]


def _packed(error: Exception) -> dict[str, Any]:
    if isinstance(error, InputError):
        return {"refused": str(error)}
    if isinstance(error, OSError) and error.errno is not None:
        name = None if error.filename is None else os.fsdecode(error.filename)
        return {"system": [error.errno, error.strerror, name]}
    return {"failed": f"process 0: {type(error).__name__}: {error}"}


def _unpacked(found: dict[str, Any]) -> Exception:
    if "refused" in found:
        return InputError(found["refused"])
    return OSError(*found["system"]) if "system" in found else RuntimeError(found["failed"])


def gathered(tree: Any) -> Any:
    """Whole arrays on the host, the same in every process.

    All processes must call this at the same point where one of them lacks a part.
    """

    def whole(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(whole, tree))


def check_same(facts: Mapping[str, Any], point: str) -> None:
    """Raises InputError on a process that has other facts than process 0.

    All processes must call this, with a `point` of the program at which they call it once. It
    starts no devices.
    """
    if count() == 1:
        return
    mine = {name: str(value) for name, value in facts.items()}
    if is_first():
        leave_word(point, mine)
        return
    others = word_left(point)
    for name in [*mine, *others]:
        here, there = mine.get(name, "absent"), others.get(name, "absent")
        if here != there:
            raise InputError(
                f"{name} is {here} here and {there} for process 0: start all processes alike"
            )


def leave_word(point: str, content: Any) -> None:
    """On process 0: what the others will find at this point, made of JSON's types."""
    global_state.client.key_value_set(f"{WORD}/{point}", json.dumps(content))


def word_left(point: str) -> Any:
    """What process 0 has left there; waits for it."""
    return json.loads(global_state.client.blocking_key_value_get(f"{WORD}/{point}", A_DAY_MS))


def host_of_first() -> str:
    """The name or address under which process 0 was found."""
    return global_state.coordinator_address.rpartition(":")[0].strip("[]")


def _told(data: bytes) -> bytes:
    """The bytes of process 0, on all processes."""
    length = int(multihost_utils.broadcast_one_to_all(np.int32(len(data))))
    buffer = np.zeros(length, np.uint8)
    if is_first():
        buffer[:] = np.frombuffer(data, np.uint8)
    return np.asarray(multihost_utils.broadcast_one_to_all(buffer)).tobytes()


# ---- ending -------------------------------------------------------------------------------


class Failure(NamedTuple):
    """Why a run ends."""

    process: int  # the one that failed
    line: str
    code: int  # with which all exit


_ENDS = threading.Lock()  # of whichever thread ends this process, which is never given back


def _begin_end(code: int, say: Callable[[str], None], line: str) -> threading.Thread:
    """From now on this process ends, by no other thread, whatever hangs; `line` is being said.

    Where it goes may be closed, or full: nothing waits for long.
    """
    _ENDS.acquire()
    limit = threading.Timer(LONGEST_END, os._exit, (code,))
    saying = threading.Thread(target=_say_last, args=(say, line))
    for each in (limit, saying):
        each.daemon = True
        each.start()
    return saying


def _say_last(say: Callable[[str], None], line: str) -> None:
    with contextlib.suppress(Exception):
        say(line)
    with contextlib.suppress(Exception):
        print(end="", flush=True)


def _exit(code: int, saying: threading.Thread) -> NoReturn:
    """Without jax's wait for all processes."""
    saying.join(PATIENCE)
    os._exit(code)


class Ending:
    """How a process ends that is one of several."""

    def __init__(self, say: Callable[[str], None]) -> None:
        self._say = say
        self._lines = Lines({})
        self.has_service = False  # that all have found: jax aborts who asks one before
        self.last_words: Callable[[str], None] = lambda line: None  # before it exits

    def watch(self, lines: Lines) -> None:
        """Ends this process if one of those that it has met dies."""
        self._lines = lines
        if lines:
            _delay_aborts()
        lines.watch(self.lost)

    def part(self) -> None:
        """Tells the others that this process ends now, as it should."""
        self._lines.part()

    def say(self, line: str) -> None:
        try:
            self._say(line)
        finally:
            self.last_words(line)

    def fail(self, line: str, lost: int | None = None) -> NoReturn:
        """From any thread: this process cannot go on, as where one is lost, and so none can.

        Where another one has left word of its own failure, that is the reason.
        """
        first = _word_of_failure()
        if lost is not None:
            _note_end(lost)
        _end(first or Failure(index(), line, 1), self.say)

    def lost(self, process: int) -> NoReturn:
        """From any thread: another process has died, or has left word and ended."""
        line = f"process {process} has died"
        if process and self.has_service:
            self.fail(line, process)
        # At once: there is no service, and jax aborts where it was process 0's.
        _exit(1, _begin_end(1, self.say, line))


def _delay_aborts() -> None:
    """Holds up an abort of this process for six seconds, which is the number of the signal.

    Where process 0 dies, jax aborts from a thread that needs no interpreter. So on a busy machine
    it may come before the thread that hears the end of the line, and would say nothing of use.
    Such a signal from elsewhere (`kill -ABRT`) only waits, too: it ends no process that is well.
    """
    with contextlib.suppress(OSError, AttributeError):  # other systems, other libraries of C
        libc = ctypes.CDLL(None)
        libc.signal(signal.SIGABRT, libc.sleep)


@contextlib.contextmanager
def ending_together(
    describe: Callable[[BaseException], tuple[str, int]], ending: Ending
) -> Iterator[None]:
    """Ends every process of a run as soon as one leaves this context by an exception.

    `describe` turns an exception into a line and an exit code. Each process says the line of its
    own failure or of the first one elsewhere and exits, whatever it is doing. An exception of a
    process that is alone goes on as usual.
    """
    if not jax.distributed.is_initialized() or global_state.num_processes == 1:
        yield
        return
    ending.has_service = True
    say, over, signs = ending.say, threading.Event(), Signs()
    looking = threading.Thread(target=_look, args=(over, signs, say), daemon=True)
    for each in (threading.Thread(target=_exchange, args=(over, signs), daemon=True), looking):
        each.start()
    try:
        yield
        print(end="", flush=True)  # what follows may end this process
    except BaseException as error:
        with contextlib.suppress(ValueError):  # in a thread, which no signal interrupts
            signal.signal(signal.SIGINT, signal.SIG_IGN)  # a second one would leave the end undone
        # A collective that breaks because another process ends is no failure of its own; nor is
        # what `on_first` tells of process 0, a RuntimeError.
        first = None
        if is_broken(error):
            first = _word_of_failure()
        elif isinstance(error, RuntimeError):
            first = _first_failure()
        _end(first or Failure(index(), *describe(error)), say)
    # One process may still write what all have made: the others wait, and look, until it is done.
    # If one is killed meanwhile, whoever hears of that ends this process.
    try:
        global_state.client.wait_at_barrier(DONE, A_DAY_MS)
    except jax.errors.JaxRuntimeError:
        looking.join(LOOKS_IN_SILENCE * SECONDS_BETWEEN_LOOKS + LONGEST_END)
        raise
    over.set()
    ending.part()
    looking.join()


class Signs:
    """What this process has last heard of all, itself included, by way of the service."""

    def __init__(self) -> None:
        self.exchanges = 0
        self.failure: Failure | None = None
        self._last = dict.fromkeys(range(count()), "")
        self._quiet = dict.fromkeys(range(count()), 0)  # exchanges in which nothing new was heard

    def exchange(self) -> None:
        """Gives a sign of life and looks for those of others; hangs where process 0 does."""
        client = global_state.client
        client.key_value_set(f"{ALIVE}/{index()}", str(self.exchanges), allow_overwrite=True)
        heard = {int(key.rpartition("/")[2]): sign for key, sign in client.key_value_dir_get(ALIVE)}
        for process, last in self._last.items():
            self._last[process] = heard.get(process, "")
            self._quiet[process] = self._quiet[process] + 1 if self._last[process] == last else 0
        self.failure = _first_failure()
        self.exchanges += 1

    def lost(self) -> int | None:
        """A process that gives no sign any more."""
        return next((p for p, quiet in self._quiet.items() if quiet >= LOOKS_IN_SILENCE), None)


def _exchange(over: threading.Event, signs: Signs) -> None:
    while not over.wait(SECONDS_BETWEEN_LOOKS):
        with contextlib.suppress(jax.errors.JaxRuntimeError):  # there is no service any more
            signs.exchange()


def _look(over: threading.Event, signs: Signs, say: Callable[[str], None]) -> None:
    """Ends this process for the failure of another one; it never waits for the service itself."""
    exchanges, quiet = 0, 0
    while not over.wait(SECONDS_BETWEEN_LOOKS):
        quiet = quiet + 1 if signs.exchanges == exchanges else 0
        exchanges = signs.exchanges
        if signs.failure:
            _end(signs.failure, say)
        lost = 0 if quiet >= LOOKS_IN_SILENCE else signs.lost()
        if lost is not None:
            _leave_behind(lost, say)


def _leave_behind(lost: int, say: Callable[[str], None]) -> NoReturn:
    """Ends this process because another one was killed or stopped, or its machine is gone."""
    seconds = LOOKS_IN_SILENCE * SECONDS_BETWEEN_LOOKS
    failure = Failure(lost, f"no sign of life for {seconds:.0f} s: see whether it still runs", 1)
    if lost == 0:  # no service either
        _exit(1, _begin_end(1, say, _told_of(failure)))
    _note_end(lost)
    _end(failure, say)


def is_broken(error: BaseException) -> bool:
    """Whether a collective or the service failed, as where another process has ended."""
    names = ("Gloo", "NCCL", "Connection reset by peer", "UNAVAILABLE")
    return isinstance(error, RuntimeError | ValueError) and any(n in str(error) for n in names)


def _word_of_failure() -> Failure | None:
    """What another process says of its own failure, if it does so soon."""
    until = time.monotonic() + SECONDS_FOR_A_WORD
    while (first := _first_failure()) is None and time.monotonic() < until:
        time.sleep(0.05)
    return first


def _first_failure() -> Failure | None:
    try:
        return Failure(*json.loads(global_state.client.key_value_try_get(FAILURE)))
    except jax.errors.JaxRuntimeError:  # there is none, or no service any more
        return None


def _end(failure: Failure, say: Callable[[str], None]) -> NoReturn:
    """Leaves word of the failure, says it, and exits.

    Process 0 is last: jax aborts every process that still runs when the service goes.
    """
    saying = _begin_end(failure.code, say, _told_of(failure))
    client, me = global_state.client, index()
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was first
        client.key_value_set(FAILURE, json.dumps(failure))
    _note_end(me)
    with contextlib.suppress(jax.errors.JaxRuntimeError):
        until = time.monotonic() + PATIENCE
        while me == 0 and time.monotonic() < until and _are_running():
            time.sleep(0.05)
    _exit(failure.code, saying)


def _are_running() -> bool:
    """Whether some have not said that they end, nor been given up."""
    return len(global_state.client.key_value_dir_get(ENDED)) < count()


def _note_end(process: int) -> None:
    """Process 0 need not wait for it: it is this one, or one that is lost."""
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # another was first
        global_state.client.key_value_set(f"{ENDED}/{process}", "")


def _told_of(failure: Failure) -> str:
    own = failure.process == index()
    return failure.line if own else f"process {failure.process}: {failure.line}"
