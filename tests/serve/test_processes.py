"""Several processes serve and decode as one: the texts of one process, and one end for all."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import jax
import pytest

from infer import generate
from infer.flags.mesh import asked_mesh
from moa_jax.config import Sampling
from tests.meeting import free_port, wait_for
from tests.model_folders import refusal
from tests.serve.test_clients import HELLO_IDS, ROOT, start_program
from tests.serve.test_endurance import Ask, ServedProgram, answers_at_once, mixed
from tests.serve.test_protocol import COMPLETIONS

LONG = Ask(tuple(HELLO_IDS), 150, Sampling(1.0, seed=3), ignore_eos=True, stream=False)


def place(process: int, port: int) -> list[str]:
    where = f"127.0.0.1:{port}"
    return ["--coordinator", where, "--processes", "2", "--process", str(process)]


@contextlib.contextmanager
def other_process(folder: Path, *flags: str) -> Iterator[subprocess.Popen]:
    """Process 1 of two, whose messages go to a file."""
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
def two_serving(folder: Path) -> Iterator[tuple[ServedProgram, subprocess.Popen]]:
    """The bundled pair on two devices, each of a process of its own."""
    port = free_port()
    flags = ["--mesh", "tensor=2", "--slots", "4", "--max-tokens", "192", "--mode", "chain"]
    key = ["--api-key-file", str(folder / "keys"), "--ready-file", str(folder / "ready.json")]
    with other_process(
        folder, "infer.serve", *flags, *key, "--port", "0", *place(1, port)
    ) as other:
        process, ready = start_program(folder, *flags, "--port", "0", *place(0, port))
        try:
            yield ServedProgram(process, ready, folder / "log"), other
        finally:
            process.kill()
            process.wait()


@pytest.mark.slow
def test_two_processes_serve_as_one(tmp_path):
    """Texts of plain decoding, whoever comes and leaves; SIGTERM ends both."""
    with two_serving(tmp_path) as (served, other):
        answers_at_once(served, mixed(16, 2), clients=8)
        wait_for(served.is_idle, 60)
        assert served.metric("moa:engine_failures_total") == 0
        for process in (other, served.process):  # as launchers do
            process.send_signal(signal.SIGTERM)
        assert (served.process.wait(60), other.wait(60)) == (0, 0)


@pytest.mark.slow
def test_a_process_that_dies_ends_the_group_and_nobody_waits(tmp_path):
    with two_serving(tmp_path) as (served, other), ThreadPoolExecutor(6) as pool:

        def status_of(number: int) -> tuple[int, str]:
            with served.client() as client:
                said = client.post(COMPLETIONS, json=LONG.body)
                return said.status_code, said.json().get("error", {}).get("message", "")

        asking = [pool.submit(status_of, number) for number in range(6)]
        wait_for(lambda: served.metric("vllm:num_requests_running") >= 2)
        other.kill()
        # Whichever is noticed first: the end of the process, or a collective that breaks.
        lines = {"process 1 has died", "the engine failed at this request"}
        for status, said in (each.result() for each in asking):
            assert status == 500 and said.partition(":")[0] in lines, said
        assert served.process.wait(30) == 1
    assert "infer.serve: process 1 has died" in served.log.read_text().splitlines()


@pytest.mark.slow
def test_without_process_0_the_others_end(tmp_path):
    with two_serving(tmp_path) as (served, other):
        served.process.kill()
        assert other.wait(30) not in (0, 2)


@pytest.mark.slow
def test_two_processes_of_four_devices_decode_as_one(tmp_path):
    """Rows and heads are cut across processes; the first one alone prints."""
    prompts = tmp_path / "prompts.jsonl"
    lines = [{"prompt": text} for text in ("I need a hotel.", "Hello!", "A table for two, please.")]
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    command = ["infer.generate", "--prompts", str(prompts), "--json", "--batch", "2"]
    command += ["--max-new-tokens", "6", "--temperature", "0.7", "--seed", "5", "--depth", "3"]
    env = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=4"}
    told = together(command, command, "--mesh", "tensor=4,data=2", env=env)
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
    assert shown[0] == shown[1] and len(shown[0]) == 3


def together(first: list[str], second: list[str], *both: str, env=None) -> list[tuple]:
    """Exit code, stdout and stderr of two processes that meet."""
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


@pytest.mark.slow
def test_processes_that_were_started_differently_are_refused():
    command = ["infer.generate", "--prompt", "Hello!", "--mesh", "tensor=2", "--max-new-tokens"]
    for process, _, told in together([*command, "8"], [*command, "9"]):
        assert process.returncode == 2
        assert "--max-new-tokens is 9 here and 8 for process 0" in told


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
