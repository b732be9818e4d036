"""Costs of programs: FLOPs of training against a formula, the time of a round, machines."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from configs.tiny import config as TINY
from infer import plan
from infer.bench.plan import decoding
from infer.bench.plan.hlo import LARGE
from infer.bench.plan.lowering import HloModule
from infer.bench.plan.machines import machine
from moa_jax.config import BlockConfig, MoaConfig, TargetConfig
from moa_jax.drafters.moa.blocks import block_configs
from moa_jax.errors import InputError
from moa_jax.training import flops
from tests.aot.test_hlo import W, X, module, of

TARGET = TargetConfig("llama", 72, 3, BlockConfig(32, 4, 2, 8, 48, 1e-5, 1e4, None), False, 64)
MODEL = "meta-llama/Meta-Llama-3-8B-Instruct"


# ---- FLOPs --------------------------------------------------------------------------------


def products(block: BlockConfig) -> int:
    """Multiplications of one token with the weights of a block."""
    D, H, K, E = block.hidden_size, block.num_heads, block.num_kv_heads, block.head_dim
    return D * (H + 2 * K) * E + H * E * D + 3 * D * block.intermediate_size


def scores(block: BlockConfig, seen: float) -> float:
    """Multiplications of one query with `seen` keys and values."""
    return 2 * block.num_heads * block.head_dim * seen


def by_hand(cfg: MoaConfig, length: int) -> float:
    """Returns FLOPs per token: three passes of trained weights, two of frozen ones on the way.

    A token attends to itself and to all tokens before it: half of the row, and half a token.
    """
    block, L, seen = TARGET.block, TARGET.num_layers, (length + 1) / 2
    sa, ca, lsa = block_configs(cfg, TARGET)
    head = block.hidden_size * TARGET.vocab_size
    total = L * (products(block) + scores(block, seen)) + head  # the target's forward
    total += 3 * L * (products(lsa) + scores(lsa, L))
    heads = lsa.num_heads + 2 * lsa.num_kv_heads  # their inputs, the target's, need no gradient
    total -= L * lsa.hidden_size * heads * lsa.head_dim
    total += 3 * TARGET.memory_width * block.hidden_size  # Ekv2E
    total += 3 * (products(sa) + scores(sa, seen) + products(ca) + scores(ca, seen))
    total += cfg.target_layer_inference * (2 * products(block) + 3 * scores(block, seen))
    return 2 * (total + 2 * head)


@pytest.mark.parametrize("length", [24, 1024], ids=["short", "long"])
@pytest.mark.parametrize("reused, on_policy", [(0, False), (2, False), (2, True)])
def test_model_flops_are_those_of_the_formula(reused, on_policy, length):
    """Covers all parts of the keys, and rows whose scores are computed in pieces."""
    cfg = MoaConfig(1, 40, 2, 56, 1, 24, target_layer_inference=reused)
    data = dataclasses.replace(TINY.data, row_length=length)
    masks = dataclasses.replace(TINY.masks, on_policy_reuse=on_policy)
    config = dataclasses.replace(TINY, drafter=cfg, data=data, masks=masks)
    assert flops.model_flops_per_token(config, TARGET) == by_hand(cfg, length)


def test_loops_branches_and_second_forwards_count():
    x = jax.ShapeDtypeStruct((8, 8), jnp.float32)
    once = 2 * 8**3
    square = lambda y: y @ y
    step = lambda y, _: (lax.scan(lambda z, _: (z @ z, None), y, None, length=5)[0], None)
    assert flops.count(lambda x: lax.scan(step, x, None, length=3)[0], x) == 15 * once
    either = lambda x: lax.cond(x[0, 0] > 0, lambda y: y @ y @ y, square, x)
    assert flops.count(either, x) == 2 * once
    deep = lambda x: jnp.sum(jnp.sin(square(jnp.sin(square(x)))))
    assert flops.count(jax.value_and_grad(deep), x) == 6 * once
    assert flops.count(jax.value_and_grad(jax.checkpoint(deep)), x) == 8 * once


# ---- the time of a round ------------------------------------------------------------------


def rounds(x, w):
    """Runs a loop of rounds with one product per round."""

    def one(carry):
        left, x = carry
        with jax.named_scope("verify"):
            return left - 1, (x @ w)[:, :1024]

    return lax.while_loop(lambda carry: carry[0] > 0, one, (jnp.int32(2), x))


def test_products_stored_arrays_and_launches_make_the_time():
    lines = [
        f"%y = {X} dot(%w, %x), {of('verify/')}",
        f"%z = {X} add(%x, %x), {of('draft/')}",
        f"%m = {W} copy(%w), {of('commit/', 'copy')}",
    ]
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 1024), (1024, 1024))]
    program = HloModule(module("\n  ".join(lines)), 1000, jaxpr=jax.make_jaxpr(rounds)(*shapes))
    flags = ("--bandwidth", "0.001", "--launch-us", "3", "--batch", "2")
    request = plan.request_of(plan._parser().parse_args(["--shape", MODEL, *flags]))
    found = decoding.cost(request, program, program)
    phases = {phase.pop("phase"): phase for phase in found["phases"]}
    assert list(phases) == ["draft", "verify", "extend", "commit", "rest", "prefill"]
    read = LARGE + 2 * 1024 * 2
    for name, size in (("draft", 2 * 4096), ("verify", read), ("commit", 2 * LARGE)):
        seconds = size / 1e9 + 3e-6
        assert phases[name] == {"launches": 1, "bytes": size, "ms": pytest.approx(1e3 * seconds)}
    assert phases.pop("prefill")["launches"] > 0  # and is not part of a round
    assert found["round_ms"] == pytest.approx(sum(phase["ms"] for phase in phases.values()))
    assert found["tokens_per_s"] == pytest.approx(2 * 1e3 / found["round_ms"])
    assert found["roofline"] == pytest.approx(2 / (read / 1e9))
    (move,) = found["moves"]
    assert (move["opcode"], move["bytes"], move["phase"]) == ("copy", LARGE, "commit")


# ---- machines -----------------------------------------------------------------------------


MACHINES = {  # shape, and rate of a link
    "v5e:4x4": ((4, 4), 100e9),
    "v5p:2x2x4": ((2, 2, 4), 300e9),
    "v7x:2x2x1": ((2, 2, 1), 150e9),  # of each of a chip's two devices
    "h200:32": ((4, 8), 450e9),
    "b200:8": ((1, 8), 900e9),
}


@pytest.mark.parametrize("topology", MACHINES)
def test_machines_by_name(topology):
    """A TPU at a corner of a slice has half the rate of the data sheet."""
    found, (shape, link) = machine(topology), MACHINES[topology]
    assert (found.num_chips, found.shape, found.chip.link) == (math.prod(shape), shape, link)
    assert 0 < found.chip.flops("float32") < found.chip.flops("bfloat16") < 3e15


@pytest.mark.parametrize(
    "topology", ["v5e:4", "v9:4x4", "h200:2x4", "v5e:0x4", "h200:12", "2xv5e:4x4"]
)
def test_no_such_machine(topology):
    with pytest.raises(InputError, match="v5e:4x4 or h200:8|multiple of 8"):
        machine(topology)
