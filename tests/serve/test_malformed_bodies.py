"""Malformed HTTP bodies: the status, `param` and message of each; the server continues."""

from __future__ import annotations

import json
import random
from collections import Counter

import httpx
import pytest

from infer.openai.errors import shown
from infer.openai.requests import OF_CHATS, UNSUPPORTED
from tests.serve.toy_server import CHATS, COMPLETIONS, HELLO, LONG, VOCAB, Running, error_of

BODIES = {
    COMPLETIONS: {"prompt": [7, 8], "max_tokens": 3},
    CHATS: {"messages": HELLO, "max_tokens": 3},
    "/tokenize": {"prompt": "Good day."},
    "/detokenize": {"tokens": [7, 8]},
}
HALF = "\ud800"  # of a surrogate pair
IMAGE = [{"type": "image_url"}]


@pytest.fixture(scope="module")
def server():
    """Returns a server; after all bodies, its answer is unchanged, and its log has no error."""
    with pytest.MonkeyPatch.context() as patch, Running() as server:
        patch.setattr("moa_jax.grammar.compile.MOST_SECONDS", 2)  # on a quiet machine 0.1
        good = server.post(COMPLETIONS, LONG).json()["choices"]
        yield server
        assert server.post(COMPLETIONS, LONG).json()["choices"] == good
        assert not server.named("error") and not server.server.answering


def assert_refused(response: httpx.Response, param: str, begin: str, status: int = 400) -> None:
    error = error_of(response, status)
    assert (error["param"], error["type"]) == (param, "invalid_request_error")
    assert error["message"].startswith(begin) and "\n" not in error["message"], error


NOT_JSON = "the body is not JSON: "
RAW = {  # the body: how the message begins
    b"": NOT_JSON,
    b"{": NOT_JSON,
    b"[]": "the body is not a JSON object; send",
    b'{"a": NaN}': f"{NOT_JSON}NaN is not a JSON number",
    b'{"a": "\xff"}': f"{NOT_JSON}'utf-8' codec can't decode byte 0xff",
    b"[" * 100_000: f"{NOT_JSON}maximum recursion",
    b'{"n": ' + b"9" * 5000 + b"}": NOT_JSON,
}


@pytest.mark.parametrize("body", RAW, ids=lambda body: repr(body[:12]))
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_body_that_is_not_an_object_is_refused(server, path, body):
    assert_refused(server.post(path, body), "body", RAW[body])


BOTH = {  # values of a field; the message begins with the field and the value
    "model": [3, HALF],
    "n": [0, 129, 1.5, True, "2", 10**30],
    "temperature": [-0.1, True, "hot", 1e300, 10**400],
    "top_p": [0.0, 1.1, {}],
    "min_p": [-0.1],
    "top_k": [-2, False],
    "repetition_penalty": [0.0, 1e-300],
    "seed": [1.5, "x", 1 << 63, -(1 << 64), True],
    "max_tokens": [0, -5, 1.0, 1 << 40, 511],
    "max_completion_tokens": [-1],
    "stop": ["", [""], [3], ["x"] * 17, {}, "x" * 300, [HALF]],
    "stop_token_ids": [5, list(range(40))],
    "min_tokens": [-1, 1.0, 600],
    "bad_words": ["x", [""], [" "], [3], ["x"] * 65, [HALF]],
    "truncate_prompt_tokens": [-2, 600, 1.5],
    "truncation_side": ["middle"],
    "prompt_logprobs": [21, True],
    "stream": ["true"],
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), [2.1, -2.1]),
    **dict.fromkeys(("ignore_eos", "return_token_ids", "skip_special_tokens", "echo"), [1]),
    "stream_options": [[]],
    "logit_bias": [[], {"x": 1}, {"-1": 1}, {"5": 101}, {"5": None}, {HALF: 1}],
    "logprobs": [[]],
}


@pytest.mark.parametrize("name", BOTH)
@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_wrong_value_is_named_with_its_field(server, path, name):
    body = {key: value for key, value in BODIES[path].items() if key != "max_tokens"}
    for value in BOTH[name]:
        assert_refused(server.post(path, body | {name: value}), name, f"{name} is {shown(value)}")


def hello_and(**message: object) -> dict:
    """Returns messages; the first one is valid."""
    return {"messages": [*HELLO, {"role": "user", "content": "Hi."} | message]}


def tools(*functions: dict) -> dict:
    return {"tools": [{"type": "function", "function": function} for function in functions]}


def schema_of(schema: object) -> dict:
    return {"response_format": {"type": "json_schema", "json_schema": {"schema": schema}}}


def outputs(**fields: object) -> dict:
    return {"structured_outputs": fields}


F, OUTPUTS = {"name": "f"}, "structured_outputs"
# A chain of references that overflows llguidance's stack.
CHAIN = {f"d{i}": {"$ref": f"#/$defs/d{i + 1}"} for i in range(3000)} | {"d3000": {}}
ONE = [  # a path, fields, `param`, and the rest of the message after `param`
    (COMPLETIONS, {"model": "other"}, "model", ' "other" is not served here; ask for toy'),
    (COMPLETIONS, {"prompt": None}, "prompt", " is null: give a text or a list of token ids"),
    (COMPLETIONS, {"prompt": ""}, "prompt", ": the prompt is empty"),
    (COMPLETIONS, {"prompt": [[7], [VOCAB]]}, "prompt[1]", " holds 2048; give token ids"),
    (COMPLETIONS, {"prompt": [True, 7]}, "prompt[0]", " is true: "),
    (COMPLETIONS, {"prompt": [[7], [7] * 512]}, "prompt[1]", ": the prompt has 512 tokens, and"),
    (COMPLETIONS, {"prompt": ["x"] * 129}, "prompt", " has 129 prompts; give at most 128"),
    (COMPLETIONS, {"prompt": ["x"] * 100, "n": 2}, "n", " is 2 for 100 prompts"),
    (COMPLETIONS, {"best_of": 2}, "best_of", " is 2: give the same number as n"),
    (COMPLETIONS, {"max_tokens": 0, "echo": True}, "max_tokens", " is 0: give 1 or more; 0 goes"),
    (COMPLETIONS, {"messages": HELLO}, "messages", " is not supported; leave it out"),
    (COMPLETIONS, {"max_completion_tokens": 4}, "max_tokens", " differs from max_completion"),
    (COMPLETIONS, {"stop_token_ids": [5, "x"]}, "stop_token_ids", ' holds "x"; give token ids'),
    (COMPLETIONS, {"logit_bias": {"3000": 1}}, "logit_bias", " names 3000: the ids end at 2048"),
    (COMPLETIONS, {"stream_options": {}}, "stream_options", " goes with stream; "),
    (COMPLETIONS, {"min_tokens": 4}, "min_tokens", " is 4: an answer has at most 3 tokens"),
    (COMPLETIONS, {"bad_words": ["x " * 20]}, "bad_words", " are 2 token sequences, the longest"),
    (CHATS, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", " does not go with stream"),
    (CHATS, {"messages": []}, "messages", " is []: expected `array` of length >= 1"),
    (CHATS, {"messages": ["Hello."]}, "messages[0]", ' is "Hello.": give an object'),
    (CHATS, hello_and(role="robot"), "messages[1].role", ' is "robot": give system, user, assis'),
    (CHATS, hello_and(role="tool"), "messages", ": the chat template refuses the messages (a mess"),
    (CHATS, hello_and(content=None), "messages[1].content", " is null: give text of Unicode"),
    (CHATS, hello_and(content=IMAGE), "messages[1].content[0]", ": a content part of type"),
    (CHATS, hello_and(tool_calls=[{}]), "messages[1].tool_calls", " is [{}]: object missing requ"),
    (CHATS, {"tools": []}, "tools", " is []: expected `array` of length >= 1"),
    (CHATS, tools({"name": "a b"}), "tools", " is "),
    (CHATS, tools(F | {"parameters": {"properties": {"x": 3}}}), "tools", " is "),
    (CHATS, tools(F, {"name": "g"}, F), "tools", ' name "f" twice; give each function'),
    (CHATS, tools(F), "tools", " need a server with --tool-call-parser; "),
    (CHATS, {"tool_choice": "auto"}, "tool_choice", " goes with tools; give tools, or neither"),
    (CHATS, tools(F) | {"tool_choice": "any"}, "tool_choice", ' is "any": give none, auto, '),
    (CHATS, tools(F) | {"tool_choice": {"function": {"name": "h"}}}, "tool_choice", ' names "h"; '),
    (CHATS, {"chat_template_kwargs": {"tools": 1}}, "chat_template_kwargs", " sets tools; leave"),
    (COMPLETIONS, tools(F), "tools", " is not supported; leave it out"),
    (CHATS, {"top_logprobs": 21}, "top_logprobs", " is 21: expected `int` <= 20"),
    (CHATS, {"top_logprobs": 2}, "top_logprobs", " goes with logprobs; "),
    (CHATS, {"echo": True}, "echo", " is true: a chat does not repeat"),
    (CHATS, {"response_format": {"type": "xml"}}, "response_format.type", ' is "xml": give text,'),
    (CHATS, schema_of(None), "response_format.json_schema.schema", " is null: give a JSON schema"),
    (CHATS, schema_of(True), "response_format.json_schema.schema", " is true: expected `object"),
    (CHATS, schema_of({"type": "x"}), "response_format", ": Invalid type: x; give another grammar"),
    (CHATS, schema_of({"not": {}}), "response_format", ': Unimplemented keys: ["not"]; give'),
    (CHATS, schema_of({"$ref": "#"}), "response_format", ": NoExtensionBias; give another grammar"),
    (CHATS, schema_of({"enum": ["x" * 2**20]}), "response_format", ": the grammar has 1048"),
    (CHATS, schema_of({"$defs": CHAIN, "$ref": "#/$defs/d0"}), "response_format", ": llguidance"),
    (COMPLETIONS, schema_of({}) | outputs(regex="a"), "response_format", " and structured_outputs"),
    (COMPLETIONS, outputs(regex="a") | {"min_tokens": 1}, "min_tokens", " does not go with a gra"),
    (CHATS, schema_of({}) | {"bad_words": ["x"]}, "bad_words", " does not go with a grammar or"),
    (COMPLETIONS, outputs(), OUTPUTS, " has nothing; give one of json, regex, choice"),
    (COMPLETIONS, outputs(regex="a", choice=["b"]), OUTPUTS, " has regex and choice; "),
    (COMPLETIONS, outputs(choice=[]), f"{OUTPUTS}.choice", " is []: expected `array` of"),
    (COMPLETIONS, outputs(regex="("), OUTPUTS, ": at 1(8): invalid regex"),
    (COMPLETIONS, outputs(grammar="x"), OUTPUTS, ": not GBNF: Expected ::= at line 1"),
    (COMPLETIONS, outputs(regex="a?" * 30_000), OUTPUTS, ": it does not compile within"),
    (COMPLETIONS, outputs(structural_tag="x"), f"{OUTPUTS}.structural_tag", " is not suppor"),
    ("/tokenize", {"messages": HELLO}, "prompt", " and messages; give one of them"),
    ("/tokenize", {"prompt": HALF}, "prompt", ' is "\\ud800": expected Unicode'),
    ("/detokenize", {"tokens": [5000]}, "tokens", " holds 5000; "),
]


@pytest.mark.parametrize("path, fields, param, rest", ONE)
def test_a_wrong_field_of_one_path_is_named(server, path, fields, param, rest):
    status = 404 if fields.get("model") == "other" else 400
    assert_refused(server.post(path, BODIES[path] | fields), param, param + rest, status)


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_a_field_that_would_change_the_answer_is_refused_by_name(server, path):
    for name in UNSUPPORTED:
        response = server.post(path, BODIES[path] | {name: {"type": "json_object"}})
        assert_refused(response, name, f"{name} is not supported; leave it out")
        assert response.json()["error"]["code"] == "unsupported_parameter"


@pytest.mark.parametrize("path", [COMPLETIONS, CHATS])
def test_unicode_null_and_unknown_fields_are_accepted(server, path):
    body = BODIES[path] | {HALF: HALF, "user": "\u0000é", "n": None, "stop": None, "tools": None}
    assert server.post(path, body).status_code == 200


# ---- random damage ---------------------------------------------------------------------------

VALUES = [None, True, 0, -1, 1, 2**31, 10**30, 1e308, -1.5, "", "x", HALF, [], {}, [[]], "é" * 500]
VALUES += [["x"], [7], [True], {"x": 1}, [None], {"type": "text"}, [{}], [[7], "x"]]
VALUES += ["required", tools({"name": "f"})["tools"]]
NAMES = [*BOTH, *UNSUPPORTED, *OF_CHATS, "prompt", "best_of", "user", "unheard_of", "tokens"]


def malformed(draw: random.Random, path: str) -> bytes:
    """Returns a body with random damage, which may still be valid."""
    body = dict(BODIES[path])
    for _ in range(draw.randint(0, 2)):
        body[draw.choice(NAMES)] = draw.choice(VALUES)
    data = json.dumps(body).encode()
    return data[: draw.randrange(len(data))] if draw.random() < 0.2 else data


def test_a_thousand_malformed_bodies_leave_the_server_as_it_was(server):
    """Each body gets an answer or an error of OpenAI's shape."""
    draw, statuses = random.Random(5), Counter()
    for _ in range(1000):
        path = draw.choice(list(BODIES))
        response = server.post(path, malformed(draw, path))
        statuses[path, response.status_code] += 1
        if response.status_code != 200:
            error_of(response, 404 if response.status_code == 404 else 400)
    for path in BODIES:  # some bodies are valid
        assert statuses[path, 200] > 30 and statuses[path, 400] > 50
