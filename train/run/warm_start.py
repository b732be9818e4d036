"""A drafter that was trained before, as the start of another run: `train.distill --init-from`.

    --init-from moa_jax/demo/draft          a drafter's folder, in any layout that programs read
    --init-from runs/tiny                   a run, whose newest checkpoint counts
    --init-from runs/tiny/checkpoints/40    one of a run's checkpoints

Weights alone are taken: steps, optimiser and learning rate start anew, and the other run may have
had other data and settings. Kind, settings and sizes of the drafter must be those of the config.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moa_jax.config import DistillConfig
from moa_jax.drafters import method_of
from moa_jax.errors import InputError
from moa_jax.files.folders import find_folder
from moa_jax.files.parts import model_hash
from moa_jax.files.places import is_stored, place
from moa_jax.pretrained import Target, load_drafter
from moa_jax.runtime.multihost import on_first
from moa_jax.training.checkpoint import newest_of, read_params, steps_of
from moa_jax.training.update import Params, TrainState


def warm_params(config: DistillConfig, target: Target, abstract: TrainState) -> Params | None:
    """The weights that `init_from` names, on the devices of `abstract`, in its dtypes.

    None where none are named, and where the run has a checkpoint of its own, from which it goes on.
    `target` needs no weights. Raises InputError for a folder that cannot be read, and for another
    drafter than the config's.
    """
    if config.init_from is None or steps_of(config):
        return None
    folder = place(config.init_from)
    if checkpoint := on_first(lambda: str(_checkpoint(folder) or "")):  # the run may be at work
        return read_params(place(checkpoint), config, abstract.params)
    if is_stored(folder):
        raise InputError(
            f"init_from {config.init_from}: no checkpoint is there, and a drafter's folder is read "
            "from a file system only: copy it to one"
        )
    num_reused = getattr(config.drafter, "target_layer_inference", None)  # files may not state it
    found = load_drafter(
        config.init_from, target, target_layer_inference=num_reused, dtype=np.float32
    )
    method = method_of(config.drafter)
    if found.method != method:
        raise _refusal(config, f"a drafter of kind {found.method}, and the config's is {method}")
    for field in dataclasses.fields(config.drafter):
        there, here = (getattr(cfg, field.name) for cfg in (found.config, config.drafter))
        if there != here:
            raise _refusal(config, f"{field.name} is {there!r}, and {here!r} in the config")
    return jax.tree.map(_placed, found.params, abstract.params)


def start_hash(config: DistillConfig) -> str | None:
    """Of the folder that `warm_params` reads; None for a checkpoint, which process 0 chooses."""
    if config.init_from is None or steps_of(config) or _checkpoint(place(config.init_from)):
        return None
    return model_hash(find_folder(config.init_from))


def _checkpoint(folder: Path) -> Path | None:
    """The checkpoint that a path names, None for a path that names none."""
    if folder.parent.name == "checkpoints" and folder.name.isdecimal():
        return folder
    return newest_of(folder / "checkpoints")


def _placed(weight: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    host = np.asarray(weight, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda part: host[part])


def _refusal(config: DistillConfig, why: str) -> InputError:
    return InputError(
        f"init_from {config.init_from}: {why}: name another folder, or set them alike"
    )
