"""One optimiser update for any loss: accumulate, average, clip, step. No files, no loops.

An update with a loss or gradient that is not finite changes only the step count. The caller decides
how to proceed.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax import lax

from moa_jax.data.batch import Batch

Array = jax.Array
Params = Any
Metrics = dict[str, Array]

# (params, frozen, batch, key, progress) -> (loss, metrics). `frozen` is read-only in training, as
# the target's weights; `progress` goes from 0 to 1 over the run.
Loss = Callable[[Params, Any, Batch, Array, Array], tuple[Array, Metrics]]


class TrainState(NamedTuple):
    """The contents of a checkpoint; data order and random draws are functions of `step`."""

    step: Array  # int32 (), updates done
    params: Params  # float32 master weights
    opt_state: optax.OptState


def abstract(tree: Any, sharding: Any) -> Any:
    """A tree's shapes and dtypes with shardings: one sharding for all leaves, or a tree of them."""
    if isinstance(sharding, jax.sharding.Sharding):
        where = sharding
        sharding = jax.tree.map(lambda _: where, tree)
    place = lambda leaf, where: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=where)
    return jax.tree.map(place, tree, sharding)


def init_state(params: Params, tx: optax.GradientTransformation) -> TrainState:
    """The state before the first update."""
    return TrainState(jnp.zeros((), jnp.int32), params, tx.init(params))


def make_update(
    loss: Loss, tx: optax.GradientTransformation, seed: int, total_steps: int, accumulate: int = 1
) -> Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]:
    """Make a pure `update(state, frozen, batch) -> (state, metrics)`.

    The rows of a batch are split into `accumulate` micro-batches of neighbouring rows. Each
    micro-batch has its own random draws and its own mean over answer tokens, and the means are
    averaged, as in the authors' code. So a different `accumulate` changes more than rounding.
    Besides the loss's own metrics, `update` returns `loss`, `grad_norm` before clipping, `tokens`
    of the batch (int32, without padding) and `finite`: whether parameters and optimiser state were
    updated.
    """
    gradient = jax.value_and_grad(loss, has_aux=True)

    def update(state: TrainState, frozen: Any, batch: Batch) -> tuple[TrainState, Metrics]:
        key = jax.random.fold_in(jax.random.key(seed), state.step)
        progress = state.step / total_steps

        def micro(index: Array, part: Batch) -> tuple[tuple[Array, Metrics], Params]:
            return gradient(state.params, frozen, part, jax.random.fold_in(key, index), progress)

        (value, metrics), grads = _mean_over_parts(micro, batch, accumulate)
        norm = optax.tree.norm(grads)
        finite = jnp.isfinite(value) & jnp.isfinite(norm)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        found = (optax.apply_updates(state.params, updates), opt_state)
        # Selected on the device, without a host sync; the compiler fuses this with the update.
        kept = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), found, (state.params, state.opt_state)
        )
        tokens = jnp.sum(batch.segment_BT > 0, dtype=jnp.int32)
        metrics |= {"loss": value, "grad_norm": norm, "tokens": tokens, "finite": finite}
        return TrainState(state.step + 1, *kept), metrics

    return update


def _mean_over_parts(function: Callable[[Array, Batch], Any], batch: Batch, parts: int) -> Any:
    """The mean of `function(index, part)` over micro-batches of neighbouring rows, in sequence."""
    if parts == 1:
        return function(jnp.int32(0), batch)
    split = jax.tree.map(lambda x: x.reshape(parts, -1, *x.shape[1:]), batch)

    def add(total: Any, item: tuple[Array, Batch]) -> tuple[Any, None]:
        return jax.tree.map(jnp.add, total, function(*item)), None

    first = jax.tree.map(lambda x: x[0], split)
    shapes = jax.eval_shape(function, jnp.int32(0), first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    total, _ = lax.scan(add, zeros, (jnp.arange(parts), split))
    return jax.tree.map(lambda x: x / parts, total)
