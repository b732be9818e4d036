"""What quantised weights cost: how far the target's laws of the next token move.

    KL(stored || quantised)    in nats a token, of the laws at temperature 1
    agreement                  share of tokens for which both have the same likeliest token

Both targets read the same text, so an early difference is not counted again in what follows it.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import TargetConfig
from moa_jax.decode.programs import bucket
from moa_jax.model import llama, masks, sharding
from moa_jax.model.precision import matmul_precision
from moa_jax.pretrained import Target

Array = jax.Array


class Fidelity(NamedTuple):
    """How near a quantised target is to its stored weights, over all tokens that count."""

    tokens: int
    mean_kl: float  # nats
    worst_kl: float
    agreement: float  # 0 to 1


def fidelity(
    stored: Target, quantised: Target, texts: Iterable[tuple[Sequence[int], Sequence[bool]]]
) -> Fidelity:
    """Compares two targets on texts: token ids, and which of them count as predicted.

    Both lie on one device, or on the same mesh. At least one must count, and the first of a text,
    which has nothing before it, does not.
    """
    kls: list[np.ndarray] = []
    same: list[np.ndarray] = []
    for tokens, counts in texts:
        padded_1T = np.zeros((1, bucket(len(tokens))), np.int32)
        padded_1T[0, : len(tokens)] = tokens
        mesh = sharding.setting(sharding.mesh_of(stored.params))
        with matmul_precision(stored.params["embed"].dtype), mesh:
            found = _compare(stored.config, stored.params, quantised.params, padded_1T)
        kept = np.flatnonzero(counts[1:])  # what is predicted stands one place later
        for parts, found_T in zip((kls, same), found, strict=True):
            parts.append(np.asarray(found_T)[kept])
    kl_X, same_X = np.concatenate(kls), np.concatenate(same)
    return Fidelity(len(kl_X), float(kl_X.mean()), float(kl_X.max()), float(same_X.mean()))


@functools.partial(jax.jit, static_argnums=0)
def _compare(
    cfg: TargetConfig, stored: Any, quantised: Any, tokens_1T: Array
) -> tuple[Array, Array]:
    """Of each place, the divergence and whether the likeliest token is the same, (T,) each."""
    T = tokens_1T.shape[1]
    context = llama.Context(jnp.arange(T)[None], masks.line(T))

    def log_law(params: Any) -> Array:
        hidden_1TD = llama.forward(cfg, params, tokens_1T, context).hidden_BTD
        return jax.nn.log_softmax(llama.unembed(params, hidden_1TD)[0], axis=-1)

    one_TV, two_TV = log_law(stored), log_law(quantised)
    kl_T = jnp.sum(jnp.exp(one_TV) * (one_TV - two_TV), axis=-1)
    return kl_T, jnp.argmax(one_TV, axis=-1) == jnp.argmax(two_TV, axis=-1)
