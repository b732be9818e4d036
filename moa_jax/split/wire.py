"""Messages of client and server as bytes, and back with every field checked.

    byte 0  protocol version    byte 1  kind    rest  one msgpack map, names of fields -> values

Lists of whole numbers travel as little-endian binary (tokens int32, parents uint16), so that no
message holds an array: what a reader allocates is bounded by the bytes it was sent, whatever
their headers promise. A message that is refused is named with its field, never with its content.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, get_args, get_type_hints

import msgpack
import numpy as np

from moa_jax.config import Sampling
from moa_jax.errors import InputError

VERSION = 1
Codec = Literal["float32", "bfloat16", "int8"]
Done = Literal["", "stop", "length"]
FaultCode = Literal[
    "version", "pairing", "token", "busy", "too_long", "state", "message", "gone", "draining"
]
MOST_ENTRIES = 32  # of any map: no message has more fields
LARGEST = (1 << 31) - 1


class BadMessage(InputError):
    """Bytes that are no message of this protocol; one line, which never shows what they hold."""


class WrongVersion(BadMessage):
    """A message of another version of the protocol."""

    def __init__(self, theirs: int) -> None:
        self.theirs = theirs
        super().__init__(
            f"the other side speaks protocol version {theirs}, this one version {VERSION}: "
            "update the older of the two"
        )


@dataclasses.dataclass(frozen=True)
class MessageLimits:
    """The most that one message may hold; what a side accepts, not what the protocol allows."""

    max_tokens: int  # of a session
    max_nodes: int  # of a draft, the root left out; below 2**16
    max_rows: int  # of one Committed, at least the server's chunk
    max_bytes: int  # of a whole message
    max_stops: int = 64
    max_text: int = 1000  # characters of any text
    vocab_size: int = 1 << 31  # token ids are below it


class Form(NamedTuple):
    """How one field travels; `read` raises BadMessage with what follows the field's name."""

    read: Callable[[Any, MessageLimits], Any]
    write: Callable[[Any], Any] = lambda value: value


def _whole(low: int, limit: str | int = LARGEST) -> Form:
    """A whole number from `low` to a number, or to the field of MessageLimits of that name."""

    def read(value: Any, limits: MessageLimits) -> int:
        high = getattr(limits, limit) if isinstance(limit, str) else limit
        if type(value) is not int or not low <= value <= high:
            raise BadMessage(f"is no whole number from {low} to {high}")
        return value

    return Form(read)


def _numbers(dtype: str, bound: str, least: int, most: str) -> Form:
    """A list of whole numbers, sent as binary of one dtype.

    Each is at least 0 and below the limit named `bound`. The list has at least `least` entries and
    at most as many as the limit named `most` allows.
    """
    size = np.dtype(dtype).itemsize

    def read(value: Any, limits: MessageLimits) -> list[int]:
        high = getattr(limits, most)
        if type(value) is not bytes or len(value) % size:
            raise BadMessage(f"is no binary of {size} bytes a number")
        if not least <= len(value) // size <= high:
            raise BadMessage(f"has {len(value) // size} entries: from {least} to {high} may come")
        numbers = np.frombuffer(value, dtype)
        if numbers.size and not 0 <= numbers.min() <= numbers.max() < getattr(limits, bound):
            raise BadMessage(f"holds a number that is not from 0 to below {getattr(limits, bound)}")
        return numbers.tolist()

    return Form(read, lambda value: np.asarray(value, dtype).tobytes())


def _read_flag(value: Any, limits: MessageLimits) -> bool:
    if type(value) is not bool:
        raise BadMessage("is neither true nor false")
    return value


def _read_text(value: Any, limits: MessageLimits) -> str:
    # Texts of the other side end up in terminals and logs: no control characters, one line.
    if type(value) is not str or len(value) > limits.max_text or not value.isprintable():
        raise BadMessage(f"is no line of at most {limits.max_text} printable characters")
    return value


def _read_session(value: Any, limits: MessageLimits) -> str:
    if type(value) is not str or not re.fullmatch("[0-9a-f]{32}", value):
        raise BadMessage("is not 32 hex digits")
    return value


def _one_of(choice: Any) -> Form:
    names = get_args(choice)

    def read(value: Any, limits: MessageLimits) -> str:
        if type(value) is not str or value not in names:
            raise BadMessage(f"is none of {', '.join(filter(None, names))}")
        return value

    return Form(read)


def _read_binary(value: Any, limits: MessageLimits) -> bytes:
    if type(value) is not bytes:
        raise BadMessage("is no binary")
    return value


def _read_pairing(value: Any, limits: MessageLimits) -> dict[str, str | int]:
    if type(value) is not dict:
        raise BadMessage("is no map")
    for name, entry in value.items():
        if type(name) is not str or not re.fullmatch("[a-z0-9_]{1,64}", name):
            raise BadMessage("has an entry whose name is not 1 to 64 of a-z, 0-9 and _")
        if type(entry) is not int:
            try:
                _read_text(entry, limits)
            except BadMessage as error:
                raise BadMessage(f"has an entry that is no whole number and {error}") from None
    return value


SAMPLING_TYPES = {
    name: kind for name, kind in get_type_hints(Sampling).items() if name != "logit_bias"
}


def sampling_fields(sampling: Sampling) -> dict[str, float]:
    """`Open.sampling`, from which `Sampling(**fields)` is the same again."""
    if sampling.logit_bias:
        raise InputError("logit_bias does not travel to a server: leave it out, or decode locally")
    return {name: kind(getattr(sampling, name)) for name, kind in SAMPLING_TYPES.items()}


def _read_sampling(value: Any, limits: MessageLimits) -> dict[str, float]:
    if type(value) is not dict or value.keys() != SAMPLING_TYPES.keys():
        raise BadMessage(f"is no map with just {', '.join(SAMPLING_TYPES)}")
    for name, kind in SAMPLING_TYPES.items():
        entry = value[name]
        if type(entry) not in (int, kind):
            raise BadMessage(f"has a {name} that is no {kind.__name__}")
        try:
            Sampling(**{name: entry})  # refuses what is not finite, too
        except InputError:  # whose line shows the value
            raise BadMessage(f"has a {name} out of range") from None
        if kind is int and name != "seed" and entry > LARGEST:
            raise BadMessage(f"has a {name} above {LARGEST}")
    return {name: kind(value[name]) for name, kind in SAMPLING_TYPES.items()}


Seq = Annotated[int, _whole(0)]
LastSeq = Annotated[int, _whole(-1)]
Flag = Annotated[bool, Form(_read_flag)]
Text = Annotated[str, Form(_read_text)]
SessionId = Annotated[str, Form(_read_session)]
Pairing = Annotated[dict[str, str | int], Form(_read_pairing)]
Tokens = Annotated[list[int], _numbers("<i4", "vocab_size", 1, "max_tokens")]
MaybeTokens = Annotated[list[int], _numbers("<i4", "vocab_size", 0, "max_tokens")]


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first message: who asks, for which pair, and how rows shall come."""

    software: Text
    pairing: Pairing
    codec: Annotated[Codec, _one_of(Codec)]
    compress: Flag


@dataclasses.dataclass(frozen=True)
class Open:
    """Start a session, or start it again from what was committed.

    `tokens` is the prompt (root_given False: the server picks the first token), or the prompt and
    all committed tokens, the last one the root. Rows of the first `known` tokens are not sent.
    """

    seq: Seq
    tokens: Tokens
    root_given: Flag
    known: Annotated[int, _whole(0, "max_tokens")]
    total: Annotated[int, _whole(1, "max_tokens")]  # most tokens that the session may hold
    stop_ids: Annotated[list[int], _numbers("<i4", "vocab_size", 0, "max_stops")]
    sampling: Annotated[dict[str, float], Form(_read_sampling)]

    def __post_init__(self) -> None:
        if self.known > len(self.tokens):
            raise BadMessage(f"Open.known is above its {len(self.tokens)} tokens")
        if self.total < len(self.tokens):
            raise BadMessage(f"Open.total is below its {len(self.tokens)} tokens")


@dataclasses.dataclass(frozen=True)
class Resume:
    """Go on with a session after a lost connection; -1 says that no reply was seen.

    Of the reply that was missed, parts whose rows all are among the first `known` do not come.
    """

    session: SessionId
    seq: LastSeq  # of the last reply seen
    known: Annotated[int, _whole(0, "max_tokens")] = 0


@dataclasses.dataclass(frozen=True)
class Verify:
    """Drafted nodes, the root left out; `parents` counts nodes with the root as 0."""

    seq: Seq
    tokens: Annotated[list[int], _numbers("<i4", "vocab_size", 0, "max_nodes")]
    parents: Annotated[list[int], _numbers("<u2", "max_nodes", 0, "max_nodes")]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens):
            raise BadMessage("Verify.parents has not one entry for each of its tokens")
        if any(not 0 <= parent <= index for index, parent in enumerate(self.parents)):
            raise BadMessage("Verify.parents names a parent that does not come before its child")


@dataclasses.dataclass(frozen=True)
class Read:
    """Commit these tokens as they are; the last one becomes the root."""

    seq: Seq
    tokens: Tokens


@dataclasses.dataclass(frozen=True)
class Close:
    """The session is over, its slot is free."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """The target goes on alone to the end, as an API does: tokens come without being asked for."""

    seq: Seq


@dataclasses.dataclass(frozen=True)
class Welcome:
    """The answer to Hello: the server's own pairing and limits."""

    software: Text
    pairing: Pairing
    max_nodes: Annotated[int, _whole(0)]
    max_tokens: Annotated[int, _whole(1)]  # of a session, its prompt included
    max_prompt: Annotated[int, _whole(1)]
    chunk: Annotated[int, _whole(1, "max_rows")]  # most rows of one Committed


@dataclasses.dataclass(frozen=True)
class Opened:
    """The name under which a session can be resumed: 32 hex digits, unguessable."""

    session: SessionId


@dataclasses.dataclass(frozen=True)
class Committed:
    """What was committed, and rows of tokens start to start + count - 1.

    The last of `tokens` is the new root. Further parts of the same reply follow where `more` is
    true; `done` comes with the last part, and so do tokens and the row before the root, but for
    those of a Stream: there each part has tokens, which stand behind row `start`, and no rows.
    """

    seq: Seq
    start: Annotated[int, _whole(0, "max_tokens")]
    count: Annotated[int, _whole(0, "max_rows")]
    tokens: MaybeTokens
    done: Annotated[Done, _one_of(Done)]
    more: Flag
    rows: Annotated[bytes, Form(_read_binary)]

    def __post_init__(self) -> None:
        if self.more and self.done:
            raise BadMessage("Committed.more is true with an end, which comes last")


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The session is there; the reply that the client missed, if any, follows."""

    seq: LastSeq  # of the server's last reply


@dataclasses.dataclass(frozen=True)
class Fault:
    """Why a request was refused; after a fatal one the server closes the connection."""

    code: Annotated[FaultCode, _one_of(FaultCode)]
    text: Text
    fatal: Flag


Up = Hello | Open | Resume | Verify | Read | Close | Stream
Down = Welcome | Opened | Committed | Resumed | Fault
# Numbers of kinds never change and are never used again.
UP: dict[int, type] = {
    1: Hello,
    2: Open,
    3: Resume,
    4: Verify,
    5: Read,
    6: Close,
    7: Stream,
}
DOWN: dict[int, type] = {65: Welcome, 66: Opened, 67: Committed, 68: Resumed, 69: Fault}
KIND_OF = {message: kind for kind, message in (UP | DOWN).items()}
FORMS: dict[type, dict[str, Form]] = {
    message: {
        name: hint.__metadata__[0]
        for name, hint in get_type_hints(message, include_extras=True).items()
    }
    for message in KIND_OF
}


def encode(message: Up | Down) -> bytes:
    """A message as bytes; the other side checks it with its own limits."""
    kind = type(message)
    fields = {name: form.write(getattr(message, name)) for name, form in FORMS[kind].items()}
    return bytes((VERSION, KIND_OF[kind])) + msgpack.packb(fields)


def decode_up(data: bytes, limits: MessageLimits) -> Up:
    """A client's message, for the server; BadMessage or WrongVersion where it is none."""
    return _decode(data, limits, UP)


def decode_down(data: bytes, limits: MessageLimits) -> Down:
    """A server's message, for the client; BadMessage or WrongVersion where it is none."""
    return _decode(data, limits, DOWN)


def _decode(data: bytes, limits: MessageLimits, kinds: dict[int, type]) -> Any:
    if type(data) is not bytes:
        raise BadMessage("a text message came: only binary ones are read")
    if len(data) > limits.max_bytes:
        raise BadMessage(f"a message of {len(data)} bytes: at most {limits.max_bytes} may come")
    if not data:
        raise BadMessage("an empty message: at least a version and a kind must come")
    if data[0] != VERSION:
        raise WrongVersion(data[0])
    if len(data) < 2 or data[1] not in kinds:
        raise BadMessage(f"a message that is none of {_names(kinds.values())}")
    kind = kinds[data[1]]
    fields, forms = _unpacked(kind, memoryview(data)[2:], limits), FORMS[kind]
    if fields.keys() - forms.keys():
        raise BadMessage(f"{kind.__name__} has a field that this version does not know")
    for name in forms:
        if name not in fields:
            raise BadMessage(f"{kind.__name__}.{name} is missing")
        try:
            fields[name] = forms[name].read(fields[name], limits)
        except BadMessage as error:
            raise BadMessage(f"{kind.__name__}.{name} {error}") from None
    return kind(**fields)


def _names(kinds: Any) -> str:
    return ", ".join(kind.__name__ for kind in kinds)


def _unpacked(kind: type, data: memoryview, limits: MessageLimits) -> dict[Any, Any]:
    """The map of a message, its values not checked yet."""
    try:
        fields = msgpack.unpackb(
            data,
            object_pairs_hook=_map_of,
            max_map_len=MOST_ENTRIES,
            max_array_len=0,
            max_ext_len=0,
            max_str_len=4 * limits.max_text,  # UTF-8 bytes; `read` counts characters
            max_bin_len=limits.max_bytes,
        )
    except (ValueError, msgpack.UnpackException):
        fields = None
    if type(fields) is not dict:
        raise BadMessage(f"{kind.__name__} is no msgpack map within the limits")
    return fields


def _map_of(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map none of whose names stands twice."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name stands twice")
    return fields
