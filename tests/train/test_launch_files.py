"""Launch files of clusters: what they name exists, and they start again when they should."""

from __future__ import annotations

import os
import re
import shlex
import signal
import stat
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest
import yaml

from infer import serve
from infer.cli.flags import cluster
from infer.cli.flags.mesh import mesh_sizes
from moa_jax.config import DistillConfig
from tests.meeting import wait_for
from train.run.settings import config_parser, load_config

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "configs"
SLURM = ("slurm_gpu.sbatch", "slurm_generic.sbatch")
JOBSET = yaml.safe_load((CONFIGS / "jobset_tpu_v5e_4x4.yaml").read_text(encoding="utf-8"))
SLICE = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
POD = SLICE["template"]["spec"]
CONTAINER = POD["containers"][0]
CACHE = "JAX_COMPILATION_CACHE_DIR"
STOPPED, BAD_INPUT, UNFINISHED = 0, 2, 75


# ---- what they name -----------------------------------------------------------------------


def scripts() -> dict[str, str]:
    found = {name: (CONFIGS / name).read_text(encoding="utf-8") for name in SLURM}
    return found | {"jobset": CONTAINER["args"][0]}


@pytest.mark.parametrize("name", [*SLURM, "jobset"])
def test_every_flag_exists(name):
    command = scripts()[name].partition("-m train.distill")[2].partition("\nstart_again")[0]
    flags = set(re.findall(r"(?<!\S)--([a-z][\w.]*)", command.partition("child=$!")[0]))
    parser = config_parser("train.distill", None)
    cluster.add_flags(parser)
    options = {option[2:] for option in parser._option_string_actions if option[:2] == "--"}
    assert "config" in flags & options
    assert flags & {"distributed", "coordinator"}
    for flag in flags - options:  # settings, each given a word
        load_config("configs/moa_llama3_8b.py", DistillConfig, [f"--{flag}", "x"])


@pytest.mark.parametrize("name", SLURM)
def test_slurm_warns_and_requeues(name):
    text = scripts()[name]
    options = dict(re.findall(r"^#SBATCH --([\w-]+)(?:=(\S+))?$", text, re.MULTILINE))
    assert {"requeue", "nodes", "time", "ntasks-per-node"} <= set(options)
    assert options["signal"].startswith("TERM@")  # not B:, which would reach the script alone
    assert options["open-mode"] == "append"
    mentioned = re.findall(r"\bconfigs/[\w.]+", text)
    assert len(mentioned) > 2 and all((ROOT / path).is_file() for path in mentioned)
    if "gpu" in name:  # every GPU has a process that sees them all
        assert options["gpus-per-node"] == options["ntasks-per-node"]
        assert "--gpu-bind=none" in text and "gpus-per-task" not in options
        assert "XLA_PYTHON_CLIENT_MEM_FRACTION=0.92" in text  # as infer.bench.plan.machines counts


def chips_of(pod: dict, pods: int) -> int:
    """The chips of all pods of a slice, which its topology says too; their volumes are mounted."""
    (container,) = pod["containers"]
    chips = container["resources"]["limits"]["google.com/tpu"]
    assert chips == container["resources"]["requests"]["google.com/tpu"]
    rows, columns = pod["nodeSelector"]["cloud.google.com/gke-tpu-topology"].split("x")
    assert pods * chips == int(rows) * int(columns)
    mounts = {mount["name"] for mount in container["volumeMounts"]}
    assert mounts == {volume["name"] for volume in pod["volumes"]}
    return pods * chips


def test_the_jobset_is_a_whole_slice_that_restarts_after_all_but_bad_input():
    assert SLICE["parallelism"] == SLICE["completions"]
    assert chips_of(POD, SLICE["parallelism"]) == 16
    assert SLICE["backoffLimit"] == 0 and POD["restartPolicy"] == "Never"
    (fatal,) = SLICE["podFailurePolicy"]["rules"]
    assert (fatal["action"], fatal["onExitCodes"]["values"]) == ("FailJob", [BAD_INPUT])
    assert JOBSET["spec"]["failurePolicy"]["maxRestarts"] > 10


# ---- serving ------------------------------------------------------------------------------

SERVING = {
    "slurm": (CONFIGS / "serve_slurm.sbatch").read_text(encoding="utf-8"),
    "lws": (CONFIGS / "serve_lws_tpu.yaml").read_text(encoding="utf-8"),
}
GROUPS, SERVICE = yaml.safe_load_all(SERVING["lws"])


@pytest.mark.parametrize("name", SERVING)
def test_every_flag_of_a_server_exists(name):
    command = SERVING[name].partition("-m infer.serve")[2].partition("\n\n")[0]
    flags = set(re.findall(r"(?<!\S)(--[a-z][\w-]*)", command.partition("volumes:")[0]))
    known = set(serve._parser()._option_string_actions)
    assert flags <= known and {"--mesh", "--target", "--draft", "--api-key-file"} <= flags
    assert flags & {"--distributed", "--coordinator"}


def test_a_server_of_one_slice_uses_all_of_it():
    template = GROUPS["spec"]["leaderWorkerTemplate"]
    pod = template["workerTemplate"]["spec"]
    (container,) = pod["containers"]
    mesh = mesh_sizes(re.search(r"--mesh (\S+)", container["args"][0])[1])
    assert chips_of(pod, template["size"]) == mesh["tensor"] * mesh["data"]
    assert template["restartPolicy"] == "RecreateGroupOnPodRestart"
    (port,) = SERVICE["spec"]["ports"]
    assert port["port"] == container["ports"][0]["containerPort"] == 8000  # as infer.serve has it
    labels = template["workerTemplate"]["metadata"]["labels"]
    assert labels.items() <= SERVICE["spec"]["selector"].items()


@pytest.mark.parametrize(
    "worker, status, is_ready", [(1, 503, True), (0, 200, True), (0, 503, False)]
)
def test_only_the_first_pod_of_a_group_waits_until_it_answers(worker, status, is_ready):
    """A group is ready when all of its pods are, and the others listen at no port."""
    pod = GROUPS["spec"]["leaderWorkerTemplate"]["workerTemplate"]["spec"]

    class Health(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *args: object) -> None: ...

    with HTTPServer(("127.0.0.1", 0), Health) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        *shell, script = pod["containers"][0]["readinessProbe"]["exec"]["command"]
        script = script.replace("localhost:8000", f"127.0.0.1:{server.server_port}")
        script = script.replace("python", sys.executable)
        environment = {**os.environ, "LWS_WORKER_INDEX": str(worker)}
        probe = subprocess.run([*shell, script], env=environment, capture_output=True, timeout=30)
        server.shutdown()
    assert (probe.returncode == 0) == is_ready


SERVING_ENDS = [
    ([1, 1, 0], 3, 0),
    ([137, 134, 139, 143, 0], 5, 0),  # srun has the code of the one that was killed or aborted
    ([2], 1, 2),
    ([130], 1, 130),
    ([137] * 9, 5, 137),  # it cannot start
    ([(1, "ready")] * 6 + [0], 7, 0),
]


@pytest.mark.parametrize("ends, times, code", SERVING_ENDS)
def test_slurm_starts_a_server_again_after_a_death_alone(ends, times, code, tmp_path):
    tools = tmp_path / "bin"
    tools.mkdir()
    pairs = [end if isinstance(end, tuple) else (end, "") for end in ends]
    (tmp_path / "ends").write_text("".join(f"{code} {ready}\n" for code, ready in pairs))
    body = 'n=$(cat n 2>/dev/null || echo 0); echo $((n + 1)) > n\necho "$@" > seen\n'
    body += 'read -r code ready <<< "$(sed -n $((n + 1))p ends)"\n'
    body += '[ -n "$ready" ] && touch serve-7.ready\nexit $code'
    executable(tools / "srun", body)
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

# Stands for `python -m train.distill ...`: WISH says how it ends.
TRAINER = r"""
echo "$@" > "$RUN.seen"
echo "$JAX_COMPILATION_CACHE_DIR" > "$RUN.cache"
case "$WISH" in
finish) mkdir -p "$RUN/final"; touch "$RUN/final/config.json" ;;
save) mkdir -p "$RUN/checkpoints/40" ;;
fail) mkdir -p "$RUN/checkpoints/40"; exit 1 ;;
refuse) exit 2 ;;
wait) trap 'mkdir -p "$RUN/checkpoints/40"; exit 0' TERM; touch "$RUN.up"
      for i in $(seq 600); do sleep 0.1; done; exit 9 ;;
esac
"""


def executable(path: Path, body: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{body}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def environment(folder: Path, wish: str) -> dict[str, str]:
    """A PATH whose python, srun and scontrol stand for the real ones."""
    tools = folder / "bin"
    tools.mkdir()
    executable(tools / "python", TRAINER)
    executable(tools / "srun", 'while [ "${1:0:2}" = -- ]; do shift; done; exec "$@"')
    executable(tools / "scontrol", 'echo "$@" > "$RUN.scontrol"')
    run = folder / "run"
    (run / "checkpoints" / "20").mkdir(parents=True)
    ours = {key: value for key, value in os.environ.items() if key != CACHE}
    return ours | {
        "PATH": f"{tools}:{os.environ['PATH']}",
        "PYTHON": "python",
        "RUN": str(run),
        "WISH": wish,
        "SLURM_SUBMIT_DIR": str(ROOT),
        "SLURM_JOB_ID": "7",
        "SLURM_NTASKS": "2",
        "SLURM_PROCID": "1",
    }


SLURM_ENDS = [
    ("finish", 0, False),
    ("save", 0, True),
    ("fail", 0, True),  # it got on since it started
    ("refuse", BAD_INPUT, False),
    ("nothing", 1, False),
]


@pytest.mark.parametrize("wish, code, again", SLURM_ENDS, ids=[wish for wish, *_ in SLURM_ENDS])
@pytest.mark.parametrize("name", SLURM)
def test_slurm_starts_again_while_a_run_gets_on(tmp_path, name, wish, code, again):
    script = ["bash", CONFIGS / name, "configs/tiny.py", "--optim.total_steps", "9 9"]
    ran = subprocess.run(script, env=environment(tmp_path, wish), capture_output=True, text=True)
    assert (ran.returncode, (tmp_path / "run.scontrol").exists()) == (code, again), ran.stderr
    seen = (tmp_path / "run.seen").read_text(encoding="utf-8")
    assert seen.startswith("-m train.distill") and seen.endswith("--optim.total_steps 9 9\n")
    assert f"--run.directory {tmp_path}/run --output {tmp_path}/run/final" in seen
    if name == "slurm_generic.sbatch":
        assert re.search(r"--processes 2 --process 1 --coordinator \S+:20007 ", seen)
    else:
        assert "--distributed" in shlex.split(seen)


@pytest.mark.parametrize("name", SLURM)
def test_a_job_that_fails_says_so_though_an_earlier_one_has_finished(tmp_path, name):
    variables = environment(tmp_path, "refuse")
    (tmp_path / "run" / "final").mkdir()
    (tmp_path / "run" / "final" / "config.json").touch()
    ran = subprocess.run(["bash", CONFIGS / name, "configs/tiny.py"], env=variables)
    assert ran.returncode == BAD_INPUT and not (tmp_path / "run.scontrol").exists()
    pipes = {"capture_output": True, "text": True}
    ran = subprocess.run(["bash", CONFIGS / name], env=variables, **pipes)
    assert ran.returncode and "give a config file" in ran.stderr


@pytest.mark.parametrize("given", [None, "", "/scratch/compiled"])
@pytest.mark.parametrize("name", SLURM)
def test_slurm_jobs_keep_what_they_compile(tmp_path, name, given):
    variables = environment(tmp_path, "finish") | ({} if given is None else {CACHE: given})
    subprocess.run(["bash", CONFIGS / name, "configs/tiny.py"], env=variables, check=True)
    told = (tmp_path / "run.cache").read_text(encoding="utf-8").strip()
    assert told == (f"{tmp_path}/run/compiled" if given is None else given)


def test_pods_keep_what_they_compile():
    (folder,) = (each["value"] for each in CONTAINER["env"] if each["name"] == CACHE)
    assert any(folder.startswith(mount["mountPath"]) for mount in CONTAINER["volumeMounts"])


def pod(folder: Path, wish: str, index: int = 0) -> subprocess.Popen[str]:
    variables = environment(folder, wish) | {"JOB_COMPLETION_INDEX": str(index)}
    return subprocess.Popen([*CONTAINER["command"], *CONTAINER["args"]], env=variables, text=True)


@pytest.mark.parametrize(
    "wish, index, code",
    [
        ("finish", 0, 0),
        ("save", 0, UNFINISHED),
        ("save", 1, STOPPED),
        ("fail", 0, 1),
        ("refuse", 3, BAD_INPUT),
    ],
)
def test_a_pod_says_how_it_ended(tmp_path, wish, index, code):
    assert pod(tmp_path, wish, index).wait(timeout=30) == code


def test_a_pod_passes_on_that_it_must_go(tmp_path):
    running = pod(tmp_path, "wait")
    wait_for((tmp_path / "run.up").exists)
    running.send_signal(signal.SIGTERM)
    assert running.wait(timeout=30) == UNFINISHED
    assert (tmp_path / "run" / "checkpoints" / "40").is_dir()  # it had time to save
