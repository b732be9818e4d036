"""infer.plan as a program: verdicts, refusals, and real compilers."""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from jax.experimental.pallas import triton
from jax.sharding import AbstractMesh

from configs.shapes import SHAPES
from infer import plan
from infer.bench.plan import child, decoding, hlo, lowering, machines
from infer.bench.plan.machines import machine
from moa_jax.config import DraftShape, TargetConfig
from moa_jax.errors import InputError
from moa_jax.model import convert, sharding
from tests.aot.compiling import needs, run_plan
from tests.aot.test_decode_plan import (
    MODEL,
    PAPER,
    TOY,
    attend,
    level_and_target,
    request_for,
)

ROOT = Path(__file__).resolve().parents[2]


# ---- the program --------------------------------------------------------------------------


def a_plan(request: decoding.PlanRequest, **rest: Any) -> dict[str, Any]:
    phase = {"launches": 10, "bytes": 9, "flops": 7, "ms": 1.0}
    names = (*decoding.PHASES, decoding.REST, decoding.PREFILL)
    return (
        decoding._described(request)
        | {
            "memory": {"weights": 5, "state": 3, "temporary": 2, "peak": 10, "limit": 100},
            "temp_bytes": 2,
            "compile_s": {"decode": 1.0, "prefill": 1.0},
            "fits": True,
            "phases": [{"phase": name} | phase for name in names],
            "round_ms": 5.0,
            "tokens_per_s": 200.0 * request.tau,
            "launches": 50,
            "roofline": 400.0 * request.tau,
            "moves": [],
            "links": {"collectives": {}, "bytes": 0, "ms": 0.0},
        }
        | rest
    )


@pytest.fixture
def planned(monkeypatch):
    """Replaces the compiler by `a_plan`; gives the list of requests, and what to answer beside."""
    asked: list[decoding.PlanRequest] = []
    answer: dict[str, Any] = {}

    def fake(request):
        asked.append(request)
        return a_plan(request, **answer)

    monkeypatch.setattr(decoding, "plan", fake)
    monkeypatch.setattr(plan, "check_compiler", lambda wanted: None)
    return asked, answer


COMMAND = ["--shape", MODEL]


@pytest.mark.parametrize("fits, code, verdict", [(True, 0, "fits"), (False, 3, "does not fit")])
def test_the_last_line_is_the_verdict(planned, capsys, fits, code, verdict):
    planned[1]["fits"] = fits
    assert plan.main(COMMAND) == code
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == verdict
    assert (
        "no moves of 2 MiB or more within a round" in out and "(50%)" in out and "paper" not in out
    )


def test_what_goes_over_links_is_told(planned, capsys):
    counts = {"all-reduce": {"count": 161, "bytes": 2_500_000}}
    counts["all-gather"] = {"count": 1, "bytes": 140_000}
    planned[1]["links"] = {"collectives": counts, "bytes": 2_640_000, "ms": 1.3}
    assert plan.main([*COMMAND, "--topology", "h200:8", "--mesh", "tensor=4,data=2"]) == 0
    out = capsys.readouterr().out
    line = "over links a round: 161 all-reduce, 1 all-gather, 2.64 MB received, 1.300 ms"
    assert line in out.splitlines() and "mesh tensor=4,data=2, figures of a chip" in out


def test_a_refused_program_has_no_table_but_a_verdict(planned, capsys):
    nothing = {"phases": [], "moves": [], "round_ms": None, "tokens_per_s": None}
    memory = {"weights": 5, "state": 3, "temporary": None, "peak": None, "limit": 100}
    planned[1].update(nothing, fits=False, temp_bytes=None, memory=memory)
    assert plan.main(COMMAND) == 3
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == "does not fit" and "prefill" not in out


def test_json_is_all_of_stdout(planned, capsys):
    assert plan.main([*COMMAND, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    keys = "phases round_ms tokens_per_s roofline moves temp_bytes fits"
    assert set(keys.split()) <= set(found)
    assert {"phase", "launches", "bytes", "ms"} <= set(found["phases"][0])


def test_moves_are_told_by_phase(planned, capsys):
    move = {"name": "x", "opcode": "copy", "bytes": 3_000_000, "phase": "draft", "times": 1}
    planned[1]["moves"] = [move | {"label": ""}, move | {"label": ""}]
    plan.main(COMMAND)
    out = capsys.readouterr().out
    assert "2 moves of 2 MiB or more within a round, 6 MB" in out
    assert "  2 copy in draft" in out


def test_defaults_are_those_of_every_program(planned):
    for mode in ("plain", "chain", "tree"):
        plan.main([*COMMAND, "--drafter", PAPER, "--mode", mode, "--cache-rows", "2000"])
    plain, chained, tree = planned[0]
    assert [r.shape for r in planned[0]] == [DraftShape(1), DraftShape(5), DraftShape(7, 8, 62)]
    assert [r.tau for r in planned[0]] == [1.0, 3.2, 4.98]
    assert plain.drafter is None and chained.drafter.method == "moa"
    assert {r.cache_rows for r in planned[0]} == {2048} and tree.prompt == 1024
    assert plain.machine.chip.bandwidth == 4.8e12 and plain.machine.chip.launch == 2.5e-6


def test_flags_reach_the_request(planned):
    flags = "--mode tree --depth 4 --breadth 2 --total-tokens 6 --tau 3 --batch 8 --rows-used 100"
    rest = "--prompt-length 32 --weights float32 --bandwidth 3.35 --launch-us 1 --cache-rows 256"
    plan.main([*COMMAND, "--drafter", PAPER, *flags.split(), *rest.split()])
    (request,) = planned[0]
    assert request.shape == DraftShape(4, 2, 6) and (request.tau, request.batch) == (3, 8)
    assert (request.cache_rows, request.rows_used, request.prompt) == (256, 100, 32)
    assert request.machine.chip.bandwidth == 3.35e12 and request.machine.chip.launch == 1e-6
    assert request.weights == "float32"


def test_a_folder_names_its_own_pair(planned):
    folders = ["--shape", "moa_jax/demo/target", "--drafter", "moa_jax/demo/draft"]
    plan.main([*folders, "--mode", "chain", "--cache-rows", "512"])
    (request,) = planned[0]
    assert request.target.vocab_size == 2048 and request.drafter.params is None
    assert request.shape.depth == request.drafter.depth


def test_files_that_do_not_say_n_are_asked_for_it(planned, tmp_path, capsys):
    shutil.copytree("moa_jax/demo/draft", tmp_path / "draft")
    path = tmp_path / "draft" / "config.json"
    config = json.loads(path.read_text())
    del config["target_layer_inference"]
    path.write_text(json.dumps(config))
    folders = ["--shape", "moa_jax/demo/target", "--drafter", str(tmp_path / "draft")]
    flags = [*folders, "--mode", "chain", "--cache-rows", "512"]
    assert plan.main(flags) == 0
    assert "do not state target_layer_inference: 0 is assumed" in capsys.readouterr().err
    assert plan.main([*flags, "--target-layer-inference", "0"]) == 0
    assert "is assumed" not in capsys.readouterr().err
    assert [request.drafter.config.target_layer_inference for request in planned[0]] == [0, 0]


def test_rows_beyond_the_positions_are_priced_with_a_notice(planned, capsys):
    assert plan.main([*COMMAND, "--cache-rows", "8192"]) == 0
    assert "positions" not in capsys.readouterr().err
    assert plan.main([*COMMAND, "--cache-rows", "32768"]) == 0
    line, compiling = capsys.readouterr().err.splitlines()
    assert compiling.startswith("compiling")
    assert "32768 rows" in line and "8192 positions" in line


DEMO = ["--shape", "moa_jax/demo/target"]


@pytest.mark.parametrize(
    "command, fault",
    [
        (["--shape", "no/such/folder"], "no/such/folder"),
        ([*COMMAND, "--topology", "h100:1"], "h100:1"),
        ([*COMMAND, "--topology", "h200:8"], "has 8 chips, and decoding uses one"),
        ([*COMMAND, "--topology", "v5e:4x4"], "name a machine of one"),
        ([*COMMAND, "--weights", "int3"], "--weights int3; .*bfloat16"),
        ([*COMMAND, "--mode", "tree"], "name the drafter with --drafter"),
        ([*COMMAND, "--mode", "chain", "--drafter", "configs/none.py"], "no such config file"),
        ([*COMMAND, "--mode", "chain", "--drafter", "moa_jax/demo/draft"], "belongs to another"),
        ([*DEMO, "--mode", "chain", "--drafter", PAPER], f"{PAPER}: .*vocab_size is 128256"),
        (["--shape", "Llama-3-8B"], "no known shape: .*Meta-Llama-3-8B-Instruct"),
        ([*COMMAND, "--weights", "fp8", "--topology", "v5e:1x1"], "v5e:1x1 does not multiply it"),
        ([*COMMAND, "--tau", "1.5"], "a round of 1 levels commits at most 1"),
        (
            [*DEMO, "--mode", "tree", "--breadth", "9000", "--drafter", "moa_jax/demo/draft"],
            "--breadth 9000 is more than",
        ),
        ([*COMMAND, "--rows-used", "2049"], "--rows-used 2049 is more than the 2048 rows"),
        ([*COMMAND, "--prompt-length", "2048"], "too small: a prompt of 2048 tokens"),
        ([*COMMAND, "--mode", "tree", "--drafter", PAPER, "--depth", "65"], "at most 64"),
        ([*COMMAND, "--mode", "chain", "--drafter", PAPER, "--breadth", "2"], "describes a tree"),
        ([*COMMAND, "--drafter", PAPER], "--drafter without --mode, which is plain; add"),
        ([*COMMAND, "--total-tokens", "9"], "--total-tokens without --mode"),
        (
            [*COMMAND, "--mode", "chain", "--drafter", PAPER, "--target-layer-inference", "3"],
            "--target-layer-inference: .* sets it",
        ),
    ],
)
def test_what_cannot_be_planned_is_refused_in_a_line(planned, command, fault):
    with pytest.raises(InputError, match=fault) as refusal:
        plan.main(command)
    assert len(str(refusal.value).splitlines()) == 1 and not planned[0]


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(machines, "has_compiler", lambda compiler: False)
    with pytest.raises(InputError, match="make env PLAN=1"):
        plan.main(COMMAND)


def test_a_crash_is_no_verdict(monkeypatch, capsys, tmp_path):
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nkill -SEGV $$\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(python))
    for owner in (plan, machines):
        monkeypatch.setattr(owner, "check_compiler", lambda wanted: None)
    assert plan.main(COMMAND) == plan.CRASHED
    captured = capsys.readouterr()
    assert captured.out == "" and "SIGSEGV" in captured.err and "--cache-rows" in captured.err


# ---- real compilers -----------------------------------------------------------------------


def report_toy(topology: str) -> None:
    """Prints what a round of the toy costs by the plan; in a process of its own."""
    (device,) = machines.devices(machine(topology))
    params = triton.CompilerParams(num_warps=4) if topology.startswith("h200") else None
    program = lowering.compile_for(device, functools.partial(attend, params=params), *TOY)
    calls = [kernel for kernel in hlo.kernels(program.hlo) if kernel.in_loop and kernel.pallas]
    found = [decoding.priced(kernel, program.costs, used=0.25) for kernel in calls]
    print(json.dumps([(decoding.phase_of(k.label), k.times, k.flops, k.bytes) for k in found]))


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology",
    [pytest.param("h200:1", marks=needs["cuda"]), pytest.param("v5e:1x1", marks=needs["tpu"])],
)
def test_a_pallas_kernel_is_found_in_a_compiled_program(topology):
    """A quarter of the cache is used."""
    ran = subprocess.run(
        [sys.executable, "-c", f"from {__name__} import report_toy; report_toy({topology!r})"],
        cwd=ROOT,
        env=os.environ | machines.ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert ran.returncode == 0, ran.stderr[-2000:]
    cost = ["verify", 1, 2 * 64 * 128 * 64 // 4, (1 << 16) // 4]
    assert json.loads(ran.stdout.splitlines()[-1]) == [cost, cost]


# Launches of a round, modelled, at 2,048 rows: none may come back that went.
# mode: rows of the caches, launches of a round and its milliseconds, at most
BOUNDS = {"plain": (32_768, 410, 5.5), "chain": (2048, 520, 6.0), "tree": (32_768, 620, 10.0)}


@pytest.mark.slow
@needs["cuda"]
@pytest.mark.parametrize("mode", BOUNDS)
def test_a_round_of_the_8b_pair_on_an_h200(mode):
    rows, launches, milliseconds = BOUNDS[mode]
    flags = ("--drafter", PAPER, "--mode", mode, "--cache-rows", str(rows))
    code, found = run_plan(plan, "--shape", MODEL, *flags, "--prompt-length", "32")
    assert code == plan.FITS and found["moves"] == []
    assert found["launches"] <= launches and found["round_ms"] <= milliseconds
    assert 0.6 < found["tokens_per_s"] / found["roofline"] < 1
    phases = {phase["phase"]: phase for phase in found["phases"]}
    passes = {"plain": 0, "chain": 4, "tree": 6}[mode]
    level, target = level_and_target(0)
    caches = 2 * 32 * 2 * 8 * 128 * rows
    # Activations are the rest, most of them logits and hidden states of a tree's 63 nodes.
    assert 0.999 < phases["verify"]["bytes"] / (2 * target + caches) < 1.12
    # A level leaves out the weights of the memory's keys and values: extending reads them.
    read = passes * (2 * level + 2 * 2 * 2 * 4 * 128 * rows)
    assert 0.99 * read <= phases["draft"]["bytes"] < 1.03 * read + 1
    assert phases["rest"]["launches"] < 5
    assert phases["prefill"]["launches"] > 0 and found["temp_bytes"] < 1e9


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, weights, reduces, others",
    [
        pytest.param("h200:8", "bfloat16", 1, 1, marks=needs["cuda"]),
        pytest.param("v5p:2x2x2", "bfloat16", 3, 0, marks=needs["tpu"]),
        pytest.param("v5e:2x4", "int8", 3, 0, marks=needs["tpu"]),
    ],
)
def test_eight_chips_speak_twice_a_layer(topology, weights, reduces, others):
    """Layers of a 70B target: two all-reduces each, one more for the embedding, and the choice.

    No weight and no cache is moved, an eight-bit table in the tiles of a TPU included. All 80
    layers fit beside what the programs need for themselves.
    """
    whole = SHAPES["meta-llama/Meta-Llama-3-70B-Instruct"]
    config = dataclasses.replace(whole, num_layers=2)
    shape = (config, None, DraftShape(1), 4096)
    rest = {"weights": weights, "prompt_length": 32, "mesh": {"tensor": 8}}
    found = decoding.plan(decoding.PlanRequest(machine(topology), *shape, **rest))
    links = found["links"]["collectives"]
    assert links["all-reduce"]["count"] == 2 * 2 + reduces
    assert sum(each["count"] for each in links.values()) <= 2 * 2 + reduces + others
    assert found["fits"] and found["moves"] == [] and 0 < found["links"]["bytes"] < 0.3e6
    memory = found["memory"]
    size = {"bfloat16": 2, "int8": 1}[weights]
    expected = size * weights_of_a_chip(config)
    assert expected <= memory["weights"] < 1.01 * expected
    caches = 4096 * whole.num_layers * 2 * whole.block.head_dim * 2  # one of eight heads
    held = 1.01 * size * weights_of_a_chip(whole) + caches + memory["temporary"]
    assert held + memory["state"] < memory["limit"]


def weights_of_a_chip(config: TargetConfig) -> int:
    """Numbers of a target that each of eight chips holds."""
    mesh = AbstractMesh((1, 8), sharding.DECODE_AXES)
    sizes = 0
    for packing in convert.target_table(config).values():
        is_cut = any(sharding.dividing(packing.axes, packing.shape, mesh))
        sizes += math.prod(packing.shape) // (8 if is_cut else 1)
    return sizes


# Draft, machine, and most all-reduces and other collectives of a round, bytes of the others.
DRAFTS = [
    pytest.param(DraftShape(5), "h200:8", 24, 12, 180e3, id="chain", marks=needs["cuda"]),
    pytest.param(DraftShape(7, 8, 62), "v5p:2x2x2", 47, 123, 450e3, id="tree", marks=needs["tpu"]),
]


@pytest.mark.slow
@pytest.mark.parametrize("shape, topology, reduces, others, received", DRAFTS)
def test_a_round_that_drafts_sends_no_logits(shape, topology, reduces, others, received):
    """Two layers of an 8B target and the paper's drafter, greedy: sums of states, small choices.

    Logits of all nodes (B, N, V) stay where they are: those of one take 513 KB.
    """
    drafter = request_for("--drafter", PAPER, "--mode", "chain").drafter
    config = dataclasses.replace(SHAPES[MODEL], num_layers=2)
    rest = {"prompt_length": 32, "mesh": {"tensor": 8}}
    found = decoding.plan(
        decoding.PlanRequest(machine(topology), config, drafter, shape, 256, **rest)
    )
    links = found["links"]["collectives"]
    assert links["all-reduce"]["count"] <= reduces and found["moves"] == []
    rest = [each for kind, each in links.items() if kind != "all-reduce"]
    assert sum(each["count"] for each in rest) <= others
    assert sum(each["bytes"] for each in rest) < received


@pytest.mark.slow
@needs["tpu"]
def test_8b_in_bfloat16_does_not_fit_a_v5e():
    code, found = run_plan(plan, "--shape", MODEL, "--topology", "v5e:1x1")
    assert code == plan.DOES_NOT_FIT and not found["fits"] and found["phases"] == []
    assert found["memory"]["peak"] > found["memory"]["limit"]


@pytest.mark.slow
@needs["tpu"]
@needs["cuda"]
def test_a_tpu_and_a_gpu_multiply_the_same():
    """Two compilers that write products in quite different ways."""
    flags = ("--cache-rows", "256", "--prompt-length", "32")
    plans = [run_plan(plan, *DEMO, *flags, "--topology", name)[1] for name in ("h200:1", "v5e:1x1")]
    for gpu, tpu in zip(*(found["phases"] for found in plans), strict=True):
        if gpu["phase"] == "verify":
            assert gpu["flops"] == pytest.approx(tpu["flops"], rel=0.01)
        if gpu["phase"] == "prefill":  # of a cache that fills, kernels count the mean rows
            assert gpu["flops"] == pytest.approx(tpu["flops"], rel=0.2)
