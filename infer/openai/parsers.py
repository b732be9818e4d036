"""Parsers of answers: text that arrives in pieces becomes reasoning, content and tool calls.

    qwen3, deepseek_r1    <think>reasoning</think>content
    hermes                content<tool_call>{"name": "f", "arguments": {"x": 1}}</tool_call>
    llama3_json           {"name": "f", "parameters": {"x": 1}}    several with ; between them
    qwen3_coder           <tool_call><function=f><parameter=x>1</parameter></function></tool_call>

Streams and whole answers use the same code, and the message does not depend on the pieces. The
whitespace around a tag is not part of the message. A call that lacks its parser's format stays
content, and arguments have the model's own JSON text, which may be invalid or cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import json
import re
from collections.abc import Callable, Mapping
from typing import Any

from infer.openai.fields import not_json
from moa_jax.decode.detokenize import held_back

THINK, END_THINK = "<think>", "</think>"
REASONING_PARSERS = ("none", "qwen3", "deepseek_r1")


def reasoning_at(parser: str, prompt: str) -> str:
    """The place of reasoning in an answer to `prompt`: none, open, optional or implied.

    The chat template may have opened or closed the block at the end of the prompt. Otherwise the
    answer may open the block, or begins with reasoning in any case, as of deepseek_r1.
    """
    prompt = prompt.rstrip()
    if parser == "none" or prompt.endswith(END_THINK):
        return "none"
    if prompt.endswith(THINK):
        return "open"
    return "optional" if parser == "qwen3" else "implied"


@dataclasses.dataclass
class DeltaToolCall:
    """A piece of a tool call."""

    index: int  # of the call in the message
    name: str = ""  # in the first piece
    arguments: str = ""


@dataclasses.dataclass
class DeltaMessage:
    """A piece of a message."""

    text: str = ""
    reasoning: str = ""
    tool_calls: list[DeltaToolCall] = dataclasses.field(default_factory=list)

    def add_call(self, piece: DeltaToolCall) -> None:
        """Appends a piece to the last call if it continues that call."""
        if self.tool_calls and self.tool_calls[-1].index == piece.index:
            self.tool_calls[-1].arguments += piece.arguments
        else:
            self.tool_calls.append(piece)


class OutputParser:
    """Parses one answer; this class finds reasoning, its subclasses find tool calls, too."""

    opening: tuple[str, ...] = ()  # tags that begin a call
    closing: tuple[str, ...] = ()  # tags after a call, which are dropped
    _call: Callable[[DeltaMessage], bool]  # the step after an opening tag, of classes that have one

    def __init__(
        self,
        reasoning: str = "none",
        schemas: Mapping[str, Any] | None = None,
        parallel: bool = True,
    ) -> None:
        """`reasoning` is a value of `reasoning_at`, and `schemas` has the parameters by function.

        Without `parallel` only the first call is kept.
        """
        self._schemas, self._parallel = schemas or {}, parallel
        self._rest = ""  # text that is not parsed yet
        self._final = False  # no more text arrives
        self._after_tag = reasoning == "open"  # drops whitespace
        self._begins = True  # no content since the start or the last tag
        self._opened = ""  # the tag of the present call, and the whitespace before the tag
        self.num_calls = 0
        self._implied = reasoning == "implied"
        steps = {"none": self._content, "open": self._reasoning}
        self._step = steps.get(reasoning, self._beginning)

    @classmethod
    def tags(cls, reasoning: str) -> set[str]:
        """The tags that this parser needs in the text."""
        return {*cls.opening, *cls.closing, *((THINK, END_THINK) if reasoning != "none" else ())}

    def feed(self, text: str, into: DeltaMessage) -> None:
        """Parses the next piece of text, and adds what is known by now to `into`."""
        self._rest += text
        while self._step(into):
            pass

    def end(self, into: DeltaMessage) -> None:
        """Adds what was held back; call this method after the last piece."""
        self._final = True
        self.feed("", into)

    # ---- steps: each returns whether the next step can follow without more text -----------------

    def _beginning(self, into: DeltaMessage) -> bool:
        text = self._rest.lstrip()
        if text.startswith(THINK):
            self._rest = text[len(THINK) :]
            self._end_tag(self._reasoning)
        elif THINK.startswith(text) and not self._final:
            return False
        else:
            self._step = self._reasoning if self._implied else self._content
        return True

    def _reasoning(self, into: DeltaMessage) -> bool:
        text, tag = self._until(END_THINK)
        into.reasoning += self._trimmed(text, tag)
        if tag:
            self._end_tag(self._content)
        return bool(tag)

    def _content(self, into: DeltaMessage) -> bool:
        text, tag = self._until(*self.opening, *self.closing)
        into.text += self._trimmed(text, tag)
        if tag in self.opening:
            self._begin_call(text[len(text.rstrip()) :] + tag)
        elif tag:
            self._end_tag(self._content)
        return bool(tag)

    # ---- helpers ------------------------------------------------------------------------------

    def _until(self, *tags: str) -> tuple[str, str]:
        """Takes the text before the first tag, and the tag; "" for a tag that has not arrived.

        Characters that may become a tag, and whitespace at the end, are held back.
        """
        text = self._rest
        found = [(place, tag) for tag in tags if (place := text.find(tag)) >= 0]
        if found:
            place, tag = min(found)
            self._rest = text[place + len(tag) :]
            return text[:place], tag
        if tags and not self._final:
            text = text[: len(text) - held_back(text, tags)].rstrip()
        self._rest = self._rest[len(text) :]
        return text, ""

    def _trimmed(self, text: str, tag: str) -> str:
        """The text without the whitespace next to tags; `tag` is the next tag, if any."""
        text = text.lstrip() if self._after_tag else text
        text = text.rstrip() if tag else text
        if text:
            self._after_tag = self._begins = False
        return text

    def _end_tag(self, step: Callable[[DeltaMessage], bool]) -> None:
        self._after_tag = self._begins = True
        self._step = step

    def _begin_call(self, opened: str) -> None:
        self._opened, self._step = opened, self._call

    def _name(self, into: DeltaMessage, name: str) -> None:
        """Adds a new call."""
        self.num_calls += 1
        if self._parallel or self.num_calls == 1:
            into.add_call(DeltaToolCall(self.num_calls - 1, name))

    def _extend(self, into: DeltaMessage, arguments: str) -> None:
        """Adds a piece of the present call's arguments."""
        if self._parallel or self.num_calls == 1:
            into.add_call(DeltaToolCall(self.num_calls - 1, "", arguments))

    def _not_a_call(self, into: DeltaMessage) -> bool:
        """Makes the tag of the present call content, with the text after the tag."""
        into.text += self._trimmed(self._opened, "")
        self._begins, self._step = False, self._content
        return True


class _ObjectEnd:
    """Finds the end of a JSON object in text that arrives in pieces."""

    def __init__(self, depth: int = 0) -> None:
        """`depth` is the number of brackets that are open."""
        self._depth, self._quoted, self._escaped = depth, False, False

    def find(self, text: str, begin: int = 0) -> int:
        """The place after the end, or -1; continues at `begin`, where the last call stopped.

        A < outside of a string cannot be JSON, and ends the object: it begins a tag.
        """
        for place in range(begin, len(text)):
            character = text[place]
            if self._escaped:
                self._escaped = False
            elif self._quoted:
                self._escaped, self._quoted = character == "\\", character != '"'
            elif character == '"':
                self._quoted = True
            elif character == "<":
                return place
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth <= 0:
                    return place + 1
        return -1


class HermesParser(OutputParser):
    """Calls as JSON objects between tags, as of Hermes, Qwen2.5 and Qwen3."""

    opening, closing = ("<tool_call>",), ("</tool_call>",)
    header = re.compile(
        r'\s*\{\s*(?:"type"\s*:\s*"function"\s*,\s*)?"name"\s*:\s*"([^"\\]{1,256})"\s*,\s*'
        r'"(?:arguments|parameters)"\s*:\s*(?=\{)'
    )
    needs_arguments = False

    def _begin_call(self, opened: str) -> None:
        super()._begin_call(opened)
        self._object, self._scanned = _ObjectEnd(), 0

    def _call(self, into: DeltaMessage) -> bool:
        """Reads a name before arguments; a call in another order is read when it is complete."""
        if header := self.header.match(self._rest):
            self._name(into, header[1])
            self._rest = self._rest[header.end() :]
            self._object, self._step = _ObjectEnd(), self._arguments
            return True
        if self._rest.lstrip()[:1] not in ("", "{"):
            return self._not_a_call(into)
        end = self._object.find(self._rest, self._scanned)
        self._scanned = len(self._rest)
        if end < 0 and not self._final:
            return False
        found = self._whole_call(self._rest[: max(end, 0)])
        if found is None:
            return self._not_a_call(into)
        self._rest = self._rest[end:]
        self._name(into, found[0])
        self._extend(into, found[1])
        self._end_tag(self._content)
        return True

    def _whole_call(self, text: str) -> tuple[str, str] | None:
        """The name and the arguments of a complete object; None if the object is not a call."""
        try:
            call = json.loads(text)
        except (ValueError, RecursionError):
            return None
        name = call.get("name") if isinstance(call, dict) else None
        arguments = call.get("arguments", call.get("parameters")) if name else None
        if not isinstance(name, str) or (self.needs_arguments and arguments is None):
            return None
        if not isinstance(arguments, str):
            arguments = json.dumps(arguments or {}, ensure_ascii=False)
        return name, arguments

    def _arguments(self, into: DeltaMessage) -> bool:
        end = self._object.find(self._rest)
        piece = self._rest if end < 0 else self._rest[:end]
        self._rest = self._rest[len(piece) :]
        if piece:
            self._extend(into, piece)
        if end >= 0:
            self._object, self._step = _ObjectEnd(depth=1), self._after_arguments
        return end >= 0

    def _after_arguments(self, into: DeltaMessage) -> bool:
        """Drops the rest of a call."""
        end = self._object.find(self._rest)
        self._rest = self._rest[end:] if end >= 0 else ""
        if end >= 0:
            self._end_tag(self._content)
        return end >= 0


class Llama3JsonParser(HermesParser):
    """Calls as JSON objects at the start of the answer, as of Llama 3.1 to 3.3."""

    opening, closing = ("<|python_tag|>",), ()
    needs_arguments = True  # other objects at the start are content

    def _content(self, into: DeltaMessage) -> bool:
        if not self._begins:
            return super()._content(into)
        text = self._rest.lstrip("; \t\r\n")
        if not text and not self._final:
            return False
        if not text.startswith("{"):
            self._begins = bool(self.opening[0].startswith(text) and text)
            return super()._content(into)
        opened, self._rest = self._rest[: len(self._rest) - len(text)], text
        self._begin_call(opened)
        return True


class Qwen3CoderParser(OutputParser):
    """Calls as XML, as of Qwen3-Coder and Qwen3.5; schemas give the types of parameters."""

    opening, closing = ("<tool_call>", "<function="), ("</tool_call>",)
    header = re.compile(r"\s*<function=([^<>\n]{1,256})>")
    unfinished = re.compile(r"<function=[^<>\n]{0,256}")

    def _call(self, into: DeltaMessage) -> bool:
        before = "<function=" if self._opened.endswith("<function=") else ""
        text = before + self._rest
        if header := self.header.match(text):
            self._rest = text[header.end() :]
            self._name(into, header[1].strip())
            self._schema, self._num_parameters = self._schemas.get(header[1].strip(), {}), 0
            self._step = self._parameters
            return True
        body = text.lstrip()
        waits = "<function=".startswith(body) or self.unfinished.fullmatch(body)
        if waits and not self._final:
            return False
        return self._not_a_call(into)

    def _parameters(self, into: DeltaMessage) -> bool:
        _, tag = self._until("<parameter=", "</function>", "</tool_call>")
        if tag == "<parameter=":
            self._value, self._step = "", self._parameter
        elif tag:
            self._extend(into, "}" if self._num_parameters else "{}")
            self._end_tag(self._content)
        return bool(tag)

    def _parameter(self, into: DeltaMessage) -> bool:
        text, tag = self._until("</parameter>", "</function>")
        self._value += text
        if not tag:
            return False
        name, _, value = self._value.partition(">")
        value = value.removeprefix("\n").removesuffix("\n")
        kinds = types_of(self._schema.get("properties", {}).get(name), self._schema)
        found = typed_json(value, kinds)
        before = ", " if self._num_parameters else "{"
        self._extend(into, f"{before}{json.dumps(name, ensure_ascii=False)}: {found}")
        self._num_parameters += 1
        self._step = self._parameters
        if tag == "</function>":
            self._rest = tag + self._rest
        return True


TOOL_PARSERS: dict[str, type[OutputParser]] = {
    "none": OutputParser,
    "hermes": HermesParser,
    "llama3_json": Llama3JsonParser,
    "qwen3_coder": Qwen3CoderParser,
}
JSON_TYPES: dict[type, set[str]] = {
    str: {"string"},
    bool: {"boolean"},
    int: {"integer", "number"},
    float: {"number"},
    list: {"array"},
    dict: {"object"},
    type(None): {"null"},
}
MOST_REFERENCES = 8  # references to references of a schema
MOST_PARTS = 256  # of a schema, which may contain itself
PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}  # models write both


def resolved(schema: Any, root: dict[str, Any]) -> dict[str, Any]:
    """A part of the schema `root`, with a reference within `root` replaced by its object."""
    for _ in range(MOST_REFERENCES):
        if not isinstance(schema, dict):
            return {}
        if not isinstance(reference := schema.get("$ref"), str):
            return schema
        schema = root
        for key in reference.removeprefix("#/").split("/", MOST_PARTS):
            schema = schema.get(key) if isinstance(schema, dict) else None
    return {}


def options_of(schema: dict[str, Any]) -> list[Any]:
    """The values that a resolved part of a schema lists; empty if it lists none."""
    return [schema["const"]] if "const" in schema else _list(schema.get("enum"))


def types_of(schema: Any, root: dict[str, Any]) -> set[str]:
    """The JSON types that a part of the schema `root` allows; empty if they are not stated."""
    found: set[str] = set()
    parts = [schema]
    for part in itertools.islice(parts, MOST_PARTS):  # the loop appends the parts of a part
        part = resolved(part, root)
        named, options = part.get("type"), options_of(part)
        if named:
            found.update(map(str, [named] if isinstance(named, str) else _list(named)))
        elif options:
            found.update(*(JSON_TYPES[type(option)] for option in options))
        else:
            for key in ("anyOf", "oneOf", "allOf"):
                parts += _list(part.get(key))[:MOST_PARTS]
    return found


def _list(value: Any) -> list[Any]:
    """The value if it is a list, else an empty list: schemas of clients may hold anything."""
    return value if isinstance(value, list) else []


def typed_json(text: str, kinds: set[str]) -> str:
    """The JSON of a parameter's text: its own if its type is one of `kinds`, else a string."""
    if kinds - {"string"}:
        with contextlib.suppress(ValueError, RecursionError):
            own = PYTHON_WORDS.get(text.strip(), text.strip())
            if JSON_TYPES[type(json.loads(own, parse_constant=not_json))] & kinds:
                return own
    return json.dumps(text, ensure_ascii=False)
