"""What infer.plan reads off a program: what kernels read and write, by hand, and what it costs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from infer import plan
from moa_jax.aot import declared, decoding, kernels, lowering
from moa_jax.aot.hlo import LARGE
from moa_jax.aot.kernels import Kernel, Rules
from moa_jax.aot.lowering import HloModule
from moa_jax.aot.machines import machine
from moa_jax.errors import InputError

MODEL = "meta-llama/Meta-Llama-3-8B-Instruct"
PAPER = "configs/moa_llama3_8b.py"
ROOT = Path(__file__).resolve().parents[2]

# ---- kernels of a round -------------------------------------------------------------------

W = "bf16[1024,1024]{1,0}"  # a weight: 2 MiB
C = "bf16[8,128,64]{2,1,0}"  # a cache: 8 heads, 128 rows, 128 KiB
X = "f32[1024]{0}"  # 4 KiB
STATE = f"({W}, {C}, {X}, s32[])"
CACHE_BYTES = 8 * 128 * 64 * 2
RULES = Rules(decoding.PHASES, decoding.REST)


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


def round_of(*args: str, rules: Rules = RULES) -> list[Kernel]:
    """The kernels of a round without the condition's."""
    found = kernels.of_round(module(*args), decoding.kind_of, rules)
    assert found[0].label.endswith("/and") or found[-1].label.endswith("/and")
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


def moved(*args: str, rules: Rules = RULES) -> dict[str, int]:
    (kernel,) = round_of(*args, rules=rules)
    return dict(kernel.bytes)


def test_every_byte_is_a_weight_a_cache_or_an_activation():
    inside = "%q = bf16[1024]{0} convert(%p.1)\n  ROOT %r = f32[1024]{0} dot(%p.0, %q), "
    inside += "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    (kernel,) = round_of(*fused(inside, ("%w", W), ("%x", X), gives=X))
    assert kernel.bytes == {"weights": LARGE, "activations": 2 * 4096}
    assert kernel.is_product and kernel.flops == 2 * 1024**2 and not kernel.is_float32
    assert (kernel.phase, kernel.times, kernel.in_memory) == ("verify", 1, LARGE + 8192)


def test_a_slice_and_a_gather_read_their_part():
    cut = "%s = bf16[8,16,64]{2,1,0} dynamic-slice(%p.0, %p.1), dynamic_slice_sizes={8,16,64}\n  "
    cut += f"ROOT %r = {X} custom-call(%s)"
    assert moved(*fused(cut, ("%c", C), ("%i", "s32[]"), gives=X)) == {
        "caches": CACHE_BYTES // 8,
        "activations": 4 + 4096,
    }
    wide = cut.replace("(%p.0,", "(%wide,")
    wide = "%wide = f32[8,128,64]{2,1,0} convert(%p.0)\n  " + wide
    found = moved(*fused(wide, ("%c", C), ("%i", "s32[]"), gives=X))
    assert found["caches"] == CACHE_BYTES // 8
    both = cut.replace("custom-call(%s)", "custom-call(%s, %p.0)")
    found = moved(*fused(both, ("%c", C), ("%i", "s32[]"), gives=X))
    assert found["caches"] == CACHE_BYTES
    rows = "%g = bf16[8,1024]{1,0} gather(%w, %x), slice_sizes={1,1024}, " + of("draft/")
    assert moved(rows) == {"weights": 8 * 2048, "activations": 4096 + 8 * 2048}


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
def test_an_update_in_place_costs_what_is_new(inside):
    new = "bf16[8,1,64]{2,1,0}"
    args = fused(
        f"%n = {new} slice(%p.1)\n  {inside}", ("%c", C), ("%x", X), ("%i", "s32[]"), gives=C
    )
    assert moved(*args) == {"caches": 8 * 64 * 2, "activations": 2048 + 4}
    (kernel,) = round_of(*args)
    assert kernel.moved == ()


def test_an_update_by_itself_costs_what_is_new():
    new = "bf16[8,1,64]{2,1,0}"
    lines = f"%n = {new} custom-call(%x)\n  %u = {C} dynamic-update-slice(%c, %n, %i)"
    assert round_of(lines)[1].bytes == {"caches": 8 * 64 * 2, "activations": 8 * 64 * 2 + 4}


def test_an_update_that_is_read_at_once_reads_the_whole():
    inside = f"%n = bf16[8,1,64]{{2,1,0}} slice(%p.1)\n  %u = {C} {UPDATE}\n  "
    inside += f"%s = {X} custom-call(%u)\n  ROOT %r = ({C}, {X}) tuple(%u, %s)"
    args = fused(inside, ("%c", C), ("%x", X), ("%i", "s32[]"), gives=f"({C}, {X})")
    assert moved(*args)["caches"] == CACHE_BYTES + 8 * 64 * 2


def test_a_value_made_in_a_fusion_is_no_update_in_place():
    inside = f"%z = {C} broadcast(%p.2)\n  %n = bf16[8,1,64]{{2,1,0}} slice(%p.1)\n  "
    inside += f"ROOT %r = {C} {UPDATE.replace('%p.0', '%z')}"
    args = fused(inside, ("%c", C), ("%x", X), ("%i", "s32[]"), gives=C)
    assert moved(*args)["activations"] == CACHE_BYTES + 2048 + 4


def test_a_cast_or_moved_weight_is_still_a_weight_and_a_move():
    cast = fused("ROOT %r = f32[1024,1024]{1,0} convert(%p.0)", ("%w", W), gives="f32[1024,1024]")
    (kernel,) = round_of(*cast)
    assert kernel.moved == (("convert", 2 * LARGE),)
    assert kernel.bytes == {"weights": 3 * LARGE}
    (kernel,) = round_of(f"%y = {W} copy(%w)")
    assert kernel.moved == (("copy", LARGE),) and kernel.bytes == {"weights": 2 * LARGE}
    computed = fused(f"ROOT %r = {W} add(%p.0, %p.0)", ("%w", W), gives=W)
    (kernel,) = round_of(*computed)
    assert kernel.moved == () and kernel.bytes == {"weights": LARGE, "activations": LARGE}


def test_a_copy_to_the_chip_reads_ahead_and_is_no_move():
    near = W.replace("{1,0}", "{1,0:T(8,128)(2,1)S(1)}")
    fetch = f"%s = ({near}, {W}, u32[]{{:S(2)}}) copy-start(%w)\n  %n = {near} copy-done(%s)\n  "
    use = f"%y = {X} custom-call(%n), {of('draft/')}"
    first, second = round_of(fetch + use)
    assert first.bytes == {"weights": LARGE, "on chip": LARGE} and first.moved == ()
    assert second.bytes == {"on chip": LARGE, "activations": 4096}
    assert first.phase == second.phase == "draft"
    back = fetch.replace(f"({near}, {W}", f"({W}, {near}").replace(f"%n = {near}", f"%n = {W}")
    (kernel,) = round_of(back)
    assert kernel.moved == (("copy", LARGE),)


def test_small_activations_stay_on_the_chip():
    add = f"%y = {X} add(%x, %x), {of('verify/')}"
    assert moved(add, rules=RULES._replace(stays=4096)) == {"on chip": 3 * 4096}
    assert moved(add, rules=RULES._replace(stays=4095)) == {"activations": 3 * 4096}
    read = f"%y = {X} custom-call(%c), {of('verify/')}"
    assert moved(read, rules=RULES._replace(stays=LARGE))["caches"] == CACHE_BYTES


# ---- phases -------------------------------------------------------------------------------


def test_the_condition_of_the_loop_is_rest():
    found = kernels.of_round(module(""), decoding.kind_of, RULES)
    assert [(kernel.phase, kernel.opcode) for kernel in found] == [("rest", "custom-call")]


def test_a_kernel_without_a_label_belongs_to_its_neighbours():
    inside, computation = fused(f"ROOT %r = {X} negate(%p.0), {of('extend/')}", ("%x", X), gives=X)
    lines = [
        inside.partition(", metadata")[0],  # by what it holds
        f"%a = {X} add(%x, %x), {of('draft/', 'add')}",
        f"%b = {X} bitcast(%a)",
        f"%g = {X} negate(%b)",  # by what feeds it
        f"%h = {X} negate(%x)",  # by what uses it
        f"%k = {X} add(%h, %i), {of('commit/', 'add')}",
        f"%l = {X} negate(%x)",  # by nothing
        f"%m = {X} negate(%k), {of('')}",  # of no scope, and its label says so
    ]
    found = round_of("\n  ".join(lines), computation)
    phases = ["extend", "draft", "draft", "commit", "commit", "rest", "rest"]
    assert [kernel.phase for kernel in found] == phases


def test_what_is_fetched_for_the_next_turn_belongs_to_its_user():
    use = f"%y = {X} custom-call(%w), {of('verify/')}"
    fetch = f"%z = {X} negate(%y), {of('commit/')}\n  %n = {W} copy(%e)"
    found = round_of(f"{use}\n  %e = {W} custom-call()\n  {fetch}", "", "%n, %c, %x, %i")
    assert [kernel.phase for kernel in found] == ["verify", "verify", "commit", "verify"]


# ---- loops and branches -------------------------------------------------------------------

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
    found = {kernel.opcode: kernel for kernel in round_of(nested("constant(2)"), INNER)}
    assert {opcode: kernel.times for opcode, kernel in found.items()} == {
        "custom-call": 3,
        "add": 3,
        "compare": 3,
    }
    assert found["custom-call"].bytes["caches"] == CACHE_BYTES
    assert {kernel.phase for kernel in found.values()} == {"draft"}
    known = ', backend_config={"known_trip_count":{"n":"7"}}'
    found = round_of(nested("custom-call()", known), INNER)
    assert {kernel.opcode: kernel.times for kernel in found[1:]} == {"custom-call": 7, "add": 7}


def test_a_loop_of_unknown_length_fails_the_plan():
    with pytest.raises(InputError, match="body/draft/while.*known when it is compiled"):
        round_of(nested("custom-call()"), INNER)


def test_of_branches_the_dearest_counts():
    branch = "%{0} (q{0}: {1}) -> {2} {{\n  %q{0} = {1} parameter(0)\n  ROOT %r{0} = {2} {3}\n}}\n"
    both = branch.format("dear", W, X, "custom-call(%qdear)")
    both += branch.format("cheap", C, X, "custom-call(%qcheap)")
    line = f"%y = {X} conditional(%i, %c, %w), branch_computations={{%cheap, %dear}}"
    (kernel,) = round_of(line, both)
    assert kernel.name == "rdear" and kernel.bytes["weights"] == LARGE


def test_a_program_without_a_round_is_no_decode_program():
    text = module("").replace("while(%start)", "call(%start)")
    with pytest.raises(ValueError, match="0 loops"):
        kernels.of_round(text, decoding.kind_of, RULES)


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
            '{"lhs_contracting_dimensions":["2"],"rhs_contracting_dimensions":["2"]}}',
            2 * 8 * 4 * 128 * 64,
        ),
        # libtpu: heads as an axis of the window that is all holes but one
        (
            "convolution(%q, %c), window={size=8 stride=7 lhs_dilate=8}, dim_labels=0bf_0oi->0bf",
            2 * 8 * 4 * 128 * 64,
        ),
        # libtpu: the kernel's heads as places in the padding around a single element
        (
            "convolution(%q, %c), window={size=8 pad=7_7 rhs_reversal=1}, dim_labels=b0f_0oi->0bf",
            2 * 8 * 8 * 128 * 64,
        ),
    ],
)
def test_flops_of_a_product(line, flops):
    q = "bf16[8,4,64]{2,1,0}" if "b0f" not in line else "bf16[8,1,64]{2,1,0}"
    out = "f32[8,4,128]{2,1,0}" if "b0f" not in line else "f32[8,8,128]{2,1,0}"
    found = round_of(f"%q = {q} custom-call(%x)\n  %y = {out} {line}")
    assert found[1].flops == flops and found[1].is_product and not found[0].is_product


def test_a_sum_of_products_is_a_product():
    inside = "%m = f32[1024,1024]{1,0} multiply(%p.0, %p.0), metadata={}\n  "
    inside += f"ROOT %r = {X} reduce(%m, %p.1), dimensions={{0}}, to_apply=%add, {of('verify/')}"
    (kernel,) = round_of(*fused(inside, ("%w", W), ("%i", "f32[]"), gives=X))
    assert kernel.is_product and kernel.flops == 2 * 1024**2
    apart = f"ROOT %r = {X} multiply(%p.0, %p.0), {of('verify/')}"  # summed by another kernel
    (kernel,) = round_of(*fused(apart, ("%x", X), gives=X))
    assert kernel.is_product and kernel.flops == 2 * 1024
    both = inside.replace("metadata={}", of("verify/"))
    (kernel,) = round_of(*fused(both, ("%w", W), ("%i", "f32[]"), gives=X))
    assert kernel.flops == 2 * 1024**2
    again = inside.replace("dot_general", "reduce_sum")
    (kernel,) = round_of(*fused(again, ("%w", W), ("%i", "f32[]"), gives=X))
    assert not kernel.is_product


# ---- Pallas -------------------------------------------------------------------------------

CALL = f"%y = {X} custom-call(%c, %i), custom_call_target=%s, {of('verify/attend/', 'pallas_call')}"
DIMS = ((8, 128, 64), (), (1024,))


@pytest.mark.parametrize("target", ["__gpu$xla.gpu.triton", "tpu_custom_call"])
def test_a_pallas_kernel_is_what_it_declares(target):
    rules = RULES._replace(declared={("attend", DIMS): declared.Cost(640, CACHE_BYTES + 5000)})
    call = CALL.replace("%s", f'"{target}"')
    (kernel,) = round_of(call, rules=rules)
    assert kernel.bytes == {"caches": CACHE_BYTES, "activations": 5000}
    assert (kernel.flops, kernel.is_product, kernel.phase) == (640, True, "verify")
    (kernel,) = round_of(call, rules=rules._replace(used=0.25))
    assert kernel.bytes == {"caches": CACHE_BYTES // 4, "activations": 5000}
    assert kernel.flops == 160
    other = call.replace("(%c, %i)", "(%x, %i)")
    rules = RULES._replace(declared={("attend", ((1024,), *DIMS[1:])): declared.Cost(640, 5000)})
    (kernel,) = round_of(other, rules=rules._replace(used=0.25))
    assert kernel.flops == 640 and kernel.bytes == {"activations": 5000}


def test_other_kernels_read_the_whole_cache_however_little_is_used():
    call = CALL.replace("%s", '"__gpu$TopK"')
    assert moved(call, rules=RULES._replace(used=0.25))["caches"] == CACHE_BYTES


@pytest.mark.parametrize("known", [{}, {("attend", DIMS): None}])
def test_a_pallas_kernel_that_declares_nothing_is_refused(known):
    with pytest.raises(InputError, match="'attend' does not say what it costs"):
        round_of(CALL.replace("%s", '"tpu_custom_call"'), rules=RULES._replace(declared=known))


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
    found = declared.declared(jax.make_jaxpr(jax.jit(attend))(*TOY))
    cost = declared.Cost(2 * 64 * 128 * 64, 1 << 16)
    assert found == {("toy", ((64, 64), (128, 64), (64, 128))): cost}


# ---- what it costs ------------------------------------------------------------------------

H200 = machine("h200:1")


def request_for(*flags: str) -> decoding.PlanRequest:
    return plan.request_of(plan._parser().parse_args(["--shape", MODEL, *flags]))


def priced(text: str, request: decoding.PlanRequest) -> dict[str, Any]:
    program = HloModule(text, temp_bytes=1000)
    return decoding._costs(request, program, program._replace(hlo=text.replace("while(", "call(")))


def test_the_longer_of_bytes_and_products_and_the_launches_make_the_time():
    dot = "%q = bf16[1024]{0} convert(%p.1)\n  ROOT %r = f32[1024]{0} dot(%p.0, %q), "
    dot += "lhs_contracting_dims={1}, rhs_contracting_dims={0}"
    text = module(*fused(dot, ("%w", W), ("%x", X), gives=X))
    request = request_for("--bandwidth", "0.001", "--launch-us", "3", "--batch", "2")
    found = priced(text, request)
    by_name = {phase["phase"]: phase for phase in found["phases"]}
    assert list(by_name) == ["draft", "verify", "extend", "commit", "rest", "prefill"]
    verify = by_name["verify"]
    assert (verify["launches"], verify["products"]) == (1, 1)
    assert (verify["bytes"], verify["weights"], verify["on_chip"]) == (LARGE, LARGE, 8192)
    assert verify["ms"] == pytest.approx(1e3 * (LARGE / 1e9 + 3e-6))
    assert by_name["rest"]["ms"] == pytest.approx(3e-3)
    assert found["round_ms"] == pytest.approx(verify["ms"] + 3e-3)  # prefill is no part of it
    assert by_name["prefill"]["launches"] > 0
    assert found["tokens_per_s"] == pytest.approx(2 * 1e3 / found["round_ms"])
    chip = H200.chip._replace(bandwidth=1e30, launch=0.0)
    bound = priced(text, request._replace(machine=H200._replace(chip=chip)))
    assert bound["round_ms"] == pytest.approx(1e3 * 2 * 1024**2 / 989e12)


def test_moves_of_2_mib_are_listed_with_their_phase():
    text = module(f"%y = {W} copy(%w), {of('draft/', 'copy')}\n  %z = {C} copy(%c)")
    (move,) = priced(text, request_for())["moves"]
    assert (move["opcode"], move["bytes"], move["phase"]) == ("copy", LARGE, "draft")


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
    setup = decoding._setup(request)
    weights = decoding.weights_of(setup, "bfloat16")
    state = lowering.abstract_state(setup, weights, 2048, 2)
    level, target = level_and_target(2 * 512)
    digest = 75.5e6 if passes else 0
    seconds = (2 * (passes * level + target) + digest) / 4.8e12
    found = decoding._roofline(request, setup, weights, state)["roofline"]
    assert found == pytest.approx(2 * tau / seconds, rel=1e-3)
    if not passes:
        bound = request._replace(machine=H200._replace(chip=H200.chip._replace(bandwidth=1e30)))
        flops = 2 * level_and_target(0)[1] + 4 * 32 * 4096 * 512
        found = decoding._roofline(bound, setup, weights, state)["roofline"]
        assert found == pytest.approx(989e12 / flops, rel=1e-3)
