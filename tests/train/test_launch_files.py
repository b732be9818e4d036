"""Launch files of clusters: their flags exist, and they restart a run when they should."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
from pathlib import Path

import pytest
import yaml

from infer import serve
from infer.cli.flags import cluster
from infer.info import ROOT
from moa_jax.config import DistillConfig
from tests.meeting import wait_for
from train.run.settings import config_parser, load_config

CONFIGS = ROOT / "configs"
SERVING = ("serve_slurm.sbatch", "serve_lws_tpu.yaml")
SLURM = ("slurm_gpu.sbatch", "slurm_generic.sbatch")
JOBSET = yaml.safe_load((CONFIGS / "jobset_tpu_v5e_4x4.yaml").read_text(encoding="utf-8"))
SLICE = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
CONTAINER = SLICE["template"]["spec"]["containers"][0]
CACHE = "JAX_COMPILATION_CACHE_DIR"
LWS = next(yaml.safe_load_all((CONFIGS / "serve_lws_tpu.yaml").read_text(encoding="utf-8")))
WORKER = LWS["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]
SERVER = WORKER["containers"][0]
BAD_INPUT, TRY_AGAIN = 2, 75


# ---- what they name -----------------------------------------------------------------------


COMMANDS = {name: (CONFIGS / name).read_text(encoding="utf-8") for name in SLURM + SERVING}
COMMANDS["jobset"] = CONTAINER["args"][0]


@pytest.mark.parametrize("name", [*SLURM, "jobset"])
def test_every_flag_exists(name):
    command = COMMANDS[name].partition("-m train.distill")[2].partition("\nstart_again")[0]
    flags = set(re.findall(r"(?<!\S)--([a-z][\w.]*)", command.partition("child=$!")[0]))
    parser = config_parser("train.distill", None)
    cluster.add_flags(parser)
    options = {option[2:] for option in parser._option_string_actions if option[:2] == "--"}
    assert "config" in flags & options
    assert flags & {"distributed", "coordinator"}
    for flag in flags - options:  # settings, each given a word
        load_config("configs/moa_llama3_8b.py", DistillConfig, [f"--{flag}", "x"])


@pytest.mark.parametrize("name", SERVING)
def test_every_flag_of_a_server_exists(name):
    command = COMMANDS[name].partition("-m infer.serve")[2].partition("\n\n")[0]
    flags = set(re.findall(r"(?<!\S)(--[a-z][\w-]*)", command.partition("volumes:")[0]))
    assert flags <= set(serve._parser()._option_string_actions)
    assert {"--mesh", "--target", "--draft", "--api-key-file"} <= flags
    assert flags & {"--distributed", "--coordinator"}


# ---- serving ------------------------------------------------------------------------------

SERVING_ENDS = [
    ([1, 1, 0], 3, 0),
    ([137, 134, 139, 143, 0], 5, 0),  # srun has the code of a killed or aborted task
    ([2], 1, 2),
    ([137] * 9, 5, 137),  # the server cannot start
    (["1 ready"] * 6 + [0], 7, 0),
]
SRUN = """
n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) > n
echo "$@" > seen
read -r code ready <<< "$(sed -n $((n + 1))p ends)"
[ -n "$ready" ] && touch serve-7.ready
exit $code
"""


@pytest.mark.parametrize("ends, times, code", SERVING_ENDS)
def test_slurm_starts_a_server_again_after_a_death_alone(ends, times, code, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    (tmp_path / "ends").write_text("".join(f"{end}\n" for end in ends))
    executable(tools / "srun", SRUN)
    executable(tools / "sleep", "true")
    env = {"PATH": f"{tools}:{os.environ['PATH']}", "SLURM_SUBMIT_DIR": str(tmp_path)}
    env |= {"SLURM_NTASKS_PER_NODE": "8", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_ID": "7"}
    env |= {"TARGET": "t", "DRAFT": "d"}
    command = ["bash", CONFIGS / "serve_slurm.sbatch", "--slots", "64"]
    assert subprocess.run(command, env=env, timeout=60).returncode == code
    assert int((tmp_path / "n").read_text()) == times
    seen = (tmp_path / "seen").read_text()
    assert "--mesh tensor=8,data=2 --target t --draft d" in seen and seen.endswith("--slots 64\n")


# ---- what they do -------------------------------------------------------------------------

# Replaces `python -m train.distill ...`: WISH selects the end of the run.
TRAINER = r"""
echo "$@" > "$RUN.seen"
echo "$JAX_COMPILATION_CACHE_DIR" > "$RUN.cache"
case "$WISH" in
finish) mkdir -p "$RUN/final"; touch "$RUN/final/config.json" ;;
stop) mkdir -p "$RUN/checkpoints/40"; exit 75 ;;
miss) exit 75 ;;
fail) mkdir -p "$RUN/checkpoints/40"; exit 1 ;;
crash) exit 1 ;;
refuse) exit 2 ;;
wait) trap 'mkdir -p "$RUN/checkpoints/40"; exit 75' TERM; touch "$RUN.up"
      for i in $(seq 600); do sleep 0.1; done; exit 9 ;;
esac
"""


def executable(path: Path, body: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{body}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def environment(folder: Path, wish: str) -> dict[str, str]:
    """Returns an environment whose PATH has replacements of python, srun and scontrol."""
    tools = folder / "bin"
    tools.mkdir()
    executable(tools / "python", TRAINER)
    executable(tools / "srun", 'while [ "${1:0:2}" = -- ]; do shift; done; exec "$@"')
    executable(tools / "scontrol", 'echo "$@" > "$RUN.scontrol"')
    run = folder / "run"
    (run / "checkpoints" / "20").mkdir(parents=True)
    ours = {key: value for key, value in os.environ.items() if key != CACHE}
    ours |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": "python", "RUN": str(run)}
    ours |= {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7"}
    return ours | {"SLURM_NTASKS": "2", "SLURM_PROCID": "1", "WISH": wish}


SLURM_ENDS = [
    ("finish", 0, False),
    ("stop", 0, True),
    ("miss", 0, True),
    ("fail", 0, True),  # it made progress since its start
    ("crash", 1, False),
    ("refuse", BAD_INPUT, False),
]


@pytest.mark.parametrize("wish, code, again", SLURM_ENDS, ids=[wish for wish, *_ in SLURM_ENDS])
@pytest.mark.parametrize("name", SLURM)
def test_slurm_starts_a_run_again_by_its_code_and_progress(tmp_path, name, wish, code, again):
    script = ["bash", CONFIGS / name, "configs/tiny.py", "--optim.total_steps", "9 9"]
    ran = subprocess.run(script, env=environment(tmp_path, wish), capture_output=True, text=True)
    assert (ran.returncode, (tmp_path / "run.scontrol").exists()) == (code, again), ran.stderr
    assert (tmp_path / "run.cache").read_text() == f"{tmp_path}/run/compiled\n"
    seen = (tmp_path / "run.seen").read_text(encoding="utf-8")
    assert seen.startswith("-m train.distill") and seen.endswith("--optim.total_steps 9 9\n")
    assert f"--run.directory {tmp_path}/run --output {tmp_path}/run/final" in seen
    if name == "slurm_generic.sbatch":
        assert re.search(r"--processes 2 --process 1 --coordinator \S+:20007 ", seen)
    else:
        assert "--distributed" in shlex.split(seen)


def test_slurm_starts_a_run_again_a_hundred_times(tmp_path):
    script, ours = ["bash", CONFIGS / SLURM[0], "configs/tiny.py"], environment(tmp_path, "miss")
    assert subprocess.run(script, env=ours | {"SLURM_RESTART_COUNT": "100"}).returncode == 75
    assert not (tmp_path / "run.scontrol").exists()


def pod(folder: Path, wish: str, container: dict = CONTAINER) -> subprocess.Popen[str]:
    command = [*container["command"], *container["args"]]
    return subprocess.Popen(command, env=environment(folder, wish), stderr=-1, text=True)


POD_ENDS = [("finish", 0), ("stop", TRY_AGAIN), ("refuse", BAD_INPUT), ("miss", TRY_AGAIN, SERVER)]


@pytest.mark.parametrize("wish, code, container", [(*end, CONTAINER)[:3] for end in POD_ENDS])
def test_a_pod_ends_with_the_code_of_its_program(tmp_path, wish, code, container):
    with pod(tmp_path, wish, container) as running:
        assert running.wait(timeout=30) == code


def test_a_server_with_bad_input_is_not_made_again(tmp_path):
    """A pod of a LeaderWorkerSet that ends is started again, whatever its code."""
    with pod(tmp_path, "refuse", SERVER) as serving:
        assert serving.stderr.readline().startswith("bad input: not started again")
        assert serving.poll() is None
        serving.send_signal(signal.SIGTERM)
        assert serving.wait(timeout=30) == BAD_INPUT


FAILURES = [  # messages of Kubernetes' Job controller
    ("Container distill for pod a/b failed with exit code 2 matching FailJob rule", "FailJobSet"),
    ("Pod a/b has condition DisruptionTarget", "RestartJobSetAndIgnoreMaxRestarts"),
]


@pytest.mark.parametrize("message, action", FAILURES)
def test_a_disruption_is_not_counted_and_bad_input_ends_a_job_set(message, action):
    for rule in JOBSET["spec"]["failurePolicy"]["rules"]:
        if any(re.search(each, message) for each in rule.get("onJobFailureMessagePatterns", [""])):
            break
    assert rule["action"] == action


def test_a_pod_passes_on_that_it_must_go(tmp_path):
    with pod(tmp_path, "wait") as running:
        wait_for((tmp_path / "run.up").exists)
        running.send_signal(signal.SIGTERM)
        assert running.wait(timeout=30) == TRY_AGAIN
    assert (tmp_path / "run" / "checkpoints" / "40").is_dir()  # it had time to save
