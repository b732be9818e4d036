"""Compares tokens that a drafter generates without a link with the target's own answer.

    prompt | the target's answer, `after` tokens | link cut | the drafter alone (policy keep)

Two measures of the drafter's part: agreement is the share of its tokens that equal the token at the
same position of the target's own answer. Quality is the target's mean log-likelihood of its tokens,
compared with that of the target's own continuation; quality does not penalise a paraphrase.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from infer.bench.fidelity import logits_of
from moa_jax.pretrained import Target

KEYS = ("tokens", "agreement", "first_disagreement", "chosen_by_target", "log_likelihood")
KEYS += ("own_log_likelihood",)


class Judgement(NamedTuple):
    """The target's evaluation of tokens that follow a sequence."""

    log_likelihood: float  # mean per token, in nats
    chosen: float  # share of tokens that are the target's argmax, given the tokens before


def judge(loaded: Target, text: Sequence[int], tokens: Sequence[int]) -> Judgement:
    """Evaluates `tokens` after the sequence `text` with the target; neither may be empty."""
    logits_TV = logits_of(loaded, [*text, *tokens])[len(text) - 1 :][: len(tokens)]
    log_p_T = np.asarray(jax.nn.log_softmax(logits_TV))[np.arange(len(tokens)), tokens]
    chosen_T = np.asarray(logits_TV.argmax(axis=1)) == np.array(tokens)
    return Judgement(float(log_p_T.mean()), float(chosen_T.mean()))


def compare(
    loaded: Target, prompt: Sequence[int], own: Sequence[int], found: Sequence[int], after: int
) -> dict[str, Any]:
    """Compares one answer with the target's own; its first `after` tokens precede the cut."""
    ours, theirs = found[after:], own[after : len(found)]
    same = [a == b for a, b in zip(ours, theirs, strict=True)]
    if not same:
        return {"tokens": 0}
    text = [*prompt, *own[:after]]
    likelihood, chosen = judge(loaded, text, ours)
    first = same.index(False) if False in same else len(same)
    own_likelihood = judge(loaded, text, theirs).log_likelihood
    values = (len(ours), sum(same) / len(same), first, chosen, likelihood, own_likelihood)
    return dict(zip(KEYS, values, strict=True))


def compare_all(
    loaded: Target,
    prompts: Sequence[list[int]],
    own: Sequence[list[int]],
    found: Sequence[list[int]],
    after: int,
) -> dict[str, Any]:
    """Means over the answers that have tokens generated without a link."""
    triples = zip(prompts, own, found, strict=True)
    each = [compare(loaded, prompt, theirs, ours, after) for prompt, theirs, ours in triples]
    written = [one for one in each if one["tokens"]]
    mean = lambda key: float(np.mean([one[key] for one in written])) if written else None
    return {"answers": len(written)} | {key: mean(key) for key in KEYS}
