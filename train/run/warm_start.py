"""The weights of an earlier drafter as the start of a run: `train.distill --init-from`.

    --init-from moa_jax/demo/draft          a drafter's folder, in any layout that programs read
    --init-from runs/tiny                   a run, whose newest checkpoint is used
    --init-from runs/tiny/checkpoints/40    one of a run's checkpoints

Only weights are taken: steps, optimiser and learning rate start anew, and the earlier run may have
had other data and settings. Kind, settings and sizes of the drafter must equal the config's.
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
from moa_jax.files.client_files import model_hash
from moa_jax.files.model_folder import find_folder
from moa_jax.files.paths import is_stored, place
from moa_jax.pretrained import Target, load_drafter
from moa_jax.runtime.multihost import on_first
from moa_jax.training.checkpoint import newest_of, read_params, steps_of
from moa_jax.training.update import Params, TrainState


def warm_params(config: DistillConfig, target: Target, abstract: TrainState) -> Params | None:
    """The weights that `init_from` names, on the devices of `abstract`, in its dtypes.

    None if `init_from` is None, and if the run has a checkpoint of its own to resume from. `target`
    needs no weights. Raises InputError for a folder that cannot be read, and for a drafter that
    differs from the config's.
    """
    if config.init_from is None or steps_of(config):
        return None
    folder = place(config.init_from)
    if checkpoint := on_first(lambda: str(_checkpoint(folder) or "")):  # the run may be running
        return read_params(place(checkpoint), config, abstract.params)
    if is_stored(folder):
        raise InputError(
            f"init_from {config.init_from}: no checkpoint is there, and a drafter's folder is read "
            "from a file system only; copy it to one"
        )
    num_reused = getattr(config.drafter, "target_layer_inference", None)  # files may not hold N
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
    """The hash of the drafter's folder that `warm_params` reads; None without such a folder.

    A checkpoint is not hashed, since process 0 chooses the checkpoint for all processes.
    """
    if config.init_from is None or steps_of(config) or _checkpoint(place(config.init_from)):
        return None
    return model_hash(find_folder(config.init_from))


def _checkpoint(folder: Path) -> Path | None:
    """The checkpoint that a path names, or the newest checkpoint of a run, or None."""
    if folder.parent.name == "checkpoints" and folder.name.isdecimal():
        return folder
    return newest_of(folder / "checkpoints")


def _placed(weight: Any, like: jax.ShapeDtypeStruct) -> jax.Array:
    host = np.asarray(weight, like.dtype)
    return jax.make_array_from_callback(like.shape, like.sharding, lambda part: host[part])


def _refusal(config: DistillConfig, why: str) -> InputError:
    return InputError(
        f"init_from {config.init_from}: {why}; name another folder, or set them alike"
    )
