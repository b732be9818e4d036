"""Answers that are drawn, and answers of many processes: the same for each record, whoever asks."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from infer.cli.flags.pair import DEMO
from moa_jax import InputError, Session, load_target
from moa_jax.config import Sampling
from moa_jax.data import chat, sources
from moa_jax.data.tokenizer import load_tokenizer
from tests.train.test_regenerate import (
    CONVERSATIONS,
    Scripted,
    cut_after,
    save_talkative_target,
)
from train import regenerate

SAMPLED = ("--temperature", "0.9", "--top-k", "40", "--top-p", "0.95", "--seed", "3")
SMALL = ("--max-prompt", "32", "--max-new-tokens", "12", "--dtype", "float32")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_talkative_target(tmp_path_factory.mktemp("target"))


@pytest.fixture
def ask(folder):
    def ask(output: Path, *flags: str, prompts: Path = CONVERSATIONS) -> None:
        flags = ["--target", str(folder), "--prompts", str(prompts), *flags]
        regenerate.main([*flags, "--output", str(output)])

    return ask


@pytest.fixture
def scripted(monkeypatch):
    monkeypatch.setattr(regenerate, "_local", Scripted)


def lines(path: Path) -> list[str]:
    return path.read_text().splitlines()


# ---- shards -------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [1, 3])
def test_shards_hold_every_answer_once(ask, scripted, tmp_path, count):
    ask(tmp_path / "whole.jsonl", "--ignore-stop", "--limit", "20")
    for number in range(count):
        shard = ("--shard", f"{number}/{count}", "--batch", "4")
        ask(tmp_path / "parts" / "a.jsonl", *shard, "--ignore-stop", "--limit", "20")
    parts = sorted((tmp_path / "parts").iterdir())
    assert [part.name for part in parts] == [
        f"a-0000{number}-of-0000{count}.jsonl" for number in range(count)
    ]
    whole = lines(tmp_path / "whole.jsonl")
    assert len(whole) == 20
    for number, part in enumerate(parts):
        assert lines(part) == whole[number::count]
    together = [json.dumps(record) for record in sources.read(str(tmp_path / "parts"))]
    assert sorted(together) == sorted(json.dumps(json.loads(line)) for line in whole)


def test_each_shard_goes_on_where_it_was_cut(ask, scripted, tmp_path, monkeypatch):
    shard = ("--shard", "1/2", "--batch", "3")
    ask(tmp_path / "whole.jsonl", *shard)
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_after(patch, 5)
        ask(tmp_path / "cut.jsonl", *shard)
    assert (tmp_path / "cut-00001-of-00002.jsonl.partial").exists()
    ask(tmp_path / "cut.jsonl", "--shard", "0/2")  # another shard is another file
    ask(tmp_path / "cut.jsonl", *shard)
    one, two = (tmp_path / f"{name}-00001-of-00002.jsonl" for name in ("cut", "whole"))
    assert one.read_bytes() == two.read_bytes() and lines(one)
    with pytest.raises(InputError, match="00001-of-00002.jsonl exists already"):
        ask(tmp_path / "cut.jsonl", *shard)


@pytest.mark.parametrize("text", ["8/8", "3", "-1/4", "a/b", "1/2/3", "0/0", ""])
def test_what_is_no_shard(ask, tmp_path, text, capsys):
    with pytest.raises(SystemExit) as stopped:
        ask(tmp_path / "a.jsonl", f"--shard={text}")
    assert stopped.value.code == 2 and "is no shard; write 0/8" in capsys.readouterr().err


def test_a_shard_without_records(ask, scripted, tmp_path):
    with pytest.raises(InputError, match="no records of any source in shard 5/9"):
        ask(tmp_path / "a.jsonl", "--limit", "5", "--shard", "5/9")


def test_an_unreadable_record_is_left_out_and_counted(ask, scripted, tmp_path, capsys):
    good = json.dumps({"messages": [{"role": "user", "content": "Hi"}]}).encode()
    (tmp_path / "a.jsonl").write_bytes(good + b"\n\xff\n[]\n" + good + b"\n")
    ask(tmp_path / "out.jsonl", "--ignore-stop", prompts=tmp_path / "a.jsonl")
    told = capsys.readouterr().err
    assert "1 of 4 conversations left out: a record that is not JSON in UTF-8" in told
    assert "1 of 4 conversations left out: a record that is not a JSON object" in told
    assert len(lines(tmp_path / "out.jsonl")) == 2


# ---- drawn answers ------------------------------------------------------------------------


@pytest.fixture
def short(tmp_path) -> Path:
    """Conversations of two questions, so short that one compiled program answers all."""
    talk = lambda i: [{"role": "user", "content": text} for text in (f"Room {i}?", "Why?")]
    path = tmp_path / "short.jsonl"
    path.write_text("".join(json.dumps({"messages": talk(i)}) + "\n" for i in range(8)))
    return path


def test_drawn_answers_depend_on_seed_record_and_turn_alone(ask, tmp_path, monkeypatch):
    asked: dict[tuple[int, ...], Sampling] = {}

    class NotingSampling(Scripted):
        def ask(self, question):
            asked[tuple(question.prompt_ids)] = question.sampling
            super().ask(question)

    def laws(*flags: str) -> dict[tuple[int, ...], Sampling]:
        asked.clear()
        ask(tmp_path / "-".join(["a", *flags]).replace("/", "_"), *SAMPLED, *flags)
        return dict(asked)

    monkeypatch.setattr(regenerate, "_local", NotingSampling)
    whole = laws("--batch", "7")
    parts = [laws("--batch", "3", "--shard", f"{number}/2") for number in range(2)]
    assert len(whole) > 40 and all(parts) and parts[0] | parts[1] == whole
    assert len({law.seed for law in whole.values()}) == len(whole)
    other = laws("--seed", "4")
    assert not any(law in whole.values() for law in other.values())


@pytest.mark.slow
def test_drawn_answers_follow_the_law_of_the_flags(ask, short, tmp_path, folder):
    """The very tokens that a session draws with these settings and the seed of record and turn."""
    ask(tmp_path / "a.jsonl", *SMALL, *SAMPLED, "--batch", "8", prompts=short)
    session = Session(load_target(folder, "float32"))
    tokenizer = load_tokenizer(session.target.folder)

    def answer(asked: list[tuple[int, list]]) -> list[str]:
        """What follows the messages of each record, of which eight make the same program."""
        eight = (asked * 8)[:8]
        prompts = [chat.prompt_ids(tokenizer, messages) for _, messages in eight]
        keys = [np.random.SeedSequence((3, number, len(said))) for number, said in before(eight)]
        laws = [Sampling(0.9, 40, 0.95, seed=int(key.generate_state(1)[0])) for key in keys]
        found = session.generate(prompts, 12, None, laws)[: len(asked)]
        return [tokenizer.decode(r.token_ids, skip_special_tokens=True).strip() for r in found]

    before = lambda asked: [(number, messages[:-1]) for number, messages in asked]
    talks = [json.loads(line)["messages"] for line in lines(tmp_path / "a.jsonl")]
    for turn in (1, 3):
        there = [(int(t[0]["content"][5:-1]), t) for t in talks if len(t) > turn]
        told = [talk[turn]["content"] for _, talk in there]
        assert len(told) > 1 and told == answer([(n, talk[:turn]) for n, talk in there])


def test_a_cut_run_of_other_draws_is_refused(ask, scripted, tmp_path, monkeypatch):
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_after(patch, 1)
        ask(tmp_path / "a.jsonl", *SAMPLED)
    for others in ((*SAMPLED[:-1], "4"), ("--temperature", "0.8", *SAMPLED[2:]), ()):
        with pytest.raises(InputError, match="made with other flags"):
            ask(tmp_path / "a.jsonl", *others)


@pytest.mark.parametrize("flag", ["--temperature", "--top-k"])
def test_settings_that_are_no_law(ask, tmp_path, flag):
    with pytest.raises(InputError, match=flag[2:].replace("-", "_")):
        ask(tmp_path / "a.jsonl", flag, "-1")


@pytest.mark.slow
def test_speculation_changes_no_text(short, tmp_path, monkeypatch):
    """The bundled drafter drafts where one sits alone, and seats are given on."""
    engines = []

    class NotingEngine(regenerate.Engine):
        def __init__(self, *args, **options) -> None:
            super().__init__(*args, **options)
            engines.append(self)

    monkeypatch.setattr(regenerate, "Engine", NotingEngine)
    flags = ["--target", str(DEMO / "target"), "--prompts", str(short), *SAMPLED]
    flags += ["--max-prompt", "96", "--max-new-tokens", "32"]
    for name, more in (("plain", ["4"]), ("drafted", ["1", "--draft", "bundled"])):
        output = tmp_path / name
        regenerate.main([*flags, "--batch", *more, "--output", str(output)])
    assert (tmp_path / "plain").read_bytes() == (tmp_path / "drafted").read_bytes()
    plain, drafted = (engine.load() for engine in engines)
    assert len(lines(tmp_path / "plain")) > 5 and drafted.finished["stop"] > 5
    assert (plain.accepted_tokens, drafted.accepted_tokens > 20) == (0, True)
