"""How long a scheduled program takes: kernels one after the other, collectives beside them.

    kernels       |--a--|--b--|   |--c--|      a chip runs one at a time
    network             |--gather--|           from its start on, one collective at a time
                                  ^ `done`: kernels wait for it, so this much is exposed

The order is that of the optimised program. A collective that does not start ahead of its end is
exposed as a whole. One that is fused with kernels, as libtpu does it, runs beside them, from the
first of them to the last.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import NamedTuple

from moa_jax.aot import hlo
from moa_jax.aot.hlo import FOLLOWED, Computation, Instruction, Sent


class Span(NamedTuple):
    """Seconds of a program or of a part of it."""

    total: float
    exposed: float  # of it, in which kernels wait for the network

    def times(self, count: int) -> Span:
        """That of so many runs, one after the other."""
        return Span(count * self.total, count * self.exposed)


def span(text: str, kernels: Mapping[str, float], collective: Callable[[Sent], float]) -> Span:
    """What one run of an optimised program takes; a loop of unknown length runs once.

    `kernels` gives the seconds of one run of a kernel by its name; what is not there takes none.
    `collective` gives those of a collective that is alone.
    """
    return _Schedule(text, kernels, collective).of(hlo.entry(text))


class _Schedule:
    """A parsed program, and what is known of its computations."""

    def __init__(
        self, text: str, kernels: Mapping[str, float], collective: Callable[[Sent], float]
    ) -> None:
        self.computations, self.kernels = hlo.parse(text), kernels
        self.sent, _ = hlo.sent(text)
        self.seconds = {channel: collective(each) for channel, each in self.sent.items()}
        self._known: dict[str, Span] = {}

    def of(self, name: str) -> Span:
        """One run of a computation, alone on its chip and its network."""
        if name not in self._known:
            self._known[name] = self._run(name)
        return self._known[name]

    def _run(self, name: str) -> Span:
        computation = self.computations[name]
        channels = {each.name: self._channels(name, each) for each in computation.values()}
        last = {channel: user for user, many in channels.items() for channel in many}
        now = exposed = network = 0.0  # when kernels, and the network, are free again
        ends: dict[str, float] = {}  # of collectives, by channel
        for each in computation.values():
            for channel in channels[each.name]:
                if channel not in ends:
                    network = ends[channel] = max(now, network) + self.seconds[channel]
            inner = self._inner(computation, each)
            now += inner.total + self.kernels.get(each.name, 0.0)
            due = [ends[channel] for channel in channels[each.name] if last[channel] == each.name]
            wait = max([end - now for end in due] + [0.0])
            now, exposed = now + wait, exposed + inner.exposed + wait
        return Span(now, exposed)

    def _inner(self, computation: Computation, each: Instruction) -> Span:
        """The span of what an instruction calls: all turns of a loop, the longest of branches."""
        found = [Span(0.0, 0.0)]
        if each.opcode == "while":
            turns = hlo.trips_of(self.computations, computation, each)
            return self.of(hlo.body_of(each)).times(1 if turns is None else turns)
        if each.opcode == "conditional":
            return max(map(self.of, each.called))
        if each.opcode in FOLLOWED:
            found += map(self.of, each.called)
        return Span(*map(sum, zip(*found, strict=True)))

    def _channels(self, at: str, each: Instruction) -> list[str]:
        """The collectives of computation `at` that an instruction starts, goes on with or ends."""
        if each.opcode.endswith("-done"):
            each = self.computations[at][each.operands[0]]
        found = hlo.sent_by(self.computations, at, each)
        return [channel for channel, *_ in found if self.sent[channel].at == at]
