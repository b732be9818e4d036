"""Replaces files of a model folder; other files stay, and an interrupted write is detected.

    OUTPUT/.moa-jax.8x2k/new/    files until all of them are written
    OUTPUT/.moa-jax.8x2k/old/    files that are replaced, until the new ones are in place

The next successful writer removes the files that a killed writer leaves in such a folder.

A writer replaces files with the names that it writes, and removes earlier weights of this library.
README.md, .git and the weights of other programs stay as they are.

An object store renames nothing. Files for gs://bucket/OUTPUT are written to a temporary folder of
this machine, then copied to the store, config.json last:

    OUTPUT/.moa-jax.upload       exists while files are copied, and after a killed writer
    OUTPUT/training_run.json     the training run that wrote the model: run, directory, step
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path

from moa_jax.errors import InputError
from moa_jax.files.model_folder import INDEX, SINGLE, WRITER
from moa_jax.files.paths import check_folder, is_stored
from moa_jax.files.tensor_reader import GGUF_INDEX
from moa_jax.files.whole_files import keep_mode, read_json

_SHARD = r"model-\d{5}-of-\d{5}\.safetensors"
_SCRATCH = ".moa-jax."
_UPLOAD = f"{_SCRATCH}upload"
RUN = "training_run.json"
_CHUNK = 1 << 24  # bytes of a copy to a store


def check_replaceable(
    folder: Path, mark: str = "config.json", models: Iterable[str] = (".",)
) -> None:
    """Raise InputError for a folder that `replacing` could not write, before any work is done.

    Refused are folders that `paths.check_folder` refuses, folders with files but neither `mark`
    nor .git, and folders with weights of other programs, which would be read before the new ones.
    """
    if not is_stored(folder):
        check_folder(folder)
    if not folder.is_dir():
        return
    was_cut = any(folder.glob(f"{_SCRATCH}*/old/{mark}")) or (folder / _UPLOAD).exists()
    is_new_clone = (folder / ".git").exists() and not (folder / SINGLE).exists()
    is_ours = (folder / mark).is_file() or was_cut or is_new_clone or not any(folder.iterdir())
    if not is_ours:
        what = "a model folder" if mark == "config.json" else f"a folder with {mark}"
        shown = folder if is_stored(folder) else folder.absolute()
        raise InputError(f"{shown} exists and is not {what}; choose another output")
    for model in (folder / each for each in models):
        _check_weights(model)


def check_writer(folder: Path, run_id: str | None) -> None:
    """Raise InputError for a model folder that the run `run_id` did not write.

    None is a run that has written nothing yet, so that every model is another writer's.
    """
    if not (folder / "config.json").is_file():
        return
    wrote = read_json(folder / RUN) if (folder / RUN).is_file() else {}
    if run_id is None or wrote.get("run") != run_id:
        whose = f"the run in {wrote.get('directory')}" if wrote else "something other than this run"
        raise InputError(
            f"output {folder} holds a model that {whose} wrote; choose another output, or replace "
            "the model with --overwrite"
        )


def _check_weights(folder: Path) -> None:
    """Raise InputError for weights of other programs that would be read before the new ones."""
    for name in ("config.json", SINGLE):
        if (folder / name).is_dir():
            raise InputError(f"cannot write {folder / name}: it is a folder; choose another output")
    for path in (folder / GGUF_INDEX, folder / INDEX):
        if path.exists() and not _is_ours(path):
            raise InputError(
                f"{path} belongs to weights of another program, which would be read in place of "
                "the new ones; remove them or choose another output"
            )


def _is_ours(index: Path) -> bool:
    try:
        return read_json(index)["metadata"]["written_by"] == WRITER
    except (InputError, LookupError, TypeError):
        return False


@contextlib.contextmanager
def replacing(
    folder: Path,
    mark: str = "config.json",
    models: Iterable[str] = (".",),
    stale: Iterable[str] = (),
) -> Iterator[Path]:
    """Yield an empty folder whose files move to `folder` on success, and are removed on failure.

    A new folder appears atomically; a link is followed. In an existing folder these files are
    replaced, earlier weights of `models` and files named in `stale` are removed, and all others
    stay. Its config.json is removed first and written last, so that reading fails after a killed
    writer. In an object store a new folder does not appear atomically, and readers wait for its
    config.json. Raises InputError as `check_replaceable`.
    """
    models, stale = list(models), [RUN, *stale]
    check_replaceable(folder, mark, models)
    if is_stored(folder):
        with tempfile.TemporaryDirectory(prefix=_SCRATCH) as scratch:
            yield Path(scratch)
            _upload(Path(scratch), folder, models, stale)
        return
    folder = folder.resolve()
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = tempfile.mkdtemp(prefix=_SCRATCH, dir=folder if folder.exists() else folder.parent)
    fresh, old = Path(scratch, "new"), Path(scratch, "old")
    fresh.mkdir()
    try:
        with _alone_in(Path(scratch)):  # released when this process exits
            yield fresh
            if folder.exists():
                _exchange(folder, fresh, old, models, stale)
            else:
                fresh.rename(folder)
            shutil.rmtree(old, ignore_errors=True)
            _remove_left(folder)
    finally:
        shutil.rmtree(fresh, ignore_errors=True)
        with contextlib.suppress(OSError):  # keeps files that could not be moved back
            Path(scratch).rmdir()


def _upload(fresh: Path, folder: Path, models: Iterable[str], stale: Iterable[str]) -> None:
    """Copy the files of `fresh` to a folder in an object store, and remove what they replace.

    Every config.json is removed before any other file changes, and written after all others.
    """
    coming = sorted(_files_in(fresh), key=_is_config)
    weights = [Path(model, name) for model in models for name in _weights_in(folder / model)]
    configs = [name for name in coming if _is_config(name)]
    (folder / _UPLOAD).write_text("")
    for name in [*configs, *({*map(Path, stale), *weights} - {*coming})]:
        (folder / name).unlink(missing_ok=True)
    for name in coming:
        with (fresh / name).open("rb") as source, (folder / name).open("wb") as target:
            shutil.copyfileobj(source, target, _CHUNK)
    (folder / _UPLOAD).unlink()


def _files_in(folder: Path) -> list[Path]:
    return [path.relative_to(folder) for path in folder.rglob("*") if path.is_file()]


def _is_config(name: Path) -> bool:
    return name.name == "config.json"


def _exchange(
    folder: Path, fresh: Path, old: Path, models: Iterable[str], stale: Iterable[str]
) -> None:
    """Move files of a folder to `old` and files of `fresh` into the folder: either all or none."""
    with _alone_in(folder):
        coming = _files_in(fresh)
        weights = (Path(model, name) for model in models for name in _weights_in(folder / model))
        leaving = {*coming, *map(Path, stale), *weights}
        leaving = [name for name in leaving if _is_file_or_link(folder / name)]
        moves = [(folder / name, old / name) for name in sorted(leaving, key=_is_config)[::-1]]
        moves += [(fresh / name, folder / name) for name in sorted(coming, key=_is_config)]
        for name in coming:
            keep_mode(folder / name, fresh / name)
        done: list[tuple[Path, Path]] = []
        try:
            for before, after in moves:
                after.parent.mkdir(parents=True, exist_ok=True)
                done.append((before, after))  # before the rename: Ctrl-C may come in between
                before.rename(after)
        except BaseException:
            for before, after in reversed(done):
                if _is_file_or_link(after):
                    after.rename(before)
            shutil.rmtree(old, ignore_errors=True)  # holds only folders now
            raise


def _remove_left(folder: Path) -> None:
    """Remove files of killed writers, since newer files are in place."""
    for scratch in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError), _alone_in(scratch, fcntl.LOCK_NB):
            shutil.rmtree(scratch)


def _weights_in(folder: Path) -> list[str]:
    """Names of weights that an earlier write left, without those of other programs."""
    if not _is_ours(folder / INDEX):
        return [SINGLE]
    files = read_json(folder / INDEX).get("weight_map", {}).values()
    return [SINGLE, INDEX, *{file for file in files if re.fullmatch(_SHARD, file)}]


def _is_file_or_link(path: Path) -> bool:
    return path.is_symlink() or path.is_file()


@contextlib.contextmanager
def _alone_in(folder: Path, how: int = 0) -> Iterator[None]:
    """Hold a folder's lock, waiting until it is free; with LOCK_NB raise OSError instead."""
    number = os.open(folder, os.O_RDONLY)
    try:
        try:
            fcntl.flock(number, fcntl.LOCK_EX | how)
        except OSError:  # also of a file system without locks
            if how:
                raise
        yield
    finally:
        os.close(number)
