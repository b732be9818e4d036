"""Floating-point operations of matrix products, counted in a traced program with loops in full.

XLA's own cost analysis counts the body of a loop once, and a training step is loops of loops.
A multiplication and its addition are two operations; what is not a matrix product is not counted.

What a program computes is one number and what training needs another: masked scores count in the
first alone, and so does what is computed twice.
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
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.model import attention
from moa_jax.training.distillation import abstract_frozen, make_keep, make_loss

PARTS = re.compile(rf"{attention.INTERVALS}(\d+)")  # of the keys that scores are made with
Share = Callable[[int], float]


def count(function: Callable[..., Any], *arguments: Any) -> float:
    """FLOPs of one call, from the shapes of its arguments, on all devices together.

    What the backward pass computes again counts again. Of branches the dearest counts, a loop
    that only ends by a condition counts once.
    """
    return of_program(jax.make_jaxpr(function)(*arguments))


def model_flops_per_token(
    config: DistillConfig, target_cfg: TargetConfig, cached: bool = False
) -> float:
    """FLOPs that training needs for one token of a row when nothing is computed twice.

    Target forward unless it is `cached`, drafter forward and backward, both heads. A token has a
    score with itself and each before it, as if its row were one conversation; padding counts.
    Measured by tracing one row, chunks off: a short one, as only scores depend on its length.
    """
    T, short = config.data.row_length, min(config.data.row_length, attention.QUERY_CHUNK)
    plain = dataclasses.replace(config, chunks=ChunkConfig(0, 0))
    drafter = DRAFTERS[method_of(plain.drafter)].make(plain.drafter, target_cfg, plain)
    loss = make_loss(target_cfg, drafter, jnp.dtype(plain.run.dtype))
    key = jax.eval_shape(lambda: jax.random.key(0))
    params, frozen = jax.eval_shape(drafter.init, key), abstract_frozen(target_cfg)
    progress = jax.ShapeDtypeStruct((), jnp.float32)
    batch = abstract_batch(1, short)
    if cached:
        keep = make_keep(target_cfg, drafter.taps, jnp.dtype(plain.run.dtype))
        keep = attention.computed("einsum")(keep)  # one row is not cut over devices
        batch = TappedBatch(*batch, jax.eval_shape(keep, frozen, batch))
    gradient = attention.computed("einsum")(jax.grad(loss, has_aux=True))
    traced = jax.make_jaxpr(gradient)(params, frozen, batch, key, progress)
    seen = lambda parts: (T + 1) / 2 / (parts * short)
    return of_program(traced, seen) / short


def abstract_batch(rows: int, length: int) -> Batch:
    """The shapes of a training batch."""
    kinds = (jnp.int32, jnp.int32, jnp.int32, jnp.bool_)
    return Batch(*(jax.ShapeDtypeStruct((rows, length), kind) for kind in kinds))


def of_program(traced: jax.core.ClosedJaxpr, share: Share | None = None) -> float:
    """The same of a traced program, without what compilers leave out since nothing needs it.

    Of scores with keys of so many parts a `share` counts, all without one.
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
    if name == "pallas_call":  # its program is that of one of many blocks
        return params["cost_estimate"].flops
    inner = [_of(jaxpr, share) for jaxpr in programs_in(params)]
    if name == "cond":
        return max(inner)
    if name == "scan":
        return params["length"] * sum(inner)
    if name == "shard_map":  # its program is that of one device
        return params["mesh"].size * sum(inner)
    return sum(inner)


def programs_in(params: dict[str, Any]) -> Iterator[Any]:
    """The programs among an equation's parameters, closed or open."""
    for value in params.values():
        for each in value if isinstance(value, tuple | list) else (value,):
            if hasattr(each, "eqns"):
                yield each
