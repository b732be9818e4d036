"""Several processes end together: after a failure in one, all of them report it and none waits."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import jax
import numpy as np
import pytest

from infer.cli.flags.config_file import read_config
from infer.info import ROOT
from moa_jax.config import DistillConfig, MeshConfig
from moa_jax.data import batches
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.pretrained import describe_target
from moa_jax.runtime import multihost as processes
from tests.meeting import free_port, wait_for
from tests.model_folders import refusal
from tests.train.test_training import changed, distill_config, metrics
from train import distill
from train.run import decoding

# The code that process 0 and process 1 run once connected; code without a failure waits.
# Each process has the other one's devices by then, and writes a file to report it: a process
# that stops or dies earlier is missed by JAX before it can do what a test is about.
WAIT = "multihost_utils.sync_global_devices('all')"
PROGRAM = """
import jax
import time
from pathlib import Path
from jax.experimental import multihost_utils
from infer.cli.program import Parser, run
from moa_jax.errors import InputError
from moa_jax.runtime import multihost as processes
from infer.cli.flags import cluster
from infer.cli.flags.config_file import read_config

def raising(error):
    raise error

def main(arguments=None):
    parser = Parser("toy")
    cluster.add_flags(parser)
    parser.add_argument("--reads")
    args = parser.parse_args(arguments)
    {before}
    with cluster.joined(args, parser.prog):
        print(jax.process_count())
        here = Path({there!r})
        (here / str(args.process)).touch()
        while len(list(here.iterdir())) < 2:
            time.sleep(0.02)
        if jax.process_index() == 0:
            {first}
        else:
            {second}

run(main)
"""
MISSING = "processes.on_first(lambda: Path('missing/file').read_text())"
NO_FILE = "cannot open missing/file: no such file or directory; choose a path that can be used"


def ends(
    first: str, second: str, within: float = 30.0, lost: int | None = None, before: str = "pass"
) -> list[tuple[int, list[str], str]]:
    """Returns exit code, lines of the program and all of stderr, by process.

    Processes must end within `within` seconds after they connect, or after one of them ends. The
    process `lost` does not end by itself, so it is killed after the other one has ended.
    """
    place = f"127.0.0.1:{free_port()}"
    there = tempfile.mkdtemp()
    code = PROGRAM.format(first=first, second=second, before=before, there=there)
    command = [sys.executable, "-c", code, "--coordinator", place, "--processes", "2"]
    command += ["--reads", "missing/file", "--process"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True, "cwd": ROOT}
    both = [subprocess.Popen([*command, str(index)], **pipes) for index in range(2)]
    found = {}
    try:
        has_ended = lambda: any(each.poll() is not None for each in both)
        wait_for(lambda: len(os.listdir(there)) == 2 or has_ended(), 300)
        until = time.monotonic() + within
        for index in (1, 0) if lost == 0 else (0, 1):
            if index == lost:
                both[index].kill()
            _, told = both[index].communicate(timeout=until - time.monotonic())
            lines = [line for line in told.splitlines() if line.startswith("toy: ")]
            found[index] = both[index].returncode, lines, told
    finally:
        for each in both:
            each.kill()
            each.communicate()
        shutil.rmtree(there)
    return [found[0], found[1]]


SOON = "processes.HEARTBEAT_TIMEOUT_S = 2; "
# One thread holds the interpreter lock for some seconds.
BUSY = "import sys; sys.setswitchinterval(100); end = time.monotonic() + {}; "
BUSY += "sum(iter(lambda: float(time.monotonic() > end), 1.0)); sys.setswitchinterval(0.005)"
AGAIN = "import os, signal, threading; once_more = (os.getpid(), signal.SIGINT); "
AGAIN += "threading.Timer(1.0, os.kill, once_more).start(); raising(KeyboardInterrupt())"
FULL_DISK = "processes.on_first(lambda: raising(OSError(28, 'No space left')))"
BAD = "raising(InputError('x: bad: fix it'))"
OWN_DISKS = """from moa_jax.training import checkpoint; from tests.train.toy_run import toy_config;
checkpoint.place, checkpoint.SHARED_TIMEOUT_S = lambda path: Path(path) / str(args.process), 0.5;
checkpoint.check_directory(toy_config(here), {})""".replace("\n", " ")
NOT_SHARED = "run.directory .*: processes 1 of 2 do not see the files of process 0; name a folder"
ENDS = {  # what both do, the code of both, and what the lines of both hold
    "on the first": (f"time.sleep(1); {MISSING}", MISSING, 2, NO_FILE, f"process 0: {NO_FILE}"),
    "a fault": (WAIT, "raising(ValueError('ours'))", 1, "1: ValueError: ours", "ValueError: ours"),
    "own disks": (OWN_DISKS, OWN_DISKS, 2, NOT_SHARED, NOT_SHARED),
    "may pass": (FULL_DISK, FULL_DISK, 75, "make room", "make room"),
    "after the other's end": (BAD, "pass", 2, "x: bad", "process 0: x: bad"),
    "interrupted again while the other is busy": (AGAIN, BUSY.format(3), 130),
    "busy, and not blamed": (SOON + BUSY.format(3) + "; time.sleep(1)", "pass", 0),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_both_end_alike(case):
    first, second, code, *lines = ENDS[case]
    found = ends(first, second)
    assert [ended for ended, _, _ in found] == [code, code], found
    for wanted, (_, told, _) in zip(lines, found, strict=False):
        assert len(told) == 1 and re.search(wanted, told[0]), told


FOR_A_WORD = "processes.kv_get('never')"
HAS_DIED = ["toy: process {} has died"]
STOPPED = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
KILLED = "time.sleep(1.5); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
SILENT = ["toy: process {}: no sign of life for 2 s; see whether it still runs"]
LOSSES = {  # which process is lost and how, what the other one does, and its lines
    "0 stops": (0, SOON + "time.sleep(1.5); " + STOPPED, SOON + WAIT, SILENT),
    "1 stops": (1, SOON + "time.sleep(1.5); " + STOPPED, SOON + FOR_A_WORD, SILENT),
    "0 dies": (0, KILLED, FOR_A_WORD, HAS_DIED),
    # Without process 0, JAX aborts a busy process.
    "1 dies, 0 is busy": (1, KILLED, BUSY.format(4), HAS_DIED),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", LOSSES)
def test_a_process_that_is_lost_ends_the_others(case):
    """A stopped process keeps its connections open, like a process on a lost machine.

    The other process reports a dead one and exits before JAX notices; JAX would abort the process
    without the report if the dead process ran the service.
    """
    lost, fall, other, lines = LOSSES[case]
    both = (fall, other) if lost == 0 else (other, fall)
    code, found, err = ends(*both, lost=lost, within=15.0 if fall == KILLED else 30.0)[1 - lost]
    assert (code, found) == (1, [line.format(lost) for line in lines]), err
    assert lines != SILENT or err.splitlines() == found


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_dies_between_meeting_and_jax_is_missed(lost):
    """JAX would wait for this process for the whole connection timeout."""
    die = "lambda *place, **settings: os.kill(os.getpid(), signal.SIGKILL)"
    before = f"import os, signal; jax.distributed.initialize = {die}"
    found = ends("pass", "pass", lost=lost, before=f"if args.process == {lost}: {before}")
    assert found[1 - lost][:2] == (1, [f"toy: process {lost} has died"]), found


def test_an_abort_ends_a_process_of_several():
    """XLA checks and heap damage abort a process: no other thread may continue."""
    code = """
import os, signal, socket
from moa_jax.runtime.multihost import ProcessGroup
here, there = socket.socketpair()
ProcessGroup(print, peers={1: here})
os.kill(os.getpid(), signal.SIGABRT)
print("still here")
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (-signal.SIGABRT, "")


def distilled_apart(config: Path, count: int, devices: int, *flags: str) -> str:
    """Trains with `count` processes of `devices` each, and returns stderr of process 0."""
    command = [sys.executable, "-m", "train.distill", "--config", str(config), *flags]
    command += ["--coordinator", f"127.0.0.1:{free_port()}", "--processes", str(count), "--process"]
    variables = os.environ | {"JAX_NUM_CPU_DEVICES": str(devices)}
    pipes = dict(cwd=ROOT, stderr=subprocess.PIPE, text=True, env=variables)
    each_process = [subprocess.Popen([*command, str(index)], **pipes) for index in range(count)]
    try:
        found = [each.communicate(timeout=400)[1] for each in each_process]
        assert not any(each.returncode for each in each_process), found
    finally:
        for each in each_process:
            each.kill()
    return found[0]


@pytest.mark.slow
def test_a_run_goes_on_with_half_the_devices(tmp_path, small_target):
    """Six steps on four devices of two processes, and six more on two of one, as on one device.

    Without the staircase, whose share depends on the number of steps.
    """
    both, target = str(tmp_path / "both"), str(small_target)
    (tmp_path / "config.py").write_text(
        "from pathlib import Path\n"
        "from tests.train.test_training import changed, distill_config\n"
        f"config = distill_config(Path({both!r}), Path({target!r}))\n"
        "config = changed(config, data_rows_per_batch=4, masks_staircase=False)\n"
    )
    alone = ["--run.directory", str(tmp_path / "alone/run"), "--output", str(tmp_path / "alone/d")]
    distilled_apart(tmp_path / "config.py", 1, 1, *alone)
    distilled_apart(tmp_path / "config.py", 2, 2, "--optim.total_steps", "6")
    err = distilled_apart(tmp_path / "config.py", 1, 2)
    assert "optim.total_steps: 6 -> 12" in err
    one, other = ([r["loss"] for r in metrics(tmp_path / n, "train")] for n in ("alone", "both"))
    assert len(one) == 6
    np.testing.assert_allclose(other, one, rtol=1e-5)


@pytest.mark.slow
def test_processes_decode_together_in_training(tmp_path, small_target, monkeypatch):
    """The decoded tau at a checkpoint is that of one device; drafts are split over four devices."""
    (tmp_path / "config.py").write_text(
        "from pathlib import Path\n"
        "from tests.train.test_training import changed, distill_config\n"
        "from train.run import decoding\n"
        "decoding.MAX_NEW_TOKENS = 8\n"
        f"config = distill_config(Path({str(tmp_path / 'both')!r}), Path({str(small_target)!r}))\n"
        "config = changed(config, optim_total_steps=4, run_decode_prompts=2)\n"
    )
    monkeypatch.setattr(decoding, "MAX_NEW_TOKENS", 8)
    alone = read_config(str(tmp_path / "config.py"), DistillConfig)
    distill.distill(changed(alone, run_directory=str(tmp_path / "alone/run"), output=None))
    distilled_apart(tmp_path / "config.py", 2, 2)
    (one,), (other,) = (metrics(tmp_path / name, "decode") for name in ("alone", "both"))
    assert one["decoded_tau"] == other["decoded_tau"]


def test_processes_must_agree(monkeypatch):
    theirs = {"rate": "0.1", "rows": "7"}
    monkeypatch.setattr(processes, "count", lambda: 2)
    monkeypatch.setattr(processes, "is_first", lambda: False)
    monkeypatch.setattr(processes, "kv_get", lambda key: theirs)
    processes.check_same(dict(theirs), "here")
    line = refusal(processes.check_same, {"rate": 0.1}, "here")
    assert line == "rows is absent here and 7 for process 0; start all processes alike"


@pytest.mark.slow
def test_a_run_of_several_processes_compares_settings_models_and_data(
    small_target, tmp_path, monkeypatch
):
    """Processes that read other data are refused before any training."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config = distill_config(tmp_path, small_target)
    described, tokenizer = describe_target(small_target), load_tokenizer(small_target)
    load = lambda: batches.load(config.data, tokenizer, described.config.vocab_size, "train")[0]
    rows, edited = load(), load()
    edited.rows.tokens_BT[edited.numbers(1)[0], 3] ^= 1  # a row outside the first batch

    def differing(config=config, train=rows, validation=rows):
        theirs = distill._facts(config, described, tokenizer, train, validation)
        assert theirs.keys() == ours.keys()
        return {name for name in ours if ours[name] != theirs[name]}

    ours = distill._facts(config, described, tokenizer, rows, rows)
    cut = changed(config, mesh=MeshConfig(tensor=2), run_eval_every=3)
    assert differing(cut) == {"mesh.tensor", "run.eval_every"}
    assert differing(train=edited) == {"rows"}
    assert differing(validation=edited) == {"validation rows"}
