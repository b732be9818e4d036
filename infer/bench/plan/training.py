"""Memory fit and cost of the training step, compiled for machines that are not attached.

    config, topology --> shapes, shardings, XLA --> plan, or a refusal

Times are modelled, not measured. Memory and collectives are those of the compiled program. A matrix
product or Pallas kernel takes the longer of two times: its FLOPs at ATTAINED of the chip's peak,
and its bytes at the memory's full rate. The arrays of all other kernels are written and read once.
Collectives add their time, as if kernels hid none of them. The evaluation between steps takes the
whole batch at once; it is compiled for its memory if a step takes the batch in several parts. The
hours of a run are those of its steps.

Full optimisation for a TPU takes minutes. With low effort, libtpu is six times as fast and its
memory figure is right within a few percent, which is enough unless the result is close to the
limit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from infer.bench.plan import hlo, lowering, machines
from infer.bench.plan.machines import Machine
from moa_jax.config import DistillConfig, TargetConfig
from moa_jax.model.sharding import make_mesh
from moa_jax.runtime.precision import matmul_precision
from moa_jax.training import flops
from moa_jax.training.distillation import abstract_frozen, make_train_step
from moa_jax.training.update import abstract

Plan = dict[str, Any]
HURRY = {"tpu": {"exec_time_optimization_effort": -1.0}, "cuda": {}}
ATTAINED = 0.7  # share of a chip's peak that large matrix products reach
CLOSE = 0.1  # distance from the limit at which full optimisation may change the verdict


def plan(
    config: DistillConfig, target_cfg: TargetConfig, machine: Machine, hurry: bool = False
) -> Plan:
    """The cost of the training step of `config` on `machine`, as a JSON-compatible dictionary.

    Raises InputError without the machine's compiler and for a mesh that does not divide the
    machine, the models or the batch.
    """
    mesh = make_mesh(config.mesh, machines.devices(machine))
    program = make_train_step(config, target_cfg, mesh, machine.chip.memory)
    state = program.abstract_state()
    target = abstract_frozen(target_cfg, jnp.dtype(config.run.dtype))
    frozen = abstract(target, program.frozen_sharding)
    rows = config.data.rows_per_batch
    batch = abstract(flops.abstract_batch(rows, config.data.row_length), program.rows_sharding)
    update = jax.jit(program.update, donate_argnums=0, out_shardings=(program.state_sharding, None))
    options = HURRY[machine.chip.compiler] if hurry else {}
    with jax.set_mesh(mesh), matmul_precision(config.run.dtype):
        step = lowering.compiled(update.trace(state, frozen, batch), options)
        evaluation = lowering.HloModule(hlo="", peak_bytes=0)
        if config.optim.accumulate > 1 and step.hlo is not None:
            probe = jax.jit(program.probe).trace(state.params, frozen, batch)
            evaluation = lowering.compiled(probe, options)
    held = {
        "target": lowering.num_bytes(frozen),
        "drafter": lowering.num_bytes(state.params),
        "optimizer": lowering.num_bytes(state) - lowering.num_bytes(state.params),
        "batch": lowering.num_bytes(batch),
    }
    # The optimizer's state is not an argument of the evaluation.
    peak = max(step.peak_bytes, evaluation.peak_bytes + held["optimizer"])
    memory = held | {"temporary": peak - sum(held.values()), "peak": peak}
    return {
        "topology": machine.name,
        "chips": machine.num_devices,
        "mesh": dict(mesh.shape),
        "rows_per_batch": rows,
        "row_length": config.data.row_length,
        "accumulate": config.optim.accumulate,
        "target_place": program.target_place,
        "memory": memory | {"limit": machine.chip.memory},
        "evaluation_peak": evaluation.peak_bytes and evaluation.peak_bytes + held["optimizer"],
        "hurried": bool(options),
        "fits": None not in (step.hlo, evaluation.hlo) and peak <= machine.chip.memory,
    } | _cost(config, target_cfg, machine, step)


def is_close(found: Plan) -> bool:
    """Whether the peak is so close to the limit that full optimisation may change the verdict."""
    peak, limit = found["memory"]["peak"], found["memory"]["limit"]
    return abs(peak - limit) <= CLOSE * limit


def smaller(config: DistillConfig, found: Plan) -> list[tuple[str, str]]:
    """Settings that lower the peak of a plan, by dotted name; empty if none is left.

    Chunks come first, because they change results by rounding only, and the parts of a batch last.
    Neither makes room for weights.
    """
    memory, mesh, rows = found["memory"], found["mesh"], found["rows_per_batch"]
    held = sum(memory[part] for part in ("target", "drafter", "optimizer", "batch"))
    has_room = held < memory["limit"]
    if has_room and not (config.chunks.head and config.chunks.memory):
        return [("chunks.head", "512"), ("chunks.memory", "1024")]
    if found["target_place"] == "copied" and mesh["fsdp"] > 1:
        return [("mesh.target", "cut")]
    has_room &= found["evaluation_peak"] <= memory["limit"]  # it takes the batch at once
    parts = range(found["accumulate"] + 1, rows + 1) if has_room else ()
    fitting = (n for n in parts if rows % n == 0 and rows // n % (mesh["data"] * mesh["fsdp"]) == 0)
    return [("optim.accumulate", str(n)) for n in fitting][:1]


def _cost(
    config: DistillConfig, target_cfg: TargetConfig, machine: Machine, step: lowering.HloModule
) -> Plan:
    """FLOPs, bytes, collectives and the modelled time of a step, by bottleneck."""
    chip, chips = machine.chip, machine.num_devices
    tokens = config.data.rows_per_batch * config.data.row_length
    per_token = flops.model_flops_per_token(config, target_cfg)
    peak = chip.flops(config.run.dtype)
    products = [*lowering.products(step.jaxpr, lowering.Shares(chips, chips))]
    found: Plan = dict.fromkeys(("bytes", "step_s", "parts_s", "tokens_per_s", "mfu", "hours"))
    collectives = hlo.collectives(step.hlo) if step.hlo else {}
    if step.hlo:
        kernels = (each for each in hlo.kernels(step.hlo) if not each.is_product)
        stored = sum(2 * each.times * each.written for each in kernels)
        parts = {
            "products": sum(each.seconds(chip.bandwidth, ATTAINED * peak) for each in products),
            "memory": stored / chip.bandwidth,
            "network": machine.links_s(collectives),
        }
        step_s = sum(parts.values())
        found = {
            "bytes": stored + sum(each.times * each.bytes for each in products),
            "step_s": step_s,
            "parts_s": parts,
            "tokens_per_s": tokens / step_s,  # padding counts
            "mfu": per_token * tokens / (step_s * chips * peak),
            "hours": config.optim.total_steps * step_s / 3600,
        }
    return found | {
        "flops": sum(each.times * each.flops for each in products),
        "model_flops": per_token * tokens,
        "total_steps": config.optim.total_steps,
        "total_tokens": config.optim.total_steps * tokens,
        "collectives": collectives,
    }
