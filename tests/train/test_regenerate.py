"""Conversations that the target answers anew: where they end, what is left out, and resuming."""

import contextlib
import functools
import itertools
import json
import os
import shutil
from collections import Counter
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import InputError, Session, load_target
from moa_jax.config import BlockConfig, DataConfig, Sampling, TargetConfig
from moa_jax.data import batches, chat, sources
from moa_jax.data.tokenizer import load_tokenizer, train_tokenizer
from moa_jax.decode.session import for_decoding
from moa_jax.decode.state import Weights
from moa_jax.model import llama as llama
from moa_jax.model import masks
from moa_jax.pretrained import SpecialIds, save_target
from train import regenerate
from train.run.answers import TargetAnswer, TargetQuestion, text_of
from train.run.conversations import AnswerRules, Conversation
from train.run.partial import Partial

CONVERSATIONS = Path(__file__).parents[1] / "data" / "conversations.jsonl"
QUESTION, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
LONG = {"role": "user", "content": "1" * 300}
SYSTEM = {"role": "system", "content": "Be brief."}


def save_talkative_target(folder: Path) -> Path:
    """A random target that soon stops, as every third of its tokens ends an answer."""
    messages = (m for r in sources.read(str(CONVERSATIONS)) for m in r["messages"])
    train_tokenizer((m["content"] for m in messages), 320, folder / "tokenizer")
    config = TargetConfig(
        "llama", 320, 2, BlockConfig(32, 4, 2, 8, 48, 1e-5, 1e4, None), False, 512
    )
    params = jax.jit(functools.partial(llama.init, config))(jax.random.key(0))
    ends = SpecialIds(tuple(range(4, 320, 5)))
    return save_target(folder / "target", config, params, folder / "tokenizer", generation=ends)


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_talkative_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def lively(folder) -> Path:
    """The same with larger weights: some of its greedy answers stop soon and some do not."""
    target = load_target(folder, "float32")
    params = jax.tree.map(lambda each: 4 * each, target.params)
    tokenizer, ends = folder.parent / "tokenizer", target.generation
    place = folder.parent / "lively"
    return save_target(place, target.config, params, tokenizer, generation=ends)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


class Scripted:
    """Stands for a target: the answer depends on the prompt alone, and some are cut.

    Past its end each answer is as long as wanted. `FakeEndpoint` has the same. Answers come in
    another order than questions.
    """

    def __init__(self, args, rules) -> None:
        self.most_asked, self.rules = args.batch or 32, rules
        self.asked: list[TargetQuestion] = []

    def __enter__(self):
        return self

    def __exit__(self, *exception) -> None:
        assert not self.asked or exception[0] is not None

    def ask(self, question: TargetQuestion) -> None:
        assert question.number not in {other.number for other in self.asked}
        self.asked.append(question)
        assert len(self.asked) <= self.most_asked

    def next(self) -> TargetAnswer:
        question = self.asked.pop(len(self.asked) // 2)
        number, tokenizer = sum(question.prompt_ids) % 97, self.rules.tokenizer
        text = f" I heard {number}. "
        ids = [*tokenizer(text, add_special_tokens=False).input_ids, tokenizer.eos_token_id]
        stopped = number % 7 != 0
        if not stopped:
            ids = tokenizer(text.rstrip(), add_special_tokens=False).input_ids
        if self.rules.ignore_stop or not stopped:
            ids, stopped = (ids * self.rules.max_new_tokens)[: self.rules.max_new_tokens], False
        return TargetAnswer(question.number, ids, text_of(tokenizer, ids), stopped)


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(regenerate, "_local", Scripted)


@pytest.fixture
def ask(folder):
    def ask(output: Path, *flags: str, prompts: Path = CONVERSATIONS) -> None:
        flags = ["--target", str(folder), "--prompts", str(prompts), *flags]
        regenerate.main([*flags, "--output", str(output)])

    return ask


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def read(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_answers_are_the_targets_own(ask, tmp_path, lively, tokenizer, capsys):
    """The ids of every answer are those that a session decodes after the same prompt."""
    flags = ("--target", str(lively), "--max-new-tokens", "6", "--dtype", "float32")
    ask(tmp_path / "a.jsonl", "--limit", "10", "--batch", "4", *flags)
    records = read(tmp_path / "a.jsonl")
    asked, answers = [], []
    for record in records:
        turns = enumerate(record["messages"])
        answered = [i for i, message in turns if message["role"] == "assistant"]
        asked += (record["messages"][:i] for i in answered)
        answers += record["answers"]
        texts = [record["messages"][i]["content"] for i in answered]
        assert texts == [text_of(tokenizer, each["token_ids"]) for each in record["answers"]]
    prompts = [chat.prompt_ids(tokenizer, messages) for messages in asked]
    results = Session(load_target(lively, "float32")).generate(prompts, 6)
    for answer, prompt, found in zip(answers, prompts, results, strict=True):
        ids = {"prompt_ids": prompt, "token_ids": list(found.token_ids)}
        assert answer == ids | {"finish_reason": found.finish_reason}
    finishes = Counter(answer["finish_reason"] for answer in answers)
    assert len(records) == 10 and min(finishes["stop"], finishes["length"]) > 2
    assert max(len(record["answers"]) for record in records) > 1
    cut = finishes["length"]
    told = f"{cut} of 10 conversations end early: an answer is cut at 6 tokens"
    assert told in capsys.readouterr().err


def test_cut_answers_stay_and_are_the_last(ask, scripted, tmp_path, tokenizer, capsys):
    ask(tmp_path / "a.jsonl", "--max-new-tokens", "9", "--batch", "4")
    records = read(tmp_path / "a.jsonl")
    assert len(records) == 40
    cut = [record for record in records if record["answers"][-1]["finish_reason"] == "length"]
    assert len(cut) > 5 and any(len(record["answers"]) > 1 for record in cut)
    for record in records:
        *before, last = record["answers"]
        roles = Counter(message["role"] for message in record["messages"])
        assert roles["assistant"] == len(record["answers"])
        assert all(answer["finish_reason"] == "stop" for answer in before)
        for answer in record["answers"]:
            ends = answer["token_ids"][-1] == tokenizer.eos_token_id
            assert ends == (answer["finish_reason"] == "stop")
    for record in cut:
        assert record["messages"][-1]["role"] == "assistant"
        assert len(record["answers"][-1]["token_ids"]) == 9
    assert f"{len(cut)} of 40 conversations end early: an answer is cut at 9" in (
        capsys.readouterr().err
    )


def test_training_rows_hold_the_ids_that_were_decoded(ask, scripted, tmp_path, tokenizer):
    """Of every answer all its tokens after its own prompt, and no other token is trained on."""
    output = tmp_path / "a.jsonl"
    ask(output, "--max-new-tokens", "9")
    answers = [answer for record in read(output) for answer in record["answers"]]
    config = DataConfig((str(output),), (), 500, 500, rows_per_batch=4, seed=0, pack=False)
    source, report = batches.load(config, tokenizer, 320, "train")
    assert (report.kept, report.dropped) == (40, {})
    wanted = Counter()
    for answer in answers:
        wanted[(*answer["prompt_ids"], *answer["token_ids"]), len(answer["token_ids"])] += 1
    assert answers_in(source.rows) == wanted
    assert report.response_tokens == sum(len(answer["token_ids"]) for answer in answers)


def answers_in(rows) -> Counter[tuple[tuple[int, ...], int]]:
    """Of every run of trained tokens: all tokens up to its end, and its length."""
    found = Counter()
    for tokens_T, response_T in zip(rows.tokens_BT, rows.response_BT, strict=True):
        edge_T = np.diff(response_T.astype(int), prepend=0, append=0)
        for begin, end in zip(*map(np.flatnonzero, (edge_T == 1, edge_T == -1)), strict=True):
            found[tuple(tokens_T[:end].tolist()), int(end - begin)] += 1
    return found


def test_prompts_outside_the_vocabulary_are_left_out(folder, scripted, tmp_path, capsys):
    """Of a tokenizer with more tokens than the target has rows; all others are answered."""
    place = tmp_path / "target"
    shutil.copytree(folder, place)
    tokenizer = load_tokenizer(place)
    tokenizer.add_tokens(["<|new|>"])
    tokenizer.save_pretrained(place)
    talks = [{"messages": [{"role": "user", "content": text}]} for text in ("Hi", "<|new|>", "No")]
    prompts = write(tmp_path / "prompts.jsonl", *talks)
    flags = ["--target", str(place), "--prompts", str(prompts)]
    regenerate.main([*flags, "--output", str(tmp_path / "a.jsonl")])
    assert [record["messages"][0]["content"] for record in read(tmp_path / "a.jsonl")] == [
        "Hi",
        "No",
    ]
    told = "1 of 3 conversations left out: ids outside the vocabulary of 320"
    assert told in capsys.readouterr().err


def test_weights_are_held_once(ask, tmp_path, monkeypatch):
    """The engine finds them as it decodes with them."""

    def see(target, drafter, **settings):
        ready = for_decoding(Weights(target.params, None)).target
        leaves = zip(*map(jax.tree.leaves, (ready, target.params)), strict=True)
        assert all(one is other for one, other in leaves)
        raise InterruptedError

    monkeypatch.setattr(regenerate, "Engine", see)
    with pytest.raises(InterruptedError):
        ask(tmp_path / "a.jsonl", "--limit", "1")


def test_answers_go_on_past_their_end(ask, tmp_path, folder, tokenizer, capsys):
    """Of every conversation the target's own tokens, as many as wanted, ready to be trained on."""
    output = tmp_path / "a.jsonl"
    flags = ("--ignore-stop", "--max-new-tokens", "12", "--dtype", "float32")
    ask(output, *flags, "--limit", "6", "--batch", "6")
    records, asked = read(output), sources.read(str(CONVERSATIONS))
    assert "left out" not in capsys.readouterr().err
    assert [record["prompt_ids"] for record in records] == [
        chat.prompt_ids(tokenizer, talk["messages"][:1]) for talk in itertools.islice(asked, 6)
    ]
    target = load_target(folder, "float32")
    ends = set(target.generation.eos_ids)
    assert sum(not ends.isdisjoint(record["token_ids"][:-1]) for record in records) > 3
    config = DataConfig((str(output),), (), 268, 268, rows_per_batch=6, seed=0, pack=False)
    rows = batches.load(config, tokenizer, 320, "train")[0].rows
    assert rows.response_BT.sum(axis=1).tolist() == [12] * 6
    answer_BT = rows.response_BT[:, 1:]
    likeliest_BT = likeliest(target, rows.tokens_BT)[:, :-1]
    np.testing.assert_array_equal(likeliest_BT[answer_BT], rows.tokens_BT[:, 1:][answer_BT])


def likeliest(target, tokens_BT) -> np.ndarray:
    """The token (B, T) that follows each one, without caches."""

    @jax.jit
    def run(params, tokens_BT):
        segment_BT = jnp.ones_like(tokens_BT)
        position_BT = jnp.broadcast_to(jnp.arange(tokens_BT.shape[1]), tokens_BT.shape)
        context = llama.Context(position_BT, masks.causal(segment_BT))
        found = llama.forward(target.config, params, tokens_BT, context)
        return llama.unembed(params, found.hidden_BTD).argmax(axis=-1)

    return np.asarray(run(target.params, tokens_BT))


def test_ignored_stops_leave_no_answer_out(ask, scripted, tmp_path, capsys):
    """Not even one that would never stop; a record keeps its first question and its source."""
    prompts = write(
        tmp_path / "prompts.jsonl",
        *({"messages": [{"role": "user", "content": f"Room {i}"}]} for i in range(30)),
        {"messages": [SYSTEM, LONG]},
        {"messages": [SYSTEM, QUESTION, ANSWER, QUESTION], "source": "shop", "license": "MIT"},
    )
    flags = ("--max-prompt", "50", "--batch", "5")
    ask(tmp_path / "text.jsonl", *flags, prompts=prompts)
    assert "end early: an answer is cut at 64 tokens; raise --max-new" in capsys.readouterr().err
    ask(tmp_path / "ids.jsonl", *flags, "--ignore-stop", prompts=prompts)
    (left_out,) = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert left_out.startswith("1 of 32 ") and "a prompt of more than 50 tokens" in left_out
    records = read(tmp_path / "ids.jsonl")
    assert len(records) == 31
    assert all(len(record["token_ids"]) == 64 for record in records)
    ids = {"prompt_ids", "token_ids", "finish_reason"}
    assert all(record.keys() == ids for record in records[:-1])
    assert records[-1].keys() == ids | {"source", "license"}
    assert {record["finish_reason"] for record in records} == {"length"}


@pytest.mark.parametrize("kind", [(), ("--ignore-stop",)], ids=["text", "ids"])
def test_a_cut_run_goes_on(ask, scripted, tmp_path, monkeypatch, kind):
    """The same file as of an unbroken run, with half a line lost and another batch size."""
    ask(tmp_path / "whole.jsonl", "--limit", "15", "--batch", "4", *kind)
    output = tmp_path / "cut.jsonl"
    for batch, count in (("4", 6), ("3", 9)):  # twice: what follows half a line must be read, too
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            cut_after(patch, count)
            ask(output, "--limit", "15", "--batch", batch, *kind)
        with (tmp_path / "cut.jsonl.partial").open("a") as file:
            file.write('{"half a li')
    with pytest.raises(InputError, match=r"holds \d+ already; raise --limit"):
        ask(output, "--limit", "2", *kind)
    for others in ((*kind, "--max-prompt", "99"), () if kind else ("--ignore-stop",)):
        with pytest.raises(InputError, match=r"other flags \((max_prompt 256|ignore_stop)"):
            ask(output, "--limit", "15", *others)
    ask(output, "--limit", "15", "--batch", "5", *kind)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(read(output)) > 5 and not list(tmp_path.glob("*.partial"))
    with pytest.raises(InputError, match="exists already"):
        ask(output)


def cut_after(patch: pytest.MonkeyPatch, count: int) -> None:
    """Interrupts a run as soon as its partial output has so many more entries."""
    append, entries = Partial._append, itertools.count(1)

    def cut(self, entry):
        append(self, entry)
        if next(entries) == count:
            raise KeyboardInterrupt

    patch.setattr(Partial, "_append", cut)


def test_no_answer_is_asked_for_twice(ask, tmp_path, monkeypatch):
    """Not even one of a conversation that was cut between two of its questions."""
    asked: list[tuple[int, ...]] = []

    class NotingNumbers(Scripted):
        def next(self):
            answer = super().next()
            asked.append(answer.number)
            return answer

    monkeypatch.setattr(regenerate, "_local", NotingNumbers)
    ask(tmp_path / "whole.jsonl", "--limit", "15")
    whole, asked[:] = sorted(asked), []
    assert len(whole) > 20
    while not (tmp_path / "cut.jsonl").exists():
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            cut_after(patch, 3)
            ask(tmp_path / "cut.jsonl", "--limit", "15")
    assert sorted(asked) == whole
    assert (tmp_path / "cut.jsonl").read_bytes() == (tmp_path / "whole.jsonl").read_bytes()


def test_a_file_of_an_older_version_is_refused(ask, scripted, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_after(patch, 1)
        ask(tmp_path / "a.jsonl")
    partial = tmp_path / "a.jsonl.partial"
    header = json.loads(partial.read_text().splitlines()[0])
    assert header.pop("version")
    old = json.dumps(header) + '\n{"number": 0, "line": "{}"}\n'
    partial.write_text(old)
    with pytest.raises(InputError, match="another version of this program; finish it with that"):
        ask(tmp_path / "a.jsonl")
    assert partial.read_text() == old  # that version can still finish it


def test_a_cut_run_keeps_its_dtype(ask, scripted, tmp_path, monkeypatch):
    """That of the hardware, unless a flag names one."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_after(patch, 1)
        ask(tmp_path / "a.jsonl", "--limit", "4")
    with monkeypatch.context() as patch, pytest.raises(InputError, match="dtype float32"):
        patch.setattr(regenerate, "default_dtype", lambda: jnp.bfloat16)
        ask(tmp_path / "a.jsonl", "--limit", "4")
    ask(tmp_path / "a.jsonl", "--limit", "4", "--dtype", "float32")


def test_a_run_cut_at_its_first_byte(ask, scripted, tmp_path):
    (tmp_path / "a.jsonl.partial").touch()
    ask(tmp_path / "a.jsonl", "--limit", "4")
    assert read(tmp_path / "a.jsonl")


def test_the_output_is_on_the_disk_before_its_parts_are_removed(tmp_path, monkeypatch):
    done: list[str] = []
    sync, replace = os.fsync, os.replace
    monkeypatch.setattr(os, "fsync", lambda file: done.append("fsync") or sync(file))
    monkeypatch.setattr(os, "replace", lambda *paths: done.append("replace") or replace(*paths))
    with Partial(tmp_path / "a.jsonl", {}) as partial:
        partial.close(0, "{}", "")
        partial.finish()
    assert done == ["fsync", "replace"] and (tmp_path / "a.jsonl").read_text() == "{}\n"


def test_text_does_not_depend_on_batch_mates(ask, scripted, tmp_path):
    for batch in ("1", "5", "40"):
        ask(tmp_path / batch, "--batch", batch, "--max-prompt", "60")
    assert (tmp_path / "1").read_bytes() == (tmp_path / "5").read_bytes()
    assert (tmp_path / "1").read_bytes() == (tmp_path / "40").read_bytes()


def test_a_long_prompt_ends_its_conversation(tokenizer):
    rules = AnswerRules(tokenizer, 320, 50, 64, False, Sampling())
    talk = Conversation({"messages": [QUESTION, ANSWER, SYSTEM, LONG, ANSWER, QUESTION]}, rules)
    talk.ask()
    asked = talk.prompt
    talk.take(TargetAnswer(0, [9, 4], "No.", stopped=True))
    for _ in range(3):
        talk.ask()
        assert talk.prompt is None
    said = [QUESTION, {"role": "assistant", "content": "No."}]
    answer = {"prompt_ids": asked, "token_ids": [9, 4], "finish_reason": "stop"}
    assert json.loads(talk.line()) == {"messages": said, "answers": [answer]}
    assert talk.fault.startswith("a prompt of more than 50 tokens")


def test_what_is_left_out_is_counted(ask, scripted, tmp_path, capsys):
    prompts = write(
        tmp_path / "prompts.jsonl",
        {"messages": [QUESTION]},  # user turns alone are enough
        {"messages": [SYSTEM, LONG]},
        {"messages": [SYSTEM]},
        {"messages": [{"role": "user", "content": 3}]},
        {"nothing": 1},
        {"nothing": 2},
        {"messages": [QUESTION, ANSWER], "source": "shop", "license": "MIT", "id": 4},
    )
    ask(tmp_path / "a.jsonl", "--batch", "3", "--max-prompt", "50", prompts=prompts)
    one, two = read(tmp_path / "a.jsonl")
    assert one == {key: two[key] for key in ("messages", "answers")}
    assert two["messages"][0] == QUESTION
    assert (two["source"], two["license"], "id" in two) == ("shop", "MIT", False)
    lines = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert [line.split(":")[0] for line in lines] == [
        "2 of 7 conversations left out",
        *["1 of 7 conversations left out"] * 3,
    ]
    for reason in ("unknown style", "more than 50 tokens", "user message", "without text"):
        assert sum(reason in line for line in lines) == 1


def test_nothing_answered(ask, scripted, tmp_path):
    prompts = write(tmp_path / "prompts.jsonl", {"nothing": 1})
    with pytest.raises(InputError, match="none of 1 conversations got an answer; 1: .* style"):
        ask(tmp_path / "a.jsonl", prompts=prompts)
    assert list(tmp_path.iterdir()) == [prompts]


@pytest.mark.parametrize("flag", ["--batch", "--limit", "--max-prompt", "--max-new-tokens"])
def test_counts_are_positive(ask, tmp_path, flag, capsys):
    with pytest.raises(SystemExit):
        ask(tmp_path / "a.jsonl", flag, "0")
    assert flag in capsys.readouterr().err


def test_refused_at_the_start(ask, scripted, tmp_path):
    with pytest.raises(InputError, match="more than the target's .* positions"):
        ask(tmp_path / "a.jsonl", "--max-prompt", "999999")
    with pytest.raises(InputError, match="no records of nowhere"):
        ask(tmp_path / "a.jsonl", "--sources", "nowhere")
    (tmp_path / "file").touch()
    with pytest.raises(InputError, match="is a file; choose a path that can be used"):
        ask(tmp_path / "file" / "a.jsonl")
