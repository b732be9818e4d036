"""Rewrites a folder's pytorch_model*.bin as safetensors, for programs that read no pickles.

    python -m infer.peers.unpickle FOLDER NEW_FOLDER

Needs torch. `weights_only` prevents a pickle from running code. All files of the folder but weights
are copied. The new folder appears whole or not at all.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from infer.cli.program import Parser, local_path, run
from moa_jax.errors import InputError
from moa_jax.files.replace import check_replaceable, replacing

PICKLES = "pytorch_model*.bin"


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("infer.peers.unpickle", __doc__)
    parser.add_argument("folder", metavar="FOLDER", type=Path, help=f"holds {PICKLES}")
    parser.add_argument("new_folder", metavar="NEW_FOLDER", type=local_path, help="is made")
    flags = parser.parse_args(arguments)
    count = rewrite(flags.folder, flags.new_folder)
    print(f"wrote {flags.new_folder / 'model.safetensors'} with {count} tensors")


def rewrite(folder: Path, new: Path) -> int:
    """Writes the folder's tensors and other files to a new folder; returns the number of tensors.

    Raises InputError for a folder without pickles, for pickles of anything but tensors by name, if
    `new` exists already, and if torch is not installed.
    """
    pickles = sorted(folder.glob(PICKLES))
    if not pickles:
        raise InputError(f"{folder} holds no {PICKLES}; name the folder with the weights")
    if new.exists():
        raise InputError(f"{new} exists already; choose another folder")
    check_replaceable(new)
    try:
        from safetensors.torch import save
    except ImportError as error:
        raise InputError("torch is missing, which reads pickles; pip install torch") from error
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
        (fresh / "model.safetensors").write_bytes(save(whole, metadata={"format": "pt"}))
    return len(tensors)


def _tensors_of(path: Path) -> dict[str, Any]:
    """The tensors of a pickle by name; raises InputError.

    The errors replace those of torch, which recommend an option that lets a pickle run code.
    """
    import torch

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


if __name__ == "__main__":
    run(main)
