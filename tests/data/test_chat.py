"""Templates of many kinds, and the paper's own rule, mark the answer tokens."""

import json
import random

import numpy as np
import pytest
from tokenizers import processors

from moa_jax.data import chat, records, reference
from moa_jax.data import tokenizer as tk
from moa_jax.errors import InputError
from tests.conftest import golden_cases
from tests.model_folders import refusal

CHATML = (
    "{% if messages and messages[0]['role'] != 'system' %}"
    "{{ '<|begin|>system\nYou help.<|end|>\n' }}{% endif %}"
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + '\n' + m['content'] + '<|end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
INST = (
    "{% for m in messages %}{% if m['role'] == 'assistant' %}{{ ' ' + m['content'] + ' <|end|>' }}"
    "{% else %}{{ '<|begin|>[INST] ' + m['content'] + ' [/INST]' }}{% endif %}{% endfor %}"
)
NO_END_MARK = (
    "{% for m in messages %}{{ m['role'] | upper + ': ' + m['content'] + ' ' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'ASSISTANT:' }}{% endif %}"
)
THINK_LAST = (  # as Qwen3: an empty thought before the last answer only
    "{% for m in messages %}{{ '<|begin|>' + m['role'] + '\n' }}"
    "{% if loop.last and m['role'] == 'assistant' %}{{ '<think>\n\n</think>\n\n' }}{% endif %}"
    "{{ m['content'] + '<|end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}"
)
THINK_FIRST = (  # as reasoning models: the prompt opens a thought that the history leaves out
    "{% for m in messages %}{{ '<|' + m['role'] + '|>' + m['content'].split('</think>')[-1] }}"
    "{% if m['role'] == 'assistant' %}{{ '<|end|>' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>\n' }}{% endif %}"
)
# name -> template, and the text of answer `a` in it, or None if the template leaves it out
TEMPLATES = {
    "own": (tk.CHAT_TEMPLATE, lambda a, last: f"{a.strip()}<|end|>"),
    "chatml": (CHATML, lambda a, last: f"{a}<|end|>\n"),
    "inst": (INST, lambda a, last: f" {a} <|end|>"),
    "no_end_mark": (NO_END_MARK, lambda a, last: f" {a} " if last else f" {a}"),
    "think_last": (THINK_LAST, lambda a, last: "<think>\n\n</think>\n\n" * last + f"{a}<|end|>\n"),
    "think_first": (THINK_FIRST, lambda a, last: f"{a}<|end|>"),
}
WORDS = "coffee room 42 rain, naïve 日本 🙂 ok? USER: user assistant\nnew \n\nlines".split(" ")


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer") / "small"
    # A frequent ` USER` becomes one token, which then crosses the end of answers.
    texts = ["user assistant coffee table room in the rain, USER: ok? USER: ASSISTANT:"] * 9
    tk.train_tokenizer(iter(texts), 330, folder)
    return folder


@pytest.fixture
def tokenizer(folder):
    return tk.load_tokenizer(folder)


def conversation(seed: int, system: bool = True) -> list[chat.Message]:
    draw = random.Random(seed)

    def text():
        return " ".join(draw.choices(WORDS, k=draw.randint(1, 7))).strip()

    turns = [("user", text()) for _ in range(draw.randint(1, 4))]
    messages = [{"role": r, "content": c} for q in turns for r, c in (q, ("assistant", text()))]
    opening = [{"role": "system", "content": text()}] if system and draw.random() < 0.4 else []
    return opening + messages


def answers_in(tokenizer, example: chat.Example) -> list[str]:
    """Returns the text of each run of response tokens."""
    edges = np.diff(np.concatenate([[0], example.response_T.astype(int), [0]]))
    runs = zip(np.flatnonzero(edges == 1), np.flatnonzero(edges == -1), strict=True)
    return [tokenizer.decode(example.tokens_T[begin:end]) for begin, end in runs]


@pytest.mark.parametrize("trim_offsets", [False, True])
@pytest.mark.parametrize("name", TEMPLATES)
def test_response_is_exactly_the_answers(tokenizer, name, trim_offsets):
    tokenizer.chat_template, written = TEMPLATES[name]
    if trim_offsets:
        tokenizer.backend_tokenizer.post_processor = processors.ByteLevel(trim_offsets=True)
    for seed in range(40):
        messages = conversation(seed)
        example = chat.encode(tokenizer, messages, max_length=10_000)
        answers = [m["content"] for m in messages if m["role"] == "assistant"]
        texts = [written(a, i + 1 == len(answers)) for i, a in enumerate(answers)]
        assert answers_in(tokenizer, example) == [text for text in texts if text is not None]
        assert example.tokens_T.dtype == np.int32 and example.response_T.dtype == bool
        assert tokenizer.decode(example.tokens_T) == chat.render(tokenizer, messages)


CALLS = [{"function": {"name": "look", "arguments": '{"city": "Rome"}'}}]
TALK = [
    {"role": "developer", "content": "Be brief."},
    {"role": "user", "content": "Rain?", "tool_calls": None},
    {"role": "assistant", "content": None, "reasoning_content": "Look.", "tool_calls": CALLS},
    {"role": "tool", "content": [{"type": "text", "text": "dry"}], "name": "look"},
    {"role": "assistant", "content": "No.", "reasoning_content": "Dry."},
    {"role": "user", "content": "Thanks"},
    {"role": "assistant", "content": "Bye."},
]
# A template with thoughts after the last question only, and one with another end for the last turn
# and with replies that need a call; each with the answers of TALK and of its first five messages.
TOOL_TEMPLATES = {
    "thoughts": (
        "{{ tools | tojson ~ mood }}{% set at = namespace(last=0) %}{% for m in messages %}"
        "{% if m.role == 'user' %}{% set at.last = loop.index0 %}{% endif %}{% endfor %}"
        "{% for m in messages %}{{ '<|begin|>' ~ m.role ~ '\n' }}{% if m.role == 'assistant' and "
        "loop.index0 > at.last and (loop.last or m.reasoning_content) %}"
        "<think>{{ m.reasoning_content }}</think>{% endif %}{{ m.content }}"
        "{% for call in m.tool_calls %}{{ '\n' if m.content }}<call>"
        "{{ call.function.arguments | tojson }}{% endfor %}{{ '<|end|>\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<|begin|>assistant\n' }}{% endif %}",
        ['<call>{"city": "Rome"}<|end|>\n', "No.<|end|>\n", "<think></think>Bye.<|end|>\n"],
        ['<think>Look.</think><call>{"city": "Rome"}<|end|>\n', "<think>Dry.</think>No.<|end|>\n"],
    ),
    "ends": (
        "{{ tools | tojson ~ mood }}{% set at = namespace(call=none) %}{% for m in messages %}"
        "{% set role = 'rules' if m.role == 'developer' else m.role %}{% if m.role == 'tool' %}"
        "{% set role = at.call or raise_exception('no call') %}{% endif %}{{ '<|begin|>' ~ role }}"
        "{% if loop.last and m.reasoning_content %}~{{ m.reasoning_content }}~{% endif %}"
        "{% if m.tool_calls %}{% set at.call = m.tool_calls[0].function.name %}({{ at.call }})"
        "{% else %}{{ '=' ~ m.content }}{% endif %}"
        "{{ '<|pad|>' if m.role == 'assistant' and (loop.last or m.tool_calls) else '<|end|>' }}"
        "{% endfor %}{% if add_generation_prompt %}<|begin|>assistant{% endif %}",
        ["(look)<|pad|>", "=No.", "=Bye.<|pad|>"],
        ["(look)<|pad|>", "~Dry.~=No.<|pad|>"],
    ),
}


@pytest.mark.parametrize("name", TOOL_TEMPLATES)
def test_calls_and_reasoning_are_answers_and_replies_of_tools_are_not(tokenizer, name):
    """The template gets tools and arguments, also as JSON text and with nulls of a table."""
    tokenizer.chat_template, *wanted = TOOL_TEMPLATES[name]
    rest = {"tools": '[{"name": "look", "parameters": null}]'}
    rest["chat_template_kwargs"] = {"mood": "calm", "other": None}
    for messages, answers in zip((TALK, TALK[:5]), wanted, strict=True):
        record = {"messages": messages} | rest
        (example,) = chat.encode_record(tokenizer, record, len(tokenizer), 10_000)
        assert answers_in(tokenizer, example) == answers
        text = tokenizer.decode(example.tokens_T)
        assert text.startswith('[{"name": "look"}]calm<|') and text.count("dry") == 1
        assert ("rules" if name == "ends" else "system") in text
        assert records.unread_keys(record, tokenizer.chat_template) == ()


@pytest.mark.parametrize("name", ["own", "chatml", "inst", "think_last"])
def test_the_prompt_ends_where_the_last_answer_begins(tokenizer, name):
    tokenizer.chat_template, written = TEMPLATES[name]
    for seed in range(20):
        messages = conversation(seed)
        prompt = chat.prompt_ids(tokenizer, messages[:-1])
        example = chat.encode(tokenizer, messages, max_length=10_000)
        last_begin = len(example.tokens_T) - int(np.argmin(example.response_T[::-1]))
        assert prompt == example.tokens_T[:last_begin].tolist()


def test_a_token_over_the_end_of_an_answer_belongs_to_it(tokenizer):
    tokenizer.chat_template = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    contents = ["in the", " cof", "fee", " room"]
    messages = [
        {"role": ("user", "assistant")[i % 2], "content": content}
        for i, content in enumerate(contents)
    ]
    example = chat.encode(tokenizer, messages, 100)
    assert tokenizer.decode(example.tokens_T[example.response_T]) == " coffee room"


def test_long_conversations_are_cut(tokenizer):
    messages = conversation(1)
    whole = chat.encode(tokenizer, messages, 10_000)
    first = int(np.argmax(whole.response_T))
    cut = chat.encode(tokenizer, messages, first + 1)
    np.testing.assert_array_equal(cut.tokens_T, whole.tokens_T[: first + 1])
    assert cut.response_T.tolist() == [False] * first + [True]
    assert chat.encode(tokenizer, messages, first) is None


def test_unfit_templates(tokenizer):
    for template, reason in (
        (None, "no chat template"),
        ("{{ raise_exception('turns must alternate') }}", "turns must alternate"),
        ("{% for m in messages + messages %}{{ m['content'] }}{% endfor %}", "each turn once"),
    ):
        tokenizer.chat_template = template
        assert reason in refusal(chat.encode, tokenizer, conversation(0), 100)


def test_plain_text_in_chunks(tokenizer):
    text = "coffee in the rain, " * 20
    ids = tokenizer(text, add_special_tokens=False).input_ids
    examples = chat.encode_text(tokenizer, text, max_length=16)
    assert all(example.tokens_T[0] == tokenizer.bos_token_id for example in examples)
    assert all(example.response_T.all() and len(example.tokens_T) <= 16 for example in examples)
    assert np.concatenate([example.tokens_T[1:] for example in examples]).tolist() == ids
    assert chat.encode_text(tokenizer, "", 16) == []
    with pytest.raises(InputError, match="max_length 1 "):
        chat.encode_text(tokenizer, text, 1)


HELLO = [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello!"}]


RECORDS = [
    {"messages": [{**message, "extra": 1} for message in HELLO], "source": "x#y"},
    {"messages": {key: [m[key] for m in HELLO] for key in ("role", "content")}},  # columns
    {"history": HELLO},
    {"conversations": [{"from": "human", "value": "Hi"}, {"from": "gpt", "value": "Hello!"}]},
    {"id": 1, "data": ["Hi", "Hello!"]},
    {"instruction": " Hi ", "input": "", "output": "Hello!\n"},
    {"prompt": "Hi", "completion": "Hello!", "text": "Hi Hello!"},
    {"prompt": HELLO[:1], "completion": HELLO[1:]},
]


@pytest.mark.parametrize("record", RECORDS)
def test_record_styles(record):
    assert records.messages_of(record) == HELLO


@pytest.mark.golden
@pytest.mark.parametrize("folder", golden_cases("dataprep/", "expected.json"))
def test_reference_examples(folder):
    tokenizer = tk.load_tokenizer(folder)
    expected = json.loads((folder / "expected.json").read_text())
    vocab_size, max_length = expected["total_number_tokens"], expected["max_length"]
    names = ("conversations", "formatted", "per_conversation")
    for record, formatted, wanted in zip(*(expected[name] for name in names), strict=True):
        messages = reference.reference_messages(record).messages
        assert chat.render(tokenizer, messages) == formatted
        example = reference.reference_encode(tokenizer, messages, vocab_size, max_length)
        assert (example is not None) == wanted["kept"]
        if example:
            assert example.tokens_T.tolist() == wanted["input_ids"]
            assert example.response_T.astype(int).tolist() == wanted["response_mask"]


IDS = {"prompt_ids": [5, 0, 9], "token_ids": [7, 9], "source": "shop"}


@pytest.mark.parametrize("max_length, kept", [(99, 5), (5, 5), (4, 4)])
def test_ids_are_taken_as_they_are(max_length, kept):
    (example,) = chat.encode_ids([IDS], 10, max_length)
    assert example.tokens_T.tolist() == [5, 0, 9, 7, 9][:kept]
    assert example.response_T.tolist() == [False, False, False, True, True][:kept]


def test_answers_that_continue_each_other_make_one_example():
    first, second = {"prompt_ids": [5], "token_ids": [7, 9]}, {"token_ids": [3, 2]}
    (example,) = chat.encode_ids([first, second | {"prompt_ids": [5, 7, 9, 6]}], 10, 99)
    assert example.tokens_T.tolist() == [5, 7, 9, 6, 3, 2]
    assert example.response_T.tolist() == [False, True, True, False, True, True]
    for prompt in ([5, 7, 8, 6], [5, 7], [5]):  # preceded by another turn, as in some templates
        one, two = chat.encode_ids([first, second | {"prompt_ids": prompt}], 10, 99)
        assert (one.tokens_T.tolist(), one.response_T.tolist()) == ([5, 7, 9], [False, True, True])
        assert two.tokens_T.tolist() == [*prompt, 3, 2]
        assert two.response_T.tolist() == [False] * len(prompt) + [True, True]
    assert len(chat.encode_ids([first, second | {"prompt_ids": [6] * 9}], 10, 9)) == 1


ANSWERS = [{"prompt_ids": [5], "token_ids": [7, 9], "finish_reason": "length"}]


@pytest.mark.parametrize(
    "record, wanted",
    [
        ({"messages": HELLO, "answers": ANSWERS}, [5, 7, 9]),
        ({"messages": HELLO, "answers": {"prompt_ids": [[5]], "token_ids": [[7, 9]]}}, [5, 7, 9]),
        ({"messages": None, "answers": None, "prompt_ids": [5], "token_ids": [8]}, [5, 8]),
        ({"messages": HELLO, "answers": {"text": ["Hello"], "answer_start": [3]}}, None),
    ],
)
def test_ids_override_messages(tokenizer, record, wanted):
    """A record without ids is rendered, for any content of its key `answers`."""
    (example,) = chat.encode_record(tokenizer, record, len(tokenizer), 99)
    if wanted is None:
        wanted = chat.encode(tokenizer, HELLO, 99).tokens_T.tolist()
    assert example.tokens_T.tolist() == wanted


@pytest.mark.parametrize("ids", [[10], [-1], [1 << 40], [8.0], ["8"], [True], [[8]], "8", 8])
@pytest.mark.parametrize("name", ["prompt_ids", "token_ids"])
def test_an_invalid_list_of_ids_is_refused(name, ids):
    """An invalid id is refused at any position, also after the cut."""
    ids = [1, 2, 3, *ids] if isinstance(ids, list) else ids
    with pytest.raises(InputError, match="ids outside the vocabulary of 10; use the target's own"):
        chat.encode_ids([IDS | {name: ids}], 10, 3)


def test_reference_needs_its_sentinel(tokenizer):
    line = refusal(reference.reference_encode, tokenizer, HELLO, 10_000, 100)
    assert "no token 9999" in line
    vocab_size = tokenizer.convert_tokens_to_ids("#") + 1
    messages = [{"role": "user", "content": "C# or C?"}, HELLO[1]]
    line = refusal(reference.reference_encode, tokenizer, messages, vocab_size, 100)
    assert "the sentinel" in line


@pytest.mark.parametrize(
    "turns, wanted",
    [
        ("uaua", ["One<|end|>", "Three<|end|>"]),
        ("suaua", ["Two<|end|>", "Four<|end|>"]),  # the text before the first question
        ("saua", ["One<|end|>", "Three<|end|>"]),  # an answer before the first question
    ],
)
def test_reference_pairs_questions_with_answers(tokenizer, turns, wanted):
    tokenizer.chat_template = tk.CHAT_TEMPLATE.replace("{{ bos_token }}", "")
    roles = {"s": "system", "u": "user", "a": "assistant"}
    contents = zip(turns, ("Zero", "One", "Two", "Three", "Four"), strict=False)
    messages = [{"role": roles[turn], "content": content} for turn, content in contents]
    length = len(tokenizer(chat.render(tokenizer, messages)).input_ids)
    example = reference.reference_encode(tokenizer, messages, len(tokenizer), length)
    assert answers_in(tokenizer, example) == wanted
