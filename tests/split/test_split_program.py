"""The program infer.server: what it refuses at once, and a real pair served until SIGTERM."""

from __future__ import annotations

import errno
import io
import json
import logging
import os
import signal
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax.numpy as jnp
import pytest
from websockets.sync.client import connect

from infer import server
from infer.cli.program import INTERRUPTED, run
from infer.http.address import bind, check_address, is_loopback
from infer.http.log import EventLog, WarningHandler
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import Sampling
from moa_jax.errors import InputError
from moa_jax.split import protocol
from moa_jax.split.pairing import pairing_of
from moa_jax.split.server_target import DraftRequest, TargetSlots
from tests.certificates import certificate
from tests.meeting import wait_for
from tests.model_folders import save_random_pair
from tests.split.split_server import LIMITS

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def files(tmp_path) -> dict[str, str]:
    """Files that flags name, most of them bad."""
    texts = {"token": "secret\n", "empty": "\n", "words": "two words", "junk": "no PEM"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    return {name: str(tmp_path / name) for name in (*texts, "absent")}


REFUSED = {  # flags, and what the one line says
    "--host 0.0.0.0": "lets other machines in; give --token-file, or --open",
    "--host :: --max-queue 3": "lets other machines in",
    "--token-file {absent}": "no such file",
    "--token-file {empty}": "one word of printable ASCII",
    "--token-file {words}": "one word of printable ASCII",
    "--tls-cert {absent}": "no such file",
    "--tls-cert {junk}": "no certificate with its key",
    "--tls-key {junk}": "--tls-key without --tls-cert",
    "--port 70000": "not a port from 0 to 65535",
    "--slots 0": "at least 1",
    "--chunk 1": "choose 2 at least",
    '--speculative-config {{"num_speculative_tokens":3}}': "give --lengths to infer.client",
    "--chunk 5000": "--chunk 5000: clients take at most 4096 at once",
    "--max-nodes 64": "--max-nodes 64; choose from 1 to 63",
    "--warm 100": "--warm 100: drafts have at most 64 nodes with the root; lower it",
    "--warm 1,9 --max-nodes 7": "--warm 9: drafts have at most 8 nodes",
    "--ready-file {absent}/x.json": "no file can be written there; choose another path",
    "--idle-seconds 0": "not a number above 0",
    "--host nowhere.invalid --open": "give an address of this machine",
    "--port 0 --target {absent} --draft {absent}": "absent is not a folder",
}


def refusal(arguments: list[str], capsys) -> str:
    with pytest.raises(SystemExit) as exit:
        run(server.main, arguments)
    shown = capsys.readouterr()
    assert (exit.value.code, shown.out) == (2, "") and shown.err.count("\n") == 1
    return shown.err


@pytest.mark.parametrize("line", REFUSED)
def test_split_program_refuses_bad_flags_with_one_line(line, files, capsys):
    assert REFUSED[line] in refusal(line.format(**files).split(), capsys)


def test_split_program_refuses_a_port_in_use(capsys):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        said = refusal(["--port", str(port)], capsys)
    assert f"port {port} of 127.0.0.1 is in use; choose another --port" in said


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


def test_public_hosts_go_with_a_token_or_by_will(files):
    parse = lambda *flags: server._parser().parse_args(["--host", "0.0.0.0", *flags])
    check_address(parse("--token-file", files["token"]), "--token-file", has_secret=True)
    check_address(parse("--open"), "--token-file", has_secret=False)
    with pytest.raises(InputError):
        check_address(parse(), "--token-file", has_secret=False)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("served")
    save_random_pair(folder, "llama", seed=3)
    return folder


@pytest.fixture
def started(pair, tmp_path) -> Iterator:
    """Starts the program on a free port, and sees to its end."""
    running: list[subprocess.Popen] = []

    def start(*flags: str) -> tuple[subprocess.Popen, dict]:
        ready = tmp_path / "ready.json"
        models = ["--target", pair / "target", "--draft", pair / "draft"]
        command = [sys.executable, "-m", "infer.server", "--port", "0", "--ready-file", ready]
        small = ["--slots", "2", "--chunk", "16", "--max-tokens", "64", "--warm", "1"]
        program = subprocess.Popen(
            [*command, *models, *small, *flags],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONWARNINGS": "error::ResourceWarning"},
        )
        running.append(program)
        end = time.monotonic() + 240
        while not ready.exists():
            assert program.poll() is None and time.monotonic() < end, program.stderr.read()
            time.sleep(0.05)
        return program, json.loads(ready.read_text())

    yield start
    for program in running:
        program.kill()
        program.communicate()


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


def test_a_log_counts_the_events_that_its_stream_refuses():
    class RefusingStream(io.StringIO):
        left = 2

        def write(self, text):
            self.left -= 1
            if self.left >= 0:
                raise OSError(errno.ENOSPC, "No space left on device")
            return super().write(text)

    stream = RefusingStream()
    with EventLog(stream) as log:
        for count in range(4):
            log("open", tokens=count)
            wait_for(lambda: not log._lines.qsize())
            wait_for(lambda count=count: count > 1 or log._lost == count + 1)
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["tokens"], line.get("lost_events")) for line in lines] == [(2, 2), (3, None)]


def test_warnings_of_libraries_become_events_without_their_text():
    events = []
    with WarningHandler(lambda event, **facts: events.append(facts)):
        logger = logging.getLogger("uvicorn.error")
        logger.warning("first line\nsecond")
        for name in ("uvicorn.error", "moa_jax.decode.engine.engine"):
            try:
                raise ValueError("what users wrote")
            except ValueError:
                logging.getLogger(name).exception("failed")
    assert events[0]["what"] == "first line"
    for event in events[1:]:
        assert event["what"].startswith("failed: ValueError at test_split_program.py:")
    assert len(events) == 3


def answer(url: str, pair: Path, prompt: list[int], count: int, **options) -> list[int]:
    """An answer with drafts of one token that are always the same."""
    target = load_target(pair / "target", jnp.float32)
    facts = pairing_of(target, load_drafter(pair / "draft", target))
    with connect(url, compression=None, max_size=None, **options) as link:

        def ask(message):
            link.send(protocol.encode(message))
            return protocol.decode_down(link.recv(60), LIMITS)

        assert isinstance(ask(protocol.Hello("a test", facts, "int8", True)), protocol.Welcome)
        sampling = protocol.sampling_fields(Sampling())
        total = len(prompt) + count
        assert isinstance(
            ask(protocol.Open(0, prompt, len(prompt), False, 0, total, [], sampling)),
            protocol.Opened,
        )
        while (verdict := protocol.decode_down(link.recv(60), LIMITS)).more:
            pass
        text = list(verdict.tokens)
        while not verdict.done:
            verdict = ask(protocol.Verify(verdict.seq + 1, [text[-1]], [0]))
            text += verdict.tokens
        link.send(protocol.encode(protocol.Close()))
    return text


@pytest.mark.slow
def test_split_serves_everything_padded_before_the_rest_is_compiled(pair):
    target = load_target(pair / "target", jnp.float32)
    drafter = load_drafter(pair / "draft", target)
    slots = TargetSlots(target, drafter, num_slots=2, max_tokens=64, max_nodes=16, chunk=40)
    every = slots.passes(sampled=True)
    for size in every[:2]:
        slots.compile(size)
    compiled = dict(slots._programs._compiled)
    prompts, session = [[5, 17, 60], list(range(38))], Session(target)
    for sampling in (Sampling(), Sampling(temperature=0.8, seed=4)):
        plain = [session.generate([p], 5, [], sampling)[0].token_ids for p in prompts]
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
def test_split_program_serves_the_targets_text_and_goes_on_sigterm(pair, started):
    program, ready = started()
    assert program.stdout.readline() == f"listening on {ready['url']}\n"
    prompts = [[5, 17, 60, 33, 9], [7], list(range(40))]  # the last in chunks, one waits
    target = load_target(pair / "target", jnp.float32)
    plain = Session(target).generate(prompts, 12, stop_ids=[])
    with ThreadPoolExecutor() as clients:
        texts = clients.map(lambda prompt: answer(ready["url"], pair, prompt, 12), prompts)
        assert list(texts) == [result.token_ids for result in plain]
    program.send_signal(signal.SIGTERM)
    _, log = program.communicate(timeout=30)
    events = [json.loads(line) for line in log.splitlines() if line.startswith("{")]
    assert program.returncode == 0
    said = [event["event"] for event in events]
    # The server may hear late that its clients are gone, and tells those that it drains.
    after = events[said.index("drain") + 1 :]
    assert {(each["event"], each.get("code")) for each in after} <= {
        ("disconnect", None),
        ("fault", "draining"),
    }
    closed = [event for event in events if event["event"] == "close"]
    assert sorted(event["tokens"] for event in closed) == [13, 17, 52]
    assert "Traceback" not in log


@pytest.mark.slow
def test_split_program_speaks_tls_and_asks_for_its_token(pair, started, tmp_path, files):
    cert, key = certificate(tmp_path)
    tls = ["--tls-cert", cert, "--tls-key", key]
    program, ready = started(*tls, "--token-file", files["token"])
    assert ready["url"].startswith("wss://127.0.0.1:")
    trusted = ssl.create_default_context(cafile=cert)
    shown = {"Authorization": "Bearer secret"}
    with pytest.raises(ssl.SSLCertVerificationError):
        connect(ready["url"], ssl=ssl.create_default_context()).__enter__()
    text = answer(ready["url"], pair, [5, 6], 4, ssl=trusted, additional_headers=shown)
    assert len(text) == 4
    program.send_signal(signal.SIGINT)
    _, log = program.communicate(timeout=30)
    assert program.returncode == INTERRUPTED and "secret" not in log
