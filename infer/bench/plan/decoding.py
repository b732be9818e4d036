"""The cost of decode and prefill programs compiled for a chip that is not attached.

    request --> shapes, XLA --> kernels by phase --> modelled time, fits or not

All times are modelled, not measured. A matrix product or a Pallas kernel takes the longer of two
times: its bytes over the memory bandwidth, and its FLOPs over the chip's peak. The arrays of all
other kernels are written and read once, and each kernel takes the launch time.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from infer.bench.plan import hlo, lowering, machines
from infer.bench.plan.hlo import Kernel
from infer.bench.plan.lowering import HloModule, Product, Shares, num_bytes
from infer.bench.plan.machines import Machine
from moa_jax.config import DraftShape, TargetConfig
from moa_jax.decode.programs import chunks_for, on_mesh
from moa_jax.decode.state import DecodeState, Setup, Weights
from moa_jax.errors import InputError
from moa_jax.model import convert, quantise
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
FORMATS = ("bfloat16", "float32", *quantise.FORMATS)  # weight formats


class PlanRequest(NamedTuple):
    """A decode program and its machine."""

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
        levels, nodes, rows = self.shape.levels, self.shape.num_rows, self.cache_rows
        faults = {
            f"topology {name} has {chips} chips, and decoding uses {uses}; name a machine of "
            f"{uses}, or add --mesh tensor={chips}": chips != uses,
            f"--weights fp8: {name} does not multiply it; use int8": (
                self.weights == "fp8" and self.machine.chip.compiler == "tpu"
            ),
            f"--tau {self.tau:g}: a round of {levels} levels commits at most {levels} tokens; "
            "lower it, or raise --depth": self.tau > levels,
            f"a cache of {rows} rows is too small: a prompt of {self.prompt} tokens and a draft of "
            f"{nodes} do not fit; raise --cache-rows": self.prompt > rows - nodes,
            f"--rows-used {self.rows_used} is more than the {rows} rows of the cache; lower it": (
                (self.rows_used or 0) > rows
            ),
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

    Raises InputError for a request that cannot be planned.
    """
    request.check()
    drafter = request.drafter and functions_of(request.drafter, request.target)
    setup = Setup(request.target, drafter, request.shape)
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
    )


def weights_of(setup: Setup, name: str) -> Weights:
    """The shapes of both models' weights in format `name`, one of FORMATS."""
    if name in quantise.FORMATS:
        return lowering.abstract_weights(setup, weights=name)
    return lowering.abstract_weights(setup, jnp.dtype(name))


def _sharded(request: PlanRequest, weights: Weights, mesh: Mesh) -> Weights:
    """Adds the shardings on a mesh to the shapes of weights."""
    check_mesh(request.target, mesh)

    def sharded(params: Any, table: convert.Table, model: str) -> Any:
        places = quantise.shardings_of(params, cut_for_decoding(table, mesh, model))
        form = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
        return jax.tree.map(form, params, places)

    target, drafter = sharded(weights.target, convert.target_table(request.target), "target"), None
    if request.drafter is not None:
        drafter = sharded(weights.drafter, table_of(request.drafter, request.target), "drafter")
    return Weights(target, drafter)


def _described(request: PlanRequest) -> Plan:
    chip = request.machine.chip
    same = ("mesh", "batch", "cache_rows", "rows_used", "weights", "tau")
    return {name: getattr(request, name) for name in same} | {
        "topology": request.machine.name,
        "device_kind": chip.kind,
        "nodes": request.shape.num_nodes,
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
        "fits": not refused and peak <= limit,
    }


def cost(request: PlanRequest, decode: HloModule, prefill: HloModule) -> Plan:
    """Kernels, collectives and time of the compiled programs, by phase; empty if one is refused.

    The roofline leaves out launches, collectives and all kernels but the products.
    """
    if decode.hlo is None or prefill.hlo is None:
        nothing = {"round_ms": None, "tokens_per_s": None, "roofline": None, "launches": None}
        return {"phases": [], "moves": [], "links": {}} | nothing
    chip, sizes = request.machine.chip, request.mesh
    shares = Shares(request.machine.num_chips, sizes.get("tensor", 1), request.used)
    products = [each for each in lowering.products(decode.jaxpr, shares) if each.in_loop]
    kernels = [each for each in hlo.kernels(decode.hlo) if each.in_loop]
    rows = [
        _phase(
            request,
            name,
            *(
                [each for each in part if phase_of(each.label) == name]
                for part in (products, kernels)
            ),
        )
        for name in (*PHASES, REST)
    ]
    trips = -(-request.prompt // request.chunk)
    shares = shares._replace(used=request.prompt / 2 / request.cache_rows, trips=trips)  # the mean
    read = lowering.products(prefill.jaxpr, shares), hlo.kernels(prefill.hlo, trips)
    collectives = hlo.collectives(decode.hlo, in_loop=True)
    links = {
        "collectives": collectives,
        "bytes": sum(kind["bytes"] for kind in collectives.values()),
        "ms": 1e3 * request.machine.links_s(collectives),
    }
    round_ms = sum(row["ms"] for row in rows) + links["ms"]
    tokens, moves = request.batch * request.tau, hlo.large_moves(decode.hlo)
    return {
        "phases": [*rows, _phase(request, PREFILL, *map(list, read))],
        "links": links,
        "round_ms": round_ms,
        "tokens_per_s": 1e3 * tokens / round_ms,
        "roofline": tokens / sum(each.seconds(chip.bandwidth, request.peak) for each in products),
        "launches": sum(row["launches"] for row in rows),
        "moves": [move._asdict() | {"phase": phase_of(move.label)} for move in moves],
    }


def phase_of(label: str) -> str:
    return next((scope for scope in label.split("/") if scope in PHASES), REST)


def _phase(request: PlanRequest, name: str, products: list[Product], kernels: list[Kernel]) -> Plan:
    """The cost of a phase; an array that no product makes is written once and read once."""
    chip = request.machine.chip
    stored = sum(2 * each.times * each.written for each in kernels if not each.is_product)
    launches = sum(each.times for each in kernels)
    seconds = sum(each.seconds(chip.bandwidth, request.peak) for each in products)
    return {
        "phase": name,
        "launches": launches,
        "bytes": stored + sum(each.times * each.bytes for each in products),
        "flops": sum(each.times * each.flops for each in products),
        "ms": 1e3 * (seconds + stored / chip.bandwidth + launches * chip.launch),
    }
