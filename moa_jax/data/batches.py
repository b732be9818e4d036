"""Rows of training tokens, and the stateless source that deals them out in batches.

A row holds whole conversations, or one, as drawn in `moa_jax/batch.py`. Which rows make batch
`step` depends on the seed and the step alone, so a resumed run sees what an unbroken one sees.
"""

from __future__ import annotations

import bisect
import dataclasses
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Literal

import numpy as np

from moa_jax.batch import Batch
from moa_jax.config import DataConfig
from moa_jax.data import chat, corpora, reference
from moa_jax.data.chat import Example
from moa_jax.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclasses.dataclass(frozen=True)
class Report:
    """What became of the records of one split, and what its rows hold."""

    kept: int  # records
    dropped: dict[str, int]  # why -> records, the most frequent reason first
    examples: int  # a long plain text makes several of one record
    full: int  # examples that take all of max_length (or of a row), most of them cut
    tokens: int
    response_tokens: int
    rows: int
    row_length: int

    def __str__(self) -> str:
        reasons = "; ".join(f"{count} x {reason}" for reason, count in self.dropped.items())
        return (
            f"{self.kept} conversations, {sum(self.dropped.values())} dropped"
            f"{reasons and f' ({reasons})'}, {self.tokens} tokens, "
            f"{self.response_tokens} of them answers, in {self.rows} rows, {self.fill:.0%} full"
        )

    @property
    def fill(self) -> float:
        """Share of the rows' places that hold tokens, 0 to 1."""
        return self.tokens / (self.rows * self.row_length)


def pack(examples: Sequence[Example], row_length: int, pad_id: int = 0) -> Batch:
    """Lay whole examples side by side into few rows (R, row_length), each its own segment.

    Best fit in the order given: each example goes to the fullest row that still has room, so the
    result depends on nothing else. An example longer than a row is cut to it.
    """
    row_of: list[int] = []
    rooms: list[tuple[int, int]] = []  # (free places, row), sorted
    num_rows = 0
    for example in examples:
        length = min(len(example.tokens_T), row_length)
        place = bisect.bisect_left(rooms, (length, -1))
        if place < len(rooms):
            room, row = rooms.pop(place)
        else:
            room, row, num_rows = row_length, num_rows, num_rows + 1
        row_of.append(row)
        if room > length:
            bisect.insort(rooms, (room - length, row))
    return _lay(examples, row_of, num_rows, row_length, pad_id)


def pad(examples: Sequence[Example], row_length: int, pad_id: int = 0) -> Batch:
    """Give each example a row (R, row_length) of its own; a longer one is cut."""
    return _lay(examples, range(len(examples)), len(examples), row_length, pad_id)


class Batches:
    """A stateless source of batches over rows (R, T): `batch(step)` for any step from 0 on.

    Each epoch deals the rows in an order that depends on (seed, epoch) only, and leaves out those
    that do not fill its last batch. Fewer rows than a batch needs are filled up with empty rows
    (segment 0, no response).
    """

    def __init__(self, rows: Batch, rows_per_batch: int, seed: int, pad_id: int = 0) -> None:
        missing = rows_per_batch - len(rows.tokens_BT)
        if missing > 0:
            empty = _empty(missing, rows.tokens_BT.shape[1], pad_id)
            rows = Batch(*map(np.concatenate, zip(rows, empty, strict=True)))
        self.rows = rows
        self.rows_per_batch = rows_per_batch
        self.seed = seed

    def __len__(self) -> int:
        """Batches in one epoch."""
        return len(self.rows.tokens_BT) // self.rows_per_batch

    def batch(self, step: int) -> Batch:
        """Batch number `step` of an endless run, (rows_per_batch, T)."""
        epoch, place = divmod(step, len(self))
        order = _order(self.seed, epoch, len(self.rows.tokens_BT))
        chosen = order[place * self.rows_per_batch : (place + 1) * self.rows_per_batch]
        return Batch(*(array[chosen] for array in self.rows))


def load(
    config: DataConfig,
    tokenizer: PreTrainedTokenizerBase,
    vocab_size: int,
    split: Literal["train", "validation"],
) -> tuple[Batches, Report]:
    """Read, encode and lay out one split; records that cannot be used are counted, not raised.

    Raises InputError for files that cannot be read, a tokenizer that does not fit, and where
    nothing is left to train on.
    """
    paths = getattr(config, split)
    if len(tokenizer) > vocab_size:
        raise InputError(
            f"the tokenizer has {len(tokenizer)} tokens and the model {vocab_size}: "
            "use the tokenizer that belongs to the model"
        )
    if config.answers == "reference":  # its faults concern all records, so they are raised
        reference.reference_templates(tokenizer, vocab_size)
    dropped: Counter[str] = Counter()
    examples: list[Example] = []
    kept = 0
    for record in _records(paths, config.sources):
        try:
            examples.extend(_encode(record, config, tokenizer, vocab_size))
            kept += 1
        except InputError as error:
            dropped[str(error)] += 1
    if not examples:
        _raise_nothing_left(paths, config.sources, dropped)
    pad_id = chat.pad_id(tokenizer, vocab_size)
    rows = (pack if config.pack else pad)(examples, config.row_length, pad_id)
    report = Report(
        kept=kept,
        dropped=dict(dropped.most_common()),
        examples=len(examples),
        full=sum(len(example.tokens_T) >= _limit(config) for example in examples),
        tokens=int((rows.segment_BT > 0).sum()),
        response_tokens=int(rows.response_BT.sum()),
        rows=len(rows.tokens_BT),
        row_length=config.row_length,
    )
    return Batches(rows, config.rows_per_batch, config.seed, pad_id), report


def _records(paths: Sequence[str], sources: Sequence[str]) -> Iterator[dict]:
    for path in paths:
        yield from corpora.read(path, sources)


def _encode(
    record: dict, config: DataConfig, tokenizer: PreTrainedTokenizerBase, vocab_size: int
) -> list[Example]:
    """The examples that one record makes: one, or the chunks of a plain text."""
    limit = _limit(config)
    if isinstance(record.get("text"), str):
        chunks = chat.encode_text(tokenizer, record["text"], limit)
        if not chunks:
            raise InputError("an empty text: remove it")
        return chunks
    if config.answers == "reference":
        messages = reference.reference_messages(record)
        example = reference.reference_encode(tokenizer, messages, vocab_size, limit)
    else:
        example = chat.encode(tokenizer, chat.messages_of(record), limit)
    if example is None:
        raise InputError(f"no answer within {limit} tokens: raise max_length and row_length")
    return [example]


def _limit(config: DataConfig) -> int:
    return min(config.max_length, config.row_length)


def _raise_nothing_left(
    paths: Sequence[str], sources: Sequence[str], dropped: Counter[str]
) -> None:
    where = ", ".join(paths) or "an empty list of paths"
    if dropped:
        (reason, count), *_ = dropped.most_common(1)
        raise InputError(
            f"none of {dropped.total()} records of {where} can be used; of {count}: {reason}"
        )
    wanted = f" of the sources {', '.join(sources)}" if sources else ""
    raise InputError(f"no records{wanted} in {where}: name files that hold some")


@functools.lru_cache(maxsize=4)
def _order(seed: int, epoch: int, num_rows: int) -> np.ndarray:
    return np.random.default_rng((seed, epoch)).permutation(num_rows)


def _lay(
    examples: Sequence[Example],
    row_of: Sequence[int],
    num_rows: int,
    row_length: int,
    pad_id: int,
) -> Batch:
    """Write example `i` behind what row `row_of[i]` already holds."""
    rows = _empty(num_rows, row_length, pad_id)
    used, segments = np.zeros(num_rows, int), np.zeros(num_rows, int)
    for example, row in zip(examples, row_of, strict=True):
        length = min(len(example.tokens_T), row_length)
        here = slice(used[row], used[row] + length)
        used[row] += length
        segments[row] += 1
        rows.tokens_BT[row, here] = example.tokens_T[:length]
        rows.segment_BT[row, here] = segments[row]
        rows.position_BT[row, here] = np.arange(length)
        rows.response_BT[row, here] = example.response_T[:length]
    return rows


def _empty(num_rows: int, row_length: int, pad_id: int) -> Batch:
    shape = (num_rows, row_length)
    return Batch(
        tokens_BT=np.full(shape, pad_id, np.int32),
        segment_BT=np.zeros(shape, np.int32),
        position_BT=np.zeros(shape, np.int32),
        response_BT=np.zeros(shape, bool),
    )
