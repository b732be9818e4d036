"""The target answers conversations again: ends of answers, resumes, shards, sampled answers."""

import functools
import itertools
import json
from collections import Counter
from pathlib import Path

import jax
import numpy as np
import pytest

from moa_jax import InputError
from moa_jax.config import BlockConfig, DataConfig, TargetConfig
from moa_jax.data import batches, sources
from moa_jax.data.tokenizer import load_tokenizer, train_tokenizer
from moa_jax.model import llama as llama
from moa_jax.pretrained import SpecialIds, save_target
from tests.model_folders import refusal
from tests.train.fake_endpoint import scripted_answer
from train.run.answers import TargetAnswer, TargetQuestion, text_of
from train.run.partial import Partial

CONVERSATIONS = Path(__file__).parents[2] / "moa_jax/demo/conversations.jsonl"
QUESTION, ANSWER = {"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Yes"}
LONG = {"role": "user", "content": "1" * 300}
SYSTEM = {"role": "system", "content": "Be brief."}


def save_talkative_target(folder: Path) -> Path:
    """Saves a random target with short answers: every third of its tokens ends an answer."""
    messages = (m for r in sources.read(str(CONVERSATIONS)) for m in r["messages"])
    train_tokenizer((m["content"] for m in messages), 320, folder / "tokenizer")
    config = TargetConfig(
        "llama", 320, 2, BlockConfig(32, 4, 2, 8, 48, 1e-5, 1e4, None), False, 512
    )
    params = jax.jit(functools.partial(llama.init, config))(jax.random.key(0))
    ends = SpecialIds(tuple(range(4, 320, 5)))
    return save_target(folder / "target", config, params, folder / "tokenizer", generation=ends)


@pytest.fixture(scope="module")
def tokenizer(folder):
    return load_tokenizer(folder)


SAMPLED = ("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--seed", "3")


class Scripted:
    """Replaces a target; has the answers of `FakeEndpoint`, in another order than the questions."""

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
        question, rules = self.asked.pop(len(self.asked) // 2), self.rules
        ids, stopped = scripted_answer(
            rules.tokenizer, question.prompt_ids, rules.max_new_tokens, rules.ignore_stop
        )
        return TargetAnswer(question.number, ids, text_of(rules.tokenizer, ids), stopped)


def write(path: Path, *records: dict) -> Path:
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


def read(path: Path) -> list[dict]:
    return list(map(json.loads, lines(path)))


def test_cut_answers_stay_and_training_rows_hold_their_ids(
    ask, scripted, tmp_path, tokenizer, capsys
):
    """A cut answer is the last one. Rows train on all tokens of the answers, and on no others."""
    output = tmp_path / "a.jsonl"
    ask(output, "--max-new-tokens", "9", "--batch", "4")
    records = read(output)
    cut = [record for record in records if record["answers"][-1]["finish_reason"] == "length"]
    assert len(records) == 40 and len(cut) > 5
    line = f"{len(cut)} of 40 conversations end early: an answer is cut at 9 tokens"
    assert line in capsys.readouterr().err
    assert any(len(record["answers"]) > 1 for record in cut)
    wanted = Counter()
    for record in records:
        roles = Counter(message["role"] for message in record["messages"])
        assert roles["assistant"] == len(record["answers"])
        assert all(answer["finish_reason"] == "stop" for answer in record["answers"][:-1])
        for answer in record["answers"]:
            ids = answer["token_ids"]
            ends = ids[-1] == tokenizer.eos_token_id
            assert ends == (answer["finish_reason"] == "stop") and (ends or len(ids) == 9)
            wanted[(*answer["prompt_ids"], *ids), len(ids)] += 1
    assert all(record["messages"][-1]["role"] == "assistant" for record in cut)
    config = DataConfig((str(output),), (), 500, 500, rows_per_batch=4, seed=0, pack=False)
    source, report = batches.load(config, tokenizer, 320, "train")
    assert (report.kept, report.dropped) == (40, {})
    assert answers_in(source.rows) == wanted


def answers_in(rows) -> Counter[tuple[tuple[int, ...], int]]:
    """Returns all tokens up to the end of each run of trained tokens, and the run's length."""
    found = Counter()
    for tokens_T, response_T in zip(rows.tokens_BT, rows.response_BT, strict=True):
        edge_T = np.diff(response_T.astype(int), prepend=0, append=0)
        for begin, end in zip(*map(np.flatnonzero, (edge_T == 1, edge_T == -1)), strict=True):
            found[tuple(tokens_T[:end].tolist()), int(end - begin)] += 1
    return found


@pytest.mark.parametrize("kind", [(), ("--ignore-stop",)], ids=["text", "ids"])
def test_an_interrupted_run_is_resumed(ask, scripted, tmp_path, monkeypatch, kind):
    """The file equals that of an unbroken run, with half a line lost and another batch size."""
    ask(tmp_path / "whole.jsonl", "--limit", "15", "--batch", "4", *kind)
    output = tmp_path / "cut.jsonl"
    for batch, count in (("4", 6), ("3", 9)):  # twice, to read entries after half a line
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            cut_after(patch, count)
            ask(output, "--limit", "15", "--batch", batch, *kind)
        with (tmp_path / "cut.jsonl.partial").open("a") as file:
            file.write('{"half a li')
    for flags, line in (
        (("--limit", "2"), r"holds \d+ already; raise --limit"),
        (("--max-prompt", "99"), r"other flags \(max_prompt 256"),
        (("--dtype", "bfloat16"), r"other flags \(dtype float32"),
        (SAMPLED, "made with other flags"),
    ):
        with pytest.raises(InputError, match=line):
            ask(output, "--limit", "15", *kind, *flags)
    ask(output, "--limit", "15", "--batch", "5", "--dtype", "float32", *kind)
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert len(read(output)) > 5 and not list(tmp_path.glob("*.partial"))
    with pytest.raises(InputError, match="exists already"):
        ask(output)


def cut_after(patch: pytest.MonkeyPatch, count: int) -> None:
    """Interrupts a run after `count` more entries of its partial output."""
    append, entries = Partial._append, itertools.count(1)

    def cut(self, entry):
        append(self, entry)
        if next(entries) == count:
            raise KeyboardInterrupt

    patch.setattr(Partial, "_append", cut)


def test_what_is_left_out_is_counted(ask, scripted, tmp_path, capsys):
    prompts = write(
        tmp_path / "prompts.jsonl",
        {"messages": [QUESTION]},  # user turns alone are enough
        {"messages": [SYSTEM, LONG]},
        {"nothing": 1},
        {"nothing": 2},
        {"messages": [QUESTION, ANSWER], "source": "shop", "license": "MIT", "id": 4},
    )
    ask(tmp_path / "a.jsonl", "--batch", "3", "--max-prompt", "50", prompts=prompts)
    one, two = read(tmp_path / "a.jsonl")
    assert two == one | {"source": "shop", "license": "MIT"} and two["messages"][0] == QUESTION
    found = [line for line in capsys.readouterr().err.splitlines() if "left out" in line]
    assert len(found) == 2 and "2 of 5 conversations left out: " in found[0]
    assert "unknown style" in found[0] and "than 50 tokens" in found[1]


# ---- shards -------------------------------------------------------------------------------


def test_shards_hold_every_answer_once(ask, scripted, tmp_path):
    flags = ("--ignore-stop", "--limit", "20")
    ask(tmp_path / "whole.jsonl", *flags)
    for shard in ("0/3", "1/3", "2/3"):
        ask(tmp_path / "parts" / "a.jsonl", *flags, "--shard", shard, "--batch", "4")
    parts = sorted((tmp_path / "parts").iterdir())
    assert [part.name for part in parts] == [f"a-0000{i}-of-00003.jsonl" for i in range(3)]
    whole = lines(tmp_path / "whole.jsonl")
    assert len(whole) == 20
    assert [lines(part) for part in parts] == [whole[i::3] for i in range(3)]
    assert len(list(sources.read(str(tmp_path / "parts")))) == 20
    last = parts[0].rename(tmp_path / "parts" / parts[0].name.replace("00000", "00003"))
    assert sources.files_of(str(tmp_path / "parts")) == [*parts[1:], last]  # counted from 1
    last.rename(parts[0])
    parts[1].unlink()  # a shard that was never started
    line = refusal(sources.files_of, str(tmp_path / "parts"))
    assert line.startswith(f"{tmp_path}/parts lacks {parts[1]}; write the missing shards, or name ")
