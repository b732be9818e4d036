"""Rewrites a folder's pytorch_model*.bin as safetensors, once, for programs that read no pickles.

    python -m infer.peers.unpickle FOLDER NEW_FOLDER

Needs torch, which nothing else here does. `weights_only` keeps the pickle from running code; all
other files of the folder are copied.
"""

from __future__ import annotations

import argparse
import pickle
import shutil
import sys
from pathlib import Path


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser("infer.peers.unpickle", description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("new_folder", type=Path)
    args = parser.parse_args(arguments)
    try:
        _rewrite(args.folder, args.new_folder)
    except (ValueError, OSError, pickle.UnpicklingError) as error:
        print(f"infer.peers.unpickle: {str(error).splitlines()[0]}", file=sys.stderr)
        sys.exit(2)


def _rewrite(folder: Path, new: Path) -> None:
    import torch
    from safetensors.torch import save_file

    pickles = sorted(folder.glob("pytorch_model*.bin"))
    if not pickles:
        raise ValueError(f"{folder} holds no pytorch_model*.bin: name the folder with the weights")
    if new.exists():
        raise ValueError(f"{new} exists already: choose another folder")
    tensors = {}
    for path in pickles:
        tensors |= torch.load(path, map_location="cpu", weights_only=True)
    scratch = new.with_name(f".{new.name}.partial")
    shutil.rmtree(scratch, ignore_errors=True)
    keep_out = shutil.ignore_patterns("pytorch_model*", "*.safetensors*")
    shutil.copytree(folder, scratch, ignore=keep_out)
    whole = {name: tensor.clone().contiguous() for name, tensor in tensors.items()}
    save_file(whole, scratch / "model.safetensors", metadata={"format": "pt"})
    scratch.rename(new)
    print(f"wrote {new / 'model.safetensors'} with {len(whole)} tensors")


if __name__ == "__main__":
    main()
