"""Runs that are killed, stopped, started twice or changed lose nothing; damage; full disks.

Most runs are those of tests/train/toy_run.py; test_training.py interrupts the real trainers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import errno
import itertools
import json
import os
import resource
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from infer.info import ROOT
from moa_jax.errors import InputError
from moa_jax.training import checkpoint
from moa_jax.training.checkpoint import Checkpoints
from moa_jax.training.fingerprint import changes
from tests.meeting import free_port, wait_for
from tests.model_folders import refusal
from tests.train.test_training import changed, distill_config
from tests.train.toy_run import cut_at, final_state, placed_batch, steps_of, toy_config, toy_job
from train.run import loop


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> Path:
    """Returns the folder of an uninterrupted run."""
    folder = tmp_path_factory.mktemp("whole")
    loop.fit(toy_job(toy_config(folder)), None)
    return folder


@pytest.fixture
def copy(whole, tmp_path) -> Path:
    """Returns a copy of that run, to be resumed or damaged."""
    shutil.copytree(whole / "run", tmp_path / "run")
    return tmp_path


def assert_same_run(folder: Path, other: Path) -> None:
    """Asserts the same state and the same records, bit for bit."""
    for one, two in zip(final_state(folder), final_state(other), strict=True):
        assert one.dtype == two.dtype and one.tobytes() == two.tobytes()
    one, two = (path / "run" / "metrics.jsonl" for path in (folder, other))
    assert one.read_bytes() == two.read_bytes()


# ---- killed and stopped -------------------------------------------------------------------


@contextlib.contextmanager
def running(folder: Path, *flags: str, updates: int = -1) -> Iterator[subprocess.Popen]:
    """Starts a toy run as a process, which waits after `updates`; kills the process at the end."""
    command = [sys.executable, "-m", "tests.train.toy_run", str(folder), *flags]
    pipe = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    variables = os.environ | {"TOY_UPDATES": str(updates)}
    with subprocess.Popen(command, cwd=ROOT, env=variables, **pipe) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_for_update(process: subprocess.Popen, step: int) -> None:
    for line in process.stdout:
        if line == f"update {step}\n":
            return
    raise AssertionError(f"ended before update {step}: {process.stderr.read()}")


@pytest.mark.slow
def test_killed_in_a_save_it_resumes_to_the_same_bits(whole, tmp_path):
    with running(tmp_path, updates=8) as process:
        while process.poll() is None and not list(tmp_path.glob("run/checkpoints/8*")):
            time.sleep(0.0005)
        process.kill()
        assert process.wait() == -signal.SIGKILL
    assert steps_of(tmp_path)[0] == "4" and "12" not in steps_of(tmp_path)
    loop.fit(toy_job(toy_config(tmp_path)), None)
    assert steps_of(tmp_path) == steps_of(whole) == ["12", "8"]
    assert_same_run(tmp_path, whole)


ENDLESS = ("--optim.total_steps", "100000", "--run.save_every", "100000")


def assert_stopped_by(what: str, folder: Path, err: str) -> None:
    """Asserts that the only checkpoint is that of the last update, which the line names."""
    last = err.splitlines()[-1]
    (step,) = steps_of(folder)
    assert f"stopped by {what} after step {step} of" in last and "the same command goes on" in last
    config = changed(toy_config(folder), optim_total_steps=100000)
    assert final_state(folder, config)[0] == int(step)


@pytest.mark.slow
def test_of_two_processes_both_stop_when_one_is_terminated(tmp_path):
    """Both stop after the same update; one process restores arrays that two have saved."""
    flags = [*ENDLESS, "--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process"]
    with running(tmp_path, *flags, "0") as first, running(tmp_path, *flags, "1") as second:
        wait_for_update(second, 3)
        second.send_signal(signal.SIGTERM)
        (_, err), (_, silent) = (process.communicate(timeout=60) for process in (first, second))
        assert (first.returncode, second.returncode) == (75, 75)
    assert_stopped_by("a preemption", tmp_path, err)
    assert "stopped" not in silent


@pytest.mark.slow
@pytest.mark.parametrize("updates, processes", [(0, 1), (6, 2)])
def test_a_run_that_hangs_ends_after_a_signal_and_keeps_its_checkpoint(
    updates, processes, tmp_path, monkeypatch
):
    """Process 0 hangs before an update; process 1 gets the signal and waits in a collective.

    A signal to process 0 before the first update ends both at once: nothing is to be saved.
    """
    monkeypatch.setenv("TOY_STOP_TIMEOUT", "1")
    flags = ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", "2", "--process"]
    with contextlib.ExitStack() as stack:
        start = lambda *more, **named: stack.enter_context(running(tmp_path, *more, **named))
        each = [start(*[*flags, "0"] * (processes > 1), updates=updates)]
        each += [start(*flags, str(index)) for index in range(1, processes)]
        if updates:
            wait_for_update(each[0], 5)
        wait_for((tmp_path / "run" / ("checkpoints/4" if updates else "speed.jsonl")).exists)
        each[-1 if updates else 0].send_signal(signal.SIGTERM)
        ends = [process.communicate(timeout=60)[1] for process in each]
        assert [process.returncode for process in each] == [75] * processes, ends
    why = "the run has not stopped 1 s after a signal" if updates else "before its first update"
    assert all(why in err for err in ends)
    assert final_state(tmp_path)[0] == 4 if updates else steps_of(tmp_path) == []


def test_stopped_at_an_uneven_step_it_resumes_to_the_same_bits(whole, tmp_path):
    """Step 9 has an evaluation, which an interrupted run leaves to the resumed run."""

    def batch(step: int):
        if step == 8:
            signal.raise_signal(signal.SIGINT)
        return placed_batch(step)

    config, before = toy_config(tmp_path), signal.getsignal(signal.SIGINT)
    assert loop.fit(toy_job(config, batch=batch), None) is None
    assert signal.getsignal(signal.SIGINT) == before
    assert "9" in steps_of(tmp_path)
    assert '"step": 9,' not in (tmp_path / "run" / "metrics.jsonl").read_text()
    loop.fit(toy_job(config), None)
    assert_same_run(tmp_path, whole)


def test_a_run_that_dies_in_an_evaluation_evaluates_again(whole, tmp_path):
    """The state is saved before its evaluation, and the resumed run repeats the evaluation."""

    def evaluate(params: Any, frozen: Any) -> Any:
        raise RuntimeError("no more memory")

    config = toy_config(tmp_path)
    with pytest.raises(RuntimeError, match="no more memory"):
        loop.fit(toy_job(config, evaluate=evaluate), None)
    with pytest.raises(RuntimeError, match="no more memory"):
        loop.fit(toy_job(changed(config, run_save_every=3), evaluate=evaluate), None)
    assert steps_of(tmp_path) == ["3"]
    loop.fit(toy_job(toy_config(tmp_path)), None)
    assert_same_run(tmp_path, whole)


def test_a_run_resumes_without_a_fresh_state_and_with_other_bookkeeping(whole, copy):
    """A fresh state beside the restored one would double the memory. One record is truncated."""

    def start() -> Any:
        raise AssertionError("a state was made anew")

    log = copy / "run" / "metrics.jsonl"
    log.write_bytes(log.read_bytes()[:-7])
    shutil.rmtree(copy / "run" / "checkpoints" / "12")
    config = toy_config(copy, keep_checkpoints=5, not_finite="skip")
    config = changed(config, data_cache="elsewhere", data_workers=3, output="elsewhere")
    loop.fit(toy_job(config, start=start), None)
    assert_same_run(copy, whole)


def test_minutes_since_the_last_save_make_another_due(whole, tmp_path, monkeypatch):
    """The clock is read at every second step, and 45 s pass between two readings."""
    seconds = itertools.count(step=45)
    monkeypatch.setattr(loop, "time", Mock(monotonic=lambda: next(seconds)))
    config = toy_config(tmp_path, save_every=100, save_every_minutes=1.0, keep_checkpoints=9)
    loop.fit(toy_job(config), None)
    assert steps_of(tmp_path) == ["12", "4", "8"]
    assert_same_run(tmp_path, whole)


def test_a_finished_run_is_left_as_it_is(whole, copy):
    assert loop.fit(toy_job(toy_config(copy)), None) is not None
    assert_same_run(copy, whole)


# ---- damage -------------------------------------------------------------------------------


def arrays_of(folder: Path, step: int) -> Path:
    """Returns the file that holds a checkpoint's arrays."""
    files = (folder / "run" / "checkpoints" / str(step) / "state").rglob("d/*")
    return max(files, key=lambda path: path.stat().st_size)


def cut_short(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-5])


def flip_a_bit(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(bytes(data))


DAMAGE = {
    "bytes": lambda folder: cut_short(arrays_of(folder, 12)),
    "has changed": lambda folder: flip_a_bit(arrays_of(folder, 12)),
    "is missing": lambda folder: arrays_of(folder, 12).unlink(),
    "files.json is damaged": lambda folder: cut_short(folder / "run/checkpoints/12/files.json"),
    "meta: ": lambda folder: (  # of an earlier version: its checkpoints have no list of files
        (folder / "run/checkpoints/12/files.json").unlink(),
        cut_short(folder / "run/checkpoints/12/meta/metadata"),
    ),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_checkpoint_is_named_and_the_one_before_used(whole, copy, why, capsys):
    DAMAGE[why](copy)
    loop.fit(toy_job(toy_config(copy)), None)
    told = capsys.readouterr().err.splitlines()[0]
    assert told.startswith("checkpoint 12 is damaged (") and why in told
    assert told.endswith("going on from step 8")
    assert steps_of(copy) == ["12", "12.damaged", "8"]
    assert_same_run(copy, whole)


def test_where_all_are_damaged_nothing_is_touched(copy):
    for step in (8, 12):
        cut_short(arrays_of(copy, step))
    before = sorted((copy / "run").rglob("*"))
    line = refusal(loop.fit, toy_job(toy_config(copy)), None)
    assert "no checkpoint can be read: 12 (state/" in line and "8 (state/" in line
    assert sorted((copy / "run").rglob("*")) == before


RESTORE = (checkpoint.ocp.CheckpointManager, "restore")
CRC = (checkpoint, "_size_and_crc")
READING = {
    "network": (*RESTORE, OSError(errno.ETIMEDOUT, "Connection timed out")),
    "memory": (*RESTORE, RuntimeError("RESOURCE_EXHAUSTED: Out of memory")),
    "access": (*CRC, OSError(errno.EACCES, os.strerror(errno.EACCES))),
    "disk": (*CRC, OSError(errno.EIO, os.strerror(errno.EIO))),
}


@pytest.mark.parametrize("name", READING)
def test_an_error_of_reading_is_not_damage(copy, monkeypatch, name):
    """The error is raised unchanged: nothing is renamed, and no older checkpoint is used."""
    where, function, error = READING[name]
    expected = InputError if name == "disk" else type(error)
    with monkeypatch.context() as patch:
        patch.setattr(where, function, Mock(side_effect=error))
        with pytest.raises(expected, match=str(error.args[-1])):
            loop.fit(toy_job(toy_config(copy)), None)
    assert steps_of(copy) == ["12", "8"]
    assert final_state(copy)[0] == 12


# ---- no room ------------------------------------------------------------------------------


def test_a_disk_that_fills_up_in_a_save_loses_nothing(whole, copy):
    """No file may exceed 5 kB, and the arrays do."""
    shutil.rmtree(copy / "run/checkpoints/12")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (5000, limits[1]))
    try:
        line = refusal(loop.fit, toy_job(toy_config(copy)), None)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert line.endswith(
        "a checkpoint could not be written: File too large; whole ones: steps 8; "
        "make room and give the same command again"
    )
    loop.fit(toy_job(toy_config(copy)), None)
    assert_same_run(copy, whole)


# ---- the owner of a directory -------------------------------------------------------------


def test_two_runs_on_one_directory_are_refused(tmp_path):
    config = toy_config(tmp_path)
    with Checkpoints(config):
        line = refusal(loop.fit, toy_job(config), None)
    assert f"process {os.getpid()} on" in line and "name another run.directory" in line
    with Checkpoints(config):  # it is free again
        pass


def test_a_run_with_other_settings_or_rows_is_refused_by_their_names(whole, copy):
    config = toy_config(copy)
    line = refusal(loop.fit, toy_job(changed(config, optim_b2=0.5, run_seed=7)), None)
    assert "optim.b2: 0.95 -> 0.5" in line and "run.seed: 0 -> 7" in line
    line = refusal(loop.fit, toy_job(config, data={"first rows": "others"}), None)
    assert "trained on other data: first rows: toy's -> others; restore the files" in line
    assert_same_run(copy, whole)


def test_a_run_is_extended_to_the_same_bits(whole, tmp_path, capsys, monkeypatch):
    """More steps may be given on a resume, and fewer than are done may not."""
    config = toy_config(tmp_path)
    loop.fit(toy_job(changed(config, optim_total_steps=8)), None)
    loop.fit(toy_job(config), None)
    for one, two in zip(final_state(tmp_path), final_state(whole), strict=True):
        assert one.tobytes() == two.tobytes()
    assert "optim.total_steps: 8 -> 12: the learning rate keeps its" in capsys.readouterr().err
    line = refusal(loop.fit, toy_job(changed(config, optim_total_steps=11)), None)
    assert line.startswith("optim.total_steps 11: ") and "holds step 12; give at least" in line
    monkeypatch.setattr(checkpoint, "_meta", lambda _: {"config": dataclasses.asdict(DISTILLED)})
    longer = changed(DISTILLED, optim_total_steps=40, loss_feature_fade=0.5)
    line = checkpoint._extension(tmp_path, longer)
    assert "fades out at step 20; " in line and line.endswith("staircase masks until step 20")


DISTILLED = distill_config(Path("runs"), Path("target"))


def test_settings_younger_than_a_run_count_as_their_defaults():
    """A first version saved nested settings, two of `run` at the top, and lacked many fields."""
    config = DISTILLED
    first = dataclasses.asdict(dataclasses.replace(config, run=None, output=""))
    first |= {"seed": config.run.seed, "dtype": config.run.dtype}
    for name in ("loss", "chunks", "mesh"):
        del first[name]
    del first["masks"]["shortest_future"], first["data"]["weights"], first["data"]["workers"]
    first = json.loads(json.dumps(first))
    assert changes(first, config) == []
    other = changed(config, masks_shortest_future=5, loss_token="total_variation")
    assert changes(first | {"seed": 3}, other) == [
        "masks.shortest_future: 6 -> 5",
        'loss.token: "cross_entropy" -> "total_variation"',
        "run.seed: 3 -> 0",
    ]


# ---- which are kept -----------------------------------------------------------------------


def test_the_newest_and_the_best_are_kept(tmp_path):
    taus = iter([1.0, 3.0, 2.0, 1.5, 2.5, 2.9])
    evaluate = lambda params, frozen: {"simulated_tau": next(taus)}
    config = toy_config(tmp_path, eval_every=2, save_every=2, keep_checkpoints=2)
    with pytest.raises(KeyboardInterrupt):
        loop.fit(toy_job(config, batch=cut_at(9), evaluate=evaluate), None)
    assert steps_of(tmp_path) == ["4", "6", "8"]
    loop.fit(toy_job(config, evaluate=evaluate), None)  # the resumed run still has the tau of 4
    assert steps_of(tmp_path) == ["10", "12", "4"]
