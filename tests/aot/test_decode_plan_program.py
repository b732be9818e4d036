"""infer.plan as a program: verdicts, refusals, and real compilers."""

from __future__ import annotations

import dataclasses
import json
import math
from typing import Any

import jax
import pytest

from configs.shapes import SHAPES
from infer import plan
from infer.bench.plan import decoding, lowering
from moa_jax.config import DraftShape
from moa_jax.model import convert
from tests.aot.compiling import in_child, needs, run_plan
from tests.aot.test_plan import MODEL

PAPER = "configs/moa_llama3_8b.py"

# ---- the program --------------------------------------------------------------------------


def a_plan(request: decoding.PlanRequest, **rest: Any) -> dict[str, Any]:
    phase = {"launches": 10, "bytes": 9, "ms": 1.0}
    names = (*decoding.PHASES, decoding.REST, decoding.PREFILL)
    found = decoding._described(request) | dict(temp_bytes=2, fits=True, round_ms=5.0, launches=50)
    found |= dict(tokens_per_s=200.0 * request.tau, roofline=400.0 * request.tau, moves=[])
    found["memory"] = {"weights": 5, "state": 3, "temporary": 2, "peak": 10, "limit": 100}
    found["phases"] = [{"phase": name} | phase for name in names]
    found["links"] = {"collectives": {}, "bytes": 0, "ms": 0.0}
    return found | rest


@pytest.fixture
def planned(monkeypatch):
    """Replaces the compiler with `a_plan`; returns the requests, and fields to add to a plan."""
    asked: list[decoding.PlanRequest] = []
    answer: dict[str, Any] = {}

    def fake(request):
        asked.append(request)
        return a_plan(request, **answer)

    monkeypatch.setattr(decoding, "plan", fake)
    return asked, answer


COMMAND = ["--shape", MODEL]
DEMO = ["--shape", "moa_jax/demo/target", "--drafter", "moa_jax/demo/draft"]


NOTHING = {"phases": [], "moves": [], "round_ms": None, "tokens_per_s": None, "fits": False}
NOTHING |= {"memory": {"peak": 110, "limit": 100}}


VERDICTS = {
    "fits": ({}, 0, "fits"),
    "too-large": ({"fits": False}, 3, "does not fit"),
    "not-compiled": (NOTHING, 3, "does not fit"),
}


@pytest.mark.parametrize("name", VERDICTS)
def test_the_last_line_is_the_verdict(planned, capsys, name):
    answer, code, verdict = VERDICTS[name]
    planned[1].update(answer)
    assert plan.main(COMMAND) == code
    out = capsys.readouterr().out
    assert out.splitlines()[-1] == verdict
    table = "moves of 2 MiB or more within a round: none" in out and "(50%)" in out
    assert table == ("phases" not in answer)


def test_json_is_all_of_stdout(planned, capsys):
    assert plan.main([*COMMAND, "--json"]) == 0
    expected = a_plan(planned[0][0]) | {"mode": "plain"}
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(expected))


def test_defaults_are_those_of_every_program(planned):
    for mode in ("plain", "chain", "tree"):
        plan.main([*COMMAND, "--drafter", PAPER, "--mode", mode, "--cache-rows", "2000"])
    plain, chained, tree = planned[0]
    assert [r.shape for r in planned[0]] == [DraftShape(1), DraftShape(5), DraftShape(7, 8, 62)]
    assert [r.tau for r in planned[0]] == [1.0, 3.2, 4.98]
    assert plain.drafter is None and chained.drafter.method == "moa"
    assert {r.cache_rows for r in planned[0]} == {2048} and tree.used == 1
    assert plain.machine.chip.bandwidth == 4.8e12 and plain.machine.chip.launch == 2.5e-6


def test_flags_reach_the_request(planned):
    flags = "--mode tree --depth 4 --breadth 2 --total-tokens 6 --tau 3 --batch 8 --rows-used 100"
    rest = "--weights float32 --bandwidth 3.35 --launch-us 1 --cache-rows 256"
    plan.main([*COMMAND, "--drafter", PAPER, *flags.split(), *rest.split()])
    plan.main([*DEMO, "--mode", "chain", "--cache-rows", "512"])
    request, demo = planned[0]
    assert request.shape == DraftShape(4, 2, 6) and (request.tau, request.batch) == (3, 8)
    assert (request.cache_rows, request.rows_used) == (256, 100)
    assert request.machine.chip.bandwidth == 3.35e12 and request.machine.chip.launch == 1e-6
    assert request.weights == "float32"
    assert demo.target.vocab_size == 2048 and demo.drafter.params is None
    assert demo.shape.depth == demo.drafter.depth


# ---- real compilers -----------------------------------------------------------------------


def plan_of(
    topology: str, model: str, weights: str, shape: tuple[int, ...], cache_rows: int
) -> dict[str, Any]:
    """Returns the plan of two target layers on eight chips; `shape` has a `DraftShape`'s fields.

    No test here reads its prefill, so the decode program stands for the prefill program.
    """
    jax.config.update("jax_disable_most_optimizations", False)  # as users compile
    compile_decode, made = lowering.compile_decode, []
    lowering.compile_decode = lambda *program: made.append(compile_decode(*program)) or made[0]
    lowering.compile_prefill = lambda *program: made[0]
    drafts = ("--drafter", PAPER, "--mode", "chain", "--cache-rows", str(cache_rows))
    flags = ("--shape", MODEL, *drafts, "--topology", topology, "--mesh", "tensor=8")
    request, draft = plan.request_of(plan._parser().parse_args(flags)), DraftShape(*shape)
    changes = dict(target=dataclasses.replace(SHAPES[model], num_layers=2), weights=weights)
    drafter = request.drafter if draft.num_drafted else None
    return decoding.plan(request._replace(drafter=drafter, shape=draft, tau=1.0, **changes))


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, weights, reduces, others",
    [
        pytest.param("h200:8", "bfloat16", 1, 1, marks=needs["cuda"]),
        pytest.param("v5e:2x4", "int8", 3, 0, marks=needs["tpu"]),
    ],
)
def test_eight_chips_reduce_twice_a_layer(topology, weights, reduces, others):
    """A 70B target uses two all-reduces a layer, one for the embedding, and one for the choice.

    No weight and no cache is moved; an eight-bit table is stored in the tiles of a TPU, too.
    """
    name = "meta-llama/Meta-Llama-3-70B-Instruct"
    whole = SHAPES[name]
    found = in_child(plan_of, topology, name, weights, (1,), 4096)
    links = found["links"]["collectives"]
    assert links["all-reduce"]["count"] == 2 * 2 + reduces
    assert sum(each["count"] for each in links.values()) <= 2 * 2 + reduces + others
    assert found["fits"] and found["moves"] == [] and 0 < found["links"]["bytes"] < 0.3e6
    size = {"bfloat16": 2, "int8": 1}[weights]
    table = convert.target_table(dataclasses.replace(whole, num_layers=2))
    expected = size * sum(math.prod(packing.shape) for packing in table.values()) / 8
    assert expected <= found["memory"]["weights"] < 1.01 * expected
    # A chip reads its part of the weights once; the embedding is looked up, not read.
    (verify,) = (phase for phase in found["phases"] if phase["phase"] == "verify")
    embedding = size * whole.vocab_size * whole.block.hidden_size / 8
    assert 0.99 < verify["bytes"] / (expected - embedding) < 1.1


@pytest.mark.slow
@needs["tpu"]
def test_a_round_that_drafts_sends_no_logits():
    """Two layers of an 8B target with the paper's drafter, greedy, send sums and choices only.

    Logits of all nodes (B, N, V) stay on their chip: the logits of one node take 513 KB.
    """
    found = in_child(plan_of, "v5p:2x2x2", MODEL, "bfloat16", (3, 8, 20), 256)
    links = found["links"]["collectives"]
    assert links["all-reduce"]["count"] <= 24 and found["moves"] == []
    rest = [each for kind, each in links.items() if kind != "all-reduce"]
    assert sum(each["count"] for each in rest) <= 36
    assert sum(each["bytes"] for each in rest) < 125e3


@pytest.mark.slow
@needs["cuda"]
def test_the_program_plans_a_pair_of_files():
    code, found = run_plan(plan, *DEMO, "--mode", "chain", "--cache-rows", "256")
    assert code == plan.FITS and found["moves"] == [] and found["links"]["collectives"] == {}
    phases = {phase["phase"]: phase for phase in found["phases"]}
    assert all(phases[name]["launches"] > 0 for name in ("draft", "verify", "extend", "prefill"))
    assert 0 < found["tokens_per_s"] < found["roofline"] and found["temp_bytes"] < 1e8
