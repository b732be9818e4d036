"""Decoding moves no weight and no cache: small modules by hand, and real ones for an H200."""

from __future__ import annotations

import dataclasses
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from configs import demo_drafter, demo_target
from configs.moa_llama3_8b import config as PAPER
from configs.shapes import SHAPES
from infer.bench.plan.hlo import ENTRY, LARGE, MOVES, Move, kernels, large_moves, parse
from infer.bench.plan.lowering import (
    HloModule,
    abstract_weights,
    compile_decode,
    compile_for,
    compile_prefill,
    num_bytes,
)
from infer.bench.plan.machines import devices, has_compiler, machine
from moa_jax.config import DraftShape
from moa_jax.decode.limits import CacheLimits
from moa_jax.decode.state import StaticConfig
from moa_jax.drafters import DRAFTERS
from moa_jax.model import llama, masks

ROOT = Path(__file__).resolve().parents[2]
H200 = machine("h200:1")
BIG = "bf16[1024,1024]{1,0}"  # 2 MiB


# ---- the parser ---------------------------------------------------------------------------


def module(body: str, fused: str = "ROOT %p = f32[] parameter(0)", before: str = "") -> str:
    """A module whose loop runs `body` on %w, a large array; `fused` may be called from it."""
    return f"""HloModule jit_f, is_scheduled=true

%fused (p.0: {BIG}, p.1: {BIG}, p.2: s32[]) -> {BIG} {{
  %p.0 = {BIG} parameter(0)
  %p.1 = {BIG} parameter(1)
  %p.2 = s32[] parameter(2)
  {fused}
}}

%body (arg: ({BIG}, {BIG}, /*index=2*/s32[])) -> ({BIG}, {BIG}, /*index=2*/s32[]) {{
  %arg = ({BIG}, {BIG}, /*index=2*/s32[]) parameter(0)
  %w = {BIG} get-tuple-element(%arg), index=0
  %i = s32[] get-tuple-element(%arg), index=2
  {body}
  ROOT %result = ({BIG}, {BIG}, /*index=2*/s32[]) tuple(%w, %w, /*index=2*/%i)
}}

%turns (arg.1: ({BIG}, {BIG}, /*index=2*/s32[])) -> pred[] {{
  %arg.1 = ({BIG}, {BIG}, /*index=2*/s32[]) parameter(0)
  ROOT %more = pred[] constant(true)
}}

ENTRY %main (a: {BIG}, b: {BIG}, c: s32[]) -> {BIG} {{
  %a = {BIG} parameter(0)
  %b = {BIG} parameter(1)
  %c = s32[] parameter(2)
  {before}
  %start = ({BIG}, {BIG}, /*index=2*/s32[]) tuple(%a, %b, /*index=2*/%c)
  %loop = ({BIG}, {BIG}, /*index=2*/s32[]) while(%start), condition=%turns, body=%body
  ROOT %out = {BIG} get-tuple-element(%loop), index=0
}}
"""


def opcodes(*args: str) -> list[str]:
    return [move.opcode for move in large_moves(module(*args))]


MOVED = ["concatenate", "copy", "dynamic-slice", "pad", "slice", "transpose"]


def test_moves_are_all_tested():
    assert sorted(MOVES) == MOVED


@pytest.mark.parametrize("opcode", MOVED)
def test_a_move_counts(opcode):
    line = f'%x = {BIG} {opcode}(%w, %i), metadata={{op_name="jit(f)/while/body/draft/moved"}}'
    assert large_moves(module(line)) == [Move("x", opcode, LARGE, "jit(f)/while/body/draft/moved")]


def test_size_is_that_of_what_is_given():
    assert opcodes("%x = bf16[1023,1024]{1,0} slice(%w)") == []
    assert opcodes("%x = pred[2097152]{0} slice(%w)") == ["slice"]
    assert opcodes("%x = s4[4194303]{0} slice(%w)") == []
    assert len(large_moves(module("%x = f32[8]{0} copy(%w)"), 32)) == 1


def test_what_computes_does_not_count():
    assert opcodes(f"%x = {BIG} add(%w, %w)\n  %y = {BIG} bitcast(%w)") == []


def test_only_loops_count():
    copy = f"%x = {BIG} copy(%a)"
    assert opcodes("", "", copy) == []
    with pytest.raises(ValueError, match="no loop"):
        large_moves(module("").replace("while(", "call("))


ASYNC_COPY = f"%s = ({BIG}, {BIG}, u32[]) copy-start(%w)\n  %d = {BIG} copy-done(%s)"
ASYNC_ROW = f"%s = (({BIG}), u8[8]{{0}}, u32[]) slice-start(%w)\n  %d = u8[8]{{0}} slice-done(%s)"
NONE = "%none () -> s32[] {\n  ROOT %n = s32[] constant(0)\n}\n"


@pytest.mark.parametrize(
    "line, found",
    [
        (ASYNC_COPY, ["copy"]),
        (ASYNC_ROW, []),
        (f"%s = (({BIG}), {BIG}, u32[]) async-start(%w), calls=%fused", ["transpose"]),
        (f"%s = {BIG} call(%w), to_apply=%fused", ["transpose"]),
        (f"%s = {BIG} conditional(%i), branch_computations={{%none, %fused}}", ["transpose"]),
        (f"%s = {BIG} while(%w), condition=%none, body=%fused", ["transpose"]),
        (f"%s = {BIG} reduce(%w), to_apply=%fused", []),
    ],
)
def test_moves_are_found_where_the_loop_leads(line, found):
    text = module(line, f"ROOT %x = {BIG} transpose(%p.0), dimensions={{1,0}}")
    assert [move.opcode for move in large_moves(f"{NONE}\n{text}")] == found


@pytest.mark.parametrize(
    "fused, found",
    [
        (f"ROOT %x = {BIG} transpose(%p.0)", ["transpose"]),
        (f"%x = bf16[1023,1024] bitcast(%p.0)\n  ROOT %y = {BIG} pad(%x, %p.2)", ["pad"]),
        (f"%x = {BIG} dynamic-slice(%p.0, %p.2)\n  ROOT %y = {BIG} bitcast(%x)", ["dynamic-slice"]),
        (f"%x = {BIG} slice(%p.0)\n  ROOT %y = f32[1024,1024]{{1,0}} convert(%x)", ["slice"]),
        (f"%x = {BIG} slice(%p.0)\n  ROOT %y = ({BIG}, {BIG}) tuple(%x, %x)", ["slice", "slice"]),
        (f"%x = {BIG} transpose(%p.0)\n  ROOT %y = f32[8]{{0}} dot(%x, %p.1)", []),
        (f"%x = {BIG} slice(%p.0)\n  ROOT %y = {BIG} multiply(%x, %p.1)", []),
        (f"ROOT %x = {BIG} dynamic-update-slice(%p.0, %p.1, %p.2)", []),
        (
            f"%x = {BIG} copy(%p.0)\n  ROOT %y = {BIG} dynamic-update-slice(%x, %p.1, %p.2)",
            ["copy"],
        ),
    ],
)
def test_a_fusion_counts_for_what_it_gives(fused, found):
    line = f"%f = {BIG} fusion(%w, %w, %i), kind=kLoop, calls=%fused"
    assert opcodes(line, fused) == found


def test_an_update_counts_for_the_copy_that_feeds_it():
    update = f"%u = {BIG} dynamic-update-slice(%w, %w, %i)"
    assert opcodes(update) == []
    assert opcodes(f"%x = {BIG} copy(%w)\n  {update.replace('(%w,', '(%x,')}") == ["copy"]


def test_launches_are_what_runs():
    lines = [
        f"%x = {BIG} copy(%w)",
        ASYNC_COPY,
        f"%gemm_fusion_dot.1 = {BIG} fusion(%w, %w, %i), kind=kCustom, calls=%fused",
        f"%y = {BIG} fusion(%w, %w, %i), kind=kLoop, calls=%fused\n  %z = {BIG} bitcast(%y)",
    ]
    text = module("\n  ".join(lines), f"ROOT %r = {BIG} dot(%p.0, %p.1)")
    found = [kernel for kernel in kernels(text) if kernel.in_loop]
    assert len(found) == 4 and sum(kernel.flops > 0 for kernel in found) == 2


def branches(text: str) -> list[str]:
    """The opcodes of all loops and conditionals of a module, wherever they stand."""
    blocks = [block for name, block in parse(text).items() if name != ENTRY]
    every = [each.opcode for block in blocks for each in block.values()]
    return sorted(opcode for opcode in every if opcode in ("while", "conditional"))


def test_branches_are_found_wherever_they_stand():
    choice = "conditional(%i, %w), branch_computations={%none, %fused}"
    assert branches(module("")) == ["while"]
    assert branches(module("", "", f"%x = {BIG} {choice}")) == ["conditional", "while"]
    assert branches(module(f"%x = {BIG} {choice}")) == ["conditional", "while"]
    assert branches(module(f"%x = {BIG} while(%w), condition=%none, body=%fused")) == ["while"] * 2


# ---- the program --------------------------------------------------------------------------

LLAMA = SHAPES["meta-llama/Meta-Llama-3-8B-Instruct"]
LAYERS = 8  # of the target in what a test compiles to see what moves
DRAFTS = {1: DraftShape(1), 8: DraftShape(8), 63: DraftShape(7, 8, 62)}
PROMPT, ANSWER = 1000, 1000  # tokens
UNEVEN = 2047  # rows


def session_rows(num_nodes: int) -> int:
    """The rows of the caches that `Session` makes."""
    draft_rows = DRAFTS[num_nodes].num_rows
    return CacheLimits(LLAMA.max_position_embeddings, None, draft_rows).rows_for(PROMPT + ANSWER)


def decode_program(num_nodes: int, cache_rows: int) -> tuple[HloModule, int]:
    """The 8B pair with eight layers in bfloat16, and the bytes of its weights.

    test_decode_plan_program.py compiles all of them.
    """
    cfg, shape = dataclasses.replace(LLAMA, num_layers=LAYERS), DRAFTS[num_nodes]
    drafter = DRAFTERS["moa"].make(PAPER.drafter, cfg) if shape.num_drafted else None
    setup = StaticConfig(cfg, drafter, shape)
    weights = abstract_weights(setup)
    return compile_decode(devices(H200)[0], setup, weights, cache_rows), num_bytes(weights)


def bundled_program(num_nodes: int, cache_rows: int) -> tuple[HloModule, int]:
    """The same for the bundled pair, which compiles sooner, in a session that chooses."""
    target, shape = demo_target.config.target, DRAFTS[num_nodes]
    drafter = DRAFTERS["moa"].make(demo_drafter.config.drafter, target)
    setup = StaticConfig(target, drafter, shape, catches_up=True)
    weights = abstract_weights(setup)
    return compile_decode(devices(H200)[0], setup, weights, cache_rows), num_bytes(weights)


def batch_program(num_nodes: int, cache_rows: int) -> tuple[HloModule, int]:
    """The 8B pair with four layers, decoding 32 rows side by side."""
    cfg = dataclasses.replace(LLAMA, num_layers=4)
    setup = StaticConfig(cfg, DRAFTERS["moa"].make(PAPER.drafter, cfg), DRAFTS[num_nodes])
    weights = abstract_weights(setup)
    program = compile_decode(devices(H200)[0], setup, weights, cache_rows, batch=32)
    return program, num_bytes(weights)


def prefill_program(num_layers: int, cache_rows: int) -> tuple[HloModule, int]:
    """The same pair with fewer layers, reading a prompt; memory is asked of chains alone."""
    cfg = dataclasses.replace(LLAMA, num_layers=num_layers)
    setup = StaticConfig(cfg, DRAFTERS["moa"].make(PAPER.drafter, cfg), DRAFTS[8])
    weights = abstract_weights(setup)
    return compile_prefill(devices(H200)[0], setup, weights, cache_rows), num_bytes(weights)


def stacked_program(num_layers: int = 2) -> tuple[HloModule, int]:
    """The control: layers as one stack, which `scan` cuts a copy of each weight from."""
    cfg = dataclasses.replace(LLAMA, num_layers=num_layers, vocab_size=512)
    setup = StaticConfig(cfg, None, DraftShape(1))
    params = abstract_weights(setup).target
    stack = lambda *leaves: jax.ShapeDtypeStruct((num_layers, *leaves[0].shape), leaves[0].dtype)
    params = params | {"layers": jax.tree.map(stack, *params["layers"])}

    def decode(params, root_11, count):
        def one(carry):
            done, token_11 = carry
            context = llama.Context(token_11 * 0, masks.causal_tree(1))
            found = llama.forward(cfg, params, token_11, context)
            logits_11V = llama.unembed(params, found.hidden_BTD)
            return done + 1, jnp.argmax(logits_11V, axis=-1).astype(jnp.int32)

        return lax.while_loop(lambda carry: carry[0] < count, one, (jnp.int32(0), root_11))

    integers = [jax.ShapeDtypeStruct(shape, jnp.int32) for shape in ((1, 1), ())]
    return compile_for(devices(H200)[0], decode, params, *integers), num_bytes(params)


def report(name: str) -> None:
    """Prints what a program moves and holds; in a process of its own, for compilers may crash.

    The name is `stacked`, or numbers of nodes and cache rows as in `8x2176`, of the bundled pair
    in `bundled 8x256`, of 32 rows in `batch 8x2048`, or `prefill` with numbers of layers and cache
    rows as in `prefill 2x8192`.
    """
    kind, _, numbers = name.rpartition(" ")
    sizes = [] if name == "stacked" else [int(size) for size in numbers.split("x")]
    programs = {
        "": decode_program,
        "bundled": bundled_program,
        "batch": batch_program,
        "prefill": prefill_program,
    }
    program, weights = programs[kind](*sizes) if sizes else stacked_program()
    facts = {
        "moves": [list(move) for move in large_moves(program.hlo)],
        "launches": sum(each.in_loop for each in kernels(program.hlo)),
        "products": sum(each.in_loop and each.flops > 0 for each in kernels(program.hlo)),
        "branches": branches(program.hlo),
        "temp": program.temp_bytes,
        "weights": weights,
        "seconds": round(program.seconds, 1),
    }
    print(json.dumps(facts))


def reported(name: str, module: str = __name__) -> dict:
    code = f"from {module} import report; report({name!r})"
    ran = subprocess.run(
        [sys.executable, "-c", code],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=400,
    )
    assert ran.returncode == 0, f"compiler ended with {ran.returncode}: {ran.stderr[-2000:]}"
    facts = json.loads(ran.stdout.splitlines()[-1])
    print(name, {key: value for key, value in facts.items() if key != "moves"})
    return facts


needs_compiler = pytest.mark.skipif(
    not has_compiler("cuda"), reason="no compiler for NVIDIA GPUs here: make env PLAN=1"
)


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("num_nodes", DRAFTS)
def test_decoding_moves_no_weight_and_no_cache(num_nodes):
    """Nothing of 2 MiB is moved; temporary memory is under 5 % of the weights."""
    facts = reported(f"{num_nodes}x{session_rows(num_nodes)}")
    assert facts["moves"] == []
    assert facts["temp"] < 0.05 * facts["weights"]
    assert facts["products"] > 4 * LAYERS  # a whole round was read


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("num_nodes", [8, 63], ids=["chain", "tree"])
def test_a_batch_moves_only_what_the_memory_is_made_of(num_nodes):
    """Rows of all layers are put side by side for LSA, whose own heads are rotated: no more."""
    facts = reported(f"batch {num_nodes}x2048")
    labels = [label.split("/body/")[1] for _, _, _, label, _ in facts["moves"]]
    assert sorted(label.rpartition("/")[0] for label in labels) == [
        "extend",
        "extend/Block/attention",
        "extend/Block/attention",
    ]


@pytest.mark.slow
@needs_compiler
@pytest.mark.parametrize("num_nodes", [1, 8, 63], ids=["plain", "chain", "tree"])
def test_a_round_is_one_graph(num_nodes):
    """The loop of rounds is the only loop: within one, a GPU waits for no choice of the host's."""
    facts = reported(f"bundled {num_nodes}x256")
    assert facts["branches"] == ["while"]
    assert facts["launches"] > 4 * demo_target.config.target.num_layers  # all of it


@pytest.mark.slow
@needs_compiler
def test_caches_of_uneven_rows_are_not_padded():
    """XLA pads the values of an einsum over such rows in each layer and round; kernels do not."""
    assert reported(f"1x{UNEVEN}")["moves"] == []


@pytest.mark.slow
@needs_compiler
def test_stacked_weights_are_moved():
    facts = reported("stacked")
    assert sum(size for _, _, size, _, _ in facts["moves"]) > 4e8  # every weight of a layer
    assert facts["temp"] > 0.05 * facts["weights"]


@pytest.mark.slow
@needs_compiler
def test_reading_a_prompt_takes_the_memory_of_a_chunk():
    """No array but the caches grows with the prompt: scores stay in the kernels."""
    small, large = (reported(f"prefill 2x{rows}")["temp"] for rows in (8192, 131_072))
    assert small < 128 << 20 and large < small + (16 << 20)
