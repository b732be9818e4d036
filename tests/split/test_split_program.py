"""The program infer.server, and flags that infer.server, infer.client and infer.bench refuse."""

from __future__ import annotations

import io
import json
import logging
import signal
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from websockets.sync.client import connect

from infer import bench, client, server
from infer.cli import program
from infer.http.log import EventLog, WarningHandler
from infer.server_process import Child
from infer.split_client.link import ServerAddress
from infer.split_client.state import ClientOptions
from tests.certificates import certificate
from tests.meeting import wait_for
from tests.pairs import Pair, random_pair_of
from tests.split.split_client import ask

PROGRAMS = {
    "client": client.main,
    "server": server.main,
    "bench": lambda arguments: bench.main(["--split", *arguments]),
}
FILES = {"empty": "\n", "words": "two words\n", "junk": "no PEM\n"}
WS, WSS = "client --connect ws://127.0.0.1:1/", "client --connect wss://127.0.0.1:1/"
REFUSED = {  # the program with its flags, and a part of the error
    "client": "one of the arguments --connect --offline is required",
    "client --connect http://127.0.0.1:1/": "give ws://HOST:PORT/v1/split",
    f"{WS} --token-file {{words}}": "one word of printable ASCII",
    f"{WSS} --tls-ca {{junk}}": "holds no certificate",
    f"{WS} --logit-bias 3:1": "logit_bias cannot be sent",
    "client --offline --mode tree --depth 1": "drafts nothing",
    "server --host 0.0.0.0": "lets other machines in; give --token-file, or --open",
    "server --token-file {empty}": "one word of printable ASCII",
    "server --tls-cert {junk}": "no certificate with its key",
    "server --chunk 5000": "--chunk 5000: clients take at most 4096 at once",
    "server --warm 1,9 --max-nodes 7": "--warm 9: drafts have at most 8 nodes",
    'server --speculative-config {{"num_speculative_tokens":3}}': "give --lengths to infer.client",
    "bench --draft lookup": "--draft lookup cannot write token by token, as chain asks",
}


@pytest.mark.parametrize("line", REFUSED)
def test_split_programs_refuse_flags_with_one_line(line, tmp_path, capsys):
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    name, *flags = line.format(**{name: tmp_path / name for name in FILES}).split()
    with pytest.raises(SystemExit) as exit:
        program.run(PROGRAMS[name], flags)
    shown = capsys.readouterr()
    assert (exit.value.code, shown.out) == (2, "") and shown.err.count("\n") == 1
    assert REFUSED[line] in shown.err


def test_events_are_lines_that_a_full_pipe_cannot_stop():
    class Stuck(io.StringIO):
        free = threading.Event()

        def write(self, text):
            assert self.free.wait(10)
            return super().write(text)

    stream = Stuck()
    with EventLog(stream, most=3) as log:
        for count in range(50):
            log("open", tokens=count, session=None)
        stream.free.set()
        wait_for(lambda: stream.getvalue() and not log._lines.qsize())  # else the queue is full
        log("close", reason="done")
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert lines[0].keys() == {"time", "event", "tokens"} and lines[-1]["event"] == "close"
    assert sum(line.get("lost_events", 0) for line in lines) == 51 - len(lines)


def test_warnings_of_libraries_become_events_without_their_text():
    events = []
    with WarningHandler(lambda event, **facts: events.append(facts["what"])):
        logging.getLogger("uvicorn.error").warning("first line\nsecond")
        for name in ("uvicorn.error", "moa_jax.engine.engine"):
            try:
                raise ValueError("what users wrote")
            except ValueError:
                logging.getLogger(name).exception("failed")
    assert events[0] == "first line" and len(events) == 3
    for event in events[1:]:
        assert event.startswith("failed: ValueError at test_split_program.py:")


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return random_pair_of("llama", 0, tmp_path_factory.mktemp("served"))


@pytest.mark.slow
def test_split_program_serves_the_targets_text_over_tls_until_sigterm(
    pair, facts, drafter, tmp_path
):
    """Clients with its token send prompts in chunks, and one of them waits for a slot."""
    cert, key = certificate(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    flags = ["--target", pair.target.folder, "--draft", pair.drafter.folder, "--slots", 2]
    flags += ["--chunk", 16, "--max-tokens", 64, "--warm", 1, "--dtype", "float32"]
    flags += ["--tls-cert", cert, "--tls-key", key, "--token-file", tmp_path / "token"]
    warnings = {"PYTHONWARNINGS": "error::ResourceWarning"}
    prompts = [[5, 17, 60, 33, 9], [7], list(range(40))]
    with Child("infer.server", list(map(str, flags)), tmp_path / "log", env=warnings) as child:
        url = child.ready()["url"]
        assert url.startswith("wss://127.0.0.1:")
        with pytest.raises(ssl.SSLCertVerificationError):
            connect(url, ssl=ssl.create_default_context()).__enter__()
        tls = ssl.create_default_context(cafile=cert)
        at = ServerAddress(url, facts, "secret", tls, "int8", compress=True, timeout=60.0)
        one = lambda prompt: ask(at, ClientOptions(lengths=(1,)), prompt, 12, drafter.twin())
        plain = pair.plain.generate(prompts, 12, stop_ids=[])
        with ThreadPoolExecutor() as clients:
            found = list(clients.map(one, prompts))
        assert [each.tokens for each in found] == [result.token_ids for result in plain]
        child._process.send_signal(signal.SIGTERM)
        assert child._process.wait(30) == 0
    log = (tmp_path / "log.log").read_text()
    assert f"listening on {url}\n" in log and "Traceback" not in log and "secret" not in log
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    closed = [event for event in events if event["event"] == "close"]
    assert sorted(event["tokens"] for event in closed) == [13, 17, 52]
