"""The training step compiled for machines that are not there: does it fit, what does it cost.

    config, topology --> child process: shapes, shardings, XLA --> plan or why there is none

Nothing is measured. Memory and collectives are those of the compiled program, FLOPs those of the
traced one, and the time is a roofline bound: no step can be faster. Compiling happens in a
process of its own, since compilers crash. The evaluation between steps is compiled too: it takes
the whole batch at once, even where the step takes it in parts.

Full optimisation for a TPU takes minutes. With little, libtpu is six times as fast and its figure
of memory is right within some percent. That is enough for a verdict that is not close.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from moa_jax.aot import child, hlo, lowering, machines
from moa_jax.aot.lowering import HloModule, num_bytes
from moa_jax.aot.machines import Machine
from moa_jax.config import ChunkConfig, DistillConfig, TargetConfig
from moa_jax.model.precision import matmul_precision
from moa_jax.model.sharding import make_mesh
from moa_jax.training import flops
from moa_jax.training.distillation import TrainStep, abstract_frozen, make_train_step
from moa_jax.training.update import abstract

Plan = dict[str, Any]
HURRY = {"tpu": {"exec_time_optimization_effort": -1.0}, "cuda": {}}
CLOSE = 0.1  # to the limit, as a share of it


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
        step_flops = flops.count(program.update, state, frozen, batch)
        step = lowering.compiled(update.lower(state, frozen, batch), options)
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
    } | _cost(config, target_cfg, machine, held, step_flops, step.hlo)


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
    optimised: str | None,
) -> Plan:
    """FLOPs, collectives, and the least time that they and reading every weight can take."""
    tokens = config.data.rows_per_batch * config.data.row_length
    per_token = flops.model_flops_per_token(config, target_cfg)
    chip = machine.chip
    rate = machine.num_chips * chip.flops(config.run.dtype)
    weights = held["target"] + held["drafter"]
    moved = config.optim.accumulate * weights + held["drafter"] + 2 * held["optimizer"]
    kinds, unknown = hlo.collectives(optimised) if optimised else ({}, 0)
    received = sum(traffic.received for traffic in kinds.values())
    network = machine.num_links * chip.link
    seconds = {
        "compute": step_flops / rate,
        "memory": moved / chip.bandwidth,
        "network": (received and received / network) if optimised else None,
    }
    bound = max(filter(None, seconds.values()))
    return {
        "flops": {"step": step_flops, "model": per_token * tokens, "model_per_token": per_token},
        "collectives": {kind: traffic._asdict() for kind, traffic in kinds.items()},
        "loops_of_unknown_length": unknown,
        "links": {"count": machine.num_links, "bytes_per_s": chip.link},
        "bound_s": seconds | {"step": bound},
        "bound_tokens_per_s": tokens / bound,
        "bound_mfu": per_token * tokens / rate / bound,
    }


if __name__ == "__main__":
    child.serve(compile_plan)
