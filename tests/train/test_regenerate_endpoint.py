"""Answers of a server: what it is asked, what may go wrong with it, and that nothing is lost."""

from __future__ import annotations

import email.utils
import itertools
import json
import re
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import pytest

from infer.cli.flags.pair import DEMO
from infer.server_process import Child
from moa_jax import InputError
from moa_jax.config import Sampling
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.pretrained import SpecialIds
from tests.train.fake_endpoint import FakeEndpoint, Handler, served
from tests.train.test_regenerate import CONVERSATIONS, Scripted, read, write
from train import regenerate
from train.run import connection as module
from train.run.answers import TargetAnswer, TargetQuestion
from train.run.connection import address_of
from train.run.conversations import AnswerRules
from train.run.endpoint import CompletionChoice, CompletionReply, Completions
from train.run.partial import Partial

ROOT = Path(__file__).resolve().parents[2]
LIMITED = ("--limit", "15")
IDS = ("--ignore-stop", "--max-new-tokens", "9")
SAMPLED = ("--temperature", "0.9", "--top-p", "0.95", "--seed", "3")


@pytest.fixture(autouse=True)
def hasty(monkeypatch):
    monkeypatch.setattr(module, "FIRST_WAIT_S", 0.01)


@pytest.fixture
def fake(folder):
    """A server and its URL, with everything that its faults need."""
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
    """What local regeneration writes with these flags, and the seeds of its questions."""
    seeds: dict[tuple[int, ...], int] = {}

    class NotingSeed(Scripted):
        def ask(self, question):
            seeds[tuple(question.prompt_ids)] = question.sampling.seed
            super().ask(question)

    def local(*flags: str, output: Path = tmp_path / "local") -> bytes:
        with monkeypatch.context() as patch:
            patch.setattr(regenerate, "_local", NotingSeed)
            given = ["--target", str(folder), "--prompts", str(CONVERSATIONS), *flags]
            regenerate.main([*given, "--output", str(output)])
        return output.read_bytes()

    local.seeds = seeds
    return local


# ---- what is asked, and what is written ---------------------------------------------------


@pytest.mark.parametrize("kind", [(), IDS, SAMPLED], ids=["text", "ids", "drawn"])
def test_the_file_is_that_of_local_regeneration(ask, fake, local, tmp_path, kind):
    workers, turns = threading.Barrier(3), itertools.count()  # each asks before one asks again
    fake.fault = lambda handler: next(turns) < 3 and workers.wait(30) < 0
    output = tmp_path / "a.jsonl"
    ask(output, *LIMITED, *kind, "--concurrency", "3")
    assert output.read_bytes() == local(*LIMITED, *kind)
    if kind == SAMPLED:
        assert local.seeds == {tuple(post["prompt"]): post["seed"] for post in fake.posts}
    assert max(Counter(fake.prompts()).values()) == 1
    assert len(fake.connections) == 3
    assert not list(tmp_path.glob("*.partial"))


def test_settings_are_sent_that_servers_would_else_take_from_the_model(ask, fake, tmp_path):
    ask(tmp_path / "a.jsonl", "--limit", "1")
    greedy = {"temperature": 0.0, "repetition_penalty": 1.0, "max_tokens": 64}
    post = fake.posts[0]
    assert post | greedy | {"model": "scripted", "return_token_ids": True} == post
    assert set(post["stop_token_ids"]) == set(range(4, 320, 5)) and "seed" not in post
    fake.posts.clear()
    ask(tmp_path / "b.jsonl", *LIMITED, *SAMPLED, *IDS)
    post = fake.posts[0]
    drawn = {"temperature": 0.9, "top_p": 0.95, "top_k": -1, "min_p": 0.0, "ignore_eos": True}
    assert post | drawn == post and "stop_token_ids" not in post
    assert len({post["seed"] for post in fake.posts}) == 15


@pytest.mark.parametrize("turn_id, end", [(5, 5), (None, 4)])
def test_an_end_that_a_server_leaves_out_is_that_of_the_template(turn_id, end):
    tokenizer = load_tokenizer(DEMO / "target")  # whose eos token is 4
    rules = AnswerRules(tokenizer, 2048, 8, 9, False, Sampling())
    ends = SpecialIds((3, 4, 5), turn_id=turn_id)
    reply = CompletionReply([CompletionChoice("stop", [7])])
    question = TargetQuestion(0, [8], Sampling())
    answer = Completions("here", "demo", rules, ends).answer(reply, question)
    assert answer.token_ids == [7, end]


# ---- troubles that pass -------------------------------------------------------------------


def busy(handler: Handler) -> bool:
    return handler.reply(429, {"error": {"message": "too many"}}, Retry_After="0")


PASSING = {  # what a server does, and what is said of it
    "busy": (busy, 'status 429: {"error": {"message": "too many"}}'),
    "cut": (lambda handler: handler.cut(b'{"model": "scri'), "no answer (peer closed"),
    "fault": (lambda handler: handler.reply(500, {"detail": "oh"}), "status 500: "),
    "starting": (lambda handler: handler.reply_bytes(503, b"<html>"), "status 503: <html>"),
    "gone": (lambda handler: handler.cut(), "Server disconnected without"),
    "slow": (lambda handler: handler.wait_for_its_end(), "nothing came for 2 s"),
}


def choice(**fields: Any) -> Callable[[Handler], bool]:
    return lambda handler: handler.reply(200, {"choices": [fields]})


NO_JSON = "replies with no JSON object"
UNUSABLE = {
    "half": (lambda handler: handler.reply_bytes(200, b'{"model": '), NO_JSON),
    "list": (lambda handler: handler.reply(200, []), NO_JSON),
    "empty": (
        lambda handler: handler.reply(200, {"choices": []}),
        f"{NO_JSON} of an OpenAI server .*length >= 1",
    ),
    "aborted": (
        choice(text="", finish_reason="abort", token_ids=[]),
        "ended an answer with 'abort'",
    ),
    "other ids": (
        choice(text="Yes", finish_reason="stop", token_ids=[999999]),
        "answers with ids outside the vocabulary of --target",
    ),
    "no ids": (
        choice(text="", finish_reason="stop"),
        "returns no token ids; serve the model with infer.serve",
    ),
}
SLOW = ("fault", "starting", "gone", "slow")


def each(*names: str) -> pytest.MarkDecorator:
    slow = [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in names]
    return pytest.mark.parametrize("name", slow)


def in_turns(name: str) -> tuple[str, ...]:
    """Flags for one request at a time, with a short timeout only for a server that says nothing."""
    return ("--concurrency", "1", *(("--timeout", "2") if name == "slow" else ()))


@each(*PASSING)
def test_what_passes_changes_nothing(ask, fake, local, tmp_path, capsys, name):
    """Every other request fails; each answer is asked for until it comes, and then no more."""
    fault, said = PASSING[name]
    turns = itertools.count()
    fake.fault = lambda handler: next(turns) % 2 == 0 and fault(handler)
    limited = ("--limit", "4")
    ask(tmp_path / "a.jsonl", *limited, *in_turns(name))
    assert (tmp_path / "a.jsonl").read_bytes() == local(*limited)
    assert max(Counter(fake.prompts()).values()) == 1
    told = [line for line in capsys.readouterr().err.splitlines() if said in line]
    assert len(told) == 1 and "again in" in told[0]


@each(*PASSING, *UNUSABLE)
def test_what_stays_ends_the_run_with_a_line_and_it_goes_on_later(
    ask, fake, local, tmp_path, monkeypatch, name
):
    """After three tries where it might have passed; no answer is asked for twice."""
    monkeypatch.setattr(module, "TRIES", 3)
    fault, said = (PASSING | UNUSABLE)[name]
    tries, turns = 3 if name in PASSING else 1, itertools.count()
    said = f"{re.escape(said)}.*, 3 times in a row" if name in PASSING else f"{said}.*"
    fake.fault = lambda handler: next(turns) >= 3 and fault(handler)
    flags = ("--limit", "6", *in_turns(name))
    over = "of 6 conversations are over: the same command goes on there"
    with pytest.raises(InputError, match=f"{said}; .* {over}") as raised:
        ask(tmp_path / "a.jsonl", *flags)
    assert "\n" not in str(raised.value)
    assert next(turns) == 3 + tries
    fake.fault = None
    ask(tmp_path / "a.jsonl", *flags)
    assert (tmp_path / "a.jsonl").read_bytes() == local("--limit", "6")
    assert max(Counter(fake.prompts()).values()) == 1


def stop_after(fake: FakeEndpoint, count: int) -> None:
    """Answers so many requests and refuses all others."""
    turns = itertools.count()
    fake.fault = lambda handler: next(turns) >= count and handler.reply(404, {"error": "enough"})


def test_answers_under_way_are_kept_when_one_worker_gives_up(ask, fake, tmp_path, monkeypatch):
    """Slow ones, too: they are not asked for again."""
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
    """The same command does not ask for it again; an answer that came before it stays."""
    posts = itertools.count()
    fake.fault = lambda handler: next(posts) == 3 and handler.reply(400, {"error": "too odd"})
    ask(tmp_path / "a.jsonl", *LIMITED, "--concurrency", "1")
    told = capsys.readouterr().err
    assert 'status 400: {"error": "too odd"} (first: ' in told and "1 of" in told
    assert len((tmp_path / "a.jsonl").read_text().splitlines()) > 1


@pytest.mark.parametrize("status", [400, 413, 422])
def test_a_server_that_refuses_every_request_leaves_conversations_open(ask, fake, tmp_path, status):
    fake.probe_status = status
    with pytest.raises(InputError, match=f"refuses a request: status {status}"):
        ask(tmp_path / "a.jsonl", *LIMITED)
    assert not list(tmp_path.iterdir()) and not fake.times


def test_a_wrong_certificate_ends_at_once(ask, fake, tmp_path, monkeypatch):
    tries = []

    def refused(*_, **__):
        tries.append(1)
        raise httpx.ConnectError("[SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate")

    monkeypatch.setattr(httpx.Client, "request", refused)
    with pytest.raises(InputError, match="its certificate is wrong .*; set SSL_CERT_FILE"):
        ask(tmp_path / "a.jsonl", *LIMITED)
    assert len(tries) == 1


@pytest.mark.parametrize("asked", ["1", "1.1", "date"])
def test_retry_after_is_obeyed(ask, fake, tmp_path, asked):
    turns = itertools.count()
    later = lambda: email.utils.formatdate(time.time() + 2.5, usegmt=True)  # in whole seconds
    too_many = lambda handler: handler.reply(
        429, {}, Retry_After=later() if asked == "date" else asked
    )
    fake.fault = lambda handler: next(turns) == 0 and too_many(handler)
    ask(tmp_path / "a.jsonl", "--limit", "1", "--concurrency", "1")
    assert fake.times[1] - fake.times[0] >= 1


def test_a_server_that_is_busy_with_others_is_waited_for(ask, fake, local, tmp_path, monkeypatch):
    """However often it says so to one of many, as long as it answers some."""
    monkeypatch.setattr(module, "TRIES", 2)
    room = threading.Semaphore(1)

    def wait_for_an_answer(client, *_):
        before, until = client._num_replies, time.monotonic() + 5
        while client._num_replies == before and time.monotonic() < until:
            time.sleep(0.01)

    monkeypatch.setattr(module.EndpointClient, "_wait", wait_for_an_answer)

    def fault(handler):
        if not room.acquire(blocking=False):
            return busy(handler)
        time.sleep(0.03)
        room.release()
        return False

    fake.fault = fault
    ask(tmp_path / "a.jsonl", *LIMITED, "--concurrency", "4")
    assert (tmp_path / "a.jsonl").read_bytes() == local(*LIMITED)
    assert len(fake.times) > len(fake.posts) + 4  # refusals


# ---- troubles that stay -------------------------------------------------------------------


def test_a_server_that_is_not_there(ask, tmp_path, monkeypatch):
    monkeypatch.setattr(module, "TRIES", 2)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # and nobody listens
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(InputError, match=rf"{url}: no answer \(.*refused\), 2 times"):
            ask(tmp_path / "a.jsonl", "--endpoint", url)
    assert not list(tmp_path.iterdir())


def test_keys(ask, fake, tmp_path):
    fake.key = "sk-1"
    (tmp_path / "key").write_text("sk-1\n")
    (tmp_path / "wrong").write_text("sk-2\n")
    with pytest.raises(
        InputError, match="status 401: .*no such key.*; give its key with --api-key"
    ):
        ask(tmp_path / "a.jsonl", *LIMITED)
    with pytest.raises(InputError, match="status 401: .*no such key") as raised:
        ask(tmp_path / "a.jsonl", *LIMITED, "--api-key-file", str(tmp_path / "wrong"))
    assert "sk-2" not in str(raised.value) and not (tmp_path / "a.jsonl.partial").exists()
    ask(tmp_path / "a.jsonl", "--limit", "2", "--api-key-file", str(tmp_path / "key"))


def test_models(ask, fake, tmp_path):
    """The one that a server has needs no name, and no answer of another one is taken."""
    with pytest.raises(InputError, match="has the models scripted; name .* --model"):
        ask(tmp_path / "a.jsonl", "--model", "other")
    fake.models = [{"id": "one"}, {"id": "scripted"}]
    with pytest.raises(InputError, match="has the models one, scripted; name .* --model"):
        ask(tmp_path / "a.jsonl")

    def change(handler):
        fake.model = "one" if len(fake.posts) == 3 else "scripted"
        return False

    fake.fault = change
    flags = (*LIMITED, "--concurrency", "1")
    with pytest.raises(InputError, match="answers with the model one instead of scripted"):
        ask(tmp_path / "a.jsonl", *flags, "--model", "scripted")
    fake.fault, fake.model = None, "one"
    with pytest.raises(InputError, match=r"made with other flags \(model scripted\)"):
        ask(tmp_path / "a.jsonl", *flags, "--model", "one")
    fake.model = "scripted"
    ask(tmp_path / "a.jsonl", *flags, "--model", "scripted")


def test_the_header_knows_the_model_and_not_the_place(ask, fake, folder, local, tmp_path):
    stop_after(fake, 3)
    with pytest.raises(InputError):
        ask(tmp_path / "a.jsonl", *LIMITED, "--concurrency", "1")
    header = json.loads((tmp_path / "a.jsonl.partial").read_text().splitlines()[0])
    assert header["model"] == "scripted" and "127.0.0.1" not in json.dumps(header)
    with served(FakeEndpoint(folder)) as url:  # another one with the same model goes on
        ask(tmp_path / "a.jsonl", *LIMITED, "--endpoint", url)
    (tmp_path / "b.jsonl.partial").write_text(json.dumps(header) + "\n")
    with pytest.raises(InputError, match="made with other flags"):  # a local run does not
        local(*LIMITED, output=tmp_path / "b.jsonl")


def test_a_server_of_another_size_or_tokenizer_is_refused(ask, fake, tmp_path, folder):
    fake.models = [{"id": "scripted", "max_model_len": 300}]
    with pytest.raises(InputError, match="--max-prompt 256 and --max-new-tokens 64 .* the 300"):
        ask(tmp_path / "a.jsonl")
    fake.models = [{"id": "scripted"}]
    fake.answer = lambda prompt: ([5, 6], "ab", "length")
    fake.completion = lambda body: (200, {"choices": [choice]})
    choice = {"text": "ab", "finish_reason": "length", "token_ids": [5, 6]}
    with pytest.raises(InputError, match="ends answers after 2 tokens; lower --max-new-tokens 64"):
        ask(tmp_path / "a.jsonl", *LIMITED)
    choice = {"text": "ab", "finish_reason": "stop", "token_ids": [5, 6]}
    with pytest.raises(InputError, match="has no ignore_eos; leave out --ignore-stop"):
        ask(tmp_path / "b.jsonl", *LIMITED, "--ignore-stop")


def test_an_output_belongs_to_one_run(tmp_path):
    """Two that write the same answers would have each conversation hear one of them twice."""
    output = tmp_path / "a.jsonl"
    with Partial(output, {"seed": 1}) as first:
        first.add(answer := TargetAnswer(7, [5, 4], "It is", stopped=True))
        with pytest.raises(InputError, match="a.jsonl.partial: another run writes it; wait for"):
            Partial(output, {"seed": 1})
    with Partial(output, {"seed": 1}) as second:
        assert second.answers_of(7) == [answer]


NO_URLS = (
    "localhost:8000 ftp://host http:// http://host:eight http://me:secret@host http://host:99999"
    " http://xn--a http://host/v1?key=1"
)


@pytest.mark.parametrize("url", NO_URLS.split())
def test_what_is_no_url(url):
    with pytest.raises(InputError, match="--endpoint is not the URL of a server; write") as raised:
        address_of(url)
    assert "secret" not in str(raised.value)


@pytest.mark.parametrize("end", ["", "/", "/v1", "/v1/"])
def test_urls_with_or_without_their_version(end):
    assert address_of(f" http://host:9{end}\n") == address_of("http://host:9")
    assert str(address_of(f"https://host:81/a%2Fb{end}")) == "https://host:81/a%2Fb"
    assert str(address_of(f"http://[::1]:81{end}")) == "http://[::1]:81"


@pytest.mark.parametrize("flag", ["--dtype=float32", "--weights=int8", "--draft=d", "--batch=2"])
def test_flags_of_this_machine_are_refused(ask, tmp_path, flag):
    with pytest.raises(InputError, match=rf"{flag.partition('=')[0]} is not for --endpoint"):
        ask(tmp_path / "a.jsonl", flag)


@pytest.mark.parametrize("flag", ["--model=m", "--api-key-file=f", "--concurrency=2"])
def test_flags_of_an_endpoint_are_refused_without_one(folder, tmp_path, flag):
    given = ["--target", str(folder), "--prompts", str(CONVERSATIONS), flag]
    with pytest.raises(InputError, match=rf"{flag.partition('=')[0]} is for --endpoint only"):
        regenerate.main([*given, "--output", str(tmp_path / "a.jsonl")])


# ---- a real server ------------------------------------------------------------------------


@pytest.mark.slow
def test_a_server_of_the_bundled_pair_answers_as_this_machine(tmp_path):
    """Drawn answers through infer.serve; a dozen conversations in eight slots."""
    talks = [
        [{"role": "user", "content": text} for text in (f"Room {i}?", "Why?")] for i in range(12)
    ]
    prompts = write(tmp_path / "prompts.jsonl", *({"messages": talk} for talk in talks))
    given = ["--target", str(DEMO / "target"), "--prompts", str(prompts)]
    given += ["--max-prompt", "100", "--max-new-tokens", "28"]
    (tmp_path / "key").write_text("sk-1\n")
    key = ["--api-key-file", str(tmp_path / "key")]
    with Child(
        "infer.serve", [*key, "--slots", "8", "--max-tokens", "128"], tmp_path / "s"
    ) as child:
        url = child.ready()["url"]
        there, here = tmp_path / "there.jsonl", tmp_path / "here.jsonl"
        flags = ["--endpoint", url, *key, "--concurrency", "8"]
        regenerate.main([*given, *SAMPLED, *flags, "--output", str(there)])
    regenerate.main([*given, *SAMPLED, "--batch", "8", "--output", str(here)])
    assert there.read_bytes() == here.read_bytes()
    assert len(read(here)) > 6
