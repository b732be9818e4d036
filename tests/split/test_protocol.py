"""Messages and rows of split decoding are decoded unchanged; any other bytes are refused."""

from __future__ import annotations

import dataclasses
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import msgpack
import numpy as np
import pytest

from moa_jax.config import Sampling
from moa_jax.split import protocol, rows
from moa_jax.split.protocol import BadMessage, decode_down, decode_up, encode, sampling_fields
from moa_jax.split.rows import LeafSpec, bytes_per_token, pack, unpack
from tests.model_folders import refusal

LIMITS = protocol.MessageLimits(
    max_tokens=64, max_nodes=9, max_rows=16, max_bytes=9000, max_stops=3, max_text=80, vocab_size=99
)
SECRET = "s3cret"
SEED = 3  # of EXAMPLES; in one, protocol.Committed has more parts to come
CODECS = ("float32", "bfloat16", "int8")
NAN = float("nan")


def random_messages(seed: int) -> list[Any]:
    """Returns one message of each kind within LIMITS."""
    rng = np.random.default_rng(seed)
    tokens = lambda most, least=1: rng.integers(
        LIMITS.vocab_size, size=rng.integers(least, most + 1)
    ).tolist()
    seq = int(rng.integers(1 << 31))
    pairing = {"target": SECRET, "layers": int(rng.integers(-3, 99)), "tokenizer": "é 中"}
    sampling = Sampling(rng.random(), 3, rng.random(), rng.random(), 1.5, seed=seq)
    prompt, drafted, name = tokens(60), tokens(LIMITS.max_nodes, 0), rng.bytes(16).hex()
    more = bool(rng.integers(2))
    return [
        protocol.Hello(f"moa-jax {seed}", pairing, CODECS[seed % 3], more),
        protocol.Open(seq, prompt, 1, more, 1, 64, tokens(3, 0), sampling_fields(sampling)),
        protocol.Resume(name, -1 if more else seq, 7),
        protocol.Verify(
            seq, drafted, [int(rng.integers(node + 1)) for node in range(len(drafted))]
        ),
        protocol.Read(seq, tokens(64)),
        protocol.Close(),
        protocol.Stream(seq),
        protocol.Welcome("moa-jax", pairing, 62, 2048, 1024, 16),
        protocol.Opened(name),
        protocol.Committed(seq, 3, 5, tokens(6, 0), "" if more else "stop", more, rng.bytes(9)),
        protocol.Resumed(seq),
        protocol.Fault("busy", f"all slots are taken; retry later, {SECRET}", more),
    ]


EXAMPLES = random_messages(SEED)


def decode(data: bytes, message: type, limits: protocol.MessageLimits = LIMITS) -> Any:
    return (decode_up if protocol.KIND_OF[message] in protocol.UP else decode_down)(data, limits)


def raw_fields(message: Any) -> dict[str, Any]:
    return msgpack.unpackb(encode(message)[2:])


def raw(message: type, fields: Any) -> bytes:
    """Returns a message that a broken or hostile peer may send."""
    return bytes((protocol.VERSION, protocol.KIND_OF[message])) + msgpack.packb(fields)


def of(message: type) -> Any:
    return next(example for example in EXAMPLES if type(example) is message)


def refused(data: Any, message: type) -> str:
    with pytest.raises(BadMessage) as error:
        decode(data, message)
    said = str(error.value)
    assert "\n" not in said and SECRET not in said
    return said


@pytest.mark.parametrize("seed", range(5))
def test_messages_survive_a_round_trip(seed):
    messages = random_messages(seed)
    assert [type(message) for message in messages] == list((protocol.UP | protocol.DOWN).values())
    for message in messages:
        again = decode(encode(message), type(message))
        assert again == message and type(again) is type(message)


def ints(*numbers: int, dtype: str = "<i4") -> bytes:
    return np.array(numbers, dtype).tobytes()


def with_sampling(**changes: Any) -> dict[str, Any]:
    return of(protocol.Open).sampling | changes


LINES = f"one\n{SECRET}"
MALFORMED: list[tuple[type, str, list[Any]]] = [  # values that a field refuses
    (protocol.Hello, "software", [None, 7, "a" * 81, LINES, f"{SECRET}\x1b[2J", b"a"]),
    (protocol.Hello, "codec", ["float16", SECRET]),
    (protocol.Hello, "pairing", [[], {"a": {}}, {"a": True}, {"a": LINES}, {f"{SECRET} b": 1}]),
    (protocol.Open, "seq", [1 << 31, -1, 1.0, "0", True, msgpack.Timestamp(1)]),
    (protocol.Open, "tokens", [b"", ints(-1), ints(5, 99), ints(*range(65)), ints(1)[:3], [1, 2]]),
    (protocol.Open, "stop_ids", [ints(1, 2, 3, 4), ints(99)]),
    (protocol.Open, "sampling", [{}, with_sampling(logit_bias=0), with_sampling(top_k=1.0)]),
    (protocol.Open, "sampling", [with_sampling(top_p=0), with_sampling(seed=1 << 32)]),
    (protocol.Open, "sampling", [with_sampling(**{name: NAN}) for name in with_sampling()]),
    (protocol.Resume, "session", ["0" * 31, "A" * 32, "0" * 32 + "\n", b"0" * 32]),
    (protocol.Resume, "known", [-1, LIMITS.max_tokens + 1]),
    (protocol.Verify, "tokens", [ints(*range(10))]),
    (protocol.Verify, "parents", [ints(9, dtype="<u2"), b"\0", ints(1, 0, 0, dtype="<u2")]),
    (protocol.Welcome, "chunk", [0, 17]),
    (protocol.Committed, "start", [65]),
    (protocol.Committed, "done", ["eos"]),
    (protocol.Fault, "code", [SECRET, ""]),
    (protocol.Fault, "text", ["\u202eabc"]),
]


@pytest.mark.parametrize("message, name, values", MALFORMED)
def test_malformed_fields_are_refused_by_their_names(message, name, values):
    for value in values:
        said = refused(raw(message, raw_fields(of(message)) | {name: value}), message)
        # Bytes that msgpack refuses have no field yet.
        assert said.startswith((f"{message.__name__}.{name} ", f"{message.__name__} is no")), value


def test_fields_that_contradict_each_other_are_refused():
    fields = raw_fields(of(protocol.Open)) | {"tokens": ints(1, 2, 3)}
    decode(raw(protocol.Open, fields | {"known": 3, "total": 3}), protocol.Open)
    for name, value in {"prompt_length": 4, "known": 4, "total": 2}.items():
        said = refused(raw(protocol.Open, fields | {name: value}), protocol.Open)
        assert f"Open.{name}" in said
    for parents in ([0, 1], [0, 1, 2, 0], [0, 2, 0]):
        broken = {"seq": 1, "tokens": ints(5, 6, 7), "parents": ints(*parents, dtype="<u2")}
        assert "Verify.parents" in refused(raw(protocol.Verify, broken), protocol.Verify)
    fields = raw_fields(of(protocol.Committed)) | {"more": True, "done": "stop"}
    assert "Committed.more" in refused(raw(protocol.Committed, fields), protocol.Committed)


@pytest.mark.parametrize("message", [type(m) for m in EXAMPLES], ids=lambda m: m.__name__)
def test_malformed_frames_are_refused(message):
    """Frames have other fields, the wrong direction, another version, or no valid form."""
    fields = raw_fields(of(message))
    for name in fields:
        less = {k: v for k, v in fields.items() if k != name}
        assert refused(raw(message, less), message) == f"{message.__name__}.{name} is missing"
    assert "does not know" in refused(raw(message, fields | {SECRET: 1}), message)
    head, body = raw(message, {})[:2], msgpack.packb(fields)
    for name, value in fields.items():
        twice = bytes((body[0] + 1,)) + body[1:] + msgpack.packb(name) + msgpack.packb(value)
        assert "msgpack map" in refused(head + twice, message)
    for broken in (b"", b"\xc0", msgpack.packb([1]), body + b"\0", body[:-1]):
        assert "msgpack map" in refused(head + broken, message)
    wrong_way = decode_down if message in protocol.UP.values() else decode_up
    assert "none of" in refusal(wrong_way, head + body, LIMITS)
    for version in (0, protocol.VERSION - 1, protocol.VERSION + 1, 255):
        assert f"version {version}," in refused(bytes((version,)) + head[1:] + body, message)
    assert "at most 9000" in refused(head + bytes(LIMITS.max_bytes), message)
    for nothing in (b"", head[:1], "text", None):
        refused(nothing, message)


# Rows. The first is what a drafter for an 8B target sends for each token: keys and values of
# cross-attention, 4 heads of 128 each.
SPECS = {
    "8B": [LeafSpec((4, 128), np.float32)] * 2,
    "uneven": [LeafSpec((2, 8), np.float32), LeafSpec((5,), np.float32)],
    "none": [],
}


def random_rows(specs: list[LeafSpec], count: int, seed: int = 0) -> list[np.ndarray]:
    rng = np.random.default_rng(seed)
    scale = lambda: np.exp(3 * rng.standard_normal())
    return [
        (scale() * rng.standard_normal((count, *spec.shape))).astype(np.float32) for spec in specs
    ]


ALL_WAYS = [
    pytest.param(specs, codec, compress, id=f"{name}-{codec}-{compress}")
    for name, specs in SPECS.items()
    for codec in CODECS
    for compress in (False, True)
]


@pytest.mark.parametrize("specs, codec, compress", ALL_WAYS)
def test_rows_survive_a_round_trip_within_the_precision_of_their_codec(specs, codec, compress):
    assert [bytes_per_token(SPECS["8B"], codec) for codec in CODECS] == [4096, 2048, 1056]
    for count in (0, 1, 7, 128):
        sent = random_rows(specs, count, seed=count)
        data = pack(sent, codec, compress)
        if not compress:
            assert len(data) == count * bytes_per_token(specs, codec)
        assert count or not data
        back = unpack(data, count, specs, codec, compress)
        assert len(back) == len(sent)
        for one, other in zip(sent, back, strict=True):
            assert other.dtype == np.float32 and other.shape == one.shape
            if codec == "float32":
                np.testing.assert_array_equal(one, other)
            elif codec == "bfloat16":
                assert np.all(np.abs(one - other) <= np.abs(one) * 2.0**-8)
            else:
                scale = np.abs(one).max(axis=-1, keepdims=True, initial=0) / 127
                assert np.all(np.abs(one - other) <= scale * (0.5 + 1e-4))


@pytest.mark.parametrize("codec", CODECS)
def test_rows_with_odd_numbers(codec):
    largest = np.finfo(np.float32).max
    row = np.array([[0, -0.0, 0], [np.inf, -np.inf, largest], [np.nan, 1, -1]], np.float32)
    spec = [LeafSpec((3,), np.float32)]
    (back,) = unpack(pack([row], codec, False), 3, spec, codec, False)
    assert not back[0].any()
    np.testing.assert_allclose(back[1], rows.LARGEST * np.array([1, -1, 1]), rtol=1e-6)
    np.testing.assert_allclose(back[2], [0, 1, -1], atol=0.5 / 127)


@pytest.mark.parametrize("specs, codec, compress", ALL_WAYS)
def test_rows_of_another_length_are_refused(specs, codec, compress):
    data = pack(random_rows(specs, 7), codec, compress)
    for wrong in (b"", data[:-1], data + b"\0", data[:8], data[4:], data * 2):
        if wrong != data:
            refusal(unpack, wrong, 7, specs, codec, compress)
    for count in (0, 6, 8, 1 << 30) if specs else ():
        refusal(unpack, data, count, specs, codec, compress)


@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_are_not_finite_are_refused(codec):
    spec = [LeafSpec((1,), np.float32)]
    for value in (np.nan, np.inf, -np.inf) + ((-1.0,) if codec == "int8" else ()):
        dtype = rows.DTYPES["float32" if codec == "int8" else codec]
        data = np.array([value], dtype).view(np.uint8).tobytes() + b"\1" * (codec == "int8")
        assert len(data) == bytes_per_token(spec, codec)
        assert "finite" in refusal(unpack, data, 1, spec, codec, False)


def peak_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """Returns the peak memory that a call allocates on top of the memory in use."""
    tracemalloc.start()
    try:
        function(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_decompression_bomb_is_refused():
    bomb, specs = zlib.compress(bytes(32 << 20), 9), SPECS["8B"]
    assert len(bomb) < 1 << 16
    assert "do not hold" in refusal(unpack, bomb, 3, specs, "bfloat16", True)
    assert peak_bytes(refusal, unpack, bomb, 3, specs, "bfloat16", True) < 1 << 17


def test_headers_that_promise_much_allocate_little():
    """Nested containers declare as many entries as the limits allow."""
    limits = dataclasses.replace(LIMITS, max_bytes=1 << 20)
    for header in (b"\xdd\x00\x01\x00\x00", b"\xdf\x00\x00\x00\x20\xa1a", b"\xc6\xff\xff\xff\xff"):
        body = header * (limits.max_bytes // len(header) - 2)
        for prefix in (b"", b"\x81\xa8sampling", b"\x81\xa6tokens"):
            data = encode(of(protocol.Open))[:2] + prefix + body
            assert peak_bytes(refusal, decode_up, data, limits) < 1 << 20
