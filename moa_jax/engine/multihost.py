"""One engine over several processes: process 0 leads, the others run the programs that it runs.

    clients -> process 0   engine's thread --- LeadingPrograms.run --> its devices
                                                  |                     |
                                               Message              collectives
                                                  v                     |
               process 1   run_follower() ----- ProgramCache.run ------> its devices

Before process 0 runs a program it sends the program's name and its arrays to the followers.
The state is never sent: each process holds its own shards, and every program turns one state into
the next. Only process 0 schedules and reads reports, so no decision depends on the clocks of two
processes.

Messages are msgpack, which cannot contain code. They have the leaves of the arrays; the structure
follows from the program's name.
"""

from __future__ import annotations

from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import jax
import msgspec

from moa_jax.decode.slots import SlotState
from moa_jax.engine.program_cache import ProgramCache, ProgramName
from moa_jax.errors import first_line
from moa_jax.runtime.followers import Followers, HostArray, packed, receive, unpacked


class Message(NamedTuple):
    """Run a program on these arrays and the state, or compile the program if `arrays` is None."""

    name: ProgramName
    arrays: list[HostArray] | None


READER = msgspec.msgpack.Decoder(Message)


class LeadingPrograms(ProgramCache):
    """The programs of process 0: its followers compile and run the same programs."""

    def __init__(self, followers: Followers, *args: Any) -> None:
        super().__init__(*args)
        self._followers = followers

    def compile(self, name: ProgramName) -> None:
        if name not in self.ready:
            self._followers.broadcast(msgspec.msgpack.encode(Message(name, None)))
        super().compile(name)

    def run(self, name: ProgramName, state: SlotState | None, *arrays: Any) -> Any:
        sent = packed(jax.tree.leaves(arrays))
        self._followers.broadcast(msgspec.msgpack.encode(Message(name, sent)))
        try:
            return super().run(name, state, *arrays)
        except Exception as error:  # the followers wait for this process in a collective
            self._followers.end(f"{type(error).__name__}: {first_line(error)}")
            raise


def run_follower(programs: ProgramCache, leader: Connection) -> None:
    """Compiles and runs the programs that process 0 sends, until its last message.

    Raises LeaderDied if process 0 dies before, msgspec.DecodeError for a malformed message, and the
    exceptions of programs.
    """
    state: SlotState | None = None
    compiled: dict[ProgramName, Future[None]] = {}
    compiler = ThreadPoolExecutor(1, "compiler")
    try:
        while message := receive(leader):
            name, arrays = READER.decode(message)
            if arrays is None:
                compiled[name] = compiler.submit(programs.compile, name)
                continue
            if compiled[name].exception():  # jax may fail while another thread traces
                programs.compile(name)
            structure = jax.tree.structure(programs.example(name))
            if name.kind == "empty":  # memory is planned for one state
                state = None
            state, _ = programs.run(name, state, *structure.unflatten(unpacked(arrays)))
    finally:
        compiler.shutdown(wait=False, cancel_futures=True)
