"""Model folders on disk: found, read tensor by tensor, written atomically."""

from __future__ import annotations

import fnmatch
import hashlib
import json
import math
import os
import re
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import ml_dtypes  # noqa: F401  registers bfloat16 with numpy
import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save_file

from moa_jax.errors import InputError, TemporaryError, first_line
from moa_jax.files import casts
from moa_jax.files.foreign import text_names
from moa_jax.files.tensor_reader import GGUF_INDEX, Stored, TensorReader
from moa_jax.files.whole_files import read_json, write_json
from moa_jax.model.convert import Shape

_TOKENIZER = ("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt")
TOKENIZER_PATTERNS = ("tokenizer*", "chat_template*", *_TOKENIZER)
TOKENIZER_FILES = (  # full names of files that an earlier tokenizer may have left
    *("tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("chat_template.jinja", "chat_template.json", *_TOKENIZER),
)
WEIGHTS_AND_CONFIG = ("*.safetensors", "config.json", "*.gguf")
_FILES_OF_MODEL = (
    *WEIGHTS_AND_CONFIG,
    *("generation_config.json", "tokenizer*.json", "chat_template*"),
)
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
_MAX_FILE_BYTES = 4 * 1024**3
SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
PICKLES = "pytorch_model*.bin"
WRITER = "moa-jax"  # in the metadata of an index: marks files that a later write may remove
_OTHERS = ("*.safetensors", "*.bin", "*.pt", "*.pth", "*.msgpack", "*.h5", "*.npz", "*.onnx")


def find_folder(path_or_hub_id: str | os.PathLike[str], weights: bool = True) -> Path:
    """A local folder as given, or the cached folder of a hub id after downloading missing files.

    A GGUF file, or a folder with one and no safetensors, maps to the folder of its metadata. A
    folder of pickles maps to its copy as safetensors, if torch is installed; with `weights` False
    pickles are neither copied nor downloaded.
    """
    path = Path(path_or_hub_id).expanduser()
    if path.is_dir():
        path = _only_gguf(path) or path
    if path.is_file() and path.suffix.lower() == ".gguf":
        from moa_jax.files import gguf  # needs a package that other folders do not

        return gguf.folder_of(path)
    if path.is_dir():
        return _unpickled(path) if weights else path
    name = os.fspath(path_or_hub_id)
    if path.exists():
        raise InputError(f"{name} is a file; give the folder that holds it, or a .gguf file")
    if "://" in name:
        raise InputError(
            f"{name} is a URL, and models are read from a file system; copy the folder, as with "
            "`gcloud storage cp --recursive`, or mount the store"
        )
    if path.suffix.lower() == ".gguf":
        raise InputError(f"cannot open {name}: no such file; check the path")
    if not _HUB_ID.fullmatch(name):
        raise InputError(f"{name} is not a folder; check the path")
    from moa_jax.files import pickles  # imports this module

    patterns = ["*.json", "README.md", *TOKENIZER_PATTERNS]
    patterns += ["*.safetensors"] if weights else []
    folder = _downloaded(name, patterns)
    if weights and not any(folder.glob("*.safetensors")) and _is_pickled_on_the_hub(name):
        if not pickles.has_torch():
            raise _pickled(name, "FOLDER", f"hf download {name} --local-dir FOLDER, then ")
        return _unpickled(_downloaded(name, [*patterns, PICKLES]))
    return folder


def _downloaded(name: str, patterns: list[str]) -> Path:
    """The cached folder of a hub id, with its files of these patterns."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import GatedRepoError

    try:
        # Mistral's repositories hold the same weights twice.
        others = {"ignore_patterns": "consolidated*"}
        return Path(snapshot_download(name, allow_patterns=patterns, **others))
    except GatedRepoError as error:
        raise InputError(
            f"{name} is gated on the hub; accept its licence there and run `hf auth login`"
        ) from error
    except Exception as error:  # network, unknown name, bad cache: each of another type
        raise InputError(
            f"{name} is neither a folder nor reachable as a hub id ({first_line(error)}); "
            "check the spelling and the network"
        ) from error


def _only_gguf(folder: Path) -> Path | None:
    """The GGUF file of a folder without safetensors; raises InputError for several."""
    if (folder / GGUF_INDEX).exists() or any(folder.glob("*.safetensors")):
        return None
    files = sorted(folder.glob("*.gguf"))
    if len(files) > 1:
        shown = ", ".join(file.name for file in files[:3]) + (", ..." if len(files) > 3 else "")
        raise InputError(f"{folder} holds {len(files)} GGUF files ({shown}); name one of them")
    return files[0] if files else None


def _unpickled(folder: Path) -> Path:
    """A folder, or its copy as safetensors if the folder holds pickles only and torch exists."""
    if any((folder / name).exists() for name in (SINGLE, INDEX)) or not any(folder.glob(PICKLES)):
        return folder
    from moa_jax.files import pickles  # imports this module

    return pickles.folder_of(folder) if pickles.has_torch() else folder


def _is_pickled_on_the_hub(name: str) -> bool:
    """Whether a repository holds pytorch_model*.bin; False if the hub cannot be reached."""
    from huggingface_hub import list_repo_files

    try:
        return any(fnmatch.fnmatch(file, PICKLES) for file in list_repo_files(name))
    except Exception:  # of any type; missing weights are reported when they are read
        return False


def _pickled(where: Any, folder: Any, first: str = "") -> InputError:
    """The error for pickled weights, with the command that converts them to safetensors."""
    return InputError(
        f"{where} holds pytorch_model.bin but no safetensors, and only torch reads pickles; pip "
        f"install torch, or run {first}python -m infer.peers.unpickle {folder} NEW_FOLDER on a "
        "machine that has torch"
    )


def public_name(folder: Path) -> str:
    """The hub id of a folder in the hub's cache, else the folder's own name."""
    cached = folder.parent.parent.name if folder.parent.name == "snapshots" else ""
    if cached.startswith("models--"):
        return cached.removeprefix("models--").replace("--", "/")
    return folder.resolve().name


def file_hash(path: Path) -> str | None:
    """The sha256 of a file; None if the file does not exist."""
    if not path.is_file():
        return None
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def folder_hash(folder: Path, patterns: Iterable[str] = _FILES_OF_MODEL) -> str:
    """The sha256 of the names and all bytes of a model's files; `client_files.model_hash` is
    faster.

    Answer folders and reports store this value, so it must not change between versions.
    """
    paths = {path for pattern in patterns for path in folder.glob(pattern)}
    lines = (f"{path.name} {file_hash(path)}" for path in sorted(paths))
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()


def json_hash(content: Any) -> str:
    """The sha256 of a value as JSON, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()


def header_of(path: Path) -> dict[str, Any]:
    """Tensor entries of a validated safetensors file; offsets count from the start of the file."""
    with path.open("rb") as file:
        size = int.from_bytes(file.read(8), "little")
        header: dict[str, Any] = json.loads(file.read(size))
        begin = file.tell()
    header.pop("__metadata__", None)
    for entry in header.values():
        entry["data_offsets"] = [begin + offset for offset in entry["data_offsets"]]
    return header


def has_tensors(folder: Path) -> bool:
    """Whether a folder holds a model's tensor files, which `find_folder` can leave out."""
    if (folder / GGUF_INDEX).is_file():
        return True
    try:
        return all(path.is_file() for path in _weight_files(folder))
    except InputError:
        return False


def readers_of_files(folder: Path) -> list[TensorReader]:
    """A reader per tensor file, including shards beside a model.safetensors; none for GGUF."""
    if (folder / GGUF_INDEX).is_file():
        return []
    files = _weight_files(folder)
    if files == [folder / SINGLE] and (folder / INDEX).is_file():
        files += [path for path in _shards(folder) if path.is_file() and path not in files]
    return [SafetensorsReader(folder, [path]) for path in files]


def open_tensors(folder: Path) -> TensorReader:
    """A reader for the tensors of a model folder; raises InputError for damaged files.

    Of a model with a vision tower, the text model's tensors, by the names of a text model.
    """
    if (folder / GGUF_INDEX).is_file():
        from moa_jax.files.gguf import GGUFReader

        return GGUFReader.of_folder(folder)
    reader = SafetensorsReader(folder)
    return reader.renamed(text_names(reader.shapes))


class SafetensorsReader(TensorReader):
    """The tensors of a folder's safetensors files, in the dtypes of the files."""

    def __init__(self, folder: Path, files: Iterable[Path] | None = None) -> None:
        """`files` are the files to read, by default all files of the model."""
        stored, shapes = {}, {}
        for path in _weight_files(folder) if files is None else files:
            _open_safetensors(path)  # validates the file
            for name, entry in sorted(header_of(path).items()):
                stored[name] = Stored(path, entry["dtype"], *entry["data_offsets"])
                shapes[name] = tuple(entry["shape"])
        super().__init__(folder, stored, shapes)

    def _other(self, name: str, path: Path, content: np.ndarray) -> np.ndarray:
        return _open_safetensors(path).get_tensor(name)


def write_tensors(
    folder: Path, shapes: Mapping[str, Shape], dtype: Any, tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Write tensors, given in the order of `shapes`, holding one file's worth at a time.

    Floats are cast to `dtype`; integers and booleans keep their dtypes. More than 4 GiB are split
    into several files with an index, as Hugging Face does. Raises InputError for finite numbers
    that overflow in `dtype`.
    """
    dtype = np.dtype(dtype)
    kept = (
        (name, tensor if tensor.dtype.kind in "iub" else casts.cast(tensor, dtype, name))
        for name, tensor in tensors
    )
    sizes = {name: math.prod(shape) * dtype.itemsize for name, shape in shapes.items()}
    _write_files(folder, sizes, kept)


def copy_tensors(reader: TensorReader, names: Iterable[str], folder: Path) -> None:
    """Write some tensors as `reader` returns them, split into files as `write_tensors` does."""
    sizes = {name: reader.num_bytes(name) for name in names}
    _write_files(folder, sizes, ((name, reader.read(name)) for name in sizes))


def _write_files(
    folder: Path, sizes: Mapping[str, int], tensors: Iterable[tuple[str, np.ndarray]]
) -> None:
    """Write tensors, given in the order of `sizes`, which maps each name to its bytes."""
    if not sizes:
        _write_safetensors(folder / SINGLE, {})
    file_of = _plan_files(sizes)
    last_of = {file: name for name, file in file_of.items()}
    held: dict[str, np.ndarray] = {}
    for name, tensor in tensors:
        held[name] = np.ascontiguousarray(tensor)
        if last_of[file_of[name]] == name:
            _write_safetensors(folder / file_of[name], held)
            held = {}
    if len(last_of) > 1:
        metadata = {"total_size": sum(sizes.values()), "written_by": WRITER}
        write_json(folder / INDEX, {"metadata": metadata, "weight_map": file_of})


def copy_tokenizer(source: Path, folder: Path) -> None:
    """Copy the tokenizer and chat template files that exist."""
    for pattern in TOKENIZER_PATTERNS:
        for path in source.glob(pattern):
            if path.is_file():
                shutil.copyfile(path, folder / path.name)


def _weight_files(folder: Path) -> list[Path]:
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        return _shards(folder)
    if any(folder.glob(PICKLES)):
        raise _pickled(folder, folder)
    others = [path.name for pattern in _OTHERS for path in sorted(folder.glob(pattern))]
    if others:
        raise InputError(
            f"{folder} holds {others[0]} but no model.safetensors, and other files are not read; "
            "save the model with save_pretrained of transformers"
        )
    raise InputError(f"{folder} holds no model.safetensors; name a model folder")


def _shards(folder: Path) -> list[Path]:
    """The files listed in an index; raises InputError for a damaged index."""
    file_of = read_json(folder / INDEX).get("weight_map")
    if not isinstance(file_of, dict) or any(type(file) is not str for file in file_of.values()):
        raise InputError(
            f"{folder / INDEX}: weight_map does not map tensors to files; fetch it again"
        )
    return [folder / file for file in sorted(set(file_of.values()))]


def _open_safetensors(path: Path) -> Any:
    try:
        return safe_open(path, framework="np")
    except FileNotFoundError as error:
        raise InputError(f"{path} is missing though the index names it; fetch it again") from error
    except SafetensorError as error:
        raise InputError(
            f"{path} is cut short or no safetensors file ({first_line(error)}); fetch it again"
        ) from error


def _write_safetensors(path: Path, tensors: Mapping[str, np.ndarray]) -> None:
    path.touch()
    mode = path.stat().st_mode  # set by the umask; save_file restricts files to their owner
    try:
        save_file(dict(tensors), path, metadata={"format": "pt"})
    except SafetensorError as error:
        raise TemporaryError(
            f"{path} cannot be written ({first_line(error)}); make room or choose another output"
        ) from error
    path.chmod(mode)


def _plan_files(sizes: Mapping[str, int]) -> dict[str, str]:
    """Map each tensor, in order, to the name of its file."""
    number, filled = 1, 0
    number_of: dict[str, int] = {}
    for name, size in sizes.items():
        if filled and filled + size > _MAX_FILE_BYTES:
            number, filled = number + 1, 0
        filled += size
        number_of[name] = number
    if number == 1:
        return dict.fromkeys(sizes, SINGLE)
    form = "model-{:05d}-of-{:05d}.safetensors".format
    return {name: form(n, number) for name, n in number_of.items()}
