"""Training checkpoints through Orbax: state and settings, never the target.

RUN/lock                   held while a process works on RUN; free as soon as that process ends
RUN/checkpoints/STEP/      complete or absent: Orbax renames it into place when all is written
    files.json             size and CRC-32 of every file, as Orbax itself checks sizes only
    meta/                  the settings of the run, and what its rows were
    state/                 parameters, optimiser state, step
RUN/checkpoints/STEP.damaged   put aside, never read

RUN may be a URL of an object store, which has no lock and no renaming: there Orbax marks a complete
checkpoint by a file that it writes last, and lacking room is told when it is met.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import fcntl
import itertools
import json
import logging
import os
import socket
import sys
import zlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import orbax.checkpoint as ocp

from moa_jax.config import DistillConfig, PretrainConfig
from moa_jax.errors import InputError, first_line
from moa_jax.files.places import check_folder, files_below, is_stored, place
from moa_jax.runtime.multihost import is_first, on_first
from moa_jax.training.fingerprint import changes, fingerprint, listed
from moa_jax.training.update import Params, TrainState

FILES = "files.json"
COMMITTED = "commit_success.txt"  # which Orbax writes last where it cannot rename
PIECE = 1 << 20  # bytes read at a time
DISK_FAULTS = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS, errno.EIO)
UNREADABLE = (OSError, ValueError, KeyError)  # settings that are damaged
ROOM = 1 << 20  # bytes that a checkpoint takes beside its arrays
LONGEST_FAULT = 200  # characters shown of another library's message


class Checkpoints:
    """The checkpoints of one run directory, which no other run may use meanwhile.

    Every process of a run makes one and makes the same calls. Each writes its part of every array,
    and process 0 writes everything else. Raises InputError where another run has the directory.
    """

    def __init__(
        self, config: PretrainConfig | DistillConfig, data: Mapping[str, Any] | None = None
    ) -> None:
        """`data` tells rows of other content apart, by names for people."""
        run = config.run
        self._config, self._folder, self._data = config, _folder_of(config), dict(data or {})
        self._taus: dict[int, float] = {}
        self._writing: int | None = None
        with contextlib.ExitStack() as stack:
            on_first(lambda: stack.enter_context(_locked(place(run.directory))))
            stack.enter_context(_quiet())
            self._manager = ocp.CheckpointManager(
                self._folder,
                options=ocp.CheckpointManagerOptions(
                    preservation_policy=_NewestAndBest(run.keep_checkpoints, self._taus),
                    cleanup_tmp_directories=True,  # what a kill during a save left behind
                    # Folders are made before the save goes to the background: its threads would
                    # wait for them where the disk has no room.
                    async_options=ocp.AsyncOptions(
                        post_finalization_callback=self._seal,
                        create_directories_asynchronously=False,
                    ),
                ),
            )
            self._stack = stack.pop_all()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        """Waits for a save under way."""
        try:
            self.wait()
            self._manager.close()
        except BaseException:
            exception = sys.exc_info()
            raise
        finally:
            self._stack.__exit__(*exception)

    def restore(self, abstract: TrainState) -> TrainState | None:
        """The newest sound state, its shapes and shardings those of `abstract`; None without one.

        A damaged checkpoint is named on stderr, put aside and passed over. Raises InputError for
        a run with other settings or other rows, and where all checkpoints are damaged, which are
        then left where they are.
        """
        faults: dict[int, str] = {}
        for step in sorted(self._manager.all_steps(), reverse=True):
            folder = self._folder / str(step)
            known = self._config, self._data
            faults[step] = on_first(lambda folder=folder, known=known: _examined(folder, *known))
            if not faults[step]:
                state, faults[step] = self._read(step, abstract)
            if not faults[step]:
                self._put_aside({bad: why for bad, why in faults.items() if why}, step)
                return state
        if faults:
            told = ", ".join(f"{step} ({why})" for step, why in faults.items())
            raise InputError(
                f"{self._folder}: no checkpoint can be read: {told}: put a sound copy there, or "
                "name another run.directory"
            )
        return None

    def save(self, state: TrainState) -> None:
        """Saves in the background; a step that is already there is left alone.

        The arrays are copied before this returns, so they may be donated. Raises InputError where
        the disk has no room for this save, or had none for the one before.
        """
        step = int(state.step)
        self.wait()
        if step == self._manager.latest_step():
            return
        on_first(lambda: self._check_room(state))
        items = ocp.args.Composite(
            state=ocp.args.StandardSave(state),
            meta=ocp.args.JsonSave({"config": fingerprint(self._config), "data": self._data}),
        )
        self._writing = step
        with self._telling_disk_faults():
            self._manager.save(step, args=items, force=True)

    def rate(self, step: int, tau: float) -> None:
        """Notes the tau of a step: the checkpoint with the best one is kept."""
        self._taus[step] = tau

    def check(self) -> None:
        """Raises InputError if a save has failed meanwhile; does not wait."""
        if self._writing is not None and not self._manager.is_saving_in_progress():
            self.wait()

    def wait(self) -> None:
        """Waits for the save under way; raises InputError if it fails."""
        with self._telling_disk_faults():
            self._manager.wait_until_finished()
        self._writing = None

    def _read(self, step: int, abstract: TrainState) -> tuple[Any, str]:
        """The state of a step, or what is wrong with it."""
        items = ocp.args.Composite(state=ocp.args.StandardRestore(abstract))
        try:
            return self._manager.restore(step, args=items)["state"], ""
        except Exception as error:  # Orbax words damage in many ways
            if jax.process_count() > 1:  # the others may have read it well
                raise
            return None, _shortened(error)

    def _put_aside(self, faults: dict[int, str], good: int) -> None:
        def move() -> None:
            for step, why in faults.items():
                ends = itertools.chain([""], (f".{n}" for n in itertools.count(1)))
                names = (self._folder / f"{step}.damaged{end}" for end in ends)
                aside = next(path for path in names if not path.exists())
                (self._folder / str(step)).rename(aside)
                print(
                    f"checkpoint {step} is damaged ({why}): put aside as {aside}; "
                    f"going on from step {good}",
                    file=sys.stderr,
                )

        if faults:
            on_first(move)
            self._manager.reload()

    def _check_room(self, state: TrainState) -> None:
        if is_stored(self._folder):
            return
        needed = ROOM + sum(leaf.nbytes for leaf in jax.tree.leaves(state))
        disk = os.statvfs(self._folder)
        if disk.f_bavail * disk.f_frsize < needed:
            raise self._unwritten(f"the disk has no room for {needed / 1e6:.0f} MB")

    def _seal(self) -> None:
        """Writes the list of files, when all are written and before the folder is renamed."""
        if is_first():
            unfinished = self._folder.glob(f"{self._writing}.orbax-checkpoint-tmp*")
            folder = next(iter(unfinished), self._folder / str(self._writing))
            # Files beside the items are Orbax's own bookkeeping, which it writes again later.
            files = sorted(path for path in files_below(folder) if path.parent != folder)
            found = {str(path.relative_to(folder)): _size_and_crc(path) for path in files}
            (folder / FILES).write_text(json.dumps(found))

    @contextlib.contextmanager
    def _telling_disk_faults(self) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            # Libraries pass a failed write on as an OSError or as text.
            number, text = getattr(error, "errno", None), str(error)
            code = next((c for c in DISK_FAULTS if number == c or os.strerror(c) in text), None)
            if code is None:
                raise
            atexit.register(_mute)
            raise self._unwritten(os.strerror(code)) from error

    def _unwritten(self, why: str) -> InputError:
        found = ", ".join(map(str, self._manager.all_steps())) or "none"
        return InputError(
            f"{self._folder}: a checkpoint could not be written: {why}; whole ones: steps {found}: "
            "make room and give the same command again"
        )


def check_directory(config: PretrainConfig | DistillConfig) -> None:
    """Raises InputError for a directory that is in use or another run's, before a run is loaded.

    It is not held: `Checkpoints` looks again. All processes must call this at the same point.
    """

    def check() -> None:
        directory = place(config.run.directory)
        if not is_stored(directory):
            check_folder(directory)
        if directory.is_dir() and not is_stored(directory):
            with _locked(directory):
                pass
        if (newest := newest_of(_folder_of(config))) is None:
            return
        try:
            saved = _meta(newest)["config"]
        except UNREADABLE:  # a restore names it
            return
        _check_settings(newest, saved, config)

    on_first(check)


def steps_of(config: PretrainConfig | DistillConfig) -> list[int]:
    """Steps of the whole checkpoints of a run, in order; the run may be at work."""
    return sorted(int(path.name) for path in _whole(_folder_of(config)))


def read_state(
    config: PretrainConfig | DistillConfig, step: int, abstract: TrainState
) -> TrainState:
    """The state of one step of a run, which may be at work: nothing there is locked or changed.

    `abstract` gives shapes, dtypes and shardings. Raises InputError for a checkpoint that is
    missing, damaged or of a run with other settings.
    """
    folder = _folder_of(config) / str(step)
    if not folder.is_dir():
        raise InputError(f"{folder}: no such checkpoint: there are {steps_of(config) or 'none'}")
    fault = _examined(folder, config)
    if not fault:
        try:
            with ocp.StandardCheckpointer() as reader:
                return reader.restore(folder / "state", abstract)
        except Exception as error:  # Orbax words damage in many ways
            fault = _shortened(error)
    raise InputError(f"{folder}: damaged ({fault}): choose another of {steps_of(config)}")


def newest_of(checkpoints: Path) -> Path | None:
    """The newest whole checkpoint in a folder of checkpoints, None where there is none."""
    return max(_whole(checkpoints), key=lambda path: int(path.name), default=None)


def _whole(checkpoints: Path) -> list[Path]:
    """The whole checkpoints in a folder; a store has no other mark of one than Orbax's file."""
    found = [path for path in checkpoints.glob("*") if path.name.isdecimal()]
    return [path for path in found if not is_stored(path) or (path / COMMITTED).exists()]


def read_params(folder: Path, config: DistillConfig, abstract: Params) -> Params:
    """The parameters in a checkpoint of any run with the drafter of `config`.

    `abstract` gives shapes, dtypes and shardings. Raises InputError for a checkpoint that is
    missing, damaged or of another drafter.
    """
    folder = folder if is_stored(folder) else folder.absolute()
    if not folder.is_dir():
        raise InputError(f"{folder}: no such checkpoint: choose another")
    fault, saved = _meta_of(folder)
    if fault:
        raise InputError(f"{folder}: damaged ({fault}): choose another checkpoint")
    if found := [each for each in changes(saved["config"], config) if each.startswith("drafter.")]:
        raise InputError(
            f"{folder}: holds another drafter: {listed(found)}: name another checkpoint, or set "
            "them alike"
        )
    with ocp.StandardCheckpointer() as reader:
        found = reader.metadata(folder / "state").item_metadata.tree["params"]
    shapes = lambda tree: {
        jax.tree_util.keystr(path, simple=True, separator="."): tuple(leaf.shape)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree)
    }
    there, here = shapes(found), shapes(abstract)
    for name in sorted(there.keys() | here.keys()):
        if there.get(name) != here.get(name):
            raise InputError(
                f"{folder}: {name} is {there.get(name, 'missing')} there and "
                f"{here.get(name, 'missing')} in the config: name another checkpoint, or set the "
                "drafter's sizes alike"
            )
    item = {"params": abstract}
    how = ocp.checkpoint_utils.construct_restore_args(item)
    with ocp.PyTreeCheckpointer() as reader:
        args = ocp.args.PyTreeRestore(item=item, restore_args=how, partial_restore=True)
        return reader.restore(folder / "state", args=args)["params"]


def _folder_of(config: PretrainConfig | DistillConfig) -> Path:
    folder = place(config.run.directory)
    return (folder if is_stored(folder) else folder.absolute()) / "checkpoints"


def _examined(
    folder: Path, config: PretrainConfig | DistillConfig, data: Mapping[str, Any] | None = None
) -> str:
    """What is wrong with a checkpoint's files, "" for nothing; InputError for another run's.

    One that was saved without a word on its rows, as by older versions, may have had any.
    """
    fault, saved = _meta_of(folder)
    if not fault:
        _check_settings(folder, saved["config"], config)
        for name, before in saved.get("data", {}).items():
            if data and data.get(name) != before:
                raise InputError(
                    f"{folder.parent}: was trained on other data: {name}: {before} -> "
                    f"{data.get(name)}: restore the files, or name another run.directory"
                )
    return fault


def _check_settings(
    folder: Path, saved: dict[str, Any], config: PretrainConfig | DistillConfig
) -> None:
    if differences := changes(saved, config):
        raise InputError(
            f"{folder.parent}: holds a run with other settings: {listed(differences)}: "
            "restore them, or name another run.directory"
        )


def _meta_of(folder: Path) -> tuple[str, dict[str, Any]]:
    """What is wrong with a checkpoint's files, "" for nothing, and what it says of its run."""
    if fault := _fault(folder):
        return fault, {}
    try:
        return "", _meta(folder)
    except UNREADABLE as error:
        return f"meta: {_shortened(error)}", {}


def _meta(folder: Path) -> dict[str, Any]:
    """`config`, its settings, and maybe `data`; raises one of UNREADABLE where it is damaged."""
    found = ocp.handlers.JsonCheckpointHandler().restore(folder / "meta")
    if "config" not in found:
        raise KeyError("config")
    return found


class _NewestAndBest:
    """Orbax's PreservationPolicy: the newest few, and the best of those whose tau is known."""

    def __init__(self, newest: int, taus: dict[int, float]) -> None:
        self._newest, self._taus = newest, taus

    def should_preserve(self, checkpoints: Sequence[Any], *, context: object) -> list[bool]:
        steps = [checkpoint.step for checkpoint in checkpoints]
        rated = [step for step in steps if step in self._taus]
        best = max(rated, key=lambda step: (self._taus[step], step), default=None)
        return [step == best or step in steps[-self._newest :] for step in steps]


@contextlib.contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Holds the directory's lock; a file system that has no locks goes without."""
    directory.mkdir(parents=True, exist_ok=True)
    if is_stored(directory):
        print(f"{directory}: a store has no locks: start one run only", file=sys.stderr)
        yield
        return
    with (directory / "lock").open("a+", encoding="utf-8") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            file.seek(0)
            raise InputError(
                f"{directory}: {file.read() or 'another run'} is at work there: wait until it "
                "ends, or name another run.directory"
            ) from error
        except OSError as error:
            print(f"{directory}: no lock ({error.strerror}): start one run only", file=sys.stderr)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
        yield


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silences the pages that Orbax prints about a failed write, which we tell in one line.

    After a fault they stay silenced, as threads of that write may print until the process ends.
    """
    loggers, hook = [logging.getLogger(name) for name in ("absl", "asyncio")], sys.unraisablehook
    levels = [logger.level for logger in loggers]

    def silent(fault: Any) -> None:
        if str(fault.exc_value) != "Event loop is closed":  # of writes after the one that failed
            hook(fault)

    sys.unraisablehook = silent
    for logger in loggers:
        logger.setLevel(logging.CRITICAL)
    yield
    sys.unraisablehook = hook
    for logger, level in zip(loggers, levels, strict=True):
        logger.setLevel(level)


def _mute() -> None:
    """Closes stderr for good: Python drops its hooks before the threads of a failed write end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)


def _fault(folder: Path) -> str:
    """How the files of a checkpoint differ from its list; "" where they do not, or have none."""
    try:
        listed_files = json.loads((folder / FILES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return ""  # of a version that wrote no list
    except ValueError:
        return f"{FILES} is damaged"
    for name, (size, crc) in listed_files.items():
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        found_size, found_crc = _size_and_crc(path)
        if found_size != size:
            return f"{name} has {found_size} of {size} bytes"
        if found_crc != crc:
            return f"{name} has changed"
    return ""


def _size_and_crc(path: Path) -> tuple[int, int]:
    size = crc = 0
    with path.open("rb") as file:
        while piece := file.read(PIECE):
            size, crc = size + len(piece), zlib.crc32(piece, crc)
    return size, crc


def _shortened(error: BaseException) -> str:
    text = first_line(error)
    return text if len(text) <= LONGEST_FAULT else f"{text[:LONGEST_FAULT]}..."
