"""A feed-forward of experts: a router chooses few of them for each token.

    gate_up (X, 2, F, D)   down (X, D, F)   router (X, D)        X experts, k of them per token

Every chosen expert computes its token, whatever else is in the batch: no expert has a capacity.
Four ways compute the same sums, and the fastest depends on the tokens and the platform:

    chosen   each pair of a token and an expert reads that expert's matrices. XLA compiles gather,
             product and sum to one kernel, so decoding reads the chosen experts and no others.
    in turn  the same in a loop over pairs, for TPUs, where a gather would copy all experts.
    every    two products with all experts, with weight 0 for those that were not chosen. Once most
             experts are chosen, this reads each matrix once, where `chosen` would repeat them.
    sorted   `ragged_dot` over pairs sorted by expert, a kernel of TPUs for which XLA transposes all
             experts, which pays in training alone. XLA compiles it to `every` with k times the rows
             on other platforms.

The sums are float32. A mesh splits F, as in a dense feed-forward: all devices hold a part of every
expert, so that they take equally long, whichever experts are chosen.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding, PartitionSpec

from moa_jax.config import ExpertsConfig
from moa_jax.model import quantize, sharding
from moa_jax.model.quantize import Matrix, Quantized
from moa_jax.runtime.devices import traced_platform

Array = jax.Array
Params = dict[str, Any]

MOST_TOKENS_OF_EVERY = 512  # on a TPU; decoding and prefill have no more
EXPERTS = "experts"  # scope of the gathers of experts in a traced program
_only_active: ContextVar[bool] = ContextVar("_only_active", default=False)


@contextlib.contextmanager
def only_active() -> Iterator[None]:
    """Context manager that traces products of chosen experts alone, to count their FLOPs."""
    token = _only_active.set(True)
    try:
        yield
    finally:
        _only_active.reset(token)


def mix(cfg: ExpertsConfig, params: Params, x_TD: Array) -> Array:
    """The weighted sum of each token's experts, (T, D)."""
    weight_Tk, id_Tk = route(cfg, params["router"], x_TD)
    gate_up, down = params["gate_up"], params["down"]
    given, is_tpu = (x_TD, weight_Tk, id_Tk, gate_up, down), traced_platform() == "tpu"
    if _only_active.get() or (is_tpu and len(x_TD) > MOST_TOKENS_OF_EVERY):
        y_TD = _on_mesh(_sorted, *given)
    elif id_Tk.size > cfg.num_experts:
        y_TD = _every(*given)
    else:
        y_TD = _on_mesh(_in_turn, *given) if is_tpu else _chosen(*given)
    return y_TD.astype(x_TD.dtype)


def route(cfg: ExpertsConfig, router_XD: Array, x_TD: Array) -> tuple[Array, Array]:
    """Weights, in float32, and ids of each token's experts, (T, k), the best expert first."""
    x_TD, router_XD = x_TD.astype(jnp.float32), router_XD.astype(jnp.float32)
    score_TX = jnp.matmul(x_TD, router_XD.T, precision=lax.Precision.HIGHEST)
    weight_Tk, id_Tk = lax.top_k(jax.nn.softmax(score_TX), cfg.num_experts_per_tok)
    if cfg.norm_topk_prob:
        weight_Tk = weight_Tk / weight_Tk.sum(-1, keepdims=True)
    return weight_Tk, id_Tk


def _swiglu(both_X2F: Array) -> Array:
    return jax.nn.silu(both_X2F[..., 0, :]) * both_X2F[..., 1, :]


def _chosen(x_TD: Array, weight_Tk: Array, id_Tk: Array, gate_up: Matrix, down: Matrix) -> Array:
    T, k = id_Tk.shape
    ids_P = id_Tk.reshape(-1)
    h_PF = _swiglu(_of_experts(jnp.repeat(x_TD, k, axis=0), gate_up, ids_P))
    y_PD = _of_experts(h_PF.astype(x_TD.dtype), down, ids_P)
    return (y_PD.reshape(T, k, -1) * weight_Tk[..., None]).sum(1)


def _in_turn(x_TD: Array, weight_Tk: Array, id_Tk: Array, gate_up: Matrix, down: Matrix) -> Array:
    (T, k), first_11 = id_Tk.shape, jnp.zeros((1, 1), jnp.int32)

    def of_pair(pair: tuple[Array, Array, Array]) -> Array:
        x_D, weight, expert = pair
        cut = lambda leaf: lax.dynamic_slice_in_dim(leaf, expert, 1)
        return _every(x_D[None], weight[None, None], first_11, *jax.tree.map(cut, (gate_up, down)))

    pairs = jnp.repeat(x_TD, k, axis=0), weight_Tk.reshape(-1), id_Tk.reshape(-1)
    return lax.map(of_pair, pairs).reshape(T, k, -1).sum(1)


def _of_experts(x_PI: Array, matrix: Matrix, ids_P: Array) -> Array:
    """The product of each row with the matrix (X, *outputs, I) of its expert, in float32.

    Written as a sum, not as a product of matrices, before which XLA would store the gathered ones.
    """
    values = matrix.values if isinstance(matrix, Quantized) else matrix
    with jax.named_scope(EXPERTS):
        chosen = values.at[ids_P].get(mode="promise_in_bounds")
    chosen = chosen.astype(jnp.float32)
    spread = x_PI.astype(jnp.float32).reshape(len(x_PI), *(1,) * (chosen.ndim - 2), -1)
    if not isinstance(matrix, Quantized):
        return (chosen * spread).sum(-1)
    scale = matrix.scale if matrix.has_groups else matrix.scale[..., None]
    sums = (chosen * spread).reshape(*chosen.shape[:-1], scale.shape[-1], -1).sum(-1)
    return (sums * scale[ids_P].astype(jnp.float32)).sum(-1)


def _every(x_TD: Array, weight_Tk: Array, id_Tk: Array, gate_up: Matrix, down: Matrix) -> Array:
    gate_up, up_scale = _values(gate_up, "gate_up", x_TD.dtype)
    down, down_scale = _values(down, "down", x_TD.dtype)
    is_chosen_TkX = id_Tk[..., None] == jnp.arange(len(down))
    weight_XT1 = jnp.where(is_chosen_TkX, weight_Tk[..., None], 0).sum(1).T[..., None]
    product = lambda given, *axes: lax.dot_general(*given, axes, preferred_element_type=jnp.float32)
    both_TX2F = product((x_TD, gate_up), ((1,), (3,)), ((), ()))
    h_TXF = _swiglu(both_TX2F if up_scale is None else both_TX2F * up_scale)
    y_XTD = product((h_TXF.astype(x_TD.dtype), down), ((2,), (2,)), ((1,), (0,)))
    y_XTD = y_XTD if down_scale is None else y_XTD * down_scale[:, None]
    return jnp.where(weight_XT1 > 0, y_XTD * weight_XT1, 0).sum(0)


def _values(matrix: Matrix, name: str, dtype: Any) -> tuple[Array, Array | None]:
    """The values of a matrix in `dtype`, and the scales by which its products are multiplied."""
    if not isinstance(matrix, Quantized):
        return matrix.astype(dtype), None
    if matrix.has_groups:  # scales within a sum
        return quantize.restored((name,), matrix).astype(dtype), None
    return matrix.values.astype(dtype), matrix.scale.astype(jnp.float32)


def _sorted(x_TD: Array, weight_Tk: Array, id_Tk: Array, gate_up: Matrix, down: Matrix) -> Array:
    gate_up, up_scale = _values(gate_up, "gate_up", x_TD.dtype)
    down, down_scale = _values(down, "down", x_TD.dtype)
    (T, k), ids_P = id_Tk.shape, id_Tk.reshape(-1)
    order_P = jnp.argsort(ids_P, stable=True)
    sizes_X, expert_P = jnp.bincount(ids_P, length=len(down)), ids_P[order_P]
    both_P2F = _ragged(x_TD[order_P // k], gate_up, sizes_X)
    both_P2F = both_P2F if up_scale is None else both_P2F * up_scale[expert_P]
    y_PD = _ragged(_swiglu(both_P2F).astype(x_TD.dtype), down, sizes_X)
    y_PD = y_PD if down_scale is None else y_PD * down_scale[expert_P]
    back_P = jnp.argsort(order_P)
    return (y_PD[back_P].reshape(T, k, -1) * weight_Tk[..., None]).sum(1)


def _ragged(x_PI: Array, matrix: Array, sizes_X: Array) -> Array:
    """The products of sorted rows with the matrices (X, *outputs, I) of their experts, float32."""
    flat = matrix.reshape(len(matrix), -1, matrix.shape[-1])
    numbers = lax.RaggedDotDimensionNumbers((((1,), (2,)), ((), ())), (0,), (0,))
    y = lax.ragged_dot_general(
        x_PI, flat, sizes_X.astype(jnp.int32), numbers, preferred_element_type=jnp.float32
    )
    return y.reshape(len(x_PI), *matrix.shape[1:-1])


def _on_mesh(
    function: Callable[..., Array],
    x_TD: Array,
    weight_Tk: Array,
    id_Tk: Array,
    gate_up: Matrix,
    down: Matrix,
) -> Array:
    """`function` of the tokens of each device, since sorting all tokens would gather them."""
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1:
        return function(x_TD, weight_Tk, id_Tk, gate_up, down)
    if sharding.on_decode_mesh():
        of = lambda array, *axes: sharding.dividing(axes, array.shape, mesh)
    else:
        of = lambda array, *axes: sharding.traced_spec(*axes)
    of_matrix = lambda name, matrix, *axes: quantize.sharding_as(
        (name,), matrix, NamedSharding(mesh, of(matrix, *axes))
    )
    place = of_matrix("down", down, None, None, "mlp")
    if isinstance(place, Quantized) and down.has_groups and place.scale.spec != place.values.spec:
        down = quantize.restored(("down",), down)  # a device would hold a part of a group
        place = place.values
    places = (of_matrix("gate_up", gate_up, None, None, "mlp", None), place)
    split, rows = place, of(x_TD, "rows")
    if rows[0] and len(x_TD) % math.prod(mesh.shape[axis] for axis in np.atleast_1d(rows[0])):
        rows = PartitionSpec()  # the token of `init`
    split = (split.values if isinstance(split, Quantized) else split).spec[2]
    places = jax.tree.map(lambda place: place.spec, places)

    def part(*given: Any) -> Array:
        y_TD = function(*given)
        return y_TD if split is None else lax.psum(y_TD, split)

    specs = (rows, rows, rows, *places)
    mapped = jax.shard_map(part, in_specs=specs, out_specs=rows, check_vma=False)
    return mapped(x_TD, weight_Tk, id_Tk, gate_up, down)
