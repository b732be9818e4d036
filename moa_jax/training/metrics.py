"""Logs of a run: JSON lines, TensorBoard beside them, and the peak FLOP/s of devices.

metrics.jsonl   results of the run; on a CPU bit for bit the same, with any number of resumes
speed.jsonl     starts, times, speed and end of the run on this machine
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import itertools
import json
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TextIO

import numpy as np

from moa_jax.errors import InputError
from moa_jax.files.paths import is_stored
from moa_jax.files.whole_files import write_whole

Record = dict[str, Any]
Mirror = Callable[[Record], None]

# Dense bfloat16 FLOP/s of one device, by the prefix of its kind; from vendors' data sheets.
PEAK_FLOPS = {
    "TPU v4": 275e12,
    "TPU v5 lite": 197e12,  # v5e
    "TPU v5": 459e12,  # v5p, also named:
    "TPU v5p": 459e12,
    "TPU v6 lite": 918e12,  # v6e
    "TPU7x": 2307e12 / 2,  # v7x, of which a chip is two devices
    "NVIDIA A100": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100": 989e12,
    "NVIDIA GH200": 989e12,
    "NVIDIA H200": 989e12,
    "NVIDIA B200": 2250e12,
    "NVIDIA L4": 121e12,
    "NVIDIA L40S": 362e12,
}


def peak_flops(device_kind: str) -> float | None:
    """Dense bfloat16 FLOP/s of a device; None for an unknown device."""
    known = [kind for kind in PEAK_FLOPS if f"{device_kind} ".startswith((f"{kind} ", f"{kind}-"))]
    return PEAK_FLOPS[max(known, key=len)] if known else None


class MetricsLog:
    """Appends to a JSONL file; opened at step s, drops the records of an earlier run after s.

    `kept` holds the records up to s. A new run (s below 0) renames an earlier log, as
    metrics.jsonl to metrics.1.jsonl. An object store cannot append, so `sync` and `close` write
    the whole file. `mirrors` receive every record. Raises InputError if a write fails, as on a full
    disk.
    """

    def __init__(self, path: Path, step: int, mirrors: Sequence[Mirror] = ()) -> None:
        self._path, self._mirrors = path, mirrors
        path.parent.mkdir(parents=True, exist_ok=True)
        found = read_records(path)
        self.kept = [record for record in found if record["step"] <= step]
        text = "".join(map(_line, self.kept))
        if is_stored(path):
            self._file: TextIO = io.StringIO()
            self._file.write(text)
            return
        with self._warn_on_error():
            if found and step < 0:
                _put_aside(path)
            write_whole(path, text)
        self._file = path.open("a", encoding="utf-8")

    def write(self, step: int, kind: str, values: dict[str, Any]) -> Record:
        """Writes one record and returns it with plain Python numbers, None for those not finite."""
        record = {"step": step, "kind": kind} | {k: _plain(v) for k, v in values.items()}
        with self._warn_on_error():
            self._file.write(_line(record))
            self._file.flush()
        for mirror in self._mirrors:
            mirror(record)
        return record

    def sync(self) -> None:
        """Flushes the records to disk, so that they survive a power cut."""
        with self._warn_on_error():
            if isinstance(self._file, io.StringIO):
                self._path.write_text(self._file.getvalue())
            else:
                os.fsync(self._file.fileno())

    def close(self) -> None:
        if isinstance(self._file, io.StringIO):
            self.sync()
        with contextlib.suppress(OSError):  # flushed or reported before
            self._file.close()

    @contextlib.contextmanager
    def _warn_on_error(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise InputError(
                f"{self._path}: {error.strerror}; make room and give the same command again"
            ) from error


def _put_aside(path: Path) -> None:
    """Rename the log of a run that is not resumed; its checkpoints may have been removed."""
    names = (path.with_name(f"{path.stem}.{number}{path.suffix}") for number in itertools.count(1))
    path.rename(next(aside for aside in names if not aside.exists()))


def read_records(path: Path) -> list[Record]:
    """The records of a log, up to the first truncated line."""
    found: list[Record] = []
    text = path.read_bytes().decode("utf-8", "replace") if path.exists() else ""
    for line in text.split("\n")[:-1]:
        try:
            found.append(json.loads(line))
        except ValueError:
            break
    return found


def ratings(records: Sequence[Record]) -> tuple[str, dict[int, float]]:
    """The field that rates checkpoints, and its values by step; the highest is the best.

    `decoded_tau` if the run has decoded prompts at any step, else `simulated_tau`.
    """
    found = [(name, taus_of(records, name)) for name in ("decoded_tau", "simulated_tau")]
    return next((each for each in found if each[1]), found[-1])


def taus_of(records: Sequence[Record], name: str) -> dict[int, float]:
    """The values of the field `name` by step, without those that are not finite."""
    return {r["step"]: r[name] for r in records if r.get(name) is not None}


def check_tensorboard() -> None:
    """Raise InputError if the optional extra `tensorboard` is not installed."""
    if importlib.util.find_spec("tensorboardX") is None:
        raise InputError(
            "run.tensorboard: tensorboardX is missing; pip install 'moa-jax[tensorboard]'"
        )


def check_tracker(name: str) -> None:
    """Raise InputError if the package of a tracker, which is an optional extra, is not installed.

    W&B writes a folder `wandb` where a program runs, and Python takes that for a package.
    """
    spec = importlib.util.find_spec(name)
    if spec is None or spec.origin is None:
        raise InputError(
            f"run.tracker {name}: the package {name} is missing; pip install 'moa-jax[{name}]'"
        )


def numbers_of(record: Record) -> dict[str, float]:
    """The numbers of a record as trackers take them, by KIND/NAME or KIND/NAME/i."""
    found: dict[str, float] = {}
    for name, value in record.items():
        many = isinstance(value, list)
        numbers = {f"/{i}": x for i, x in enumerate(value)} if many else {"": value}
        for index, number in numbers.items():
            if isinstance(number, int | float) and name != "step":
                found[f"{record['kind']}/{name}{index}"] = number
    return found


@contextlib.contextmanager
def tensorboard(folder: Path, step: int) -> Iterator[Mirror]:
    """Yield a function that adds the numbers of a record to TensorBoard.

    Records of an earlier run after `step` are hidden.
    """
    from tensorboardX import SummaryWriter

    with SummaryWriter(str(folder), purge_step=step + 1) as writer:

        def add(record: Record) -> None:
            for tag, number in numbers_of(record).items():
                writer.add_scalar(tag, number, record["step"])

        yield add


def _line(record: Record) -> str:
    return json.dumps(record) + "\n"


def _plain(value: Any) -> Any:
    array = np.asarray(value)
    if array.dtype.kind == "f" or array.dtype.name == "bfloat16":
        array = np.round(array.astype(np.float64), 7)
        return _finite(array.tolist())
    return array.tolist()


def _finite(value: Any) -> Any:
    """None for NaN and infinities, which JSON does not have."""
    if isinstance(value, list):
        return [_finite(each) for each in value]
    return value if np.isfinite(value) else None
