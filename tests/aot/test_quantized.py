"""Decoding with weights of eight bits reads eight bits: no matrix is widened in memory."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from configs.moa_llama3_8b import config as PAPER
from infer.bench.plan import hlo
from infer.bench.plan.lowering import abstract_weights, compile_decode, num_bytes
from infer.bench.plan.machines import devices
from moa_jax.decode.state import StaticConfig
from moa_jax.drafters import DRAFTERS
from moa_jax.model import quantize
from tests.aot.compiling import in_child, needs
from tests.aot.test_lowering import DRAFTS, H200, LLAMA, session_rows

EIGHT = {"int8": jnp.int8, "fp8": jnp.float8_e4m3fn}
SMALLEST = LLAMA.block.hidden_size**2  # bytes of a matrix: what goes out of attention
TWO = dataclasses.replace(LLAMA, num_layers=2)


def setup_of(num_nodes: int) -> StaticConfig:
    shape = DRAFTS[num_nodes]
    drafter = DRAFTERS["moa"].make(PAPER.drafter, TWO) if shape.num_drafted else None
    return StaticConfig(TWO, drafter, shape)


def widened(text: str) -> list[tuple[str, int]]:
    """What a loop makes that is as large as half the smallest matrix: no activations, no caches."""
    made = [each for _, each, _, in_loop in hlo.executed(hlo.parse(text)) if in_loop]
    skipped = hlo.FREE | hlo.FOLLOWED
    return [(x.name, x.size) for x in made if x.opcode not in skipped and x.size >= SMALLEST // 2]


def report(num_nodes: int, weights: str, widens: bool = False) -> dict[str, Any]:
    """What two layers of Llama-3-8B with the paper's drafter move.

    With `widens`, the control, each kernel is widened before it is multiplied.
    """
    setup = setup_of(num_nodes)
    held = abstract_weights(setup, weights)
    if widens:
        product = quantize.matmul

        def apart(x, kernel, dtype):
            wide = jax.lax.optimization_barrier(kernel.values.astype(x.dtype))
            return product(x, kernel._replace(values=wide), dtype)

        quantize.matmul = apart
    program = compile_decode(devices(H200)[0], setup, held, session_rows(num_nodes))
    return {
        "moves": hlo.large_moves(program.hlo),
        "widened": widened(program.hlo),
        "temp": program.temp_bytes,
        "weights": num_bytes(held),
    }


@pytest.mark.parametrize("weights", quantize.FORMATS)
def test_eight_bits_are_half_of_sixteen(weights):
    """Scales and what is not quantised, the norms and a bias, are less than 1 % of the rest."""
    setup = setup_of(8)
    found = num_bytes(abstract_weights(setup, weights=weights))
    assert 0.5 < found / num_bytes(abstract_weights(setup)) < 0.505
    leaves = jax.tree.leaves(abstract_weights(setup, weights))
    kinds = {jnp.dtype(kind) for kind in (jnp.bfloat16, jnp.float32, EIGHT[weights])}
    assert jnp.dtype(EIGHT[weights]) in {leaf.dtype for leaf in leaves} <= kinds


@pytest.mark.slow
@needs["cuda"]
@pytest.mark.parametrize("num_nodes, weights", [(1, "fp8"), (8, "int8")])
def test_no_matrix_is_widened_in_memory(num_nodes, weights):
    facts = in_child(report, num_nodes, weights)
    assert facts["moves"] == facts["widened"] == []
    assert facts["temp"] < 0.01 * facts["weights"]


@pytest.mark.slow
@needs["cuda"]
def test_a_matrix_that_is_widened_is_noticed():
    """The control: four products a layer and the head, in bfloat16."""
    facts = in_child(report, 1, "int8", True)
    assert len(facts["widened"]) >= 4 * TWO.num_layers + 1
