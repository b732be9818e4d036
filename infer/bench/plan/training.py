"""Memory fit and cost of the training step, compiled for machines that are not attached.

    config, topology --> shapes, shardings, XLA --> plan, or a refusal

Times are modelled, not measured. Memory and collectives are those of the compiled program. A matrix
product or Pallas kernel takes the longer of two times: its FLOPs at ATTAINED of the chip's peak,
and its bytes at the memory's full rate. The arrays of all other kernels are written and read once.
Collectives add their time, as if kernels hid none of them. The evaluation between steps is compiled
too: the evaluation processes the batch at once, even if the step accumulates over parts.

Full optimisation for a TPU takes minutes. With low effort, libtpu is six times as fast and its
memory figure is right within a few percent, which is enough unless the result is close to the
limit.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from infer.bench.plan import hlo, lowering, machines
from infer.bench.plan.lowering import HloModule, Shares, num_bytes
from infer.bench.plan.machines import Machine
from moa_jax.config import DistillConfig, TargetConfig
from moa_jax.model.sharding import make_mesh
from moa_jax.runtime.precision import matmul_precision
from moa_jax.training import flops
from moa_jax.training.distillation import abstract_frozen, make_train_step
from moa_jax.training.update import abstract

Plan = dict[str, Any]
HURRY = {"tpu": {"exec_time_optimization_effort": -1.0}, "cuda": {}}
# packed -> (share of tokens in a row that are not padding, source of the figure)
FILL = {
    True: (0.97, "packed: the least that tests/data/test_batches.py finds for such lengths"),
    False: (0.58, "one conversation a row: an estimate for UltraChat in rows of 2,048"),
}
ATTAINED = 0.7  # share of a chip's peak that large matrix products reach


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
        "row_length": config.data.row_length,
        "accumulate": parts,
        "memory": memory,
        "hurried": bool(options),
        "refused": refused,
        "fits": not refused and memory["peak"] <= memory["limit"],
    } | _cost(config, target_cfg, machine, step)


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
    config: DistillConfig, target_cfg: TargetConfig, machine: Machine, step: HloModule
) -> Plan:
    """FLOPs, bytes, collectives and the modelled time of a step, by bottleneck."""
    chip, chips = machine.chip, machine.num_chips
    tokens = config.data.rows_per_batch * config.data.row_length
    per_token = flops.model_flops_per_token(config, target_cfg)
    peak = chip.flops(config.run.dtype)
    products = [*lowering.products(step.jaxpr, Shares(chips, chips))]
    found: Plan = dict.fromkeys(("bytes", "step_s", "parts_s"))
    collectives = hlo.collectives(step.hlo) if step.hlo else {}
    if step.hlo:
        kernels = (each for each in hlo.kernels(step.hlo) if not each.is_product)
        stored = sum(2 * each.times * each.written for each in kernels)
        parts = {
            "products": sum(each.seconds(chip.bandwidth, ATTAINED * peak) for each in products),
            "memory": stored / chip.bandwidth,
            "network": machine.links_s(collectives),
        }
        size = stored + sum(each.times * each.bytes for each in products)
        found = {"bytes": size, "step_s": sum(parts.values()), "parts_s": parts}
    return found | {
        "flops": sum(each.times * each.flops for each in products),
        "model_flops": per_token * tokens,
        "model_flops_per_token": per_token,
        "collectives": collectives,
        "peak_flops": chips * peak,
    }
