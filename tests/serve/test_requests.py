"""Bodies of requests: prompts, limits and settings; test_malformed_bodies.py has invalid ones."""

from __future__ import annotations

import dataclasses
import json
from types import SimpleNamespace

import pytest

from infer.openai.errors import APIError
from infer.openai.model import Model
from infer.openai.requests import GenerationRequest, chat_of, completion_of
from moa_jax.config import Sampling
from moa_jax.data.tokenizer import load_tokenizer
from tests.serve.toy_server import DEMO, EOS, HELLO, HELLO_IDS, TOKENIZER, VOCAB

MODEL = Model("toy", TOKENIZER, VOCAB, (EOS,), max_tokens=64, max_prompt=50, created=5)


def completion(**fields) -> GenerationRequest:
    return completion_of({"prompt": [7, 8]} | fields, MODEL)


def chat(**fields) -> GenerationRequest:
    return chat_of({"messages": HELLO} | fields, MODEL)


def test_the_defaults_are_openais():
    asked = completion()
    assert asked.sampling == Sampling(temperature=1.0, seed=asked.sampling.seed)
    fields = asked.fields
    assert (fields.n, fields.stream, fields.echo, asked.top_logprobs) == (1, False, False, None)
    assert (asked.new_tokens, asked.stop_ids, asked.stops) == ((16,), (EOS,), ())
    assert chat().new_tokens == (64 - len(HELLO_IDS),)
    for fields in ({}, {"seed": -1}):
        assert len({read(**fields).sampling.seed for read in (completion, chat) * 4}) > 1


def test_settings_reach_the_sampling():
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3}
    settings |= {"repetition_penalty": 1.2, "presence_penalty": -2, "frequency_penalty": 0.5}
    wanted = Sampling(logit_bias=((5, -100.0), (9, 1.5)), **settings)
    biases = {"9": 1.5, "5": -100, "7": 0}
    words = tuple(tuple(TOKENIZER(text)["input_ids"]) for text in ("hotel", " hotel"))
    assert completion(bad_words=[" hotel"]).sampling.bad_words == words
    for read in (completion, chat):
        assert read(**settings, logit_bias=biases).sampling == wanted
        for seed in (-2, (1 << 40) - 2):  # the lowest 32 bits count
            assert read(seed=seed).sampling.seed == (1 << 32) - 2


def test_messages_may_come_in_parts():
    parts = [{"type": "text", "text": "Hello."}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompts[0].ids == HELLO_IDS
    assert chat(messages=[{"role": "developer", "content": "x"}, *HELLO]).prompts


def test_tools_calls_and_arguments_reach_the_template():
    """Arguments of calls are objects there, and those of a request precede the server's."""
    tokenizer = load_tokenizer(DEMO / "target")
    tokenizer.chat_template = (
        "{{ mood }}{{ tools | tojson }}{% for m in messages %}{{ '|' ~ m.role ~ ' ' ~ m.content }}"
        "{% for call in m.tool_calls %}{{ call.function.arguments.x + 1 }}{% endfor %}"
        "{{ m.reasoning_content ~ m.tool_call_id }}{% endfor %}"
    )
    kwargs = {"tool_call_parser": "hermes", "template_kwargs": {"mood": "calm"}}
    model = dataclasses.replace(MODEL, max_prompt=60, tokenizer=tokenizer, **kwargs)
    call = {"id": "7", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}
    spoken = {"role": "assistant", "content": None, "reasoning": "r", "tool_calls": [call]}
    body = {"messages": [*HELLO, spoken, {"role": "tool", "content": "2", "tool_call_id": "7"}]}
    body |= {"tools": [{"type": "function", "function": {"name": "f"}}], "max_tokens": 1}
    said = json.dumps(body["tools"]) + "|user Hello.|assistant 2r|tool 27"
    for given, mood, ignored in (({}, "calm", []), ({"mood": "", "y": 1}, "", ["y"])):
        request = chat_of(body | {"chat_template_kwargs": given}, model)
        assert tokenizer.decode(request.prompts[0].ids) == mood + said
        assert list(request.ignored) == [f"chat_template_kwargs.{name}" for name in ignored]
    tokenizer.chat_template = "{{ messages[0].content }}"
    assert chat_of(body | {"messages": HELLO}, model).ignored == ("tools",)
    forced = {"messages": HELLO, "tool_choice": "required", "ignore_eos": True}
    assert chat_of(body | forced, model).stop_ids == (EOS,)
    with pytest.raises(APIError, match="min_tokens does not go with a grammar or a forced tool"):
        chat_of(body | forced | {"min_tokens": 1}, model)


def test_limits_on_tokens():
    assert completion(max_tokens=62).new_tokens == (62,)
    assert completion(prompt=[7] * 50, max_tokens=14).new_tokens == (14,)
    assert completion(prompt=[7] * 50).new_tokens == (14,)  # for 16, the default
    assert chat(max_completion_tokens=9).new_tokens == chat(max_tokens=9).new_tokens == (9,)
    for fields in ({"max_tokens": 63}, {"prompt": [7] * 51}, {"prompt": "x " * 10_000}):
        with pytest.raises(APIError) as found:
            completion(**fields)
        assert found.value.code == "context_length_exceeded"


def test_long_prompts_are_truncated_on_request():
    ids = list(range(6, 66))
    for size, side, kept in ((-1, "left", ids[-48:]), (5, "left", ids[-5:]), (5, "right", ids[:5])):
        cut = {"truncate_prompt_tokens": size, "truncation_side": side}
        (prompt,) = completion(prompt=ids, echo=True, **cut).prompts
        assert (prompt.ids, prompt.text) == (tuple(kept), MODEL.text_of(kept))
    assert chat(truncate_prompt_tokens=4).prompts[0].ids == HELLO_IDS[-4:]


def test_a_model_without_a_template_cannot_chat():
    bare = Model("base", None, VOCAB, (EOS,), 64, 50, 5)
    model = dataclasses.replace(bare, tokenizer=SimpleNamespace(chat_template=None))
    with pytest.raises(APIError, match="base has no chat template.*/v1/completions"):
        chat_of({"messages": HELLO}, model)
    assert completion_of({"prompt": [7]}, bare).prompts[0].ids == (7,)
    with pytest.raises(APIError, match="no tokenizer; give token ids"):
        completion_of({"prompt": "Hello."}, bare)
