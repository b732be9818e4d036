"""The loop that every trainer runs: updates, metrics, evaluations, checkpoints, resume.

What a run computes depends on its settings alone: it may be killed at any moment, and the same
command goes on to the same weights, optimiser state and metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

from moa_jax.config import DistillConfig, PretrainConfig
from moa_jax.config.checks import is_utf8
from moa_jax.data.batch import Batch
from moa_jax.errors import InputError
from moa_jax.files.places import is_stored, place
from moa_jax.runtime.precision import matmul_precision
from moa_jax.training.checkpoint import Checkpoints
from moa_jax.training.metrics import check_tensorboard
from moa_jax.training.update import Metrics, Params, TrainState
from train.run.stop import StopRequest
from train.run.watch import Watch

Figures = dict[str, Any]  # numbers and lists of numbers, the same whenever they are taken


@dataclasses.dataclass(frozen=True)
class Job:
    """What sets one trainer apart from another. Every process of a run makes the same calls."""

    config: PretrainConfig | DistillConfig
    start: Callable[[], TrainState]  # a fresh state, on its devices
    abstract: TrainState  # its shapes, dtypes and shardings, to read a checkpoint as
    batch: Callable[[int], Batch]  # of a step from 0 on, on its devices
    # Compiled; donates the state. Metrics as those of `moa_jax.training.update.make_update`.
    update: Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]
    evaluate: Callable[[Params, Any], Figures]  # (params, frozen) -> with `simulated_tau`, if any
    data: dict[str, Any]  # what tells the rows of the batches from others
    decode: Callable[[Params], Figures] | None = None  # at checkpoints; with `tau`
    starts_trained: bool = False  # so that the start is worth an evaluation
    flops_per_token: float | None = None  # of an update, recomputation left out


def fit(job: Job, frozen: Any) -> Params | None:
    """Trains from the newest checkpoint or from `job.start()`; `frozen` is only read.

    Returns the final weights, or None where the run was told to stop before its end: its state
    is saved then. Raises InputError for a directory that is in use or another run's, for a disk
    without room, and for a loss or gradient that is not finite, where run.not_finite is `stop`.
    """
    config, total = job.config, job.config.optim.total_steps
    check(config)
    with StopRequest() as stop, Checkpoints(config, job.data) as checkpoints:
        restored = checkpoints.restore(job.abstract)
        state = restored or job.start()
        done = int(state.step)
        with Watch(config, done if restored else None, job.flops_per_token) as watch:
            for step, tau in watch.taus.items():
                checkpoints.rate(step, tau)
            stopped = stop.reached(done)
            if not stopped:  # a run may have been cut between a save and its evaluation
                _measure(job, done, state.params, frozen, watch, checkpoints)
            while done < total and not stopped:
                batch = job.batch(done)
                with matmul_precision(config.run.dtype):
                    state, metrics = job.update(state, frozen, batch)
                done += 1
                watch.updated(done, metrics, batch)
                stopped = stop.reached(done)
                if not stopped and _is_due(done, config.run.save_every, total):
                    watch.settle()  # what is saved is known to be finite
                    checkpoints.save(state)
                if not stopped:
                    _measure(job, done, state.params, frozen, watch, checkpoints)
                checkpoints.check()
            if stopped:
                watch.settle()
                checkpoints.save(state)
            checkpoints.wait()
            watch.ended(done, stopped)
    return None if stopped else state.params


def _measure(
    job: Job, step: int, params: Params, frozen: Any, watch: Watch, checkpoints: Checkpoints
) -> None:
    """Evaluates and decodes where that is due and not yet recorded."""
    run, total = job.config.run, job.config.optim.total_steps
    is_start = step == 0 and job.starts_trained
    if (is_start or _is_due(step, run.eval_every, total)) and watch.owes(step, "eval"):
        watch.settle()
        with matmul_precision(run.dtype):
            found = job.evaluate(params, frozen)
        watch.measured(step, "eval", found)
        if step in watch.taus:
            checkpoints.rate(step, watch.taus[step])
    if job.decode is not None and _is_due(step, run.save_every, total):
        if watch.owes(step, "decode"):
            watch.settle()
            watch.measured(step, "decode", job.decode(params))


def _is_due(step: int, every: int, total: int) -> bool:
    return step > 0 and (step % every == 0 or step == total)


def check(config: PretrainConfig | DistillConfig) -> None:
    """Raises InputError for settings that no run can have, before anything is loaded."""
    rows, parts = config.data.rows_per_batch, config.optim.accumulate
    if rows % parts:
        raise InputError(
            f"data.rows_per_batch {rows} does not split into optim.accumulate {parts} equal "
            "parts: choose numbers that divide"
        )
    check_output(config)
    directory = place(config.run.directory)
    if not is_utf8(str(directory if is_stored(directory) else directory.resolve())):
        raise InputError(
            f"run.directory {config.run.directory} is not valid UTF-8, and Orbax writes no "
            "checkpoint there: choose another folder"
        )
    if config.run.tensorboard:
        if is_stored(place(config.run.directory)):
            raise InputError("run.tensorboard: events are written to a folder, not to a store")
        check_tensorboard()


def check_output(config: PretrainConfig | DistillConfig) -> None:
    """Raises InputError for an output that is, or holds, a folder that the run reads or keeps."""
    if isinstance(config, PretrainConfig):
        folders = {"run.directory": config.run.directory, "tokenizer": config.tokenizer}
    else:
        folders = {"run.directory": config.run.directory, "target": config.target}
        if config.init_from is not None:
            folders["init_from"] = config.init_from
    output = Path(os.path.realpath(config.output))
    for name, folder in folders.items():
        if is_stored(place(folder)):
            continue
        if Path(os.path.realpath(place(folder))).is_relative_to(output):
            raise InputError(
                f"output {config.output} is, or holds, {name} {folder}: choose another output"
            )
