"""The output of a run: progress line, metrics.jsonl, speed.jsonl, TensorBoard, tracker, summary.

Metrics are read one update late, while the device computes the next update.
"""

from __future__ import annotations

import contextlib
import sys
import time
from typing import Any, Self

import jax
import numpy as np

from infer.cli.program import Progress, duration, progress
from moa_jax.config import DistillConfig, PretrainConfig, output_of
from moa_jax.data.batch import Batch, TappedBatch
from moa_jax.errors import InputError
from moa_jax.files.paths import place
from moa_jax.runtime.multihost import gathered, is_first, on_first
from moa_jax.training.fingerprint import common, short
from moa_jax.training.metrics import (
    MetricsLog,
    Record,
    numbers_of,
    peak_flops,
    ratings,
    taus_of,
    tensorboard,
)
from moa_jax.training.optim import rate_of_update
from moa_jax.training.update import Metrics
from train.run.start import describe
from train.run.tracker import Tracker
from train.run.wall_time import HostTimes, WallTime

TAUS = ("simulated_tau", "decoded_tau")
MOST_BATCHES = 16  # saved of skipped updates; all skipped steps are logged
GIGA, TERA = 1e9, 1e12


class RunLogger:
    """The records of one run; only process 0 writes and prints records.

    The run resumes after update `restored`; None starts the run with new logs.
    """

    def __init__(
        self,
        config: PretrainConfig | DistillConfig,
        restored: int | None,
        flops_per_token: float | None,
        steps_per_epoch: int | None = None,
        layout: str = "",
        run_id: str = "",
    ) -> None:
        """`layout` names devices, mesh and placement of the target in the line of the start.

        `run_id` identifies the run in a tracker, across resumes.
        """
        step = restored or 0
        self._optim, self._steps_per_epoch = config.optim, steps_per_epoch
        self._settled_s, self._figures = time.monotonic(), {}
        self._run, self._total = config.run, config.optim.total_steps
        self._run_id, self._settings = run_id, short(common(config))
        self._output = output_of(config)
        self._began, self._first = time.monotonic(), step
        self._meter, self._hosts = _Meter(flops_per_token), HostTimes()
        self._pending: tuple[int, Metrics, Batch] | None = None
        self._bar, self._log, self._speed = Progress(), None, None
        with contextlib.ExitStack() as stack:
            if is_first():
                self._open(stack, step, -1 if restored is None else step)
                self._start(step, restored is not None, layout)
            self._stack = stack.pop_all()
        # Records with taus, on all processes.
        self._rated, self._there, self._skipped = on_first(lambda: self._history(step))

    def _start(self, step: int, is_resumed: bool, layout: str) -> None:
        """Prints and records the start of the run, or of its resume."""
        self._bar.line(describe(step, self._total, layout, self._speed.kept, is_resumed))
        self._timed(step, "start", {"layout": layout})

    def _history(self, step: int) -> tuple[list[Record], list[str], int]:
        """Earlier records with taus, kinds of record at `step`, number of skipped updates."""
        kept = self._log.kept
        rated = [record for record in kept if record["kind"] in ("eval", "decode")]
        kinds = [record["kind"] for record in kept]
        there = [record["kind"] for record in kept if record["step"] == step]
        return rated, there, kinds.count("not_finite")

    def ratings(self) -> dict[int, float]:
        """The tau by step that rates checkpoints, on all processes."""
        return ratings(self._rated)[1]

    def _open(self, stack: contextlib.ExitStack, step: int, kept: int) -> None:
        """Opens the logs, which keep their records up to step `kept`."""
        folder, mirrors = place(self._run.directory), []
        if self._run.tensorboard:
            mirrors.append(stack.enter_context(tensorboard(folder / "tensorboard", kept)))
        if self._run.tracker != "none":
            tracker = Tracker(self._run.tracker, folder.name, self._run_id, self._settings)
            stack.callback(tracker.close)
            mirrors.append(lambda record: tracker.log(record["step"], numbers_of(record)))
        self._log = MetricsLog(folder / "metrics.jsonl", kept, mirrors)
        self._speed = MetricsLog(folder / "speed.jsonl", kept, mirrors)
        self._wall = WallTime(self._speed.kept)
        self._bar = progress(self._total, "train", initial=step)
        stack.callback(self._log.close)
        stack.callback(self._speed.close)
        stack.callback(lambda: self._bar.close())

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self._stack.close()

    def owes(self, step: int, kind: str) -> bool:
        """Whether the record of this kind is missing, as after a run that ended after a save."""
        return step != self._first or kind not in self._there

    def updated(self, step: int, metrics: Metrics, batch: Batch) -> None:
        """Takes the metrics of an update in flight, and reads those of the previous update.

        Raises InputError as `settle`.
        """
        self._hosts.enter()
        before, self._pending = self._pending, (step, metrics, batch)
        if before is not None:
            self._read(*before)
        self._hosts.leave()

    def settle(self) -> None:
        """Waits for the last update, reads its metrics and syncs all records to disk.

        Raises InputError for a loss or gradient that is not finite if run.not_finite is `stop`.
        """
        before, self._pending = self._pending, None
        if before is not None:
            self._read(*before)
        for log in filter(None, (self._log, self._speed)):
            log.sync()
        self._settled_s = time.monotonic()

    def measured(self, step: int, kind: str, figures: dict[str, Any]) -> None:
        """Records figures measured since `settle`; the speed excludes the time they took."""
        taus = {name: float(figures[name]) for name in TAUS if name in figures}
        self._rated.append({"step": step, **{n: x for n, x in taus.items() if np.isfinite(x)}})
        if self._log is not None:
            record = self._log.write(step, kind, figures)
            seconds = time.monotonic() - self._settled_s
            self._timed(step, kind, {"seconds": seconds})
            shown = [f"{n} {x:.4g}" for n, x in record.items() if isinstance(x, float)]
            self._bar.line(f"step {step} {kind}: {', '.join([*shown, duration(seconds)])}")
            self._bar.note(self._figures | self._newest())
        self._meter.pause()
        self._hosts.pause()

    def name_slow_hosts(self) -> None:
        """Prints a line per slow host; every process calls this after `settle`, at a save."""
        times, self._hosts = self._hosts, HostTimes()
        lines = times.slow_hosts()
        for line in lines if is_first() else ():
            self._bar.line(line)

    def _timed(self, step: int, kind: str, figures: Record) -> None:
        """Writes a record of speed.jsonl, with the time, the number of restarts and goodput."""
        now = time.time()
        self._wall.add({"step": step, "kind": kind, "time": now} | figures)
        so_far = {"restarts": self._wall.restarts, "goodput": self._wall.goodput(now)}
        self._speed.write(step, kind, {"time": now} | so_far | figures)

    def _newest(self) -> dict[str, str]:
        """The newest value of each tau with its step, as the progress line shows them."""
        found = {name: taus_of(self._rated, name) for name in TAUS}
        last = {name: max(taus) for name, taus in found.items() if taus}
        return {name: f"{found[name][step]:.4g} (step {step})" for name, step in last.items()}

    def ended(self, step: int, stopped: str) -> None:
        """Prints the summary of the run, or how to resume the run after a stop."""
        self._bar.close()
        self._bar = Progress()
        if is_first():
            text = self._next(step, stopped) if stopped else self._summary()
            print(self._wall.line(time.time()), text, sep="\n", file=sys.stderr, flush=True)
            if not stopped:
                self._timed(step, "end", {})

    def _next(self, step: int, stopped: str) -> str:
        return (
            f"stopped by {stopped} after step {step} of {self._total}, which is saved in "
            f"{self._run.directory}: the same command goes on from there"
        )

    def _summary(self) -> str:
        seconds = time.monotonic() - self._began
        parts = [f"{self._total} steps, the last {self._total - self._first} in {seconds:.0f} s"]
        name, taus = ratings(self._rated)
        parts += [f"{each} {tau}" for each, tau in self._newest().items()]
        if taus:
            best = max(taus, key=lambda step: (taus[step], step))
            parts.append(f"best by {name} {taus[best]:.4g} at step {best}")
        if self._skipped:
            parts.append(f"{self._skipped} updates skipped")
        parts.append(f"metrics in {self._run.directory}, weights in {self._output}")
        return "; ".join(parts)

    def _read(self, step: int, metrics: Metrics, batch: Batch) -> None:
        finite, tokens = jax.device_get((metrics["finite"], metrics["tokens"]))
        self._meter.count(int(tokens))
        self._bar.step()
        if not finite:
            self._not_finite(step, metrics, batch)
        elif step % self._run.log_every == 0 or step == self._total:
            self._write(step, jax.device_get(metrics))

    def _write(self, step: int, values: dict[str, Any]) -> None:
        speed = self._meter.read()
        if self._log is None:
            return
        del values["finite"]
        values["learning_rate"] = rate_of_update(self._optim, step - 1 - self._skipped)
        if self._steps_per_epoch is not None:
            values["epoch"] = step / self._steps_per_epoch
        record = self._log.write(step, "train", values)
        self._timed(step, "speed", speed)
        skipped = {"skipped": self._skipped} if self._skipped else {}
        self._figures = {"loss": record["loss"]} | _shown(speed) | skipped
        self._bar.note(self._figures | self._newest())

    def _not_finite(self, step: int, metrics: Metrics, batch: Batch) -> None:
        self._skipped += 1
        stop = self._run.not_finite == "stop"
        values = {name: metrics[name] for name in ("loss", "grad_norm")}
        values = {name: str(value) for name, value in jax.device_get(values).items()}
        kept = "not recorded"
        if stop or self._skipped <= MOST_BATCHES:
            path = place(self._run.directory) / f"not_finite_{step}.npz"
            rows = batch.batch if isinstance(batch, TappedBatch) else batch
            whole = gathered(rows)  # all processes take part
            if is_first():
                with path.open("wb") as file:
                    np.savez_compressed(file, step=step, **whole._asdict())
            kept = f"in {path}"
        what = f"step {step}: loss {values['loss']}, gradient norm {values['grad_norm']}"
        if stop:
            raise InputError(
                f"{what}: its batch is {kept}; lower optim.learning_rate in another "
                "run.directory, or pass over such steps with --run.not_finite skip; at the first "
                "step the target may hold NaN, which infer.generate would name"
            )
        if self._log is not None:
            self._log.write(step, "not_finite", values | {"skipped": self._skipped})
            self._bar.line(f"{what}: skipped; its batch is {kept}")


class _Meter:
    """Measures speed since the last reading, without compilation and evaluations."""

    def __init__(self, flops_per_token: float | None) -> None:
        self._flops = flops_per_token
        peak = peak_flops(jax.devices()[0].device_kind)
        self._peak = peak and peak * jax.device_count()
        self._tokens, self._updates, self._since = 0, 0, None

    def pause(self) -> None:
        """Restarts the measurement when the next update ends."""
        self._tokens, self._updates, self._since = 0, 0, None

    def count(self, tokens: int) -> None:
        if self._since is None:
            self._since = time.perf_counter()
        else:
            self._tokens, self._updates = self._tokens + tokens, self._updates + 1

    def read(self) -> Record:
        """Tokens/s, s per update, FLOP/s, MFU, peak memory if known; restarts the measurement."""
        if not self._tokens:
            return {}
        seconds = time.perf_counter() - self._since
        found: Record = {"tokens_per_s": self._tokens / seconds, "step_s": seconds / self._updates}
        self._tokens, self._updates, self._since = 0, 0, time.perf_counter()
        if self._flops:
            found["flops_per_s"] = self._flops * found["tokens_per_s"]
            if self._peak:
                found["mfu"] = found["flops_per_s"] / self._peak
        stats = [device.memory_stats() or {} for device in jax.local_devices()]
        if peaks := [s["peak_bytes_in_use"] for s in stats if "peak_bytes_in_use" in s]:
            found["peak_bytes"] = max(peaks)
        return found


def _shown(speed: Record) -> dict[str, str]:
    """The figures of a speed record as the progress line shows them."""
    shown = {}
    if "tokens_per_s" in speed:
        shown["tokens/s"] = f"{speed['tokens_per_s']:.4g}"
    if "mfu" in speed:
        shown["MFU"] = f"{speed['mfu']:.1%}"
    elif "flops_per_s" in speed:
        shown["TFLOP/s"] = f"{speed['flops_per_s'] / TERA:.3g}"
    if "peak_bytes" in speed:
        shown["memory"] = f"{speed['peak_bytes'] / GIGA:.1f} GB"
    return shown
