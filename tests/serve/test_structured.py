"""Structured output over HTTP: each finished answer follows its grammar; `length` marks a cut."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections import Counter

import pytest
from llguidance import LLMatcher, LLTokenizer

from moa_jax.config import Sampling
from moa_jax.engine import Request
from moa_jax.grammar.compile import json_schema
from tests.decode.test_same_text import Case, engine_for
from tests.decode.tiny import CONFIG, TinyPairs
from tests.serve.toy_server import CHATS, COMPLETIONS, HELLO, LONG, VOCAB, Running, error_of

WORD, COUNT = {"enum": ["cheap", "dear"]}, {"type": "integer"}
SCHEMA = {"type": "object", "properties": {"a": WORD, "b": COUNT}, "required": ["a", "b"]}
STRICT = {"name": "hotel", "strict": True, "schema": SCHEMA | {"additionalProperties": False}}


def is_hotel(text: str) -> bool:
    found = json.loads(text)
    return found["a"] in ("cheap", "dear") and type(found["b"]) is int and len(found) == 2


ASKED = [  # fields of a body, and whether an answer follows them
    ({"response_format": {"type": "json_schema", "json_schema": STRICT}}, is_hotel),
    ({"response_format": {"type": "json_object"}}, lambda text: type(json.loads(text)) is dict),
    ({"structured_outputs": {"json": STRICT["schema"], "disable_any_whitespace": True}}, is_hotel),
    ({"structured_outputs": {"regex": "(ab|[0-9]){3,9}"}}, re.compile("(ab|[0-9]){3,9}").fullmatch),
    ({"structured_outputs": {"choice": ["yes", "é?"]}}, ("yes", "é?").__contains__),
    ({"structured_outputs": {"grammar": 'root ::= "x" root | "y"'}}, re.compile("x*y").fullmatch),
]


def test_only_errors_of_grammars_are_remembered(monkeypatch, tmp_path):
    """The trial process may start the next time."""
    (tmp_path / "llguidance.py").write_text("raise MemoryError('none is left')")
    process = [("setattr", "sys.executable", "/nowhere", "No such file or directory: '/nowhere'")]
    process += [("setenv", "PYTHONPATH", str(tmp_path), "MemoryError: none is left")]
    body = LONG | {"structured_outputs": {"regex": "("}}
    with Running() as server:
        for patch, name, value, reason in process:
            with monkeypatch.context() as context:
                getattr(context, patch)(name, value)
                assert reason in error_of(server.post(COMPLETIONS, body), 503)["message"]
        for _ in range(2):
            assert "invalid regex" in error_of(server.post(COMPLETIONS, body), 400)["message"]
            monkeypatch.delattr("moa_jax.grammar.trial.Trial.result_of", raising=False)
        monkeypatch.setitem(sys.modules, "llguidance", None)
        advice = "; pip install 'moa-jax[serve]' there"
        assert error_of(server.post(COMPLETIONS, body), 400)["message"].endswith(advice)


def test_whitespace_in_json_has_an_end():
    for count in (20, 21):
        matcher = LLMatcher(LLTokenizer("byte"), json_schema(SCHEMA), log_level=0)
        assert matcher.consume_tokens(list(b"{" + count * b" ")) == (count == 20)


@pytest.mark.slow
def test_a_finished_answer_follows_its_grammar(monkeypatch):
    pairs = TinyPairs(dataclasses.replace(CONFIG, vocab_size=VOCAB))
    free = Request((7,), 9, (), Sampling(1.0, seed=1))
    case = Case(pairs.target(), pairs.drafter("lookup"), None, "chain", [free])
    finished = Counter()
    with engine_for(case, monkeypatch) as engine, Running(engine) as server:
        for seed, (fields, follows) in enumerate(2 * ASKED):
            body = {"max_tokens": 40, "seed": seed, "ignore_eos": True} | fields
            body["temperature"] = float(seed < len(ASKED))
            whole = server.post(COMPLETIONS, body | {"prompt": [7, 8], "logprobs": 1}).json()
            choice = whole["choices"][0]
            assert len(choice["logprobs"]["tokens"]) == whole["usage"]["completion_tokens"]
            *events, _ = server.stream(CHATS, body | {"messages": HELLO})
            parts = [event["choices"][0] for event in events]
            text = "".join(part["delta"].get("content") or "" for part in parts)
            ends = choice["finish_reason"], parts[-1]["finish_reason"]
            for answer, reason in zip((choice["text"], text), ends, strict=True):
                finished[seed % len(ASKED)] += reason == "stop"
                assert reason == "length" or follows(answer), (fields, answer)
    assert finished[3] == finished[4] == 4 and finished[0] and finished[2]
