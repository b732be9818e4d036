"""infer.plan reads off a program: the arrays that kernels write, and the cost of a round."""

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
from infer.bench.plan.lowering import HloModule, Product, Shares
from infer.bench.plan.machines import machine

MODEL = "meta-llama/Meta-Llama-3-8B-Instruct"
PAPER = "configs/moa_llama3_8b.py"
ROOT = Path(__file__).resolve().parents[2]

# ---- kernels of a round -------------------------------------------------------------------

W = "bf16[1024,1024]{1,0}"  # a weight: 2 MiB
C = "bf16[8,128,64]{2,1,0}"  # a cache: 8 heads, 128 rows, 128 KiB
X = "f32[1024]{0}"  # 4 KiB
STATE = f"({W}, {C}, {X}, s32[])"


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
  %b = {C} parameter(1), metadata={{op_name="state.round.target_caches[0].k_BKSE"}}
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


def written(*args: str) -> int:
    (kernel,) = round_of(*args)
    return kernel.written


def test_a_kernel_writes_its_results():
    inside = f"%s = {X} add(%p.0, %p.0)\n  ROOT %r = ({X}, {X}) tuple(%s, %s)"
    (kernel,) = round_of(*fused(inside, ("%x", X), gives=f"({X}, {X})"))
    assert (kernel.written, kernel.times, kernel.is_product) == (2 * 4096, 1, True)
    assert decoding.phase_of(kernel.label) == "verify"


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
    assert written(*args) == 8 * 64 * 2
    assert hlo.large_moves(module(*args)) == []


def test_a_cast_or_moved_weight_is_a_move():
    cast = fused("ROOT %r = f32[1024,1024]{1,0} convert(%p.0)", ("%w", W), gives="f32[1024,1024]")
    (move,) = hlo.large_moves(module(*cast))
    assert (move.opcode, move.bytes, written(*cast)) == ("convert", 2 * LARGE, 2 * LARGE)
    (move,) = hlo.large_moves(module(f"%y = {W} copy(%w)"))
    assert (move.opcode, move.bytes) == ("copy", LARGE)
    computed = fused(f"ROOT %r = {W} add(%p.0, %p.0)", ("%w", W), gives=W)
    assert hlo.large_moves(module(*computed)) == [] and written(*computed) == LARGE
    made = cast[0].replace("(%w)", "(%v)")
    assert hlo.large_moves(module(f"%v = {W} custom-call(%x)\n  {made}", cast[1])) == []


def test_a_copy_to_the_chip_is_no_move():
    near = W.replace("{1,0}", "{1,0:T(8,128)(2,1)S(1)}")
    fetch = f"%s = ({near}, {W}, u32[]{{:S(2)}}) copy-start(%w)\n  %n = {near} copy-done(%s)\n  "
    use = f"%y = {X} custom-call(%n), {of('draft/')}"
    first, second = round_of(fetch + use)
    assert (first.written, second.written) == (0, 4096)
    assert hlo.large_moves(module(fetch + use)) == []
    assert decoding.phase_of(first.label) == decoding.phase_of(second.label) == "draft"
    back = fetch.replace(f"({near}, {W}", f"({W}, {near}").replace(f"%n = {near}", f"%n = {W}")
    (move,) = hlo.large_moves(module(back))
    assert (move.opcode, move.bytes) == ("copy", LARGE)


def test_a_part_that_is_fetched_ahead_counts_alone():
    row = "bf16[1,1024]{1,0}"
    line = f"%s = (({W}), {row}, u32[]{{:S(2)}}) slice-start(%w)\n  %n = {row} slice-done(%s)"
    assert written(line) == 2048


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


# ---- products -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, is_product",
    [
        ("dot(%x, %x)", True),
        ("convolution(%x, %x), dim_labels=0bf_0oi->0bf", True),
        ('custom-call(%x), custom_call_target="__cublas$gemm", ' + of("verify/"), True),
        ('custom-call(%x), custom_call_target="tpu_custom_call", ' + of("a/", "pallas_call"), True),
        ('custom-call(%x), custom_call_target="__gpu$TopK", ' + of("verify/", "top_k"), False),
        ("copy(%x), " + of("a/", "pallas_call"), False),  # for the kernel, with its label
    ],
)
def test_a_product_is_told_from_other_kernels(line, is_product):
    (kernel,) = round_of(f"%y = {X} {line}")
    assert kernel.is_product == is_product


def test_products_are_priced_as_their_operands_are_stored():
    x, w = jax.ShapeDtypeStruct((4, 64), jnp.bfloat16), jax.ShapeDtypeStruct((128, 64), jnp.int8)

    def layers(x, w):
        turn = lambda x, _: ((x @ w.reshape(2, 64, 64)[0].astype(x.dtype)), None)
        with jax.named_scope("draft"):
            y = x @ w.astype(x.dtype).T
        return jax.lax.scan(turn, x, None, length=3)[0], y

    traced = jax.make_jaxpr(jax.jit(layers))(x, w)
    first, second = lowering.products(traced, Shares(chips=4, cut=2))
    size = 4 * 64 * 2 + 64 * 128 + 4 * 128 * 2
    assert first[1:] == (1, False, 2 * 4 * 64 * 128 / 4, size / 2)
    assert decoding.phase_of(first.label) == "draft" and second.times == 3
    assert Product("", 2, True, 30.0, 10.0).seconds(bandwidth=5.0, peak=10.0) == 6
    assert Product("", 2, True, 30.0, 10.0).seconds(bandwidth=2.0, peak=10.0) == 10


# ---- Pallas -------------------------------------------------------------------------------


def attend(q, c, n):
    """A toy of attention over a cache, in a loop, two layers of it."""

    def kernel(q, c, o):
        o[...] = q[...].astype(jnp.float32) @ c[...].astype(jnp.float32).T

    call = pl.pallas_call(
        kernel,
        out_shape=jax.ShapeDtypeStruct((64, 128), jnp.float32),
        name="toy",
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


@pytest.mark.parametrize("used", [1.0, 0.25])
def test_a_pallas_kernel_costs_what_it_declares(used):
    found = lowering.products(jax.make_jaxpr(jax.jit(attend))(*TOY), Shares(used=used))
    cost = (1, True, used * 2 * 64 * 128 * 64, used * (1 << 16))
    assert [(decoding.phase_of(each.label), *each[1:]) for each in found] == [("verify", *cost)] * 2


# ---- what it costs ------------------------------------------------------------------------

H200 = machine("h200:1")


def request_for(*flags: str) -> decoding.PlanRequest:
    return plan.request_of(plan._parser().parse_args(["--shape", MODEL, *flags]))


def rounds(x, w):
    """A loop of rounds, each with one product."""

    def one(carry):
        left, x = carry
        with jax.named_scope("verify"):
            return left - 1, (x @ w)[:, :1024]

    return jax.lax.while_loop(lambda carry: carry[0] > 0, one, (jnp.int32(2), x))


SHAPES = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((1, 1024), (1024, 1024))]


def priced(text: str, request: decoding.PlanRequest) -> dict[str, Any]:
    program = HloModule(text, 1000, jaxpr=jax.make_jaxpr(rounds)(*SHAPES))
    return decoding.cost(request, program, program)


def test_products_stored_arrays_and_launches_make_the_time():
    text = module(f"%y = {X} dot(%w, %x), {of('verify/')}\n  %z = {X} add(%x, %x), {of('draft/')}")
    request = request_for("--bandwidth", "0.001", "--launch-us", "3", "--batch", "2")
    found = priced(text, request)
    by_name = {phase["phase"]: phase for phase in found["phases"]}
    assert list(by_name) == ["draft", "verify", "extend", "commit", "rest", "prefill"]
    size = LARGE + 2 * 1024 * 2
    assert (by_name["verify"]["launches"], by_name["verify"]["bytes"]) == (1, size)
    assert by_name["verify"]["ms"] == pytest.approx(1e3 * (size / 1e9 + 3e-6))
    assert (by_name["draft"]["launches"], by_name["draft"]["bytes"]) == (1, 2 * 4096)
    assert by_name["draft"]["ms"] == pytest.approx(1e3 * (2 * 4096 / 1e9 + 3e-6))
    rest = by_name["rest"]["ms"]  # of the condition
    # prefill is not part of it
    assert found["round_ms"] == pytest.approx(
        by_name["verify"]["ms"] + by_name["draft"]["ms"] + rest
    )
    assert by_name["prefill"]["launches"] > 0
    assert found["tokens_per_s"] == pytest.approx(2 * 1e3 / found["round_ms"])
    assert found["roofline"] == pytest.approx(2 / (size / 1e9))
    chip = H200.chip._replace(bandwidth=1e30, launch=0.0)
    bound = priced(text, request._replace(machine=H200._replace(chip=chip)))
    assert bound["round_ms"] == pytest.approx(1e3 * 2 * 1024**2 / 989e12)


def test_moves_of_2_mib_are_listed_with_their_phase():
    text = module(f"%y = {W} copy(%w), {of('draft/', 'copy')}\n  %z = {C} copy(%c)")
    (move,) = priced(text, request_for())["moves"]
    assert (move["opcode"], move["bytes"], move["phase"]) == ("copy", LARGE, "draft")
