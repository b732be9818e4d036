"""Messages and rows of split decoding: what goes out comes in, and nothing else does."""

from __future__ import annotations

import dataclasses
import tracemalloc
import zlib
from collections.abc import Callable
from typing import Any

import ml_dtypes
import msgpack
import numpy as np
import pytest

from moa_jax.config import Sampling
from moa_jax.split import protocol, rows
from moa_jax.split.protocol import (
    DOWN,
    FORMS,
    KIND_OF,
    UP,
    BadMessage,
    Close,
    Committed,
    Fault,
    Hello,
    MessageLimits,
    Open,
    Opened,
    Read,
    Resume,
    Resumed,
    Stream,
    Verify,
    Welcome,
    WrongVersion,
    decode_down,
    decode_up,
    encode,
    sampling_fields,
)
from moa_jax.split.rows import LeafSpec, bytes_per_token, pack, unpack
from tests.model_folders import refusal

LIMITS = MessageLimits(
    max_tokens=64, max_nodes=9, max_rows=16, max_bytes=9000, max_stops=3, max_text=80, vocab_size=99
)
SECRET = "s3cret"
SEED = 3  # of EXAMPLES; one whose Committed has more parts to come
CODECS = ("float32", "bfloat16", "int8")


def random_messages(seed: int) -> list[Any]:
    """One message of each kind within LIMITS."""
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
        Hello(f"moa-jax {seed}", pairing, CODECS[seed % 3], more),
        Open(seq, prompt, 1, more, 1, 64, tokens(3, 0), sampling_fields(sampling)),
        Resume(name, -1 if more else seq, 7),
        Verify(seq, drafted, [int(rng.integers(node + 1)) for node in range(len(drafted))]),
        Read(seq, tokens(64)),
        Close(),
        Stream(seq),
        Welcome("moa-jax", pairing, 62, 2048, 1024, 16),
        Opened(name),
        Committed(seq, 3, 5, tokens(6, 0), "" if more else "stop", more, rng.bytes(9)),
        Resumed(seq),
        Fault("busy", f"all slots are taken; retry later, {SECRET}", more),
    ]


EXAMPLES = random_messages(SEED)


def decode(data: bytes, message: type, limits: MessageLimits = LIMITS) -> Any:
    return (decode_up if KIND_OF[message] in UP else decode_down)(data, limits)


def raw_fields(message: Any) -> dict[str, Any]:
    return msgpack.unpackb(encode(message)[2:])


def raw(message: type, fields: Any) -> bytes:
    """What a broken or hostile peer may send."""
    return bytes((protocol.VERSION, KIND_OF[message])) + msgpack.packb(fields)


def of(message: type) -> Any:
    return next(example for example in EXAMPLES if type(example) is message)


def refused(data: Any, message: type) -> str:
    with pytest.raises(BadMessage) as error:
        decode(data, message)
    said = str(error.value)
    assert "\n" not in said and SECRET not in said
    return said


def test_every_kind_has_an_example():
    assert [type(example) for example in EXAMPLES] == [*UP.values(), *DOWN.values()]


@pytest.mark.parametrize("seed", range(20))
def test_messages_come_back(seed):
    for message in random_messages(seed):
        again = decode(encode(message), type(message))
        assert again == message and type(again) is type(message)


def test_sampling_travels_whole():
    penalties = {"presence_penalty": -0.5, "frequency_penalty": 1.5}
    sampling = Sampling(0.7, 40, 0.9, 0.01, 1.1, **penalties, seed=(1 << 32) - 1)
    message = dataclasses.replace(of(Open), sampling=sampling_fields(sampling))
    assert Sampling(**decode(encode(message), Open).sampling) == sampling
    whole = dataclasses.replace(of(Open), sampling=sampling_fields(Sampling()) | {"temperature": 1})
    assert type(decode(encode(whole), Open).sampling["temperature"]) is float
    assert "logit_bias" in refusal(sampling_fields, Sampling(logit_bias=((1, 2.0),)))


def test_numpy_tokens_travel():
    message = Read(7, np.arange(3))
    assert decode(encode(message), Read) == Read(7, [0, 1, 2])


# One value of each sort that msgpack knows. What a field takes of these stands below.
SORTS = {
    "nil": None,
    "true": True,
    "negative": -7,
    "huge": 1 << 63,
    "float": 1.5,
    "nan": float("nan"),
    "control": f"{SECRET}\x1b[2J",
    "lines": f"one\n{SECRET}",
    "long text": SECRET * 20,
    "binary": SECRET.encode()[:5],
    "no list": [],
    "list": [1, 2],
    "list of texts": [SECRET],
    "map": {"a": 1},
    "deep map": {"a": {"b": {}}},
    "ext": msgpack.ExtType(5, b""),
    "timestamp": msgpack.Timestamp(1),
}
FLAGS = ("compress", "root_given", "more", "fatal")
TAKES = dict.fromkeys(FLAGS, "true") | {"rows": "binary", "pairing": "map"}


def ints(*numbers: int, dtype: str = "<i4") -> bytes:
    return np.array(numbers, dtype).tobytes()


def with_sampling(**changes: Any) -> dict[str, Any]:
    return of(Open).sampling | changes


BROKEN: list[tuple[type, str, Any]] = [
    (Hello, "codec", "float16"),
    (Hello, "codec", SECRET),
    (Hello, "compress", 1),
    (Hello, "pairing", {"a": True}),
    (Hello, "pairing", {"a": 1.5}),
    (Hello, "pairing", {"a": f"{SECRET}\n"}),
    (Hello, "pairing", {f"{SECRET} {SECRET}": 1}),
    (Hello, "pairing", {SECRET.encode(): 1}),
    (Hello, "pairing", {f"a{k}": k for k in range(33)}),
    (Open, "seq", 1 << 31),
    (Open, "tokens", b""),
    (Open, "tokens", ints(-1)),
    (Open, "tokens", ints(5, 99)),
    (Open, "tokens", ints(*range(65))),
    (Open, "tokens", ints(1)[:3]),
    (Open, "tokens", [1, 2]),
    (Open, "prompt_length", 0),
    (Open, "prompt_length", 65),
    (Open, "root_given", 0),
    (Open, "known", 64),
    (Open, "known", -1),
    (Open, "total", 65),
    (Open, "total", 0),
    (Open, "total", True),
    (Open, "stop_ids", ints(1, 2, 3, 4)),
    (Open, "stop_ids", ints(99)),
    (Open, "sampling", {}),
    (Open, "sampling", with_sampling(logit_bias=0)),
    (Open, "sampling", {k: v for k, v in with_sampling().items() if k != "seed"}),
    *(
        (Open, "sampling", with_sampling(**{name: value}))
        for name in with_sampling()
        for value in (None, True, float("nan"), float("inf"), -3, -2.5, SECRET, 1 << 63)
    ),
    (Open, "sampling", with_sampling(top_k=1.0)),
    (Open, "sampling", with_sampling(top_k=1 << 31)),
    (Open, "sampling", with_sampling(top_p=0)),
    (Open, "sampling", with_sampling(seed=1 << 32)),
    (Resume, "session", "0" * 31),
    (Resume, "session", "0" * 33),
    (Resume, "session", "A" * 32),
    (Resume, "session", "0" * 32 + "\n"),
    (Resume, "session", b"0" * 32),
    (Resume, "seq", -2),
    (Resume, "known", -1),
    (Resume, "known", LIMITS.max_tokens + 1),
    (Verify, "tokens", ints(*range(10))),
    (Verify, "parents", ints(9, dtype="<u2")),
    (Verify, "parents", b"\0"),
    (Read, "tokens", b""),
    (Read, "seq", "0"),
    (Stream, "seq", -1),
    (Welcome, "chunk", 0),
    (Welcome, "chunk", 17),
    (Welcome, "max_tokens", 0),
    (Welcome, "max_prompt", 0),
    (Opened, "session", SECRET),
    (Committed, "start", 65),
    (Committed, "count", 17),
    (Committed, "done", "eos"),
    (Committed, "rows", SECRET),
    (Committed, "tokens", ints(-1)),
    (Resumed, "seq", -2),
    (Fault, "code", SECRET),
    (Fault, "code", ""),
    (Fault, "text", "a" * 81),
    (Fault, "text", "\u202eabc"),
    (Fault, "fatal", 0),
]


@pytest.mark.parametrize("message", [type(m) for m in EXAMPLES], ids=lambda m: m.__name__)
def test_fields_of_another_sort_are_refused(message):
    fields = raw_fields(of(message))
    for name in FORMS[message]:
        for sort, value in SORTS.items():
            data = raw(message, fields | {name: value})
            if sort == TAKES.get(name):
                decode(data, message)
            else:
                said = refused(data, message)
                # What msgpack refuses has no field yet; what it reads has one.
                assert said.startswith((f"{message.__name__}.{name} ", f"{message.__name__} is no"))


@pytest.mark.parametrize("message, name, value", BROKEN)
def test_fields_out_of_range_are_refused(message, name, value):
    said = refused(raw(message, raw_fields(of(message)) | {name: value}), message)
    assert said.startswith((f"{message.__name__}.{name} ", f"{message.__name__} is no")), said


def test_fields_that_contradict_each_other_are_refused():
    fields = raw_fields(of(Open)) | {"tokens": ints(1, 2, 3)}
    decode(raw(Open, fields | {"known": 3, "total": 3}), Open)
    assert "Open.prompt_length" in refused(raw(Open, fields | {"prompt_length": 4}), Open)
    assert "Open.known" in refused(raw(Open, fields | {"known": 4}), Open)
    assert "Open.total" in refused(raw(Open, fields | {"total": 2}), Open)
    for parents in ([0, 1], [0, 1, 2, 0], [0, 2, 0], [1, 0, 0], [0, 1, 3]):
        broken = {"seq": 1, "tokens": ints(5, 6, 7), "parents": ints(*parents, dtype="<u2")}
        assert "Verify.parents" in refused(raw(Verify, broken), Verify)
    decode(raw(Verify, broken | {"parents": ints(0, 1, 2, dtype="<u2")}), Verify)
    fields = raw_fields(of(Committed)) | {"more": True, "done": ""}
    for tokens in (b"", ints(1)):  # those of a stream come part by part
        decode(raw(Committed, fields | {"tokens": tokens}), Committed)
    assert "Committed.more" in refused(raw(Committed, fields | {"done": "stop"}), Committed)


@pytest.mark.parametrize("message", [type(m) for m in EXAMPLES], ids=lambda m: m.__name__)
def test_just_the_known_fields_may_come(message):
    fields = raw_fields(of(message))
    for name in fields:
        less = {k: v for k, v in fields.items() if k != name}
        assert refused(raw(message, less), message) == f"{message.__name__}.{name} is missing"
    assert "does not know" in refused(raw(message, fields | {SECRET: 1}), message)
    body = msgpack.packb(fields)
    for name, value in fields.items():
        twice = bytes((body[0] + 1,)) + body[1:] + msgpack.packb(name) + msgpack.packb(value)
        assert "msgpack map" in refused(raw(message, {})[:2] + twice, message)
    for broken in (b"", b"\xc0", msgpack.packb([1]), body + b"\0", body[:-1]):
        assert "msgpack map" in refused(raw(message, {})[:2] + broken, message)


def test_each_side_reads_the_other_side_only():
    for message in EXAMPLES:
        wrong_way = decode_down if type(message) in UP.values() else decode_up
        assert "none of" in refusal(wrong_way, encode(message), LIMITS)
    for kind in set(range(256)) - UP.keys():
        assert "none of Hello, Open" in refusal(
            decode_up, bytes((protocol.VERSION, kind, 0x80)), LIMITS
        )


def test_another_version_is_told_from_a_broken_message():
    for version in (0, protocol.VERSION - 1, protocol.VERSION + 1, 255):
        with pytest.raises(
            WrongVersion, match=rf"version {version}, .* version {protocol.VERSION};"
        ) as error:
            decode_up(bytes((version,)) + encode(Close())[1:], LIMITS)
        assert error.value.theirs == version


@pytest.mark.parametrize("data", [b"", bytes((protocol.VERSION,)), "text", None])
def test_what_is_no_message_at_all(data):
    refused(data, Close)


def test_an_oversized_message_is_refused_before_it_is_read(monkeypatch):
    big = dataclasses.replace(of(Committed), rows=bytes(LIMITS.max_bytes))
    monkeypatch.setattr(msgpack, "unpackb", lambda *_, **__: pytest.fail("was read"))
    assert "at most 9000" in refused(encode(big), Committed)
    assert "at most 9000" in refused(b"\xff" * 9001, Committed)


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


def test_bytes_of_one_token():
    assert [bytes_per_token(SPECS["8B"], codec) for codec in CODECS] == [4096, 2048, 1056]
    assert [bytes_per_token(SPECS["uneven"], codec) for codec in CODECS] == [84, 42, 21 + 12]


@pytest.mark.parametrize("specs, codec, compress", ALL_WAYS)
def test_rows_come_back_as_exactly_as_their_codec_can(specs, codec, compress):
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


def test_rows_in_bfloat16_lose_nothing_as_bfloat16():
    (row,) = random_rows(SPECS["8B"][:1], 3)
    row = row.astype(ml_dtypes.bfloat16)
    (back,) = unpack(pack([row], "bfloat16", True), 3, SPECS["8B"][:1], "bfloat16", True)
    np.testing.assert_array_equal(back, row.astype(np.float32))


@pytest.mark.parametrize("codec", CODECS)
def test_rows_with_odd_numbers(codec):
    largest, least = np.finfo(np.float32).max, np.finfo(np.float32).smallest_subnormal
    row = np.array(
        [
            [0, 0, 0, 0],
            [0, -0.0, least, -least],
            [np.inf, -np.inf, largest, -largest],
            [np.nan, 1, -1, 0.5],
        ],
        np.float32,
    )
    spec = [LeafSpec((4,), np.float32)]
    (back,) = unpack(pack([row], codec, False), 4, spec, codec, False)
    assert np.isfinite(back).all()
    assert not back[0].any() and np.abs(back[1]).max() <= least
    np.testing.assert_allclose(back[2], rows.LARGEST * np.array([1, -1, 1, -1]), rtol=1e-6)
    np.testing.assert_allclose(back[3], [0, 1, -1, 0.5], atol=0.5 / 127)


@pytest.mark.parametrize("specs, codec, compress", ALL_WAYS)
def test_rows_of_another_length_are_refused(specs, codec, compress):
    data = pack(random_rows(specs, 7), codec, compress)
    for wrong in (b"", data[:-1], data + b"\0", data[:8], data[4:], data * 2):
        if wrong != data:
            refusal(unpack, wrong, 7, specs, codec, compress)
    if specs:
        for count in (0, 6, 8, 1 << 30):
            refusal(unpack, data, count, specs, codec, compress)
        for other in (specs[:1], [*specs, specs[0]]):
            refusal(unpack, data, 7, other, codec, compress)


@pytest.mark.parametrize("codec", CODECS)
def test_rows_that_are_not_finite_are_refused(codec):
    spec = [LeafSpec((1,), np.float32)]
    for value in (np.nan, np.inf, -np.inf) + ((-1.0,) if codec == "int8" else ()):
        dtype = rows.DTYPES["float32" if codec == "int8" else codec]
        data = np.array([value], dtype).view(np.uint8).tobytes() + b"\1" * (codec == "int8")
        assert len(data) == bytes_per_token(spec, codec)
        assert "finite" in refusal(unpack, data, 1, spec, codec, False)


def peak_bytes(function: Callable[..., Any], *arguments: Any) -> int:
    """The most memory that a call allocated on top of what was there."""
    tracemalloc.start()
    try:
        function(*arguments)
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_decompression_bomb_never_goes_off():
    bomb, specs = zlib.compress(bytes(32 << 20), 9), SPECS["8B"]
    assert len(bomb) < 1 << 16
    assert "do not hold" in refusal(unpack, bomb, 3, specs, "bfloat16", True)
    assert peak_bytes(refusal, unpack, bomb, 3, specs, "bfloat16", True) < 1 << 17


def test_headers_that_promise_much_allocate_little():
    """Containers in containers, each of them said to hold all that the limits allow."""
    limits = MessageLimits(max_tokens=1 << 20, max_nodes=64, max_rows=128, max_bytes=1 << 20)
    for header in (b"\xdd\x00\x01\x00\x00", b"\xdf\x00\x00\x00\x20\xa1a", b"\xde\x00\x01\xa1a"):
        body = header * (limits.max_bytes // len(header) - 2)
        for prefix in (b"", b"\x81\xa8sampling", b"\x81\xa6tokens"):
            data = encode(of(Open))[:2] + prefix + body
            assert peak_bytes(refusal, decode_up, data, limits) < 1 << 20
    for header in (b"\xc6\xff\xff\xff\xff", b"\xdb\xff\xff\xff\xff", b"\xc9\xff\xff\xff\xff\x01"):
        data = encode(of(Open))[:2] + b"\x81\xa6tokens" + header
        assert peak_bytes(refusal, decode_up, data, limits) < 1 << 14
