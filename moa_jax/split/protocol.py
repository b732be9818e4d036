"""The protocol of split decoding: encodes messages, and decodes them with every field checked.

    byte 0  protocol version    byte 1  kind    rest  one msgpack map, names of fields -> values

Lists of integers are sent as little-endian binary (tokens int32, parents uint16), and no message
holds a msgpack array. msgspec decodes a map directly into the fields of its message, so a decoder
never allocates more than the received bytes, whatever sizes their headers state. An error names a
message and its field, but never shows the content.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Callable
from typing import Annotated, Any, Literal, NamedTuple, get_type_hints

import msgspec
import numpy as np
from msgspec import Meta

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
LARGEST = (1 << 31) - 1
QUOTED = "'|(?<=unknown field) "  # msgspec's error messages quote the content after this
FIXMAP = 0x80  # msgpack header of a map of up to 15 entries; no message has more fields


class BadMessage(InputError):
    """The bytes are not a message of this protocol; the error never shows their content."""


class WrongVersion(BadMessage):
    """The message has another protocol version."""

    def __init__(self, theirs: int) -> None:
        self.theirs = theirs
        super().__init__(
            f"the other side speaks protocol version {theirs}, this one version {VERSION}; "
            "update the older of the two"
        )


@dataclasses.dataclass(frozen=True)
class MessageLimits:
    """Limits on one received message; the protocol itself allows more."""

    max_tokens: int  # per session
    max_nodes: int  # per draft, without the root; below 2**16
    max_rows: int  # per Committed, at least the server's chunk
    max_bytes: int  # per message
    max_stops: int = 64
    max_text: int = 1000  # characters per string
    vocab_size: int = 1 << 31  # token ids are below this


class Form(NamedTuple):
    """The part of a field's format that its Python type does not state.

    `read` checks a decoded value against the limits; the text of its BadMessage follows the field's
    name. `sent_as` is the type in msgpack, if different from the field's type.
    """

    read: Callable[[Any, MessageLimits], Any] = lambda value, limits: value
    write: Callable[[Any], Any] = lambda value: value
    sent_as: Any = None


def _at_most(limit: str) -> Form:
    """The form of an integer up to the limit with this name."""

    def read(value: int, limits: MessageLimits) -> int:
        if value > (high := getattr(limits, limit)):
            raise BadMessage(f"is above {high}")
        return value

    return Form(read)


def _numbers(dtype: str, bound: str, least: int, most: str) -> Form:
    """The form of a list of integers in 0..`bound` - 1, sent as binary of one dtype.

    The list's length is from `least` to `most`; `bound` and `most` are names of limits.
    """
    size = np.dtype(dtype).itemsize

    def read(value: bytes, limits: MessageLimits) -> list[int]:
        count, rest = divmod(len(value), size)
        high, end = getattr(limits, most), getattr(limits, bound)
        if rest or not least <= count <= high:
            raise BadMessage(f"is not binary of {least} to {high} numbers of {size} bytes")
        numbers = np.frombuffer(value, dtype)
        if count and not 0 <= numbers.min() <= numbers.max() < end:
            raise BadMessage(f"holds a number that is not from 0 to below {end}")
        return numbers.tolist()

    return Form(read, lambda value: np.asarray(value, dtype).tobytes(), bytes)


def _read_text(value: str, limits: MessageLimits) -> str:
    # Control characters are rejected because terminals and logs may show the string.
    if len(value) > limits.max_text or not value.isprintable():
        raise BadMessage(f"is not a line of at most {limits.max_text} printable characters")
    return value


def _read_pairing(value: dict[str, str | int], limits: MessageLimits) -> dict[str, str | int]:
    for entry in value.values():
        if isinstance(entry, str):
            _read_text(entry, limits)
    return value


LOCAL = ("logit_bias", "min_tokens", "bad_words")  # settings that have no field
SAMPLING_TYPES = {
    name: kind for name, kind in get_type_hints(Sampling).items() if name not in LOCAL
}
BOUNDS = {"top_k": Meta(ge=0, le=LARGEST), "seed": Meta(ge=0)}  # the client draws the seed
SamplingFields = msgspec.defstruct(
    "SamplingFields",
    [(name, Annotated[kind, BOUNDS.get(name)]) for name, kind in SAMPLING_TYPES.items()],
    forbid_unknown_fields=True,
)


def sampling_fields(sampling: Sampling) -> dict[str, float]:
    """The field `Open.sampling`; `Sampling(**fields)` restores the settings.

    Raises InputError for a setting of `LOCAL`.
    """
    if name := next((name for name in LOCAL if getattr(sampling, name)), None):
        raise InputError(f"{name} cannot be sent to a server; leave it out, or decode locally")
    return {name: kind(getattr(sampling, name)) for name, kind in SAMPLING_TYPES.items()}


def _read_sampling(value: msgspec.Struct, limits: MessageLimits) -> dict[str, float]:
    fields = msgspec.structs.asdict(value)
    try:
        Sampling(**fields)  # also rejects numbers that are not finite
    except InputError as error:  # the error shows the value after the name
        raise BadMessage(f"has a {str(error).partition(' ')[0]} out of range") from None
    return fields


Name = Annotated[str, Meta(pattern=r"^[a-z0-9_]{1,64}\Z")]
Seq = Annotated[int, Meta(ge=0, le=LARGEST)]
LastSeq = Annotated[int, Meta(ge=-1, le=LARGEST)]
Count = Annotated[int, Meta(ge=0, le=LARGEST), _at_most("max_tokens")]
CountFromOne = Annotated[int, Meta(ge=1, le=LARGEST), _at_most("max_tokens")]
Positive = Annotated[int, Meta(ge=1, le=LARGEST)]
WireText = Annotated[str, Form(_read_text)]
SessionId = Annotated[str, Meta(pattern="^[0-9a-f]{32}$", max_length=32)]
Pairing = Annotated[dict[Name, str | int], Meta(max_length=32), Form(_read_pairing)]
Tokens = Annotated[list[int], _numbers("<i4", "vocab_size", 1, "max_tokens")]
MaybeTokens = Annotated[list[int], _numbers("<i4", "vocab_size", 0, "max_tokens")]


@dataclasses.dataclass(frozen=True)
class Hello:
    """The first message: the client's software, its model pairing and its encoding of rows."""

    software: WireText
    pairing: Pairing
    codec: Codec
    compress: bool


@dataclasses.dataclass(frozen=True)
class Open:
    """Starts a session, or restarts it from its committed tokens.

    Without `root_given`, `tokens` are the prompt, and the server picks the first token. With
    `root_given`, `tokens` are the prompt and all committed tokens, and the last token is the root.
    The server does not send rows of the first `known` tokens.
    """

    seq: Seq
    tokens: Tokens
    prompt_length: CountFromOne  # leading tokens that some penalties exclude
    root_given: bool
    known: Count
    total: CountFromOne  # most tokens of the session
    stop_ids: Annotated[list[int], _numbers("<i4", "vocab_size", 0, "max_stops")]
    sampling: Annotated[dict[str, float], Form(_read_sampling, sent_as=SamplingFields)]

    def __post_init__(self) -> None:
        if self.prompt_length > len(self.tokens):
            raise BadMessage(f"Open.prompt_length is above its {len(self.tokens)} tokens")
        if self.known > len(self.tokens):
            raise BadMessage(f"Open.known is above its {len(self.tokens)} tokens")
        if self.total < len(self.tokens):
            raise BadMessage(f"Open.total is below its {len(self.tokens)} tokens")


@dataclasses.dataclass(frozen=True)
class Resume:
    """Resumes a session after a lost connection.

    The server sends the last reply again if the client missed it, without parts whose rows lie in
    the first `known` rows. In a stream, `known` is the position of the last received token, and the
    server leaves out the parts up to this token. A server may repeat parts that the client has.
    """

    session: SessionId
    seq: LastSeq  # of the last received reply; -1 for none
    known: Count = 0


@dataclasses.dataclass(frozen=True)
class Verify:
    """Requests verification of a draft by the target.

    `tokens` exclude the root. `parents` are node indices: the root is 0, tokens[0] is 1.
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
    """Commits `tokens` without verification; the last token becomes the root."""

    seq: Seq
    tokens: Tokens


@dataclasses.dataclass(frozen=True)
class Close:
    """Ends the session and frees its slot."""


@dataclasses.dataclass(frozen=True)
class Stream:
    """Requests plain decoding of the rest; the server sends every token immediately."""

    seq: Seq


@dataclasses.dataclass(frozen=True)
class Welcome:
    """The reply to Hello: the server's pairing and limits."""

    software: WireText
    pairing: Pairing
    max_nodes: Seq
    max_tokens: Positive  # per session, including the prompt
    max_prompt: Positive
    chunk: Annotated[Positive, _at_most("max_rows")]  # most rows per message


@dataclasses.dataclass(frozen=True)
class Opened:
    """Confirms a new session; `session`, 32 random hex digits, is its id for Resume."""

    session: SessionId


@dataclasses.dataclass(frozen=True)
class Committed:
    """Committed tokens, and the rows of tokens start to start + count - 1.

    The last of `tokens` is the new root. If `more` is true, further parts of the reply follow. Only
    the last part has tokens and `done`. In the reply to Stream every part has tokens, which follow
    token `start`, and no part has rows.
    """

    seq: Seq
    start: Count
    count: Annotated[Seq, _at_most("max_rows")]
    tokens: MaybeTokens
    done: Done
    more: bool
    rows: bytes

    def __post_init__(self) -> None:
        if self.more and self.done:
            raise BadMessage("Committed.more is true although the answer ends")


@dataclasses.dataclass(frozen=True)
class Resumed:
    """Confirms a resumed session; the missed reply follows, if the client missed a reply."""

    seq: LastSeq  # of the server's last reply


@dataclasses.dataclass(frozen=True)
class Fault:
    """An error reply to a request; after a fatal Fault the server closes the connection."""

    code: FaultCode
    text: WireText
    fatal: bool


Up = Hello | Open | Resume | Verify | Read | Close | Stream
Down = Welcome | Opened | Committed | Resumed | Fault
# A number never changes its meaning, even after its message is removed.
UP: dict[int, type] = {1: Hello, 2: Open, 3: Resume, 4: Verify, 5: Read, 6: Close, 7: Stream}
DOWN: dict[int, type] = {65: Welcome, 66: Opened, 67: Committed, 68: Resumed, 69: Fault}
KIND_OF = {message: kind for kind, message in (UP | DOWN).items()}
FORMS: dict[type, dict[str, Form]] = {}
READERS: dict[type, msgspec.msgpack.Decoder] = {}  # of the maps, as objects with the same fields
for message in KIND_OF:
    hints = get_type_hints(message, include_extras=True)
    FORMS[message] = forms = {
        name: next(
            (each for each in getattr(hint, "__metadata__", ()) if type(each) is Form), Form()
        )
        for name, hint in hints.items()
    }
    sent = [(name, forms[name].sent_as or hint) for name, hint in hints.items()]
    READERS[message] = msgspec.msgpack.Decoder(
        msgspec.defstruct(message.__name__, sent, forbid_unknown_fields=True)
    )


def encode(message: Up | Down) -> bytes:
    """Encodes a message without checks; the receiver checks the bytes."""
    kind = type(message)
    fields = {name: form.write(getattr(message, name)) for name, form in FORMS[kind].items()}
    return bytes((VERSION, KIND_OF[kind])) + msgspec.msgpack.encode(fields)


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
    try:
        sent = READERS[kind].decode(memoryview(data)[2:])
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise BadMessage(f"{kind.__name__}{_reason(kind, str(error))}") from None
    if data[2] != FIXMAP + len(FORMS[kind]):  # the map repeats a name
        raise BadMessage(f"{kind.__name__} is not a msgpack map of its fields")
    fields = {}
    for name, form in FORMS[kind].items():
        try:
            fields[name] = form.read(getattr(sent, name), limits)
        except BadMessage as error:
            raise BadMessage(f"{kind.__name__}.{name} {error}") from None
    return kind(**fields)


def _reason(kind: type, message: str) -> str:
    """The end of an error message: msgspec's message without the quoted content."""
    what, _, place = message.rpartition(" - at ")
    found = re.search(r"`\$\.(\w+)[^`]*`$", place) if what else None
    if found and found[1] in FORMS[kind]:
        return f".{found[1]} is not valid: {re.split(QUOTED, what)[0].strip()}"
    if message.startswith("Object contains unknown field"):
        return " has a field that this version does not know"
    if missing := re.match("Object missing required field `([a-z_]+)`", message):
        return f".{missing[1]} is missing"
    return " is not a msgpack map of its fields"
