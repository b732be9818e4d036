"""Which part of each array a device holds: logical names of axes, and rules for them.

    mesh    data     rows of a batch; weights are copied
            fsdp     rows of a batch; weights are split, and gathered layer by layer when used
            tensor   heads, feed-forwards and vocabulary of every layer

    (D, K, G+2, E)  "embed", "kv_heads", None, None  --TRAIN-->  P("fsdp", "tensor", None, None)

The tables of `convert.py` hold the names beside the shapes. An unknown name is an error, and so
are two axes of one array on the same mesh axis: else weights would silently be copied.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from moa_jax.config import MeshConfig
from moa_jax.errors import InputError
from moa_jax.model import convert

MESH_AXES = ("data", "fsdp", "tensor")
Rules = dict[str, str | tuple[str, ...] | None]
ShardingOf = Callable[[convert.Path, convert.Shape], NamedSharding]

TRAIN: Rules = {
    "rows": ("data", "fsdp"),  # of a batch
    "layers": None,  # scanned
    "embed": "fsdp",  # width of the residual stream
    "memory": "tensor",  # keys and values of one layer, joined
    "heads": "tensor",  # query heads, joined with their size
    "kv_heads": "tensor",
    "mlp": "tensor",
    "vocab": "tensor",
    "table": ("fsdp", "tensor"),  # rows of the embedding: looked up where they are, then summed
}


# The same for weights that are never updated and fit every device: `fsdp` copies them.
COPIED: Rules = TRAIN | {"embed": None, "table": "tensor"}


def make_mesh(cfg: MeshConfig, devices: Sequence[Any]) -> Mesh:
    """The mesh of `devices`; InputError where its sizes do not multiply to their number."""
    sizes = [cfg.data, cfg.fsdp, cfg.tensor]
    given = math.prod(size for size in sizes if size > 0)
    sizes = [len(devices) // given if size == -1 else size for size in sizes]
    if math.prod(sizes) != len(devices):
        shown = ", ".join(f"{n} {s}" for n, s in zip(MESH_AXES, sizes, strict=True))
        raise InputError(
            f"the mesh ({shown}) does not use {len(devices)} devices: choose sizes whose product "
            "is that number, or -1 for one of them"
        )
    grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
    return Mesh(grid, MESH_AXES, axis_types=(AxisType.Auto,) * len(MESH_AXES))


def spec(axes: convert.Axes, rules: Rules = TRAIN) -> PartitionSpec:
    """The mesh axes of an array with these logical axes; None is an axis that is never split.

    Raises KeyError for a name without a rule, ValueError where one mesh axis would split two.
    """
    parts = [None if name is None else rules[name] for name in axes]
    used = [axis for part in parts for axis in ((part,) if isinstance(part, str) else part or ())]
    if len(used) != len(set(used)):
        raise ValueError(f"axes {axes} fall on {parts}: one mesh axis cannot cut twice")
    return PartitionSpec(*parts)


def of_table(table: convert.Table, mesh: Mesh, rules: Rules = TRAIN) -> ShardingOf:
    """The sharding of every array of a table, layers stacked or one by one.

    The function raises KeyError for an array that the table does not know, and InputError
    where the mesh does not divide a shape.
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


def rows(mesh: Mesh, rules: Rules = TRAIN) -> NamedSharding:
    """The sharding of arrays that start with the rows of a batch."""
    return NamedSharding(mesh, spec(("rows",), rules))


def replicated(mesh: Mesh) -> NamedSharding:
    """The same whole array on every device."""
    return NamedSharding(mesh, PartitionSpec())


def constrain(x: jax.Array, *axes: str | None) -> jax.Array:
    """`x` with its leading axes split as the training rules say; unchanged where no mesh is set."""
    if jax.sharding.get_abstract_mesh().empty:
        return x
    return jax.lax.with_sharding_constraint(x, spec(axes, TRAIN))


def local_rows(sharding: NamedSharding, shape: convert.Shape) -> slice:
    """The rows of an array of this shape that the devices of this process hold together."""
    indices = sharding.addressable_devices_indices_map(shape).values()
    held = [index[0].indices(shape[0]) for index in indices]
    return slice(min(start for start, *_ in held), max(stop for _, stop, _ in held))


def place_rows(read: Callable[[slice], Any], sharding: NamedSharding, shape: convert.Shape) -> Any:
    """A tree of arrays (rows, ...) on devices; `read` gives the rows of this process."""
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
                "divide: choose a mesh that does"
            )
    return sharding
