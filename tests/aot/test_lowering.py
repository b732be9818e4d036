"""Decoding moves no weight and no cache: small modules by hand, and real ones for an H200."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from configs import demo_drafter, demo_target
from configs.moa_llama3_8b import config as PAPER
from configs.shapes import SHAPES
from infer.bench.plan.decoding import phase_of
from infer.bench.plan.hlo import ENTRY, LARGE, MOVES, Move, kernels, large_moves, parse
from infer.bench.plan.lowering import (
    HloModule,
    Shares,
    abstract_weights,
    compile_decode,
    compile_for,
    compile_prefill,
    num_bytes,
    products,
)
from infer.bench.plan.machines import devices, machine
from moa_jax.config import DraftShape, Sampling
from moa_jax.decode.limits import CacheLimits
from moa_jax.decode.row_settings import joined, row_settings
from moa_jax.decode.state import StaticConfig
from moa_jax.drafters import DRAFTERS
from moa_jax.engine import device_ops
from moa_jax.model import llama, masks
from tests.aot.compiling import in_child, needs

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


@pytest.mark.parametrize("opcode", sorted(MOVES))
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
    assert len(found) == 4 and sum(kernel.is_product for kernel in found) == 2


def branches(text: str) -> list[str]:
    """The opcodes of all loops and conditionals of a module, wherever they stand."""
    blocks = [block for name, block in parse(text).items() if name != ENTRY]
    every = [each.opcode for block in blocks for each in block.values()]
    return sorted(opcode for opcode in every if opcode in ("while", "conditional"))


# ---- the program --------------------------------------------------------------------------

LLAMA = SHAPES["meta-llama/Meta-Llama-3-8B-Instruct"]
LAYERS = 4  # of the target in what a test compiles to see what moves
DRAFTS = {1: DraftShape(1), 8: DraftShape(8), 63: DraftShape(7, 8, 62)}
PROMPT, ANSWER = 1000, 1000  # tokens
UNEVEN = 2047  # rows


def session_rows(num_nodes: int) -> int:
    """The rows of the caches that `Session` makes."""
    draft_rows = DRAFTS[num_nodes].num_rows
    return CacheLimits(LLAMA.max_position_embeddings, None, draft_rows).rows_for(PROMPT + ANSWER)


def pair_of(num_nodes: int, num_layers: int = LAYERS) -> StaticConfig:
    """The 8B pair with a few layers, in bfloat16."""
    cfg, shape = dataclasses.replace(LLAMA, num_layers=num_layers), DRAFTS[num_nodes]
    drafter = DRAFTERS["moa"].make(PAPER.drafter, cfg) if shape.num_drafted else None
    return StaticConfig(cfg, drafter, shape)


def bundled_pair(num_nodes: int) -> StaticConfig:
    """The bundled pair, which compiles sooner, in a session that chooses."""
    target, shape = demo_target.config.target, DRAFTS[num_nodes]
    drafter = DRAFTERS["moa"].make(demo_drafter.config.drafter, target)
    return StaticConfig(target, drafter, shape, catches_up=True)


def stacked_program(num_layers: int = 2) -> tuple[HloModule, Any]:
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
    return compile_for(devices(H200)[0], decode, params, *integers), params


def engine_program(setup: StaticConfig, rows: int, batch: int) -> tuple[HloModule, Any]:
    """A decode call of an engine with six slots, all of which lag."""
    setup, weights = setup._replace(catches_up=setup.drafter is not None), abstract_weights(setup)
    empty = functools.partial(device_ops.empty, setup, slots=6, rows=rows)
    state, _ = jax.eval_shape(empty, weights)
    settings = row_settings(Sampling(), 0, 0, (), setup.target.vocab_size)
    rows = (np.zeros(batch, np.int32), np.zeros(batch, bool), joined([settings] * batch, False))
    decode = functools.partial(device_ops.decode, setup)
    given = (weights, state, device_ops.DecodeInput(*rows, np.int32(0)))
    how = {"donate": (1,), "drafts": setup.shape.num_drafted > 0}
    return compile_for(devices(H200)[0], decode, *given, **how), weights


def report(kind: str, num_nodes: int = 1, cache_rows: int = 0) -> dict[str, Any]:
    """What the loop of a compiled program moves and holds.

    A kind is `pair`, `bundled`, `batch` (of 32 rows), `prefill`, `stacked`, `slot` or `slots` (one
    row or four of six slots of an engine).
    """
    num_layers = 2 if kind == "prefill" else LAYERS
    setup = bundled_pair(num_nodes) if kind == "bundled" else pair_of(num_nodes, num_layers)
    if kind == "stacked":
        program, weights = stacked_program()
    elif kind in ("slot", "slots"):
        program, weights = engine_program(setup, cache_rows, 1 if kind == "slot" else 4)
    else:
        weights, (device,) = abstract_weights(setup), devices(H200)
        compile = compile_prefill if kind == "prefill" else compile_decode
        program = compile(device, setup, weights, cache_rows, 32 if kind == "batch" else 1)
    rounds = [each for each in kernels(program.hlo) if each.in_loop]
    read: Counter[str] = Counter()
    for each in products(program.jaxpr, Shares()):
        read[phase_of(each.label)] += round(each.times * each.bytes * each.in_loop)
    return {
        "read": read,
        "moves": large_moves(program.hlo),
        "launches": sum(each.times for each in rounds),
        "products": sum(each.is_product for each in rounds),
        "branches": branches(program.hlo),
        "temp": program.temp_bytes,
        "weights": num_bytes(weights),
    }


def level_and_target(rows: int) -> tuple[int, int]:
    """Numbers that one level of the paper's drafter and one pass of the target read."""
    D, E, head = 4096, 128, 4096 * 128_256
    block = lambda kv, inner: D * (32 + 2 * kv) * E + 32 * E * D + 3 * D * inner
    level = 2 * block(4, 6144) + head + 2 * 2 * 4 * E * rows
    return level, LAYERS * block(8, 14_336) + head + LAYERS * 2 * 8 * E * rows


# Launches of a round with four layers: none may come back that went.
LAUNCHES = {1: 80, 8: 260, 63: 280}


@pytest.mark.slow
@needs["cuda"]
@pytest.mark.parametrize("num_nodes", DRAFTS, ids=["plain", "chain", "tree"])
def test_decoding_moves_no_weight_and_no_cache(num_nodes):
    """Nothing of 2 MiB is moved; temporary memory is under 10 % of the few layers' weights.

    The loop of rounds is the only loop: within one, a GPU waits for no choice of the host's.
    """
    rows = session_rows(num_nodes)
    facts = in_child(report, "pair", num_nodes, rows)
    assert facts["moves"] == [] and facts["branches"] == ["while"]
    assert facts["temp"] < 0.1 * facts["weights"]
    assert facts["products"] > 4 * LAYERS  # a whole round was read
    assert facts["launches"] <= LAUNCHES[num_nodes]
    # Activations are the rest, most of them logits and hidden states of a tree's 63 nodes.
    level, target = level_and_target(rows)
    assert 0.999 < facts["read"]["verify"] / (2 * target) < 1.12
    # A level leaves out the weights of the memory's keys and values: extending reads them.
    passes = {1: 0, 8: 7, 63: 6}[num_nodes]
    drafted = facts["read"].get("draft", 0)
    assert 0.99 * 2 * passes * level <= drafted < 1.03 * 2 * passes * level + 1


@pytest.mark.slow
@needs["cuda"]
@pytest.mark.parametrize("kind", ["slot", "slots"])
@pytest.mark.parametrize("num_nodes", DRAFTS, ids=["plain", "chain", "tree"])
def test_an_engine_decodes_in_its_slots(num_nodes, kind):
    """No cache of a slot is moved into the batch or back, and a round launches no more kernels.

    What lags are streams of the rows in the batch, which are gathered once per call.
    """
    rows = 512
    facts = in_child(report, kind, num_nodes, rows)
    cache = 2 * 8 * 128 * rows
    assert [move for move in facts["moves"] if move.bytes >= cache] == []
    assert facts["temp"] < 0.1 * facts["weights"]
    assert facts["launches"] <= LAUNCHES[num_nodes] + 10


@pytest.mark.slow
@needs["cuda"]
def test_a_batch_moves_only_what_the_memory_is_made_of():
    """Rows of all layers are put side by side for LSA, whose own heads are rotated: no more."""
    facts = in_child(report, "batch", 63, 2048)
    labels = [label.split("/body/")[1] for _, _, _, label, _ in facts["moves"]]
    assert sorted(label.rpartition("/")[0] for label in labels) == [
        "extend",
        "extend/Block/attention",
        "extend/Block/attention",
    ]


@pytest.mark.slow
@needs["cuda"]
def test_a_round_of_a_session_that_chooses_is_one_graph():
    facts = in_child(report, "bundled", 63, 256)
    assert facts["branches"] == ["while"]
    assert facts["launches"] > 4 * demo_target.config.target.num_layers  # all of it


@pytest.mark.slow
@needs["cuda"]
def test_caches_of_uneven_rows_are_not_padded():
    """XLA pads the values of an einsum over such rows in each layer and round; kernels do not."""
    assert in_child(report, "pair", 1, UNEVEN)["moves"] == []


@pytest.mark.slow
@needs["cuda"]
def test_stacked_weights_are_moved():
    facts = in_child(report, "stacked")
    assert sum(size for _, _, size, _, _ in facts["moves"]) > 4e8  # every weight of a layer
    assert facts["temp"] > 0.05 * facts["weights"]


@pytest.mark.slow
@needs["cuda"]
def test_reading_a_prompt_takes_the_memory_of_a_chunk():
    """No array but the caches grows with the prompt: scores stay in the kernels."""
    small, large = (in_child(report, "prefill", 8, rows)["temp"] for rows in (8192, 131_072))
    assert small < 128 << 20 and large < small + (16 << 20)
