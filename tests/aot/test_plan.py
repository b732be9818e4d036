"""train.plan reads off a program: FLOPs against a formula, and collectives."""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
import pytest
from jax import lax

from configs.tiny import config as TINY
from infer.bench.plan import hlo
from infer.bench.plan.machines import machine
from moa_jax.config import BlockConfig, MoaConfig, TargetConfig
from moa_jax.drafters.moa.blocks import block_configs
from moa_jax.errors import InputError
from moa_jax.training import flops

TARGET = TargetConfig(
    family="llama",
    vocab_size=72,
    num_layers=3,
    block=BlockConfig(
        hidden_size=32,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        intermediate_size=48,
        rms_norm_eps=1e-5,
        rope_theta=10000.0,
        rope_scaling=None,
    ),
    tie_word_embeddings=False,
    max_position_embeddings=64,
)
LENGTH = 24


# ---- FLOPs --------------------------------------------------------------------------------


def products(block: BlockConfig) -> int:
    """Multiplications of one token with the weights of a block."""
    D, H, K, E = block.hidden_size, block.num_heads, block.num_kv_heads, block.head_dim
    return D * (H + 2 * K) * E + H * E * D + 3 * D * block.intermediate_size


def scores(block: BlockConfig, seen: float) -> float:
    """Multiplications of one query with `seen` keys and values."""
    return 2 * block.num_heads * block.head_dim * seen


def by_hand(cfg: MoaConfig, length: int) -> float:
    """FLOPs of one token: trained weights cost three forward passes, frozen ones on the way two.

    A token sees itself and those before it: half of the row, and half a token.
    """
    block, L, seen = TARGET.block, TARGET.num_layers, (length + 1) / 2
    sa, ca, lsa = block_configs(cfg, TARGET)
    head = block.hidden_size * TARGET.vocab_size
    total = L * (products(block) + scores(block, seen)) + head  # the target's forward
    total += 3 * L * (products(lsa) + scores(lsa, L))
    total += 3 * TARGET.memory_width * block.hidden_size  # Ekv2E
    total += 3 * (products(sa) + scores(sa, seen) + products(ca) + scores(ca, seen))
    total += cfg.target_layer_inference * (2 * products(block) + 3 * scores(block, seen))
    return 2 * (total + 2 * head)


@pytest.mark.parametrize("length", [LENGTH, 1024], ids=["short", "long"])
@pytest.mark.parametrize("reused, on_policy", [(0, False), (2, False), (2, True)])
def test_model_flops_are_those_of_the_formula(reused, on_policy, length):
    """Whatever the parts of keys, and for rows whose scores an einsum makes in pieces."""
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
    assert flops.count(jax.jit(jax.vmap(square)), jax.ShapeDtypeStruct((7, 8, 8), "float32")) == (
        7 * once
    )
    deep = lambda x: jnp.sum(jnp.sin(square(jnp.sin(square(x)))))
    assert flops.count(jax.grad(deep), x) == 6 * once
    assert flops.count(jax.value_and_grad(jax.checkpoint(deep)), x) == 8 * once
    assert flops.count(jax.grad(jax.checkpoint(deep)), x) == 6 * once  # the first is not needed


# ---- collectives --------------------------------------------------------------------------

GPU = """HloModule jit_f

%body (p: (s32[], bf16[4,8])) -> (s32[], bf16[4,8]) {
  %p = (s32[], bf16[4,8]{1,0}) parameter(0)
  %x = bf16[4,8]{1,0} get-tuple-element(%p), index=1
  %s = (bf16[4,8]{1,0}, bf16[16,8]{1,0}) all-gather-start(%x), channel_id=1, dimensions={0}
  %d = bf16[16,8]{1,0} all-gather-done(%s)
  %t = ((bf16[4,8]{1,0}, bf16[4,8]{1,0}), (bf16[1,8]{1,0}, bf16[1,8]{1,0})) reduce-scatter-start(%x, %x), channel_id=2, to_apply=%add
  %e = (bf16[1,8]{1,0}, bf16[1,8]{1,0}) reduce-scatter-done(%t)
  ROOT %r = (s32[], bf16[4,8]{1,0}) tuple(%i, %x)
}

%cond (p.1: (s32[], bf16[4,8])) -> pred[] {
  %p.1 = (s32[], bf16[4,8]{1,0}) parameter(0)
  ROOT %c = pred[] custom-call(%p.1)
}

ENTRY %main (a: bf16[4,8]) -> bf16[4,8] {
  %a = bf16[4,8]{1,0} parameter(0)
  %w = (s32[], bf16[4,8]{1,0}) while(%a), condition=%cond, body=%body, backend_config={"known_trip_count":{"n":"6"}}
  %ar = f32[10]{0} all-reduce(%small), channel_id=3, to_apply=%add
  %small = f32[10]{0} convert(%a)
  %aa = (f32[10]{0}, f32[10]{0}) all-to-all(%small, %small), channel_id=4
  ROOT %o = bf16[4,8]{1,0} get-tuple-element(%w), index=1
}
"""  # noqa: E501


def totals(text: str) -> dict[str, tuple[int, int]]:
    """Collectives of a program and the bytes that each chip receives, by kind."""
    kinds = hlo.collectives(text)
    return {kind: (each["count"], each["bytes"]) for kind, each in kinds.items()}


def test_collectives_of_a_gpu_program():
    assert totals(GPU) == {
        "all-gather": (6, 6 * (16 - 4) * 8 * 2),
        "reduce-scatter": (6, 6 * 2 * (4 - 1) * 8 * 2),
        "all-reduce": (1, 40),
        "all-to-all": (1, 40),
    }


def test_loops_of_unknown_length_count_once():
    text = GPU.replace("known_trip_count", "other")
    assert totals(text)["all-gather"][0] == 1


def test_collectives_of_loops_alone():
    assert hlo.collectives(GPU, in_loop=True).keys() == {"all-gather", "reduce-scatter"}


def test_collectives_take_the_time_of_their_bytes_and_a_latency_each():
    h200 = machine("h200:8")
    kinds = {"all-reduce": {"count": 3, "bytes": 450_000}, "all-gather": {"count": 1, "bytes": 0}}
    assert h200.links_s(kinds) == pytest.approx(1e-6 + 4 * h200.chip.latency)
    assert h200.links_s({}) == 0


SCATTER = """HloModule jit_f

%all-reduce-scatter.2 (input: bf16[2,16]) -> bf16[17,1] {
  %input = bf16[2,16]{1,0} parameter(0)
  %pad = bf16[34,1]{1,0} pad(%input, %zero), padding=0_2x0_0
  %ar = bf16[34,1]{1,0} all-reduce(%pad), channel_id=7, to_apply=%add
  ROOT %part = bf16[17,1]{1,0} dynamic-slice(%ar, %here), dynamic_slice_sizes={17,1}
}

ENTRY %main (a: bf16[2,16]) -> bf16[17,1] {
  %a = bf16[2,16]{1,0} parameter(0)
  ROOT %f = bf16[17,1]{1,0} fusion(%a), kind=kCustom, calls=%all-reduce-scatter.2
}
"""


def test_a_sum_of_which_each_chip_keeps_a_part_is_no_all_reduce():
    assert totals(SCATTER) == {"reduce-scatter": (1, 17 * 2)}


# An all-gather that libtpu spread over its start and the body of an inner loop, which takes two
# steps a turn as libtpu's windowed loops do.
TPU = """HloModule jit_f

%start (q: f32[2,8]) -> (f32[2,8], f32[8,8]) {
  %q = f32[2,8]{1,0} parameter(0)
  %g.1 = f32[8,8]{1,0} all-gather(%q), channel_id=9, dimensions={0}
  ROOT %k = (f32[2,8], f32[8,8]) custom-call(%g.1), custom_call_target="AsyncCollectiveStart"
}

%overlapped (q.2: f32[2,8]) -> f32[8,8] {
  %q.2 = f32[2,8]{1,0} parameter(0)
  ROOT %g.2 = f32[8,8]{1,0} all-gather(%q.2), channel_id=9, dimensions={0}
}

%inner (b: (f32[2,8], u32[])) -> (f32[2,8], u32[]) {
  %b = (f32[2,8]{1,0}, u32[]{:T(128)}) parameter(0)
  %x = f32[2,8]{1,0} get-tuple-element(%b), index=0
  %f.2 = f32[8,8]{1,0} fusion(%x), kind=kCustom, calls=%overlapped
  %cp = f32[2,8]{1,0} collective-permute(%x), channel_id=11, source_target_pairs={{0,1}}
  %i = u32[]{:T(128)} get-tuple-element(%b), index=1
  %two = u32[]{:T(128)} constant(2)
  %next = u32[]{:T(128)} add(%i, %two)
  ROOT %r = (f32[2,8]{1,0}, u32[]{:T(128)}) tuple(%cp, %next)
}

%few (b.1: (f32[2,8], u32[])) -> pred[] {
  %b.1 = (f32[2,8]{1,0}, u32[]{:T(128)}) parameter(0)
  %i.1 = u32[]{:T(128)} get-tuple-element(%b.1), index=1
  %ten = u32[]{:T(128)} constant(10)
  ROOT %less = pred[]{:T(512)} compare(%i.1, %ten), direction=LT
}

%outer (b.2: (s32[], f32[2,8])) -> (s32[], f32[2,8]) {
  %b.2 = (s32[]{:T(128)}, f32[2,8]{1,0}) parameter(0)
  %j.2 = s32[]{:T(128)} get-tuple-element(%b.2), index=0
  %x.2 = f32[2,8]{1,0} get-tuple-element(%b.2), index=1
  %f.1 = (f32[2,8], f32[8,8]) fusion(%x.2), kind=kCustom, calls=%start
  %none = u32[]{:T(128)} constant(0)
  %none.1 = u32[]{:T(128)} copy(%none)
  %t.2 = (f32[2,8]{1,0}, u32[]{:T(128)}) tuple(%x.2, %none.1)
  %w.1 = (f32[2,8]{1,0}, u32[]{:T(128)}) while(%t.2), condition=%few, body=%inner
  %y.2 = f32[2,8]{1,0} get-tuple-element(%w.1), index=0
  %one = s32[]{:T(128)} constant(1)
  %next.2 = s32[]{:T(128)} add(%j.2, %one)
  ROOT %r.2 = (s32[]{:T(128)}, f32[2,8]{1,0}) tuple(%next.2, %y.2)
}

%many (b.3: (s32[], f32[2,8])) -> pred[] {
  %b.3 = (s32[]{:T(128)}, f32[2,8]{1,0}) parameter(0)
  %j.3 = s32[]{:T(128)} get-tuple-element(%b.3), index=0
  %limit = s32[]{:T(128)} constant(32)
  ROOT %less.1 = pred[]{:T(512)} compare(%j.3, %limit), direction=LT
}

ENTRY %main (a: f32[2,8]) -> f32[2,8] {
  %a = f32[2,8]{1,0} parameter(0)
  %zero = s32[]{:T(128)} constant(0)
  %t = (s32[]{:T(128)}, f32[2,8]{1,0}) tuple(%zero, %a)
  %w = (s32[]{:T(128)}, f32[2,8]{1,0}) while(%t), condition=%many, body=%outer
  ROOT %x.3 = f32[2,8]{1,0} get-tuple-element(%w), index=1
}
"""


def test_collectives_of_a_tpu_program():
    assert totals(TPU) == {
        "all-gather": (32, 32 * (8 - 2) * 8 * 4),
        "collective-permute": (160, 160 * 2 * 8 * 4),
    }


FIRST, NEXT = "%none = u32[]{:T(128)} constant(0)", "%next = u32[]{:T(128)} add("
ENDS, LESS = "%ten = u32[]{:T(128)} constant(10)", "compare(%i.1, %ten), direction=LT"


@pytest.mark.parametrize(
    "old, new, turns",
    [
        (ENDS, ENDS.replace("10", "9"), 5),
        (ENDS, ENDS.replace("10", "8"), 4),
        (FIRST, FIRST.replace("0)", "5)"), 3),
        (FIRST, FIRST.replace("0)", "-3)"), 7),
        (FIRST, FIRST.replace("constant(0)", "parameter(1)"), 1),
        (NEXT, NEXT.replace("add", "multiply"), 1),
        (LESS, LESS.replace("LT", "GT"), 1),
        (LESS, "custom-call(%i.1)", 1),
    ],
)
def test_loops_count_as_they_run(old, new, turns):
    """A counter goes from a constant to below another; other loops count once."""
    assert TPU.count(old) == 1
    assert totals(TPU.replace(old, new))["collective-permute"][0] == 32 * turns


# ---- machines -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "topology, chips, shape",
    [
        ("v5e:4x4", 16, (4, 4)),
        ("v5p:2x2x4", 16, (2, 2, 4)),
        ("h200:1", 1, (1, 1)),
        ("h200:32", 32, (4, 8)),
    ],
)
def test_machines_by_name(topology, chips, shape):
    found = machine(topology)
    assert (found.num_chips, found.shape) == (chips, shape)
    assert 0 < found.chip.flops("float32") < found.chip.flops("bfloat16") < 1e15


def test_a_tpu_at_a_corner_has_half_the_rate_of_the_data_sheet():
    rates = [machine(name).chip.link for name in ("v5e:4x4", "v5p:4x4x4", "v6e:8x8", "h200:8")]
    assert rates == [200e9 / 2, 600e9 / 2, 448e9 / 2, 450e9]


@pytest.mark.parametrize("topology", ["v5e", "v5e:4", "v9:4x4", "h200", "h200:2x4", "v5e:0x4"])
def test_no_such_machine(topology):
    with pytest.raises(InputError, match="v5e:4x4 or h200:8"):
        machine(topology)


def test_hosts_are_whole():
    with pytest.raises(InputError, match="multiple of 8"):
        machine("h200:12")
