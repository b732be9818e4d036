"""Targets and drafters as files: streamed in, checked against each other, written back."""

from __future__ import annotations

import contextlib
import dataclasses
import operator
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax import convert, folders
from moa_jax.config import DraftShape, TargetConfig
from moa_jax.drafters import DRAFTERS, needs_no_files
from moa_jax.drafters.api import Drafter
from moa_jax.drafters.kinds import FileLayout, Files, check_pairing, target_sizes
from moa_jax.errors import InputError, first_line
from moa_jax.hf_config import target_config_from_hf, target_config_to_hf
from moa_jax.placement import Layout, ShardingOf, read_params, write_params


class Generation(NamedTuple):
    """Token ids that decoding needs from a model's files."""

    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None


class Target(NamedTuple):
    """A loaded target: its config, its parameter tree and where it came from."""

    config: TargetConfig
    params: Any
    folder: Path
    generation: Generation


class LoadedDrafter(NamedTuple):
    """A loaded drafter; `notices` are for the user to read, `depth` that of the chain to draft."""

    method: str
    config: Any
    params: Any
    notices: tuple[str, ...]
    folder: Path
    depth: int | None  # root included; None where the files do not say


def default_dtype() -> Any:
    """float32 on CPU, bfloat16 on accelerators."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def stored_dtype(path_or_hub_id: str | os.PathLike[str]) -> str:
    """The float dtype of a model's files, "float32" where they hold float64.

    Raises InputError for files without tensors and for dtypes that are not read.
    """
    name = folders.TensorReader(folders.find_folder(path_or_hub_id)).dtype.name
    return "float32" if name == "float64" else name


def describe_target(path_or_hub_id: str | os.PathLike[str]) -> Target:
    """A target without its weights (`params` is None); raises InputError as `load_target`."""
    return _describe(folders.find_folder(path_or_hub_id, weights=False))


def load_target(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = None,
    *,
    layers: Layout = "list",
    sharding: ShardingOf | None = None,
) -> Target:
    """Load a Llama or Qwen target from a folder or the hub, one tensor at a time.

    Each array goes to its place as soon as it is packed, so the host holds the arrays that
    live there and one more. `dtype` defaults to `default_dtype()`; `layers` "list" is for
    decoding, "stacked" (a leading layer axis) for training; `sharding` maps a leaf's path and
    shape to its sharding. Raises InputError for a missing, damaged or unsupported model.
    """
    target = _describe(folders.find_folder(path_or_hub_id))
    table = convert.target_table(target.config)
    reader = folders.TensorReader(target.folder)
    reader.check(convert.stored_shapes(table), _harmless_extras(reader, target.config))
    dtype = default_dtype() if dtype is None else dtype
    params = read_params(reader, table, dtype, layers=layers, sharding=sharding)
    return target._replace(params=params)


def load_borrowed(target: Target, borrow: Callable[[Any], Any], dtype: Any = None) -> Any:
    """What a drafter borrows of a target, and no other array of it; `dtype` as in `load_target`.

    `target` may be one without its weights (`describe_target`). Raises InputError as `load_target`.
    """
    table = convert.target_table(target.config)
    folder = folders.find_folder(target.folder)
    reader = folders.TensorReader(folder)
    reader.check(convert.stored_shapes(table), _harmless_extras(reader, target.config))
    dtype = default_dtype() if dtype is None else dtype
    # What is borrowed says a tree whose leaves are their own places.
    places = borrow(convert.nest({path: _Place(path) for path in table}))
    leaves, structure = jax.tree.flatten(places)
    found = [read_params(reader, {(): table[leaf.path]}, dtype) for leaf in leaves]
    return jax.tree.unflatten(structure, found)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A leaf of a parameter tree, by where it stands."""

    path: convert.Path


def save_target(
    folder: str | os.PathLike[str],
    config: TargetConfig,
    params: Any,
    tokenizer_folder: str | os.PathLike[str] | None = None,
    dtype: Any = jnp.bfloat16,
    *,
    generation: Generation | None = None,
) -> Path:
    """Write a target, in either layout of its layers, as a Hugging Face folder.

    The folder appears whole or not at all; one of the same name is replaced. Tokenizer files
    are copied from `tokenizer_folder`, which also gives the end and padding ids unless
    `generation` does. Raises InputError if the family cannot say the config.
    """
    folder = Path(folder)
    source = None if tokenizer_folder is None else Path(tokenizer_folder)
    ids = generation or (_special_ids(source) if source else Generation())
    stored = target_config_to_hf(config) | {"torch_dtype": np.dtype(dtype).name}
    with folders.replacing(folder) as fresh:
        folders.write_json(fresh / "config.json", stored | _generation_to_hf(ids))
        folders.write_json(fresh / "generation_config.json", _generation_to_hf(ids))
        write_params(fresh, convert.target_table(config), params, dtype)
        if source:
            folders.copy_tokenizer(source, fresh)
    return folder


def load_drafter(
    path_or_hub_id: str | os.PathLike[str],
    target: Target,
    *,
    method: str | None = None,
    target_layer_inference: int | None = None,
    dtype: Any = None,
) -> LoadedDrafter:
    """Load a drafter for a target, in any layout of `drafters.kinds.FILE_LAYOUTS`.

    `method` overrides the kind found in the files, `target_layer_inference` states N where
    they do not; `dtype` defaults to the target's, or to `default_dtype()` for a target without
    its weights. A kind without files, as `lookup`, is named
    instead of a folder. Raises InputError for a missing or damaged drafter, and for one of
    another target.
    """
    name = os.fspath(path_or_hub_id)
    if needs_no_files(name) and not Path(name).is_dir():
        return LoadedDrafter(name, DRAFTERS[name].without_files, {}, (), Path(name), None)
    folder = folders.find_folder(path_or_hub_id)
    config = folders.read_json(folder / "config.json")
    reader = folders.TensorReader(folder)
    with _reading(folder / "config.json"):
        method = _method_of(method, config, reader, folder)
        kind = DRAFTERS[method]
        check_pairing(config.get("target", {}), _fingerprint(target))
        files = Files(config, reader.shapes, reader.read)
        cfg, notices = kind.read_config(files, target.config, target_layer_inference)
        table = kind.table(cfg, target.config)
        depth = _depth_of(config)
    reader.check(convert.stored_shapes(table), [*kind.constants(cfg, target.config), *kind.extras])
    if dtype is None:
        dtype = default_dtype() if target.params is None else target.params["embed"].dtype
    params = read_params(reader, table, dtype)
    return LoadedDrafter(method, cfg, params, notices, folder, depth)


def functions_of(drafter: LoadedDrafter, target_cfg: TargetConfig) -> Drafter:
    """A loaded drafter as the functions that decoding calls."""
    return DRAFTERS[drafter.method].make(drafter.config, target_cfg)


def save_drafter(
    folder: str | os.PathLike[str],
    method: str,
    cfg: Any,
    params: Any,
    target: Target,
    dtype: Any = jnp.float32,
    *,
    layout: FileLayout = "ours",
    depth: int = 5,
) -> Path:
    """Write a drafter under its authors' tensor names, with a config.json of the given layout.

    `depth` is that of the chain it should draft. The folder appears whole or not at all; one
    of the same name is replaced. Raises InputError where the layout cannot say the config.
    """
    folder = Path(folder)
    kind = DRAFTERS[method]
    config = kind.write_config(cfg, target.config, layout)
    config["torch_dtype"] = np.dtype(dtype).name
    if layout in ("ours", "speculators"):
        config["speculators_model_type"] = method
        config["speculators_config"] = _speculators_config(method, target, depth)
    if layout == "speculators":
        config.setdefault("draft_vocab_size", target.config.vocab_size)
    if layout == "ours":
        config |= {"method": method, "target": _fingerprint(target)}
    with folders.replacing(folder) as fresh:
        folders.write_json(fresh / "config.json", config)
        constants = kind.constants(cfg, target.config)
        write_params(fresh, kind.table(cfg, target.config), params, dtype, constants)
    return folder


def _describe(folder: Path) -> Target:
    path = folder / "config.json"
    config = folders.read_json(path)
    with _reading(path):
        cfg = target_config_from_hf(config, str(path))
    own = folder / "generation_config.json"
    sources = {own: folders.read_json(own) if own.is_file() else {}, path: config}
    eos, pad = (_ids_of(sources, key) for key in ("eos_token_id", "pad_token_id"))
    return Target(cfg, None, folder, Generation(eos, pad[0] if pad else None))


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Turn whatever the values of a file set off into an InputError that names where it lies."""
    try:
        yield
    except InputError as error:
        folder, text = str(path.parent), str(error)
        raise InputError(text if folder in text else f"{folder}: {text}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} holds a value of the wrong type ({first_line(error)}): mend or fetch it"
        ) from error


def _ids_of(sources: dict[Path, dict[str, Any]], key: str) -> tuple[int, ...]:
    """Token ids, one or a list, from the first file that states them."""
    for path, source in sources.items():
        if (value := source.get(key)) is not None:
            with _reading(path):
                return tuple(map(operator.index, value if isinstance(value, list) else [value]))
    return ()


def _generation_to_hf(generation: Generation) -> dict[str, Any]:
    eos = list(generation.eos_ids)
    ids = {"eos_token_id": eos[0] if len(eos) == 1 else eos, "pad_token_id": generation.pad_id}
    return {key: value for key, value in ids.items() if value not in (None, [])}


def _special_ids(folder: Path) -> Generation:
    """End and padding ids of a tokenizer's files."""
    settings = folders.read_json(folder / "tokenizer_config.json")
    added = folders.read_json(folder / "tokenizer.json").get("added_tokens", [])
    id_of = {token["content"]: token["id"] for token in added}
    eos, pad = (
        id_of.get(token["content"] if isinstance(token, dict) else token)
        for token in (settings.get("eos_token"), settings.get("pad_token"))
    )
    return Generation(() if eos is None else (eos,), pad)


def _method_of(
    asked: str | None, config: dict[str, Any], reader: folders.TensorReader, folder: Path
) -> str:
    method = asked or config.get("method") or config.get("speculators_model_type")
    if method is None:
        names = set(reader.shapes)
        method = next((name for name, kind in DRAFTERS.items() if kind.detect(config, names)), None)
    if method not in DRAFTERS:
        known = ", ".join(DRAFTERS)
        found = f"a drafter of kind {method!r}" if method else "no drafter that we recognise"
        raise InputError(f"{folder} holds {found}: these kinds are known: {known}")
    return method


def _fingerprint(target: Target) -> dict[str, Any]:
    """What a drafter's files say of its target, so that a wrong pairing is refused."""
    tokenizer = folders.file_hash(target.folder / "tokenizer.json")
    return target_sizes(target.config) | {"tokenizer_sha256": tokenizer}


def _speculators_config(method: str, target: Target, depth: int) -> dict[str, Any]:
    """The block by which the speculators library and vLLM pair a drafter with its target."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": depth - 1}
    return {
        "algorithm": method,
        "proposal_methods": [greedy | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "default_proposal_method": "greedy",
        "verifier": {
            "name_or_path": folders.public_name(target.folder),
            "architectures": target_config_to_hf(target.config)["architectures"],
        },
    }


def _depth_of(config: dict[str, Any]) -> int | None:
    methods = config.get("speculators_config", {}).get("proposal_methods") or [{}]
    tokens = methods[0].get("speculative_tokens")
    return None if tokens is None else DraftShape(tokens + 1).depth


def _harmless_extras(reader: folders.TensorReader, cfg: TargetConfig) -> list[str]:
    """Tensors that some writers add: rotary tables, and the second copy of a tied head."""
    tied = ["lm_head.weight"] if cfg.tie_word_embeddings else []
    return tied + [name for name in reader.shapes if name.endswith("rotary_emb.inv_freq")]
