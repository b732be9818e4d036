"""Decode programs compiled for an H200 move no weight and no cache."""

from __future__ import annotations

import dataclasses
import functools
from collections import Counter
from typing import Any

import jax
import numpy as np
import pytest

from configs.moa_llama3_8b import config as PAPER
from configs.shapes import SHAPES
from infer.bench.plan.decoding import phase_of
from infer.bench.plan.hlo import ENTRY, FOLLOWED, FREE, executed, kernels, large_moves, parse
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
from tests.aot.compiling import in_child, needs
from tests.aot.test_hlo import fused, module

H200 = machine("h200:1")
LLAMA = SHAPES["meta-llama/Meta-Llama-3-8B-Instruct"]
LAYERS = 4  # layers of the target in compiled programs
DRAFTS = {1: DraftShape(1), 8: DraftShape(8), 63: DraftShape(7, 8, 62)}
PROMPT, ANSWER = 1000, 1000  # tokens


def session_rows(num_nodes: int) -> int:
    """Returns the number of cache rows that `Session` allocates."""
    draft_rows = DRAFTS[num_nodes].num_rows
    return CacheLimits(LLAMA.max_position_embeddings, None, draft_rows).rows_for(PROMPT + ANSWER)


def pair_of(num_nodes: int, num_layers: int = LAYERS) -> StaticConfig:
    """Returns the 8B pair with a few layers, in bfloat16."""
    cfg, shape = dataclasses.replace(LLAMA, num_layers=num_layers), DRAFTS[num_nodes]
    drafter = DRAFTERS["moa"].make(PAPER.drafter, cfg) if shape.num_drafted else None
    return StaticConfig(cfg, drafter, shape)


def engine_program(setup: StaticConfig, rows: int, batch: int) -> tuple[HloModule, Any]:
    """Compiles a decode call of an engine with six slots; the drafter lags in every slot."""
    setup, weights = setup._replace(catches_up=setup.drafter is not None), abstract_weights(setup)
    empty = functools.partial(device_ops.empty, setup, slots=6, rows=rows)
    state, _ = jax.eval_shape(empty, weights)
    settings = row_settings(Sampling(), 0, 0, (), setup.target.vocab_size)
    rows = (np.zeros(batch, np.int32), np.zeros(batch, bool), joined([settings] * batch, False))
    decode = functools.partial(device_ops.decode, setup)
    given = (weights, state, device_ops.DecodeInput(*rows, np.int32(0)))
    how = {"donate": (1,), "drafts": setup.shape.num_drafted > 0}
    return compile_for(devices(H200)[0], decode, *given, **how), weights


def branches(text: str) -> list[str]:
    """Returns the opcodes of all loops and conditionals of a module, at any depth."""
    blocks = [block for name, block in parse(text).items() if name != ENTRY]
    every = [each.opcode for block in blocks for each in block.values()]
    return sorted(opcode for opcode in every if opcode in ("while", "conditional"))


def widened(text: str) -> list[tuple[str, int]]:
    """Returns results in a loop of at least half the smallest matrix; no activation is so large."""
    made = [each for _, each, _, in_loop in executed(parse(text)) if in_loop]
    smallest = LLAMA.block.hidden_size**2  # bytes of a matrix of eight bits
    skipped = FREE | FOLLOWED
    return [(x.name, x.size) for x in made if x.opcode not in skipped and x.size >= smallest // 2]


def report(kind: str, num_nodes: int, cache_rows: int, weights: str = "bfloat16") -> dict[str, Any]:
    """Returns the moves, branches and memory of the loop of a compiled program.

    A kind is `pair`, `prefill`, `slot` or `slots` (one row or four of six slots of an engine).
    """
    setup = pair_of(num_nodes, 2 if kind == "prefill" else LAYERS)
    if kind in ("slot", "slots"):
        program, held = engine_program(setup, cache_rows, 1 if kind == "slot" else 4)
    else:
        held, (device,) = abstract_weights(setup, weights), devices(H200)
        compile = compile_prefill if kind == "prefill" else compile_decode
        program = compile(device, setup, held, cache_rows)
    rounds = [each for each in kernels(program.hlo) if each.in_loop]
    read: Counter[str] = Counter()
    for each in products(program.jaxpr, Shares()):
        read[phase_of(each.label)] += round(each.times * each.bytes * each.in_loop)
    return {
        "read": read,
        "moves": large_moves(program.hlo),
        "widened": widened(program.hlo),
        "launches": sum(each.times for each in rounds),
        "products": sum(each.is_product for each in rounds),
        "branches": branches(program.hlo),
        "temp": program.temp_bytes,
        "weights": num_bytes(held),
    }


def level_and_target(rows: int) -> tuple[int, int]:
    """Returns the numbers that one level of the paper's drafter and one pass of the target read."""
    D, E, head = 4096, 128, 4096 * 128_256
    block = lambda kv, inner: D * (32 + 2 * kv) * E + 32 * E * D + 3 * D * inner
    level = 2 * block(4, 6144) + head + 2 * 2 * 4 * E * rows
    return level, LAYERS * block(8, 14_336) + head + LAYERS * 2 * 8 * E * rows


# Launches of a round with four layers; removed launches must not return.
LAUNCHES = {1: 80, 8: 260, 63: 280}


@pytest.mark.slow
@needs["cuda"]
@pytest.mark.parametrize("num_nodes", DRAFTS, ids=["plain", "chain", "tree"])
def test_decoding_moves_no_weight_and_no_cache(num_nodes):
    """Nothing of 2 MiB is moved; temporary memory is under 10 % of the weights of the few layers.

    The loop of rounds is the only loop: within a round, the GPU does not wait for the host.
    """
    rows = session_rows(num_nodes)
    facts = in_child(report, "pair", num_nodes, rows)
    assert facts["moves"] == [] and facts["branches"] == ["while"]
    assert facts["temp"] < 0.1 * facts["weights"]
    assert facts["products"] > 4 * LAYERS  # `products` covers a whole round
    assert facts["launches"] <= LAUNCHES[num_nodes]
    # Activations are the rest, most of them logits and hidden states of a tree's 63 nodes.
    level, target = level_and_target(rows)
    assert 0.999 < facts["read"]["verify"] / (2 * target) < 1.12
    # A level reads no weights of the memory's keys and values: `extend` reads them.
    passes = {1: 0, 8: 7, 63: 6}[num_nodes]
    drafted = facts["read"].get("draft", 0)
    assert 0.99 * 2 * passes * level <= drafted < 1.03 * 2 * passes * level + 1


@pytest.mark.slow
@needs["cuda"]
@pytest.mark.parametrize(
    "num_nodes, kind",
    [
        pytest.param(1, "slot", id="plain"),
        pytest.param(63, "slots", id="tree"),
    ],
)
def test_an_engine_decodes_in_its_slots(num_nodes, kind):
    """No cache of a slot is moved into the batch or back, and a round launches no extra kernels.

    Lagging drafters read streams of the rows in the batch. A call gathers these streams once, so a
    round has no branch.
    """
    rows = 512
    facts = in_child(report, kind, num_nodes, rows)
    cache = 2 * 8 * 128 * rows
    assert [size for _, _, size, _, _ in facts["moves"] if size >= cache] == []
    assert facts["branches"] == ["while"]
    assert facts["temp"] < 0.1 * facts["weights"]
    assert facts["launches"] <= LAUNCHES[num_nodes] + 10


@pytest.mark.slow
@needs["cuda"]
def test_reading_a_prompt_takes_the_memory_of_a_chunk():
    """Only the caches grow with the prompt: attention scores are not stored outside the kernels."""
    small, large = (in_child(report, "prefill", 8, rows)["temp"] for rows in (8192, 131_072))
    assert small < 128 << 20 and large < small + (16 << 20)


# ---- weights of eight bits ----------------------------------------------------------------


def test_a_matrix_that_is_widened_is_noticed():
    wide = "bf16[4096,4096]{1,0}"
    args = fused(f"ROOT %r = {wide} multiply(%p.0, %p.0)", "%w", gives=wide)
    assert widened(module(*args)) == [("y", 2 * 4096**2)]


@pytest.mark.slow
@needs["cuda"]
@pytest.mark.parametrize("num_nodes, weights", [(1, "fp8"), (8, "int8")])
def test_no_matrix_is_widened_in_memory(num_nodes, weights):
    facts = in_child(report, "pair", num_nodes, session_rows(num_nodes), weights)
    assert facts["moves"] == facts["widened"] == []
    assert facts["temp"] < 0.01 * facts["weights"]
