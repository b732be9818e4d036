"""Sharding of arrays over a mesh: logical axis names, and rules that map them to mesh axes.

    mesh    data     rows of a batch; weights are replicated
            fsdp     rows of a batch; weights are split, and gathered layer by layer when used
            tensor   heads, feed-forwards and vocabulary of every layer

    (D, K, G+2, E)  "embed", "kv_heads", None, None  --TRAIN-->  P("fsdp", "tensor", None, None)
                                                     --DECODE->  P(None, "tensor", None, None)

The tables of `convert.py` hold the axis names with the shapes. An unknown name is an error, and so
are two axes of one array on the same mesh axis, since weights would silently be replicated.

In training the layers of the target are split over `tensor`. The small drafter's layers are not:
devices along `tensor` process different rows (`DRAFTER_RULES`). The products of the frozen head,
which the target and the drafter share, are split by vocabulary.

    tensor      target             drafter            head
    device 0    rows 0-1, heads/2  row 0, all heads   rows 0-1, V/2
    device 1    rows 0-1, heads/2  row 1, all heads   rows 0-1, V/2

A training mesh has all three axes. A decoding mesh has no `fsdp`, since gathering weights for each
token would take longer than reading them. In training, a mesh that does not divide an array is an
error. In decoding each device gets the whole array instead, so that a drafter with few heads can
run with a target with many heads.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import math
from collections.abc import Callable, Iterator, Sequence
from contextvars import ContextVar
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AbstractMesh, AxisType, Mesh, NamedSharding, PartitionSpec

from moa_jax.config import MeshConfig
from moa_jax.errors import InputError
from moa_jax.model import convert
from moa_jax.model.cache import KV, HiddenCache

MESH_AXES = ("data", "fsdp", "tensor")
DECODE_AXES = ("data", "tensor")
AxisRules = dict[str, str | tuple[str, ...] | None]
ShardingOf = Callable[[convert.Path, convert.Shape], NamedSharding]

TRAIN: AxisRules = {
    "rows": ("data", "fsdp"),  # of a batch
    "head_rows": ("data", "fsdp"),  # of a batch, as inputs of a product with the vocabulary
    "layers": None,  # scanned
    "embed": "fsdp",  # width of the residual stream
    "features": None,  # several residual streams concatenated, the input of a drafter's first layer
    "memory": "tensor",  # keys and values of one layer, joined
    "heads": "tensor",  # query heads, joined with the head size
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "table": ("fsdp", "tensor"),  # rows of the embedding: looked up per device, then summed
}

# Activations have their full width on every device: a product splits its outputs or its inputs.
DECODE: AxisRules = TRAIN | {"rows": "data", "embed": None, "features": "tensor", "table": "tensor"}


# Rules for weights that are never updated and fit every device: replicated over `fsdp`.
REPLICATED: AxisRules = TRAIN | {"embed": None, "table": "tensor"}


# Rules for a drafter of a target that is split over `tensor`: all devices split its rows.
DRAFTER_RULES: AxisRules = TRAIN | {
    "rows": MESH_AXES,
    "embed": ("fsdp", "tensor"),
    **dict.fromkeys(("memory", "heads", "kv_heads", "mlp", "vocab")),
}

_RULES: ContextVar[AxisRules] = ContextVar("rules", default=TRAIN)


@contextlib.contextmanager
def use_rules(rules: AxisRules) -> Iterator[None]:
    """Context manager that sets the rules for programs traced for a training mesh."""
    token = _RULES.set(rules)
    try:
        yield
    finally:
        _RULES.reset(token)


def traced_spec(*axes: str | None) -> PartitionSpec:
    """The mesh axes of an array that is being traced for a training mesh."""
    return spec(axes, _RULES.get())


def make_mesh(cfg: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """The training mesh of `devices`.

    Raises InputError if the sizes do not multiply to their number, and for TPUs of several slices.
    """
    slices = {getattr(each, "slice_index", None) for each in devices if each.platform == "tpu"}
    if len(slices) > 1:
        raise InputError(
            f"the devices are {len(slices)} TPU slices, and no mesh over several slices (a DCN "
            "axis) is supported; start the run on one slice"
        )
    sizes = [cfg.data, cfg.fsdp, cfg.tensor]
    given = math.prod(size for size in sizes if size > 0)
    sizes = [len(devices) // given if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        shown = ", ".join(f"{n} {s}" for n, s in zip(MESH_AXES, sizes, strict=True))
        raise InputError(
            f"the mesh ({shown}) does not use {len(devices)} devices; choose sizes whose product "
            "is that number, or -1 for one of them"
        )
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def decoding_mesh(tensor: int = 1, data: int = 1, devices: Sequence[Any] | None = None) -> Mesh:
    """The decoding mesh of the first tensor * data devices; InputError for fewer or sizes < 1."""
    if min(tensor, data) < 1:
        raise InputError(f"mesh tensor={tensor},data={data}; give sizes of at least 1")
    devices = jax.devices() if devices is None else devices
    count = data * tensor
    if count > len(devices):
        raise InputError(
            f"mesh tensor={tensor},data={data} needs {count} devices, and there "
            f"{'is one' if len(devices) == 1 else f'are {len(devices)}'}; choose a smaller mesh"
        )
    grid = np.array(devices[:count], object).reshape(data, tensor)
    if 1 < count == len(devices):
        grid = mesh_utils.create_device_mesh(grid.shape, devices, allow_split_physical_axes=True)
    return Mesh(grid, DECODE_AXES, axis_types=(AxisType.Auto,) * len(DECODE_AXES))


def spec(axes: convert.Axes, rules: AxisRules = TRAIN) -> PartitionSpec:
    """The mesh axes of an array with these logical axes; None is an axis that is never split.

    Raises KeyError for a name without a rule, ValueError if one mesh axis would split two axes.
    """
    parts = [None if name is None else rules[name] for name in axes]
    used = [axis for part in parts for axis in ((part,) if isinstance(part, str) else part or ())]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {axes} fall on {parts}: one mesh axis cannot cut twice")
    return PartitionSpec(*parts)


def of_table(table: convert.Table, mesh: Mesh, rules: AxisRules = TRAIN) -> ShardingOf:
    """A function from paths and shapes to shardings; layers may be stacked or a list.

    The returned function raises KeyError for an array that is not in the table, and InputError
    if the mesh does not divide a shape.
    """
    known: dict[convert.Path, convert.Axes] = {}
    for path, packing in table.items():
        known[path] = packing.axes
        if convert.row_of(path) is not None:
            known[convert.stacked_path(path)] = ("layers", *packing.axes)

    def sharding_of(path: convert.Path, shape: convert.Shape) -> NamedSharding:
        name = ".".join(map(str, path))
        return _checked(NamedSharding(mesh, spec(known[path], rules)), shape, name)

    return sharding_of


def tree_of(abstract: Any, sharding_of: ShardingOf) -> Any:
    """The shardings of a parameter tree, from its shapes."""

    def at(path: tuple[Any, ...], leaf: Any) -> NamedSharding:
        steps = tuple(getattr(step, "key", getattr(step, "idx", None)) for step in path)
        return sharding_of(steps, leaf.shape)

    return jax.tree_util.tree_map_with_path(at, abstract)


def rows(mesh: Mesh, rules: AxisRules = TRAIN) -> NamedSharding:
    """The sharding of arrays whose first axis is the rows of a batch."""
    return NamedSharding(mesh, spec(("rows",), rules))


def replicated(mesh: Mesh) -> NamedSharding:
    """The sharding of an array that is replicated on every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x` with its leading axes split by the rules of the mesh; unchanged if no mesh is set."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty:
        return x
    if mesh.axis_names == DECODE_AXES:
        return jax.lax.with_sharding_constraint(x, dividing(axes, x.shape, mesh))
    return jax.lax.with_sharding_constraint(x, traced_spec(*axes))


def constrain_inner(x: jax.Array, *axes: str | None) -> jax.Array:
    """`constrain` inside a layer; only on a training mesh.

    XLA would otherwise gather a layer's weights over `tensor` if the next operation splits rows.
    In decoding, the placement of the weights has the same effect.
    """
    return x if on_decode_mesh() else constrain(x, *axes)


def gathered(params: Any, table: convert.Table) -> Any:
    """Parameters gathered over `fsdp`, if a training mesh is set.

    The constraint makes XLA gather each weight as a whole, overlapped with other computation. XLA
    would otherwise pass parts of a weight around and accumulate their products in memory.
    """
    if jax.sharding.get_abstract_mesh().axis_names != MESH_AXES:
        return params

    def whole(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        axes = table[tuple(step.key for step in path)].axes
        return jax.lax.with_sharding_constraint(leaf, spec(axes, REPLICATED))

    return jax.tree_util.tree_map_with_path(whole, params)


def local_rows(sharding: NamedSharding, shape: convert.Shape) -> slice:
    """The rows of an array of this shape that the devices of this process hold together."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    held = [index[0].indices(shape[0]) for index in indices]
    return slice(min(start for start, *_ in held), max(stop for _, stop, _ in held))


def place_rows(read: Callable[[slice], Any], sharding: NamedSharding, shape: convert.Shape) -> Any:
    """A tree of arrays (rows, ...) on devices; `read` returns the rows of this process."""
    mine = local_rows(sharding, shape)

    def put(array: np.ndarray) -> jax.Array:
        def part(index: tuple[slice, ...]) -> np.ndarray:
            start, stop, _ = index[0].indices(shape[0])
            return array[(slice(start - mine.start, stop - mine.start), *index[1:])]

        return jax.make_array_from_callback((shape[0], *array.shape[1:]), sharding, part)

    return jax.tree.map(put, read(mine))


def _checked(sharding: NamedSharding, shape: convert.Shape, name: str) -> NamedSharding:
    sizes = sharding.mesh.shape
    for length, part in zip(shape, sharding.spec, strict=True):
        names = (part,) if isinstance(part, str) else part or ()
        cut = math.prod(sizes[axis] for axis in names)
        if length % cut:
            raise InputError(
                f"{name} has an axis of {length}, which mesh {' x '.join(names)} = {cut} does not "
                "divide; choose a mesh that does"
            )
    return sharding


# ---- decoding -----------------------------------------------------------------------------


class Cut(NamedTuple):
    """Shardings of a table on a decoding mesh."""

    sharding_of: ShardingOf
    copied: list[str]  # names, for messages, of arrays with an axis that the mesh does not divide


def for_decoding(table: convert.Table, mesh: Mesh) -> Cut:
    """The shardings for decoding of a table whose layers are a list."""

    def sharding_of(path: convert.Path, shape: convert.Shape) -> NamedSharding:
        return NamedSharding(mesh, dividing(table[path].axes, shape, mesh))

    wholes = {
        ".".join(str(step) for step in path if not isinstance(step, int)): None
        for path, packing in table.items()
        if dividing(packing.axes, packing.shape, mesh) != spec(packing.axes, DECODE)
    }
    return Cut(sharding_of, list(wholes))


def dividing(axes: convert.Axes, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> PartitionSpec:
    """The mesh axes of an array in decoding; an axis that the mesh does not divide is not split."""
    sizes = list(zip(spec(axes, DECODE), shape, strict=False))  # trailing axes need no name
    fits = lambda part, size: part is None or size % mesh.shape[part] == 0
    return PartitionSpec(*(part if fits(part, size) else None for part, size in sizes))


def specs_of(state: Any, mesh: Mesh | AbstractMesh) -> Any:
    """The mesh axes for decoding of arrays whose first axis, if any, is the rows of a batch.

    Key-value caches are also split by heads, and `HiddenCache` by features.
    """
    kept = {KV: ("rows", "kv_heads", None, None), HiddenCache: ("rows", None, None, "features")}
    axes = lambda part: kept.get(type(part), ("rows",))

    def place(part: Any) -> Any:
        return jax.tree.map(lambda leaf: dividing(axes(part), leaf.shape, mesh), part)

    return jax.tree.map(place, state, is_leaf=lambda part: type(part) in kept)


def of_state(state: Any, mesh: Mesh) -> Any:
    """The shardings of `state` on a decoding mesh, see `specs_of`."""
    return jax.tree.map(lambda spec: NamedSharding(mesh, spec), specs_of(state, mesh))


def init_sharded(make: Callable[[], Any], mesh: Mesh | None) -> Any:
    """The arrays that `make` returns, each part created on its own device."""
    if mesh is None:
        return make()
    return jax.jit(make, out_shardings=of_state(jax.eval_shape(make), mesh))()


def spans_processes(mesh: Mesh | None) -> bool:
    """Whether the devices of a mesh belong to several processes."""
    return mesh is not None and len({each.process_index for each in mesh.devices.flat}) > 1


def put_state(state: Any, mesh: Mesh) -> Any:
    """Places host arrays by `of_state`; every process must pass the same arrays."""

    def put(leaf: Any, where: NamedSharding) -> jax.Array:
        if isinstance(getattr(leaf, "sharding", None), NamedSharding):
            return leaf
        if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            data = put(np.asarray(jax.random.key_data(leaf)), where)
            return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
        return jax.make_array_from_callback(leaf.shape, where, np.asarray(leaf).__getitem__)

    return jax.tree.map(put, state, of_state(state, mesh))


def constrain_whole(arrays: Any) -> Any:
    """Replicates arrays on every device, if a decoding mesh is set."""
    if not on_decode_mesh():
        return arrays
    return jax.tree.map(
        lambda leaf: jax.lax.with_sharding_constraint(leaf, PartitionSpec()), arrays
    )


def constrain_state(state: Any) -> Any:
    """Splits arrays by `specs_of`, if a decoding mesh is set."""
    if not on_decode_mesh():
        return state
    specs = specs_of(state, jax.sharding.get_abstract_mesh())
    return jax.tree.map(jax.lax.with_sharding_constraint, state, specs)


@functools.cache  # one warning per batch size and mesh
def warn_replicated(rows: int, mesh: Mesh | None) -> None:
    """Warns if `data` does not divide the batch, so that each part of the mesh decodes all rows."""
    data = 1 if mesh is None else mesh.shape["data"]
    if rows % data:
        logging.getLogger(__name__).warning(
            "mesh data=%d does not divide a batch of %d, so all its parts decode the whole batch",
            *(data, rows),
        )


def mesh_of(params: Any) -> Mesh | None:
    """The decoding mesh of loaded weights; None if the weights are on a single device."""
    shardings = (getattr(leaf, "sharding", None) for leaf in jax.tree.leaves(params))
    meshes = (place.mesh for place in shardings if isinstance(place, NamedSharding))
    return next((mesh for mesh in meshes if mesh.axis_names == DECODE_AXES), None)


def name_of(mesh: Mesh) -> str:
    """The sizes of a mesh in the syntax of the flag --mesh."""
    return ",".join(f"{axis}={size}" for axis, size in reversed(mesh.shape.items()) if size > 1)


def on_decode_mesh() -> bool:
    """Whether a program is being traced for a decoding mesh."""
    return jax.sharding.get_abstract_mesh().axis_names == DECODE_AXES


def cuts_outputs() -> bool:
    """Whether the traced program runs on a mesh that splits the outputs of its products."""
    mesh = jax.sharding.get_abstract_mesh()
    return on_decode_mesh() or (mesh.shape.get("tensor", 1) > 1 and _RULES.get()["mlp"] == "tensor")


def setting(mesh: Mesh | None) -> contextlib.AbstractContextManager[Any]:
    """Context manager that traces programs for `mesh`; does nothing if `mesh` is None."""
    return contextlib.nullcontext() if mesh is None else jax.set_mesh(mesh)
