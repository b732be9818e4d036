"""The draft vocabulary of a run's own data: the most frequent tokens of its answers."""

from __future__ import annotations

import hashlib
import sys

import numpy as np

from moa_jax.data.batch import Batch
from moa_jax.data.batches import Batches, Mixture
from moa_jax.decode.draft_vocabulary import DraftVocabulary, coverage, most_frequent, vocabulary_of
from moa_jax.pretrained import Target
from moa_jax.runtime.multihost import is_first

ROWS = 4096  # read at a time: rows on disk may not fit in memory


def frequent_in(train: Batches | Mixture, size: int, target: Target) -> DraftVocabulary:
    """The `size` most frequent tokens of the answers, including all eos ids of the target.

    Sources of a mixture count by their shares. Process 0 prints the share of answer tokens that the
    vocabulary covers on stderr. Raises InputError as `check_size`.
    """
    vocab_size = target.config.vocab_size
    if isinstance(train, Mixture):  # expected counts per row of the mixture
        pairs = zip(train.shares_P, train.sources, strict=True)
        parts = [share * _counts(rows, vocab_size) / len(rows.tokens_BT) for share, rows in pairs]
        weight_V = np.sum(parts, axis=0)
    else:
        weight_V = _counts(train.rows, vocab_size)
    ids_U = most_frequent(weight_V, size, target.generation.eos_ids)
    if is_first():
        print(
            f"draft vocabulary: {size} of {vocab_size} tokens cover "
            f"{coverage(weight_V, ids_U):.2%} of the answers in the training data",
            file=sys.stderr,
        )
    return vocabulary_of(ids_U, target)


def facts_of_vocabulary(vocabulary: DraftVocabulary | None) -> dict[str, str]:
    """The hash of the ids, which a resumed run compares; empty without a vocabulary."""
    if vocabulary is None:
        return {}
    return {"draft vocabulary": hashlib.sha256(vocabulary.ids_U.tobytes()).hexdigest()}


def _counts(rows: Batch, vocab_size: int) -> np.ndarray:
    """The number of times each token occurs in the answers, int64 (V,)."""
    count_V = np.zeros(vocab_size, np.int64)
    for start in range(0, len(rows.tokens_BT), ROWS):
        here = np.arange(start, min(start + ROWS, len(rows.tokens_BT)))
        found_X = rows.tokens_BT[here][rows.response_BT[here]]
        count_V += np.bincount(found_X, minlength=vocab_size)
    return count_V
