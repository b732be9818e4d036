"""Rows of training tokens, and a stateless source of their batches.

A row holds one or more whole conversations, as drawn in `moa_jax/data/batch.py`. The rows of batch
`step` depend only on the seed and the step, so a resumed run gets the batches of an unbroken run.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
import types
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from moa_jax.config import DataConfig
from moa_jax.data import chat, reference, shards, sources
from moa_jax.data.batch import Batch
from moa_jax.data.encode import Coder, Outcome, outcomes
from moa_jax.data.mixture import Mixture
from moa_jax.data.report import DataReport, Tally, refusal, total
from moa_jax.data.rows import blocks, empty, pack, pad

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Batches", "Mixture", "DataReport", "load", "pack", "pad"]

# (number of records or None, label) -> a context with step(count), such as a progress bar
Watcher = Callable[[int | None, str], Any]


class Batches:
    """A stateless source of batches over rows (R, T): `batch(step)` for any step from 0 on.

    Each epoch shuffles the rows by (seed, epoch), and drops the rows that do not fill its last
    batch. If the rows do not fill one batch, empty rows (segment 0, no response) are added. Rows
    are arrays, or columns on disk (`moa_jax.data.shards`).
    """

    def __init__(self, rows: Batch, rows_per_batch: int, seed: int, pad_id: int = 0) -> None:
        missing = rows_per_batch - len(rows.tokens_BT)
        if missing > 0:
            filler = empty(missing, rows.tokens_BT.shape[1], pad_id)
            rows = Batch(*map(np.concatenate, zip(rows, filler, strict=True)))
        self.rows = rows
        self.rows_per_batch = rows_per_batch
        order = functools.partial(_order, seed, self.num_rows)
        self._order = functools.lru_cache(maxsize=2)(order)

    def __len__(self) -> int:
        """Number of batches per epoch."""
        return self.num_rows // self.rows_per_batch

    @property
    def num_rows(self) -> int:
        """Number of rows; row numbers start at 0."""
        return len(self.rows.tokens_BT)

    def numbers(self, step: int, rows: slice | None = None) -> np.ndarray:
        """The row numbers of batch `step` of an endless run; `rows` selects some of them."""
        epoch, place = divmod(step, len(self))
        chosen_B = self._order(epoch)[place * self.rows_per_batch :][: self.rows_per_batch]
        return chosen_B if rows is None else chosen_B[rows]

    def take(self, number_R: np.ndarray) -> Batch:
        """The rows (R, T) with these numbers."""
        return Batch(*(array[number_R] for array in self.rows))

    def batch(self, step: int, rows: slice | None = None) -> Batch:
        """Batch `step` of an endless run, (rows_per_batch, T); `rows` selects some of its rows."""
        return self.take(self.numbers(step, rows))


def load(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    split: Literal["train", "validation"],
    watch: Watcher | None = None,
) -> tuple[Batches | Mixture, DataReport]:
    """Read, encode and lay out one split, or load the split from the cache.

    `watch` shows the progress. `config.bad_records` decides whether unusable records are counted or
    refused. Raises InputError for unreadable files, and if no record is left to train on.
    """
    paths = getattr(config, split)
    if config.answers == "reference":  # an error here concerns all records
        reference.reference_templates(tokenizer, vocab_size)
    coder = Coder(config, tokenizer, vocab_size)
    watch = watch or _unwatched
    if split == "train" and config.weights:
        parts = [_rows((path,), coder, watch) for path in paths]
        rows, reports = zip(*parts, strict=True)
        return Mixture(rows, config.weights, config.rows_per_batch, config.seed), total(reports)
    rows, report = _rows(paths, coder, watch)
    pad_id = chat.pad_id(tokenizer, vocab_size)
    return Batches(rows, config.rows_per_batch, config.seed, pad_id), report


def facts_of(source: Batches | Mixture) -> dict[str, Any]:
    """Number of rows and hash of the first batch, which differ for most other or edited files."""
    digest = hashlib.sha256()
    for array in source.batch(0):
        digest.update(np.ascontiguousarray(array))
    return {"number of rows": source.num_rows, "first rows": digest.hexdigest()}


def _rows(paths: Sequence[str], coder: Coder, watch: Watcher) -> tuple[Batch, DataReport]:
    """The rows of some paths, in memory or on disk."""

    def build() -> tuple[Iterator[Batch], Callable[[], DataReport]]:
        tally = Tally(paths, coder)
        examples = tally.examples(_watched(paths, coder, watch))
        config, pad_id = coder.config, chat.pad_id(coder.tokenizer, coder.vocab_size)
        how = (config.pack, config.row_length, pad_id, config.longest_first)
        return tally.rows(blocks(examples, *how)), tally.report

    if coder.config.cache is None:
        laid_out, report = build()
        return Batch(*map(np.concatenate, zip(*laid_out, strict=True))), report()
    rows, report = shards.cached(coder.config.cache, shards.fingerprint(paths, coder), build)
    if report.dropped and coder.config.bad_records == "refuse":
        why = next(iter(report.dropped))
        raise refusal(report.first[why], why)
    return rows, report


def _watched(paths: Sequence[str], coder: Coder, watch: Watcher) -> Iterator[Outcome]:
    """Encode all records of the paths, with a progress line."""
    counts = [sources.count(path) for path in paths]
    number = None if None in counts else sum(counts)
    found = itertools.chain.from_iterable(map(sources.read_all, paths))
    with watch(number, "records") as bar:
        for outcome in outcomes(found, coder, number):
            yield outcome
            bar.step(1)


def _unwatched(number: int | None, label: str) -> Any:
    return contextlib.nullcontext(types.SimpleNamespace(step=lambda count: None))


def _order(seed: int, num_rows: int, epoch: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)
