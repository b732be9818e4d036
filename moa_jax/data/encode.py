"""Records into examples, in this process or in many."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moa_jax.config import DataConfig
from moa_jax.data import chat, corpora, records, reference
from moa_jax.data.chat import Example
from moa_jax.data.files import Found
from moa_jax.data.workers import num_cores, ordered_map
from moa_jax.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 64  # records that a process takes at a time
FEW = 2048  # records that are sooner encoded than processes are started


class Encoded(NamedTuple):
    """The examples of a record, and the names of its keys that hold something else."""

    examples: list[Example]
    unread: tuple[str, ...] = ()
    other_text: bool = False  # the token ids decode to another text than that of the messages


# A record's place and its examples, or what is wrong with it; none for a record of other sources.
Outcome = tuple[str, Encoded | InputError]


class Coder(NamedTuple):
    """All that decides what a record becomes."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int

    @property
    def limit(self) -> int:
        """Most tokens of an example."""
        return min(self.config.max_length, self.config.row_length)


def outcomes(found: Found, coder: Coder, total: int | None) -> Iterator[Outcome]:
    """Encodes each record, in the order given; `total` is their number, if known."""
    workers = coder.config.workers
    if workers == 0:
        workers = 1 if total is not None and total <= FEW else num_cores()
    chunks = iter(lambda: list(itertools.islice(found, CHUNK)), [])
    if workers == 1:
        parts = (encode_chunk(chunk, coder) for chunk in chunks)
    else:
        parts = ordered_map(encode_chunk, chunks, coder, workers)
    return itertools.chain.from_iterable(parts)


def encode_chunk(chunk: list[tuple[str, dict | InputError]], coder: Coder) -> list[Outcome]:
    """Encodes a few records."""
    return [(place, _encoded(record, coder)) for place, record in chunk]


def encode_record(record: dict, coder: Coder) -> Encoded:
    """The examples that a record makes, each with an answer token.

    A conversation makes one, or several where a later prompt of its ids does not continue the
    earlier ones. A plain text makes one of each chunk. Ids come before messages, and messages
    before a text.

    Raises InputError for a record that cannot be used; equal faults have equal texts.
    """
    found = _of_record(record, coder)
    if not found.examples:
        raise InputError(f"no answer within {coder.limit} tokens: raise max_length and row_length")
    for example in found.examples:
        chat.check_tokens(example.tokens_T, coder.vocab_size)
    return found


def _of_record(record: dict, coder: Coder) -> Encoded:
    """The examples of a record, none where no answer is within the limit."""
    config, tokenizer, vocab_size = coder
    if (answers := records.answers_of(record)) is not None:
        examples = chat.encode_ids(answers, vocab_size, coder.limit)
        if config.answers == "reference":  # user turns after the first answer, too
            fill = np.logical_or.accumulate
            examples = [each._replace(response_T=fill(each.response_T)) for each in examples]
        return Encoded(examples, other_text=_have_other_text(tokenizer, answers, record))
    if (text := records.plain_text_of(record)) is not None:
        chunks = chat.encode_text(tokenizer, text, coder.limit)
        if not chunks:
            raise InputError("an empty text: remove it")
        return Encoded(chunks, records.unread_of(record, ["text"]))
    if config.answers == "reference":
        messages, unread = reference.reference_messages(record)
        example = reference.reference_encode(tokenizer, messages, vocab_size, coder.limit)
    else:
        messages, unread = records.read_record(record)
        example = chat.encode(tokenizer, messages, coder.limit)
    return Encoded([] if example is None else [example], unread)


def _have_other_text(tokenizer: PreTrainedTokenizerBase, answers: list[dict], record: dict) -> bool:
    """Whether ids are not those of the answers in the messages: another tokenizer wrote them."""
    try:
        messages = records.messages_of(record)
    except InputError:  # ids alone
        return False
    for answer, place in zip(answers, records.answer_places(messages), strict=False):
        text = messages[place]["content"].strip()
        decoded = tokenizer.decode(answer["token_ids"], skip_special_tokens=True).strip()
        if decoded != text and "\ufffd" not in decoded:  # ids may hold a part of a character
            return True
    return False


def _encoded(record: dict | InputError, coder: Coder) -> Encoded | InputError:
    if isinstance(record, InputError):
        return record
    if not corpora.is_from(record, coder.config.sources):
        return Encoded([])
    try:
        return encode_record(record, coder)
    except InputError as error:
        return error
