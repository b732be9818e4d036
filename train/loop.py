"""The loop that every trainer runs: updates, metrics, evaluations, checkpoints, resume."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import optax

from infer.cli import progress
from moa_jax.checkpoint import Checkpoints
from moa_jax.config import DistillConfig, OptimConfig, PretrainConfig, RunConfig
from moa_jax.data.batches import Batches
from moa_jax.errors import InputError
from moa_jax.metrics import MetricsLog
from moa_jax.precision import matmul_precision
from moa_jax.training import Loss, Params, init_state, make_update

Evaluate = Callable[[Params, Any], dict[str, Any]]


def fingerprint(config: PretrainConfig | DistillConfig) -> dict[str, Any]:
    """What makes two runs the same: all settings but bookkeeping and where the result goes."""
    kept = dataclasses.asdict(dataclasses.replace(config, run=None, output=""))
    return kept | {"seed": config.run.seed, "dtype": config.run.dtype}


@dataclasses.dataclass(frozen=True)
class Job:
    """What sets one trainer apart from another."""

    run: RunConfig
    optim: OptimConfig
    config: dict[str, Any]  # of the whole run, for the checkpoint
    loss: Loss
    evaluate: Evaluate
    batches: Batches
    optimizer: optax.GradientTransformation


def fit(job: Job, params: Params, frozen: Any) -> Params:
    """Trains from the newest checkpoint, or from `params`; returns the final weights.

    Raises InputError when a loss is not finite, naming the step.
    """
    run, optim = job.run, job.optim
    if job.batches.rows_per_batch % optim.accumulate:
        raise InputError(
            f"data.rows_per_batch {job.batches.rows_per_batch} does not split into "
            f"optim.accumulate {optim.accumulate} equal parts: choose numbers that divide"
        )
    update = make_update(job.loss, job.optimizer, run.seed, optim.total_steps, optim.accumulate)
    update = jax.jit(update, donate_argnums=0)
    checkpoints = Checkpoints(run, job.config)
    fresh = init_state(params, job.optimizer)
    state = checkpoints.restore(fresh) or fresh
    first = int(state.step)
    log = MetricsLog(Path(run.directory) / "metrics.jsonl", first)
    bar = progress(optim.total_steps, "train", initial=first)
    meter = _Meter()
    try:
        for step in range(first, optim.total_steps):
            batch = job.batches.batch(step)
            with matmul_precision(run.dtype):
                state, metrics = update(state, frozen, batch)
            meter.count(batch.segment_BT)
            done = step + 1
            if done % run.log_every == 0 or done == optim.total_steps:
                record = log.write(done, "train", _finite(metrics, done) | meter.rate())
                bar.note({k: record[k] for k in ("loss", "tokens_per_s")})
            if done % run.eval_every == 0 or done == optim.total_steps:
                record = log.write(done, "eval", job.evaluate(state.params, frozen))
                bar.line(f"step {done} evaluation: {_brief(record)}")
                meter.pause()
            if done % run.save_every == 0 or done == optim.total_steps:
                _finite(metrics, done)
                checkpoints.save(state)
            bar.step()
    finally:
        bar.close()
        checkpoints.close()
        log.close()
    return state.params


def _finite(metrics: dict[str, Any], step: int) -> dict[str, Any]:
    values = jax.device_get(metrics)
    if not np.isfinite(values["loss"]):
        raise InputError(
            f"step {step}: the loss is {values['loss']}: lower optim.learning_rate, "
            "and name another run.directory"
        )
    return values


def _brief(record: dict[str, Any]) -> str:
    shown = {k: v for k, v in record.items() if isinstance(v, float)}
    return ", ".join(f"{name} {value:.4g}" for name, value in shown.items())


class _Meter:
    """Tokens per second since the last reading, evaluations left out."""

    def __init__(self) -> None:
        self.pause()

    def pause(self) -> None:
        self._tokens, self._since = 0, time.perf_counter()

    def count(self, segment_BT: np.ndarray) -> None:
        self._tokens += int((segment_BT > 0).sum())

    def rate(self) -> dict[str, float]:
        rate = self._tokens / (time.perf_counter() - self._since)
        self.pause()
        return {"tokens_per_s": rate}
