"""Pickled weights, pytorch_model*.bin, as folders of safetensors.

    FOLDER                          CACHE/pickles/models--NAME/snapshots/KEY
      pytorch_model.bin    -->        model.safetensors
      other files          -->        copies

KEY is a hash of the path, names, sizes and times of all files, so a changed folder gets a new copy.
torch reads the pickles with `weights_only`, which prevents a pickle from running code. torch is not
a requirement of this library and is imported here only.
"""

from __future__ import annotations

import hashlib
import importlib.util
import logging
import shutil
from pathlib import Path
from typing import Any

from filelock import FileLock

from moa_jax.errors import InputError
from moa_jax.files.model_folder import PICKLES, SINGLE, public_name
from moa_jax.files.paths import writable_cache
from moa_jax.files.replace import check_replaceable, replacing

FIRST_SAFE = (2, 6)  # of torch: CVE-2025-32434 is that earlier ones run code despite `weights_only`


def has_torch() -> bool:
    """Whether torch is installed."""
    return importlib.util.find_spec("torch") is not None


def folder_of(folder: Path) -> Path:
    """The copy of a folder of pickles as safetensors, written when the folder is first opened.

    Raises InputError as `rewrite`.
    """
    files = sorted(path for path in folder.iterdir() if path.is_file())
    seen = [(path.name, path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    key = hashlib.sha256(repr((str(folder.resolve()), seen)).encode()).hexdigest()[:16]
    name = "models--" + public_name(folder).replace("/", "--")  # `public_name` reads this
    copy = writable_cache("pickles") / name / "snapshots" / key
    copy.parent.mkdir(parents=True, exist_ok=True)
    with FileLock(f"{copy}.lock"):  # another process may be writing the same copy
        if not (copy / SINGLE).is_file():
            log = logging.getLogger(__name__)
            log.warning("%s: pickles are copied to safetensors once", folder)
            rewrite(folder, copy)
    return copy


def rewrite(folder: Path, new: Path) -> int:
    """Writes the folder's tensors and other files to a new folder; returns the number of tensors.

    Raises InputError for a folder without pickles, for pickles of anything but tensors by name, if
    `new` exists already, and without a safe version of torch.
    """
    pickles = sorted(folder.glob(PICKLES))
    if not pickles:
        raise InputError(f"{folder} holds no {PICKLES}; name the folder with the weights")
    if new.exists():
        raise InputError(f"{new} exists already; choose another folder")
    check_replaceable(new)
    if not has_torch():
        raise InputError("torch is missing, which reads pickles; pip install torch")
    from safetensors.torch import save

    tensors: dict[str, Any] = {}
    for path in pickles:
        for name, tensor in _tensors_of(path).items():
            first = tensors.setdefault(name, tensor)
            if first is not tensor and not tensor.equal(first):
                raise InputError(
                    f"{path}: {name} differs from the tensor of that name in another file; remove "
                    "the file that does not belong to this model"
                )
    with replacing(new) as fresh:
        for path in folder.iterdir():
            weights = path.name.startswith("pytorch_model") or ".safetensors" in path.name
            if path.is_file() and not weights:
                shutil.copyfile(path, fresh / path.name)
        whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
        (fresh / SINGLE).write_bytes(save(whole, metadata={"format": "pt"}))
    return len(tensors)


def _tensors_of(path: Path) -> dict[str, Any]:
    """The tensors of a pickle by name; raises InputError.

    The errors replace those of torch, which recommend an option that lets a pickle run code.
    """
    import torch

    if tuple(map(int, torch.__version__.split(".")[:2])) < FIRST_SAFE:
        raise InputError(
            f"torch {torch.__version__} may run code of a pickle; install torch 2.6 or later"
        )
    if path.stat().st_size == 0:
        raise InputError(f"{path} is empty; fetch it again")
    try:
        found = torch.load(path, map_location="cpu", weights_only=True)
    except OSError:
        raise
    except (RuntimeError, EOFError) as error:
        raise InputError(f"{path} is cut short or damaged; fetch it again") from error
    except Exception as error:  # an UnpicklingError, or any error that invalid bytes cause
        raise InputError(
            f"{path} is not a pickle of tensors alone, and other pickles may run code; fetch it "
            "again, or get the model as safetensors"
        ) from error
    of_names = isinstance(found, dict) and all(isinstance(name, str) for name in found)
    if not (of_names and found and all(isinstance(x, torch.Tensor) for x in found.values())):
        raise InputError(
            f"{path} holds something else than tensors by name; name a file of a model"
        )
    return found
