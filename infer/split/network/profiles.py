"""Named networks, and what one direction of a link does to a packet."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Literal

Direction = Literal["up", "down"]  # from client to server, and back
DIRECTIONS: tuple[Direction, Direction] = ("up", "down")
QUEUE_S = 0.4  # seconds of traffic that the bottleneck's queue holds; it drops later packets


@dataclass(frozen=True)
class Profile:
    """A link with the same properties in both directions.

    Delay and jitter are those of one direction, as in `tc netem`: a packet's delay is drawn from a
    normal distribution whose standard deviation is the jitter, and is at least 0. `loss` is the
    probability that a packet is lost.
    """

    name: str
    delay_ms: float = 0.0
    jitter_ms: float = 0.0
    loss: float = 0.0
    rate_mbit: float | None = None  # None: as fast as this machine
    note: str = ""

    def __post_init__(self) -> None:
        if min(self.delay_ms, self.jitter_ms) < 0 or not 0 <= self.loss <= 1:
            raise ValueError(f"{self}: delays must be at least 0, and loss between 0 and 1")
        if self.rate_mbit is not None and self.rate_mbit <= 0:
            raise ValueError(f"{self}: a rate must be above 0, or None for no limit")

    @property
    def round_trip_ms(self) -> float:
        """The time of a ping, without jitter and queues."""
        return 2 * self.delay_ms


# The paper's 4G, 5G and wired networks, and a bad one. For the wired network the paper gives a
# ping, which is a round trip, so the delay is half of it. For the others it gives a mean and a
# deviation, which we take as those of one direction: so 4G has a ping of 42 ms, as phones measure.
PROFILES = {
    profile.name: profile
    for profile in (
        Profile("loopback", note="nothing is added"),
        Profile("wired", 4.5, 0.0, 0.0, 50.0, "the paper's: a ping of 9 ms, 50 Mbit/s"),
        Profile("5g", 10.0, 10.0, 0.001, 100.0, "the paper's; the rate is our choice"),
        Profile("4g", 21.0, 19.0, 0.001, 20.0, "the paper's"),
        Profile("far", 100.0, 0.0, 0.01, 20.0, "100 ms and 1 % loss; the rate is our choice"),
    )
}


class Lane:
    """One direction of a link: its packets share one queue and keep their order."""

    def __init__(self, profile: Profile, seed: int, direction: Direction) -> None:
        self._profile = profile
        self._random = random.Random(f"{seed} {direction}")
        self._free_at = self._last_due = 0.0  # seconds, on the caller's clock

    def loses(self) -> bool:
        """Whether the next packet is lost."""
        return self._random.random() < self._profile.loss

    def overflows(self, now: float) -> bool:
        """Whether a packet that comes now finds the queue full."""
        return self._free_at - now > QUEUE_S

    def due(self, now: float, size: int, held: float = 0.0) -> float:
        """The time at which a packet of `size` bytes that enters now comes out.

        The packet is held for `held` more seconds. All times are on the caller's clock.
        """
        profile = self._profile
        sending = 0.0 if profile.rate_mbit is None else size * 8e-6 / profile.rate_mbit
        self._free_at = max(self._free_at, now) + sending
        delay = max(0.0, self._random.gauss(profile.delay_ms, profile.jitter_ms)) / 1e3
        self._last_due = max(self._last_due, self._free_at + delay + held)
        return self._last_due
