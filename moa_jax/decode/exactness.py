"""The first token in which drafted and plain decoding differ, and the target's margin there.

In float32 both must give the same tokens. In bfloat16 a pass over several tokens rounds differently
from a pass over one token, so either of two almost tied tokens may win.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import Sampling
from moa_jax.decode import sampling as sampling_lib
from moa_jax.decode.programs import bucket
from moa_jax.decode.sampling import make_batch_sampling
from moa_jax.decode.session import GREEDY
from moa_jax.model import llama, masks, sharding
from moa_jax.pretrained import Target
from moa_jax.runtime.precision import matmul_precision


class Difference(NamedTuple):
    """The first token in which two answers differ."""

    index: int  # index among the generated tokens
    plain: int | None  # None if the answer has ended
    drafted: int | None
    # Score of plain decoding's token minus that of the drafted token, in logits. Scores of sampled
    # answers include the noise, because the largest sum is chosen. None if an answer has ended or
    # a score is not finite, as for a token of probability 0, because JSON has no infinity.
    margin: float | None

    def __str__(self) -> str:
        if None in (self.plain, self.drafted):
            tie = "one answer ended sooner"
        elif self.margin is None:
            tie = "the target prefers one of them by no finite margin"
        else:
            tie = f"the target prefers plain's by {self.margin:.3g}"
        return f"token {self.index} is {self.drafted}, plain {self.plain}; {tie}"


def compare(
    loaded: Target,
    prompt: Sequence[int],
    plain: Sequence[int],
    drafted: Sequence[int],
    sampling: Sampling = GREEDY,
) -> Difference | None:
    """Returns the first difference of two answers to a prompt, or None if they are the same."""
    pairs = enumerate(zip(plain, drafted, strict=False))
    index = next((i for i, (a, b) in pairs if a != b), min(len(plain), len(drafted)))
    if index == len(plain) == len(drafted):
        return None
    at = lambda tokens: tokens[index] if index < len(tokens) else None
    one, two = at(plain), at(drafted)
    margin = None
    if None not in (one, two):
        scores_V = scores_after(loaded, prompt, plain[:index], sampling)
        if np.isfinite(scores_V[[one, two]]).all():
            margin = float(scores_V[one] - scores_V[two])
    return Difference(index, one, two, margin)


def scores_after(
    loaded: Target, prompt: Sequence[int], answer: Sequence[int], sampling: Sampling
) -> np.ndarray:
    """Returns the target's scores (V,) after an answer: logits, or log-probabilities plus noise."""
    tokens = [*prompt, *answer]
    padded_1T = np.zeros((1, bucket(len(tokens))), np.int32)
    padded_1T[0, : len(tokens)] = tokens
    batch_sampling = make_batch_sampling([sampling], loaded.config.vocab_size)
    mesh = sharding.mesh_of(loaded.params)
    with matmul_precision(loaded.params["embed"].dtype), sharding.setting(mesh):
        lengths = np.int32(len(prompt)), np.int32(len(tokens))
        found = _scores(loaded.config, loaded.params, padded_1T, *lengths, batch_sampling)
    return np.asarray(found)


@functools.partial(jax.jit, static_argnums=0)
def _scores(cfg, params, tokens_1T, prompt_length, length, batch_sampling) -> jax.Array:
    T = tokens_1T.shape[1]
    context = llama.Context(jnp.arange(T)[None], masks.causal_tree(T))
    found = llama.forward(cfg, params, tokens_1T, context)
    last_11D = jax.lax.dynamic_slice_in_dim(found.hidden_BTD, length - 1, 1, axis=1)
    logits_11V = llama.unembed(params, last_11D)
    token_counts = sampling_lib.counts_in(
        batch_sampling, tokens_1T, prompt_length[None], cfg.vocab_size, length[None]
    )
    scores_V = sampling_lib.perturbed_logits(
        batch_sampling, logits_11V, token_counts.each(), length[None, None]
    )[0, 0]
    return sharding.constrain_whole(scores_V)  # each process reads the scores
