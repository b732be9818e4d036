"""The processes of one run: broadcasts from process 0, checks that they agree, and shutdown.

    process 1 --- socket ---\
                             process 0    heartbeats, values, failures and goodbyes, as JSON lines
    process 2 --- socket ---/

If one process fails, all processes print its error and exit with its code. jax.distributed alone
aborts the other processes or leaves them in a collective. A process that dies closes its socket; a
process on a lost machine misses its heartbeats.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple, NoReturn, TypeVar

import jax
import numpy as np
from jax.experimental import multihost_utils

from moa_jax.errors import InputError, TemporaryError, first_line, is_temporary
from moa_jax.runtime.rendezvous import SINGLE, ProcessSpec, connect, send_line

T = TypeVar("T")

HEARTBEAT_INTERVAL_S = 0.5
HEARTBEAT_TIMEOUT_S = 20.0
CAUSE_TIMEOUT_S = 2.0  # for the failure of another process, which may have caused an error here
EXIT_TIMEOUT_S = 10.0  # for the other processes to exit before process 0
FORCED_EXIT_S = 20.0  # for all of a shutdown: stderr may block
OF_FIRST = "raised by process 0"  # a note of exceptions, whichever process reports them first

_group: ProcessGroup | None = None  # of this process, since `join`


def count() -> int:
    """Number of processes; starts no backend after `join`, unlike `jax.process_count`."""
    if _group is not None:
        return _group.spec.num_processes
    return jax.process_count() if jax.distributed.is_initialized() else 1


def index() -> int:
    """Id of this process; starts no backend after `join`, unlike `jax.process_index`."""
    if _group is not None:
        return _group.spec.process_id
    return jax.process_index() if jax.distributed.is_initialized() else 0


def is_first() -> bool:
    """Whether this process writes files and prints."""
    return index() == 0


def on_first(function: Callable[[], T]) -> T:
    """Calls `function` on process 0 and returns its result, made of JSON's types, on all processes.

    All processes must call this at the same point. An InputError or OSError of process 0 is raised
    on all processes; any other exception becomes a RuntimeError on the other processes.
    """
    if jax.process_count() == 1:
        return function()
    outcome: dict[str, Any] = {}
    if is_first():
        try:
            outcome = {"result": function()}
        except Exception as error:
            _broadcast(_packed(error))
            raise
    outcome = _broadcast(outcome)
    if "result" not in outcome:
        ((kind, arguments),) = outcome.items()
        error = _RAISED_BY_NAME[kind](*arguments)
        error.add_note(OF_FIRST)
        raise error
    return outcome["result"]


_RAISED = (InputError, TemporaryError, OSError, RuntimeError)
_RAISED_BY_NAME = {each.__name__: each for each in _RAISED}


def _packed(error: Exception) -> dict[str, list[Any]]:
    """The name and the arguments of the exception that the other processes raise."""
    if isinstance(error, InputError):
        kind = TemporaryError if is_temporary(error) else InputError
        return {kind.__name__: [str(error)]}
    if isinstance(error, OSError) and error.errno is not None:
        name = None if error.filename is None else os.fsdecode(error.filename)
        return {"OSError": [error.errno, error.strerror, name]}
    return {"RuntimeError": [f"{type(error).__name__}: {first_line(error)}"]}


def _broadcast(value: Any) -> Any:
    """The value of process 0, made of JSON's types, on all processes."""
    data = np.frombuffer(json.dumps(value).encode(), np.uint8)
    size = int(multihost_utils.broadcast_one_to_all(np.int32(data.size)))
    # Only the shape of the other processes' arrays matters.
    return json.loads(bytes(multihost_utils.broadcast_one_to_all(np.resize(data, size))))


def processes_without(found: bool) -> list[int]:
    """Ids of the processes that pass False, on all processes, which must call this together."""
    return np.flatnonzero(~multihost_utils.process_allgather(np.bool_(found))).tolist()


def gathered(tree: Any) -> Any:
    """Whole arrays on the host, equal on all processes.

    All processes must call this at the same point if an array is not fully addressable.
    """

    def gather(leaf: Any) -> Any:
        if not isinstance(leaf, jax.Array) or leaf.is_fully_addressable or leaf.is_fully_replicated:
            return leaf
        return multihost_utils.process_allgather(leaf, tiled=True)

    return jax.device_get(jax.tree.map(gather, tree))


def check_same(facts: Mapping[str, Any], key: str) -> None:
    """Raises InputError on a process whose facts differ from those of process 0.

    All processes must call this once per key. No backend is started.
    """
    if count() == 1:
        return
    own = {name: str(value) for name, value in facts.items()}
    if is_first():
        kv_set(key, own)
        return
    first = kv_get(key)
    for name in [*own, *first]:
        here, there = own.get(name, "absent"), first.get(name, "absent")
        if here != there:
            raise InputError(
                f"{name} is {here} here and {there} for process 0; start all processes alike"
            )


def kv_set(key: str, value: Any) -> None:
    """On process 0: sends a value, made of JSON's types, to all processes."""
    _group.send(set=[key, value])


def kv_get(key: str) -> Any:
    """On the other processes: the value that process 0 has set; waits for the value."""
    return _group.value(key)


def host_of_first() -> str:
    """Name or address of process 0's host."""
    return _group.spec.coordinator_address.rpartition(":")[0].strip("[]")


# ---- processes that start and end together ------------------------------------------------


def end_now(line: str, code: int) -> NoReturn:
    """Ends all processes with a line on stderr, from any thread, without a shutdown of jax."""
    if count() > 1:
        _group.end(Failure(index(), line, code))
    with contextlib.suppress(OSError):  # sys.stderr may be locked by a thread that hangs
        os.write(2, f"{line}\n".encode())
    os._exit(code)


class Failure(NamedTuple):
    """The error that ends a run."""

    process: int
    line: str
    code: int  # exit code of all processes


class ProcessGroup:
    """This process's sockets to the other processes; ends this process if another process fails."""

    def __init__(
        self,
        say: Callable[[str], None],
        spec: ProcessSpec = SINGLE,
        peers: Mapping[int, socket.socket] | None = None,
    ) -> None:
        self.spec = spec
        self.last_words: Callable[[str], None] = lambda line: None  # called before an exit
        self._say, self._peers = say, peers or {}
        self._sending, self._changed = threading.Lock(), threading.Condition()
        # Guarded by `_changed`:
        self._failure: Failure | None = None
        self._values: dict[str, Any] = {}
        self._finished: set[int] = set()  # processes that said goodbye
        self._gone: set[int] = set()  # processes whose socket is closed, or silent
        jobs = [(self._receive, each) for each in self._peers.items()]
        jobs += [(self._send_heartbeats, ()), (self._end_on_failure, ())] if peers else []
        for job, arguments in jobs:
            threading.Thread(target=job, args=arguments, daemon=True).start()

    def fail(self, line: str, lost: int | None = None) -> NoReturn:
        """Ends all processes from any thread, because of a failure here or of a `lost` process."""
        cause = self.cause()
        with self._changed:
            self._gone |= set() if lost is None else {lost}
        self.end(cause or Failure(self.spec.process_id, line, 1))

    def cause(self) -> Failure | None:
        """The failure of another process, if one is reported within `CAUSE_TIMEOUT_S`."""
        with self._changed:
            self._changed.wait_for(lambda: self._failure, CAUSE_TIMEOUT_S)
            return self._failure

    def end(self, failure: Failure) -> NoReturn:
        """Ends all processes; the first failure counts. A second Ctrl-C does not interrupt this."""
        self._note(failure)
        while True:
            with contextlib.suppress(KeyboardInterrupt):
                threading.Event().wait()

    def say_goodbye(self) -> None:
        """Sends a goodbye to every peer: this process may exit from now on."""
        self.send(goodbye=True)

    def finish(self) -> None:
        """Waits until all processes have called this; a failure until then ends all processes."""
        if self.spec.process_id:
            self.say_goodbye()
        with self._changed:
            self._changed.wait_for(lambda: self._finished >= self._peers.keys())
        if self.spec.process_id == 0:
            self.say_goodbye()

    def send(self, **message: Any) -> None:
        """Sends a message to every peer; a peer that is gone is noticed by its own thread."""
        with self._sending:
            for peer in self._peers.values():
                with contextlib.suppress(OSError):
                    send_line(peer, **message)

    def value(self, key: str) -> Any:
        """A value of process 0; waits for the value."""
        with self._changed:
            self._changed.wait_for(lambda: key in self._values)
            return self._values[key]

    def _send_heartbeats(self) -> None:
        while True:
            self.send()
            time.sleep(HEARTBEAT_INTERVAL_S)

    def _receive(self, process: int, peer: socket.socket) -> None:
        """Handles what a peer sends until its socket is closed or silent."""
        end = Failure(self.spec.process_id, f"process {process} has died", 1)
        try:
            peer.settimeout(HEARTBEAT_TIMEOUT_S)
            for line in _lines(peer):
                self._handle(process, json.loads(line))
        except TimeoutError:
            line = f"no sign of life for {HEARTBEAT_TIMEOUT_S:.0f} s; see whether it still runs"
            end = Failure(process, line, 1)
        except OSError:  # reset, as by a process that died
            pass
        with self._changed:
            self._gone.add(process)
            has_finished = process in self._finished
            self._changed.notify_all()
        if not has_finished:
            self._note(end)

    def _handle(self, process: int, message: dict[str, Any]) -> None:
        with self._changed:
            if "set" in message:
                key, self._values[key] = message["set"]
            if "goodbye" in message:
                self._finished.add(process)
            self._changed.notify_all()
        if "failure" in message:
            self._note(Failure(*message["failure"]))

    def _note(self, failure: Failure) -> None:
        with self._changed:
            self._failure = self._failure or failure
            self._changed.notify_all()

    def _end_on_failure(self) -> None:
        with self._changed:
            self._changed.wait_for(lambda: self._failure)
        process, line, code = failure = self._failure
        limit = threading.Timer(FORCED_EXIT_S, os._exit, (code,))
        limit.daemon = True
        limit.start()
        self.send(failure=failure)
        line = line if process == self.spec.process_id else f"process {process}: {line}"
        for call in (self._say, self.last_words):
            with contextlib.suppress(Exception):  # stderr may be closed or full
                call(line)
        with contextlib.suppress(Exception):
            print(end="", flush=True)
        if self.spec.process_id == 0:  # jax aborts processes that outlive its service
            with self._changed:
                self._changed.wait_for(lambda: self._gone >= self._peers.keys(), EXIT_TIMEOUT_S)
        os._exit(code)


def _lines(peer: socket.socket) -> Iterator[bytes]:
    """Yields the lines of a socket; raises TimeoutError after HEARTBEAT_TIMEOUT_S of silence.

    Silence is counted in short waits: a process that was suspended itself waits once more.
    """
    waiting, rest, silent_s = select.poll(), b"", 0.0
    waiting.register(peer, select.POLLIN)
    while silent_s < HEARTBEAT_TIMEOUT_S:
        if not waiting.poll(1000 * HEARTBEAT_INTERVAL_S):
            silent_s += HEARTBEAT_INTERVAL_S
            continue
        if not (data := peer.recv(1 << 16)):
            return
        silent_s = 0.0
        *lines, rest = (rest + data).split(b"\n")
        yield from lines
    raise TimeoutError


def join(spec: ProcessSpec, timeout_s: int, say: Callable[[str], None]) -> ProcessGroup:
    """Connects this process to the others and initializes jax.distributed.

    Must be called before jax starts a backend. Raises TemporaryError if a process is missing.
    """
    global _group
    _group = ProcessGroup(say, spec, connect(spec, timeout_s))
    # The sockets notice a loss first: jax's own timeout aborts with a stack trace.
    jax.distributed.initialize(
        *spec,
        initialization_timeout=timeout_s,
        heartbeat_timeout_seconds=round(3 * HEARTBEAT_TIMEOUT_S),
    )
    return _group


@contextlib.contextmanager
def ending_together(
    group: ProcessGroup, describe: Callable[[BaseException], tuple[str, int]]
) -> Iterator[None]:
    """Ends all processes of a group if one process leaves this context by an exception.

    `describe` turns an exception into a line and an exit code. An exception of a single process
    propagates.
    """
    if count() == 1:
        yield
        return
    try:
        yield
        print(end="", flush=True)  # `finish` may end this process
        group.finish()
    except BaseException as error:
        # jax raises one of these if a collective breaks because another process has ended.
        caused = isinstance(error, RuntimeError | ValueError) and not isinstance(error, InputError)
        group.end((caused and group.cause()) or _failure_of(error, describe))


def _failure_of(
    error: BaseException, describe: Callable[[BaseException], tuple[str, int]]
) -> Failure:
    """The failure to report: of process 0 for an exception that `on_first` raised on its behalf."""
    if OF_FIRST not in getattr(error, "__notes__", ()):
        return Failure(index(), *describe(error))
    if isinstance(error, RuntimeError):  # its text is the line of process 0
        return Failure(0, str(error), 1)
    return Failure(0, *describe(error))
