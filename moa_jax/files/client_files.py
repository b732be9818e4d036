"""The identity of a model by samples of its tensors, and folders that hold a part of a model.

A client of split decoding reads a target's embedding, norm, head and perhaps its last layers. A
folder with only these tensors keeps a line per tensor that is left out:

    parts.json    {"left_out": {tensor: {"dtype": "BF16", "shape": [...], "sha256": "..."}}}

So the part has the same lines, and the same hash, as the whole model and as the same weights in
other files. The sha256 of a small tensor covers all its bytes. The sha256 of a larger tensor covers
SAMPLES blocks of SAMPLE_BYTES, spread evenly from its first byte to its last.
"""

from __future__ import annotations

import contextlib
import hashlib
import shutil
from collections.abc import Collection
from pathlib import Path
from typing import BinaryIO, NamedTuple

from moa_jax.errors import InputError
from moa_jax.files import model_folder, whole_files
from moa_jax.model.convert import Shape

FILE = "parts.json"
SAMPLES, SAMPLE_BYTES = 4, 4096  # per tensor
_CONFIGS = ("config.json", "generation_config.json")
# The folders of a client's pair, and the files besides weights that an earlier pair may have left.
PAIR = ("target", "draft")
MARK = f"target/{FILE}"
STALE = tuple(
    f"{model}/{name}" for model in PAIR for name in (*_CONFIGS, FILE, *model_folder.TOKENIZER_FILES)
)


class Line(NamedTuple):
    """The identity of a tensor, which server and client compare."""

    dtype: str  # safetensors' name for it
    shape: Shape
    sha256: str  # of samples of its bytes


def lines_of(folder: Path) -> dict[str, Line]:
    """A line per tensor of a model, whether the folder holds the tensor or leaves it out.

    Reads kilobytes per tensor. Raises InputError for damaged files.
    """
    reader, found = model_folder.open_tensors(folder), left_out(folder)
    with contextlib.ExitStack() as stack:
        files = {path: stack.enter_context(path.open("rb")) for path in {*reader.file_of.values()}}
        for name, shape in reader.shapes.items():
            path, dtype, start, end = reader.stored(name)
            line = Line(dtype, shape, _samples(files[path], start, end))
            if found.setdefault(name, line) != line:
                raise InputError(
                    f"{path} and {folder / FILE} hold different tensors {name}; write the folder "
                    "again with infer.convert --for-client"
                )
    return found


def model_hash(folder: Path) -> str:
    """The sha256 of a model's config.json and its lines, in order of tensor names.

    Server and client compare this value, so it must not change between versions.
    """
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name, line in sorted(lines_of(folder).items()):
        digest.update(f"\n{name} {line.dtype} {list(line.shape)} {line.sha256}".encode())
    return digest.hexdigest()


def left_out(folder: Path) -> dict[str, Line]:
    """The tensors of a model that this folder omits on purpose; none for a whole model.

    Raises InputError for a damaged parts.json.
    """
    path = folder / FILE
    if not path.is_file():
        return {}
    try:
        return {
            str(name): Line(str(dtype), tuple(map(int, shape)), str(sha256))
            for name, line in whole_files.read_json(path)["left_out"].items()
            for dtype, shape, sha256 in [(line["dtype"], line["shape"], line["sha256"])]
        }
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is damaged; write the folder again with infer.convert --for-client"
        ) from error


def copy(source: Path, folder: Path, names: Collection[str]) -> None:
    """Write a new folder with the named tensors of a model, and lines for all others.

    Configs and tokenizer files are copied byte by byte.
    """
    folder.mkdir()
    for name in _CONFIGS:
        if (source / name).is_file():
            shutil.copyfile(source / name, folder / name)
    model_folder.copy_tokenizer(source, folder)
    model_folder.copy_tensors(model_folder.open_tensors(source), names, folder)
    rest = {name: line._asdict() for name, line in lines_of(source).items() if name not in names}
    whole_files.write_json(folder / FILE, {"left_out": rest})


def _samples(file: BinaryIO, start: int, end: int) -> str:
    """The sha256 of evenly spread blocks of a tensor, including its first and last bytes."""
    if end - start <= SAMPLES * SAMPLE_BYTES:
        file.seek(start)
        return hashlib.sha256(file.read(end - start)).hexdigest()
    digest = hashlib.sha256()
    for index in range(SAMPLES):
        file.seek(start + index * (end - start - SAMPLE_BYTES) // (SAMPLES - 1))
        digest.update(file.read(SAMPLE_BYTES))
    return digest.hexdigest()
