"""Fields of a record, in any common style: a conversation, plain text, or token ids.

    messages, history, conversations, conversation    [{"role": ..., "content": ...}, ...]
                                                      or [{"from": ..., "value": ...}, ...]
    data                                              [user text, assistant text, ...]
    instruction, input, output                        one turn (Alpaca)
    prompt, completion                                one turn, or two lists of messages; the
                                                      completion may be missing
    system, system_prompt                             beside any of these
    tools, chat_template_kwargs                       beside any of these: for the chat template;
                                                      also as JSON text
    text                                              plain text, in a record without messages
    token_ids, answers                                token ids, which precede all others

A key whose value is null or empty counts as absent: tables that mix two styles hold such values.
All programs read records through this module, so they read a file identically. A message may have
the role `tool`, and the fields `tool_calls`, `tool_call_id`, `name` and `reasoning_content` for the
chat template.
"""

from __future__ import annotations

import contextlib
import itertools
import json
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple, TypeVar

from moa_jax.errors import InputError

T = TypeVar("T", list, dict)

Message = dict[str, Any]  # role: a value of ROLES; content: text; and FIELDS that are not empty

ROLES = {
    "system": "system",
    "developer": "developer",  # `system` for a chat template that does not name it
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
    "tool": "tool",
    "function": "tool",
    "observation": "tool",
}
INSTRUCTIONS = ("system", "developer")
REASONING = ("reasoning_content", "reasoning", "thinking")  # names that chat templates use
FIELDS = (*REASONING, "tool_calls", "tool_call_id", "name")
STYLES = ("messages", "history", "conversations", "conversation", "data", "instruction", "prompt")
SYSTEM = ("system", "system_prompt")
FOR_TEMPLATE = ("tools", "chat_template_kwargs")
ABOUT = ("id", "source", "license")  # metadata of a record, not part of its text
COLUMNS = (*STYLES, "input", "output", "completion", "text", *SYSTEM, *FOR_TEMPLATE, *ABOUT)
NO_KWARGS: Mapping[str, Any] = MappingProxyType({})
# Arguments of a chat template that the programs set.
RESERVED = ("chat_template", "tokenize", "add_generation_prompt", "continue_final_message", "tools")


class ReadRecord(NamedTuple):
    """The messages of a record, and the names of its keys that are not read.

    `template_kwargs` holds the `tools` and other arguments for the chat template.
    """

    messages: list[Message]
    unread: tuple[str, ...]
    template_kwargs: Mapping[str, Any] = NO_KWARGS


def messages_of(record: dict[str, Any]) -> list[Message]:
    """The messages of a record, with the roles in ROLES.

    Raises InputError as `read_record`.
    """
    return read_record(record).messages


def read_record(record: dict[str, Any]) -> ReadRecord:
    """The messages of a record, and the names of its keys that are not read.

    Content in parts becomes the parts' text. Raises InputError for an unknown style, an unknown
    role, an empty message, a part that is not text, and tools or arguments of the chat template
    that are not JSON; equal faults have equal messages.
    """
    style = next((style for style in STYLES if record.get(style)), None)
    if style is None:
        raise _no_messages(record)
    turns, keys = _turns(record, style), [style]
    messages = list(map(_message, turns))
    if style == "instruction":
        keys += ("input", "output")
    if style == "prompt":
        keys.append("completion")
    system = next((key for key in SYSTEM if _text(record, key)), None)
    if system is not None and not any(each["role"] in INSTRUCTIONS for each in messages):
        messages.insert(0, {"role": "system", "content": _text(record, system)})
        keys.append(system)
    within = dict.fromkeys(f"{style}.{name}" for turn in turns for name in _rest(turn))
    unread = (*unread_of(record, [*keys, *FOR_TEMPLATE], messages), *within)
    return ReadRecord(messages, unread, _template_kwargs(record))


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


def generated_places(messages: list[Message]) -> list[int]:
    """Indices of the answers that `train.regenerate` replaces.

    An answer before a message of a tool stays: that message replies to the calls of this answer.
    """
    followers = [message["role"] for message in messages[1:]] + [""]
    return [i for i in answer_places(messages) if followers[i] != "tool"]


def plain_text_of(record: dict[str, Any]) -> str | None:
    """The `text` of a record without messages; None if the record has messages or no text."""
    text, others = record.get("text"), {*STYLES, "completion"}
    if not (record.get("prompt") and record.get("completion")):  # either alone has no answer
        others -= {"prompt", "completion"}
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


def unread_keys(record: dict[str, Any], template: Any = None) -> tuple[str, ...]:
    """The keys that are not read; () for records of token ids and for records without messages.

    `template` is the chat template, if known, as in `unread_by`.
    """
    if answers_of(record) is not None:
        return ()
    try:
        return unread_by(template, read_record(record))
    except InputError:
        return ()


def unread_by(template: Any, read: ReadRecord) -> tuple[str, ...]:
    """The keys of a record that are not read, here or by the chat template; None reads all.

    A template may ignore tools, other arguments and reasoning.
    """
    if template is None:
        return read.unread
    given = [n if n == "tools" else f"chat_template_kwargs.{n}" for n in read.template_kwargs]
    if not any(name in str(template) for name in REASONING):  # transformers gives it by all names
        given += sorted({name for message in read.messages for name in message} & set(REASONING))
    ignored = (name for name in given if name.rpartition(".")[2] not in str(template))
    return (*read.unread, *ignored)


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
        "`data`, `prompt`, or `instruction` and `output`, or end the path with ?messages=COLUMN"
    )


def _turns(record: dict[str, Any], style: str) -> list[Any]:
    """The objects of a record that become messages."""
    if style == "instruction":
        asked = filter(None, (_text(record, key) for key in ("instruction", "input")))
        return _in_turn(["\n\n".join(asked), *filter(None, [_text(record, "output")])])
    if style == "prompt":
        if _has_roles(record["prompt"]):
            completion = record.get("completion")
            if not _has_roles(completion):
                completion = _in_turn(["", *filter(None, [_text(record, "completion")])])[1:]
            return [*record["prompt"], *completion]
        if not isinstance(prompt := text_of_parts(record["prompt"]), str):
            raise InputError("a record whose `prompt` is not text; write a string")
        return _in_turn([prompt, *filter(None, [_text(record, "completion")])])
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
        raise InputError(f"a message with role {name!r}; use system, user, assistant or tool")
    return ROLES[name]


def _message(turn: Any) -> Message:
    role, content = _role(turn), text_of_parts(_first(turn, "content", "value"))
    rest = {name: turn[name] for name in FIELDS if turn.get(name)}
    calls = [_call(each) for each in _from_json("tool_calls", rest.pop("tool_calls", None), list)]
    if (name := next((n for n in rest if not isinstance(rest[n], str)), None)) is not None:
        raise InputError(f"a message whose `{name}` is not text; write a string")
    if calls:
        rest, content = rest | {"tool_calls": calls}, content or ""
    # Without a system message a template may add its own; with an empty one it does not.
    may_be_empty = calls or role in (*INSTRUCTIONS, "tool")
    if not isinstance(content, str) or not (content.strip() or may_be_empty):
        raise InputError("a message without text; fill or remove it")
    return {"role": role, "content": content, **rest}


def _call(call: Any) -> dict[str, Any]:
    """A tool call with its arguments as an object, which chat templates write as JSON."""
    inner = call.get("function", call) if isinstance(call, dict) else None
    if not isinstance(inner, dict):
        raise InputError("a message whose `tool_calls` are not objects; write name and arguments")
    if isinstance(inner.get("arguments"), str):
        with contextlib.suppress(ValueError):
            inner = {**inner, "arguments": json.loads(inner["arguments"])}
    return {**call, "function": inner} if "function" in call else inner


def _template_kwargs(record: dict[str, Any]) -> Mapping[str, Any]:
    """The arguments for the chat template; raises InputError for names that programs set."""
    found = _from_json("chat_template_kwargs", record.get("chat_template_kwargs"), dict)
    check_template_kwargs(found, "`chat_template_kwargs`")
    tools = _from_json("tools", record.get("tools"), list)
    return {**found, "tools": tools} if tools else found


def check_template_kwargs(kwargs: Mapping[str, Any], name: str) -> None:
    """Raises InputError for an argument of the chat template that the programs set."""
    if taken := kwargs.keys() & set(RESERVED):
        raise InputError(f"{name} sets {min(taken)}; leave it out")


def _from_json(key: str, value: Any, kind: type[T]) -> T:
    """A list or an object, also from JSON text; empty for a missing value.

    Keys with null are left out: tables write them into objects with different keys.
    """
    try:
        value = json.loads(value) if isinstance(value, str) and value.strip() else value
    except ValueError as error:
        raise InputError(f"a record whose `{key}` is not JSON; write JSON") from error
    if value is None or value == "" or value != value:  # tables write NaN for missing values
        return kind()
    if not isinstance(value, kind):
        what = "a list" if kind is list else "an object"
        raise InputError(f"a record whose `{key}` is not {what}; write {what}")
    return _without_nulls(value)


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _without_nulls(each) for key, each in value.items() if each is not None}
    return list(map(_without_nulls, value)) if isinstance(value, list) else value


def _rest(turn: dict[str, Any]) -> list[str]:
    """Names of a message's fields that are not empty, besides its role and content."""
    role = "from" if turn.get("role") is None else "role"
    content = "value" if turn.get("content") is None else "content"
    filled = (name for name, value in turn.items() if value not in (None, "", [], {}))
    return [name for name in filled if name not in (role, content, *FIELDS)]
