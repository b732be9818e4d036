"""The distribution of the next token by the definition of the sampling settings, in float64."""

from collections.abc import Sequence

import numpy as np

from moa_jax.config import Sampling

PLAIN = Sampling(temperature=1.0)


def probs_by_definition(
    logits_V, seen: set[int], row: Sampling, answer: Sequence[int] = (), stops: Sequence[int] = ()
) -> np.ndarray:
    """Returns the next token's probabilities in float64; `answer` has the new tokens so far."""
    logits = np.array(logits_V, np.float64)
    for *before, token in row.bad_words:
        if [*answer][max(len(answer) - len(before), 0) :] == before:
            logits[token] = -np.inf
    if len(answer) < row.min_tokens:
        logits[list(stops)] = -np.inf
    for token, bias in row.logit_bias:
        logits[token] += bias
    for token in seen:
        factor = row.repetition_penalty
        logits[token] *= factor if logits[token] < 0 else 1 / factor
    times_V = np.bincount(np.array(answer, int), minlength=len(logits))
    logits -= row.frequency_penalty * times_V + row.presence_penalty * (times_V > 0)
    order = np.argsort(-logits, kind="stable")
    if row.temperature == 0:
        return np.eye(len(logits))[order[0]]
    mass = np.exp((logits - logits.max()) / row.temperature)
    kept = order[: row.top_k] if row.top_k else order
    before = np.cumsum(mass[kept]) - mass[kept]
    if row.top_p < 1:
        kept = kept[before < row.top_p * mass[kept].sum()]
    kept = kept[mass[kept] >= row.min_p * mass.max()]
    law = np.zeros_like(mass)
    law[kept] = mass[kept] / mass[kept].sum()
    return law
