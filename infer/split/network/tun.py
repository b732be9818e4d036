"""Joins two network namespaces by a link that delays, loses and queues packets.

    python -m infer.split.network.tun PROFILE_AS_JSON SEED

The kernel's own TCP runs at both ends, so loss and delay affect it as in a real network. `tc netem`
does the same, but many kernels are built without it. The first line of output holds the names of
the namespaces, as JSON. Each line on stdin (cut, heal, stats) is answered by the counts so far. The
process ends with its stdin or by SIGTERM, SIGINT or SIGHUP, and removes the namespaces.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import select
import signal
import struct
import subprocess
import sys
import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Literal

from infer.split.network.profiles import DIRECTIONS, Lane, Profile

Side = Literal["client", "server"]
ADDRESSES: dict[Side, str] = {"client": "198.18.0.1", "server": "198.18.0.2"}  # RFC 2544's
TUN = Path("/dev/net/tun")
NAMESPACES = Path("/run/netns")
TUNSETIFF, IFF_TUN, IFF_NO_PI = 0x400454CA, 0x0001, 0x1000  # linux/if_tun.h
MTU = 1500
BURST = 64  # packets that are read before others are written
COMMANDS = ("cut", "heal", "stats")


def ip(*arguments: str) -> None:
    """Runs iproute2's `ip`; raises CalledProcessError, which holds its stderr."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


def namespace(suffix: str) -> str:
    """A name that tells its owner: the process id, and the start time because ids are reused."""
    return f"moa-{os.getpid()}-{_start_of(os.getpid())}-{suffix}"


def _start_of(pid: int) -> str | None:
    """The time at which a process started, in the kernel's ticks; None if there is none."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    # The fields follow the program's name, which is in brackets and may hold anything.
    state, *fields = stat.rpartition(")")[2].split()
    return None if state in "ZX" else fields[18]


def remove_stale() -> None:
    """Removes the namespaces of processes that died without doing so."""
    for path in NAMESPACES.glob("moa-*"):
        owner = re.fullmatch(r"moa-(\d+)-(\d+)-\w+", path.name)
        if owner and _start_of(int(owner[1])) != owner[2]:
            with contextlib.suppress(subprocess.CalledProcessError):  # another process was faster
                ip("netns", "del", path.name)


@contextlib.contextmanager
def joined() -> Iterator[tuple[dict[Side, str], dict[Side, int]]]:
    """Two namespaces with a TUN device each: their names, and the devices' file descriptors."""
    names: dict[Side, str] = {side: namespace(side) for side in ADDRESSES}
    devices: dict[Side, int] = {}
    try:
        for side, name in names.items():
            ip("netns", "add", name)
            ip("-n", name, "link", "set", "lo", "up")
            devices[side] = _device(name, side)
        yield names, devices
    finally:
        for device in devices.values():
            os.close(device)
        for name in names.values():
            with contextlib.suppress(subprocess.CalledProcessError):  # it was not made
                ip("netns", "del", name)


def _device(name: str, side: Side) -> int:
    """Makes a TUN device and moves it to a namespace; this process keeps its file descriptor."""
    interface = f"moa{os.getpid()}{side[0]}"
    device = os.open(TUN, os.O_RDWR | os.O_NONBLOCK | os.O_CLOEXEC)
    fcntl.ioctl(device, TUNSETIFF, struct.pack("16sH", interface.encode(), IFF_TUN | IFF_NO_PI))
    ip("link", "set", interface, "netns", name)
    ip("-n", name, "addr", "add", f"{ADDRESSES[side]}/24", "dev", interface)
    ip("-n", name, "link", "set", interface, "up", "mtu", str(MTU))
    return device


class Carrier:
    """Carries packets in one direction, from one device to the other, when they are due."""

    def __init__(self, source: int, sink: int, lane: Lane) -> None:
        self.source = source
        self.counts = Counter(packets=0, bytes=0, lost=0, overflowed=0, cut=0)
        self._sink = sink
        self._lane = lane
        self._waiting: deque[tuple[float, bytes]] = deque()

    def take(self, is_cut: bool) -> None:
        """Reads the packets that have come, at most BURST."""
        for _ in range(BURST):
            try:
                packet = os.read(self.source, 2 * MTU)
            except BlockingIOError:
                return
            if packet[0] >> 4 != 4:  # IPv6 looks for neighbours; only IPv4 is used
                continue
            now = time.monotonic()
            if is_cut:
                self.counts["cut"] += 1
            elif self._lane.loses():
                self.counts["lost"] += 1
            elif self._lane.overflows(now):
                self.counts["overflowed"] += 1
            else:
                self._waiting.append((self._lane.due(now, len(packet)), packet))

    def deliver(self) -> float | None:
        """Writes the packets that are due; the seconds until the next, or None."""
        while self._waiting:
            due, packet = self._waiting[0]
            if (seconds := due - time.monotonic()) > 0:
                return seconds
            self._waiting.popleft()
            os.write(self._sink, packet)
            self.counts["packets"] += 1
            self.counts["bytes"] += len(packet)
        return None

    def drop(self) -> None:
        """Loses the packets under way."""
        self.counts["cut"] += len(self._waiting)
        self._waiting.clear()


def carry(carriers: Sequence[Carrier]) -> None:
    """Carries packets and obeys stdin until it ends."""
    commands, is_cut = sys.stdin.fileno(), False
    sources = [carrier.source for carrier in carriers]
    while True:
        waits = [wait for carrier in carriers if (wait := carrier.deliver()) is not None]
        readable, _, _ = select.select([*sources, commands], [], [], min(waits, default=None))
        for carrier in carriers:
            if carrier.source in readable:
                carrier.take(is_cut)
        if commands not in readable:
            continue
        words = os.read(commands, 4096).decode().split()
        if not words:
            return
        for word in words:
            is_cut = {"cut": True, "heal": False}.get(word, is_cut)
            if word == "cut":
                for carrier in carriers:
                    carrier.drop()
            counts = dict(zip(DIRECTIONS, (carrier.counts for carrier in carriers), strict=True))
            print(json.dumps(counts if word in COMMANDS else {"unknown": word}), flush=True)


def _end(number: int, _: object) -> None:
    for each in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(each, signal.SIG_IGN)  # a second signal would stop the removal
    sys.exit(128 + number)


def main() -> None:
    profile, seed = Profile(**json.loads(sys.argv[1])), int(sys.argv[2])
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _end)
    os.setpriority(os.PRIO_PROCESS, 0, -10)  # so that a busy machine does not look like jitter
    with joined() as (names, devices):
        print(json.dumps(names), flush=True)
        client, server = devices["client"], devices["server"]
        up = Carrier(client, server, Lane(profile, seed, "up"))
        carry([up, Carrier(server, client, Lane(profile, seed, "down"))])


if __name__ == "__main__":
    main()
