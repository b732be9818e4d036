"""FLOPs of matrix products, counted in a traced program with all iterations of its loops.

XLA's own cost analysis counts the body of a loop once, and a training step is nested loops. A
multiplication and its addition are two operations; other operations than matrix products are not
counted.

The FLOPs of a program exceed the FLOPs that training needs: masked scores and recomputation count
in the program only.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.interpreters.partial_eval import dce_jaxpr

from moa_jax.config import ChunkConfig, DistillConfig, TargetConfig
from moa_jax.data.batch import Batch, TappedBatch
from moa_jax.model import attention, experts
from moa_jax.training.distillation import abstract_frozen, drafter_of, make_keep, make_loss
from moa_jax.training.target_cache import Parts

PARTS = re.compile(rf"{attention.INTERVALS}(\d+)")  # parts of keys, in a scope's name
Share = Callable[[int], float]


def count(function: Callable[..., Any], *arguments: Any) -> float:
    """FLOPs of one call, from the shapes of its arguments, on all devices together.

    Recomputation in the backward pass counts. A conditional counts its most expensive branch; a
    while loop counts one iteration.
    """
    return of_program(jax.make_jaxpr(function)(*arguments))


def model_flops_per_token(
    config: DistillConfig, target_cfg: TargetConfig, cached: bool = False
) -> float:
    """FLOPs that training needs per token of a row, without recomputation.

    Target forward unless `cached`, with the experts that a token uses, drafter forward and
    backward, both heads. A token has a score with itself and each token before it, as if its row
    were one conversation and no layer had a window; padding counts. Measured by tracing one short
    row without chunks, since only scores depend on a row's length.
    """
    T, short = config.data.row_length, min(config.data.row_length, attention.QUERY_CHUNK)
    plain = dataclasses.replace(config, chunks=ChunkConfig(0, 0))
    drafter = drafter_of(plain, target_cfg)
    loss = make_loss(target_cfg, drafter, jnp.dtype(plain.run.dtype))
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, frozen = jax.eval_shape(drafter.init, key), abstract_frozen(target_cfg)
    progress = jax.ShapeDtypeStruct((), jnp.float32)
    batch = abstract_batch(1, short)
    if cached:
        batch = TappedBatch(*batch, abstract_parts(plain, target_cfg, batch))
    gradient = attention.computed("einsum")(jax.grad(loss, has_aux=True))
    with experts.only_active():
        traced = jax.make_jaxpr(gradient)(params, frozen, batch, key, progress)
    seen = lambda parts: (T + 1) / 2 / (parts * short)
    return of_program(traced, seen) / short


def abstract_parts(
    config: DistillConfig, target_cfg: TargetConfig, batch: Batch, stored: Any = None
) -> Parts:
    """The shapes of what a target cache holds of these rows for the drafter of `config`."""
    dtype = jnp.dtype(config.run.dtype)
    keep = make_keep(target_cfg, drafter_of(config, target_cfg).taps, dtype, stored)
    keep = attention.computed("einsum")(keep)  # one row is not sharded over devices
    return jax.eval_shape(keep, abstract_frozen(target_cfg), batch)


def abstract_batch(rows: int, length: int) -> Batch:
    """The shapes of a training batch."""
    kinds = (jnp.int32, jnp.int32, jnp.int32, jnp.bool_)
    return Batch(*(jax.ShapeDtypeStruct((rows, length), kind) for kind in kinds))


def of_program(traced: jax.core.ClosedJaxpr, share: Share | None = None) -> float:
    """FLOPs of a traced program, without dead code.

    With `share`, attention scores over keys of n parts are weighted by `share(n)`.
    """
    found, _ = dce_jaxpr(traced.jaxpr, [True] * len(traced.jaxpr.outvars))
    return _of(found, share)


def _of(jaxpr: Any, share: Share | None) -> float:
    return sum(_of_equation(equation, share) for equation in jaxpr.eqns)


def _of_equation(equation: Any, share: Share | None) -> float:
    name, params = equation.primitive.name, equation.params
    if share and (scores := PARTS.search(str(equation.source_info.name_stack))):
        return share(int(scores[1])) * _of_equation(equation, None)
    if name == "dot_general":
        (contracted, _), _ = params["dimension_numbers"]
        shape = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * math.prod(shape[axis] for axis in contracted)
    if name == "ragged_dot_general":  # a row meets the matrix of one group
        *_, summed = equation.invars[0].aval.shape
        return 2 * equation.outvars[0].aval.size * summed
    if name == "pallas_call":  # its program is one of many blocks
        return params["cost_estimate"].flops
    inner = [_of(jaxpr, share) for jaxpr in programs_in(params)]
    if name == "cond":
        return max(inner)
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":  # its program is that of a single device
        return params["mesh"].size * sum(inner)
    return sum(inner)


def programs_in(params: dict[str, Any]) -> Iterator[Any]:
    """Yield the jaxprs among an equation's parameters, closed or open."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(each, "eqns"):
                yield each
