"""The protocol: messages as bytes, and back with every field checked.

    byte 0  protocol version    byte 1  kind    rest  one msgpack map, names of fields -> values

Lists of whole numbers are sent as little-endian binary (tokens int32, parents uint16), and no
message holds a msgpack array. So a reader never allocates more than the bytes that it was sent,
whatever their headers promise. An error names a message and its field, but never shows its content.
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

VERSION = 2
Codec = Literal["float32", "bfloat16", "int8"]
Done = Literal["", "stop", "length"]
FaultCode = Literal[
    "version",
    "pairing",
    "token",
    "busy",
    "too_long",
    "state",
    "message",
    "gone",
    "draining",
    "not_finite",
]
MOST_ENTRIES = 32  # of any map; no message has more fields
LARGEST = (1 << 31) - 1


class BadMessage(InputError):
    """Bytes that are not a message of this protocol; its one line never shows their content."""


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
    """How much one message may hold: what one side accepts, not what the protocol allows."""

    max_tokens: int  # of a session
    max_nodes: int  # of a draft, the root left out; below 2**16
    max_rows: int  # of one Committed, at least the server's chunk
    max_bytes: int  # of a whole message
    max_stops: int = 64
    max_text: int = 1000  # characters of any text
    vocab_size: int = 1 << 31  # token ids are below it


class Form(NamedTuple):
    """How one field is sent and checked.

    `read` raises BadMessage; its text is the end of a line that begins with the field's name.
    """

    read: Callable[[Any, MessageLimits], Any]
    write: Callable[[Any], Any] = lambda value: value


def _whole(low: int, limit: str | int = LARGEST) -> Form:
    """A whole number from `low` to `limit`, which is a number or the name of a limit."""

    def read(value: Any, limits: MessageLimits) -> int:
        high = getattr(limits, limit) if isinstance(limit, str) else limit
        if type(value) is not int or not low <= value <= high:
            raise BadMessage(f"is not a whole number from {low} to {high}")
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
            raise BadMessage(f"is not binary of {size} bytes a number")
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
    # The text may be shown in a terminal or a log, so it has one line and no control characters.
    if type(value) is not str or len(value) > limits.max_text or not value.isprintable():
        raise BadMessage(f"is not a line of at most {limits.max_text} printable characters")
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
        raise BadMessage("is not binary")
    return value


def _read_pairing(value: Any, limits: MessageLimits) -> dict[str, str | int]:
    if type(value) is not dict:
        raise BadMessage("is not a map")
    for name, entry in value.items():
        if type(name) is not str or not re.fullmatch("[a-z0-9_]{1,64}", name):
            raise BadMessage("has an entry whose name is not 1 to 64 of a-z, 0-9 and _")
        if type(entry) is not int:
            try:
                _read_text(entry, limits)
            except BadMessage as error:
                raise BadMessage(f"has an entry that is not a whole number and {error}") from None
    return value


SAMPLING_TYPES = {
    name: kind for name, kind in get_type_hints(Sampling).items() if name != "logit_bias"
}


def sampling_fields(sampling: Sampling) -> dict[str, float]:
    """The field `Open.sampling`; `Sampling(**fields)` makes the same settings again.

    Raises InputError for settings that have no field.
    """
    if sampling.logit_bias:
        raise InputError("logit_bias cannot be sent to a server: leave it out, or decode locally")
    return {name: kind(getattr(sampling, name)) for name, kind in SAMPLING_TYPES.items()}


def _read_sampling(value: Any, limits: MessageLimits) -> dict[str, float]:
    if type(value) is not dict or value.keys() != SAMPLING_TYPES.keys():
        raise BadMessage(f"is not a map with just {', '.join(SAMPLING_TYPES)}")
    for name, kind in SAMPLING_TYPES.items():
        entry = value[name]
        if type(entry) not in (int, kind):
            raise BadMessage(f"has a {name} that is not of type {kind.__name__}")
        try:
            Sampling(**{name: entry})  # also refuses numbers that are not finite
        except InputError:  # its line shows the value, which ours must not
            raise BadMessage(f"has a {name} out of range") from None
        if entry < 0 and name == "seed":  # the client has drawn it
            raise BadMessage(f"has a {name} out of range")
        if kind is int and name != "seed" and entry > LARGEST:
            raise BadMessage(f"has a {name} above {LARGEST}")
    return {name: kind(value[name]) for name, kind in SAMPLING_TYPES.items()}


Seq = Annotated[int, _whole(0)]
LastSeq = Annotated[int, _whole(-1)]
Flag = Annotated[bool, Form(_read_flag)]
WireText = Annotated[str, Form(_read_text)]
SessionId = Annotated[str, Form(_read_session)]
Pairing = Annotated[dict[str, str | int], Form(_read_pairing)]
Tokens = Annotated[list[int], _numbers("<i4", "vocab_size", 1, "max_tokens")]
MaybeTokens = Annotated[list[int], _numbers("<i4", "vocab_size", 0, "max_tokens")]


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first message: who the client is, its pair of models, and how it wants rows encoded."""

    software: WireText
    pairing: Pairing
    codec: Annotated[Codec, _one_of(Codec)]
    compress: Flag


@dataclasses.dataclass(frozen=True)
class Open:
    """Starts a session, or starts it again from its committed tokens.

    Without `root_given`, `tokens` are the prompt, and the server picks the first token. With it
    they are the prompt and all committed tokens, and the last one is the root. Rows of the first
    `known` tokens are not sent.
    """

    seq: Seq
    tokens: Tokens
    prompt_length: Annotated[int, _whole(1, "max_tokens")]  # of these: some penalties leave them
    root_given: Flag
    known: Annotated[int, _whole(0, "max_tokens")]
    total: Annotated[int, _whole(1, "max_tokens")]  # most tokens that the session may hold
    stop_ids: Annotated[list[int], _numbers("<i4", "vocab_size", 0, "max_stops")]
    sampling: Annotated[dict[str, float], Form(_read_sampling)]

    def __post_init__(self) -> None:
        if self.prompt_length > len(self.tokens):
            raise BadMessage(f"Open.prompt_length is above its {len(self.tokens)} tokens")
        if self.known > len(self.tokens):
            raise BadMessage(f"Open.known is above its {len(self.tokens)} tokens")
        if self.total < len(self.tokens):
            raise BadMessage(f"Open.total is below its {len(self.tokens)} tokens")


@dataclasses.dataclass(frozen=True)
class Resume:
    """Goes on with a session after a lost connection.

    The server sends the last reply again if it was missed, but leaves out parts that hold only
    rows of the first `known` tokens.
    """

    session: SessionId
    seq: LastSeq  # of the last reply seen; -1 for none
    known: Annotated[int, _whole(0, "max_tokens")] = 0


@dataclasses.dataclass(frozen=True)
class Verify:
    """Has the target verify a draft.

    `tokens` leave the root out. `parents` are indices of nodes: the root is 0, tokens[0] is 1.
    """

    seq: Seq
    tokens: Annotated[list[int], _numbers("<i4", "vocab_size", 0, "max_nodes")]
    parents: Annotated[list[int], _numbers("<u2", "max_nodes", 0, "max_nodes")]

    def __post_init__(self) -> None:
        if len(self.parents) != len(self.tokens):
            raise BadMessage("Verify.parents does not have one entry for each token")
        if any(not 0 <= parent <= index for index, parent in enumerate(self.parents)):
            raise BadMessage("Verify.parents names a parent that does not come before its child")


@dataclasses.dataclass(frozen=True)
class Read:
    """Commits these tokens as they are; the last one becomes the root."""

    seq: Seq
    tokens: Tokens


@dataclasses.dataclass(frozen=True)
class Close:
    """Ends the session and frees its slot."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """Has the target write the rest alone, as an API does; each token comes when it is ready."""

    seq: Seq


@dataclasses.dataclass(frozen=True)
class Welcome:
    """The reply to Hello: the server's own pairing and limits."""

    software: WireText
    pairing: Pairing
    max_nodes: Annotated[int, _whole(0)]
    max_tokens: Annotated[int, _whole(1)]  # of a session, its prompt included
    max_prompt: Annotated[int, _whole(1)]
    chunk: Annotated[int, _whole(1, "max_rows")]  # most rows in one message


@dataclasses.dataclass(frozen=True)
class Opened:
    """A session has started; with its name, 32 random hex digits, it can be resumed."""

    session: SessionId


@dataclasses.dataclass(frozen=True)
class Committed:
    """Tokens that were committed, and the rows of tokens start to start + count - 1.

    The last of `tokens` is the new root. If `more` is true, further parts of the reply follow. Only
    the last part has tokens and `done`. In a Stream every part has tokens, which come after token
    `start`, and none has rows.
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
            raise BadMessage("Committed.more is true although the answer ends")


@dataclasses.dataclass(frozen=True)
class Resumed:
    """The session goes on; the reply that the client missed follows, if it missed one."""

    seq: LastSeq  # of the server's last reply


@dataclasses.dataclass(frozen=True)
class Fault:
    """A request was refused, and why; after a fatal Fault the server closes the connection."""

    code: Annotated[FaultCode, _one_of(FaultCode)]
    text: WireText
    fatal: Flag


Up = Hello | Open | Resume | Verify | Read | Close | Stream
Down = Welcome | Opened | Committed | Resumed | Fault
# A number never changes its meaning, not even after its message is gone.
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
    """A message as bytes; the receiver checks it."""
    kind = type(message)
    fields = {name: form.write(getattr(message, name)) for name, form in FORMS[kind].items()}
    return bytes((VERSION, KIND_OF[kind])) + msgpack.packb(fields)


def decode_up(data: bytes, limits: MessageLimits) -> Up:
    """Decodes a client's message; raises BadMessage or WrongVersion."""
    return _decode(data, limits, UP)


def decode_down(data: bytes, limits: MessageLimits) -> Down:
    """Decodes a server's message; raises BadMessage or WrongVersion."""
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
        names = ", ".join(kind.__name__ for kind in kinds.values())
        raise BadMessage(f"a message that is none of {names}")
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


def _unpacked(kind: type, data: memoryview, limits: MessageLimits) -> dict[Any, Any]:
    """The map of a message; its values are not checked."""
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
        raise BadMessage(f"{kind.__name__} is not a msgpack map within the limits")
    return fields


def _map_of(pairs: list[tuple[Any, Any]]) -> dict[Any, Any]:
    """A map without repeated names; ValueError for one with them."""
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise ValueError("a name is repeated")
    return fields
