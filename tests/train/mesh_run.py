"""Trains a toy on meshes and prints its losses as JSON; tests run it in separate processes.

python -m tests.train.mesh_run STEPS [--devices N] [cluster flags] CASE ...

A case is DATA,FSDP,TENSOR[,TARGET][/OPTIONS], as in 1,2,2,copied or 1,2,2/bfloat16. The options:

    cached      the target's pass comes from the host, as from a cache
    blocks      scores are computed in blocks, as on accelerators
    bfloat16    the dtype of computations
    parts       a batch in four micro-batches
    sliced      a loss over a draft vocabulary
    experts     a target with experts, whose tokens are sorted on a mesh, as on TPUs
    sent        no losses: the collectives of a compiled update of each drafter
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import math
import re
import sys
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh

from infer.cli.flags import cluster
from moa_jax.config import (
    DataConfig,
    DistillConfig,
    Eagle3Config,
    ExpertsConfig,
    MeshConfig,
    MoaConfig,
    OptimConfig,
    RunConfig,
)
from moa_jax.data.batch import Batch, TappedBatch
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.model import experts, sharding
from moa_jax.training.distillation import abstract_frozen, make_keep, make_train_step
from moa_jax.training.flops import abstract_batch
from moa_jax.training.update import abstract
from tests.train import test_packing
from tests.train.blocks import in_blocks

ROWS, T = 8, 24
VOCAB, DRAFT_VOCAB = 80, 36  # no other axis has these sizes or their halves
TARGET = dataclasses.replace(test_packing.TARGET, vocab_size=VOCAB)
DRAFTER = MoaConfig(2, 24, 2, 24, 2, 16, target_layer_inference=1)
DRAFT_IDS = tuple(range(3, 3 + 2 * DRAFT_VOCAB, 2))
DRAFTER_KINDS = {"moa": DRAFTER, "eagle3": Eagle3Config(2, 24, None, DRAFT_IDS, (0, 1, 2))}
COLLECTIVE = re.compile(r"= (.*?) (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(")


def config_of(mesh: MeshConfig, accumulate: int = 1, dtype: str = "float32") -> DistillConfig:
    optim = OptimConfig(1e-2, 2, 4, 2.0, 20, accumulate=accumulate)
    data, run = DataConfig((), (), T, T, ROWS), RunConfig("", seed=3, dtype=dtype)
    parts = dict(drafter=DRAFTER, data=data, optim=optim, run=run, mesh=mesh)
    return DistillConfig(target="", output="", **parts)


def batch_of(step: int, rows: slice) -> Batch:
    rng = np.random.default_rng(step)
    tokens_BT = rng.integers(0, TARGET.vocab_size, (ROWS, T)).astype(np.int32)
    position_BT = np.broadcast_to(np.arange(T, dtype=np.int32), (ROWS, T))
    response_BT = position_BT >= rng.integers(3, 12, (ROWS, 1))
    whole = Batch(tokens_BT, np.ones((ROWS, T), np.int32), position_BT, response_BT)
    return Batch(*(array[rows] for array in whole))


def frozen_weights(dtype: str = "float32") -> dict:
    """Returns a random target with stacked layers."""
    return jax.tree.map(lambda x: x.astype(dtype), test_packing.frozen_weights(TARGET))


def mesh_of(cfg: MeshConfig) -> Mesh:
    """The first devices as a mesh."""
    return sharding.make_mesh(cfg, jax.devices()[: math.prod((cfg.data, cfg.fsdp, cfg.tensor))])


def losses(steps: int, mesh_cfg: MeshConfig, options: str) -> list[float]:
    """Returns the losses of these updates."""
    dtype = "bfloat16" if options == "bfloat16" else "float32"
    config = config_of(mesh_cfg, 4 if "parts" in options else 1, dtype)
    if "sliced" in options:
        config = dataclasses.replace(config, draft_vocabulary=DRAFT_VOCAB)
    mesh = mesh_of(mesh_cfg)
    program = make_train_step(config, TARGET, mesh)
    taps = DRAFTERS[method_of(DRAFTER)].make(DRAFTER, TARGET, config).taps
    keep = jax.jit(make_keep(TARGET, taps, jnp.dtype(dtype)), out_shardings=program.rows_sharding)

    found = []
    with jax.set_mesh(mesh):
        weights = jax.jit(
            functools.partial(frozen_weights, dtype), out_shardings=program.frozen_sharding
        )()
        state = jax.jit(program.init, out_shardings=program.state_sharding)(jax.random.key(2))
        update = jax.jit(
            program.update, donate_argnums=0, out_shardings=(program.state_sharding, None)
        )
        for step in range(steps):
            read = lambda rows, step=step: batch_of(step, rows)
            batch = sharding.place_rows(read, program.rows_sharding, (ROWS,))
            if options == "cached":
                kept = TappedBatch(*jax.device_get((*batch, keep(weights, batch))))
                cut = lambda rows, kept=kept: jax.tree.map(lambda x: x[rows], kept)
                batch = sharding.place_rows(cut, program.rows_sharding, (ROWS,))
            state, metrics = update(state, weights, batch)
            found.append(float(metrics["loss"]))
    return found


def sent(mesh_cfg: MeshConfig) -> dict[str, list]:
    """The kind and the shapes of the results of each collective in an update, by drafter."""
    mesh, found = mesh_of(mesh_cfg), {}
    for name, drafter in DRAFTER_KINDS.items():
        config = dataclasses.replace(config_of(mesh_cfg), drafter=drafter)
        program = make_train_step(config, TARGET, mesh)
        with jax.set_mesh(mesh):
            update = jax.jit(program.update, out_shardings=(program.state_sharding, None))
            frozen = abstract(abstract_frozen(TARGET), program.frozen_sharding)
            batch = abstract(abstract_batch(ROWS, T), program.rows_sharding)
            compiled = update.lower(program.abstract_state(), frozen, batch).compile()
        found[name] = [
            (kind, [int(size) for size in dims.split(",")])
            for results, kind in COLLECTIVE.findall(compiled.as_text())
            for dims in re.findall(r"\[([\d,]+)\]", results)
        ]
    return found


def result_of(case: str, steps: int) -> Any:
    shape, _, options = case.partition("/")
    sizes = shape.split(",")
    config = MeshConfig(*map(int, sizes[:3]), *sizes[3:])
    with pytest.MonkeyPatch.context() as patch:
        if options == "blocks":
            in_blocks(patch, 8)
        if options == "experts":
            block = dataclasses.replace(TARGET.block, experts=ExpertsConfig(8, 2, 16, True))
            patch.setattr(sys.modules[__name__], "TARGET", dataclasses.replace(TARGET, block=block))
            if config != MeshConfig(1, 1, 1):
                patch.setattr(experts, "traced_platform", lambda: "tpu")
        return sent(config) if options == "sent" else losses(steps, config, options)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("steps", type=int)
    parser.add_argument("cases", nargs="+")
    parser.add_argument("--devices", type=int, default=1)
    cluster.add_flags(parser)
    args = parser.parse_args()
    jax.config.update("jax_num_cpu_devices", args.devices)
    with cluster.joined(args, parser.prog):
        for case in args.cases:
            result = result_of(case, args.steps)
            if jax.process_index() == 0:
                print("result", json.dumps([case, result]), flush=True)


if __name__ == "__main__":
    main()
