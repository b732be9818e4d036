"""The grammar that a body asks for: `response_format` of OpenAI, `structured_outputs` of vLLM."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta

from infer.openai.errors import bad
from infer.openai.fields import Unsupported, read_fields, reject_unsupported, wrong
from infer.openai.parsers import END_THINK, THINK
from moa_jax.errors import InputError
from moa_jax.grammar.compile import json_schema, text_of

KINDS = "json regex choice grammar json_object".split()  # of `structured_outputs`
UNSUPPORTED: Unsupported = {"structural_tag": (), "disable_additional_properties": (False,)}
ANY_OBJECT = {"type": "object"}


class GrammarText(NamedTuple):
    """A grammar that is not compiled yet."""

    field: str  # of the body, for errors
    text: str  # see `moa_jax.grammar.compile`


class ResponseFormat(msgspec.Struct):
    """The field `response_format`."""

    type: str | None = None
    json_schema: dict[str, Any] | None = None


class NamedSchema(msgspec.Struct):
    """The field `response_format.json_schema`; the answer is held to the schema, strict or not."""

    name: str | None = None
    schema: dict[str, Any] | None = None
    strict: bool | None = None


class StructuredOutputs(msgspec.Struct):
    """The field `structured_outputs`, which has one of KINDS."""

    json: dict[str, Any] | str | None = None
    regex: str | None = None
    choice: Annotated[list[Annotated[str, Meta(min_length=1)]], Meta(min_length=1)] | None = None
    grammar: str | None = None
    json_object: bool | None = None
    disable_any_whitespace: bool = False
    whitespace_pattern: str | None = None


def grammar_of(
    response_format: dict[str, Any] | None, structured_outputs: dict[str, Any] | None
) -> GrammarText | None:
    """The grammar of a request's answers, or None; raises APIError."""
    if response_format is not None and response_format.get("type") != "text":
        if structured_outputs is not None:
            raise bad("response_format", "response_format and structured_outputs; give one of them")
        field, make = "response_format", lambda: json_schema(_schema_of(response_format))
    elif structured_outputs is not None:
        field, make = "structured_outputs", lambda: _text_of(structured_outputs)
    else:
        return None
    try:
        return GrammarText(field, make())
    except InputError as error:
        raise bad(field, f"{field}: {error}") from error


def _schema_of(body: dict[str, Any]) -> Any:
    fields = read_fields(ResponseFormat, body, "response_format.")
    if fields.type == "json_object":
        return ANY_OBJECT
    if fields.type != "json_schema":
        expected = "give text, json_object or json_schema"
        raise wrong("response_format.type", fields.type, expected)
    named = read_fields(NamedSchema, fields.json_schema or {}, "response_format.json_schema.")
    if named.schema is None:
        raise wrong("response_format.json_schema.schema", None, "give a JSON schema")
    return named.schema


def _text_of(body: dict[str, Any]) -> str:
    fields = read_fields(StructuredOutputs, body, "structured_outputs.")
    reject_unsupported(body, UNSUPPORTED, "structured_outputs.")
    given = [kind for kind in KINDS if getattr(fields, kind) not in (None, False)]
    if len(given) != 1:
        field, many = "structured_outputs", " and ".join(given) or "nothing"
        raise bad(field, f"{field} has {many}; give one of {', '.join(KINDS)}")
    kind, value = given[0], getattr(fields, given[0])
    if kind in ("json", "json_object"):
        schema = value if kind == "json" else ANY_OBJECT
        return json_schema(schema, not fields.disable_any_whitespace, fields.whitespace_pattern)
    return text_of(kind, value)


def literal(text: str, special: Mapping[str, int]) -> str:
    """A text in Lark; llguidance takes special tokens, whose ids are `special`, for no text."""
    names = "|".join(map(re.escape, special))
    parts = re.split(f"({names})", text) if special else [text]
    return " ".join(
        f"<[{special[part]}]>" if part in special else json.dumps(part) for part in parts if part
    )


def after_reasoning(text: str, place: str, special: Mapping[str, int]) -> str:
    """The text of a grammar for answers whose reasoning is free, at a place of `reasoning_at`.

    `special` has the ids of special tokens.
    """
    think, lazy = literal(THINK, special), "" if END_THINK in special else "[lazy]"
    before = {"open": "thought", "optional": f"({think} thought)?", "implied": f"{think}? thought"}
    rules = rf"""start: {before[place]} @answer
thought: thinking /\n{{0,2}}/
thinking{lazy}: /(.|\n)*/ {literal(END_THINK, special)}"""
    is_json = text.lstrip().startswith("{")
    first, *others = json.loads(text)["grammars"] if is_json else [{"lark_grammar": text}]
    return json.dumps({"grammars": [{"lark_grammar": rules}, first | {"name": "answer"}, *others]})
