"""The program infer.server, and its events."""

from __future__ import annotations

import io
import json
import logging
import signal
import ssl
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from infer.http.log import EventLog, WarningHandler
from infer.server_process import Child
from infer.split_client.link import ServerAddress
from infer.split_client.state import ClientOptions
from tests.certificates import certificate
from tests.meeting import wait_for
from tests.pairs import Pair, random_pair_of
from tests.split.split_client import ask


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
    return random_pair_of(0, tmp_path_factory.mktemp("served"))


@pytest.mark.slow
def test_split_program_serves_the_targets_text_over_tls_until_sigterm(
    pair, facts, drafter, tmp_path, run
):
    """Clients with its token send prompts in chunks, and one of them waits for a slot.

    A client without its certificate refuses the server.
    """
    cert, key = certificate(tmp_path)
    (tmp_path / "token").write_text("secret\n")
    models = ["--target", pair.target.folder, "--draft", pair.drafter.folder, "--dtype", "float32"]
    flags = [*models, "--slots", 2, "--chunk", 16, "--max-tokens", 64, "--warm", 1]
    flags += ["--tls-cert", cert, "--tls-key", key, "--token-file", tmp_path / "token"]
    warnings = {"PYTHONWARNINGS": "error::ResourceWarning"}
    prompts = [[5, 17, 60, 33, 9], [7], list(range(40))]
    with Child("infer.server", list(map(str, flags)), tmp_path / "log", env=warnings) as child:
        url = child.ready()["url"]
        assert url.startswith("wss://127.0.0.1:")
        flags = ["--connect", url, "--token-file", tmp_path / "token", *models, "--lengths", 1]
        flags += ["--target-layer-inference", 0, "--stop-ids", "", "--max-new-tokens", 12]
        line = run("infer.client", *flags, "--prompt-ids", 7).refusal()
        assert "its certificate is not trusted (" in line and "see --tls-ca" in line
        tls = ssl.create_default_context(cafile=cert)
        at = ServerAddress(url, facts, "secret", tls, "int8", compress=True, timeout=60.0)
        one = lambda prompt: ask(at, ClientOptions(lengths=(1,)), prompt, 12, drafter.twin())
        plain = pair.plain.generate(prompts, 12, stop_ids=[])
        with ThreadPoolExecutor() as clients:
            found = list(clients.map(one, prompts))
        assert [each.tokens for each in found] == [result.token_ids for result in plain]
        done = run("infer.client", *flags, "--prompt-ids", 7, "--tls-ca", cert)
        assert done.out.split() == list(map(str, plain[1].token_ids))
        child._process.send_signal(signal.SIGTERM)
        assert child._process.wait(30) == 0
    log = (tmp_path / "log.log").read_text()
    assert f"listening on {url}\n" in log and "Traceback" not in log and "secret" not in log
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    closed = [event for event in events if event["event"] == "close"]
    assert sorted(event["tokens"] for event in closed) == [13, 13, 17, 52]
