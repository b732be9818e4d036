"""Mapping between Hugging Face tensor names and shapes and our configs and parameter trees.

A `Table` maps each array of a parameter tree to the stored tensors that the array is packed from.
Stored names appear in tables only: loading, saving, and the checks for missing or misshapen tensors
all iterate over a table. This module reads and writes no files.

    stored (out, in)                           ours (in, out), parts joined on axis -2
    q_proj (K*G*E, D)   turn, split      -->   +---------------------+-----+-----+
    k_proj (K*E, D)                            | G query heads       | key |value|  x E
    v_proj (K*E, D)                            +---------------------+-----+-----+
                                               one such row per key-value head, K in all
"""

from __future__ import annotations

import functools
import itertools
import math
import operator
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from moa_jax.config import BlockConfig, ExpertsConfig, TargetConfig

Shape = tuple[int, ...]
Path = tuple[str | int, ...]


Axes = tuple[str | None, ...]  # logical names of an array's axes, see moa_jax/model/sharding.py


class Packing(NamedTuple):
    """An array of our parameter tree as a list of parts, one stored tensor per part."""

    axes: Axes
    names: tuple[str, ...]
    stored: tuple[Shape, ...]  # shapes of the tensors in the file
    parts: tuple[Shape, ...]  # shapes of the parts in the tree, joined along axis -2
    turned: bool = True  # matrices are (out, in) in the file, (in, out) in the tree
    into: Shape | None = None  # the shape of the array, if not that of the joined parts

    @property
    def turns(self) -> bool:
        """Whether the last axis of a stored tensor is the first axis of the packed array."""
        return self.turned and len(self.stored[0]) == 2

    @property
    def shape(self) -> Shape:
        """Shape of the packed array."""
        return self.into or self.joined

    @property
    def joined(self) -> Shape:
        """Shape of the joined parts."""
        first = self.parts[0]
        if len(self.parts) == 1:
            return first
        return (*first[:-2], sum(part[-2] for part in self.parts), first[-1])

    def scales(self, names: tuple[str, ...], groups: int) -> Packing:
        """The scales of a matrix: `groups` elements, one per group of inputs, replace the inputs.

        `names` are the stored scales, (out, groups) each.
        """
        of = lambda part: (groups, *part[1:]) if self.turns else (*part[:-1], groups)
        stored, into = [(shape[0], groups) for shape in self.stored], self.into and of(self.into)
        return self._replace(
            names=names, stored=tuple(stored), parts=tuple(map(of, self.parts)), into=into
        )


Table = dict[Path, Packing]


def kernel(axes: Axes, names: tuple[str, ...], inputs: int, *outputs: Shape) -> Packing:
    """Linear weights that share an input; `outputs` are the output axes per weight."""
    stored = tuple((int(np.prod(out)), inputs) for out in outputs)
    return Packing(axes, names, stored, tuple((inputs, *out) for out in outputs))


def vector(axes: Axes, names: tuple[str, ...], *parts: Shape) -> Packing:
    """Biases or norm scales, stored flat."""
    return Packing(axes, names, tuple((int(np.prod(part)),) for part in parts), parts)


def embedding(name: str, rows: int, width: int) -> Packing:
    """A table of vectors, which has the same layout in the file."""
    shape = (rows, width)
    return Packing(("table", None), (name,), (shape,), (shape,), turned=False)


class RowRun(NamedTuple):
    """Rows of a stored tensor that stay contiguous in the packed array."""

    first: int
    rows: int
    place: int  # index of the first row among all outputs of the packed array


def runs(packing: Packing) -> Iterator[tuple[int, RowRun]]:
    """Yields all rows of all stored tensors as runs, each with the index of its tensor.

    A row (in,) is one output of the packed array (in, *outputs). If `turns` is false, as for
    biases, norm scales and embeddings, a row holds a single element.
    """
    outputs = [part[1:] if packing.turns else part for part in packing.parts]
    if len(outputs) == 1:
        yield 0, RowRun(0, math.prod(outputs[0]), 0)
        return
    sizes = [part[-2] * part[-1] for part in outputs]
    for i, (size, part) in enumerate(zip(sizes, outputs, strict=True)):
        for row in range(math.prod(part[:-2])):
            yield i, RowRun(row * size, size, row * sum(sizes) + sum(sizes[:i]))


def pack(packing: Packing, tensors: Sequence[np.ndarray], dtype: Any) -> np.ndarray:
    """Pack stored tensors into a new array of `packing.shape`."""
    packed = np.empty(packing.shape, dtype)
    first = packing.shape[0] if packing.turns else 1
    for i, run in runs(packing):
        rows = tensors[i].reshape(-1, first)[run.first :][: run.rows]
        packed.reshape(first, -1)[:, run.place :][:, : run.rows] = rows.T
    return packed


def unpack(packing: Packing, packed: np.ndarray) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the name and the contiguous value of each stored tensor; the inverse of `pack`."""
    for name, stored, place in zip(packing.names, packing.stored, _places(packing), strict=True):
        part = packed.reshape(packing.joined)[place]
        tensor = part.reshape(stored[::-1]).T if packing.turned else part
        yield name, np.ascontiguousarray(tensor)


def _places(packing: Packing) -> list[Any]:
    """Index of each part in the packed array."""
    if len(packing.parts) == 1:
        return [...]
    rows = [part[-2] for part in packing.parts]
    ends = itertools.accumulate(rows)
    return [(..., slice(end - n, end), slice(None)) for n, end in zip(rows, ends, strict=True)]


def norm_table(width: int, prefix: str) -> Table:
    """The two norms of a block."""
    return {
        ("input_norm", "scale"): vector((None,), (f"{prefix}input_layernorm.weight",), (width,)),
        ("post_attention_norm", "scale"): vector(
            (None,), (f"{prefix}post_attention_layernorm.weight",), (width,)
        ),
    }


def mlp_table(width: int, intermediate: int, bias: bool, prefix: str) -> Table:
    """The SwiGLU of a block: gate and up packed, then down."""
    gate_up = (f"{prefix}mlp.gate_proj", f"{prefix}mlp.up_proj")
    down = (f"{prefix}mlp.down_proj",)
    each = (1, intermediate)
    table = {
        ("mlp", "gate_up", "kernel"): kernel(
            ("embed", None, "mlp"), _weights(gate_up), width, each, each
        ),
        ("mlp", "down", "kernel"): kernel(("mlp", "embed"), _weights(down), intermediate, (width,)),
    }
    if bias:
        table["mlp", "gate_up", "bias"] = vector((None, "mlp"), _biases(gate_up), each, each)
        table["mlp", "down", "bias"] = vector((None,), _biases(down), (width,))
    return table


def experts_table(cfg: ExpertsConfig, width: int, prefix: str) -> Table:
    """The experts of a block, one tensor per expert in files, and their router.

    They keep the layout of their files, one row per output: few rows are multiplied by sums.
    """
    X, F = cfg.num_experts, cfg.moe_intermediate_size
    of = lambda *parts: tuple(
        f"{prefix}mlp.experts.{expert}.{part}_proj.weight" for expert in range(X) for part in parts
    )
    gate_up, down, router = ((F, width),) * 2 * X, ((width, F),) * X, ((X, width),)
    wide: Axes = (None, None, "mlp", "embed")
    return {
        ("mlp", "router"): Packing(
            (None, "embed"), (f"{prefix}mlp.gate.weight",), router, router, turned=False
        ),
        ("mlp", "gate_up"): Packing(
            wide, of("gate", "up"), gate_up, gate_up, turned=False, into=(X, 2, F, width)
        ),
        ("mlp", "down"): Packing(
            (None, "embed", "mlp"), of("down"), down, down, turned=False, into=(X, width, F)
        ),
    }


def attention_table(cfg: BlockConfig, prefix: str, inputs: int | None = None) -> Table:
    """Self-attention of a block: queries, keys and values packed, then the output.

    `inputs` is the width of the projection's input, by default the block's hidden size.
    """
    qkv = tuple(f"{prefix}self_attn.{letter}_proj" for letter in "qkv")
    out = (f"{prefix}self_attn.o_proj",)
    kv_heads, size, width = cfg.num_kv_heads, cfg.head_dim, cfg.hidden_size
    outputs = ((kv_heads, cfg.group_size, size), (kv_heads, 1, size), (kv_heads, 1, size))
    heads: Axes = ("kv_heads", None, None)
    table = {
        ("attention", "qkv", "kernel"): kernel(
            ("embed", *heads), _weights(qkv), inputs or width, *outputs
        ),
        ("attention", "out", "kernel"): kernel(
            ("heads", "embed"), _weights(out), cfg.num_heads * size, (width,)
        ),
    }
    if cfg.qkv_bias:
        table["attention", "qkv", "bias"] = vector(heads, _biases(qkv), *outputs)
    if cfg.out_bias:
        table["attention", "out", "bias"] = vector((None,), _biases(out), (width,))
    return table | qk_norm_table(cfg, prefix)


def qk_norm_table(cfg: BlockConfig, prefix: str) -> Table:
    """The norms of queries and keys, if a block has them."""
    return {
        ("attention", f"{letter}_norm", "scale"): vector(
            (None,), (f"{prefix}self_attn.{letter}_norm.weight",), (cfg.head_dim,)
        )
        for letter in ("qk" if cfg.qk_norm else "")
    }


def block_table(cfg: BlockConfig, prefix: str) -> Table:
    """A decoder layer whose stored names start with `prefix`."""
    if cfg.experts:
        mlp = experts_table(cfg.experts, cfg.hidden_size, prefix)
    else:
        mlp = mlp_table(cfg.hidden_size, cfg.intermediate_size, cfg.mlp_bias, prefix)
    table = {**norm_table(cfg.hidden_size, prefix), **attention_table(cfg, prefix), **mlp}
    for place in ("pre", "post") if cfg.gemma_norms else ():
        name = f"{prefix}{place}_feedforward_layernorm.weight"
        table[f"{place}_feedforward_norm", "scale"] = vector((None,), (name,), (cfg.hidden_size,))
    return table


def under(path: Path, table: Table) -> Table:
    """`table` with `path` prepended to every path of the parameter tree."""
    return {path + leaf: packing for leaf, packing in table.items()}


def target_table(cfg: TargetConfig) -> Table:
    """A whole target with separate arrays per layer: paths are ("layers", i, ...)."""
    width = cfg.block.hidden_size
    table = {("embed",): embedding("model.embed_tokens.weight", cfg.vocab_size, width)}
    for i in range(cfg.num_layers):
        table |= under(("layers", i), block_table(cfg.block, f"model.layers.{i}."))
    table["final_norm", "scale"] = vector((None,), ("model.norm.weight",), (width,))
    if not cfg.tie_word_embeddings:
        table["lm_head",] = kernel(
            ("embed", "vocab"), ("lm_head.weight",), width, (cfg.vocab_size,)
        )
    return table


def stored_shapes(table: Table) -> dict[str, Shape]:
    """Names and shapes of all tensors in a file of this table."""
    return {
        name: shape
        for packing in table.values()
        for name, shape in zip(packing.names, packing.stored, strict=True)
    }


def nest(leaves: dict[Path, Any]) -> Any:
    """Build a parameter tree from path-keyed leaves; consecutive integer keys become a list."""
    if () in leaves:
        return leaves[()]
    rooms: dict[str | int, dict[Path, Any]] = {}
    for (head, *rest), leaf in leaves.items():
        rooms.setdefault(head, {})[tuple(rest)] = leaf
    tree = {head: nest(inside) for head, inside in rooms.items()}
    return list(tree.values()) if all(isinstance(head, int) for head in tree) else tree


def row_of(path: Path) -> int | None:
    """The layer index in a path, or None."""
    return next((step for step in path if isinstance(step, int)), None)


def stacked_path(path: Path) -> Path:
    """The path of the same array in a tree whose layers are stacked on a leading axis."""
    return tuple(step for step in path if not isinstance(step, int))


def leaf_at(params: Any, path: Path) -> Any:
    """The array at a path of a table; layers may be a list or stacked on a leading axis."""
    if not isinstance(params.get("layers"), dict):
        return functools.reduce(operator.getitem, path, params)
    stack = functools.reduce(operator.getitem, stacked_path(path), params)
    return stack if row_of(path) is None else stack[row_of(path)]


def _weights(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}.weight" for module in modules)


def _biases(modules: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(f"{module}.bias" for module in modules)
