"""What infer.plan reads off a program: what kernels read and write, by hand, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from infer import plan
from infer.bench.plan import decoding, hlo, lowering
from infer.bench.plan.hlo import LARGE, Kernel
from infer.bench.plan.lowering import Cost, HloModule
from infer.bench.plan.machines import machine
from moa_jax.decode.state import StaticConfig
from moa_jax.errors import InputError
from moa_jax.pretrained import functions_of

MODEL = "meta-llama/Meta-Llama-3-8B-Instruct"
PAPER = "configs/moa_llama3_8b.py"
ROOT = Path(__file__).resolve().parents[2]

# ---- kernels of a round -------------------------------------------------------------------

W = "bf16[1024,1024]{1,0}"  # a weight: 2 MiB
C = "bf16[8,128,64]{2,1,0}"  # a cache: 8 heads, 128 rows, 128 KiB
X = "f32[1024]{0}"  # 4 KiB
STATE = f"({W}, {C}, {X}, s32[])"
CACHE_BYTES = 8 * 128 * 64 * 2


def of(scope: str, primitive: str = "dot_general") -> str:
    return f'metadata={{op_name="jit(decode)/while/body/{scope}{primitive}"}}'


def module(body: str, computations: str = "", result: str = "%w, %c, %x, %i") -> str:
    """A decode program whose round runs `body` on weight %w, cache %c, activation %x, number %i."""
    return f"""HloModule jit_decode, is_scheduled=true

{computations}

%body (arg: {STATE}) -> {STATE} {{
  %arg = {STATE} parameter(0)
  %w = {W} get-tuple-element(%arg), index=0
  %c = {C} get-tuple-element(%arg), index=1
  %x = {X} get-tuple-element(%arg), index=2
  %i = s32[] get-tuple-element(%arg), index=3
  {body}
  ROOT %result = {STATE} tuple({result})
}}

%turns (arg.1: {STATE}) -> pred[] {{
  %arg.1 = {STATE} parameter(0)
  %flag = {X} get-tuple-element(%arg.1), index=2
  ROOT %more = pred[] custom-call(%flag), custom_call_target="done", {of("", "and")}
}}

ENTRY %main (a: {W}, b: {C}, d: {X}, e: s32[]) -> {X} {{
  %d = {X} parameter(2), metadata={{op_name="state.tokens_BC"}}
  %a = {W} parameter(0), metadata={{op_name="weights.target[\\'lm_head\\']"}}
  %b = {C} parameter(1), metadata={{op_name="state.now.target_caches[0].k_BKSE"}}
  %e = s32[] parameter(3), metadata={{op_name="limits.pause"}}
  %bb = {C} copy(%b)
  %start = {STATE} tuple(%a, %bb, %d, %e)
  %loop = {STATE} while(%start), condition=%turns, body=%body
  ROOT %out = {X} get-tuple-element(%loop), index=2
}}
"""


def round_of(*args: str) -> list[Kernel]:
    """The kernels of a round without the condition's, in the order of the program."""
    found = [kernel for kernel in hlo.kernels(module(*args)) if kernel.in_loop]
    assert sum(kernel.label.endswith("/and") for kernel in found) == 1
    return [kernel for kernel in found if not kernel.label.endswith("/and")]


def fused(inside: str, *operands: tuple[str, str], gives: str, scope: str = "verify/") -> tuple:
    """A round of one fusion, which takes `operands` (name, shape) and gives a shape."""
    named = [(name, shape, f"%p.{index}") for index, (name, shape) in enumerate(operands)]
    lines = "\n  ".join(
        f"{inner} = {shape} parameter({index})" for index, (_, shape, inner) in enumerate(named)
    )
    heads = ", ".join(f"{inner[1:]}: {shape}" for _, shape, inner in named)
    computation = f"%f ({heads}) -> {gives} {{\n  {lines}\n  {inside}\n}}"
    names = ", ".join(name for name, _, _ in named)
    return f"%y = {gives} fusion({names}), kind=kLoop, calls=%f, {of(scope)}", computation


def moved(*args: str) -> int:
    (kernel,) = round_of(*args)
    return kernel.bytes


def test_a_kernel_reads_its_operands_and_writes_its_results():
    inside = "%q = bf16[1024]{0} convert(%p.1)\n  ROOT %r = f32[1024]{0} dot(%p.0, %q), "
    inside += "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    (kernel,) = round_of(*fused(inside, ("%w", W), ("%x", X), gives=X))
    assert (kernel.bytes, kernel.flops, kernel.times) == (LARGE + 2 * 4096, 2 * 1024**2, 1)
    assert decoding.phase_of(kernel.label) == "verify"


def test_a_slice_and_a_gather_read_their_part():
    cut = "%s = bf16[8,16,64]{2,1,0} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={8,16,64}\n  "
    cut += f"ROOT %r = {X} custom-call(%s)"
    rest = 4 + 4096
    assert moved(*fused(cut, ("%c", C), ("%i", "s32[]"), gives=X)) == CACHE_BYTES // 8 + rest
    wide = cut.replace("(%p.0,", "(%wide,")
    wide = "%wide = f16[8,128,64]{2,1,0} convert(%p.0)\n  " + wide
    assert moved(*fused(wide, ("%c", C), ("%i", "s32[]"), gives=X)) == CACHE_BYTES // 8 + rest
    both = cut.replace("custom-call(%s)", "custom-call(%s, %p.0)")
    assert moved(*fused(both, ("%c", C), ("%i", "s32[]"), gives=X)) == CACHE_BYTES + rest
    rows = "%g = bf16[8,1024]{1,0} gather(%w, %x), slice_sizes={1,1024}, " + of("draft/")
    assert moved(rows) == 8 * 2048 + 4096 + 8 * 2048


UPDATE = "dynamic-update-slice(%p.0, %n, %p.2)"


@pytest.mark.parametrize(
    "inside",
    [
        f"ROOT %r = {C} {UPDATE}",
        f"%u = {C} {UPDATE}\n  ROOT %r = {C} bitcast(%u)",
        f"%z = {C} bitcast(%p.0)\n  ROOT %r = {C} {UPDATE.replace('%p.0', '%z')}",
        f"ROOT %r = {C} scatter(%p.0, %p.2, %n), to_apply=%f",
    ],
)
def test_an_update_in_place_costs_the_new_part(inside):
    new = "bf16[8,1,64]{2,1,0}"
    args = fused(
        f"%n = {new} slice(%p.1)\n  {inside}", ("%c", C), ("%x", X), ("%i", "s32[]"), gives=C
    )
    assert moved(*args) == 8 * 64 * 2 + 8 * 64 * 2 + 4
    assert hlo.large_moves(module(*args)) == []


def test_an_update_by_itself_costs_the_new_part():
    new = "bf16[8,1,64]{2,1,0}"
    lines = f"%n = {new} custom-call(%x)\n  %u = {C} dynamic-update-slice(%c, %n, %i)"
    assert round_of(lines)[1].bytes == 2 * 8 * 64 * 2 + 4


def test_an_update_that_is_read_at_once_reads_the_whole():
    inside = f"%n = bf16[8,1,64]{{2,1,0}} slice(%p.1)\n  %u = {C} {UPDATE}\n  "
    inside += f"%s = {X} custom-call(%u)\n  ROOT %r = ({C}, {X}) tuple(%u, %s)"
    args = fused(inside, ("%c", C), ("%x", X), ("%i", "s32[]"), gives=f"({C}, {X})")
    assert moved(*args) == CACHE_BYTES + 2 * 8 * 64 * 2 + 4 + 4096


def test_a_cast_or_moved_weight_is_a_move():
    cast = fused("ROOT %r = f32[1024,1024]{1,0} convert(%p.0)", ("%w", W), gives="f32[1024,1024]")
    (move,) = hlo.large_moves(module(*cast))
    assert (move.opcode, move.bytes, moved(*cast)) == ("convert", 2 * LARGE, 3 * LARGE)
    (move,) = hlo.large_moves(module(f"%y = {W} copy(%w)"))
    assert (move.opcode, move.bytes) == ("copy", LARGE)
    computed = fused(f"ROOT %r = {W} add(%p.0, %p.0)", ("%w", W), gives=W)
    assert hlo.large_moves(module(*computed)) == [] and moved(*computed) == 2 * LARGE
    made = cast[0].replace("(%w)", "(%v)")
    assert hlo.large_moves(module(f"%v = {W} custom-call(%x)\n  {made}", cast[1])) == []


def test_a_copy_to_the_chip_reads_ahead_and_is_no_move():
    near = W.replace("{1,0}", "{1,0:T(8,128)(2,1)S(1)}")
    fetch = f"%s = ({near}, {W}, u32[]{{:S(2)}}) copy-start(%w)\n  %n = {near} copy-done(%s)\n  "
    use = f"%y = {X} custom-call(%n), {of('draft/')}"
    first, second = round_of(fetch + use)
    assert (first.bytes, second.bytes) == (LARGE, 4096)
    assert hlo.large_moves(module(fetch + use)) == []
    assert decoding.phase_of(first.label) == decoding.phase_of(second.label) == "draft"
    back = fetch.replace(f"({near}, {W}", f"({W}, {near}").replace(f"%n = {near}", f"%n = {W}")
    (move,) = hlo.large_moves(module(back))
    assert (move.opcode, move.bytes) == ("copy", LARGE)


def test_a_part_that_is_fetched_ahead_counts_alone():
    row = "bf16[1,1024]{1,0:S(1)}"
    line = f"%s = (({W}), {row}, u32[]{{:S(2)}}) slice-start(%w)\n  %n = {row} slice-done(%s)"
    assert moved(line) == 2048


# ---- phases -------------------------------------------------------------------------------


def test_a_kernel_without_a_label_has_that_of_its_parts_or_of_the_next():
    inside, computation = fused(f"ROOT %r = {X} negate(%p.0), {of('extend/')}", ("%x", X), gives=X)
    lines = [
        inside.partition(", metadata")[0],  # by an instruction inside it
        f"%a = {X} add(%x, %x), {of('draft/', 'add')}",
        f"%h = {X} negate(%x)",  # by the next
        f"%k = {X} add(%h, %i), {of('commit/', 'add')}",
        f"%m = {X} negate(%k), {of('')}",  # without a scope, as its label says
    ]
    found = round_of("\n  ".join(lines), computation)
    phases = ["extend", "draft", "commit", "commit", "rest"]
    assert [decoding.phase_of(kernel.label) for kernel in found] == phases


# ---- loops --------------------------------------------------------------------------------

INNER = f"""%inner (q: {STATE}) -> {STATE} {{
  %q = {STATE} parameter(0)
  %qw = {W} get-tuple-element(%q), index=0
  %qc = {C} get-tuple-element(%q), index=1
  %qx = {X} get-tuple-element(%q), index=2
  %qi = s32[] get-tuple-element(%q), index=3
  %one = s32[] constant(1)
  %y2 = {X} custom-call(%qc)
  %next = s32[] add(%qi, %one)
  ROOT %t = {STATE} tuple(%qw, %qc, %qx, %next)
}}

%until (u: {STATE}) -> pred[] {{
  %u = {STATE} parameter(0)
  %ui = s32[] get-tuple-element(%u), index=3
  %end = s32[] constant(5)
  ROOT %go = pred[] compare(%ui, %end), direction=LT
}}"""


def nested(start: str, attributes: str = "") -> str:
    loop = f"while(%state), condition=%until, body=%inner, {of('draft/', 'while')}{attributes}"
    return f"%s0 = s32[] {start}\n  %state = {STATE} tuple(%w, %c, %x, %s0)\n  %l = {STATE} {loop}"


def test_inner_loops_count_as_often_as_they_turn():
    assert [kernel.times for kernel in round_of(nested("constant(2)"), INNER)] == [3, 3, 3]
    known = ', backend_config={"known_trip_count":{"n":"7"}}'
    first, *found = round_of(nested("custom-call()", known), INNER)
    assert first.times == 1 and {kernel.times for kernel in found} == {7}
    assert max(kernel.bytes for kernel in found) == CACHE_BYTES + 4096


@pytest.mark.parametrize("start, old", [("custom-call()", ""), ("constant(2)", "while(%start)")])
def test_a_program_without_one_round_of_fixed_length_fails_the_plan(start, old):
    text = module(nested(start), INNER)
    text = text.replace(old, "call(%start)") if old else text
    with pytest.raises(InputError, match="[02] loops of unknown length"):
        priced(text, request_for())


# ---- products -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, flops",
    [
        # 8 heads, 4 queries, 64 of a head, 128 rows
        (
            "dot(%q, %c), lhs_batch_dims={0}, lhs_contracting_dims={2}, rhs_batch_dims={0}",
            2 * 8 * 4 * 128 * 64,
        ),
        (
            'custom-call(%q, %c), custom_call_target="__cublas$gemm", backend_config={"d":'
            '{"lhs_contracting_dimensions":["2"],"lhs_batch_dimensions":["0"]}}',
            2 * 8 * 4 * 128 * 64,
        ),
        # libtpu: heads as an axis of the window that is all holes but one
        (
            "convolution(%q, %c), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf",
            2 * 8 * 4 * 128 * 64,
        ),
        # libtpu: the kernel's heads as places in the padding around a single element
        (
            "convolution(%q, %c), window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=b0f_0oi->b0f",
            2 * 8 * 8 * 128 * 64,
        ),
    ],
)
def test_flops_of_a_product(line, flops):
    q = "bf16[8,4,64]{2,1,0}" if "b0f" not in line else "bf16[8,1,64]{2,1,0}"
    out = "f32[8,4,128]{2,1,0}" if "b0f" not in line else "f32[8,8,128]{2,1,0}"
    found = round_of(f"%q = {q} custom-call(%x)\n  %y = {out} {line}")
    assert found[1].flops == flops and found[0].flops == 0


def test_a_sum_of_products_is_a_product():
    inside = "%m = f32[1024,1024]{1,0} multiply(%p.0, %p.0), metadata={}\n  "
    inside += f"ROOT %r = {X} reduce(%m, %p.1), dimensions={{0}}, to_apply=%add, "
    args = fused(inside + of("verify/"), ("%w", W), ("%i", "f32[]"), gives=X)
    (kernel,) = round_of(*args)
    assert kernel.flops == 2 * 1024**2
    (kernel,) = round_of(*(each.replace("dot_general", "reduce_sum") for each in args))
    assert kernel.flops == 0


# ---- Pallas -------------------------------------------------------------------------------

CALL = f"%y = {X} custom-call(%c, %i), custom_call_target=%s, {of('verify/attend/', 'pallas_call')}"
DIMS = ((8, 128, 64), (), (1024,))


@pytest.mark.parametrize("target", ["__gpu$xla.gpu.triton", "tpu_custom_call"])
def test_a_pallas_kernel_costs_what_it_declares(target):
    costs = {("attend", DIMS): Cost(640, CACHE_BYTES + 5000)}
    (kernel,) = round_of(CALL.replace("%s", f'"{target}"'))
    found = decoding.priced(kernel, costs)
    assert (found.bytes, found.flops) == (CACHE_BYTES + 5000, 640)
    found = decoding.priced(kernel, costs, used=0.25)
    assert (found.bytes, found.flops) == ((CACHE_BYTES + 5000) // 4, 160)


def test_other_kernels_read_the_whole_cache_however_little_is_used():
    """Copies for a Pallas kernel among them, which may have its label."""
    (kernel,) = round_of(CALL.replace("%s", '"__gpu$TopK"'))
    assert decoding.priced(kernel, {}, used=0.25).bytes == CACHE_BYTES + 4 + 4096
    call = CALL.replace("%s", '"tpu_custom_call"')
    label = of("verify/attend/", "pallas_call")
    before = f"%a = {C} copy(%c), {label}\n  %b = {C} copy(%a)\n  "
    assert [kernel.pallas for kernel in round_of(before + call)] == ["", "", "attend"]


@pytest.mark.parametrize("known", [{}, {("attend", DIMS): None}])
def test_a_pallas_kernel_that_declares_nothing_is_refused(known):
    (kernel,) = round_of(CALL.replace("%s", '"tpu_custom_call"'))
    with pytest.raises(InputError, match="'attend' declares no cost; give"):
        decoding.priced(kernel, known)


def attend(q, c, n, params=None):
    """A toy of attention over a cache, in a loop, two layers of it."""

    def kernel(q, c, o):
        o[...] = q[...].astype(jnp.float32) @ c[...].astype(jnp.float32).T

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((64, 128), jnp.float32),
        name="toy",
        compiler_params=params,
        cost_estimate=pl.CostEstimate(
            flops=2 * 64 * 128 * 64, bytes_accessed=1 << 16, transcendentals=0
        ),
    )

    def turn(carry):
        left, q, c = carry
        with jax.named_scope("verify"):
            for _ in range(2):
                q = call(q, c)[:, :64].astype(q.dtype)
        return left - 1, q, c

    return jax.lax.while_loop(lambda carry: carry[0] > 0, turn, (n, q, c))


TOY = [
    jax.ShapeDtypeStruct((64, 64), jnp.bfloat16),
    jax.ShapeDtypeStruct((128, 64), jnp.bfloat16),
    jax.ShapeDtypeStruct((), jnp.int32),
]


def test_declared_costs_are_found_wherever_a_kernel_is_called():
    found = lowering.declared(jax.make_jaxpr(jax.jit(attend))(*TOY))
    cost = Cost(2 * 64 * 128 * 64, 1 << 16)
    assert found == {("toy", ((64, 64), (128, 64), (64, 128))): cost}


# ---- what it costs ------------------------------------------------------------------------

H200 = machine("h200:1")


def request_for(*flags: str) -> decoding.PlanRequest:
    return plan.request_of(plan._parser().parse_args(["--shape", MODEL, *flags]))


def priced(text: str, request: decoding.PlanRequest) -> dict[str, Any]:
    program = HloModule(text, temp_bytes=1000)
    return decoding.cost(request, program, program._replace(hlo=text.replace("while(", "call(")))


def test_the_longer_of_bytes_and_products_and_the_launches_make_the_time():
    dot = "%q = bf16[1024]{0} convert(%p.1)\n  ROOT %r = f32[1024]{0} dot(%p.0, %q), "
    dot += "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = module(*fused(dot, ("%w", W), ("%x", X), gives=X))
    request = request_for("--bandwidth", "0.001", "--launch-us", "3", "--batch", "2")
    found = priced(text, request)
    by_name = {phase["phase"]: phase for phase in found["phases"]}
    assert list(by_name) == ["draft", "verify", "extend", "commit", "rest", "prefill"]
    verify = by_name["verify"]
    assert (verify["launches"], verify["bytes"]) == (1, LARGE + 8192)
    assert verify["ms"] == pytest.approx(1e3 * ((LARGE + 8192) / 1e9 + 3e-6))
    assert by_name["rest"]["ms"] == pytest.approx(1e3 * ((4096 + 1) / 1e9 + 3e-6))
    # prefill is not part of it
    assert found["round_ms"] == pytest.approx(verify["ms"] + by_name["rest"]["ms"])
    assert by_name["prefill"]["launches"] > 0
    assert found["tokens_per_s"] == pytest.approx(2 * 1e3 / found["round_ms"])
    chip = H200.chip._replace(bandwidth=1e30, launch=0.0)
    bound = priced(text, request._replace(machine=H200._replace(chip=chip)))
    assert bound["round_ms"] == pytest.approx(1e3 * 2 * 1024**2 / 989e12)


def test_moves_of_2_mib_are_listed_with_their_phase():
    text = module(f"%y = {W} copy(%w), {of('draft/', 'copy')}\n  %z = {C} copy(%c)")
    (move,) = priced(text, request_for())["moves"]
    assert (move["opcode"], move["bytes"], move["phase"]) == ("copy", LARGE, "draft")


def setup_of(request: decoding.PlanRequest) -> StaticConfig:
    drafter = request.drafter and functions_of(request.drafter, request.target)
    return StaticConfig(request.target, drafter, request.shape)


def level_and_target(rows: int) -> tuple[int, int]:
    """Numbers that one level of the paper's drafter and one pass of Llama-3-8B read."""
    D, E, head = 4096, 128, 4096 * 128_256
    block = lambda kv, inner: D * (32 + 2 * kv) * E + 32 * E * D + 3 * D * inner
    level = 2 * block(4, 6144) + head + 2 * 2 * 4 * E * rows
    return level, 32 * block(8, 14_336) + head + 32 * 2 * 8 * E * rows


@pytest.mark.parametrize(
    "mode, tau, passes", [("plain", 1, 0), ("chain", 3.2, 4), ("tree", 4.98, 6)]
)
def test_the_roofline_reads_what_a_round_needs_once(mode, tau, passes):
    flags = ("--rows-used", "512", "--batch", "2")
    request = request_for("--drafter", PAPER, "--mode", mode, *flags)
    setup = setup_of(request)
    weights = decoding.weights_of(setup, "bfloat16")
    state = lowering.abstract_state(setup, weights, 2048, 2)
    level, target = level_and_target(2 * 512)
    digest = 75.5e6 if passes else 0
    seconds = (2 * (passes * level + target) + digest) / 4.8e12
    found = decoding.roofline(request, setup, weights, state)
    assert found == pytest.approx(2 * tau / seconds, rel=1e-3)
    if not passes:
        bound = request._replace(machine=H200._replace(chip=H200.chip._replace(bandwidth=1e30)))
        flops = 2 * level_and_target(0)[1] + 4 * 32 * 4096 * 512
        found = decoding.roofline(bound, setup, weights, state)
        assert found == pytest.approx(989e12 / flops, rel=1e-3)
