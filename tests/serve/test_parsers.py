"""Parsers of answers, on outputs in the formats that the models document, cut at every place.

`recorded_answers.jsonl` has a text per line, with its parser, the place of its reasoning in the
answer, and the message.
"""

from __future__ import annotations

import itertools
import json
import random
from pathlib import Path

import msgspec
import pytest
from llguidance import LLMatcher, LLTokenizer

from infer.openai.grammars import after_reasoning
from infer.openai.parsers import TOOL_PARSERS, DeltaMessage, typed_json, types_of
from infer.openai.tools import Tool, tool_grammar
from moa_jax.decode.detokenize import special_ids
from tests.serve.toy_server import TOKENIZERS

LINES = (Path(__file__).parent / "recorded_answers.jsonl").read_text().splitlines()
RECORDED = [tuple(json.loads(line).values()) for line in LINES]
PROPERTIES = {"city": {"$ref": "#/$defs/city"}, "days": {"type": "integer"}}
PROPERTIES["note"] = {"anyOf": [{"type": "string"}, {"type": "null"}]}
PARAMETERS = {"type": "object", "properties": PROPERTIES, "required": ["city", "days"]}
PARAMETERS["$defs"] = {"city": {"enum": ["Paris", "Rome"]}}
# The first text of each format that is a single call, without the content before the call.
CALLS = {row[0]: row[2].removeprefix("Yes.\n").strip() for row in reversed(RECORDED) if row[5]}


def parsed(tools: str, place: str, pieces: list[str]) -> DeltaMessage:
    """Returns the whole message of a text in pieces, which is sent in deltas."""
    parser, whole = TOOL_PARSERS[tools](place, {"look": PARAMETERS}), DeltaMessage()
    for i in range(len(pieces) + 1):
        delta = DeltaMessage()
        parser.feed(pieces[i], delta) if i < len(pieces) else parser.end(delta)
        whole.text, whole.reasoning = whole.text + delta.text, whole.reasoning + delta.reasoning
        for call in delta.tool_calls:
            assert bool(call.name) == (call.index == len({each.index for each in whole.tool_calls}))
            whole.add_call(call)
    return whole


@pytest.mark.parametrize("tools, place, text, reasoning, content, calls", RECORDED)
def test_every_split_gives_the_same_message(tools, place, text, reasoning, content, calls):
    draw, length = random.Random(3), len(text)
    splits = [[cut] for cut in range(length + 1)] + [list(range(length))]
    splits += [sorted(draw.choices(range(length), k=3)) for _ in range(50)]
    for cuts in splits:
        ends = itertools.pairwise([0, *cuts, length])
        found = parsed(tools, place, [text[begin:end] for begin, end in ends])
        assert (found.reasoning, found.text) == (reasoning, content), cuts
        assert [[call.name, call.arguments] for call in found.tool_calls] == calls, cuts


def test_the_types_of_a_schema_that_contains_itself():
    loop = {"anyOf": [{"$ref": "#/$defs/a"}] * 99 + [{"type": 5}, {"enum": 5}, {"const": 1}]}
    assert types_of(loop, {"$defs": {"a": loop}}) == {"integer", "number"}


def test_a_parameter_keeps_the_json_of_the_model():
    kinds, nan = {"number", "array"}, "[NaN]"
    for text, found in {"1E400": "1E400", " [1.10]\n": "[1.10]", nan: json.dumps(nan)}.items():
        assert typed_json(text, kinds) == found


@pytest.mark.parametrize("tokenizer", TOKENIZERS, ids=["text", "special"])
@pytest.mark.parametrize("parser", CALLS)
def test_a_forced_call_has_the_format_of_its_parser(parser, tokenizer):
    """Tags may be special tokens, which are no text for llguidance."""
    special, made = special_ids(tokenizer), LLTokenizer(tokenizer.backend_tokenizer.to_str())
    tools = [{"function": {"name": "b"}}, {"function": {"name": "look", "parameters": PARAMETERS}}]
    text = tool_grammar(parser, msgspec.convert(tools, list[Tool]), False, special)
    wrong = CALLS[parser].replace("Paris", "Bonn")
    places = {"none": "", "open": "Hm.</think>\n\n", "optional": "<think></think>"}
    for place, before in places.items():
        grammar = text if place == "none" else after_reasoning(text, place, special)
        for answer, is_call in ((CALLS[parser], True), (wrong, False), ("Hello.", False)):
            matcher = LLMatcher(made, grammar, log_level=0)
            ids = tokenizer(before + answer, add_special_tokens=False)["input_ids"]
            matcher.consume_tokens(ids)
            assert (matcher.is_accepting() and not matcher.is_error()) == is_call, answer
