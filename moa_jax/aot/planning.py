"""The training step compiled for machines that are not there: does it fit, what does it cost.

    config, topology --> child process: shapes, shardings, XLA --> plan or why there is none

Nothing is measured. Memory, collectives and operations are those of the compiled program. Its time
is modelled: an operation takes as long as its FLOPs at ATTAINED of the chip's peak, or as its bytes
at the memory's full rate, and the chip waits for a collective as far as the schedule does not hide
it. No step can be faster than the bounds, which know no program. Compiling happens in a process of
its own, since compilers crash. The evaluation between steps is compiled too: it takes the whole
batch at once, even where the step takes it in parts.

Full optimisation for a TPU takes minutes. With little, libtpu is six times as fast and its figure
of memory is right within some percent. That is enough for a verdict that is not close.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moa_jax.aot import child, hlo, kernels, lowering, machines, schedule
from moa_jax.aot.accesses import ACTIVATIONS, WEIGHTS
from moa_jax.aot.declared import Declared, declared
from moa_jax.aot.kernels import Kernel, Rules
from moa_jax.aot.lowering import HloModule, num_bytes
from moa_jax.aot.machines import Machine
from moa_jax.config import ChunkConfig, DistillConfig, TargetConfig
from moa_jax.model.sharding import make_mesh
from moa_jax.runtime.precision import matmul_precision
from moa_jax.training import flops
from moa_jax.training.distillation import TrainStep, abstract_frozen, make_train_step
from moa_jax.training.update import abstract

Plan = dict[str, Any]
HURRY = {"tpu": {"exec_time_optimization_effort": -1.0}, "cuda": {}}
CLOSE = 0.1  # to the limit, as a share of it
# Tokens of a row that are no padding, packed or not, and where that is from.
FILL = {
    True: (0.97, "packed: the least that tests/data/test_batches.py finds for such lengths"),
    False: (0.58, "one conversation a row: an estimate for UltraChat in rows of 2,048"),
}
# Rates of products of float32 arrays in a step in bfloat16, as shares of those of bfloat16 arrays:
# at jax's default precision a TPU rounds them to bfloat16, and a GPU to TF32.
ROUNDED = {"tpu": 1.0, "cuda": 0.5}
ATTAINED = 0.7  # of a chip's peak, by large matrix products


def plain(config: DistillConfig) -> DistillConfig:
    """The same step without chunks, so that nothing is computed twice."""
    return dataclasses.replace(config, chunks=ChunkConfig(head=0, memory=0))


def with_rows(config: DistillConfig, rows: int) -> DistillConfig:
    """The same step for batches of `rows` rows."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, rows_per_batch=rows))


# ---- in the parent ------------------------------------------------------------------------


def plan(
    config: DistillConfig, target_cfg: TargetConfig, machine: Machine, hurry: bool = False
) -> Plan:
    """What the training step of `config` needs on `machine`; a dictionary fit for JSON.

    Raises InputError without the machine's compiler and for a mesh that does not divide the
    machine, the models or the batch; CompilerCrash where the compiler dies.
    """
    request = (config, target_cfg, machine, hurry)
    return child.run(__name__, request, machine, "try other data.rows_per_batch or another mesh")


def is_close(found: Plan) -> bool:
    """Whether another kind of optimisation might change the verdict."""
    peak, limit = found["memory"]["peak"], found["memory"]["limit"]
    return peak is not None and abs(peak - limit) <= CLOSE * limit


def filled(found: Plan, config: DistillConfig, share: float | None = None) -> Plan:
    """A plan with what its rows hold besides padding, and the speed that this leaves.

    Without a `share` of its own it is the one that FILL assumes.
    """
    fill, source = FILL[config.data.pack] if share is None else (share, "--fill")
    found = found | {"fill": fill, "fill_source": source, "mfu": None, "tokens_per_s": None}
    if found["step_s"]:
        tokens = fill * found["rows_per_batch"] * found["row_length"]
        seconds = found["step_s"]
        flops_per_s = tokens * found["model_flops_per_token"] / seconds
        found |= {"mfu": flops_per_s / found["peak_flops"], "tokens_per_s": tokens / seconds}
    return found


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest number that fits, 0 if 1 does not; a good `guess` saves calls."""
    low, high, stride = 0, None, 1
    while high is None or high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        if high is None:
            guess = low + stride
        elif low == 0:
            guess = max(high - stride, 1)
        else:
            guess = (low + high) // 2
        stride *= 2
    return low


def expected_rows(found: Plan) -> int:
    """The largest batch that should fit if temporary memory grows in proportion to its rows."""
    memory, unit = found["memory"], found["rows_unit"]
    if memory["peak"] is None:
        return unit
    fixed = sum(memory[part] for part in ("target", "drafter", "optimizer"))
    per_row = (memory["peak"] - fixed) / found["rows_per_batch"]
    return max(1, int((memory["limit"] - fixed) / per_row / unit)) * unit


# ---- in the child -------------------------------------------------------------------------


def compile_plan(
    config: DistillConfig, target_cfg: TargetConfig, machine: Machine, hurry: bool
) -> Plan:
    """`plan`, in this process."""
    mesh = make_mesh(config.mesh, machines.devices(machine))
    program = make_train_step(config, target_cfg, mesh, machine.chip.memory)
    state, frozen, batch = _arguments(program, config, target_cfg)
    update = jax.jit(program.update, donate_argnums=0, out_shardings=(program.state_sharding, None))
    options = HURRY[machine.chip.compiler] if hurry else {}
    with jax.set_mesh(mesh), matmul_precision(config.run.dtype):
        traced = update.trace(state, frozen, batch)
        step_flops = flops.of_program(traced.jaxpr)
        step = lowering.compiled(traced.lower(), options)
        step = step._replace(declared=declared(traced.jaxpr))
        evaluation = HloModule()
        if step.hlo is not None:
            probe = jax.jit(program.probe).lower(state.params, frozen, batch)
            evaluation = lowering.compiled(probe, options)
    held = {
        "target": num_bytes(frozen),
        "drafter": num_bytes(state.params),
        "optimizer": num_bytes(state) - num_bytes(state.params),
        "batch": num_bytes(batch),
    }
    memory = _memory(held, step, evaluation, machine.chip.memory)
    compiled = {"step": step.seconds, "evaluation": evaluation.seconds}
    refused = None in (step.hlo, evaluation.hlo)
    rows, parts = config.data.rows_per_batch, config.optim.accumulate
    return {
        "topology": machine.name,
        "chips": machine.num_chips,
        "mesh": dict(mesh.shape),
        "rows_per_batch": rows,
        "rows_unit": parts * mesh.shape["data"] * mesh.shape["fsdp"],
        "row_length": config.data.row_length,
        "accumulate": parts,
        "memory": memory,
        "compile_s": compiled,
        "hurried": bool(options),
        "refused": refused,
        "fits": not refused and memory["peak"] <= memory["limit"],
    } | _cost(config, target_cfg, machine, held, step_flops, step)


def _arguments(
    program: TrainStep, config: DistillConfig, target_cfg: TargetConfig
) -> tuple[Any, ...]:
    """State, frozen weights and batch as shapes with shardings."""
    frozen = abstract_frozen(target_cfg, jnp.dtype(config.run.dtype))
    batch = flops.abstract_batch(config.data.rows_per_batch, config.data.row_length)
    return (
        program.abstract_state(),
        abstract(frozen, program.frozen_sharding),
        abstract(batch, program.rows_sharding),
    )


def _memory(
    held: dict[str, int], step: HloModule, evaluation: HloModule, limit: int
) -> dict[str, int | None]:
    """Bytes on one chip by part; `temporary` is the part of the peak that is no argument."""
    fixed, waiting = sum(held.values()), held["optimizer"]  # which is no argument of evaluations
    temporary = None if step.peak_bytes is None else step.peak_bytes - fixed
    evaluated = None if evaluation.peak_bytes is None else evaluation.peak_bytes + waiting - fixed
    known = [needs for needs in (temporary, evaluated) if needs is not None]
    peak = fixed + max(known) if known else None
    return held | {"temporary": temporary, "evaluation": evaluated, "peak": peak, "limit": limit}


def _cost(
    config: DistillConfig,
    target_cfg: TargetConfig,
    machine: Machine,
    held: dict[str, int],
    step_flops: int,
    step: HloModule,
) -> Plan:
    """FLOPs, bytes, collectives, the modelled time of a step, and bounds that none can beat."""
    rows = config.data.rows_per_batch * config.data.row_length
    per_token = flops.model_flops_per_token(config, target_cfg)
    rate = machine.num_chips * machine.chip.flops(config.run.dtype)
    kinds, unknown = hlo.collectives(step.hlo) if step.hlo else ({}, 0)
    return {
        "model_flops": per_token * rows,
        "model_flops_per_token": per_token,
        "traced_flops": step_flops,
        "collectives": {
            kind: {"count": found.count, "bytes": found.received} for kind, found in kinds.items()
        },
        "loops_of_unknown_length": unknown,
        "links": {"count": machine.num_links, "bytes_per_s": machine.chip.link},
        "bound_s": {
            "compute": step_flops / rate,
            "memory": _least_moved(config, held) / machine.chip.bandwidth,
            "network": _network_s(machine, kinds) if step.hlo else None,
        },
        "peak_flops": rate,
    } | (_modelled(config, machine, step.hlo, step.declared) if step.hlo else UNKNOWN)


def _least_moved(config: DistillConfig, held: dict[str, int]) -> int:
    """Bytes of every weight, read once in each part of a batch, and of the optimiser's update."""
    weights = held["target"] + held["drafter"]
    return config.optim.accumulate * weights + held["drafter"] + 2 * held["optimizer"]


def _network_s(machine: Machine, kinds: dict[str, hlo.Traffic]) -> float:
    received = sum(traffic.received for traffic in kinds.values())
    return received and received / (machine.num_links * machine.chip.link)


UNKNOWN: Plan = dict.fromkeys(("flops", "bytes", "step_s", "parts_s", "kernels"))


def _modelled(config: DistillConfig, machine: Machine, optimised: str, costs: Declared) -> Plan:
    """What one chip computes and moves in a step, and how long that takes, by what binds it."""
    rules = Rules((), "step", costs, turns=1, stays=machine.chip.stays)
    found = [
        kernel
        for kernel in kernels.of_program(optimised, _kind_of, rules)
        if kernel.opcode.removesuffix("-start") not in hlo.COLLECTIVES
    ]
    takes = {kernel.name: _takes(machine, kernel, config.run.dtype) for kernel in found}
    seconds = {name: max(both) for name, both in takes.items()}
    network = machine.num_links * machine.chip.link
    span = schedule.span(
        optimised,
        seconds,
        lambda each: machine.chip.latency + (each.received and each.received / network),
    )
    parts, by_hand = {"products": 0.0, "memory": 0.0}, Counter[str]()
    for kernel in found:
        if kernel.pallas:
            by_hand[kernel.pallas] += kernel.times
        computing, moving = takes[kernel.name]
        parts["products" if computing > moving else "memory"] += kernel.times * seconds[kernel.name]
    return {
        "flops": sum(kernel.times * kernel.flops for kernel in found),
        "bytes": sum(kernel.times * kernel.in_memory for kernel in found),
        "step_s": span.total,
        "parts_s": parts | {"network": span.exposed},
        "kernels": by_hand,
    }


def _takes(machine: Machine, kernel: Kernel, dtype: str) -> tuple[float, float]:
    """Seconds of a kernel's products, and of its bytes, in a step that computes in `dtype`."""
    rate = machine.chip.flops("bfloat16")
    if kernel.is_float32:
        is_rounded = dtype == "bfloat16"
        rate *= ROUNDED[machine.chip.compiler] if is_rounded else machine.chip.float32
    return kernel.flops / (ATTAINED * rate), kernel.in_memory / machine.chip.bandwidth


def _kind_of(argument: str) -> str:
    """Whether an argument of the step is a weight, from its name in the program."""
    return ACTIVATIONS if argument.startswith("batch") else WEIGHTS


if __name__ == "__main__":
    child.serve(compile_plan)
