"""The program infer.server: what it refuses at once, and a real pair served until SIGTERM."""

from __future__ import annotations

import io
import json
import logging
import signal
import ssl
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from websockets.sync.client import connect

from infer import server
from infer.http.address import bind, check_address, is_loopback
from infer.http.log import EventLog, WarningHandler
from infer.server_process import Child
from infer.split_client.link import ServerAddress
from infer.split_client.state import ClientOptions
from moa_jax.config import Sampling
from moa_jax.errors import InputError
from moa_jax.split.server_target import DraftRequest, TargetSlots
from tests.certificates import certificate
from tests.meeting import wait_for
from tests.pairs import Pair, random_pair_of
from tests.split.split_client import ask

ROOT = Path(__file__).resolve().parents[2]


def test_loopback_hosts_are_known():
    assert all(map(is_loopback, ("localhost", "127.0.0.1", "127.8.0.1", "::1")))
    assert not any(map(is_loopback, ("0.0.0.0", "::", "192.0.2.1", "example.org")))


def test_an_old_ready_file_announces_no_new_server(tmp_path):
    file = tmp_path / "ready.json"
    file.write_text("{}")
    with bind("127.0.0.1", 0, str(file)) as first:
        assert not file.exists()
        file.write_text("{}")  # the first one is ready, and a second finds its port taken
        first.listen()
        with pytest.raises(InputError, match="in use"):
            bind("127.0.0.1", first.getsockname()[1], str(file))
        assert file.exists()


def test_public_hosts_go_with_a_token_or_by_will():
    parse = lambda *flags: server._parser().parse_args(["--host", "0.0.0.0", *flags])
    check_address(parse(), "--token-file", has_secret=True)
    check_address(parse("--open"), "--token-file", has_secret=False)


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
        while not stream.getvalue():
            time.sleep(0.01)
        wait_for(lambda: not log._lines.qsize())  # or there is no room for one more
        log("close", reason="done")
    log._thread.join(30)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert len(lines) in (4, 5) and lines[0].keys() == {"time", "event", "tokens"}
    assert lines[-1]["event"] == "close"
    assert sum(line.get("lost_events", 0) for line in lines) == 51 - len(lines)


def test_warnings_of_libraries_become_events_without_their_text():
    events = []
    with WarningHandler(lambda event, **facts: events.append(facts)):
        logger = logging.getLogger("uvicorn.error")
        logger.warning("first line\nsecond")
        for name in ("uvicorn.error", "moa_jax.engine.engine"):
            try:
                raise ValueError("what users wrote")
            except ValueError:
                logging.getLogger(name).exception("failed")
    assert events[0]["what"] == "first line"
    for event in events[1:]:
        assert event["what"].startswith("failed: ValueError at test_split_program.py:")
    assert len(events) == 3


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return random_pair_of("llama", 0, tmp_path_factory.mktemp("served"))


@pytest.mark.slow
def test_split_serves_everything_padded_before_the_rest_is_compiled(pair):
    slots = TargetSlots(
        pair.target, pair.drafter, num_slots=2, max_tokens=64, max_nodes=16, chunk=40
    )
    every = slots.passes(sampled=True)
    for size in every[:2]:
        slots.compile(size)
    compiled = dict(slots._programs._compiled)
    prompts = [[5, 17, 60], list(range(38))]
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=4)):
        plain = [pair.plain.generate([p], 5, [], sampling)[0].token_ids for p in prompts]
        opened = [slots.open(sampling, [], len(prompt) + 5, len(prompt)) for prompt in prompts]
        texts = [
            slots.read(slot, prompt, pick_root=True).tokens[len(prompt) :]
            for slot, prompt in zip(opened, prompts, strict=True)
        ]
        while not all(len(text) == 5 for text in texts):
            asked = [(slot, text) for slot, text in zip(opened, texts, strict=True)]
            asked = [DraftRequest(slot, [7], [0]) for slot, text in asked if len(text) < 5]
            for request, reply in zip(asked, slots.verify(asked), strict=True):
                texts[opened.index(request.slot)] += reply.tokens
        assert texts == plain
        for slot in opened:
            slots.close(slot)
    assert slots._programs._compiled == compiled  # nothing was compiled in between
    assert slots.padded(1) == 16
    for size in every[2:]:  # what a slot takes from then on, if there was time to compile it
        slots._ready.add(size)
    assert [slots.padded(nodes) for nodes in (1, 2, 7, 9)] == [1, 4, 8, 16]


@pytest.mark.slow
def test_split_program_serves_the_targets_text_over_tls_until_sigterm(
    pair, facts, drafter, tmp_path
):
    """To clients that show its token: prompts in chunks, and one that waits for a slot."""
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
    said = [event["event"] for event in events]
    # The server may hear late that its clients are gone, and tells those that it drains.
    after = {(each["event"], each.get("code")) for each in events[said.index("drain") + 1 :]}
    assert after <= {("disconnect", None), ("fault", "draining")}
    closed = [event for event in events if event["event"] == "close"]
    assert sorted(event["tokens"] for event in closed) == [13, 17, 52]
