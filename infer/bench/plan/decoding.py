"""The cost of decode and prefill programs compiled for a chip that is not attached.

    request --> child process: shapes, XLA --> kernels by phase --> modelled time, fits or not

All times are modelled, not measured. A kernel takes the longer of two times (its bytes over the
memory bandwidth, the FLOPs of its matrix products over the chip's peak) plus the launch time. The
roofline does not depend on a program: a pass reads every weight and every used cache row once, and
launches nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from infer.bench.plan import child, hlo, lowering, machines
from infer.bench.plan.hlo import Kernel
from infer.bench.plan.lowering import HloModule, KernelCosts, num_bytes
from infer.bench.plan.machines import Machine
from moa_jax.config import DraftShape, TargetConfig
from moa_jax.decode.programs import chunks_for, on_mesh
from moa_jax.decode.state import DecodeState, StaticConfig, Weights
from moa_jax.errors import InputError
from moa_jax.model import convert, quantize
from moa_jax.model.sharding import decoding_mesh
from moa_jax.pretrained import (
    LoadedDrafter,
    check_mesh,
    cut_for_decoding,
    functions_of,
    table_of,
)
from moa_jax.runtime.precision import matmul_precision

Plan = dict[str, Any]
PHASES = ("draft", "verify", "extend", "commit")  # the scopes of moa_jax.decode.step
REST, PREFILL = "rest", "prefill"
FORMATS = ("bfloat16", "float32", *quantize.FORMATS)  # weight formats
ADVICE = "try fewer --cache-rows or a smaller --batch"


class PlanRequest(NamedTuple):
    """A decode program and its machine; all fields can be pickled."""

    machine: Machine
    target: TargetConfig
    drafter: LoadedDrafter | None  # without its weights
    shape: DraftShape
    cache_rows: int
    rows_used: int | None = None  # None: all
    batch: int = 1
    weights: str = "bfloat16"
    prompt_length: int | None = None
    tau: float = 1.0
    mesh: dict[str, int] = {}  # axis sizes over all chips; empty: one chip  # noqa: RUF012

    def check(self) -> None:
        """Raises InputError for a request that cannot be planned."""
        name, chips, uses = self.machine.name, self.machine.num_chips, math.prod(self.mesh.values())
        kind, levels, nodes = self.weights, self.shape.levels, self.shape.num_rows
        breadth, vocab_size = self.shape.most_children, self.target.vocab_size
        rows, used = self.cache_rows, self.rows_used or 0
        faults = {
            f"topology {name} has {chips} chips, and decoding uses one; name a machine of one, as "
            f"h200:1, or add --mesh tensor={chips}": chips > 1 and not self.mesh,
            f"topology {name} has {chips} chip{'s' * (chips > 1)}, and decoding on this --mesh "
            f"uses {uses}; name a machine of {uses}": self.mesh and chips != uses,
            f"--weights {kind}; choose among {', '.join(FORMATS)}": kind not in FORMATS,
            f"--weights fp8: {name} does not multiply it; use int8": (
                kind == "fp8" and self.machine.chip.compiler == "tpu"
            ),
            f"--breadth {breadth} is more than the {vocab_size} tokens that can be drafted; choose "
            "a smaller one": breadth > vocab_size,
            f"--tau {self.tau:g}: a round of {levels} levels commits at most {levels} tokens; "
            "lower it, or raise --depth": self.tau > levels,
            f"a cache of {rows} rows is too small: a prompt of {self.prompt} tokens and a draft of "
            f"{nodes} do not fit; raise --cache-rows": self.prompt > rows - nodes,
            f"--rows-used {used} is more than the {rows} rows of the cache; lower it": used > rows,
        }
        if found := [message for message, is_fault in faults.items() if is_fault]:
            raise InputError(found[0])

    @property
    def prompt(self) -> int:
        """Prompt length; by default the largest power of two that fits, at most 1,024."""
        if self.prompt_length is not None:
            return self.prompt_length
        room = max(self.cache_rows - self.shape.num_rows, 1)
        return min(1024, 1 << (room.bit_length() - 1))

    @property
    def chunk(self) -> int:
        """Prompt tokens per prefill pass."""
        return min(chunks_for(self.machine.chip.compiler, self.batch)[0], self.cache_rows)

    @property
    def used(self) -> float:
        """Share of used cache rows."""
        return 1.0 if self.rows_used is None else self.rows_used / self.cache_rows

    @property
    def peak(self) -> float:
        """Peak FLOP/s of the chip in the weights' compute dtype."""
        return self.machine.chip.flops("float32" if self.weights == "float32" else "bfloat16")


def plan(request: PlanRequest) -> Plan:
    """The cost of decoding on a machine, as a JSON-compatible dictionary.

    Raises InputError for a request that cannot be planned, CompilerCrash if the compiler crashes.
    """
    request.check()
    return child.run(__name__, (request,), request.machine, ADVICE)


# ---- in the child -------------------------------------------------------------------------


def compile_plan(request: PlanRequest) -> Plan:
    """Computes `plan` in this process."""
    drafter = request.drafter and functions_of(request.drafter, request.target)
    setup = StaticConfig(request.target, drafter, request.shape)
    where, *others = machines.devices(request.machine)
    weights = weights_of(setup, request.weights)
    if others:
        where = decoding_mesh(**request.mesh, devices=[where, *others])
        weights = _sharded(request, weights, where)
    with matmul_precision(weights.target["embed"].dtype):
        program = (where, setup, weights, request.cache_rows, request.batch)
        state = lowering.abstract_state(*program[1:])
        state = on_mesh(state, where) if others else state
        decode, prefill = lowering.compile_decode(*program), HloModule()
        if decode.hlo is not None:
            prefill = lowering.compile_prefill(*program)
    return (
        _described(request)
        | _memory(request, weights, state, (decode, prefill))
        | cost(request, decode, prefill)
        | {"roofline": roofline(request, setup, weights, state)}
    )


def weights_of(setup: StaticConfig, name: str) -> Weights:
    """The shapes of both models' weights in format `name`, one of FORMATS."""
    if name in quantize.FORMATS:
        return lowering.abstract_weights(setup, weights=name)
    return lowering.abstract_weights(setup, jnp.dtype(name))


def _sharded(request: PlanRequest, weights: Weights, mesh: Mesh) -> Weights:
    """Adds the shardings on a mesh to the shapes of weights."""
    check_mesh(request.target, mesh)

    def sharded(params: Any, table: convert.Table, model: str) -> Any:
        places = quantize.shardings_of(params, cut_for_decoding(table, mesh, model))
        form = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
        return jax.tree.map(form, params, places)

    target, drafter = sharded(weights.target, convert.target_table(request.target), "target"), None
    if request.drafter is not None:
        drafter = sharded(weights.drafter, table_of(request.drafter, request.target), "drafter")
    return Weights(target, drafter)


def _described(request: PlanRequest) -> Plan:
    shape, chip = request.shape, request.machine.chip
    same = ("mesh", "batch", "cache_rows", "rows_used", "chunk", "weights", "tau")
    return {name: getattr(request, name) for name in same} | {
        "topology": request.machine.name,
        "device_kind": chip.kind,
        "jax": jax.__version__,
        "depth": shape.depth,
        "breadth": shape.breadth,
        "nodes": shape.num_nodes,
        "prompt_length": request.prompt,
        "bandwidth": chip.bandwidth,
        "launch_us": 1e6 * chip.launch,
    }


def _memory(
    request: PlanRequest, weights: Weights, state: DecodeState, programs: Sequence[HloModule]
) -> Plan:
    """Memory (bytes) while the larger of the programs runs, and whether it fits."""
    refused = [program for program in programs if program.hlo is None]
    temp = None if refused else max(program.temp_bytes for program in programs)
    held = {"weights": num_bytes(weights), "state": num_bytes(state)}
    peak = refused[0].peak_bytes if refused else sum(held.values()) + temp
    limit = request.machine.chip.memory
    return {
        "memory": held | {"temporary": temp, "peak": peak, "limit": limit},
        "temp_bytes": temp,
        "compile_s": {n: p.seconds for n, p in zip(("decode", "prefill"), programs, strict=True)},
        "fits": not refused and peak <= limit,
    }


def cost(request: PlanRequest, decode: HloModule, prefill: HloModule) -> Plan:
    """Kernels, collectives and time of the compiled programs, by phase; empty if one is refused."""
    if decode.hlo is None or prefill.hlo is None:
        nothing = {"round_ms": None, "tokens_per_s": None, "launches": None, "links": None}
        return {"phases": [], "moves": []} | nothing
    if (loops := hlo.unknown_loops(decode.hlo)) != 1:
        raise InputError(
            f"the decode program has {loops} loops of unknown length, and a round of fixed cost "
            "has one; make the others static"
        )
    phases: dict[str, list[Kernel]] = {name: [] for name in (*PHASES, REST)}
    for kernel in hlo.kernels(decode.hlo):
        if kernel.in_loop:
            phases[phase_of(kernel.label)].append(priced(kernel, decode.costs, request.used))
    used = request.prompt / 2 / request.cache_rows  # mean over all chunks
    read = hlo.kernels(prefill.hlo, trips=-(-request.prompt // request.chunk))
    rows = [_phase(request, name, found) for name, found in phases.items()]
    links = _links(request.machine, hlo.collectives(decode.hlo, in_loop=True))
    round_ms = sum(row["ms"] for row in rows) + links["ms"]
    read = [priced(kernel, prefill.costs, used) for kernel in read]
    moves = hlo.large_moves(decode.hlo)
    return {
        "phases": [*rows, _phase(request, PREFILL, read)],
        "links": links,
        "round_ms": round_ms,
        "tokens_per_s": 1e3 * request.batch * request.tau / round_ms,
        "launches": sum(row["launches"] for row in rows),
        "moves": [move._asdict() | {"phase": phase_of(move.label)} for move in moves],
    }


def phase_of(label: str) -> str:
    return next((scope for scope in label.split("/") if scope in PHASES), REST)


def priced(kernel: Kernel, costs: KernelCosts, used: float = 1.0) -> Kernel:
    """Adds the declared cost to a Pallas kernel; returns other kernels unchanged.

    `used` is the share of a cache's rows that attention reads. Raises InputError for a Pallas
    kernel without a cost estimate.
    """
    if not kernel.pallas:
        return kernel
    if (found := costs.get((kernel.pallas, kernel.dims))) is None:
        raise InputError(
            f"the Pallas kernel {kernel.pallas!r} declares no cost; give its pallas_call a "
            "cost_estimate"
        )
    return kernel._replace(bytes=round(used * found.size), flops=round(used * found.flops))


def _phase(request: PlanRequest, name: str, kernels: list[Kernel]) -> Plan:
    chip = request.machine.chip
    seconds = lambda kernel: max(kernel.bytes / chip.bandwidth, kernel.flops / request.peak)
    return {
        "phase": name,
        "launches": sum(kernel.times for kernel in kernels),
        "bytes": sum(kernel.times * kernel.bytes for kernel in kernels),
        "flops": sum(kernel.times * kernel.flops for kernel in kernels),
        "ms": 1e3 * sum(kernel.times * (seconds(kernel) + chip.launch) for kernel in kernels),
    }


def _links(machine: Machine, found: Sequence[hlo.Collective]) -> Plan:
    """Collectives of a round, the bytes received per chip, and the time."""
    kinds = hlo.by_kind(found)
    count, size = (sum(kind[key] for kind in kinds.values()) for key in ("count", "bytes"))
    seconds = machine.chip.latency * count + machine.received_s(size)
    return {"collectives": kinds, "bytes": size, "ms": 1e3 * seconds}


# ---- the roofline -------------------------------------------------------------------------


def roofline(
    request: PlanRequest, setup: StaticConfig, weights: Weights, state: DecodeState
) -> float:
    """Upper bound of tokens/s that programs can approach on this chip.

    A round is one pass of the target over all nodes, one pass of the drafter per drafted level,
    and one read of the weights that only the digest uses. Embedding tables are not counted, because
    a pass reads only a few of their rows. A few drafter weights are not read in every level, such
    as those for the memory's keys in MoA (below 1 %). On a mesh every chip reads its part, and
    communication is free.
    """
    weights, state = lowering.local(weights), lowering.local(state)
    shape, block, bandwidth = setup.shape, setup.target.block, request.machine.chip.bandwidth

    def pass_s(params: Any, caches: Any, tokens: int, attended: float = 0.0) -> float:
        sizes = (math.prod(leaf.shape) for leaf in jax.tree.leaves(params))
        flops = tokens * (attended + 2 * sum(sizes))
        size = num_bytes(params) + request.used * num_bytes(caches)
        return max(size / bandwidth, flops / request.peak)

    heads = block.group_size * state.round.target_caches[0].k_BKSE.shape[1]
    attended = 4 * setup.target.num_layers * heads * block.head_dim
    attended *= request.used * request.cache_rows
    batch = len(state.round.length_B)
    target = _multiplied(weights.target)
    seconds = pass_s(target, state.round.target_caches, batch * shape.num_nodes, attended)
    if shape.num_drafted:
        once = set(setup.drafter.condense_only)
        level = {key: leaf for key, leaf in weights.drafter.items() if key not in once}
        borrowed = _multiplied(setup.drafter.shared_params(weights.target))
        if setup.drafter.own_head:
            borrowed = {key: leaf for key, leaf in borrowed.items() if key != "lm_head"}
        for depth in range(1, shape.levels):
            width = batch * (1 if depth == 1 else shape.breadth)
            seconds += pass_s((level, borrowed), state.round.draft_cache, width)
        seconds += (
            num_bytes([weights.drafter[key] for key in once & {*weights.drafter}]) / bandwidth
        )
    return request.batch * request.tau / seconds


def _multiplied(params: Any) -> Any:
    """The weights that a pass multiplies with: without an embedding table that is not the head."""
    if "embed" not in params or "lm_head" not in params:
        return params
    return {key: leaf for key, leaf in params.items() if key != "embed"}


if __name__ == "__main__":
    child.serve(compile_plan)
