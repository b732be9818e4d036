"""The tools of a chat: their fields, the choice among them, and a grammar for calls of them."""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, Literal, NamedTuple

import msgspec
from msgspec import Meta

from infer.openai.errors import bad, shown
from infer.openai.grammars import literal
from infer.openai.parsers import options_of, resolved, types_of
from moa_jax.grammar.compile import MOST_BYTES

CHOICES = ("none", "auto", "required")


class Parameters(msgspec.Struct):
    """The keys of a function's JSON schema that parsers and grammars read."""

    type: Literal["object"] = "object"
    properties: dict[str, dict[str, Any]] = {}
    required: list[str] = []


class FunctionDefinition(msgspec.Struct):
    """A function that the model may call."""

    name: Annotated[str, Meta(pattern=r"^[\w.:/-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None  # a JSON schema
    strict: bool | None = None

    def __post_init__(self) -> None:
        """Raises ValidationError for parameters that are not those of an object."""
        msgspec.convert(self.parameters or {}, Parameters)


class Tool(msgspec.Struct):
    """An element of the field `tools`."""

    function: FunctionDefinition
    type: Literal["function"] = "function"

    @property
    def schema(self) -> dict[str, Any]:
        """The JSON schema of the arguments."""
        return {"type": "object"} | (self.function.parameters or {"properties": {}})


class FunctionCall(msgspec.Struct):
    """The function of an earlier call."""

    name: str
    arguments: str | dict[str, Any] | None = None


class ToolCall(msgspec.Struct):
    """An element of the field `tool_calls` of a message."""

    function: FunctionCall
    id: str | None = None
    type: Literal["function"] = "function"

    def for_template(self) -> dict[str, Any]:
        """The call as chat templates take it: with arguments as an object, if they are valid."""
        arguments: Any = self.function.arguments or {}
        if isinstance(arguments, str):
            with contextlib.suppress(ValueError, RecursionError):  # an answer that was cut off
                found = json.loads(arguments)
                arguments = found if isinstance(found, dict) else arguments
        call = {"type": "function", "function": {"name": self.function.name}}
        call["function"]["arguments"] = arguments
        return call | ({"id": self.id} if self.id else {})


class ToolUse(NamedTuple):
    """The use of tools in an answer."""

    parsed: bool = False  # whether calls are looked for in the answer
    forced: tuple[Tool, ...] = ()  # if not empty, the answer is calls of these tools
    named: bool = False  # whether the answer is one call of a function that the request names


def tool_use_of(tools: Sequence[Tool], choice: Any, parser: str) -> ToolUse:
    """The use that `tools` and `tool_choice` request, on a server with this parser of tool calls.

    Raises APIError for names that occur twice, for another choice, and without a parser.
    """
    names = [tool.function.name for tool in tools]
    if twice := {name for name in names if names.count(name) > 1}:
        raise bad("tools", f"tools name {shown(min(twice))} twice; give each function its own name")
    choice = choice or ("auto" if tools else "none")
    if choice == "none":
        return ToolUse()
    if not tools:
        raise bad("tool_choice", "tool_choice goes with tools; give tools, or neither")
    forced = tuple(tools) if choice == "required" else ()
    if choice not in CHOICES:
        named = choice.get("function") if isinstance(choice, dict) else None
        name = named.get("name") if isinstance(named, dict) else None
        if name is None or choice.get("type", "function") != "function":
            form = '{"type": "function", "function": {"name": ...}}'
            line = f"tool_choice is {shown(choice)}: give none, auto, required or {form}"
            raise bad("tool_choice", line)
        forced = tuple(tool for tool in tools if tool.function.name == name)
        if not forced:
            line = f"tool_choice names {shown(name)}; give the name of one of the tools"
            raise bad("tool_choice", line)
    if parser == "none":
        line = "tools need a server with --tool-call-parser; start it so, or give tool_choice none"
        raise bad("tools", line, "unsupported_parameter")
    return ToolUse(True, forced, choice not in CHOICES)


# ---- the grammar of forced calls -------------------------------------------------------------

# The separators of the models' own JSON; with free whitespace a model may write it for ever.
COMPACT = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
Lark = Callable[[str], str]  # writes a text in Lark
END_PARAMETER, END_CALL = "\n</parameter>\n", "}\n</tool_call>"


def tool_grammar(
    parser: str, tools: Sequence[Tool], parallel: bool, special: Mapping[str, int]
) -> str:
    """A Lark grammar, in llguidance's dialect, for answers that only call these tools.

    Without `parallel` the answer is a single call. `special` has the ids of special tokens, which
    may be the parser's tags. Raises APIError for large schemas.
    """
    lark = functools.partial(literal, special=special)
    _check_size(sum(len(_json(tool.schema)) for tool in tools))
    call_rules, between = {
        "hermes": (_hermes, "\n"),
        "llama3_json": (_llama3_json, "; "),
        "qwen3_coder": (_qwen3_coder, "\n"),
    }[parser]
    return "\n".join(
        [
            "start: call" + (f" ({_text(between)} call)*" if parallel else ""),
            "call: " + " | ".join(f"call_{i}" for i in range(len(tools))),
            *(rule for i, tool in enumerate(tools) for rule in call_rules(f"call_{i}", tool, lark)),
            rf"value[lazy]: /(.|\n)*/ {_text(END_PARAMETER)}",
        ]
    )


def _check_size(size: int) -> None:
    if size > MOST_BYTES:
        raise bad("tools", f"tools: the grammar has {size} bytes; give at most {MOST_BYTES}")


def _text(text: str) -> str:
    return json.dumps(text)


def _json(schema: dict[str, Any]) -> str:
    return f"%json {json.dumps(schema | {'x-guidance': COMPACT})}"


def _hermes(rule: str, tool: Tool, lark: Lark) -> list[str]:
    before = f'<tool_call>\n{{"name": "{tool.function.name}", "arguments": '
    return [f"{rule}: {lark(before)} {_json(tool.schema)} {lark(END_CALL)}"]


def _llama3_json(rule: str, tool: Tool, lark: Lark) -> list[str]:
    before = f'{{"name": "{tool.function.name}", "parameters": '
    return [f'{rule}: {lark(before)} {_json(tool.schema)} "}}"']


def _qwen3_coder(rule: str, tool: Tool, lark: Lark) -> list[str]:
    """One rule for the call, and one for each parameter; strings have no quotes."""
    schema, parts, rules = tool.schema, [], []
    shared = {key: schema[key] for key in ("$defs", "definitions") if key in schema}
    _check_size(len(_json(shared)) * len(schema.get("properties", {})))
    for i, (name, each) in enumerate(schema.get("properties", {}).items()):
        value = f"{_json(shared | each)} {_text(END_PARAMETER)}"
        if types_of(each, schema) <= {"string"}:  # the parser makes strings of all others
            listed = options_of(resolved(each, schema))
            options = " | ".join(_text(each) for each in listed if isinstance(each, str))
            value = f"({options}) {_text(END_PARAMETER)}" if options else "value"
        parts.append(f"{rule}_{i}" + ("" if name in schema.get("required", []) else "?"))
        begin = f"<parameter={name}>\n"
        rules.append(f"{rule}_{i}: {_text(begin)} {value}")
    begin = f"<tool_call>\n<function={tool.function.name}>\n"
    end = "</function>\n</tool_call>"
    return [f"{rule}: {lark(begin)} {' '.join(parts)} {lark(end)}", *rules]
