"""The training loop of every trainer: updates, metrics, evaluations, checkpoints, resume.

The result of a run depends on its settings alone: a run may be killed at any moment, and the same
command resumes towards the same weights, optimiser state and metrics.jsonl.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from moa_jax.config import DistillConfig, PretrainConfig, RunConfig, output_of
from moa_jax.config.checks import is_utf8
from moa_jax.data.batch import Batch
from moa_jax.errors import InputError
from moa_jax.files.paths import is_stored, place
from moa_jax.runtime.multihost import on_first
from moa_jax.runtime.precision import matmul_precision
from moa_jax.training.checkpoint import Checkpoints
from moa_jax.training.metrics import check_tensorboard, check_tracker
from moa_jax.training.update import Metrics, Params, TrainState
from train.run.run_logger import RunLogger
from train.run.start import working_on
from train.run.stop import StopRequest

Figures = dict[str, Any]  # deterministic numbers and lists of numbers


@dataclasses.dataclass(frozen=True)
class TrainJob:
    """The parts of `fit` that differ by trainer. Every process of a run makes the same calls."""

    config: PretrainConfig | DistillConfig
    start: Callable[[], TrainState]  # a fresh state, on its devices
    abstract: TrainState  # shapes, dtypes and shardings of a restored checkpoint
    batch: Callable[[int], Batch]  # (step, from 0) -> its batch, on its devices
    # Compiled; donates the state. Returns metrics as `moa_jax.training.update.make_update` does.
    update: Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]
    evaluate: Callable[[Params, Any], Figures]  # `simulated_tau` is one figure, if any
    data: dict[str, Any]  # facts that identify the rows of the batches
    decode: Callable[[Params], Figures] | None = None  # at checkpoints; has `decoded_tau`
    starts_trained: bool = False  # then step 0 is evaluated, too
    flops_per_token: float | None = None  # of an update, without recomputation
    steps_per_epoch: int | None = None
    layout: str = ""  # devices, mesh and placement of the target, in words


def fit(job: TrainJob, frozen: Any, stop: StopRequest | None = None) -> Params | None:
    """Trains from the newest checkpoint or from `job.start()`; `frozen` is only read.

    `stop` is entered already; by default, signals are handled from here on.
    Returns the final weights, or None if a signal stopped the run before its end; the state of a
    stopped run is saved. Raises InputError for a directory that is in use or belongs to another
    run, for a disk without room, and, if run.not_finite is `stop`, for a loss or gradient that is
    not finite.
    """
    config, total = job.config, job.config.optim.total_steps
    check(config)
    handler = StopRequest() if stop is None else nullcontext(stop)
    with handler as stop, Checkpoints(config, job.data) as checkpoints:
        with working_on("restoring the newest checkpoint, or initialising the drafter"):
            restored = checkpoints.restore(job.abstract)
            state = restored or job.start()
            begun = done = int(state.step)
        facts = (job.flops_per_token, job.steps_per_epoch, job.layout, checkpoints.run_id)
        logger = RunLogger(config, done if restored else None, *facts)
        with logger as watch, working_on("training"):
            checkpoints.rate(watch.ratings())
            stopped = stop.reached(done)
            if not stopped:  # an earlier run may have ended between a save and its evaluation
                _measure(job, done, state.params, frozen, watch, checkpoints)
            saved = time.monotonic()
            while done < total and not stopped:
                batch = job.batch(done)
                compiles = working_on("compiling the step") if done == begun else nullcontext()
                with matmul_precision(config.run.dtype), compiles:
                    state, metrics = job.update(state, frozen, batch)
                done += 1
                stop.begin()
                watch.updated(done, metrics, batch)
                stopped = stop.reached(done)
                if not stopped and _owes_save(config.run, done, total, saved):
                    watch.settle()  # the saved state is known to be finite
                    watch.name_slow_hosts()
                    with working_on("saving a checkpoint"):
                        checkpoints.save(state)
                    saved = time.monotonic()
                if not stopped:
                    _measure(job, done, state.params, frozen, watch, checkpoints)
                checkpoints.check()
            with working_on("saving the last checkpoint"):
                if stopped:
                    watch.settle()
                    checkpoints.save(state)
                checkpoints.wait()
            watch.ended(done, stopped)
    return None if stopped else state.params


def _measure(
    job: TrainJob,
    step: int,
    params: Params,
    frozen: Any,
    watch: RunLogger,
    checkpoints: Checkpoints,
) -> None:
    """Evaluates and decodes at steps where either is due and not yet recorded."""
    run, total = job.config.run, job.config.optim.total_steps
    is_start = step == 0 and job.starts_trained
    if (is_start or _is_due(step, run.eval_every, total)) and watch.owes(step, "eval"):
        watch.settle()
        with matmul_precision(run.dtype), working_on("evaluating"):
            watch.measured(step, "eval", job.evaluate(params, frozen))
        checkpoints.rate(watch.ratings())
    if job.decode is not None and _is_due(step, run.save_every, total):
        if watch.owes(step, "decode"):
            watch.settle()
            with working_on("decoding the validation prompts"):
                watch.measured(step, "decode", job.decode(params))
            checkpoints.rate(watch.ratings())


def _owes_save(run: RunConfig, step: int, total: int, saved: float) -> bool:
    """Whether a checkpoint is due after `step` updates; `saved` is the time of the last one.

    The clock of process 0 decides for all processes. Only every `log_every`-th update asks for it,
    because the answer waits for the update in flight.
    """
    if _is_due(step, run.save_every, total):
        return True
    if run.save_every_minutes is None or step % run.log_every:
        return False
    return on_first(lambda: time.monotonic() - saved >= 60 * run.save_every_minutes)


def _is_due(step: int, every: int, total: int) -> bool:
    return step > 0 and (step % every == 0 or step == total)


def check(config: PretrainConfig | DistillConfig) -> None:
    """Raises InputError for settings that no run can have, before any data or model is loaded."""
    rows, parts = config.data.rows_per_batch, config.optim.accumulate
    if rows % parts:
        raise InputError(
            f"data.rows_per_batch {rows} does not split into optim.accumulate {parts} equal "
            "parts; choose numbers that divide"
        )
    check_output(config)
    directory = place(config.run.directory)
    if not is_utf8(str(directory if is_stored(directory) else os.path.realpath(directory))):
        raise InputError(
            f"run.directory {config.run.directory} is not valid UTF-8, and Orbax writes no "
            "checkpoint there; choose another folder"
        )
    if config.run.tensorboard:
        if is_stored(place(config.run.directory)):
            raise InputError(
                "run.tensorboard: no events can be written to a store; choose a folder as "
                "run.directory, or leave it false"
            )
        check_tensorboard()
    if config.run.tracker != "none":
        check_tracker(config.run.tracker)


def check_output(config: PretrainConfig | DistillConfig) -> None:
    """Raises InputError for an output that is, or holds, a folder that the run reads or keeps."""
    if isinstance(config, PretrainConfig):
        folders = {"run.directory": config.run.directory, "tokenizer": config.tokenizer}
    else:
        folders = {"run.directory": config.run.directory, "target": config.target}
        if config.init_from is not None:
            folders["init_from"] = config.init_from
    output = _resolved(output_of(config))
    for name, folder in folders.items():
        if output in (found := _resolved(folder), *found.parents):
            raise InputError(
                f"output {output_of(config)} is, or holds, {name} {folder}; choose another output"
            )


def _resolved(path: str) -> Path:
    found = place(path)
    return found if is_stored(found) else Path(os.path.realpath(found))
