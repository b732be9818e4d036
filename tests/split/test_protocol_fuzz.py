"""Hostile bytes: whatever comes in, the answer is a message or BadMessage, and soon."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import msgpack
import numpy as np
import pytest

from moa_jax.split.protocol import (
    DOWN,
    KIND_OF,
    UP,
    VERSION,
    BadMessage,
    decode_down,
    decode_up,
    encode,
)
from moa_jax.split.rows import LeafSpec, pack, unpack
from tests.split.test_protocol import LIMITS, SECRET, random_messages, random_rows

TRIALS = 2000
SPECS = [LeafSpec((2, 8), np.float32), LeafSpec((5,), np.float32)]
PARTS = [  # of msgpack: heads of each sort, often with more promised than there is
    *(
        bytes((head,))
        for head in (0xC0, 0xC1, 0xC2, 0xC3, 0x80, 0x81, 0x8F, 0x90, 0x9F, 0xA1, 0xFF)
    ),
    *(bytes((head,)) + b"\xff" * 4 for head in range(0xC4, 0xE0)),
    *(bytes((head,)) + b"\0\0\0\1" for head in range(0xC4, 0xE0)),
]

WHOLE = [-1, 0, 1, 16, 99, 1 << 31, 1 << 40, (1 << 64) - 1]
FLOATS = [0.0, 0.5, 1.0, -1.0, 1e300, float("inf"), float("nan")]
TEXTS = ["", "stop", "int8", "busy", "0" * 32, SECRET, "\0", "\u202e", "é"]


def flipped(data: bytes, rng: np.random.Generator) -> bytes:
    """A few bits changed, anywhere."""
    found = np.frombuffer(data, np.uint8).copy()
    for place in rng.integers(8 * len(found), size=rng.integers(1, 4)):
        found[place // 8] ^= 1 << (place % 8)
    return found.tobytes()


def cut(data: bytes, rng: np.random.Generator) -> bytes:
    return data[: rng.integers(len(data))]


def overwritten(data: bytes, rng: np.random.Generator) -> bytes:
    """Noise in the place of a piece, or between two bytes."""
    start, length = rng.integers(len(data)), rng.integers(8)
    return data[:start] + rng.bytes(rng.integers(1, 9)) + data[start + length :]


def spliced(data: bytes, rng: np.random.Generator) -> bytes:
    """The head of a message and the tail of itself: pieces left out or sent twice."""
    first, second = rng.integers(len(data), size=2)
    return data[:first] + data[second:]


def noise(data: bytes, rng: np.random.Generator) -> bytes:
    return rng.bytes(rng.integers(64))


def nested(data: bytes, rng: np.random.Generator) -> bytes:
    """Heads of msgpack, one behind the other, after a right beginning."""
    return data[:2] + b"".join(PARTS[k] for k in rng.integers(len(PARTS), size=rng.integers(40)))


MUTATIONS: list[Callable[[bytes, np.random.Generator], bytes]] = [
    flipped,
    cut,
    overwritten,
    spliced,
    noise,
    nested,
]


def hostile(valid: list[bytes], mutate: Callable[..., bytes]) -> Iterator[bytes]:
    rng = np.random.default_rng(7)
    for trial in range(TRIALS):
        yield mutate(valid[trial % len(valid)], rng)


def outcome(function: Callable[..., Any], *arguments: Any) -> Any:
    """What a call returns; None where it refuses with one line that shows nothing of its input."""
    try:
        return function(*arguments)
    except BadMessage as error:
        said = str(error)
        assert said and said.isprintable() and len(said) < 250 and SECRET not in said
        return None


@pytest.mark.parametrize("mutate", MUTATIONS)
def test_hostile_messages_are_read_or_refused(mutate):
    valid = [encode(message) for seed in range(20) for message in random_messages(seed)]
    refused = 0
    for data in hostile(valid, mutate):
        for decode, kinds in ((decode_up, UP), (decode_down, DOWN)):
            message = outcome(decode, data, LIMITS)
            refused += message is None
            if message is not None:  # then it is a right one: it survives another journey
                assert type(message) in kinds.values()
                assert decode(encode(message), LIMITS) == message
    assert refused > TRIALS  # at least every second: each message is of one direction


def random_value(rng: np.random.Generator, depth: int = 0) -> Any:
    """Anything that msgpack writes, often of the sort that some field wants."""
    simple = [
        lambda: None,
        lambda: bool(rng.integers(2)),
        lambda: WHOLE[rng.integers(len(WHOLE))],
        lambda: FLOATS[rng.integers(len(FLOATS))],
        lambda: TEXTS[rng.integers(len(TEXTS))],
        lambda: rng.integers(-1, 100, size=rng.integers(9)).astype("<i4").tobytes(),
        lambda: rng.bytes(rng.integers(20)),
    ]
    nested = [
        lambda: [random_value(rng, depth + 1) for _ in range(rng.integers(3))],
        lambda: {f"k{k}": random_value(rng, depth + 1) for k in range(rng.integers(3))},
    ]
    choices = simple + nested * (depth < 2)
    return choices[rng.integers(len(choices))]()


def test_right_maps_with_wrong_values_are_read_or_refused():
    rng = np.random.default_rng(11)
    accepted = 0
    for trial in range(TRIALS):
        examples = random_messages(trial % 20)
        message = examples[trial % len(examples)]
        fields = msgpack.unpackb(encode(message)[2:])
        for name in fields:
            if rng.random() < 0.4:
                fields[name] = random_value(rng)
        if rng.random() < 0.1:
            fields[str(random_value(rng))[:40]] = random_value(rng)
        kind = KIND_OF[type(message)]
        data = bytes((VERSION, kind)) + msgpack.packb(fields)
        accepted += outcome(decode_up if kind in UP else decode_down, data, LIMITS) is not None
    assert TRIALS // 20 < accepted < TRIALS


@pytest.mark.parametrize("compress", [False, True])
@pytest.mark.parametrize("codec", ["float32", "bfloat16", "int8"])
def test_hostile_rows_are_finite_or_refused(codec, compress):
    valid = [pack(random_rows(SPECS, count, seed=count), codec, compress) for count in range(1, 9)]
    rng = np.random.default_rng(3)
    for mutate in (flipped, cut, overwritten, spliced, noise):
        for data in list(hostile(valid, mutate))[: TRIALS // 5]:
            count = int(rng.integers(10))
            found = outcome(unpack, data, count, SPECS, codec, compress)
            for spec, row in zip(SPECS, found or (), strict=found is not None):
                assert row.shape == (count, *spec.shape) and np.isfinite(row).all()
