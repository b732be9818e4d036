"""Mixes rows of several sources in fixed shares, without state.

Source p with share w_p yields its k-th row at time (k + 1/2) / w_p, and all rows are sorted by
time. So the first n rows of a run include n w_p rows of source p, within a few rows for any n,
and any batch is found without the batches before it.

    shares 1/2, 1/4, 1/4      a b c a  a b c a  a b c a ...
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import numpy as np

from moa_jax.data.batch import Batch


class Mixture:
    """A stateless source of batches over the rows of several sources, with a share per source.

    Each source has its own epochs and yields all its rows in every epoch, in an order that
    depends on the seed, the epoch and the source's index.
    """

    def __init__(
        self, sources: Sequence[Batch], weights: Sequence[float], rows_per_batch: int, seed: int
    ) -> None:
        self.sources = sources
        self.shares_P = np.array(weights, float) / sum(weights)
        self._ends_P = np.cumsum([len(rows.tokens_BT) for rows in sources])
        self.rows_per_batch = rows_per_batch
        self._order = functools.lru_cache(2 * len(sources))(functools.partial(_order, seed))

    def __len__(self) -> int:
        """Number of batches with `num_rows` rows in total, rounded down and at least 1."""
        return max(1, self.num_rows // self.rows_per_batch)

    @property
    def num_rows(self) -> int:
        """Number of rows of all sources; row numbers continue from one source to the next."""
        return int(self._ends_P[-1])

    def numbers(self, step: int, rows: slice | None = None) -> np.ndarray:
        """The row numbers of batch `step` of an endless run; `rows` selects some of them."""
        source_B, turn_B = deal(self.shares_P, step * self.rows_per_batch, self.rows_per_batch)
        here = slice(None) if rows is None else rows
        pairs = zip(source_B[here], turn_B[here], strict=True)
        return np.array([self._number(int(source), int(turn)) for source, turn in pairs], int)

    def take(self, number_R: np.ndarray) -> Batch:
        """The rows (R, T) with these numbers."""
        source_R = np.searchsorted(self._ends_P, number_R, side="right")
        parts = []
        for source in np.unique(source_R):
            rows = self.sources[source]
            begin = self._ends_P[source] - len(rows.tokens_BT)
            parts.append([array[number_R[source_R == source] - begin] for array in rows])
        back_R = np.argsort(np.argsort(source_R, kind="stable"))
        return Batch(*(np.concatenate(arrays)[back_R] for arrays in zip(*parts, strict=True)))

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Batch `step` of an endless run, (rows_per_batch, T); `rows` selects some of its rows."""
        return self.take(self.numbers(step, rows))

    def _number(self, source: int, turn: int) -> int:
        """The row number of a source's row `turn` in an endless run."""
        count = len(self.sources[source].tokens_BT)
        epoch, place = divmod(turn, count)
        return self._ends_P[source] - count + self._order(epoch, source, count)[place]


def deal(shares_P: np.ndarray, first: int, count: int) -> tuple[np.ndarray, np.ndarray]:
    """Rows first .. first + count - 1 of a run: the source of each, and its turn in that source."""
    num_sources = len(shares_P)
    # Up to time t a source yields t w_p rows to within 1/2, so row n has time n -+ num_sources.
    begin_P = np.floor((first - num_sources) * shares_P - 0.5).clip(0).astype(np.int64)
    end_P = np.ceil((first + count + num_sources) * shares_P + 0.5).astype(np.int64)
    source_X = np.repeat(np.arange(num_sources), end_P - begin_P)
    number_X = np.concatenate([np.arange(b, e) for b, e in zip(begin_P, end_P, strict=True)])
    time_X = (number_X + 0.5) / shares_P[source_X]
    chosen_X = np.lexsort((source_X, time_X))[first - begin_P.sum() :][:count]
    return source_X[chosen_X], number_X[chosen_X]


def _order(seed: int, epoch: int, source: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch, source)).permutation(num_rows)
