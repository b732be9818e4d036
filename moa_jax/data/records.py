"""Fields of a record, in any common style: a conversation, plain text, or token ids.

    messages, history, conversations, conversation    [{"role": ..., "content": ...}, ...]
                                                      or [{"from": ..., "value": ...}, ...]
    data                                              [user text, assistant text, ...]
    instruction, input, output                        one turn (Alpaca)
    prompt                                            one user message, or a list of messages
    system, system_prompt                             beside any of these
    text                                              plain text, in a record without messages
    token_ids, answers                                token ids, which precede all others

A key whose value is null or empty counts as absent: tables that mix two styles hold such values.
All programs read records through this module, so they read a file identically.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from moa_jax.errors import InputError

Message = dict[str, str]  # role: system, user or assistant; content: text

ROLES = {
    "system": "system",
    "developer": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
STYLES = ("messages", "history", "conversations", "conversation", "data", "instruction", "prompt")
SYSTEM = ("system", "system_prompt")
ABOUT = ("id", "source", "license")  # metadata of a record, not part of its text


class ReadRecord(NamedTuple):
    """The messages of a record, and the names of its keys that are not read."""

    messages: list[Message]
    unread: tuple[str, ...]


def messages_of(record: dict[str, Any]) -> list[Message]:
    """The messages of a record, with the roles system, user and assistant.

    Raises InputError as `read_record`.
    """
    return read_record(record).messages


def read_record(record: dict[str, Any]) -> ReadRecord:
    """The messages of a record, and the names of its keys that are not read.

    Content in parts becomes the parts' text. Raises InputError for an unknown style, an unknown
    role, an empty message and a part that is not text; equal faults have equal messages.
    """
    style = next((style for style in STYLES if record.get(style)), None)
    if style is None:
        raise _no_messages(record)
    turns, keys = _turns(record, style), [style]
    messages = list(map(_message, turns))
    if style == "instruction":
        keys += ("input", "output")
    system = next((key for key in SYSTEM if _text(record, key)), None)
    if system is not None and not any(message["role"] == "system" for message in messages):
        messages.insert(0, {"role": "system", "content": _text(record, system)})
        keys.append(system)
    within = dict.fromkeys(f"{style}.{name}" for turn in turns for name in _rest(turn))
    return ReadRecord(messages, (*unread_of(record, keys, messages), *within))


def prompt_of(messages: list[Message]) -> list[Message]:
    """The messages without trailing answers; raises InputError if no user message is left."""
    ends = (i for i, message in enumerate(messages) if message["role"] != "assistant")
    asked = messages[: max(ends, default=-1) + 1]
    if not any(message["role"] == "user" for message in asked):
        raise InputError("a record without a user message; give it one")
    return asked


def answer_places(messages: list[Message]) -> list[int]:
    """Indices of the assistant messages after the first user message.

    A greeting before the first user message is part of the prompt, since it is never generated.
    """
    roles = [message["role"] for message in messages]
    first = roles.index("user") if "user" in roles else len(roles)
    return [i for i, role in enumerate(roles) if role == "assistant" and i > first]


def plain_text_of(record: dict[str, Any]) -> str | None:
    """The `text` of a record without messages; None if the record has messages or no text."""
    text, others = record.get("text"), set(STYLES) - {"prompt"}  # no answer follows a bare prompt
    return text if isinstance(text, str) and not any(map(record.get, others)) else None


def unread_of(
    record: dict[str, Any], keys: Sequence[str], messages: Sequence[Message] = ()
) -> tuple[str, ...]:
    """Names of the keys besides `keys` that hold text, lists or objects but no message."""
    known = {"", *(message["content"].strip() for message in messages)}
    return tuple(
        key
        for key, value in record.items()
        if key not in (*keys, *ABOUT) and isinstance(value, str | list | dict) and value
        if not isinstance(value, str) or value.strip() not in known
    )


def unread_keys(record: dict[str, Any]) -> tuple[str, ...]:
    """The keys that are not read; () for records of token ids and for records without messages."""
    if answers_of(record) is not None:
        return ()
    try:
        return read_record(record).unread
    except InputError:
        return ()


def answers_of(record: dict[str, Any]) -> list[dict[str, Any]] | None:
    """The objects of a record with `prompt_ids` and `token_ids`; None if the record has no ids.

    A record has a list of these objects in `answers`, as `train.regenerate` writes them, or is
    such an object itself.
    """
    if record.get("token_ids") is not None:
        return [record]
    answers = _objects(record.get("answers"))
    if not isinstance(answers, list):
        return None
    # Other data sets also have a key `answers`, without ids.
    has_ids = any(isinstance(each, dict) and "token_ids" in each for each in answers)
    return answers if has_ids else None


def text_of_parts(content: Any) -> Any:
    """The text of content in parts, one line per part; other content unchanged."""
    return "\n".join(map(text_of_part, content)) if isinstance(content, list) else content


def text_of_part(part: Any) -> str:
    """The text of a part of a message; raises InputError for a part that is not text."""
    kind = part.get("type") if isinstance(part, dict) else None
    text = part.get("text") if kind == "text" else None
    if not isinstance(text, str):
        raise InputError(
            f'a content part of type {kind!r} is not text; give {{"type": "text", "text": ...}}'
        )
    return text


def _no_messages(record: dict[str, Any]) -> InputError:
    """The error for a record in which every key of a style is empty or missing."""
    if (empty := next((key for key in STYLES if key in record), None)) is not None:
        return InputError(f"a record whose `{empty}` is empty; fill or remove it")
    if answers_of(record) is not None or record.get("prompt_ids"):
        return InputError("a record of token ids without messages; give it `messages`")
    if isinstance(record.get("text"), str):
        return InputError("a record of plain text without messages; give it `messages`")
    return InputError(
        "a record of unknown style; give it `messages`, `history`, `conversations`, "
        "`data`, `prompt`, or `instruction` and `output`"
    )


def _turns(record: dict[str, Any], style: str) -> list[Any]:
    """The objects of a record that become messages."""
    if style == "instruction":
        asked = filter(None, (_text(record, key) for key in ("instruction", "input")))
        return _in_turn(["\n\n".join(asked), *filter(None, [_text(record, "output")])])
    if style == "prompt":
        if _has_roles(record["prompt"]):
            return list(record["prompt"])
        prompt = text_of_parts(record["prompt"])
        if not isinstance(prompt, str):
            raise InputError("a record whose `prompt` is not text; write a string")
        return _in_turn([prompt])
    turns = _objects(record[style])
    if not isinstance(turns, list | tuple):
        raise InputError(f"a record whose `{style}` is not a list; write a list of messages")
    return _in_turn(turns) if style == "data" else list(turns)


def _has_roles(prompt: Any) -> bool:
    """Whether a prompt is a list of messages, as in TRL, and not the parts of one message."""
    first = prompt[0] if isinstance(prompt, list) and prompt else None
    return isinstance(first, dict) and _first(first, "role", "from") is not None


def _in_turn(texts: Iterable[Any]) -> list[dict[str, Any]]:
    roles = itertools.cycle(("user", "assistant"))
    return [{"role": role, "content": text} for role, text in zip(roles, texts, strict=False)]


def _objects(found: Any) -> Any:
    """A list of objects from a column per key, as in TensorFlow Datasets; else `found`."""
    if not isinstance(found, dict):
        return found
    columns = {key: column for key, column in found.items() if column is not None}
    if not all(isinstance(column, list) for column in columns.values()):
        return found
    return [dict(zip(columns, row, strict=True)) for row in zip(*columns.values(), strict=False)]


def _text(record: dict[str, Any], key: str) -> str:
    """The text of a key, "" if absent; raises InputError for a value that is not text."""
    value = text_of_parts(record.get(key))
    if value is None or value != value:  # tables write NaN for missing values
        return ""
    if type(value) in (int, float):
        value = str(value)
    if not isinstance(value, str):
        raise InputError(f"a record whose `{key}` is not text; write a string")
    return value.strip()


def _first(turn: dict[str, Any], *names: str) -> Any:
    """The first value that is not null, in the order of `names`."""
    return next((turn[name] for name in names if turn.get(name) is not None), None)


def _role(turn: Any) -> str:
    if not isinstance(turn, dict):
        raise InputError("a message that is not an object; write role and content")
    name = _first(turn, "role", "from")
    if not isinstance(name, str) or name not in ROLES:
        raise InputError(f"a message with role {name!r}; use system, user or assistant")
    return ROLES[name]


def _message(turn: Any) -> Message:
    role, content = _role(turn), text_of_parts(_first(turn, "content", "value"))
    # Without a system message a template may add its own; with an empty one it does not.
    if not isinstance(content, str) or not (content.strip() or role == "system"):
        raise InputError("a message without text; fill or remove it")
    return {"role": role, "content": content}


def _rest(turn: dict[str, Any]) -> list[str]:
    """Names of a message's fields that are not empty, besides its role and content."""
    role = "from" if turn.get("role") is None else "role"
    content = "value" if turn.get("content") is None else "content"
    filled = (name for name, value in turn.items() if value not in (None, "", [], {}))
    return [name for name in filled if name not in (role, content)]
