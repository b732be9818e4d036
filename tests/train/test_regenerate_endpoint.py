"""Regeneration by a server: its requests, its faults, and that no answer is lost."""

from __future__ import annotations

import itertools
import re
import threading
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer.cli.flags.pair import DEMO
from infer.server_process import Child
from moa_jax import InputError
from tests.conftest import slow
from tests.meeting import free_port
from tests.train.fake_endpoint import FakeEndpoint, Fault, Handler, served
from tests.train.test_regenerate import CONVERSATIONS, Scripted, read, write
from train import regenerate
from train.run import connection as module
from train.run.answers import TargetAnswer
from train.run.connection import address_of
from train.run.partial import Partial

LIMITED = ("--limit", "15")
IDS = ("--ignore-stop", "--max-new-tokens", "9")
SAMPLED = ("--temperature", "0.9", "--top-p", "0.95", "--seed", "3")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def fake(folder):
    """Returns a server and its URL, with everything that its faults need."""
    server = FakeEndpoint(folder)
    with served(server) as server.url:
        yield server


@pytest.fixture
def ask(ask, fake):
    def at_the_server(output: Path, *flags: str) -> None:
        ask(output, *([] if "--endpoint" in flags else ["--endpoint", fake.url]), *flags)

    return at_the_server


@pytest.fixture
def local(folder, tmp_path, monkeypatch):
    """Returns the output of local regeneration with these flags."""

    def local(*flags: str) -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(regenerate, "_local", Scripted)
            given = ["--target", str(folder), "--prompts", str(CONVERSATIONS), *flags]
            regenerate.main([*given, "--output", str(tmp_path / "local")])
        return (tmp_path / "local").read_bytes()

    return local


# ---- requests and files -------------------------------------------------------------------


@pytest.mark.parametrize("kind", [(), IDS, SAMPLED], ids=["text", "ids", "drawn"])
def test_the_file_is_that_of_local_regeneration(ask, fake, local, tmp_path, kind):
    workers, turns = threading.Barrier(3), itertools.count()  # each worker sends one request first
    fake.fault = lambda handler: next(turns) < 3 and workers.wait(30) < 0
    ask(tmp_path / "a.jsonl", *LIMITED, *kind, "--concurrency", "3")
    assert (tmp_path / "a.jsonl").read_bytes() == local(*LIMITED, *kind)
    assert max(Counter(fake.prompts()).values()) == 1
    assert not list(tmp_path.glob("*.partial"))


def test_settings_are_sent_that_servers_would_else_take_from_the_model(ask, fake, tmp_path):
    ask(tmp_path / "a.jsonl", "--limit", "1")
    greedy = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 64}
    post = fake.posts[0]
    assert post | greedy | {"model": "scripted", "return_token_ids": True} == post
    assert set(post["stop_token_ids"]) == set(range(4, 320, 5)) and "seed" not in post
    ask(tmp_path / "b.jsonl", "--limit", "1", *SAMPLED, *IDS)
    post = fake.posts[-1]
    drawn = {"temperature": 0.9, "top_p": 0.95, "top_k": -1, "min_p": 0.0, "ignore_eos": True}
    assert post | drawn == post and "stop_token_ids" not in post
    # Of the flag, the record, and the messages before the question; local answers have it, too.
    assert post["seed"] == np.random.SeedSequence((3, 0, 0)).generate_state(1)[0]


# ---- faults -------------------------------------------------------------------------------


def busy(handler: Handler) -> bool:
    return handler.reply(429, {"error": {"message": "too many"}}, Retry_After="0")


def choice(**fields: Any) -> Fault:
    return lambda handler: handler.reply(200, {"choices": [fields]})


PASSING = {  # replies, and the line of each
    "busy": (busy, 'status 429: {"error": {"message": "too many"}}'),
    "cut": (lambda handler: handler.cut(b'{"model": "scri'), "no answer (peer closed"),
    "starting": (lambda handler: handler.reply_bytes(503, b"<html>"), "status 503: <html>"),
    "silent": (lambda handler: handler.wait_for_its_end(), "nothing came for 1 s"),
}
UNUSABLE = {
    "half": (lambda handler: handler.reply_bytes(200, b'{"model": '), "replies with no JSON"),
    "aborted": (choice(text="", finish_reason="abort", token_ids=[]), "ended an answer with"),
    "no ids": (choice(text="", finish_reason="stop"), "returns no token ids; serve the model with"),
}


def in_turns(name: str) -> tuple[str, ...]:
    """Returns flags for one request at a time, with a short timeout only for a silent server."""
    return ("--concurrency", "1", *(("--timeout", "1") if name == "silent" else ()))


@pytest.mark.parametrize("name", ["busy", "cut", "starting", slow("silent")])
def test_a_passing_fault_changes_nothing(ask, fake, local, tmp_path, capsys, name):
    """Every other request fails; each answer is requested until it arrives, and then no more."""
    fault, line = PASSING[name]
    turns = itertools.count()
    fake.fault = lambda handler: next(turns) % 2 == 0 and fault(handler)
    ask(tmp_path / "a.jsonl", "--limit", "2", *in_turns(name))
    assert (tmp_path / "a.jsonl").read_bytes() == local("--limit", "2")
    assert max(Counter(fake.prompts()).values()) == 1
    found = [shown for shown in capsys.readouterr().err.splitlines() if line in shown]
    assert len(found) == 1 and "again in" in found[0]


@pytest.mark.parametrize("name", ["busy", "cut", *UNUSABLE])
def test_a_lasting_fault_ends_the_run_with_a_line_and_the_run_resumes(
    ask, fake, local, tmp_path, monkeypatch, name
):
    """A fault that may pass gets three tries; no answer is requested twice."""
    monkeypatch.setattr(module, "TRIES", 3)
    fault, line = (PASSING | UNUSABLE)[name]
    tries, turns = 3 if name in PASSING else 1, itertools.count()
    line = f"{re.escape(line)}.*, 3 times in a row" if name in PASSING else f"{line}.*"
    fake.fault = lambda handler: next(turns) >= 3 and fault(handler)
    flags = ("--limit", "6", "--concurrency", "1")
    over = "of 6 conversations are over: the same command goes on there"
    with pytest.raises(InputError, match=f"{line}; .* {over}") as raised:
        ask(tmp_path / "a.jsonl", *flags)
    assert "\n" not in str(raised.value)
    assert next(turns) == 3 + tries
    fake.fault = None
    ask(tmp_path / "a.jsonl", *flags)
    assert (tmp_path / "a.jsonl").read_bytes() == local("--limit", "6")
    assert max(Counter(fake.prompts()).values()) == 1


def test_answers_under_way_are_kept_when_one_worker_gives_up(ask, fake, tmp_path, monkeypatch):
    """Slow answers are kept, too, and not requested again."""
    started, turns, clients = threading.Barrier(4), itertools.count(), []
    init = module.EndpointClient.__init__
    noting = lambda self, *given: (init(self, *given), clients.append(self))[0]
    monkeypatch.setattr(module.EndpointClient, "__init__", noting)

    def fault(handler):
        number = next(turns)
        if number < 4:
            started.wait(30)
        if number == 0:
            return handler.reply(404, {"error": "no"})
        assert clients[-1].stopping.wait(30)
        return False

    fake.fault = fault
    with pytest.raises(InputError, match=r"refuses a request: status 404: .*no.*; "):
        ask(tmp_path / "a.jsonl", *LIMITED, "--concurrency", "4")
    assert next(turns) == 4
    fake.fault = None
    ask(tmp_path / "a.jsonl", *LIMITED, "--concurrency", "4")
    assert max(Counter(fake.prompts()).values()) == 1


def test_a_refused_prompt_ends_its_conversation_alone(ask, fake, tmp_path, capsys):
    """A second run does not send the prompt again; an earlier answer of its conversation stays."""
    posts = itertools.count()
    fake.fault = lambda handler: next(posts) == 3 and handler.reply(400, {"error": "too odd"})
    ask(tmp_path / "a.jsonl", *LIMITED, "--concurrency", "1")
    told = capsys.readouterr().err
    assert 'status 400: {"error": "too odd"} (first: ' in told and "1 of" in told
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) > 1


def test_retry_after_is_obeyed(ask, fake, tmp_path):
    turns = itertools.count()
    fake.fault = lambda handler: next(turns) == 0 and handler.reply(429, {}, Retry_After="1")
    ask(tmp_path / "a.jsonl", "--limit", "1", "--concurrency", "1")
    assert fake.times[1] - fake.times[0] >= 1


# ---- other servers ------------------------------------------------------------------------


def test_a_server_that_does_not_exist(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRIES", 2)
    url = f"http://127.0.0.1:{free_port()}"
    with pytest.raises(InputError, match=rf"{url}: no answer \(.*refused\), 2 times"):
        ask(tmp_path / "a.jsonl", "--endpoint", url)
    assert not list(tmp_path.iterdir())


def test_keys(ask, fake, tmp_path):
    fake.key = "sk-1"
    (tmp_path / "key").write_text("sk-1\n")
    (tmp_path / "wrong").write_text("sk-2\n")
    with pytest.raises(InputError, match="status 401: .*; give its key with --api-key"):
        ask(tmp_path / "a.jsonl", *LIMITED)
    with pytest.raises(InputError, match="status 401: .*no such key") as raised:
        ask(tmp_path / "a.jsonl", *LIMITED, "--api-key-file", str(tmp_path / "wrong"))
    assert "sk-2" not in str(raised.value) and not (tmp_path / "a.jsonl.partial").exists()
    ask(tmp_path / "a.jsonl", "--limit", "2", "--api-key-file", str(tmp_path / "key"))


def test_models(ask, fake, folder, tmp_path):
    """A server's only model needs no name; a run resumes at any server with the same model."""
    turns = itertools.count()
    fake.fault = lambda handler: next(turns) >= 3 and handler.reply(404, {"error": "enough"})
    flags = (*LIMITED, "--concurrency", "1")
    with pytest.raises(InputError):
        ask(tmp_path / "a.jsonl", *flags)
    assert "127.0.0.1" not in (tmp_path / "a.jsonl.partial").read_text()
    with served(FakeEndpoint(folder, models=[{"id": "one"}, {"id": "scripted"}])) as url:
        flags = (*flags, "--endpoint", url)
        for more, line in (
            ((), "has the models one, scripted; name .* --model"),
            (("--model", "one"), r"made with other flags \(model scripted\)"),
        ):
            with pytest.raises(InputError, match=line):
                ask(tmp_path / "a.jsonl", *flags, *more)
        ask(tmp_path / "a.jsonl", *flags, "--model", "scripted")


def test_an_output_belongs_to_one_run(tmp_path):
    """Two runs with one output would write each answer twice."""
    output = tmp_path / "a.jsonl"
    with Partial(output, {"seed": 1}) as first:
        first.add(answer := TargetAnswer(7, [5, 4], "It is", stopped=True))
        with pytest.raises(InputError, match="a.jsonl.partial: another run writes it; wait for"):
            Partial(output, {"seed": 1})
    with Partial(output, {"seed": 1}) as second:
        assert second.answers_of(7) == [answer]


NO_URLS = "localhost:8000 ftp://host http:// http://me:secret@host http://host/v1?key=1"


@pytest.mark.parametrize("url", NO_URLS.split())
def test_invalid_urls(url):
    with pytest.raises(InputError, match="--endpoint is not the URL of a server; write") as raised:
        address_of(url)
    assert "secret" not in str(raised.value)


# ---- a real server ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_of_the_bundled_pair_answers_as_this_machine(tmp_path):
    """Sampled answers of infer.serve equal local ones: four conversations in two slots."""
    talks = [
        [{"role": "user", "content": text} for text in (f"Room {i}?", "Why?")] for i in range(4)
    ]
    prompts = write(tmp_path / "prompts.jsonl", *({"messages": talk} for talk in talks))
    given = ["--target", str(DEMO / "target"), "--prompts", str(prompts), *SAMPLED]
    given += ["--max-prompt", "64", "--max-new-tokens", "24"]
    (tmp_path / "key").write_text("sk-1\n")
    key = ["--api-key-file", str(tmp_path / "key")]
    there, here = tmp_path / "there.jsonl", tmp_path / "here.jsonl"
    flags = [*key, "--mode", "plain", "--slots", "2", "--max-tokens", "88"]
    with Child("infer.serve", flags, tmp_path / "s") as child:
        flags = ["--endpoint", child.ready()["url"], *key, "--concurrency", "2"]
        regenerate.main([*given, *flags, "--output", str(there)])
    regenerate.main([*given, "--batch", "1", "--draft", "bundled", "--output", str(here)])
    assert there.read_bytes() == here.read_bytes()
    assert len(read(here)) > 2
