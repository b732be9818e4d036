"""Memory fit and cost of the training step, compiled for machines that are not attached.

    config, topology --> child process: shapes, shardings, XLA --> plan, or a refusal

Times are modelled, not measured. Memory and collectives are those of the compiled program. A kernel
takes the longer of two times: its FLOPs at ATTAINED of the chip's peak, and its bytes at the
memory's full rate. Kernels are assumed to hide asynchronous collectives; any other collective
stalls the chip. The network is the bottleneck if it takes longer than all kernels. The bounds do
not depend on a program, and no step can be faster. The evaluation between steps is compiled too:
the evaluation processes the batch at once, even if the step accumulates over parts.

Full optimisation for a TPU takes minutes. With low effort, libtpu is six times as fast and its
memory figure is right within a few percent, which is enough unless the result is close to the
limit.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from infer.bench.plan import child, hlo, lowering, machines
from infer.bench.plan.decoding import priced
from infer.bench.plan.lowering import HloModule, num_bytes
from infer.bench.plan.machines import Machine
from moa_jax.config import DistillConfig, TargetConfig
from moa_jax.model.sharding import make_mesh
from moa_jax.runtime.precision import matmul_precision
from moa_jax.training import flops
from moa_jax.training.distillation import abstract_frozen, make_train_step
from moa_jax.training.update import abstract

Plan = dict[str, Any]
HURRY = {"tpu": {"exec_time_optimization_effort": -1.0}, "cuda": {}}
CLOSE = 0.1  # distance from the limit, as a share of the limit
# packed -> (share of tokens in a row that are not padding, source of the figure)
FILL = {
    True: (0.97, "packed: the least that tests/data/test_batches.py finds for such lengths"),
    False: (0.58, "one conversation a row: an estimate for UltraChat in rows of 2,048"),
}
ATTAINED = 0.7  # share of a chip's peak that large matrix products reach
UNKNOWN: Plan = dict.fromkeys(("flops", "bytes", "step_s", "parts_s", "kernels"))


def plan(
    config: DistillConfig, target_cfg: TargetConfig, machine: Machine, hurry: bool = False
) -> Plan:
    """The cost of the training step of `config` on `machine`, as a JSON-compatible dictionary.

    Raises InputError without the machine's compiler and for a mesh that does not divide the
    machine, the models or the batch. Raises CompilerCrash if the compiler crashes.
    """
    request = (config, target_cfg, machine, hurry)
    return child.run(__name__, request, machine, "try other data.rows_per_batch or another mesh")


def is_close(found: Plan) -> bool:
    """Whether the peak is so close to the limit that full optimisation may change the verdict."""
    peak, limit = found["memory"]["peak"], found["memory"]["limit"]
    return peak is not None and abs(peak - limit) <= CLOSE * limit


def filled(found: Plan, config: DistillConfig, share: float | None = None) -> Plan:
    """Adds the share of tokens that are not padding, and the resulting speed, to a plan.

    `share` defaults to the value in FILL.
    """
    fill, source = FILL[config.data.pack] if share is None else (share, "--fill")
    speed = mfu = None
    if found["step_s"]:
        speed = fill * found["rows_per_batch"] * found["row_length"] / found["step_s"]
        mfu = speed * found["model_flops_per_token"] / found["peak_flops"]
    return found | {"fill": fill, "fill_source": source, "mfu": mfu, "tokens_per_s": speed}


def with_rows(config: DistillConfig, rows: int) -> DistillConfig:
    """The config with batches of `rows` rows."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, rows_per_batch=rows))


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest number that fits, or 0 if 1 does not fit; a good `guess` saves calls."""
    low, high, stride = 0, None, 1
    while high is None or high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        if high is None:
            guess = low + stride
        else:
            guess = (low + high) // 2 if low else max(high - stride, 1)
        stride *= 2
    return low


def expected_rows(found: Plan) -> int:
    """The largest batch that fits if temporary memory is proportional to the number of rows."""
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
    """Computes `plan` in this process."""
    mesh = make_mesh(config.mesh, machines.devices(machine))
    program = make_train_step(config, target_cfg, mesh, machine.chip.memory)
    state = program.abstract_state()
    frozen = abstract(
        abstract_frozen(target_cfg, jnp.dtype(config.run.dtype)), program.frozen_sharding
    )
    rows, parts = config.data.rows_per_batch, config.optim.accumulate
    batch = abstract(flops.abstract_batch(rows, config.data.row_length), program.rows_sharding)
    update = jax.jit(program.update, donate_argnums=0, out_shardings=(program.state_sharding, None))
    options = HURRY[machine.chip.compiler] if hurry else {}
    with jax.set_mesh(mesh), matmul_precision(config.run.dtype):
        traced = update.trace(state, frozen, batch)
        step, evaluation = lowering.compiled(traced, options), HloModule()
        if step.hlo is not None:
            probe = jax.jit(program.probe).trace(state.params, frozen, batch)
            evaluation = lowering.compiled(probe, options)
    held = {
        "target": num_bytes(frozen),
        "drafter": num_bytes(state.params),
        "optimizer": num_bytes(state) - num_bytes(state.params),
        "batch": num_bytes(batch),
    }
    memory = _memory(held, step, evaluation, machine.chip.memory)
    refused = None in (step.hlo, evaluation.hlo)
    return {
        "topology": machine.name,
        "chips": machine.num_chips,
        "mesh": dict(mesh.shape),
        "rows_per_batch": rows,
        "rows_unit": parts * mesh.shape["data"] * mesh.shape["fsdp"],
        "row_length": config.data.row_length,
        "accumulate": parts,
        "memory": memory,
        "compile_s": {"step": step.seconds, "evaluation": evaluation.seconds},
        "hurried": bool(options),
        "refused": refused,
        "fits": not refused and memory["peak"] <= memory["limit"],
    } | _cost(config, target_cfg, machine, held, flops.of_program(traced.jaxpr), step)


def _memory(
    held: dict[str, int], step: HloModule, evaluation: HloModule, limit: int
) -> dict[str, int | None]:
    """Bytes per chip by part; `temporary` is the step's peak minus the arguments."""
    fixed, waiting = sum(held.values()), held["optimizer"]  # not an argument of evaluation
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
    step_flops: float,
    step: HloModule,
) -> Plan:
    """FLOPs, bytes, collectives, the modelled time of a step, and lower bounds of its time."""
    tokens = config.data.rows_per_batch * config.data.row_length
    per_token = flops.model_flops_per_token(config, target_cfg)
    rate = machine.num_chips * machine.chip.flops(config.run.dtype)
    # Every part of a batch reads every weight once, and the optimizer updates its state.
    weights = config.optim.accumulate * (held["target"] + held["drafter"])
    moved = weights + held["drafter"] + 2 * held["optimizer"]
    sent = hlo.collectives(step.hlo) if step.hlo else []
    kinds = hlo.by_kind(sent)
    network = machine.received_s(sum(kind["bytes"] for kind in kinds.values()))
    found = UNKNOWN
    if step.hlo:
        found = modelled(machine, machine.chip.flops(config.run.dtype), step, sent)
    return found | {
        "model_flops": per_token * tokens,
        "model_flops_per_token": per_token,
        "traced_flops": step_flops,
        "collectives": kinds,
        "loops_of_unknown_length": hlo.unknown_loops(step.hlo) if step.hlo else 0,
        "links": {"count": machine.num_links, "bytes_per_s": machine.chip.link},
        "bound_s": {
            "compute": step_flops / rate,
            "memory": moved / machine.chip.bandwidth,
            "network": network if step.hlo else None,
        },
        "peak_flops": rate,
    }


def modelled(machine: Machine, peak: float, step: HloModule, sent: list[hlo.Collective]) -> Plan:
    """FLOPs and bytes of a step per chip, and its time by bottleneck."""
    chip = machine.chip
    kernels = [priced(kernel, step.costs) for kernel in hlo.kernels(step.hlo)]
    parts, pallas = {"products": 0.0, "memory": 0.0, "network": 0.0}, Counter[str]()
    for kernel in kernels:
        computing, moving = kernel.flops / (ATTAINED * peak), kernel.bytes / chip.bandwidth
        part = "products" if computing > moving else "memory"
        parts[part] += kernel.times * max(computing, moving)
        pallas[kernel.pallas] += kernel.times
    seconds = [each.times * (chip.latency + machine.received_s(each.received)) for each in sent]
    alone = (took for took, each in zip(seconds, sent, strict=True) if not each.is_async)
    # Kernels hide the rest of the network's time, up to their own time.
    parts["network"] = max(sum(alone), sum(seconds) - sum(parts.values()))
    return {
        "flops": sum(kernel.times * kernel.flops for kernel in kernels),
        "bytes": sum(kernel.times * kernel.bytes for kernel in kernels),
        "step_s": sum(parts.values()),
        "parts_s": parts,
        "kernels": {name: times for name, times in pallas.items() if name},
    }


if __name__ == "__main__":
    child.serve(compile_plan)
