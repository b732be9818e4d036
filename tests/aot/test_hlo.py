"""The plan programs parse a compiled program: kernels, moves, loops, collectives and products."""

from __future__ import annotations

import re
import string
from pathlib import Path

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import pallas as pl

from infer.bench.plan import hlo, lowering
from infer.bench.plan.decoding import phase_of
from infer.bench.plan.hlo import LARGE, MOVES, Kernel
from infer.bench.plan.lowering import Product, Shares

HERE = Path(__file__).parent
W = "bf16[1024,1024]{1,0}"  # a weight: 2 MiB
C = "bf16[8,128,64]{2,1,0}"  # a cache: 8 heads, 128 rows, 128 KiB
X = "f32[1024]{0}"  # 4 KiB
STATE = f"({W}, {C}, {X}, /*index=3*/s32[])"


def of(scope: str, primitive: str = "dot_general") -> str:
    return f'metadata={{op_name="jit(decode)/while/body/{scope}{primitive}"}}'


def module(body: str, computations: str = "") -> str:
    """Returns a decode program with round `body`: weight %w, cache %c, activation %x, number %i.

    The program moves the weight before the loop, so no round contains this move.
    """
    given = {"W": W, "C": C, "X": X, "STATE": STATE, "metadata": of("", "and")}
    text = string.Template((HERE / "decode.hlo").read_text(encoding="utf-8"))
    return text.substitute(given, body=body, computations=computations)


def fused(inside: str, *operands: str, gives: str, scope: str = "verify/") -> tuple[str, str]:
    """Returns a round of one fusion; some of %w, %c, %x, %i are %p.0, %p.1, ... inside."""
    shapes = [{"%w": W, "%c": C, "%x": X, "%i": "s32[]"}[name] for name in operands]
    lines = [f"%p.{index} = {shape} parameter({index})" for index, shape in enumerate(shapes)]
    heads = ", ".join(f"p.{index}: {shape}" for index, shape in enumerate(shapes))
    body = "\n  ".join([*lines, inside])
    call = f"%y = {gives} fusion({', '.join(operands)}), kind=kLoop, calls=%f, {of(scope)}"
    return call, f"%f ({heads}) -> {gives} {{\n  {body}\n}}"


def round_of(*args: str) -> list[Kernel]:
    """Returns the kernels of a round in program order, without those of the loop condition."""
    found = [kernel for kernel in hlo.kernels(module(*args)) if kernel.in_loop]
    assert sum(kernel.label.endswith("/and") for kernel in found) == 1
    return [kernel for kernel in found if not kernel.label.endswith("/and")]


def written(*args: str) -> int:
    (kernel,) = round_of(*args)
    return kernel.written


def moves(*args: str) -> list[tuple[str, int]]:
    return [(move.opcode, move.bytes) for move in hlo.large_moves(module(*args))]


# ---- moves --------------------------------------------------------------------------------

ASYNC_COPY = f"%s = ({W}, {W}, u32[]) copy-start(%w)\n  %d = {W} copy-done(%s)"
ASYNC_ROW = f"%s = (({W}), u8[8]{{0}}, u32[]) slice-start(%w)\n  %d = u8[8]{{0}} slice-done(%s)"
INNER = f"%f (p: {W}) -> {W} {{\n  %p = {W} parameter(0)\n  ROOT %t = {W} transpose(%p)\n}}\n"
INNER += "\n%none () -> s32[] {\n  ROOT %n = s32[] constant(0)\n}"
UPDATE = f"ROOT %r = {W} dynamic-update-slice(%p.0, %p.0, %p.1)"


@pytest.mark.parametrize(
    "args, found",
    [
        *((f"%y = {W} {opcode}(%w, %i)", [opcode]) for opcode in sorted(MOVES)),
        (f"%y = {W} add(%w, %w)\n  %z = {W} bitcast(%y)", []),
        ("%y = bf16[1023,1024]{1,0} slice(%w)", []),  # less than 2 MiB
        (ASYNC_COPY, ["copy"]),
        (ASYNC_ROW, []),
        ((f"%y = {W} conditional(%i), branch_computations={{%none, %f}}", INNER), ["transpose"]),
        ((f"%y = {W} while(%w), condition=%none, body=%f", INNER), ["transpose"]),
        ((f"%y = {W} reduce(%w), to_apply=%f", INNER), []),
        (f"%x1 = {W} copy(%w)\n  %y = {W} dynamic-update-slice(%x1, %w, %i)", ["copy"]),
        # A fusion counts by its result.
        (fused(f"%s = {W} slice(%p.0)\n  ROOT %r = {W} bitcast(%s)", "%w", gives=W), ["slice"]),
        (fused(f"%s = {W} slice(%p.0)\n  ROOT %r = {W} multiply(%s, %s)", "%w", gives=W), []),
        (fused(UPDATE, "%w", "%i", gives=W), []),
    ],
)
def test_kernels_that_only_copy_an_array_are_moves(args, found):
    args = (args,) if isinstance(args, str) else args
    assert [opcode for opcode, _ in moves(*args)] == found


def test_a_cast_or_moved_weight_is_a_move():
    cast = fused("ROOT %r = f32[1024,1024]{1,0} convert(%p.0)", "%w", gives="f32[1024,1024]")
    assert moves(*cast) == [("convert", 2 * LARGE)] and written(*cast) == 2 * LARGE
    computed = fused(f"ROOT %r = {W} add(%p.0, %p.0)", "%w", gives=W)
    assert moves(*computed) == [] and written(*computed) == LARGE
    made = cast[0].replace("(%w)", "(%v)")
    assert moves(f"%v = {W} custom-call(%x)\n  {made}", cast[1]) == []


def test_a_copy_to_the_chip_is_no_move():
    near = W.replace("{1,0}", "{1,0:T(8,128)(2,1)S(1)}")
    fetch = f"%s = ({near}, {W}, u32[]{{:S(2)}}) copy-start(%w)\n  %n = {near} copy-done(%s)\n  "
    use = f"%y = {X} custom-call(%n), {of('draft/')}"
    first, second = round_of(fetch + use)
    assert (first.written, second.written) == (0, 4096) and moves(fetch + use) == []
    assert phase_of(first.label) == phase_of(second.label) == "draft"
    back = fetch.replace(f"({near}, {W}", f"({W}, {near}").replace(f"%n = {near}", f"%n = {W}")
    assert moves(back) == [("copy", LARGE)]


# ---- kernels ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "update", ["dynamic-update-slice(%p.0, %n, %p.2)", "scatter(%p.0, %p.2, %n), to_apply=%f"]
)
def test_an_update_in_place_costs_the_new_part(update):
    new = "bf16[8,1,64]{2,1,0}"
    inside = f"%n = {new} slice(%p.1)\n  %u = {C} {update}\n  ROOT %r = {C} bitcast(%u)"
    assert written(*fused(inside, "%c", "%x", "%i", gives=C)) == 8 * 64 * 2


def test_a_kernel_without_a_label_has_that_of_its_parts_or_of_the_next():
    inside, computation = fused(f"ROOT %r = {X} negate(%p.0), {of('extend/')}", "%x", gives=X)
    lines = [
        inside.partition(", metadata")[0],  # by an instruction inside it
        f"%a = {X} add(%x, %x), {of('draft/', 'add')}",
        f"%h = {X} negate(%x)",  # by the next
        f"%k = {X} add(%h, %i), {of('commit/', 'add')}",
        f"%m = {X} negate(%k), {of('')}",  # its label has no scope
    ]
    found = round_of("\n  ".join(lines), computation)
    phases = ["extend", "draft", "commit", "commit", "rest"]
    assert [phase_of(kernel.label) for kernel in found] == phases


KERNELS = [
    ("dot(%x, %x)", True),
    ('custom-call(%x), custom_call_target="__cublas$gemm", ' + of("verify/"), True),
    ('custom-call(%x), custom_call_target="tpu_custom_call", ' + of("a/", "pallas_call"), True),
    ('custom-call(%x), custom_call_target="__gpu$TopK", ' + of("verify/", "top_k"), False),
    ("copy(%x), " + of("a/", "pallas_call"), False),  # a copy for the kernel, with its label
]


@pytest.mark.parametrize("line, is_product", KERNELS)
def test_a_product_is_distinguished_from_other_kernels(line, is_product):
    (kernel,) = round_of(f"%y = {X} {line}")
    assert kernel.is_product == is_product


# ---- products of a traced program ---------------------------------------------------------


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
    assert phase_of(first.label) == "draft" and second.times == 3
    assert Product("", 2, True, 30.0, 10.0).seconds(bandwidth=5.0, peak=10.0) == 6
    assert Product("", 2, True, 30.0, 10.0).seconds(bandwidth=2.0, peak=10.0) == 10


def test_a_pallas_kernel_costs_what_it_declares():
    """The cost covers the used part of a cache."""

    def kernel(x, y):
        y[...] = x[...] @ x[...]

    shape = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    cost = pl.CostEstimate(flops=2 * 64**3, bytes_accessed=1 << 16, transcendentals=0)
    call = pl.pallas_call(kernel, out_shape=shape, name="toy", cost_estimate=cost)
    (found,) = lowering.products(jax.make_jaxpr(jax.jit(call))(shape), Shares(used=0.25))
    assert found[1:] == (1, False, 0.25 * cost.flops, 0.25 * cost.bytes_accessed)


# ---- collectives and loops ----------------------------------------------------------------

GPU = (HERE / "collectives_gpu.hlo").read_text(encoding="utf-8")


def totals(text: str, **which: bool) -> dict[str, tuple[int, int]]:
    """Returns the collectives of a program and the bytes that each chip receives, by kind."""
    kinds = hlo.collectives(text, **which)
    return {kind: (each["count"], each["bytes"]) for kind, each in kinds.items()}


def test_collectives_of_a_gpu_program():
    gathered, scattered = (16 - 4) * 8 * 2, 2 * (4 - 1) * 8 * 2
    looped = {"all-gather": (6, 6 * gathered), "reduce-scatter": (6, 6 * scattered)}
    assert totals(GPU, in_loop=True) == looped
    assert totals(GPU) == looped | {"all-reduce": (1, 40), "all-to-all": (1, 40)}
    assert totals(GPU.replace("known_trip_count", "other"))["all-gather"] == (1, gathered)


# An all-gather that libtpu spread over its start and the body of an inner loop, which takes two
# steps a turn as libtpu's windowed loops do; beside it libtpu's reduce-scatter.
TPU = (HERE / "collectives_tpu.hlo").read_text(encoding="utf-8")


def test_collectives_of_a_tpu_program():
    assert totals(TPU) == {
        "all-gather": (1, (8 - 2) * 8 * 4),
        "reduce-scatter": (1, 8 * 4),
        "collective-permute": (5, 5 * 2 * 8 * 4),
    }


LOOPS = [(r"constant\(10\)", "constant(9)", 5), (r"constant\(0\)", "constant(-3)", 7)]
LOOPS += [(r"constant\(0\)", "parameter(1)", 1), (r"add\(%i", "multiply(%i", 1)]
LOOPS += [(r"direction=LT", "direction=GT", 1)]


@pytest.mark.parametrize("old, new, turns", LOOPS)
def test_loops_count_as_they_run(old, new, turns):
    """A loop with a constant trip count counts that often; any other loop counts once."""
    text, count = re.subn(old, new, TPU)
    assert count == 1 and totals(text)["collective-permute"][0] == turns
