"""The registry entry of a drafter kind: functions to load, save and run its drafters."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

import numpy as np

from moa_jax.config import TargetConfig
from moa_jax.errors import InputError
from moa_jax.model.convert import Shape, Table

FileLayout = Literal["ours", "authors", "vllm", "speculators"]
FILE_LAYOUTS: tuple[FileLayout, ...] = ("ours", "authors", "vllm", "speculators")


class Files(NamedTuple):
    """The files of a drafter before its parameters are read."""

    config: dict[str, Any]  # config.json
    shapes: Mapping[str, Shape]  # by tensor name
    read: Callable[[str], np.ndarray]  # reads a tensor by name


class StoredDrafter(NamedTuple):
    """The files of a drafter that is written: config.json, and tensors from the parameters."""

    config: dict[str, Any]
    table: Table
    constants: dict[str, np.ndarray]  # tensors besides the parameters


class DrafterKind(NamedTuple):
    """One entry of the registry: pure functions over config dictionaries and shapes."""

    config: type  # the frozen dataclass of sizes and options
    detect: Callable[[dict[str, Any], set[str]], bool]  # (config.json, tensor names)
    read_config: Callable[[Files, TargetConfig, int | None], tuple[Any, tuple[str, ...]]]
    table: Callable[[Any, TargetConfig], Table]  # the stored tensors of each parameter
    write_config: Callable[[Any, TargetConfig, FileLayout], dict[str, Any]]
    make: Callable[..., Any]  # (config, target config, objective or None) -> api.Drafter
    # constants: tensors besides the parameters, written unchanged; extras: tensors that are ignored
    constants: Callable[[Any, TargetConfig], dict[str, np.ndarray]] = lambda cfg, target: {}
    extras: tuple[str, ...] = ()
    # names of duplicated target tensors: drafter -> target; the tensors must be equal
    copies: Mapping[str, str] = MappingProxyType({})
    # files of the speculators library, from config and target config; None: it has no such kind
    speculators: Callable[[Any, TargetConfig], StoredDrafter] | None = None
    without_files: Any = None  # the config of a kind without files, which is selected by name


def target_sizes(target: TargetConfig) -> dict[str, int]:
    """The sizes that identify a target in files, under their Hugging Face names."""
    return {"vocab_size": target.vocab_size, **layer_sizes(target)}


def layer_sizes(target: TargetConfig) -> dict[str, int]:
    """The sizes that a drafter and its target must share, whatever the vocabulary is.

    Embeddings of one vocabulary differ in their number of unused rows, so `load_drafter` compares
    token ids if both vocabularies are available.
    """
    return {
        "hidden_size": target.block.hidden_size,
        "num_hidden_layers": target.num_layers,
        "num_attention_heads": target.block.num_heads,
        "num_key_value_heads": target.block.num_kv_heads,
        "head_dim": target.block.head_dim,
    }


def check_pairing(stated: Mapping[str, Any], of_target: Mapping[str, Any]) -> None:
    """Raise InputError for the first value of a drafter's files that contradicts its target.

    Values that are missing or None on either side are skipped.
    """
    for key, actual in of_target.items():
        if None not in (stated.get(key), actual) and stated[key] != actual:
            raise mispaired(key, repr(stated[key]), repr(actual))


def sizes_of_layer(shapes: Mapping[str, Shape], prefix: str, head_dim: int) -> tuple[int, int]:
    """Number of key-value heads and MLP width of a layer, from its key and up projections.

    Raises InputError for missing tensors, and for rows that are not a multiple of `head_dim`.
    """
    keys, up = f"{prefix}self_attn.k_proj.weight", f"{prefix}mlp.up_proj.weight"
    rows, width = (tensor_shape(shapes, name)[0] for name in (keys, up))
    if not head_dim or rows % head_dim:
        raise mispaired("head_dim", f"no divisor of the {rows} rows of {keys}", head_dim)
    return rows // head_dim, width


def tensor_shape(shapes: Mapping[str, Shape], name: str) -> Shape:
    """The shape of a tensor; raises InputError if the drafter's files lack the tensor."""
    if name not in shapes:
        raise InputError(f"the drafter lacks the tensor {name}; name its kind with --method")
    return shapes[name]


def check_stated(config: Mapping[str, Any], sizes: Mapping[str, int]) -> None:
    """Raise InputError for sizes in config.json that differ from those of the tensors."""
    for key, size in sizes.items():
        if config.get(key, size) != size:
            raise misstated(key, config[key], size)


def misstated(key: str, value: Any, found: Any) -> InputError:
    """The error for a size in config.json that differs from that of the tensors."""
    return InputError(
        f"config.json says {key} is {value} but the tensors have {found}; use the config.json of "
        "these weights"
    )


def mispaired(what: str, drafter: Any, target: Any) -> InputError:
    """The error for a drafter that was trained for another target."""
    return InputError(
        f"this drafter belongs to another target: {what} is {drafter} in its files and {target} "
        "in the target; give the target it was trained for"
    )
