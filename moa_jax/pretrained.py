"""Loading, checking and saving of targets and drafters as files."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import operator
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from moa_jax.config import DraftShape, TargetConfig
from moa_jax.drafters import DRAFTERS, needs_no_files
from moa_jax.drafters.api import Drafter
from moa_jax.errors import InputError, first_line
from moa_jax.files import (
    client_files,
    copies,
    model_folder,
    prequantized,
    tensor_reader,
    token_ids,
    turn_ends,
    whole_files,
)
from moa_jax.files.config_keys import check_sections, contradiction
from moa_jax.files.device_loader import Layout, ShardingOf, read_params, write_params
from moa_jax.files.families import ARCHITECTURES, FAMILIES, WRAPPERS
from moa_jax.files.foreign import foreign_layout, official_names
from moa_jax.files.hf_config import target_config_from_hf, target_config_to_hf, towers_of
from moa_jax.files.paths import place
from moa_jax.files.registry import (
    DrafterKind,
    FileLayout,
    Files,
    StoredDrafter,
    check_pairing,
    layer_sizes,
    mispaired,
    target_sizes,
)
from moa_jax.files.replace import replacing
from moa_jax.model import convert
from moa_jax.model.quantize import FORMATS, Format
from moa_jax.model.sharding import DECODE_AXES, for_decoding, mesh_of
from moa_jax.runtime.devices import compute_capability

FIRST_WITH_FP8 = 8.9  # compute capability: Ada; Hopper has 9.0
SPECULATORS_VERSION = "0.9.0"  # of the library whose files `save_drafter` writes


class SpecialIds(NamedTuple):
    """Token ids that decoding needs from a model's files."""

    eos_ids: tuple[int, ...] = ()
    pad_id: int | None = None
    turn_id: int | None = None  # the id of `eos_ids` that the chat template writes after answers


class Target(NamedTuple):
    """A loaded target: its config, parameter tree and folder.

    `notices` are messages for the user.
    """

    config: TargetConfig
    params: Any
    folder: Path
    generation: SpecialIds
    notices: tuple[str, ...] = ()


class LoadedDrafter(NamedTuple):
    """A loaded drafter; `notices` are messages for the user, `depth` is its default depth."""

    method: str
    config: Any
    params: Any
    notices: tuple[str, ...]
    folder: Path
    depth: int | None  # root included; None if the files do not state a depth


def default_dtype() -> Any:
    """Returns float32 on CPU, bfloat16 on accelerators."""
    return jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16


def check_format(weights: str | None) -> None:
    """Raises InputError for an unknown weight format, or one that the device does not support."""
    if weights is not None and weights not in FORMATS:
        raise InputError(f"weights {weights!r}; choose {' or '.join(FORMATS)}, or none")
    device = jax.devices()[0]
    if weights is not None and weights not in formats_of(device):
        raise InputError(
            f"fp8 weights need an NVIDIA GPU of compute capability {FIRST_WITH_FP8} or later, and "
            f"this device is {device.device_kind}; choose int8"
        )


def formats_of(device: Any) -> list[Format]:
    """Returns the weight formats that a device supports."""
    has_fp8 = compute_capability(device) >= FIRST_WITH_FP8
    return [name for name in FORMATS if has_fp8 or name != "fp8"]


def stored_dtype(path_or_hub_id: str | os.PathLike[str]) -> str:
    """Returns the float dtype of a model's files, "float32" for files of float64.

    Raises InputError for files without tensors and for unsupported dtypes.
    """
    name = model_folder.open_tensors(model_folder.find_folder(path_or_hub_id)).dtype.name
    return "float32" if name == "float64" else name


def describe_target(path_or_hub_id: str | os.PathLike[str]) -> Target:
    """Loads a target without its weights (`params` is None); raises InputError as `load_target`."""
    return _describe(model_folder.find_folder(path_or_hub_id, weights=False))


def load_target(
    path_or_hub_id: str | os.PathLike[str],
    dtype: Any = None,
    *,
    layers: Layout = "list",
    sharding: ShardingOf | None = None,
    weights: Format | None = None,
    mesh: Mesh | None = None,
) -> Target:
    """Loads a target of a family of `files.families` from a folder or the hub, tensor by tensor.

    Each array is placed on its device as soon as its tensors are joined, so host memory holds at
    most two arrays besides those placed on the host. Matrices that the folder stores in eight bits
    stay so (`files.prequantized`). `dtype` defaults to `default_dtype()`;
    `layers` "list" is for decoding, "stacked" (a leading layer axis) for training; `sharding` maps
    a leaf's path and shape to its sharding. `weights` quantizes the matrices of a list of layers
    during loading. With `mesh` (`sharding.decoding_mesh`) the target decodes on all devices of the
    mesh, and each device gets its part of every array.

    Raises InputError for a missing, damaged or unsupported model, for a weight format that the
    device does not support, and for a mesh that does not divide the feed-forward. Raises ValueError
    for `weights` or `mesh` with "stacked" layers, and for `sharding` with `mesh`.
    """
    check_format(weights)
    if layers == "stacked" and (weights is not None or mesh is not None):
        raise ValueError("`weights` and `mesh` are for decoding, from a list of layers")
    if sharding is not None and mesh is not None:
        raise ValueError("`mesh` says where arrays lie; leave out `sharding`")
    target = _describe(model_folder.find_folder(path_or_hub_id))
    table = convert.target_table(target.config)
    reader = _open_target(target, table)
    dtype = default_dtype() if dtype is None else dtype
    if mesh is not None:
        check_mesh(target.config, mesh)
        sharding = cut_for_decoding(table, mesh, "target")
    params = read_params(reader, table, dtype, layers=layers, sharding=sharding, weights=weights)
    return target._replace(params=params)


def check_mesh(config: TargetConfig, mesh: Mesh) -> None:
    """Raises InputError unless a mesh is a decoding mesh that divides the feed-forward."""
    if mesh.axis_names != DECODE_AXES:
        raise InputError(
            f"a mesh of the axes {', '.join(map(str, mesh.axis_names))} does not decode; make one "
            "with moa_jax.decoding_mesh"
        )
    tensor, width = mesh.shape["tensor"], config.block.split_width
    if width % tensor:
        what = "experts" if config.block.experts else "feed-forward"
        raise InputError(
            f"mesh tensor={tensor} does not divide the target's {what} of {width}; choose a number "
            "that does"
        )


def cut_for_decoding(table: convert.Table, mesh: Mesh, model: str) -> ShardingOf:
    """Returns the shardings of a model's arrays on a mesh, and logs the replicated arrays."""
    cut = for_decoding(table, mesh)
    if cut.copied:
        logging.getLogger(__name__).warning(
            "mesh tensor=%d does not divide these arrays of the %s, so each device has a copy: %s",
            *(mesh.shape["tensor"], model, ", ".join(cut.copied)),
        )
    return cut.sharding_of


def load_borrowed(
    target: Target,
    borrow: Callable[[Any], Any],
    dtype: Any = None,
    *,
    weights: Format | None = None,
) -> Any:
    """Loads only the target parameters that `shared_params` reads.

    `dtype` and `weights` are as in `load_target`. `target` may be without weights
    (`describe_target`), and its folder without other tensors (`save_for_client`). Raises InputError
    as `load_target`.
    """
    table, (places, structure) = convert.target_table(target.config), _borrowed(target, borrow)
    used = {path: table[path] for path in places}
    reader = _open_target(target, used)
    dtype = default_dtype() if dtype is None else dtype
    found = [
        read_params(reader, {path[-1:]: packing}, dtype, weights=weights)[path[-1]]
        for path, packing in used.items()
    ]
    return jax.tree.unflatten(structure, found)


@dataclasses.dataclass(frozen=True)
class _Place:
    """A placeholder for a leaf of a parameter tree, with the leaf's path."""

    path: convert.Path


def _borrowed(target: Target, borrow: Callable[[Any], Any]) -> tuple[list[convert.Path], Any]:
    """Returns the paths of the leaves that `shared_params` reads, and its result's structure."""
    table = convert.target_table(target.config)
    # `shared_params` runs on a tree whose leaves are their own paths, which shows the leaves it
    # reads.
    places = borrow(convert.nest({path: _Place(path) for path in table}))
    leaves, structure = jax.tree.flatten(places)
    return [leaf.path for leaf in leaves], structure


def save_target(
    folder: str | os.PathLike[str],
    config: TargetConfig,
    params: Any,
    tokenizer_folder: str | os.PathLike[str] | None = None,
    dtype: Any = jnp.bfloat16,
    *,
    generation: SpecialIds | None = None,
    beside: Mapping[str, bytes | None] | None = None,
) -> Path:
    """Writes a target, with layers as a list or stacked, as a Hugging Face folder.

    Creating a folder is atomic; in an existing folder the target's files are replaced
    (`files.replace`). Tokenizer files are copied from `tokenizer_folder`, which also gives the end
    and padding ids unless `generation` does. `beside` maps names of other files to their content.
    Raises InputError if the family's config.json cannot express the config.
    """
    folder = place(folder)
    source = None if tokenizer_folder is None else Path(tokenizer_folder)
    if generation is None:
        known = source and _special_ids(source, config.vocab_size, {})[0]
        generation = known or SpecialIds()
    stored = target_config_to_hf(config) | {"torch_dtype": np.dtype(dtype).name}
    stale = [client_files.FILE, *(beside or {})]
    stale += model_folder.TOKENIZER_FILES if source else ()
    with replacing(folder, stale=stale) as fresh:
        whole_files.write_json(fresh / "config.json", stored | _generation_to_hf(generation))
        whole_files.write_json(fresh / "generation_config.json", _generation_to_hf(generation))
        write_params(fresh, convert.target_table(config), params, dtype)
        if source:
            model_folder.copy_tokenizer(source, fresh)
        _write_beside(fresh, beside)
    return folder


def _write_beside(folder: Path, beside: Mapping[str, bytes | None] | None) -> None:
    for name, content in (beside or {}).items():
        if content is not None:
            (folder / name).write_bytes(content)


def load_drafter(
    path_or_hub_id: str | os.PathLike[str],
    target: Target,
    *,
    method: str | None = None,
    target_layer_inference: int | None = None,
    dtype: Any = None,
    weights: Format | None = None,
    for_client: bool = False,
    mesh: Mesh | None = None,
) -> LoadedDrafter:
    """Loads a drafter for a target, in any layout of `files.registry.FILE_LAYOUTS`.

    `method` overrides the kind found in the files; `target_layer_inference` is the N of MoA for
    files that do not state N. `dtype` defaults to the target's dtype, or to `default_dtype()` for a
    target without weights; `weights` is as in `load_target`. `for_client` skips the parameters that
    only the target's side reads (`Drafter.condense_only`). `mesh` defaults to the target's mesh, if
    any. A kind without files, such as `lookup`, is given by its name instead of a folder.

    Raises InputError for a missing or damaged drafter, for weights that are not finite, and for a
    drafter of another target.
    """
    check_format(weights)
    name = os.fspath(path_or_hub_id)
    if needs_no_files(name) and not Path(name).is_dir():
        return LoadedDrafter(name, DRAFTERS[name].without_files, {}, (), Path(name), None)
    folder = model_folder.find_folder(path_or_hub_id)
    config = whole_files.read_json(folder / "config.json")
    reader, rest = _open(folder), client_files.left_out(folder)
    with _reading(folder / "config.json"):
        check_sections(config, "config.json")
        official = official_names({**reader.shapes, **rest})
        reader, rest = reader.renamed(official), {official[name]: rest[name] for name in rest}
        shapes = reader.shapes | {name: line.shape for name, line in rest.items()}
        method = _method_of(method, config, set(shapes), folder)
        _check_verifier(config, target)
        kind = DRAFTERS[method]
        _check_target(config, folder, target)
        files = Files(config, shapes, reader.read)
        cfg, notices = kind.read_config(files, target.config, target_layer_inference)
        table = kind.table(cfg, target.config)
        depth = _depth_of(config)
    used = _clients_table(method, cfg, target) if for_client else table
    extras = [*kind.constants(cfg, target.config), *kind.extras, *kind.copies]
    _check(reader, folder, rest, table, used, [*extras, *copies.rotary_tables(reader.shapes)])
    _check_copies(kind, reader, target)
    if dtype is None:
        dtype = default_dtype() if target.params is None else target.params["embed"].dtype
    mesh = mesh_of(target.params) if mesh is None else mesh
    sharding = None if mesh is None else cut_for_decoding(used, mesh, "drafter")
    # A drafter with NaN does not change the output, so later checks would pass.
    params = read_params(reader, used, dtype, sharding=sharding, weights=weights, finite=True)
    return LoadedDrafter(method, cfg, params, notices, folder, depth)


def _clients_table(method: str, cfg: Any, target: Target) -> convert.Table:
    """Returns the tensors of a drafter that a client reads: all but those only for `condense`."""
    elsewhere = DRAFTERS[method].make(cfg, target.config).condense_only
    table = DRAFTERS[method].table(cfg, target.config)
    return {path: packing for path, packing in table.items() if path[0] not in elsewhere}


def table_of(drafter: LoadedDrafter, target_cfg: TargetConfig) -> convert.Table:
    """Returns the table of stored tensors that make up a drafter's parameters."""
    return DRAFTERS[drafter.method].table(drafter.config, target_cfg)


def functions_of(drafter: LoadedDrafter, target_cfg: TargetConfig) -> Drafter:
    """Returns the functions of a loaded drafter that decoding calls."""
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
    verifier: str | None = None,
    beside: Mapping[str, bytes | None] | None = None,
) -> Path:
    """Writes a drafter with the tensor names and the config.json of the given layout.

    `depth` is the depth of the drafter's default chain; `verifier` is the target's name in
    config.json, by default that of its folder; `beside` maps names of other files to their content,
    None to delete a file. Creating a folder is atomic; in an existing folder the drafter's
    files are replaced (`files.replace`). Raises InputError if the layout cannot express the config.
    """
    folder = place(folder)
    verifier = verifier or model_folder.public_name(target.folder)
    config, table, constants = _stored(method, cfg, target, layout, depth, verifier)
    config["torch_dtype"] = np.dtype(dtype).name
    stale = [client_files.FILE, *(beside or {})]
    with replacing(folder, stale=stale) as fresh:
        whole_files.write_json(fresh / "config.json", config)
        write_params(fresh, table, params, dtype, constants)
        _write_beside(fresh, beside)
    return folder


def _stored(
    method: str, cfg: Any, target: Target, layout: FileLayout, depth: int, verifier: str
) -> StoredDrafter:
    """Returns the files of a drafter in a layout; raises InputError as `save_drafter`."""
    kind = DRAFTERS[method]
    if layout == "speculators":
        if kind.speculators is None:
            raise InputError(
                f"the speculators library has no drafters of kind {method}; choose another layout"
            )
        stored = kind.speculators(cfg, target.config)
        stored.config.update(
            speculators_model_type=method,
            speculators_version=SPECULATORS_VERSION,
            speculators_config=_speculators_config(method, target, depth, verifier),
        )
        return stored
    config = kind.write_config(cfg, target.config, layout)
    if layout == "ours":
        config |= {"method": method, "num_speculative_tokens": depth - 1}
        config["target"] = _verifier(target, verifier) | _fingerprint(target)
    table, constants = kind.table(cfg, target.config), kind.constants(cfg, target.config)
    return StoredDrafter(config, table, constants)


def save_for_client(
    folder: str | os.PathLike[str],
    target: Target,
    drafter: LoadedDrafter,
    *,
    beside: Mapping[str, bytes | None] | None = None,
) -> Path:
    """Writes the folders `target` and `draft` with only the tensors that a client reads.

    Tensors are copied as stored; each omitted tensor gets an entry in parts.json
    (files/client_files.py). Creating the folders is atomic; in existing folders the files of both
    are replaced together (`files.replace`). `beside` maps names of other files of `draft` to their
    content. A drafter without files has no folder. Raises InputError for damaged files, and for a
    GGUF file.
    """
    folder, kind = Path(folder), DRAFTERS[drafter.method]
    table = convert.target_table(target.config)
    if (target.folder / tensor_reader.GGUF_INDEX).is_file():
        raise InputError(
            f"{target.folder.name}: a client's part is made of safetensors; write the GGUF file as "
            "a folder with infer.convert --target FILE.gguf --output DIR first"
        )
    places, _ = _borrowed(target, functions_of(drafter, target.config).shared_params)
    used = {path: table[path] for path in places}
    if _open_target(target, used).scales.keys() & convert.stored_shapes(used):
        raise InputError(
            f"{target.folder}: a client's part with quantized matrices is not written; use the "
            "unquantized model"
        )
    stale = (*client_files.STALE, *(f"draft/{name}" for name in beside or {}))
    with replacing(folder, client_files.MARK, client_files.PAIR, stale) as fresh:
        client_files.copy(target.folder, fresh / "target", list(convert.stored_shapes(used)))
        if not drafter.folder.is_dir():
            return folder
        held = model_folder.open_tensors(drafter.folder).shapes
        constants = kind.constants(drafter.config, target.config)
        names = convert.stored_shapes(_clients_table(drafter.method, drafter.config, target))
        wanted = {*names, *constants}
        official = official_names({**held, **client_files.left_out(drafter.folder)})
        kept = [name for name in held if official[name] in wanted]
        client_files.copy(drafter.folder, fresh / "draft", kept)
        _write_beside(fresh / "draft", beside)
    return folder


def _check(
    reader: tensor_reader.TensorReader,
    folder: Path,
    rest: Collection[str],
    table: convert.Table,
    used: convert.Table,
    extras: Iterable[str],
) -> None:
    """Raises InputError unless a folder has the tensors of `table`; unused ones may be absent.

    `rest` are the names of tensors that the folder leaves out on purpose.
    """
    if absent := [name for name in convert.stored_shapes(used) if name in rest]:
        raise InputError(
            f"{folder} holds only a client's part of a model, without {absent[0]} and "
            f"{len(absent) - 1} more tensors; give the whole model, or write the part that this "
            "drafter needs with infer.convert --for-client"
        )
    expected = convert.stored_shapes(table)
    reader.check({name: shape for name, shape in expected.items() if name not in rest}, extras)


def _open(folder: Path) -> tensor_reader.TensorReader:
    """Opens the tensors of a model.

    Raises InputError for files that contradict each other, and for known unsupported layouts.
    """
    copies.check_files(folder)
    reader = model_folder.open_tensors(folder)
    if (foreign := foreign_layout(reader.shapes)) is not None:
        raise InputError(f"{folder}: {foreign}")
    return reader


def _open_target(target: Target, used: convert.Table) -> tensor_reader.TensorReader:
    """Opens and checks the tensors of a target's folder; the tensors of `used` must be present.

    Raises InputError for missing and unexpected tensors, and for second copies that differ.
    """
    path, cfg = target.folder / "config.json", target.config
    config = whole_files.read_json(path)
    with _reading(path):
        reader = prequantized.reader_of(_open(target.folder), config, path)
    tied = [copies.HEAD] if cfg.tie_word_embeddings else []
    extras = [*tied, *reader.scales.values(), *copies.rotary_tables(reader.shapes)]
    rest = client_files.left_out(target.folder)
    _check(reader, target.folder, rest, convert.target_table(cfg), used, extras)
    with _reading(path):
        copies.check_rotary(reader.shapes, reader.read, cfg.block)
    if config.get("tie_word_embeddings") and not cfg.tie_word_embeddings:
        logging.getLogger(__name__).warning(
            "%s: %s differs from %s, and both are used although config.json has "
            "tie_word_embeddings true; set it to false, since other software drops the head",
            *(target.folder, copies.HEAD, copies.EMBEDDING),
        )
    return reader


def _check_copies(kind: DrafterKind, reader: tensor_reader.TensorReader, target: Target) -> None:
    """Raises InputError if a drafter's copy of a target's tensor differs from the target's."""
    if not any(name in reader.shapes for name in kind.copies):
        return
    if not model_folder.has_tensors(target.folder):
        return
    of_target = model_folder.open_tensors(target.folder)
    for name, original in copies.differing(reader, of_target, kind.copies):
        raise InputError(
            f"{reader.file_of[name]}: {name} differs from the target's {original} in "
            f"{target.folder}, which the drafter would use; give the target that the drafter was "
            "trained for"
        )


def _describe(folder: Path) -> Target:
    if jax.config.jax_enable_x64:
        raise InputError(
            "jax_enable_x64 is on, and models compute with 32 bits; unset JAX_ENABLE_X64, or call "
            "jax.config.update('jax_enable_x64', False)"
        )
    path = folder / "config.json"
    config = whole_files.read_json(path)
    with _reading(path):
        prequantized.scheme_of(config, str(path))
        wide = {key: value for key, value in config.items() if key not in prequantized.KEYS}
        cfg = target_config_from_hf(wide, str(path))
    if cfg.tie_word_embeddings and model_folder.has_tensors(folder):
        reader = model_folder.open_tensors(folder)
        cfg = copies.with_own_head(cfg, reader.shapes, reader.read)
    ids, notices = _special_ids(folder, cfg.vocab_size, (config.get("text_config") or {}) | config)
    return Target(cfg, None, folder, ids, (*_notices(folder, cfg, config), *notices))


def _notices(folder: Path, cfg: TargetConfig, config: dict[str, Any]) -> Iterator[str]:
    """Yields what is not read of a model, and what other software computes otherwise."""
    if towers := towers_of(config):
        yield f"{folder}: {', '.join(towers)}: only the text model is read, without images or sound"
    if chunks := config.get("dual_chunk_attention_config"):
        yield (
            f"{folder}: dual_chunk_attention_config is not computed, as in transformers: beyond "
            f"{chunks.get('original_max_position_embeddings')} tokens vLLM computes otherwise"
        )
    scaling = cfg.block.rope_scaling
    if scaling is not None and scaling.rope_type == "dynamic":
        yield (
            f"{folder}: dynamic RoPE scaling uses the frequencies of {cfg.max_position_embeddings} "
            "tokens at every length, as vLLM does; those of transformers change with the length"
        )


@contextlib.contextmanager
def _reading(path: Path) -> Iterator[None]:
    """Converts errors caused by a file's values to an InputError that names the file."""
    try:
        yield
    except InputError as error:
        folder, text = str(path.parent), str(error)
        raise InputError(text if folder in text else f"{folder}: {text}") from error
    except (TypeError, ValueError, KeyError, AttributeError) as error:
        raise InputError(
            f"{path} holds a value of the wrong type ({first_line(error)}); fix or fetch it"
        ) from error


def _special_ids(
    folder: Path, vocab_size: int, config: Mapping[str, Any]
) -> tuple[SpecialIds, tuple[str, ...]]:
    """Returns the special ids of a model, and notices.

    End ids are those of the first config file that states any, and those of the tokenizer. A notice
    names the end ids that are outside the vocabulary.
    """
    own, named = folder / "generation_config.json", turn_ends.read_ends(folder)
    sources = {
        own: whole_files.read_json(own) if own.is_file() else {},
        folder / "config.json": config,
    }
    ends = {path: _ids_of(path, source, "eos_token_id") for path, source in sources.items()}
    of_tokenizer = [each for each in (named.eos_id, named.turn_id) if each is not None]
    is_known = range(vocab_size).__contains__
    everywhere = {**ends, folder / "tokenizer.json": dict.fromkeys(of_tokenizer)}
    outside = [
        f"{each} ({path.name})"
        for path, ids in everywhere.items()
        for each in ids
        if not is_known(each)
    ]
    stated = (list(filter(is_known, ids)) for ids in ends.values())
    eos = [*next(filter(None, stated), []), *filter(is_known, of_tokenizer)]
    pads = [_ids_of(path, source, "pad_token_id") for path, source in sources.items()]
    if named.pad_id is not None and named.pad_id < vocab_size:
        pads.append([named.pad_id])
    pad_id = next(filter(None, pads), [None])[0]
    turn_id = named.turn_id if named.turn_id in eos else None
    notice = (
        f"{folder}: these end ids are outside the vocabulary of {vocab_size} and end no answer: "
        f"{', '.join(outside)}"
    )
    found = SpecialIds(tuple(dict.fromkeys(eos)), pad_id, turn_id)
    return found, (notice,) if outside else ()


def _ids_of(path: Path, source: Mapping[str, Any], key: str) -> list[int]:
    """Returns the token ids, one or a list, under a key of a file."""
    if (value := source.get(key)) is None:
        return []
    with _reading(path):
        return list(map(_id_of, value if isinstance(value, list) else [value]))


def _id_of(value: Any) -> int:
    """Converts an integer; raises TypeError for other values, and for booleans, which are ints."""
    if isinstance(value, bool):
        raise TypeError(f"{value} is a truth value and not a token id")
    return operator.index(value)


def _generation_to_hf(generation: SpecialIds) -> dict[str, Any]:
    eos = list(generation.eos_ids)
    ids = {"eos_token_id": eos[0] if len(eos) == 1 else eos, "pad_token_id": generation.pad_id}
    return {key: value for key, value in ids.items() if value not in (None, [])}


def _method_of(asked: str | None, config: dict[str, Any], names: set[str], folder: Path) -> str:
    stated = [config.get(key) for key in ("method", "speculators_model_type")]
    if asked is None and None not in stated and stated[0] != stated[1]:
        raise contradiction(str(folder), "method", stated[0], "speculators_model_type", stated[1])
    method = asked or stated[0] or stated[1]
    if method is None:
        method = next((name for name, kind in DRAFTERS.items() if kind.detect(config, names)), None)
    if needs_no_files(method or ""):
        raise InputError(f"a drafter of kind {method!r} has no files; name it instead of {folder}")
    if method not in DRAFTERS:
        known = ", ".join(DRAFTERS)
        found = f"a drafter of kind {method!r}" if method else "no drafter that we recognise"
        raise InputError(f"{folder} holds {found}; choose a drafter of the kinds {known}")
    return method


def _fingerprint(target: Target) -> dict[str, Any]:
    """Returns the description of a target in a drafter's files, used to reject a wrong pairing."""
    tokens = token_ids.read_token_ids(target.folder)
    stated = {} if tokens is None else {"vocabulary": token_ids.fingerprint(tokens)}
    return target_sizes(target.config) | stated


def _check_target(config: Mapping[str, Any], folder: Path, target: Target) -> None:
    """Raises InputError for a drafter whose files state other sizes or another vocabulary.

    Vocabularies are equal if their tokens have the same ids, for embeddings of any size. If the ids
    of one side are unknown, the sizes of the vocabularies are compared.
    """
    stated, nested = config.get("target", {}), config.get("transformer_layer_config", config)
    check_pairing(stated, layer_sizes(target.config))
    own, known = (token_ids.read_token_ids(each) for each in (folder, target.folder))
    name, file_sha256, same = stated.get("vocabulary"), stated.get("tokenizer_sha256"), None
    if own is None:
        same = token_ids.is_same(target.folder, known, name, file_sha256)
        if same:
            return
        own = token_ids.find_beside(folder, name, file_sha256)
    if own is not None and known is not None:
        if found := token_ids.first_difference(own, known):
            tokens = (repr(found.token), repr(found.other))
            raise mispaired(f"the token of id {found.token_id}", *tokens)
        return
    if same is False:
        raise mispaired("the vocabulary (ids:sha256)", name, token_ids.fingerprint(known or {}))
    size = stated.get("vocab_size", nested.get("vocab_size"))
    check_pairing({"vocab_size": size}, {"vocab_size": target.config.vocab_size})
    if file_sha256 is not None and known is not None:
        token_ids.notice_unknown(folder)


def _speculators_config(method: str, target: Target, depth: int, verifier: str) -> dict[str, Any]:
    """Returns the block by which the speculators library and vLLM pair a drafter and a target."""
    greedy = {"proposal_type": "greedy", "speculative_tokens": max(1, depth - 1)}
    return {
        "algorithm": method,
        "proposal_methods": [greedy | {"verifier_accept_k": 1, "accept_tolerance": 0.0}],
        "default_proposal_method": "greedy",
        "verifier": _verifier(target, verifier),
    }


def _verifier(target: Target, name: str) -> dict[str, Any]:
    return {"name_or_path": name, "architectures": [ARCHITECTURES[target.config.family]]}


def _check_verifier(config: dict[str, Any], target: Target) -> None:
    """Raises InputError if a drafter's files state another architecture of the target."""
    verifier = (
        (config.get("speculators_config") or {}).get("verifier") or config.get("target") or {}
    )
    stated, family = verifier.get("architectures"), target.config.family
    actual, wrappers = ARCHITECTURES[family], map(WRAPPERS.get, FAMILIES[family].wrappers)
    if stated and not {actual, *wrappers} & {*stated}:
        raise mispaired("the architecture of the verifier", ", ".join(stated), actual)


def _depth_of(config: dict[str, Any]) -> int | None:
    """Returns the default depth that a drafter's files state; our early files use both keys."""
    methods = (config.get("speculators_config") or {}).get("proposal_methods") or [{}]
    tokens = config.get("num_speculative_tokens", methods[0].get("speculative_tokens"))
    return None if tokens is None else DraftShape(tokens + 1).depth
