"""The decode and prefill programs compiled for a chip that is not there, and what they cost.

    request --> child process: shapes, XLA --> kernels by phase --> modelled time, does it fit?

Nothing is measured. The time of a kernel is the longer of two, its bytes over the bandwidth of
the memory and the FLOPs of its products over the chip's peak, and the time to launch it. The
roofline knows no program: it reads each weight and each used row of a cache once for every pass
that needs it, and launches nothing.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from moa_jax.aot import child, kernels, lowering, machines
from moa_jax.aot.accesses import ACTIVATIONS, CACHES, KINDS, ON_CHIP, WEIGHTS
from moa_jax.aot.hlo import LARGE, Traffic
from moa_jax.aot.kernels import Kernel, Rules
from moa_jax.aot.lowering import HloModule, num_bytes
from moa_jax.aot.machines import Machine
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
FORMATS = ("bfloat16", "float32", *quantise.FORMATS)  # of weights
ADVICE = "try fewer --cache-rows or a smaller --batch"


class PlanRequest(NamedTuple):
    """What is planned; everything in it can be pickled."""

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
    mesh: dict[str, int] = {}  # sizes of a mesh of all chips; empty: a single chip  # noqa: RUF012
    late: bool = False  # with what is kept for a drafter that reads late, as where ways are chosen

    def check(self) -> None:
        """Raises InputError for what cannot be planned, whatever the compiler says."""
        self._check_mesh()
        if self.weights not in FORMATS:
            raise InputError(f"--weights {self.weights}: known formats are {', '.join(FORMATS)}")
        if self.weights == "fp8" and self.machine.chip.compiler == "tpu":
            raise InputError(f"--weights fp8: {self.machine.name} does not multiply it: use int8")
        if self.shape.most_children > self.target.vocab_size:
            raise InputError(
                f"--breadth {self.shape.most_children} is more than the {self.target.vocab_size} "
                "tokens that can be drafted: choose a smaller one"
            )
        if self.tau > self.shape.levels:
            raise InputError(
                f"--tau {self.tau:g}: a round of {self.shape.levels} levels commits at most "
                f"{self.shape.levels} tokens: give less, or a larger --depth"
            )
        room = self.cache_rows - self.shape.num_rows
        if room < 1 or self.prompt > room:
            raise InputError(
                f"a cache of {self.cache_rows} rows is too small: a prompt of {self.prompt} tokens "
                f"and a draft of {self.shape.num_rows} do not fit: make it larger"
            )
        if self.rows_used is not None and self.rows_used > self.cache_rows:
            raise InputError(
                f"--rows-used {self.rows_used} is more than the {self.cache_rows} rows of the cache"
            )

    def _check_mesh(self) -> None:
        chips, used = self.machine.num_chips, math.prod(self.mesh.values())
        if chips == used:
            return
        name = f"topology {self.machine.name} has {chips} chip{'s' * (chips > 1)}, and decoding"
        if not self.mesh:
            raise InputError(
                f"{name} uses one: name a machine of one, as h200:1, v5e:1x1 or v5p:1x1x1, or all "
                f"chips with --mesh tensor={chips}"
            )
        raise InputError(f"{name} on this --mesh uses {used}: name a machine of so many")

    @property
    def prompt(self) -> int:
        """Tokens of the prompt, by default the longest that fits, and at most 1,024."""
        if self.prompt_length is not None:
            return self.prompt_length
        room = max(self.cache_rows - self.shape.num_rows, 1)
        return min(1024, 1 << (room.bit_length() - 1))

    @property
    def used(self) -> float:
        """Share of a cache's rows that hold something."""
        return 1.0 if self.rows_used is None else self.rows_used / self.cache_rows


def plan(request: PlanRequest) -> Plan:
    """What decoding costs on a machine; a dictionary fit for JSON.

    Raises InputError for what cannot be planned and CompilerCrash where the compiler dies.
    """
    request.check()
    return child.run(__name__, (request,), request.machine, ADVICE)


# ---- in the child -------------------------------------------------------------------------


def compile_plan(request: PlanRequest) -> Plan:
    """`plan`, in this process; the text of the decode program comes with it."""
    setup = _setup(request)
    where, *others = machines.devices(request.machine)
    weights = weights_of(setup, request.weights)
    if others:
        where = decoding_mesh(**request.mesh, devices=[where, *others])
        weights = _spread(request, weights, where)
    with matmul_precision(weights.target["embed"].dtype):
        where = (where, setup, weights, request.cache_rows)
        state = lowering.abstract_state(setup, weights, request.cache_rows, request.batch)
        if others:
            state = on_mesh(state, where[0])
        decode = lowering.compile_decode(*where, request.batch)
        prefill = HloModule()
        if decode.hlo is not None:
            prefill = lowering.compile_prefill(*where, request.batch)
    target_caches = jax.tree.leaves(lowering.local(state.now.target_caches))
    return (
        _asked(request)
        | _memory(request, weights, state, (decode, prefill))
        | _costs(request, decode, prefill, frozenset(leaf.shape for leaf in target_caches))
        | _roofline(request, setup, weights, state)
        | {"hlo": decode.hlo}
    )


def weights_of(setup: Setup, name: str) -> Weights:
    """The shapes of both models' weights in one of FORMATS."""
    if name in quantise.FORMATS:
        return lowering.abstract_weights(setup, weights=name)
    return lowering.abstract_weights(setup, jnp.dtype(name))


def _spread(request: PlanRequest, weights: Weights, mesh: Mesh) -> Weights:
    """The shapes of weights, with where they lie on a mesh."""
    check_mesh(request.target, mesh)

    def spread(params: Any, table: convert.Table, model: str) -> Any:
        places = quantise.shardings_of(params, cut_for_decoding(table, mesh, model))
        form = lambda leaf, at: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=at)
        return jax.tree.map(form, params, places)

    target = spread(weights.target, convert.target_table(request.target), "target")
    drafter = None
    if request.drafter is not None:
        drafter = spread(weights.drafter, table_of(request.drafter, request.target), "drafter")
    return Weights(target, drafter)


def kind_of(argument: str) -> str:
    """Whether an argument of a program is a weight or a cache, from its name in the program."""
    if argument.startswith("weights"):
        return WEIGHTS
    return CACHES if "_cache" in argument else ACTIVATIONS


def _setup(request: PlanRequest) -> Setup:
    drafter = request.drafter and functions_of(request.drafter, request.target)
    return Setup(request.target, drafter, request.shape, catches_up=request.late)


def _asked(request: PlanRequest) -> Plan:
    shape = request.shape
    return {
        "topology": request.machine.name,
        "mesh": request.mesh,
        "device_kind": request.machine.chip.kind,
        "jax": jax.__version__,
        "depth": shape.depth,
        "breadth": shape.breadth,
        "nodes": shape.num_nodes,
        "batch": request.batch,
        "cache_rows": request.cache_rows,
        "late": request.late,
        "rows_used": request.rows_used,
        "prompt_length": request.prompt,
        "chunk": _chunk(request),
        "weights": request.weights,
        "tau": request.tau,
        "bandwidth": request.machine.chip.bandwidth,
        "launch_us": 1e6 * request.machine.chip.launch,
    }


def _memory(
    request: PlanRequest, weights: Weights, state: DecodeState, programs: Sequence[HloModule]
) -> Plan:
    """Bytes that are held while the hungrier of the programs runs, and whether there is room."""
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


def _costs(
    request: PlanRequest,
    decode: HloModule,
    prefill: HloModule,
    caches: frozenset[tuple[int, ...]] = frozenset(),
) -> Plan:
    """What the compiled programs do, by phase; nothing where the compiler refused them."""
    if decode.hlo is None or prefill.hlo is None:
        nothing = {"round_ms": None, "tokens_per_s": None, "launches": None, "links": None}
        return {"phases": [], "moves": []} | nothing
    stays = request.machine.chip.stays
    rules = Rules(PHASES, REST, decode.declared, used=request.used, stays=stays)
    found = kernels.of_round(decode.hlo, kind_of, rules)
    phases = [_phase(request, name, [k for k in found if k.phase == name]) for name in PHASES]
    phases.append(_phase(request, REST, [k for k in found if k.phase == REST]))
    turns = -(-request.prompt // _chunk(request))
    used = request.prompt / 2 / request.cache_rows  # in the mean of all chunks
    rules = Rules((), PREFILL, prefill.declared, caches, used, turns, stays)
    read = kernels.of_program(prefill.hlo, kind_of, rules)
    links = _links(request, kernels.collectives_of_round(decode.hlo))
    round_ms = sum(phase["ms"] for phase in phases) + links["ms"]
    return {
        "phases": [*phases, _phase(request, PREFILL, read)],
        "links": links,
        "round_ms": round_ms,
        "tokens_per_s": 1e3 * request.batch * request.tau / round_ms,
        "launches": sum(phase["launches"] for phase in phases),
        "products": sum(phase["products"] for phase in phases),
        "moves": _moves(found),
    }


def _chunk(request: PlanRequest) -> int:
    """Tokens of a prompt that are read at a time."""
    return min(chunks_for(request.machine.chip.compiler, request.batch)[0], request.cache_rows)


def _phase(request: PlanRequest, name: str, found: list[Kernel]) -> Plan:
    """One line of the table; bytes are those that reach the memory."""
    moved: Counter[str] = Counter()
    for kernel in found:
        moved += Counter({kind: kernel.times * size for kind, size in kernel.bytes.items()})
    return {
        "phase": name,
        "launches": sum(kernel.times for kernel in found),
        "products": sum(kernel.times for kernel in found if kernel.is_product),
        "bytes": sum(moved[kind] for kind in KINDS),
        **{kind: moved[kind] for kind in KINDS},
        "on_chip": moved[ON_CHIP],
        "flops": sum(kernel.times * kernel.flops for kernel in found),
        "ms": 1e3 * sum(kernel.times * _seconds(request, kernel) for kernel in found),
    }


def _seconds(request: PlanRequest, kernel: Kernel) -> float:
    chip = request.machine.chip
    rate = chip.flops("float32" if kernel.is_float32 else "bfloat16")
    return max(kernel.in_memory / chip.bandwidth, kernel.flops / rate) + chip.launch


def _links(request: PlanRequest, found: dict[str, Traffic]) -> Plan:
    """What the chips of a mesh send each other in a round, and how long that takes."""
    machine, received = request.machine, sum(traffic.received for traffic in found.values())
    seconds = machine.chip.latency * sum(traffic.count for traffic in found.values())
    if received:
        seconds += received / (machine.num_links * machine.chip.link)
    return {
        "collectives": {kind: traffic._asdict() for kind, traffic in found.items()},
        "bytes": received,
        "ms": 1e3 * seconds,
    }


def _moves(found: list[Kernel]) -> list[Plan]:
    """Large arrays that a round writes again: moved ones, and weights or caches that are cast."""
    return [
        {
            "name": kernel.name,
            "opcode": opcode,
            "bytes": size,
            "times": kernel.times,
            "phase": kernel.phase,
            "label": kernel.label,
        }
        for kernel in found
        for opcode, size in kernel.moved
        if size >= LARGE
    ]


# ---- the roofline -------------------------------------------------------------------------


def _roofline(request: PlanRequest, setup: Setup, weights: Weights, state: DecodeState) -> Plan:
    """Tokens/s that programs can come close to on this chip.

    A round is one pass of the target over all nodes, one of the drafter for each drafted level,
    and what only the digest reads. Of an embedding table a pass reads some rows only. That some
    weights of a drafter are not read in every level, as those for the memory's keys in MoA, is
    left out: it is below 1 % there. On a mesh each chip reads its part, and sends nothing.
    """
    weights, state = lowering.local(weights), lowering.local(state)
    shape, batch = setup.shape, len(state.now.length_B)
    chip = request.machine.chip
    block, layers = setup.target.block, setup.target.num_layers
    heads = block.group_size * state.now.target_caches[0].k_BKSE.shape[1]
    attended = 4 * layers * heads * block.head_dim * request.used * request.cache_rows
    caches = request.used * num_bytes(state.now.target_caches)
    nodes = batch * shape.num_nodes
    seconds = _pass_s(request, _products_of(weights.target), caches, nodes, nodes * attended)
    if shape.num_drafted:
        once = set(setup.drafter.digest_only)
        level = {key: leaf for key, leaf in weights.drafter.items() if key not in once}
        digest = {key: leaf for key, leaf in weights.drafter.items() if key in once}
        borrowed = _products_of(setup.drafter.borrow(weights.target))
        if setup.drafter.own_head:
            borrowed = {key: leaf for key, leaf in borrowed.items() if key != "lm_head"}
        caches = request.used * num_bytes(state.now.draft_cache)
        for depth in range(1, shape.levels):
            width = batch * (1 if depth == 1 else shape.breadth)
            seconds += _pass_s(request, (level, borrowed), caches, width)
        seconds += num_bytes(digest) / chip.bandwidth
    return {"roofline": request.batch * request.tau / seconds}


def _products_of(params: Any) -> Any:
    """The weights that a pass multiplies with: no embedding table, unless it is the head too."""
    if "embed" not in params or "lm_head" not in params:
        return params
    return {key: leaf for key, leaf in params.items() if key != "embed"}


def _pass_s(
    request: PlanRequest, weights: Any, cache_bytes: float, tokens: int, attended: float = 0.0
) -> float:
    """Seconds of one pass: each weight and used row read once, or the products with them."""
    chip = request.machine.chip
    flops = attended + 2 * tokens * sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(weights))
    rate = chip.flops("float32" if request.weights == "float32" else "bfloat16")
    return max((num_bytes(weights) + cache_bytes) / chip.bandwidth, flops / rate)


if __name__ == "__main__":
    child.serve(compile_plan)
