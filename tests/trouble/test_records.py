"""All programs read the records of a file alike, and one bad record does not end a run."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest

from infer.cli.flags.pair import DEMO
from infer.info import ROOT
from moa_jax import Result, Session
from moa_jax.data.tokenizer import load_tokenizer
from tests.data.test_chat import TALK as TOOL_TALK
from tests.data.test_chat import TOOL_TEMPLATES
from tests.train.fake_endpoint import FakeEndpoint, served

TARGET = DEMO / "target"
HELLO = [{"role": "user", "content": "Hi there"}, {"role": "assistant", "content": "Hello!"}]
TALK = [*HELLO, {"role": "user", "content": "And now?"}, {"role": "assistant", "content": "Tea."}]
SYSTEM = {"role": "system", "content": "Be brief."}
R1 = (  # opens a thought in the prompt, and removes thoughts from all answers
    "{{ bos_token }}{% for m in messages %}{% set text = m['content'].split('</think>')[-1] %}"
    "{{ '<|' ~ m['role'] ~ '|>' ~ text ~ '<|end|>' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|><think>' }}{% endif %}"
)


def share_gpt(messages: list[dict]) -> list[dict]:
    names = {"user": "human", "assistant": "gpt"}
    return [{"from": names.get(m["role"], m["role"]), "value": m["content"]} for m in messages]


def write(path: Path, *records: object) -> Path:
    lines = (each if isinstance(each, bytes) else json.dumps(each).encode() for each in records)
    path.write_bytes(b"".join(line + b"\n" for line in lines))
    return path


@pytest.fixture
def data_lines(run, tmp_path):
    """Returns the lines of train.distill on its data; an unusable cache folder ends the run."""

    def lines(file: Path, *flags: object) -> list[str]:
        place = write(tmp_path / "no folder")
        done = run(
            *("train.distill", "--config", ROOT / "configs/tiny.py", "--target-cache", place),
            *("--data.train", file, "--data.validation", file, *flags),
            *("--run.directory", tmp_path / "run", "--output", tmp_path / "out"),
        )
        assert done.refusal().endswith("name a new folder"), done
        return done.err[done.err.index("data: ") :].partition("validation: ")[0].splitlines()

    return lines


@pytest.fixture
def prompts_of(run, monkeypatch):
    """Returns the ids of the prompts that infer.generate reads from a file, and its stderr."""
    answer = lambda ids: Result(ids, [1], "length", [], 0.1, 0.1, [])
    monkeypatch.setattr(Session, "generate", lambda self, prompts, *_: [*map(answer, prompts)])

    def prompts(file: Path) -> tuple[list[list[int]], str]:
        flags = ("--prompts", file, "--json", "--mode", "plain", "--max-new-tokens", 1)
        done = run("infer.generate", *flags)
        assert done.code == 0, done
        return [each["prompt_ids"] for each in json.loads(done.out)["results"]], done.err

    return prompts


@pytest.fixture
def answers_of(run, tmp_path):
    """Returns the records of train.regenerate for a file, and its stderr; a server answers."""

    def answers(file: Path, target: Path = TARGET) -> tuple[list[dict], str]:
        output = tmp_path / "answers.jsonl"
        with served(FakeEndpoint(target)) as url:
            flags = ("--target", target, "--endpoint", url, "--output", output)
            done = run("train.regenerate", "--prompts", file, *flags)
        assert done.code == 0, done
        return [json.loads(line) for line in output.read_text().splitlines()], done.err

    return answers


def test_messages_override_a_rendered_text(data_lines, tmp_path):
    """The rendered text marks no answer and no end of a turn."""
    text = {"text": "### user: Hi there\n### assistant: Hello!"}
    mixed = [{"messages": HELLO}, {"messages": HELLO} | text, {"messages": HELLO} | text]
    line, notes = data_lines(write(tmp_path / "a.jsonl", *mixed))
    found = re.match(r"data: 3 .*?, 0 dropped.*, (\d+) tokens, (\d+) of them", line)
    tokens, answers = map(int, found.groups())
    assert tokens % 3 == answers % 3 == 0 and answers < tokens
    assert "`text` (2)" in notes and "3 records" in notes


def test_a_null_key_is_absent(answers_of, tmp_path):
    """Tables write null, or NaN, for missing values, in records and in messages."""
    nulls = [{"role": None, "content": None} | each for each in share_gpt(HELLO)]
    records = [
        {"messages": HELLO, "conversations": None, "text": None, "system": None},
        {"messages": [], "conversations": nulls, "answers": None, "token_ids": None},
        {"messages": [{"from": None, "value": None} | message for message in HELLO]},
        b'{"instruction": "Hi there", "input": NaN, "output": "Hello!", "source": NaN}',
    ]
    answered, notes = answers_of(write(tmp_path / "a.jsonl", *records))
    assert [record["messages"][0] for record in answered] == [HELLO[0]] * 4
    assert "left out" not in notes and "not read" not in notes


def test_a_greeting_before_the_first_question_is_kept(answers_of, tmp_path):
    greeting = {"role": "assistant", "content": "Welcome."}
    file = write(tmp_path / "b.jsonl", {"conversations": share_gpt([greeting, *HELLO])})
    (record,), _ = answers_of(file)
    assert record["messages"][:2] == [greeting, HELLO[0]]


def test_a_system_text_beside_the_messages_is_in_the_prompt(prompts_of, tmp_path):
    """Holds for every style; if the messages have another system text, the error names the key."""
    system = {"system": "Be brief."}
    records = [
        {"messages": [SYSTEM, *HELLO]},
        {"messages": HELLO} | system,
        {"conversations": share_gpt(HELLO)} | system,
        {"instruction": "Hi there", "output": "Hello!"} | system,
        {"prompt": "Hi there", "system_prompt": "Be brief."},
        {"messages": [SYSTEM, *HELLO], "system": "Be loud."},
    ]
    prompts, notes = prompts_of(write(tmp_path / "a.jsonl", *records))
    assert len(prompts) == 6 and all(prompt == prompts[0] for prompt in prompts)
    text = load_tokenizer(TARGET).decode(prompts[0])
    assert "Be brief." in text and text.endswith("<|assistant|>")
    assert "keys that are not read, in 6 records: `system` (1)" in notes
    assert "5 of 6 prompts end before the last answer" in notes


def test_content_in_parts_is_its_text(prompts_of, answers_of, run, tmp_path):
    """Holds for prompts and training records; a part that is not text is refused by its type."""
    parts = [{"type": "text", "text": "Hi there"}]
    talk = {"messages": [{"role": "user", "content": parts}]}
    file = write(tmp_path / "a.jsonl", talk, {"messages": HELLO[:1]}, {"prompt": "Hi there"})
    (first, *others), _ = prompts_of(file)
    assert others == [first, first]
    records, _ = answers_of(file)
    assert [record["answers"][0]["prompt_ids"] for record in records] == [first, *others]
    parts.append({"type": "image_url", "image_url": {"url": "x"}})
    line = run("infer.generate", "--prompts", write(tmp_path / "b.jsonl", talk)).refusal()
    assert "line 1: a content part of type 'image_url'" in line


def templated(place: Path, template: str) -> Path:
    """Returns a copy of the bundled target with another chat template."""
    shutil.copytree(TARGET, place)
    path = place / "tokenizer_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"chat_template": template}))
    return place


def test_turns_of_tools_stay_and_reach_the_template(answers_of, data_lines, tmp_path):
    """All but calls and replies is answered anew; a template that ignores tools is named."""
    rest = {"tools": [{"name": "look"}], "chat_template_kwargs": {"mood": "calm"}}
    target = templated(tmp_path / "target", TOOL_TEMPLATES["thoughts"][0])
    file = write(tmp_path / "a.jsonl", {"messages": TOOL_TALK} | rest, {"messages": HELLO} | rest)
    records, notes = answers_of(file, target)
    assert "not read" not in notes and [len(each["answers"]) for each in records] == [2, 1]
    assert all(each[key] == rest[key] for each in records for key in rest)
    assert [m["role"] for m in records[0]["messages"]] == [m["role"] for m in TOOL_TALK]
    text = load_tokenizer(target).decode(records[0]["answers"][1]["prompt_ids"])
    assert text.startswith('[{"name": "look"}]calm<|begin|>system\nBe brief.<|end|>')
    assert '<call>{"city": "Rome"}<|end|>\n<|begin|>tool\ndry<|end|>' in text
    (line,) = data_lines(write(tmp_path / "b.jsonl", *records), "--target", target)
    assert line.startswith("data: 2 conversations, 0 dropped")
    (tmp_path / "answers.jsonl").unlink()
    records, notes = answers_of(file)
    assert len(records) == 1 and "left out: the chat template writes no tool calls" in notes
    assert "`chat_template_kwargs.mood` (2), `tools` (2), `reasoning_content` (1)" in notes


def test_rows_without_decoded_tokens_are_counted(data_lines, tmp_path):
    """The template removes thoughts from answers; a record with ids is not rendered."""
    target = templated(tmp_path / "target", R1)
    records = [{"messages": TALK}] * 3 + [{"prompt_ids": [1, 9], "token_ids": [7, 4]}]
    *_, notes = data_lines(write(tmp_path / "a.jsonl", *records), "--target", target)
    assert notes.startswith("3 of 4 rows (75%)") and "chat template" in notes


def test_ids_of_another_tokenizer_are_counted(data_lines, tmp_path):
    """This vocabulary has all of the ids, so only the decoded text shows the difference."""
    tokenizer = load_tokenizer(TARGET)
    ids = tokenizer("Hello!<|end|>", add_special_tokens=False)["input_ids"]
    answers = [{"prompt_ids": [1, 9], "token_ids": each} for each in (ids, [7, *ids])]
    records = [{"messages": HELLO, "answers": [each]} for each in answers]
    *_, notes = data_lines(write(tmp_path / "a.jsonl", *records, {"messages": HELLO}))
    assert notes.startswith("1 of 3 rows (33%) hold token ids that decode to another text")


# ---- one bad record -------------------------------------------------------------------------


@pytest.fixture
def wide(tmp_path) -> Path:
    """Returns the bundled target; its tokenizer has two tokens more than the model has rows."""
    place = shutil.copytree(TARGET, tmp_path / "target")
    tokenizer = load_tokenizer(place)
    tokenizer.add_tokens(["<|new|>", "<|unused|>"])
    tokenizer.save_pretrained(place)
    return place


BAD = [
    {"messages": [{"role": "user", "content": "<|new|>"}, HELLO[1]]},
    {"messages": [{"role": "robot", "content": "Hi"}, HELLO[1]]},
    {"nothing": 1},
    b'{"messages": [',
    b'{"messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"prompt_ids": [1], "token_ids": [NaN, 1e999]}',
]
GOOD = {"messages": [HELLO[0]]}


def test_one_bad_record_ends_no_regeneration(answers_of, wide, tmp_path):
    """Each bad record is skipped and counted, and the first one is named."""
    file = write(tmp_path / "a.jsonl", *(line for bad in BAD for line in (GOOD, bad)))
    records, notes = answers_of(file, wide)
    assert len(records) == len(BAD)
    left_out = [line for line in notes.splitlines() if " left out: " in line]
    assert sum(int(line.split()[0]) for line in left_out) == len(BAD)
    new = "1 of 12 conversations left out: ids outside the vocabulary"
    assert any(line.startswith(new) and f"{file} line 2)" in line for line in left_out)
