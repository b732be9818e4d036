"""Training in which reused layers attend as in decoding, against the reference's rule."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.data.batch import Batch
from moa_jax.drafters.moa import Moa, train
from moa_jax.model.llama import unembed
from tests.compare import ARRAYS, assert_close
from tests.drafters.test_moa import MoaPair, open_pair

LENGTH, ROW = 20, 24  # tokens of a conversation, and of its row
PROMPT, LONGEST = 5, 3  # tokens of a prompt, and of the longest run of unknown ones
KNOWN = (8, 9, 13, 17)  # answer tokens with known target activations
BLOCKS = {4: (5, 6, 7), 9: (10, 11, 12), 13: (14, 15, 16), 17: (18, 19)}  # last known: unknown


@partial(jax.jit, static_argnums=0)
def _exact(moa: Moa, params, shared, batch: Batch, tapped, known_BT):
    return unembed(shared, train.teacher_forced(moa, params, shared, batch, tapped, known_BT, 1))


def exact_logits(pair: MoaPair, batch: Batch, known_BT):
    return _exact(pair.moa, pair.drafter.params, pair.shared, batch, pair.tap(batch), known_BT)


def reference_logits(pair: MoaPair, batch: Batch, known_BT):
    return pair.trace(batch, train.Draws(known_BT, jnp.zeros(len(known_BT), bool)))[1]


def rows_of(count: int) -> Batch:
    """Returns a batch with the same prompt and answer in every row."""
    tokens_T = np.random.default_rng(3).integers(3, 101, LENGTH)
    real_T = np.arange(ROW) < LENGTH
    position_T = np.arange(ROW) * real_T
    row = (np.pad(tokens_T, (0, ROW - LENGTH)), real_T, position_T)
    rows = (np.tile(each.astype(np.int32), (count, 1)) for each in row)
    return Batch(*rows, np.tile(position_T >= PROMPT, (count, 1)))


def known_of(batch: Batch, answer: tuple[int, ...] = KNOWN):
    """Marks prompts and the given answer tokens as known."""
    return ~batch.response_BT | np.isin(batch.position_BT, answer)


@pytest.mark.slow
def test_equals_cached_decoding(saved):
    """Logits are equal at every unknown token; by the reference's rule, in the first block only.

    A known token has the target's logits. Without known answer tokens, both rules are equal.
    """
    pair, batch = open_pair(saved / "llama31", 3), rows_of(len(BLOCKS))
    exact_TV = exact_logits(pair, batch, known_of(batch))[0]
    reference_TV = reference_logits(pair, batch, known_of(batch))[0]
    starts_B = np.array(list(BLOCKS), np.int32)  # one row for each block that is decoded
    drafted_BJV = pair.cached(batch, starts_B + 1, LONGEST)
    for (start, tokens), drafted_JV in zip(BLOCKS.items(), drafted_BJV, strict=True):
        for t, expected_V in zip(tokens, drafted_JV, strict=False):
            assert_close(exact_TV[t], expected_V, f"token {t}")
            error = np.abs(reference_TV[t] - expected_V).max() / np.abs(expected_V).max()
            assert error < ARRAYS if start < PROMPT else error > 1e-2, f"reference's rule at {t}"
    target_TV = unembed(pair.shared, pair.tap(batch).hidden_BTD[0])
    known_T = known_of(batch)[0] & (batch.segment_BT[0] > 0)
    assert_close(exact_TV[known_T], target_TV[known_T], "known tokens")
    rules = (rule(pair, batch, known_of(batch, ())) for rule in (exact_logits, reference_logits))
    assert_close(*(logits_BTV[0, :LENGTH] for logits_BTV in rules), "both rules")
