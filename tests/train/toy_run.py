"""A fast training run: `python -m tests.train.toy_run FOLDER [FLAGS]`.

Trains a bigram model on random tokens, with random dropout, by the real update, loop and
checkpoints, on all devices of all processes. The batch of a step depends on the step alone. Prints
a line as each update starts. FLAGS are dotted settings and those of infer.cli.flags.cluster.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import sys
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from infer.cli.flags import cluster
from infer.cli.program import TRY_AGAIN, run
from moa_jax.config import (
    BlockConfig,
    DataConfig,
    OptimConfig,
    PretrainConfig,
    RunConfig,
    TargetConfig,
)
from moa_jax.data.batch import Batch
from moa_jax.drafters.losses import next_token_loss
from moa_jax.training.checkpoint import Checkpoints
from moa_jax.training.optim import optimizer
from moa_jax.training.update import abstract, init_state, make_update
from train.run import stop
from train.run.loop import TrainJob, fit
from train.run.settings import config_parser, parse_config

VOCAB, WIDTH, LENGTH, ROWS = 16, 64, 8, 4


def toy_config(folder: Path | str, **run_settings: Any) -> PretrainConfig:
    """Returns twelve steps, a save every fourth, an evaluation every third."""
    settings = {"log_every": 2, "eval_every": 3, "save_every": 4} | run_settings
    block, folder = BlockConfig(4, 1, 1, 4, 4, 1e-5, 1e4, None), Path(folder)
    target = TargetConfig("llama", VOCAB, 1, block, True, 8)
    data = DataConfig(("none",), ("none",), LENGTH, LENGTH, ROWS)
    optim = OptimConfig(1e-2, warmup_steps=2, decay_steps=4, peak=2.0, total_steps=12)
    run = RunConfig(str(folder / "run"), **settings)
    return PretrainConfig(target, data, optim, run, tokenizer="none", output=str(folder / "final"))


def toy_batch(step: int) -> Batch:
    tokens_BT = np.random.default_rng(step).integers(0, VOCAB, (ROWS, LENGTH)).astype(np.int32)
    position_BT = np.tile(np.arange(LENGTH, dtype=np.int32), (ROWS, 1))
    return Batch(tokens_BT, np.ones_like(tokens_BT), position_BT, np.ones(tokens_BT.shape, bool))


def place_of(array: Any) -> NamedSharding:
    """Splits matrices over all devices, and copies scalars to each device."""
    mesh = jax.make_mesh((jax.device_count(),), ("rows",), axis_types=(AxisType.Auto,))
    return NamedSharding(mesh, PartitionSpec(*["rows"] * (array.ndim > 0)))


def placed(array: Any) -> jax.Array:
    """Puts a host array on all devices."""
    array = np.asarray(array)
    return jax.make_array_from_callback(array.shape, place_of(array), lambda index: array[index])


def placed_batch(step: int) -> Batch:
    return jax.tree.map(placed, toy_batch(step))


def cut_at(step: int, batch_of: Any = placed_batch) -> Any:
    """Returns a `batch` of a job that is interrupted before this step."""

    def batch(index: int) -> Batch:
        if index == step:
            raise KeyboardInterrupt
        return batch_of(index)

    return batch


def toy_loss(params: Any, frozen: Any, batch: Batch, key: Any, progress: Any) -> Any:
    """Returns the next-token loss; a token of -1 makes it NaN."""
    here_BTV = jax.nn.one_hot(batch.tokens_BT, VOCAB)
    here_BTV *= jax.random.bernoulli(key, 0.8, (*batch.tokens_BT.shape, 1))
    spoilt = jnp.where(jnp.any(batch.tokens_BT < 0), jnp.nan, 1.0)
    return next_token_loss(here_BTV @ params["embed"] @ params["head"] * spoilt, batch)


def toy_job(config: PretrainConfig, **changes: Any) -> TrainJob:
    """Returns the job of `config`, with some of its parts replaced."""
    seed, tx = config.run.seed, optimizer(config.optim)

    def init(key: Any) -> Any:
        keys = jax.random.split(key)
        params = {
            "embed": jax.random.normal(keys[0], (VOCAB, WIDTH)),
            "head": jax.random.normal(keys[1], (WIDTH, VOCAB)),
        }
        return init_state(params, tx)

    def start() -> Any:
        return jax.tree.map(placed, init(jax.random.key(seed)))

    def evaluate(params: Any, frozen: Any) -> dict[str, Any]:
        return {"simulated_tau": 2 + jnp.mean(params["head"])}

    shapes = jax.eval_shape(init, jax.random.key(seed))
    state = abstract(shapes, jax.tree.map(place_of, shapes))
    known = (config, start, state, placed_batch, toy_update(config.optim, seed), evaluate)
    job = TrainJob(*known, data={"first rows": "toy's"})
    return dataclasses.replace(job, **changes)


@functools.cache  # many runs in a process compile it once
def toy_update(optim: OptimConfig, seed: int) -> Any:
    update = make_update(toy_loss, optimizer(optim), seed, optim.total_steps, optim.accumulate)
    return jax.jit(update, donate_argnums=0)


def final_state(folder: Path, config: PretrainConfig | None = None) -> list[np.ndarray]:
    """Returns the arrays of the newest checkpoint: step, parameters, optimiser state."""
    config = config or toy_config(folder)
    with Checkpoints(config) as checkpoints:
        return jax.tree.leaves(jax.device_get(checkpoints.restore(toy_job(config).abstract)))


def steps_of(folder: Path) -> list[str]:
    """Returns the names in the folder of checkpoints."""
    return sorted(path.name for path in (folder / "run" / "checkpoints").iterdir())


def printed_batch(step: int) -> Batch:
    """Prints a step and returns its batch; after $TOY_UPDATES batches, waits for a kill."""
    global _num_batches
    if str(_num_batches) == os.environ.get("TOY_UPDATES"):
        time.sleep(600)
    _num_batches += 1
    print(f"update {step}", flush=True)
    return placed_batch(step)


_num_batches = 0


def main(arguments: list[str] | None = None) -> int | None:
    parser = config_parser("tests.train.toy_run", __doc__)
    cluster.add_flags(parser)
    folder, *flags = sys.argv[1:] if arguments is None else arguments
    settings = Path(folder) / f"settings{os.getpid()}.py"
    settings.write_text(
        f"from tests.train.toy_run import toy_config\nconfig = toy_config({folder!r})\n",
        encoding="utf-8",
    )
    config, args = parse_config(parser, PretrainConfig, ["--config", str(settings), *flags])
    stop.STOP_TIMEOUT_S = float(os.environ.get("TOY_STOP_TIMEOUT", stop.STOP_TIMEOUT_S))
    with cluster.joined(args, parser.prog):
        finished = fit(toy_job(config, batch=printed_batch), frozen=None) is not None
    return None if finished else TRY_AGAIN


if __name__ == "__main__":
    run(main)
