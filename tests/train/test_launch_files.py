"""Launch files of clusters: their flags exist, and they restart a run when they should."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from infer import serve
from infer.cli.flags import cluster
from infer.info import ROOT
from moa_jax.config import DistillConfig
from tests.meeting import wait_for
from train import regenerate
from train.run.settings import config_parser, load_config

CONFIGS = ROOT / "configs"
SERVING = ("serve_slurm.sbatch", "serve_lws_tpu.yaml")
SLURM = ("slurm_gpu.sbatch", "slurm_generic.sbatch")
KUBERNETES = {
    f"{path.stem}-{part['kind']}": part
    for path in sorted(CONFIGS.glob("*.yaml"))
    for part in yaml.safe_load_all(path.read_text(encoding="utf-8"))
}
JOBSET = KUBERNETES["jobset_tpu_v5e_4x4-JobSet"]
SLICE = JOBSET["spec"]["replicatedJobs"][0]["template"]["spec"]
SHARDS = KUBERNETES["regenerate_tpu_v5e-Job"]["spec"]
GROUP = KUBERNETES["serve_lws_tpu-LeaderWorkerSet"]["spec"]["leaderWorkerTemplate"]
PODS = [job["template"]["spec"] for job in (SLICE, SHARDS)] + [GROUP["workerTemplate"]["spec"]]
CONTAINER = PODS[0]["containers"][0]
CACHE = "JAX_COMPILATION_CACHE_DIR"
SERVER = PODS[-1]["containers"][0]
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


def test_every_flag_of_a_shard_exists():
    command = (CONFIGS / "regenerate_shard.sh").read_text(encoding="utf-8").partition("set -eu")[2]
    flags = {*re.findall(r"(?<!\S)(--[a-z][\w-]*)", command + str(SHARDS))}
    assert {"--shard", "--mesh"} <= flags <= set(regenerate._parser()._option_string_actions)


@pytest.mark.parametrize("name", SERVING)
def test_every_flag_of_a_server_exists(name):
    command = COMMANDS[name].partition("-m infer.serve")[2].partition("\n\n")[0]
    flags = set(re.findall(r"(?<!\S)(--[a-z][\w-]*)", command.partition("volumes:")[0]))
    assert flags <= set(serve._parser()._option_string_actions)
    assert {"--mesh", "--target", "--draft", "--api-key-file"} <= flags
    assert flags & {"--distributed", "--coordinator"}


SCHEMA = tomllib.loads((ROOT / "tests/train/kubernetes.toml").read_text(encoding="utf-8"))
PLAIN = {"": str, "int": int, "bool": bool}
MAPS = {"map": {str}, "quantities": {str, int}}


def check(value: Any, kind: str, at: str = "") -> None:
    """Raises AssertionError for a part of `value` that differs from `kind` of kubernetes.toml."""
    if kind in SCHEMA:
        words = [word.partition(":") for word in SCHEMA[kind].split()]
        fields = {name.rstrip("!"): of for name, _, of in words}
        required = {name[:-1] for name, *_ in words if name.endswith("!")}
        assert type(value) is dict and required <= value.keys() <= fields.keys(), f"{at}: {value}"
        for name, part in value.items():
            check(part, fields[name], f"{at}.{name}")
    elif kind.endswith("[]"):
        assert type(value) is list, at
        for part in value:
            check(part, kind[:-2], f"{at}[]")
    elif kind in MAPS:
        assert type(value) is dict and {type(part) for part in value.values()} <= MAPS[kind], at
    else:
        fits = type(value) is PLAIN[kind] if kind in PLAIN else value in kind.split("|")
        assert fits, f"{at}: {value} is not {kind}"


@pytest.mark.parametrize("name", KUBERNETES)
def test_objects_have_fields_of_their_schemas(name):
    check(KUBERNETES[name], KUBERNETES[name]["kind"])


@pytest.mark.parametrize("pod", PODS, ids=["train", "regenerate", "serve"])
def test_pods_request_what_they_use(pod):
    (container,) = pod["containers"]
    assert {"cpu", "memory", "google.com/tpu"} <= container["resources"]["requests"].keys()
    assert {"containerPort": 8431} in container["ports"]
    given = {part["kind"]: part["metadata"]["name"] for part in KUBERNETES.values()}
    assert pod["serviceAccountName"] == given["ServiceAccount"]
    claim = {"claimName": given["PersistentVolumeClaim"]}
    assert {"name": "runs", "persistentVolumeClaim": claim} in pod["volumes"]
    sources = [env["valueFrom"] for env in container["env"] if "valueFrom" in env]
    assert [source["secretKeyRef"]["name"] for source in sources] == [given["Secret"]]


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
    (tmp_path / "configs").symlink_to(CONFIGS)
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

# Replaces `python -m train.distill ...`: WISH selects the end of the run, whose files are in $HERE.
TRAINER = r"""
echo "$@" > "$HERE.seen"
echo "$JAX_COMPILATION_CACHE_DIR" > "$HERE.cache"
case "$WISH" in
finish) mkdir -p "$HERE/final"; touch "$HERE/final/config.json" ;;
stop) mkdir -p "$HERE/checkpoints/40"; exit 75 ;;
miss) exit 75 ;;
fail) mkdir -p "$HERE/checkpoints/40"; touch "$HERE/checkpoints/40/commit_success.txt"; exit 1 ;;
crash) mkdir -p "$HERE/checkpoints/40.incomplete"; exit 1 ;;
refuse) exit 2 ;;
wait) trap 'mkdir -p "$HERE/checkpoints/40"; exit 75' TERM; touch "$HERE.up"
      for i in $(seq 600); do sleep 0.1; done; exit 9 ;;
esac
"""
# Replaces `gcloud storage ls PATTERN` for the bucket of the run.
GCLOUD = r"""
cd "$HERE" && for file in ${3#"$RUN"/}; do [ ! -e "$file" ] || echo "$RUN/$file"; done
"""


def executable(path: Path, body: str) -> Path:
    path.write_text(f"#!/usr/bin/env bash\n{body}", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def environment(folder: Path, wish: str, store: str = "") -> dict[str, str]:
    """Returns an environment whose PATH has replacements of python, srun, scontrol and gcloud."""
    tools = folder / "bin"
    tools.mkdir()
    executable(tools / "python", TRAINER)
    executable(tools / "gcloud", GCLOUD)
    srun = 'echo "$SRUN_CPUS_PER_TASK $*" > "$HERE.srun"; '
    executable(tools / "srun", srun + 'while [ "${1:0:2}" = -- ]; do shift; done; exec "$@"')
    executable(tools / "scontrol", 'echo "$@" > "$HERE.scontrol"')
    run = folder / "run"
    (run / "checkpoints" / "20").mkdir(parents=True)
    (run / "checkpoints" / "20" / "commit_success.txt").touch()
    ours = {key: value for key, value in os.environ.items() if key != CACHE}
    ours |= {"PATH": f"{tools}:{os.environ['PATH']}", "PYTHON": "python", "HERE": str(run)}
    ours |= {"RUN": store or str(run)}
    ours |= {"SLURM_SUBMIT_DIR": str(ROOT), "SLURM_JOB_ID": "7"}
    ours |= {"SLURM_CPUS_PER_TASK": "8", "IMAGE": "moa.sqsh", "HF_HOME": f"{folder}/hub"}
    ours |= {"ANSWERS": f"{folder}/answers"}
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
@pytest.mark.parametrize("store", ["", "gs://bucket/runs/a"])
def test_slurm_starts_a_run_again_by_its_code_and_progress(
    tmp_path, store, name, wish, code, again
):
    script = ["bash", CONFIGS / name, "configs/tiny.py", "--optim.total_steps", "9 9"]
    env = environment(tmp_path, wish, store)
    ran = subprocess.run(script, env=env, capture_output=True, text=True)
    assert (ran.returncode, (tmp_path / "run.scontrol").exists()) == (code, again), ran.stderr
    assert (tmp_path / "run.cache").read_text() == f"{env['RUN']}/compiled\n"
    seen = (tmp_path / "run.seen").read_text(encoding="utf-8")
    assert seen.startswith("-m train.distill") and seen.endswith("--optim.total_steps 9 9\n")
    assert f"--run.directory {env['RUN']} --data.train" in seen
    answers = f"{tmp_path}/answers"
    assert f"--data.train {answers}/train --data.validation {answers}/validation " in seen
    started = (tmp_path / "run.srun").read_text(encoding="utf-8")
    assert started.startswith("8 ") and "--container-image=moa.sqsh" in started
    assert f"--container-mounts={ROOT}:{ROOT},{tmp_path}/hub:{tmp_path}/hub " in started
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


# ---- shards and the image -----------------------------------------------------------------

SHARD = SHARDS["template"]["spec"]["containers"][0]
SHARD_COMMANDS = {
    "SLURM_ARRAY_TASK_ID": ["bash", CONFIGS / "slurm_regenerate.sbatch"],
    "JOB_COMPLETION_INDEX": [*SHARD["command"], *SHARD["args"]],
}


@pytest.mark.parametrize("index", SHARD_COMMANDS)
def test_a_shard_answers_what_is_left(tmp_path, index):
    env = environment(tmp_path, "nothing") | {index: "3", "TARGET": "target"}
    env |= {"SHARDS": next(v["value"] for v in SHARD["env"] if v["name"] == "SHARDS")}
    executable(tmp_path / "bin" / "python", 'echo "$@" >> "$HERE.seen"; exit "$CODE"')
    run = lambda code: subprocess.run(SHARD_COMMANDS[index], env=env | {"CODE": code}, cwd=ROOT)
    assert [run("2").returncode, run("0").returncode] == [2, 0]
    first, again, train = (tmp_path / "run.seen").read_text(encoding="utf-8").splitlines()
    assert first == again and "/test_sft " in first and "--limit 512" in first
    shard = f"--shard 3/{SHARDS['completions']} "
    assert f"/train_sft --output {tmp_path}/answers/train/all.jsonl {shard}" in train
    for folder in ("train", "validation"):
        (tmp_path / "answers" / folder).mkdir(parents=True)
        (tmp_path / "answers" / folder / "all-00003-of-00008.jsonl").touch()
    assert run("1").returncode == 0  # both files are finished


@pytest.mark.slow
def test_the_images_steps_run_in_an_empty_folder(tmp_path):
    """Copies what the image gets; pip makes the package's metadata and installs nothing."""
    text = (ROOT / "Dockerfile").read_text(encoding="utf-8")
    context = (ROOT / ".dockerignore").read_text(encoding="utf-8").splitlines()
    for *sources, to in map(str.split, re.findall(r"^COPY (.*)$", text, re.MULTILINE)):
        for source in sources:
            assert f"!{source}" in context
            (tmp_path / to).parent.mkdir(parents=True, exist_ok=True)
            copy = shutil.copytree if (ROOT / source).is_dir() else shutil.copy
            copy(ROOT / source, tmp_path / to)
    (words,) = re.findall(r"^RUN pip (install .*)$", text, re.MULTILINE)
    words = re.sub(r"\$\w+", "tpu", words)
    project = tomllib.loads((tmp_path / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    extras = re.findall(r"\.\[(.*)\]", words)[0].split(",")
    assert {*extras, "cuda13"} <= project["optional-dependencies"].keys()
    pip = [sys.executable, "-m", "pip", *shlex.split(words), "--dry-run", "--no-deps"]
    subprocess.run([*pip, "--no-build-isolation"], cwd=tmp_path, check=True)
    code = "import infer.serve, moa_jax, train.distill; from configs.tiny import config as c; "
    code += "print(infer.__file__, moa_jax.__file__, train.__file__, c.target, *c.data.train)"
    command = [sys.executable, "-c", code]
    seen = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=True).stdout
    assert all(path.startswith(f"{tmp_path}/") and Path(path).exists() for path in seen.split())
