"""Every program: exit codes, one-line errors, help, progress."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time

import httpx
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from huggingface_hub.errors import OfflineModeIsEnabled

from infer.cli import program
from moa_jax.errors import InputError
from moa_jax.version import __version__


def exit_code(main, arguments=None) -> int:
    with pytest.raises(SystemExit) as exit:
        program.run(main, arguments)
    return exit.value.code


def raising(error, cause=None):
    """Returns a program that ends by an error."""

    def main(arguments):
        raise error from cause

    return main


def parsing(arguments):
    parser = program.Parser("infer.toy", "A toy.\n\n    kept as it is")
    parser.add_argument("--depth", type=int, default=5, help="levels")
    parser.add_argument("--seed", type=int, help="of the draws")
    parser.add_argument("--system", default="", help="words before")
    parser.add_argument("--limit", type=program.positive, help="at most")
    parser.add_argument("--json", action="store_true", help="one document")
    parser.parse_args(arguments)


def test_version(capsys):
    assert exit_code(parsing, ["--version"]) == 0
    assert capsys.readouterr().out == f"moa-jax {__version__}\n"


def test_help_shows_the_defaults_with_a_meaning(capsys):
    assert exit_code(parsing, ["--help"]) == 0
    shown = capsys.readouterr().out
    assert "levels (default: 5)" in shown and shown.count("default:") == 1
    assert "\n    kept as it is\n" in shown


BUSY, FORBIDDEN = (
    httpx.HTTPStatusError("", request=None, response=httpx.Response(c)) for c in (503, 403)
)
LASTING = None, ValueError("ours"), OfflineModeIsEnabled(""), FORBIDDEN, PermissionError(13, "no")
PASSING = ConnectionRefusedError(), httpx.ConnectError("no name"), BUSY, OSError(errno.EIO, "lost")
CAUSES = {2: LASTING, 75: PASSING}  # of the error that ends a program, by its code


@pytest.mark.parametrize("code, cause", [(code, each) for code in CAUSES for each in CAUSES[code]])
def test_an_error_is_one_line_and_its_cause_decides_the_code(code, cause, capsys):
    error = InputError("weights.safetensors: cut short\nfetch it again")
    assert exit_code(raising(error, cause)) == code
    line = f"{__name__}: weights.safetensors: cut short fetch it again\n"
    assert capsys.readouterr() == ("", line)


@pytest.mark.parametrize("name, reason", [("a-file/x", "not a directory"), (".", "is a dir")])
def test_a_path_that_cannot_be_used_is_one_line_and_exit_2(tmp_path, name, reason, capsys):
    (tmp_path / "a-file").touch()
    path = tmp_path / name
    for arguments in (["--output", str(path)], [f"--output={path}"], [f"files=x,{path}"]):
        assert exit_code(lambda _: path.write_text("x"), arguments) == 2
        shown = capsys.readouterr()
        assert shown.out == ""
        assert shown.err.startswith(f"{__name__}: cannot open {path}: {reason}")
        assert shown.err.endswith("; choose a path that can be used\n")


def test_a_full_disk_is_one_line_and_other_system_errors_are_ours(capsys):
    assert exit_code(raising(OSError(errno.ENOSPC, "No space left on device"))) == 75
    said = "No space left on device; make room, or choose another path"
    assert capsys.readouterr().err == f"{__name__}: {said}\n"
    with pytest.raises(OSError, match="ours"):
        program.run(raising(OSError("ours")))


def test_interruption_is_quiet(capsys):
    assert exit_code(raising(KeyboardInterrupt())) == 130
    assert capsys.readouterr() == ("", "")


def test_a_fault_of_ours_keeps_its_traceback():
    with pytest.raises(ValueError, match="ours"):
        program.run(raising(ValueError("ours")))


def test_a_closed_pipe_is_quiet():
    program = "from infer.cli import program; program.run(lambda arguments: print('x'))"
    buffered = os.environ | {"PYTHONUNBUFFERED": ""}  # the rest of a buffer fails last
    reader, writer = os.pipe()
    os.close(reader)
    with open(writer, "wb") as closed:
        command = [sys.executable, "-c", program]
        done = subprocess.run(command, stdout=closed, stderr=subprocess.PIPE, env=buffered)
    assert (done.returncode, done.stderr) == (141, b"")


def test_progress_in_a_pipe_is_lines(capsys, monkeypatch):
    clock = iter(range(0, 1000, 4))
    monkeypatch.setattr(program.time, "monotonic", lambda: next(clock))
    with program.progress(8, "train", initial=2) as bar:
        bar.note({"loss": 2.0 / 3, "tokens": 12})
        for _ in range(6):
            bar.step()
        bar.line("half way")
    shown = capsys.readouterr()
    assert shown.out == ""
    lines = shown.err.splitlines()
    assert lines[0] == "train 5/8, 16 s, 0.188/s, 16 s left, loss 0.6667, tokens 12"
    assert lines[-2:] == ["half way", "train 8/8, 36 s, 0.167/s, loss 0.6667, tokens 12"]
    assert len(lines) == 4


def test_silent_work_is_named_with_its_time_by_the_innermost_stage(capsys, monkeypatch):
    monkeypatch.setattr(program, "SECONDS_BETWEEN_LINES", 0.05)

    def next_lines() -> set[str]:
        while not (text := capsys.readouterr().err):
            time.sleep(0.01)
        return set(text.splitlines())

    with program.stage("preparing"):
        with program.stage("compiling the step"):
            assert next_lines() == {"compiling the step, 0 s"}
        assert next_lines() == {"preparing, 0 s"}
    with program.stage("silent", quiet=True):
        time.sleep(0.15)
    assert capsys.readouterr().err == ""
    assert [program.duration(seconds) for seconds in (90, 9000)] == ["90 s", "2.5 h"]


def test_a_chip_that_does_not_start_may_pass_unless_it_was_named(monkeypatch):
    error = RuntimeError("Unable to initialize backend 'tpu': in use (set JAX_PLATFORMS='' to ...)")
    monkeypatch.setenv("JAX_PLATFORMS", "tpu")
    assert program.code_of(error) == 2 and "unset JAX_PLATFORMS" in program.refusal_of(error)
    monkeypatch.delenv("JAX_PLATFORMS")
    assert program.code_of(error) == 75 and "in use; try again" in program.refusal_of(error)


def test_too_little_memory_is_one_line(capsys):
    def host(arguments):
        np.empty(10**15, np.int8)

    def device(arguments):
        jax.block_until_ready(jnp.zeros((10**6, 10**6, 100)))

    for main in (host, device):
        assert exit_code(main) == 2
        line = capsys.readouterr().err
        assert "out of memory: " in line and "lower --slots" in line and line.count("\n") == 1
