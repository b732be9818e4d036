"""Compiles updates for a mesh and prints what its devices send: run by tests, in a process apart.

python -m tests.train.collectives_run DATA,FSDP,TENSOR

A line of JSON for each kind of drafter: the kinds of collectives, and the shapes that they give.
"""

from __future__ import annotations

import dataclasses
import json
import re
import sys

import jax

from moa_jax.config import Eagle3Config, MeshConfig
from moa_jax.model import sharding
from moa_jax.training.distillation import abstract_frozen, make_train_step
from moa_jax.training.flops import abstract_batch
from moa_jax.training.update import abstract
from tests.train import mesh_run

VOCAB, GUESSES = 80, 36  # no other axis is as long, or half as long
TARGET = dataclasses.replace(mesh_run.TARGET, vocab_size=VOCAB)
DRAFTERS = {
    "moa": mesh_run.DRAFTER,
    "eagle3": Eagle3Config(2, 24, tapped_layers=(0, 1, 2), draft_ids=tuple(range(3, 75, 2))),
}
COLLECTIVE = re.compile(r"= (.*?) (all-\w+|reduce-scatter|collective-permute)(?:-start)?\(")


def main(mesh: str) -> None:
    cfg = MeshConfig(*map(int, mesh.split(",")))
    jax.config.update("jax_num_cpu_devices", cfg.data * cfg.fsdp * cfg.tensor)
    for name, drafter in DRAFTERS.items():
        config = dataclasses.replace(mesh_run.config_of(cfg), drafter=drafter)
        devices = sharding.make_mesh(cfg, jax.devices())
        program = make_train_step(config, TARGET, devices)
        with jax.set_mesh(devices):
            update = jax.jit(program.update, out_shardings=(program.state_sharding, None))
            compiled = update.lower(
                program.abstract_state(),
                abstract(abstract_frozen(TARGET), program.frozen_sharding),
                abstract(abstract_batch(mesh_run.ROWS, mesh_run.T), program.rows_sharding),
            ).compile()
        found = [
            (kind, [int(size) for size in dims.split(",")])
            for results, kind in COLLECTIVE.findall(compiled.as_text())
            for dims in re.findall(r"\[([\d,]+)\]", results)
        ]
        print("sent", json.dumps([name, found]), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
