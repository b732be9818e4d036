"""Bodies of requests: what they ask for, and the error that names a wrong field."""

from __future__ import annotations

import json

import pytest

from infer.openai.errors import APIError
from infer.openai.model import Model
from infer.openai.requests import (
    UNSUPPORTED,
    GenerationRequest,
    chat_of,
    completion_of,
    object_of,
)
from infer.openai.tokens import TokenTexts
from moa_jax.config import Sampling
from tests.decode.test_detokenize import sentence_pieces
from tests.serve.toy_server import EOS, TOKENIZER, VOCAB

MODEL = Model("toy", TOKENIZER, VOCAB, (EOS,), max_tokens=64, max_prompt=50, created=5)
HELLO = [{"role": "user", "content": "Hello."}]
HELLO_IDS = tuple(TOKENIZER.apply_chat_template(HELLO, add_generation_prompt=True)["input_ids"])


def completion(**fields) -> GenerationRequest:
    return completion_of({"prompt": [7, 8]} | fields, MODEL)


def chat(**fields) -> GenerationRequest:
    return chat_of({"messages": HELLO} | fields, MODEL)


def refusal(read, **fields) -> APIError:
    with pytest.raises(APIError) as found:
        read(**fields)
    assert "\n" not in found.value.content()["error"]["message"]
    return found.value


def test_the_defaults_are_openais():
    asked = completion()
    assert asked.sampling == Sampling(temperature=1.0, seed=asked.sampling.seed)
    assert (asked.fields.n, asked.fields.stream, asked.fields.echo, asked.top_logprobs) == (
        1,
        False,
        False,
        None,
    )
    assert (asked.new_tokens, asked.stop_ids, asked.stops) == ((16,), (EOS,), ())
    assert chat().new_tokens == (64 - len(HELLO_IDS),)
    assert len({completion().sampling.seed for _ in range(8)}) > 1


def test_settings_reach_the_sampling():
    settings = {"temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3}
    settings |= {"repetition_penalty": 1.2, "presence_penalty": -2, "frequency_penalty": 0.5}
    wanted = Sampling(logit_bias=((5, -100.0), (9, 1.5)), **settings)
    biases = {"9": 1.5, "5": -100, "7": 0}
    assert completion(**settings, logit_bias=biases).sampling == wanted
    assert chat(**settings, logit_bias=biases).sampling == wanted


@pytest.mark.parametrize("seed, wanted", [(-2, (1 << 32) - 2), (1 << 40, 0), (0, 0)])
def test_any_seed_of_64_bits_will_do(seed, wanted):
    assert completion(seed=seed).sampling.seed == wanted


def test_the_seed_minus_one_is_no_seed():
    for read in (completion, chat):
        assert len({read(seed=-1).sampling.seed for _ in range(8)}) > 1


@pytest.mark.parametrize("seed", [1 << 64, -(1 << 64), 1.0, True, "1", [1]])
def test_what_is_no_seed_is_refused(seed):
    assert "seed is" in str(refusal(completion, seed=seed).content())


def test_null_is_as_good_as_nothing():
    names = "n stop temperature max_tokens logit_bias stream_options logprobs tools".split()
    assert completion(**dict.fromkeys(names), seed=1) == completion(seed=1)


def test_prompts_are_texts_ids_or_lists_of_either():
    hello = tuple(TOKENIZER("Hello.")["input_ids"])
    for prompt, wanted in [
        ("Hello.", (hello,)),
        ([7, 8], ((7, 8),)),
        (["Hello.", "Hello."], (hello, hello)),
        ([[7, 8], [9]], ((7, 8), (9,))),
        ([[7, 8], "Hello."], ((7, 8), hello)),
    ]:
        assert tuple(each.ids for each in completion(prompt=prompt).prompts) == wanted


def test_an_echo_knows_the_text_of_its_prompt():
    assert completion(prompt="Hello.", echo=True).prompts[0].text == "Hello."
    ids = TOKENIZER("Good day.")["input_ids"]
    assert completion(prompt=ids, echo=True).prompts[0].text == "Good day."
    assert completion(prompt="Hello.").prompts[0].text == ""


def test_the_tokens_of_an_echo_have_places_in_its_text():
    """Those of a text are the tokenizer's own; others are found by decoding."""
    text = " Caf\u00e9 au lait \u20ac5."
    for prompt in (text, list(TOKENIZER(text)["input_ids"]), [2, *TOKENIZER(text)["input_ids"], 4]):
        asked = completion(prompt=prompt, echo=True, logprobs=1, max_tokens=0)
        assert asked.new_tokens == (0,) and asked.prompt_logprobs
        (found,) = asked.prompts
        ends = (*found.offsets[1:], len(found.text))
        assert len(found.offsets) == len(found.ids)
        assert list(found.offsets) == sorted(found.offsets)
        for token, begin, end in zip(found.ids, found.offsets, ends, strict=True):
            alone = TOKENIZER.decode([token])
            assert "\ufffd" in alone or alone == found.text[begin:end]
    assert not completion(prompt=text, echo=True).prompts[0].offsets
    assert not completion(prompt=text, logprobs=1).prompt_logprobs


def test_added_tokens_are_in_no_text():
    """Of a text with a token before and after it, those have the place of their neighbours.

    Its other tokens have all of it, with spaces that the tokenizer leaves out of their places.
    """

    class Adding:
        is_fast, chat_template = True, None

        def get_vocab(self):
            return {"x": 0}

        def __call__(self, text, add_special_tokens, verbose, return_offsets_mapping=False):
            ids, places = [7, 8], [(1, 3), (4, 6)]
            if add_special_tokens:
                ids, places = [2, *ids, 4], [(0, 0), *places, (0, 0)]
            return {"input_ids": ids, "offset_mapping": places}

    model = Model("adding", Adding(), VOCAB, (EOS,), 64, 50, 5)
    fields = {"prompt": " ab cd", "echo": True, "logprobs": 0}
    assert completion_of(fields, model).prompts[0].offsets == (0, 0, 3, 3)
    fields |= {"add_special_tokens": False}
    assert completion_of(fields, model).prompts[0].offsets == (0, 3)


def test_messages_may_come_in_parts():
    parts = [{"type": "text", "text": "Hello."}]
    assert chat(messages=[{"role": "user", "content": parts}]).prompts[0].ids == HELLO_IDS
    assert chat(messages=[{"role": "developer", "content": "x"}, *HELLO]).prompts


def test_stops_are_texts_and_ids():
    asked = completion(stop=["a", "b", "a"], stop_token_ids=[9, EOS])
    assert (asked.stops, asked.stop_ids) == (("a", "b"), (EOS, 9))
    assert completion(stop="a").stops == ("a",)
    assert completion(ignore_eos=True, stop_token_ids=[9]).stop_ids == (9,)


def test_limits_on_tokens():
    assert completion(max_tokens=62).new_tokens == (62,)
    too_many = refusal(completion, max_tokens=63)
    assert "62 fit" in str(too_many) and too_many.param == "max_tokens"
    assert refusal(chat, max_completion_tokens=63).param == "max_completion_tokens"
    assert refusal(chat, max_completion_tokens=63, max_tokens=63).param == "max_tokens"
    assert completion(prompt=[7] * 50).new_tokens == (14,)  # for 16, which nobody asked for
    assert chat(max_completion_tokens=9).new_tokens == chat(max_tokens=9).new_tokens == (9,)
    assert chat(max_completion_tokens=9, max_tokens=9).new_tokens == (9,)
    assert refusal(completion, prompt=[7] * 51).code == "context_length_exceeded"
    assert completion(prompt=[7] * 50, max_tokens=14).new_tokens == (14,)
    assert "more than 50 tokens" in str(refusal(completion, prompt="x " * 10_000))


def test_unknown_fields_are_noted_and_known_ones_are_not():
    assert completion(user="me", top_a=3, safety=None).ignored == ("top_a",)
    options = {"include_usage": True, "continuous_usage_stats": True}
    ignored = completion(stream=True, stream_options=options, top_a=3).ignored
    assert ignored == ("top_a", "stream_options.continuous_usage_stats")
    assert completion(tools=[], tool_choice="none", best_of=1).ignored == ()
    assert chat(response_format={"type": "text"}, tools=[], modalities=["text"]).ignored == ()


@pytest.mark.parametrize("name", UNSUPPORTED)
def test_fields_that_would_change_the_answer_are_refused_by_name(name):
    for read in (completion, chat):
        found = refusal(read, **{name: {"type": "json_object"}})
        assert (found.param, found.code) == (name, "unsupported_parameter")
    assert refusal(chat, add_special_tokens=True).param == "add_special_tokens"


BOTH = {  # fields, and the parameter that the error names
    "model": [3, "other", "\ud800"],
    "n": [0, -1, 129, 1.5, True, "2", 10**30],
    "temperature": [-0.1, True, "hot", [], 1e300, 10**400],
    "top_p": [0, 1.1, -1, {}],
    "min_p": [-0.1, 2],
    "top_k": [-2, 1.5, False],
    "repetition_penalty": [0, -1, 1e9, 1e-300],
    "presence_penalty": [2.1, -3, "x"],
    "frequency_penalty": [2.1, -3],
    "seed": [1.5, "x", 1 << 63, True],
    "max_tokens": [0, -5, 1.0, "many", 1 << 40],
    "stop": ["", [""], [3], ["x"] * 17, {}, 5, "x" * 300, ["\udc00"]],
    "stop_token_ids": [[-1], [VOCAB], ["x"], 5, [True], list(range(40))],
    "ignore_eos": [1, "yes"],
    "stream": [1, "true"],
    "stream_options": ["x", [], {"include_usage": True}],
    "logit_bias": [[], {"x": 1}, {"-1": 1}, {"3000": 1}, {"5": 101}, {"5": "x"}, {"5": None}],
    "return_token_ids": [0],
    "include_stop_str_in_output": ["no"],
    "skip_special_tokens": [0],
}


@pytest.mark.parametrize("name", BOTH)
def test_a_wrong_field_is_named(name):
    for value in BOTH[name]:
        for read in (completion, chat):
            found = refusal(read, **{name: value})
            assert (found.param, found.status) == (name, 404 if value == "other" else 400)
            assert name in str(found)


ONE = [
    (completion, "prompt", {"prompt": None}),
    (completion, "prompt", {"prompt": ""}),
    (completion, "prompt", {"prompt": []}),
    (completion, "prompt", {"prompt": 5}),
    (completion, "prompt", {"prompt": {}}),
    (completion, "prompt", {"prompt": [7, "x"]}),
    (completion, "prompt", {"prompt": [VOCAB]}),
    (completion, "prompt", {"prompt": [7, -1]}),
    (completion, "prompt", {"prompt": [7, 10**50]}),
    (completion, "prompt[1]", {"prompt": [[7], [VOCAB]]}),
    (completion, "prompt[1]", {"prompt": ["Hello.", True]}),
    (completion, "prompt[0]", {"prompt": [True, 7]}),
    (completion, "prompt[0]", {"prompt": [None]}),
    (completion, "prompt[0]", {"prompt": ["\ud800"]}),
    (completion, "prompt[1]", {"prompt": ["Hello.", ""]}),
    (completion, "prompt[1]", {"prompt": [[7], [7] * 51]}),
    (completion, "prompt", {"prompt": ["x"] * 129}),
    (completion, "n", {"prompt": ["x"] * 100, "n": 2}),
    (completion, "best_of", {"best_of": 2}),
    (completion, "max_tokens", {"max_tokens": 0, "echo": True}),
    (completion, "max_tokens", {"max_tokens": 0, "logprobs": 1}),
    (completion, "echo", {"echo": 1, "logprobs": 1}),
    (completion, "logprobs", {"logprobs": 21}),
    (completion, "logprobs", {"logprobs": True}),
    (completion, "max_tokens", {"prompt": ["Hello.", [7] * 49], "max_tokens": 20}),
    (chat, "messages", {"messages": []}),
    (chat, "messages", {"messages": None}),
    (chat, "messages", {"messages": "Hello."}),
    (chat, "messages[0]", {"messages": ["Hello."]}),
    (chat, "messages[0].role", {"messages": [{"content": "Hello."}]}),
    (chat, "messages[0].role", {"messages": [{"role": "tool", "content": "Hello."}]}),
    (chat, "messages[1].content", {"messages": [*HELLO, {"role": "assistant"}]}),
    (chat, "messages[0].content", {"messages": [{"role": "user", "content": 5}]}),
    (chat, "messages[0].content", {"messages": [{"role": "user", "content": "\ud800"}]}),
    (chat, "messages[0].content[0]", {"messages": [{"role": "user", "content": [{}]}]}),
    (
        chat,
        "messages[0].content[0]",
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": "x"}]}]},
    ),
    (chat, "messages[0].tool_calls", {"messages": [{**HELLO[0], "tool_calls": [{}]}]}),
    (chat, "top_logprobs", {"top_logprobs": 2}),
    (chat, "top_logprobs", {"top_logprobs": 21, "logprobs": True}),
    (chat, "logprobs", {"logprobs": 2}),
    (chat, "max_tokens", {"max_tokens": 2, "max_completion_tokens": 3}),
    (chat, "max_completion_tokens", {"max_completion_tokens": 0}),
    (chat, "echo", {"echo": True}),
    (chat, "prompt", {"prompt": "Hello."}),
    (completion, "messages", {"messages": HELLO}),
    (completion, "top_logprobs", {"top_logprobs": 2}),
    (completion, "max_tokens", {"max_tokens": 2, "max_completion_tokens": 3}),
    (completion, "max_completion_tokens", {"max_completion_tokens": -1}),
]


@pytest.mark.parametrize("read, param, fields", ONE)
def test_a_wrong_field_of_one_of_the_two_is_named(read, param, fields):
    found = refusal(read, **fields)
    assert (found.status, found.param) == (400, param)


@pytest.mark.parametrize(
    "read, fields, said",
    [
        (chat, {"messages": []}, "messages is []: expected `array` of length >= 1"),
        (completion, {"stop_token_ids": [5, "x"]}, 'stop_token_ids holds "x"; give token ids'),
        (completion, {"prompt": 5}, "prompt is 5: expected `str | array | null`, got `int`"),
    ],
)
def test_what_is_said_of_a_wrong_field_fits_it(read, fields, said):
    assert said in str(refusal(read, **fields))


def test_a_model_without_a_template_cannot_chat():
    class Bare:
        chat_template = None

    for tokenizer in (None, Bare()):
        model = Model("base", tokenizer, VOCAB, (EOS,), 64, 50, 5)
        with pytest.raises(APIError, match="base has no chat template.*/v1/completions") as found:
            chat_of({"messages": HELLO}, model)
        assert found.value.code == "no_chat_template"
    bare = Model("base", None, VOCAB, (EOS,), 64, 50, 5)
    assert completion_of({"prompt": [7]}, bare).prompts[0].ids == (7,)
    with pytest.raises(APIError, match="no tokenizer; give token ids"):
        completion_of({"prompt": "Hello."}, bare)


BODIES = {
    b"": "not JSON",
    b"{": "not JSON",
    b"[]": "not a JSON object",
    b'"x"': "not a JSON object",
    b'{"a": NaN}': "NaN is not a JSON number",
    b'{"a": -Infinity}': "-Infinity is not a JSON number",
    b'{"a": "\xff"}': "can't decode byte 0xff",
    b"[" * 100_000: "recursion",
    b'{"n": ' + b"9" * 5000 + b"}": "not JSON",
    b'{"a": "\x00"}': "not JSON",
}


@pytest.mark.parametrize("body", BODIES, ids=lambda body: repr(body[:12]))
def test_a_body_that_is_no_object_is_refused(body):
    with pytest.raises(APIError, match=BODIES[body]) as found:
        object_of(body)
    assert (found.value.status, found.value.param) == (400, "body")


def test_a_body_of_unicode_is_read():
    assert object_of(json.dumps({"a": "é\u0000"}).encode()) == {"a": "é\u0000"}


def test_bytes_of_a_vocabulary_of_sentencepiece_are_known():
    class Pieces:
        def __call__(self, text, add_special_tokens):
            return {"input_ids": [1]}

        def decode(self, ids, skip_special_tokens):
            return "".join({1: "a", 3: "\ufffd", 4: "<0xE2>"}[token] for token in ids)

        def convert_ids_to_tokens(self, token):
            return "<0xE2>"

    texts = TokenTexts(Pieces())
    assert texts(3) == ("bytes:\\xe2", b"\xe2")
    assert texts(4) == ("<0xE2>", b"<0xE2>")  # written so


def test_tokens_that_differ_in_a_space_have_different_texts():
    texts = TokenTexts(sentence_pieces())
    assert [texts(token)[0] for token in (2, 3)] == [" the", "the"]
