"""Training checkpoints through Orbax: state and settings, never the target.

RUN/lock                       held while a process works on RUN
RUN/checkpoints/STEP/          complete or absent: Orbax renames the folder after its last file
    files.json                 size and CRC-32 of every file: Orbax restores flipped bits silently
    meta/                      the run's id and settings, and a fingerprint of its rows
    state/                     parameters, optimizer state, step
RUN/checkpoints/STEP.damaged   renamed, never read

RUN may be a URL of an object store. A store has no locks, and Orbax marks a complete checkpoint in
a store by a file that is written last.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import json
import logging
import os
import secrets
import socket
import sys
import time
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from moa_jax.config import DistillConfig, PretrainConfig
from moa_jax.errors import InputError, TemporaryError, first_line
from moa_jax.files.paths import check_folder, files_below, is_stored, lock, place
from moa_jax.runtime.memory import num_bytes_of
from moa_jax.runtime.multihost import count, is_first, on_first, processes_without
from moa_jax.training.fingerprint import changes, fingerprint, listed
from moa_jax.training.update import Params, TrainState

Config = PretrainConfig | DistillConfig
FILES = "files.json"
COMMITTED = "commit_success.txt"  # written last by Orbax
CHUNK = 1 << 20  # bytes per read
DISK_FAULTS = [
    os.strerror(code) for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
]
LASTING_FAULTS = [os.strerror(code) for code in (errno.EFBIG, errno.EROFS)]
# TensorStore's errors for missing or corrupt content, in checkpoints without a file list.
CORRUPT = ("DATA_LOSS", "NOT_FOUND", "OUT_OF_RANGE", "FAILED_PRECONDITION: Error reading")
CORRUPT += ("_METADATA) does not exist",)  # Orbax's own
EXTENDED = "optim.total_steps: "  # a change of this setting is allowed
OVERHEAD = 1 << 20  # bytes of a checkpoint besides its arrays
# Clients of a network file system see a new file late: NFS caches a folder for up to a minute.
SHARED_TIMEOUT_S = 60.0


class Checkpoints:
    """The checkpoints of one run directory, locked for this run.

    All processes of a run make the same calls: each writes its shards, and process 0 the rest.
    Raises InputError if another run holds the lock. `data` maps names to hashes of the rows.
    """

    def __init__(self, config: Config, data: Mapping[str, Any] | None = None) -> None:
        run = config.run
        self._config, self._folder, self._data = config, _folder_of(config), dict(data or {})
        self._taus: dict[int, float] = {}
        self._writing: int | None = None
        self._run_id = secrets.token_hex(8)  # of a new run
        _hide_failed_writes()
        with contextlib.ExitStack() as stack:
            on_first(lambda: stack.enter_context(_locked(place(run.directory))))
            self._manager = ocp.CheckpointManager(
                self._folder,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_NewestAndBest(run.keep_checkpoints, self._taus),
                    cleanup_tmp_directories=True,  # left by a kill during a save
                    # Background threads would wait forever for a folder on a full disk.
                    async_options=ocp.AsyncOptions(
                        post_finalization_callback=self._write_file_list,
                        create_directories_asynchronously=False,
                    ),
                ),
            )
            self._lock = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for the running save."""
        with self._lock:
            self.wait()
            self._manager.close()

    @property
    def run_id(self) -> str:
        """The random id of the run, which all its checkpoints hold; call `restore` first."""
        return self._run_id

    def restore(self, abstract: TrainState) -> TrainState | None:
        """The newest intact state, with shapes and shardings of `abstract`; None if none is saved.

        Renames newer damaged checkpoints, with one line on stderr each, and prints a line for
        another number of steps. Raises InputError for different settings or rows, for fewer steps
        than are done, and if all checkpoints are damaged. Other errors of reading propagate. An
        error renames nothing.
        """
        damaged: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            folder = self._folder / str(step)
            fault = on_first(lambda folder=folder: _fault(folder))
            if not fault:
                on_first(lambda folder=folder: _check_same_run(folder, self._config, self._data))
                earlier = on_first(lambda folder=folder: _meta(folder).get("run"))
                self._run_id = earlier or self._run_id
                items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
                try:
                    state = self._manager.restore(step, args=items)["state"]
                except Exception as error:
                    fault = _corruption(folder, error)
                else:
                    self._set_aside(damaged, step)
                    if is_first() and (line := _extension(folder, self._config)):
                        print(line, file=sys.stderr)
                    return state
            damaged[step] = fault
        if damaged:
            faults = ", ".join(f"{step} ({fault})" for step, fault in damaged.items())
            raise InputError(
                f"{self._folder}: no checkpoint can be read: {faults}; restore a copy, or name "
                "another run.directory"
            )
        return None

    def save(self, state: TrainState) -> None:
        """Saves in the background; skips a step that is already saved.

        Copies the arrays first, so they may be donated. Raises InputError if the disk is full, also
        for the previous save.
        """
        step = int(state.step)
        self.wait()
        if step == self._manager.latest_step():
            return
        on_first(lambda: self._check_room(state))
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            meta=ocp.args.JsonSave(
                {"run": self._run_id, "config": fingerprint(self._config), "data": self._data}
            ),
        )
        self._writing = step
        with self._disk_faults_in_one_line():
            self._manager.save(step, args=items, force=True)

    def rate(self, taus: Mapping[int, float]) -> None:
        """Replaces the taus by step; the checkpoint with the highest tau is kept."""
        self._taus.clear()
        self._taus.update(taus)

    def check(self) -> None:
        """Raises InputError if a save has failed; does not wait."""
        if self._writing is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for the running save; raises InputError if the save fails."""
        with self._disk_faults_in_one_line():
            self._manager.wait_until_finished()
        self._writing = None

    def _set_aside(self, damaged: Mapping[int, str], good: int) -> None:
        def rename() -> None:
            for step, fault in damaged.items():
                aside = self._folder / f"{step}.damaged"
                while aside.exists():
                    aside = aside.with_name(f"{aside.name}.damaged")
                (self._folder / str(step)).rename(aside)
                print(
                    f"checkpoint {step} is damaged ({fault}): renamed to {aside}; "
                    f"going on from step {good}",
                    file=sys.stderr,
                )

        if damaged:
            on_first(rename)
            self._manager.reload()

    def _check_room(self, state: TrainState) -> None:
        if is_stored(self._folder):
            return
        needed = OVERHEAD + sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < needed:
            raise self._not_written(f"the disk has no room for {needed / 1e6:.0f} MB")

    def _write_file_list(self) -> None:
        """Writes files.json after all other files, before Orbax renames the folder."""
        if is_first():
            unfinished = self._folder.glob(f"{self._writing}.orbax-checkpoint-tmp*")
            folder = next(iter(unfinished), self._folder / str(self._writing))
            # Orbax rewrites its own files beside the items later.
            files = sorted(path for path in files_below(folder) if path.parent != folder)
            found = {str(path.relative_to(folder)): _size_and_crc(path) for path in files}
            (folder / FILES).write_text(json.dumps(found))

    @contextlib.contextmanager
    def _disk_faults_in_one_line(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:  # an OSError, or its text in another library's error
            fault = next((fault for fault in DISK_FAULTS if fault in str(error)), None)
            if fault is None:
                raise
            time.sleep(1)  # the other writes fail now, while `_hide_failed_writes` hides them
            raise self._not_written(fault) from error

    def _not_written(self, why: str) -> InputError:
        steps = ", ".join(map(str, self._manager.all_steps())) or "none"
        kind = InputError if why in LASTING_FAULTS else TemporaryError
        return kind(
            f"{self._folder}: a checkpoint could not be written: {why}; whole ones: steps {steps}; "
            "make room and give the same command again"
        )


def check_directory(config: Config, abstract: TrainState) -> None:
    """Raises InputError for a run directory that is in use, of another run, small or not shared.

    `abstract` has the shapes of a saved state. All processes must call this together, before a run
    is loaded. The lock is released again: `Checkpoints` repeats the check.
    """

    def check() -> None:
        directory = place(config.run.directory)
        if not is_stored(directory):
            check_folder(directory)
            if directory.is_dir():
                with _locked(directory):
                    pass
        if newest := newest_of(_folder_of(config)):
            _check_same_run(newest, config)
        if not is_stored(directory):
            _check_disk(config, directory, OVERHEAD + num_bytes_of(abstract))

    on_first(check)
    if count() > 1:
        _check_shared(place(config.run.directory))


def _check_shared(directory: Path) -> None:
    """Raises InputError unless every process reads a file that process 0 writes to the directory.

    In folders of their own, processes would wait for each other forever in the first save.
    """

    def write() -> str:
        nonce = secrets.token_hex(8)
        directory.mkdir(parents=True, exist_ok=True)
        (directory / f"shared-{nonce}").write_text(nonce)
        return nonce

    nonce = on_first(write)
    file = directory / f"shared-{nonce}"
    lacking = processes_without(_appears(file, nonce))
    if is_first():
        file.unlink()
    if lacking:
        raise InputError(
            f"run.directory {directory}: processes {listed(list(map(str, lacking)))} of {count()} "
            "do not see the files of process 0; name a folder that all processes share"
        )


def _appears(file: Path, content: str) -> bool:
    """Whether a file with this content can be read before the deadline."""
    end = time.monotonic() + SHARED_TIMEOUT_S
    while True:
        with contextlib.suppress(OSError):
            if file.read_text() == content:
                return True
        if time.monotonic() >= end:
            return False
        time.sleep(0.5)


def _check_disk(config: Config, directory: Path, size: int) -> None:
    """Raises TemporaryError without room for all checkpoints that the run holds at one time."""
    steps, run = steps_of(config), config.run
    left = config.optim.total_steps - max(steps, default=0)
    to_come = left if run.save_every_minutes else -(-left // run.save_every)
    most = run.keep_checkpoints + 2  # the newest, the best, and one that is being written
    count = min(max(most - len(steps), 1), to_come)
    existing = next(each for each in (directory, *directory.absolute().parents) if each.exists())
    disk = os.statvfs(existing)
    if (free := disk.f_bavail * disk.f_frsize) < count * size:
        raise TemporaryError(
            f"run.directory {directory}: its disk has {free / 1e6:.0f} MB free, and {count} "
            f"checkpoints of the run take {count * size / 1e6:.0f} MB; make room, lower "
            "run.keep_checkpoints, or name a folder on another disk"
        )


def steps_of(config: Config) -> list[int]:
    """Steps of the complete checkpoints of a run, in order; the run may still be training."""
    return sorted(int(path.name) for path in _complete(_folder_of(config)))


def run_id(config: Config) -> str | None:
    """The random id of a run; None before its first checkpoint, and for an earlier version's."""
    newest_first = sorted(_complete(_folder_of(config)), key=lambda path: -int(path.name))
    return next(filter(None, (_meta(folder).get("run") for folder in newest_first)), None)


def newest_of(checkpoints: Path) -> Path | None:
    """The newest complete checkpoint in a folder of checkpoints; None without one."""
    return max(_complete(checkpoints), key=lambda path: int(path.name), default=None)


def read_state(
    config: Config, step: int, abstract: TrainState, data: Mapping[str, Any] | None = None
) -> TrainState:
    """The state of one step of a run, which may be training; takes no lock and changes nothing.

    `abstract` gives shapes, dtypes and shardings. Raises InputError for a checkpoint that is
    missing, damaged or from a run with other settings, or with other facts of data than `data`.
    """
    folder = _intact(_folder_of(config) / str(step))
    _check_same_run(folder, config, data)
    with ocp.StandardCheckpointer() as reader:
        return reader.restore(folder / "state", abstract)


def read_params(folder: Path, config: DistillConfig, abstract: Params) -> Params:
    """The parameters in a checkpoint of any run with the drafter of `config`.

    `abstract` gives shapes, dtypes and shardings. Raises InputError for a checkpoint that is
    missing, damaged or of another drafter.
    """
    folder = _intact(folder if is_stored(folder) else folder.absolute())
    found = changes(_meta(folder)["config"], config)
    found = [each for each in found if each.startswith("drafter.")]
    if not found:
        with ocp.StandardCheckpointer() as reader:
            tree = reader.metadata(folder / "state").item_metadata.tree["params"]
        there, here = _shapes(tree), _shapes(abstract)
        names = sorted({name for name, _ in there.items() ^ here.items()})
        found = [f"{name}: {there.get(name)} -> {here.get(name)}" for name in names]
    if found:
        raise InputError(
            f"{folder}: holds another drafter: {listed(found)}; name another checkpoint, or set "
            "them alike"
        )
    item = {"params": abstract}
    how = ocp.checkpoint_utils.construct_restore_args(item)
    with ocp.PyTreeCheckpointer() as reader:
        args = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        return reader.restore(folder / "state", args=args)["params"]


def _folder_of(config: Config) -> Path:
    folder = place(config.run.directory)
    return (folder if is_stored(folder) else folder.absolute()) / "checkpoints"


def _complete(checkpoints: Path) -> list[Path]:
    found = [path for path in checkpoints.glob("*") if path.name.isdecimal()]
    return [path for path in found if not is_stored(path) or (path / COMMITTED).exists()]


def _intact(folder: Path) -> Path:
    """The folder of an intact checkpoint; raises InputError if it is missing or damaged."""
    steps = sorted(int(path.name) for path in _complete(folder.parent)) or "none"
    if not folder.is_dir():
        raise InputError(f"{folder}: no such checkpoint: there are {steps}")
    if fault := _fault(folder):
        raise InputError(f"{folder}: damaged ({fault}); choose another of {steps}")
    return folder


def _check_same_run(folder: Path, config: Config, data: Mapping[str, Any] | None = None) -> None:
    """Raises InputError for a checkpoint of other settings or rows; old ones do not state rows.

    The number of steps may differ, but must not be lower than the checkpoint's step.
    """
    meta, total = _meta(folder), config.optim.total_steps
    found = changes(meta["config"], config) if meta else []
    if found := [each for each in found if not each.startswith(EXTENDED)]:
        raise InputError(
            f"{folder.parent}: holds a run with other settings: {listed(found)}; "
            "restore them, or name another run.directory"
        )
    if total < int(folder.name):
        raise InputError(
            f"optim.total_steps {total}: {folder.parent} holds step {folder.name}; give at least "
            "this number, or name another run.directory"
        )
    for name, before in meta.get("data", {}).items():
        if data and data.get(name) != before:
            raise InputError(
                f"{folder.parent}: was trained on other data: {name}: {before} -> "
                f"{data.get(name)}; restore the files, or name another run.directory"
            )


def _extension(folder: Path, config: Config) -> str:
    """The effects of another number of steps than the checkpoint's run had; "" without one."""
    found = changes(_meta(folder)["config"], config)
    if not (changed := [each for each in found if each.startswith(EXTENDED)]):
        return ""
    optim, lines = config.optim, []
    if isinstance(config, DistillConfig) and config.loss.feature_fade is not None:
        end = config.loss.feature_fade * optim.total_steps
        lines.append(f"; the feature loss now fades out at step {end:.0f}")
    if isinstance(config, DistillConfig) and config.masks.staircase:
        lines.append(f"; a MoA drafter has staircase masks until step {optim.total_steps / 2:.0f}")
    return (
        f"{changed[0]}: the learning rate keeps its schedule, constant at "
        f"{optim.learning_rate:g} from step {optim.warmup_steps + optim.decay_steps} on"
        + "".join(lines)
    )


def _meta(folder: Path) -> dict[str, Any]:
    """`config` and possibly `run` and `data`; empty if the file is missing or corrupt."""
    try:
        found = json.loads((folder / "meta" / "metadata").read_text(encoding="utf-8"))
    except (FileNotFoundError, ValueError):
        return {}
    return found if "config" in found else {}


def _fault(folder: Path) -> str:
    """The first file that is missing, unreadable or corrupt; "" for an intact checkpoint."""
    name = FILES
    try:
        if (folder / FILES).exists():  # earlier versions wrote no list
            for name, before in json.loads((folder / FILES).read_text(encoding="utf-8")).items():
                if (found := _size_and_crc(folder / name)) != tuple(before):
                    cut = f"has {found[0]} of {before[0]} bytes"
                    return f"{name} {'has changed' if found[0] == before[0] else cut}"
    except ValueError:
        return f"{FILES} is damaged"
    except FileNotFoundError:
        return f"{name} is missing"
    except OSError as error:
        if error.errno != errno.EIO:  # such as permission errors
            raise
        raise InputError(  # a network file system reports a lost connection in the same way
            f"cannot read {folder / name}: {error.strerror}; try again, or move {folder} away to "
            "go on from the checkpoint before"
        ) from error
    return "" if _meta(folder) else "meta: missing or corrupt"


def _corruption(folder: Path, error: Exception) -> str:
    """TensorStore's error for corrupt content, in a checkpoint without a file list.

    Raises any other error: a network, memory, sharding or version error is not damage.
    """
    cause = error.__cause__ or error
    is_corrupt = isinstance(cause, json.JSONDecodeError) or any(x in str(cause) for x in CORRUPT)
    if not is_corrupt or (folder / FILES).exists() or jax.process_count() > 1:
        raise error
    return first_line(cause)[:200]


def _size_and_crc(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while chunk := file.read(CHUNK):
            size, crc = size + len(chunk), zlib.crc32(chunk, crc)
    return size, crc


def _shapes(tree: Any) -> dict[str, tuple[int, ...]]:
    paths = jax.tree_util.tree_leaves_with_path(tree)
    named = ((jax.tree_util.keystr(path, simple=True, separator="."), leaf) for path, leaf in paths)
    return {name: tuple(leaf.shape) for name, leaf in named}


class _NewestAndBest:
    """Orbax's PreservationPolicy: keeps the newest checkpoints and the best checkpoint by tau."""

    def __init__(self, newest: int, taus: dict[int, float]) -> None:
        self._newest, self._taus = newest, taus

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        rated = [step for step in steps if step in self._taus]
        best = max(rated, key=lambda step: (self._taus[step], step), default=None)
        return [step == best or step in steps[-self._newest :] for step in steps]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the directory's lock; prints a line on stderr for a store or disk without locks."""
    directory.mkdir(parents=True, exist_ok=True)
    if is_stored(directory):
        print(f"{directory}: a store has no locks; start one run only", file=sys.stderr)
        yield
        return
    with (directory / "lock").open("a+", encoding="utf-8") as file:
        file.seek(0)
        holder = file.read() or "another run"
        lock(
            file,
            f"{directory}: {holder} is at work there; wait until it ends, or name another "
            "run.directory",
        )
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


@functools.cache  # once per process
def _hide_failed_writes() -> None:
    """Drops tracebacks of Orbax's threads about a full disk; `wait` raises a one-line error."""

    def is_other(record: logging.LogRecord) -> bool:
        text = f"{record.getMessage()} {record.exc_info}"
        return not any(fault in text for fault in DISK_FAULTS)

    for name in ("absl", "asyncio"):
        logging.getLogger(name).addFilter(is_other)
    hook = sys.unraisablehook  # receives writes that end after the failed write
    sys.unraisablehook = lambda found: str(found.exc_value) == "Event loop is closed" or hook(found)
