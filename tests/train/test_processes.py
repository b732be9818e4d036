"""Several processes end as one: whatever fails in one of them, all say so and none waits."""

from __future__ import annotations

import functools
import itertools
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time

import jax
import pytest

from infer.cli.flags import cluster
from infer.cli.program import Parser
from infer.info import ROOT
from moa_jax.config import MeshConfig
from moa_jax.data import batches
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.pretrained import describe_target
from moa_jax.runtime import multihost as processes
from moa_jax.runtime.rendezvous import ProcessSpec
from tests.meeting import free_port, wait_for
from tests.model_folders import refusal
from tests.train.test_training import changed, distill_config, metrics
from train import distill

# What process 0 and process 1 do once they have met; what does not fail waits for the others.
# Each has asked the other for its devices by then and has been answered, which files tell: one
# that stops or dies earlier is missed by jax before it can do what a test is about.
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

def raising(error):
    raise error

def late(function):
    try:
        function()
    except OSError:
        time.sleep(1)
        raise

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
    """Exit code, lines of the program and all of stderr, by process.

    They end `within` so many seconds of having met, or of the end of one that meets nobody.
    One that is lost ends by no means of its own, and is killed after the other one has ended.
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


def test_a_fault_on_one_process_ends_both():
    (code, lines, told), (own_code, own_lines, own_told) = ends(WAIT, "raising(ValueError('ours'))")
    assert (code, own_code) == (1, 1)
    assert own_lines == ["toy: ValueError: ours"] and own_told.startswith("Traceback")
    assert lines == ["toy: process 1: ValueError: ours"] and "Traceback" not in told


FOR_A_WORD = "processes.kv_get('never')"
SOON = "processes.HEARTBEAT_TIMEOUT_S = 3; "
# One thread keeps the interpreter to itself for some seconds.
BUSY = "import sys; sys.setswitchinterval(100); end = time.monotonic() + {}; "
BUSY += "sum(iter(lambda: float(time.monotonic() > end), 1.0)); sys.setswitchinterval(0.005)"
AGAIN = "import os, signal, threading; once_more = (os.getpid(), signal.SIGINT); "
AGAIN += "threading.Timer(1.0, os.kill, once_more).start(); raising(KeyboardInterrupt())"
LAST = "import os; leave = os._exit; os._exit = lambda code: [time.sleep(0.5), leave(code)]; "
BAD = "raising(InputError('x: bad: mend it'))"
BY_ZERO = "ZeroDivisionError: division"
HAS_NO_FILE = (2, f"toy: {NO_FILE}", f"toy: process 0: {NO_FILE}")
ENDS = {  # what both do, the code of both, and what the lines of both hold
    "told of": (MISSING, MISSING, *HAS_NO_FILE),
    "told of first": (f"late(lambda: {MISSING})", MISSING, *HAS_NO_FILE),
    "path": ("Path('missing/file').read_text()", WAIT, *HAS_NO_FILE),
    "refused": (WAIT, BAD, 2, "process 1: x: bad", "x: bad"),
    "interrupted": (WAIT, "raising(KeyboardInterrupt())", 130, "process 1: int", "interrupted"),
    "fault told of": (
        *("processes.on_first(lambda: 1 / 0)", "processes.on_first(lambda: 2)"),
        *(1, f"toy: {BY_ZERO}", f"process 0: {BY_ZERO}"),
    ),
    "late": (BAD, "pass", 2, "x: bad", "process 0: x: bad"),
    "later": ("pass", BAD, 2, "process 1: x: bad", "x: bad"),
    "nothing": ("time.sleep(2)", "pass", 0),
    "interrupted again while the other is busy": (AGAIN, BUSY.format(3), 130),
    "busy, and blamed for nothing": (SOON + BUSY.format(5) + "; time.sleep(2)", "pass", 0),
    # Jax aborts whoever is still there when the service goes, as on a busy machine.
    "the process of the service is the last": (MISSING, f"{LAST}{MISSING}", 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", ENDS)
def test_both_end_alike(case):
    first, second, code, *lines = ENDS[case]
    found = ends(first, second)
    assert [ended for ended, _, _ in found] == [code, code], found
    for wanted, (_, told, _) in zip(lines, found, strict=False):
        assert len(told) == 1 and re.search(wanted, told[0]), told


LOSSES = [
    *itertools.product(["STOP"], [0, 1], [FOR_A_WORD, WAIT]),
    *itertools.product(["KILL"], [0, 1], [FOR_A_WORD, WAIT, "pass", "time.sleep(60)"]),
    ("KILL", 1, BUSY.format(4)),  # without process 0 jax aborts one whose threads cannot run
]


@pytest.mark.slow
@pytest.mark.parametrize("how, lost, wait", LOSSES)
def test_a_process_that_is_lost_ends_the_others(how, lost, wait):
    """A stopped one keeps its connections open, as one does whose machine is gone.

    The line of a dead one ends before jax misses it, which would abort the others where it ran the
    service.
    """
    soon, within = (SOON, 30.0) if how == "STOP" else ("", 15.0)
    fall = f"{soon}time.sleep(1.5); import os, signal; os.kill(os.getpid(), signal.SIG{how})"
    doing = [fall, soon + wait] if lost == 0 else [soon + wait, fall]
    code, lines, told = ends(*doing, lost=lost, within=within)[1 - lost]
    line = f"toy: process {lost} has died"
    if how == "STOP":
        line = f"toy: process {lost}: no sign of life for 3 s; see whether it still runs"
        assert told.splitlines() == lines
    assert (code, lines) == (1, [line]), told


def test_an_abort_ends_a_process_of_several():
    """As of a check in XLA or a heap that is damaged: no other thread may go on."""
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


@pytest.mark.slow
@pytest.mark.parametrize("lost", [0, 1])
def test_a_process_that_dies_between_meeting_and_jax_is_missed(lost):
    """Jax would wait for it for as long as processes may take to come."""
    die = "lambda *place, **settings: os.kill(os.getpid(), signal.SIGKILL)"
    before = f"import os, signal; jax.distributed.initialize = {die}"
    found = ends("pass", "pass", lost=lost, before=f"if args.process == {lost}: {before}")
    code, lines, told = found[1 - lost]
    assert (code, lines) == (1, [f"toy: process {lost} has died"]), told


@pytest.mark.slow
def test_a_process_that_cannot_say_why_ends_all_the_same():
    full = "import os; os.dup2(os.open('/dev/full', os.O_WRONLY), 2); time.sleep(60)"
    fall = "time.sleep(1.5); import os, signal; os.kill(os.getpid(), signal.SIGKILL)"
    code, lines, _ = ends(full, fall, lost=1, within=15.0)[0]
    assert (code, lines) == (1, [])


@pytest.mark.slow
def test_a_fault_is_said_where_the_first_process_is_silent():
    """Word of it cannot be left there, which ends nobody's end."""
    stop = "import os, signal; os.kill(os.getpid(), signal.SIGSTOP)"
    fault = "processes.FORCED_EXIT_S = 3.0; time.sleep(1.5); raising(ValueError('ours'))"
    code, lines, told = ends(stop, fault, lost=0)[1]
    assert (code, lines) == (1, ["toy: ValueError: ours"]), told


@pytest.mark.slow
def test_processes_decode_together_in_training(tmp_path, small_target):
    """The real tau at a checkpoint is that of one device, and the drafts are cut over four."""
    (tmp_path / "config.py").write_text(
        "from pathlib import Path\n"
        "from tests.train.test_training import distill_config\n"
        f"config = distill_config(Path({str(tmp_path)!r}), Path({str(small_target)!r}))\n"
    )
    command = [sys.executable, "-m", "train.distill", "--config", str(tmp_path / "config.py")]
    command += ["--optim.total_steps", "4", "--run.decode_prompts", "3", "--run.directory"]
    pipes = dict(cwd=ROOT, stderr=subprocess.PIPE, text=True)
    alone = subprocess.run([*command, str(tmp_path / "alone")], **pipes)
    assert alone.returncode == 0, alone.stderr
    place = f"127.0.0.1:{free_port()}"
    flags = [str(tmp_path / "both"), "--coordinator", place, "--processes", "2", "--process"]
    pipes["env"] = os.environ | {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"}
    both = [subprocess.Popen([*command, *flags, str(index)], **pipes) for index in range(2)]
    try:
        for each in both:
            _, told = each.communicate(timeout=400)
            assert each.returncode == 0, told
    finally:
        for each in both:
            each.kill()
    taus = [
        [record["tau"] for record in metrics(tmp_path / name, "decode", "")]
        for name in ("alone", "both")
    ]
    assert len(taus[0]) == 1 and taus[0] == taus[1]


NOWHERE = {
    "--coordinator localhost --processes 2 --process 0": "localhost; write HOST:PORT, as in",
    "--coordinator :8476 --processes 1 --process 0": ":8476; write HOST:PORT",
    "--coordinator host:99999 --processes 1 --process 0": "host:99999; write HOST:PORT",
    "--coordinator host:1 --processes 2 --process 2": "--process 2; choose from 0 to 1",
    "--coordinator host:1": "go together; give all three",
    "--distributed": "--distributed: no launcher says where the other processes are; run under",
}


@pytest.mark.parametrize("flags", NOWHERE)
def test_flags_that_lead_nowhere_are_refused(flags, monkeypatch):
    monkeypatch.delenv("KUBERNETES_SERVICE_HOST", raising=False)
    parser = Parser("toy")
    cluster.add_flags(parser)
    joining = cluster.joined(parser.parse_args(flags.split()), "toy")
    assert NOWHERE[flags] in refusal(joining.__enter__)


def test_a_launcher_says_where_all_meet(monkeypatch):
    told = {"JOB_ID": "7", "STEP_NODELIST": "nodes[3-4]", "NTASKS": "2", "PROCID": "1"}
    told["LOCALID"] = "0"
    for name, value in told.items():
        monkeypatch.setenv(f"SLURM_{name}", value)
    monkeypatch.setenv("JAX_COORDINATOR_PORT", "8476")
    assert cluster._detected(1) == ProcessSpec("nodes3:8476", 2, 1)


THEIRS = [
    ({"rate": 0.1, "rows": 7}, None),
    ({"rate": 0.2, "rows": 7}, "rate is 0.2 here and 0.1 for process 0; start all"),
    ({"rate": 0.1}, "rows is absent here and 7 for process 0"),
    ({"rate": 0.1, "rows": 7, "more": 1}, "more is 1 here and absent for process 0"),
]


@pytest.mark.parametrize("theirs, line", THEIRS)
def test_processes_must_agree(theirs, line, monkeypatch):
    values: dict[str, dict] = {}
    first = [True, False]
    for name, function in (
        ("kv_set", values.__setitem__),
        ("kv_get", values.__getitem__),
        ("count", lambda: 2),
        ("is_first", lambda: first[0]),
    ):
        monkeypatch.setattr(processes, name, function)
    processes.check_same({"rate": 0.1, "rows": 7}, "here")
    first.pop(0)
    if line is None:
        processes.check_same(theirs, "here")
    else:
        assert refusal(processes.check_same, theirs, "here").startswith(line)


def test_a_run_of_several_processes_compares_settings_models_and_data(
    small_target, tmp_path, monkeypatch
):
    """Those who see other data are told before anything is trained."""
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    config, bare = distill_config(tmp_path, small_target), tmp_path / "bare"
    shutil.copytree(small_target, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    described = describe_target(bare)  # as a hub gives it before the weights are asked for
    tokenizer, vocab_size = load_tokenizer(small_target), described.config.vocab_size
    load = lambda data, part: batches.load(data, tokenizer, vocab_size, part)[0]
    train, validation = (load(config.data, part) for part in ("train", "validation"))
    facts = functools.partial(distill._facts, config, described)
    ours = facts(tokenizer, train, validation)

    def differing(theirs):
        assert theirs.keys() == ours.keys()
        return {name for name in ours if ours[name] != theirs[name]}

    other = changed(config, data_seed=1)
    seed = distill._facts(other, described, tokenizer, load(other.data, "train"), validation)
    assert differing(seed) == {"data.seed", "first rows"}
    cut = changed(config, mesh=MeshConfig(tensor=2), run_eval_every=3)
    assert differing(distill._facts(cut, described, tokenizer, train, validation)) == {
        "mesh.tensor",
        "run.eval_every",
    }
    edited = load(config.data, "train")  # a token of a row that is not among the first
    edited.rows.tokens_BT[edited.numbers(1)[0], 3] ^= 1
    assert differing(facts(tokenizer, edited, validation)) == {"rows"}
    assert differing(facts(tokenizer, train, edited)) == {"validation rows"}
    template = load_tokenizer(small_target)
    template.chat_template += " "
    assert differing(facts(template, train, validation)) == {"tokenizer"}


def test_asking_for_the_first_process_starts_no_device():
    """Or `--threads` would come too late: jax counts cores when it starts."""
    code = "from jax._src import xla_bridge; from moa_jax.runtime import multihost as processes; "
    code += "assert processes.is_first() and processes.count() == 1; "
    code += "assert not xla_bridge.backends_are_initialized()"
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=True)
