"""What a drafter writes after its link died, beside what the target would have written.

    prompt | the target's answer, `after` tokens | link cut | the drafter alone (policy keep)

The part that was written alone is measured in two ways. Agreement is the share of its tokens that
stand at the same place in the target's own answer, with the place of the first that does not.
Quality is the target's mean log-likelihood of its tokens, beside that of the target's own
continuation; it is kinder to a text that says the same in other words.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from infer.split.client.answering import SplitClient
from infer.split.network.proxy import Proxy
from moa_jax.config import Sampling
from moa_jax.decode.programs import bucket
from moa_jax.model import llama, masks
from moa_jax.pretrained import Target
from moa_jax.runtime.precision import matmul_precision


class Judgement(NamedTuple):
    """How likely the target finds tokens that follow a text."""

    log_likelihood: float  # a token's, on average
    chosen: float  # share of them that it would have chosen itself, given those before


def judge(loaded: Target, text: Sequence[int], tokens: Sequence[int]) -> Judgement:
    """The target's judgement of `tokens` after `text`; neither may be empty."""
    whole = [*text, *tokens]
    padded_1T = np.zeros((1, bucket(len(whole))), np.int32)
    padded_1T[0, : len(whole)] = whole
    with matmul_precision(loaded.params["embed"].dtype):
        log_p_T, best_T = _view(loaded.config, loaded.params, padded_1T)
    own = slice(len(text) - 1, len(whole) - 1)
    chosen = np.asarray(best_T)[own] == np.array(tokens)
    return Judgement(float(np.asarray(log_p_T)[own].mean()), float(chosen.mean()))


@functools.partial(jax.jit, static_argnums=0)
def _view(cfg: Any, params: Any, tokens_1T: jax.Array) -> tuple[jax.Array, jax.Array]:
    """For each token (T,): the log-probability of the next one, and the likeliest next one."""
    T = tokens_1T.shape[1]
    context = llama.Context(jnp.arange(T)[None], masks.line(T))
    found = llama.forward(cfg, params, tokens_1T, context)
    log_p_TV = jax.nn.log_softmax(llama.unembed(params, found.hidden_BTD)[0])
    next_T1 = jnp.roll(tokens_1T[0], -1)[:, None]
    return jnp.take_along_axis(log_p_TV, next_T1, axis=1)[:, 0], jnp.argmax(log_p_TV, axis=1)


async def cut_after(
    answering: SplitClient, proxy: Proxy, prompt: Sequence[int], after: int, total: int
) -> list[int]:
    """The answer of a client that asks token by token until its link is cut for good."""
    is_cut = False
    try:
        async for event in answering.answer(prompt, total, [], Sampling()):
            if not is_cut and event.verified >= after:
                proxy.refuse()
                is_cut = True
    finally:
        proxy.heal()
    return answering.text.answer


def compare(
    loaded: Target, prompt: Sequence[int], own: Sequence[int], found: Sequence[int], after: int
) -> dict[str, Any]:
    """One answer beside the target's own; its first `after` tokens came before the cut."""
    ours, theirs = found[after:], own[after : len(found)]
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    if not same:
        return {"tokens": 0}
    text = [*prompt, *own[:after]]
    return {
        "tokens": len(ours),
        "agreement": sum(same) / len(same),
        "first_disagreement": same.index(False) if False in same else len(same),
        "log_likelihood": judge(loaded, text, ours).log_likelihood,
        "own_log_likelihood": judge(loaded, text, theirs).log_likelihood,
    }
