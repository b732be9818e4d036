"""The cost of decode and prefill programs compiled for a chip that is not attached.

    request --> shapes, XLA --> kernels by phase --> modelled time, fits or not

All times are modelled, not measured. A matrix product or a Pallas kernel takes the longer of two
times: its bytes over the memory bandwidth, and its FLOPs over the chip's peak. The arrays of all
other kernels are written and read once, and each kernel takes the launch time.
"""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import jax
from jax.sharding import Mesh

from infer.bench.plan import hlo, lowering, machines
from moa_jax.config import DraftShape, TargetConfig
from moa_jax.decode.limits import rows_ahead
from moa_jax.decode.programs import chunks_for, on_mesh
from moa_jax.decode.state import StaticConfig, Weights
from moa_jax.errors import InputError
from moa_jax.model import convert, quantize
from moa_jax.model.cache import ring_rows
from moa_jax.model.sharding import decoding_mesh
from moa_jax.pretrained import LoadedDrafter, check_mesh, cut_for_decoding, functions_of, table_of
from moa_jax.runtime.precision import matmul_precision

Plan = dict[str, Any]
PHASES = ("draft", "verify", "extend", "commit")  # the scopes of moa_jax.decode.step
REST, PREFILL = "rest", "prefill"
FORMATS = ("bfloat16", "float32", *quantize.FORMATS)  # weight formats


class PlanRequest(NamedTuple):
    """A decode program and its machine."""

    machine: machines.Machine
    target: TargetConfig
    drafter: LoadedDrafter | None  # without its weights
    shape: DraftShape
    cache_rows: int
    rows_used: int | None = None  # None: all
    batch: int = 1
    weights: str = "bfloat16"
    tau: float = 1.0
    mesh: dict[str, int] = {}  # axis sizes over all chips; empty: one chip  # noqa: RUF012

    def check(self) -> None:
        """Raises InputError for a request that cannot be planned."""
        name, uses = self.machine.name, math.prod(self.mesh.values())
        chips, chip = self.machine.num_devices, self.machine.chip
        nodes, rows, levels = self.shape.num_rows, self.cache_rows, self.shape.levels
        breadth, vocab_size = self.shape.most_children, self.target.vocab_size
        used, lacks_fp8 = self.rows_used or 0, self.weights == "fp8" and not chip.fp8
        faults = {
            f"topology {name} has {chips} devices, and decoding uses {uses}; name a machine of "
            f"{uses}, or add --mesh tensor={chips}": chips != uses,
            f"--weights fp8: {name} does not multiply it; use int8": lacks_fp8,
            f"a cache of {rows} rows is too small for a draft of {nodes} nodes; raise "
            "--cache-rows": nodes >= rows,
            f"--breadth {breadth} is more than the {vocab_size} tokens that can be drafted; choose "
            "a smaller one": breadth > vocab_size,
            f"--tau {self.tau:g}: a round of {levels} levels commits at most {levels} tokens; "
            "lower it, or raise --depth": self.tau > levels,
            f"--rows-used {used} is more than the {rows} rows of the cache; lower it": used > rows,
        }
        if found := [message for message, is_fault in faults.items() if is_fault]:
            raise InputError(found[0])

    @property
    def used(self) -> float:
        """Share of used cache rows."""
        return 1.0 if self.rows_used is None else self.rows_used / self.cache_rows

    @property
    def ahead(self) -> int:
        """Rows that calls may have written after the tokens of a sequence, as in a session."""
        chunk = chunks_for(self.machine.chip.compiler, 1)[0]
        return rows_ahead(self.shape.num_rows, self.shape.levels, chunk)

    @property
    def window_rows(self) -> int:
        """Most rows of a layer with a window; 0 without such layers."""
        windows = filter(None, self.target.sliding_windows)
        sizes = (ring_rows(window, self.cache_rows, self.ahead) for window in windows)
        return max(sizes, default=0)

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
    setup = StaticConfig(request.target, drafter, request.shape, ahead=request.ahead)
    where, *others = machines.devices(request.machine)
    weights = lowering.abstract_weights(setup, request.weights)
    if others:
        where = decoding_mesh(**request.mesh, devices=[where, *others])
        weights = _sharded(request, weights, where)
    with matmul_precision(weights.target["embed"].dtype):
        program = (where, setup, weights, request.cache_rows, request.batch)
        state = lowering.abstract_state(*program[1:])
        state = on_mesh(state, where) if others else state
        held = {"weights": lowering.num_bytes(weights), "state": lowering.num_bytes(state)}
        decode = lowering.compile_decode(*program)
        prefill = lowering.compile_prefill(*program) if decode.hlo else decode
    limit, refused = request.machine.chip.memory, prefill.hlo is None
    if refused:
        unknown = dict.fromkeys(("round_ms", "tokens_per_s", "roofline", "temp_bytes"))
        memory, found = {"peak": prefill.peak_bytes}, unknown | {"phases": [], "moves": []}
    else:
        temp = max(decode.temp_bytes, prefill.temp_bytes)
        memory = held | {"temporary": temp, "peak": sum(held.values()) + temp}
        found = cost(request, decode, prefill) | {"temp_bytes": temp}
    fits = not refused and memory["peak"] <= limit
    return _described(request) | found | {"memory": memory | {"limit": limit}, "fits": fits}


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
    chip = request.machine.chip
    same = ("mesh", "batch", "cache_rows", "window_rows", "rows_used", "weights", "tau")
    return {name: getattr(request, name) for name in same} | {
        "topology": request.machine.name,
        "device_kind": chip.kind,
        "nodes": request.shape.num_nodes,
        "chunk": chunks_for(chip.compiler, request.batch)[0],
        "bandwidth": chip.bandwidth,
        "launch_us": 1e6 * chip.launch,
    }


def cost(request: PlanRequest, decode: lowering.HloModule, prefill: lowering.HloModule) -> Plan:
    """Kernels, collectives and time of a round by phase, and of prefilling one chunk.

    The roofline leaves out launches, collectives and all kernels but the products.
    """
    chip, sizes = request.machine.chip, request.mesh
    shares = lowering.Shares(request.machine.num_devices, sizes.get("tensor", 1), request.used)
    products = [each for each in lowering.products(decode.jaxpr, shares) if each.in_loop]
    kernels = [each for each in hlo.kernels(decode.hlo) if each.in_loop]
    of = lambda name, found: [each for each in found if phase_of(each.label) == name]
    parts = ((name, of(name, products), of(name, kernels)) for name in (*PHASES, REST))
    rows = [_phase(request, *part) for part in parts]
    read = [*lowering.products(prefill.jaxpr, shares)], hlo.kernels(prefill.hlo)
    collectives = hlo.collectives(decode.hlo, in_loop=True)
    links = {
        "collectives": collectives,
        "bytes": sum(kind["bytes"] for kind in collectives.values()),
        "ms": 1e3 * request.machine.links_s(collectives),
    }
    round_ms = sum(row["ms"] for row in rows) + links["ms"]
    tokens, moves = request.batch * request.tau, hlo.large_moves(decode.hlo)
    return {
        "phases": [*rows, _phase(request, PREFILL, *read)],
        "links": links,
        "round_ms": round_ms,
        "tokens_per_s": 1e3 * tokens / round_ms,
        "roofline": tokens / sum(each.seconds(chip.bandwidth, request.peak) for each in products),
        "launches": sum(row["launches"] for row in rows),
        "moves": [move._asdict() | {"phase": phase_of(move.label)} for move in moves],
    }


def phase_of(label: str) -> str:
    return next((scope for scope in label.split("/") if scope in PHASES), REST)


def _phase(
    request: PlanRequest, name: str, products: list[lowering.Product], kernels: list[hlo.Kernel]
) -> Plan:
    """The cost of a phase; an array that no product makes is written once and read once."""
    chip = request.machine.chip
    stored = sum(2 * each.times * each.written for each in kernels if not each.is_product)
    launches = sum(each.times for each in kernels)
    seconds = sum(each.seconds(chip.bandwidth, request.peak) for each in products)
    return {
        "phase": name,
        "launches": launches,
        "bytes": stored + sum(each.times * each.bytes for each in products),
        "ms": 1e3 * (seconds + stored / chip.bandwidth + launches * chip.launch),
    }
