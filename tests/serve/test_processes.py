"""Several processes serve and decode as one: they write the same texts and end together."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import jax
import numpy as np
import pytest

from infer import generate, serve
from infer.cli.flags import cluster
from infer.cli.flags.mesh import asked_mesh
from moa_jax.config import Sampling
from moa_jax.decode.draft_vocabulary import FILE as VOCABULARY
from moa_jax.decode.draft_vocabulary import DraftVocabulary, save_vocabulary
from moa_jax.runtime import multihost as processes
from moa_jax.runtime.multihost import Failure, ProcessGroup
from tests.meeting import free_port, loopback, wait_for
from tests.model_folders import refusal
from tests.serve.served_program import (
    HELLO_IDS,
    ROOT,
    SLOTS,
    Ask,
    ServedProgram,
    answers_at_once,
    assert_left,
    assert_nothing_is_held,
    mixed,
    start_program,
)
from tests.serve.toy_server import COMPLETIONS, DEMO, VOCAB
from tests.train.test_processes import ends

LONG = Ask(tuple(HELLO_IDS), 150, Sampling(1.0, seed=3), ignore_eos=True, stream=False)


def place(process: int, port: int) -> list[str]:
    where = f"{loopback()}:{port}"
    return ["--coordinator", where, "--processes", "2", "--process", str(process)]


@contextlib.contextmanager
def other_process(folder: Path, *flags: str) -> Iterator[subprocess.Popen]:
    """Runs process 1 of two; its stderr is written to a file."""
    with (folder / "other").open("w") as log:
        process = subprocess.Popen(
            [sys.executable, "-m", *flags], cwd=ROOT, stdout=subprocess.DEVNULL, stderr=log
        )
    try:
        yield process
    finally:
        process.kill()
        process.wait()


@contextlib.contextmanager
def two_serving(folder: Path, mesh: str) -> Iterator[tuple[ServedProgram, subprocess.Popen]]:
    """Serves the bundled pair on two devices, one per process, in the default mode."""
    port = free_port()
    flags = ["--mesh", mesh, "--slots", str(SLOTS), "--max-tokens", "192", "--port", "0"]
    key = ["--api-key-file", str(folder / "keys"), "--ready-file", str(folder / "ready.json")]
    with other_process(folder, "infer.serve", *flags, *key, *place(1, port)) as other:
        process, ready = start_program(folder, *flags, *place(0, port))
        try:
            yield ServedProgram(process, ready, folder / "log"), other
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("mesh", "requests", "clients"), [("data=2", 32, 16), ("tensor=2", 12, 8)])
def test_two_processes_serve_as_one(mesh, requests, clients, tmp_path):
    """Clients that stay or leave get plain decoding's texts; SIGTERM ends both processes.

    The test sends few requests if each layer of a round waits for the other process: on few cores,
    a sum takes a time slice of the system.
    """
    with two_serving(tmp_path, mesh) as (served, other):
        asks = mixed(requests, 2)
        found = answers_at_once(served, asks, clients)
        assert_left(asks, found)
        wait_for(served.is_idle, 60)
        assert served.metric("moa:engine_failures_total") == 0
        if mesh == "data=2":
            assert_nothing_is_held(served)
        for process in (other, served.process):  # as launchers do
            process.send_signal(signal.SIGTERM)
        assert (served.process.wait(60), other.wait(60)) == (0, 0)


def how_it_ended(served: ServedProgram, stream: bool) -> str:
    """Returns the end of a long answer: an error message, or the transport error."""
    try:
        with (
            served.client() as client,
            client.stream("POST", COMPLETIONS, json=LONG.body | {"stream": stream}) as said,
        ):
            *_, last = (line for line in said.iter_lines() if line)
    except httpx.TransportError as error:
        return type(error).__name__
    return json.loads(last.removeprefix("data: "))["error"]["message"]


@contextlib.contextmanager
def ten_requests(served: ServedProgram) -> Iterator[list[Future[str]]]:
    """Sends ten requests, every other one streamed; some of them run, and some wait."""
    with ThreadPoolExecutor(10) as pool:
        asking = [pool.submit(how_it_ended, served, number % 2 == 0) for number in range(10)]
        full = {"vllm:num_requests_running": SLOTS, "vllm:num_requests_waiting": 10 - SLOTS}
        wait_for(lambda: all(served.metric(name) >= count for name, count in full.items()))
        yield asking


def healths(served: ServedProgram, seen: threading.Event) -> list[int]:
    """Returns the statuses of /health until the server is gone, each status once."""
    found: dict[int, None] = {}
    with contextlib.suppress(httpx.TransportError), served.client() as client:
        while True:
            found[client.get("/health").status_code] = None
            seen.set()
            time.sleep(0.05)
    return list(found)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("how", "line", "seconds"),
    [
        (signal.SIGKILL, "process 1 has died", 10),
        (signal.SIGSTOP, "process 1: no sign of life for 20 s", 35),  # as on a lost machine
    ],
    ids=["killed", "silent"],
)
def test_a_process_that_dies_ends_the_group_in_time(how, line, seconds, tmp_path):
    """Rows are split between the two processes, so each device has half of the answers."""
    with two_serving(tmp_path, "data=2") as (served, other):
        with ten_requests(served) as asking, ThreadPoolExecutor(1) as looking:
            health = looking.submit(healths, served, seen := threading.Event())
            assert seen.wait(10)
            other.send_signal(how)
            # The server reports the first event: the end of the process, or a failed collective.
            lines = (line, "the engine failed at this request")
            for each in asking:
                assert each.result(60).startswith(lines)
            assert served.process.wait(seconds) == 1
            # /health may return 503 from then on, until all requests are answered.
            assert health.result(10) in ([200, 503], [200])
    said = served.log.read_text()
    assert any(told.startswith(f"infer.serve: {line}") for told in said.splitlines())


@pytest.mark.slow
def test_without_process_0_the_others_end(tmp_path):
    """The process exits before JAX would abort it; clients see that the connection ended."""
    with two_serving(tmp_path, "tensor=2") as (served, other), ten_requests(served) as asking:
        served.process.kill()
        assert other.wait(30) == 1
        ends = {each.result(30) for each in asking}
        assert ends <= {"RemoteProtocolError", "ReadError"}, ends
    assert "infer.serve: process 0 has died\n" in (tmp_path / "other").read_text()


@pytest.mark.slow
def test_two_processes_of_four_devices_decode_as_one(tmp_path):
    """Feed-forwards and vocabularies are split across processes; process 0 alone prints."""
    lines = [{"prompt": text} for text in ("I need a hotel.", "Hello!", "A table for two, please.")]
    flags = ["--batch", "2", "--max-new-tokens", "6", "--temperature", "0.7", "--seed", "5"]
    assert_four_devices_each_write_as_one(tmp_path, lines, *flags, "--depth", "3", mesh="tensor=8")


@pytest.mark.slow
def test_rows_and_heads_are_cut_across_processes(pair):
    """Each process decodes two of four rows; its drafter reads all tokens."""
    for path in (DEMO / "target").glob("*token*"):
        shutil.copy(path, pair / "target")
    lines = [{"prompt_ids": [1, *ids]} for ids in ([5, 6, 7, 5, 6], [9], [3, 4, 3], [8, 2, 8])]
    flags = ["--target", str(pair / "target"), "--draft", "lookup", "--batch", "4"]
    flags += ["--max-new-tokens", "8", "--temperature", "1", "--seed", "3"]
    assert_four_devices_each_write_as_one(pair, lines, *flags, mesh="data=2,tensor=4")


def assert_four_devices_each_write_as_one(
    folder: Path, lines: list[dict], *flags: str, mesh: str
) -> None:
    """Asserts that two processes write what one device writes."""
    prompts = folder / "prompts.jsonl"
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["infer.generate", "--prompts", str(prompts), "--json", *flags]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    told = together(command, command, "--mesh", mesh, env=env)
    assert [process.returncode for process, _, _ in told] == [0, 0], told
    two, nothing = (out for _, out, _ in told)
    assert nothing == ""
    alone = subprocess.run(
        [sys.executable, "-m", *command], cwd=ROOT, text=True, capture_output=True, check=True
    ).stdout
    shown = [
        [(row["token_ids"], row["accept_lengths"]) for row in json.loads(document)["results"]]
        for document in (two, alone)
    ]
    assert shown[0] == shown[1] and len(shown[0]) == len(lines)


def together(first: list[str], second: list[str], *both: str, env=None) -> list[tuple]:
    """Returns exit code, stdout and stderr of two processes that connect to each other."""
    port, pipes = free_port(), dict(stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    started = [
        subprocess.Popen(
            [sys.executable, "-m", *command, *both, *place(number, port)],
            cwd=ROOT,
            env=env,
            **pipes,
        )
        for number, command in enumerate((first, second))
    ]
    try:
        return [(each, *each.communicate(timeout=400)) for each in started]
    finally:
        for each in started:
            each.kill()


# The share of the target's bytes that each of two processes reads.
READ = """
from infer.cli.flags.pair import DEMO
from moa_jax.files import packed
from moa_jax.model import sharding
from moa_jax.pretrained import load_target
fill, read = packed._fill, []
packed._fill = lambda piece: read.append(piece.given_OI.nbytes) or fill(piece)
load_target(DEMO / "target", mesh=sharding.decoding_mesh(tensor=2))
share = sum(read) / (DEMO / "target" / "model.safetensors").stat().st_size
assert 0.5 < share < 0.6, share  # both have its one key-value head
"""


@pytest.mark.slow
def test_each_process_reads_its_own_part_of_the_weights():
    read = textwrap.indent(READ, 12 * " ").strip()
    found = ends(read, read)
    assert [code for code, *_ in found] == [0, 0], found


@pytest.mark.slow
def test_two_processes_report_the_margin_of_a_tie():
    """Each process has half of the vocabulary's scores, so a token may be in either half."""
    command = ["tests.serve.check_run", "--prompt", "Hello!", "--check", "--max-new-tokens", "4"]
    (first, _, told), (second, *_) = together(command, command, "--mesh", "tensor=2")
    assert (first.returncode, second.returncode) == (1, 1)
    (margin,) = re.findall(r"^check: .*; the target prefers plain's by (\S+)$", told, re.MULTILINE)
    assert -100 < float(margin) < 0  # plain's token is made up


@pytest.mark.parametrize("reported", [Failure(1, "a bad file", 2), None])
def test_a_failure_that_a_process_reports_is_the_reason(reported, monkeypatch):
    """The end of the connection is often noticed first, but it is not the reason."""
    ended: list[Failure] = []
    group = ProcessGroup(print)
    monkeypatch.setattr(group, "end", ended.append)
    monkeypatch.setattr(processes, "CAUSE_TIMEOUT_S", 60.0 if reported else 0.3)
    if reported:
        message = {"failure": reported}
        threading.Timer(0.2, group._handle, (1, json.loads(json.dumps(message)))).start()
    group.fail("process 1 has died")
    assert ended == [reported or Failure(0, "process 1 has died", 1)]


@pytest.mark.slow
def test_processes_that_were_started_differently_are_refused():
    command = ["infer.generate", "--prompt", "Hello!", "--mesh", "tensor=2", "--max-new-tokens"]
    for process, _, told in together([*command, "8"], [*command, "9"]):
        assert process.returncode == 2
        assert "--max-new-tokens is 9 here and 8 for process 0" in told


class Loaded(Exception):
    """A model was about to be loaded."""


@pytest.fixture
def started(tmp_path, monkeypatch) -> Callable[..., None]:
    """Runs a program as one of two processes until it would load; each call is the next process.

    The fixture keeps the values of process 0; prompts and models are in a folder that may change.
    """
    words: dict[str, Any] = {}
    for name in ("target", "draft"):
        shutil.copytree(DEMO / name, tmp_path / name)
    (tmp_path / "prompts.jsonl").write_text('{"prompt_ids": [1]}\n')
    save_vocabulary(tmp_path / "words", DraftVocabulary(np.arange(9), VOCAB))
    shutil.copy(tmp_path / "words", tmp_path / "draft" / VOCABULARY)

    def loaded(*_: Any, **__: Any) -> None:
        raise Loaded

    def start(program: Any, *flags: str) -> None:
        is_first = not words
        monkeypatch.setattr(processes, "is_first", lambda: is_first)
        with pytest.raises(Loaded):
            program.main(list(flags))

    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "kv_set", words.__setitem__)
    monkeypatch.setattr(processes, "kv_get", words.__getitem__)
    monkeypatch.setattr(cluster, "joined", lambda *_: contextlib.nullcontext(ProcessGroup(print)))
    monkeypatch.setattr(serve, "join_group", loaded)
    monkeypatch.setattr(serve, "group_of", loaded)
    monkeypatch.setattr(serve.signal, "signal", lambda *_: None)  # SIGTERM stays with this process
    monkeypatch.setattr(generate, "load_pair", loaded)
    return start


def append(path: Path) -> None:
    with path.open("a") as file:
        file.write("\n")


def raised(path: Path) -> None:
    """Changes a weight in the last tensor."""
    content = bytearray(path.read_bytes())
    content[-1] ^= 1
    path.write_bytes(content)


OTHER_FILES = [
    ("prompts.jsonl", append, [], "prompts.jsonl of --prompts"),
    ("target/tokenizer.json", append, [], "tokenizer.json of the target"),
    ("target/generation_config.json", append, [], "generation_config.json of the target"),
    ("target/config.json", append, [], "the target's model"),
    ("target/model.safetensors", raised, ["--mode", "plain"], "the target's model"),
    ("draft/model.safetensors", raised, [], "the drafter's model"),
    (f"draft/{VOCABULARY}", raised, [], f"{VOCABULARY} of the drafter"),
    ("words", raised, ["--draft-vocabulary", "words"], "the file of --draft-vocabulary"),
]


@pytest.mark.parametrize("program", [generate, serve], ids=["generate", "serve"])
@pytest.mark.parametrize("path, change, flags, name", OTHER_FILES, ids=[p for p, *_ in OTHER_FILES])
def test_files_that_differ_are_named_before_anything_is_loaded(
    path, change, flags, name, program, started, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    flags = ["--target", "target", *flags]
    flags += [] if "plain" in flags else ["--draft", "draft"]
    if program is generate:
        flags += ["--prompts", "prompts.jsonl"]
    elif "--prompts" in name:
        pytest.skip("a server has no prompts")
    for _ in range(2):
        started(program, *flags)
    change(tmp_path / path)
    line = refusal(started, program, *flags)
    assert re.fullmatch(rf"{name} is sha256 \w+ here and sha256 \w+ for process 0; .*", line)


def test_a_kind_without_files_has_none_to_compare(started):
    for _ in range(2):
        started(serve, "--draft", "lookup")


@pytest.mark.parametrize(
    "flags, line",
    [
        (["--distributed"], "several processes decode prompts that are given"),
        (["--distributed", "--prompt", "x", "--compare"], "leave out --compare"),
        (["--process", "1", "--prompt", "x"], "--coordinator, --processes and --process go"),
    ],
)
def test_bad_flags_are_refused(flags, line, capsys):
    assert line in refusal(generate.main, flags)


@pytest.mark.parametrize("mesh", [{}, {"tensor": 1}])
def test_a_mesh_has_devices_of_every_process(mesh, monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    line = refusal(asked_mesh, argparse.Namespace(mesh=mesh))
    assert line.startswith("--mesh uses devices of 1 of 2 processes")
