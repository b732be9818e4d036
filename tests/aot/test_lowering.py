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
from infer.bench.plan import lowering
from infer.bench.plan.decoding import phase_of
from infer.bench.plan.hlo import ENTRY, FOLLOWED, FREE, executed, kernels, large_moves, parse
from infer.bench.plan.lowering import HloModule, abstract_weights
from infer.bench.plan.machines import devices, machine
from moa_jax.config import DraftShape, Sampling, TargetConfig
from moa_jax.decode.limits import CacheLimits
from moa_jax.decode.row_settings import joined, row_settings
from moa_jax.decode.state import StaticConfig, Weights
from moa_jax.drafters import DRAFTERS
from moa_jax.engine import device_ops
from moa_jax.model.quantize import Quantized
from tests.aot.compiling import in_child, needs

H200 = machine("h200:1")
LLAMA, QWEN3 = SHAPES["meta-llama/Meta-Llama-3-8B-Instruct"], SHAPES["Qwen/Qwen3-30B-A3B"]
GEMMA3 = SHAPES["google/gemma-3-27b-it"]
GEMMA3 = dataclasses.replace(GEMMA3, num_layers=2, sliding_windows=(1024, 0))
LAYERS = 4  # layers of the target in compiled programs
DRAFTS = {1: DraftShape(1), 8: DraftShape(8), 63: DraftShape(7, 8, 62)}
PROMPT, ANSWER = 1000, 1000  # tokens


def session_rows(num_nodes: int) -> int:
    """Returns the number of cache rows that `Session` allocates."""
    draft_rows = DRAFTS[num_nodes].num_rows
    return CacheLimits(LLAMA.max_position_embeddings, None, draft_rows).rows_for(PROMPT + ANSWER)


def pair_of(num_nodes: int, num_layers: int = LAYERS, cfg: TargetConfig = LLAMA) -> StaticConfig:
    """Returns a pair, the 8B one by default, with a few layers, in bfloat16."""
    cfg, shape = dataclasses.replace(cfg, num_layers=num_layers), DRAFTS[num_nodes]
    drafter = DRAFTERS["moa"].make(PAPER.drafter, cfg) if shape.num_drafted else None
    return StaticConfig(cfg, drafter, shape)


def engine_program(
    setup: StaticConfig, rows: int, batch: int = 4, topology: str = H200.name
) -> tuple[HloModule, Any]:
    """Compiles a decode call of an engine with six slots; the drafter lags in every slot."""
    setup, weights = setup._replace(catches_up=setup.drafter is not None), abstract_weights(setup)
    empty = functools.partial(device_ops.empty, setup, slots=6, rows=rows)
    state, _ = jax.eval_shape(empty, weights)
    settings = row_settings(Sampling(), 0, 0, (), setup.target.vocab_size)
    rows = (np.zeros(batch, np.int32), np.zeros(batch, bool), joined([settings] * batch, False))
    decode = functools.partial(device_ops.decode, setup)
    given = (weights, state, device_ops.DecodeInput(*rows, np.int32(0)))
    how = {"donate": (1,), "drafts": setup.shape.num_drafted > 0}
    return lowering.compile_for(devices(machine(topology))[0], decode, *given, **how), weights


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


def in_groups(weights: Weights, size: int) -> Weights:
    """Returns shapes in which groups of inputs have scales in all layers."""
    shape = lambda leaf: (leaf.shape[0] // size, *leaf.shape[1:])
    scale = lambda leaf: jax.ShapeDtypeStruct(shape(leaf), leaf.dtype)
    is_matrix = lambda leaf: isinstance(leaf, Quantized)
    of = lambda leaf: leaf._replace(scale=scale(leaf)) if is_matrix(leaf) else leaf
    layers = jax.tree.map(of, weights.target["layers"], is_leaf=is_matrix)
    return weights._replace(target=weights.target | {"layers": layers})


def report(
    kind: str, num_nodes: int, cache_rows: int, weights: str = "bfloat16", topology: str = "h200:1"
) -> dict[str, Any]:
    """Returns the moves, branches and memory of the loop of a compiled program.

    A kind is `pair`, `prefill`, `slot` or `slots` (one row or four of six slots of an engine), or
    `experts`, `windows` or `rings` (four slots), other targets. Weights as int8/128 have scales of
    groups.
    """
    cfg = {"experts": QWEN3, "windows": GEMMA3, "rings": GEMMA3}.get(kind, LLAMA)
    is_small = kind in ("prefill", "windows") or topology != H200.name
    setup = pair_of(num_nodes, 2 if is_small else LAYERS, cfg)
    if kind in ("slot", "slots", "rings"):
        setup = setup._replace(ahead=552)  # of chunks of 512 tokens
        batch = 1 if kind == "slot" else 4
        program, held = engine_program(setup, cache_rows, batch, topology)
    else:
        weights, *groups = weights.split("/")
        held, (device,) = abstract_weights(setup, weights), devices(machine(topology))
        held = in_groups(held, int(groups[0])) if groups else held
        compile = lowering.compile_prefill if kind == "prefill" else lowering.compile_decode
        program = compile(device, setup, held, cache_rows)
    rounds = [each for each in kernels(program.hlo) if each.in_loop]
    read: Counter[str] = Counter()
    for each in lowering.products(program.jaxpr, lowering.Shares()):
        read[phase_of(each.label)] += round(each.times * each.bytes * each.in_loop)
    return {
        "read": read,
        "moves": large_moves(program.hlo),
        "widened": widened(program.hlo),
        "launches": sum(each.times for each in rounds),
        "products": sum(each.is_product for each in rounds),
        "branches": branches(program.hlo),
        "temp": program.temp_bytes,
        "weights": lowering.num_bytes(held),
    }


def level_and_target(rows: int) -> tuple[int, int]:
    """Returns the numbers that one level of the paper's drafter and one pass of the target read."""
    D, E, head = 4096, 128, 4096 * 128_256
    block = lambda kv, inner: D * (32 + 2 * kv) * E + 32 * E * D + 3 * D * inner
    level = 2 * block(4, 6144) + head + 2 * 2 * 4 * E * rows
    return level, LAYERS * block(8, 14_336) + head + LAYERS * 2 * 8 * E * rows


# Launches of a round with four layers; removed launches must not return.
LAUNCHES = {1: 80, 63: 280}


@pytest.mark.slow
@needs["cuda"]
@pytest.mark.parametrize("num_nodes", LAUNCHES, ids=["plain", "tree"])
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
    passes = {1: 0, 63: 6}[num_nodes]
    drafted = facts["read"].get("draft", 0)
    assert 0.99 * 2 * passes * level <= drafted < 1.03 * 2 * passes * level + 1


@pytest.mark.slow
@needs["cuda"]
def test_an_engine_decodes_in_its_slots():
    """No cache of a slot is moved into the batch or back, and a round launches no extra kernels.

    Lagging drafters read streams of the rows in the batch. A call gathers these streams once, so a
    round has no branch.
    """
    rows = 512
    facts = in_child(report, "slots", 63, rows)
    cache = 2 * 8 * 128 * rows
    assert [size for _, _, size, _, _ in facts["moves"] if size >= cache] == []
    assert facts["branches"] == ["while"]
    assert facts["temp"] < 0.1 * facts["weights"]
    assert facts["launches"] <= LAUNCHES[63] + 10


@pytest.mark.slow
@needs["cuda"]
def test_reading_a_prompt_takes_the_memory_of_a_chunk():
    """Only the caches grow with the prompt: attention scores are not stored outside the kernels."""
    small, large = (in_child(report, "prefill", 8, rows)["temp"] for rows in (8192, 131_072))
    assert small < 128 << 20 and large < small + (16 << 20)


# ---- weights of eight bits ----------------------------------------------------------------


@pytest.mark.slow
@needs["cuda"]
@pytest.mark.parametrize(
    "kind, num_nodes, weights",
    [("pair", 1, "fp8"), ("pair", 8, "int8"), ("pair", 1, "int8/128"), ("experts", 1, "int8")],
)
def test_no_matrix_is_widened_in_memory(kind, num_nodes, weights):
    """Nor are experts gathered in memory."""
    facts = in_child(report, kind, num_nodes, session_rows(num_nodes), weights)
    assert facts["moves"] == facts["widened"] == []
    assert facts["temp"] < 0.01 * facts["weights"]


@pytest.mark.slow
@needs["tpu"]
@pytest.mark.parametrize("kind", ["windows", "experts"])
def test_a_tpu_decodes_with_windows_and_with_experts(kind):
    """Nothing larger than a cache is moved, and nothing is laid out anew before the first round."""
    facts = in_child(report, kind, 1, 2048, "bfloat16", "v6e:1x1")
    assert [size for _, _, size, _, _ in facts["moves"] if size > 2048 * 16 * 128 * 2] == []
    assert facts["temp"] < 0.02 * facts["weights"]


@pytest.mark.slow
@needs["tpu"]
def test_a_tpu_writes_to_caches_of_slots_in_place():
    """Six slots have a ring of 1664 rows in one layer, and 4096 rows in the other."""
    facts = in_child(report, "rings", 1, 4096, "bfloat16", "v6e:1x1")
    assert [size for _, _, size, _, _ in facts["moves"] if size > 1664 * 16 * 128 * 2] == []
