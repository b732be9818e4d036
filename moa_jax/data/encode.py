"""Encodes records into examples, in this process or in several."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moa_jax.config import DataConfig
from moa_jax.data import chat, records, reference, sources
from moa_jax.data.chat import Example
from moa_jax.data.files import Found
from moa_jax.data.workers import num_cores, ordered_map
from moa_jax.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

CHUNK = 64  # records per task of a process
FEW = 2048  # records that are encoded faster than processes start


class Encoded(NamedTuple):
    """The examples of a record, and the names of its keys that are not read."""

    examples: list[Example]
    unread: tuple[str, ...] = ()
    other_text: bool = False  # the token ids decode to a text other than the messages


# A record's location, and its examples or its fault; no examples for a record of other sources.
Outcome = tuple[str, Encoded | InputError]


class Coder(NamedTuple):
    """The settings that determine the encoding of a record."""

    config: DataConfig
    tokenizer: PreTrainedTokenizerBase
    vocab_size: int

    @property
    def limit(self) -> int:
        """Maximum number of tokens per example."""
        return min(self.config.max_length, self.config.row_length)


def outcomes(found: Found, coder: Coder, total: int | None) -> Iterator[Outcome]:
    """Encode each record, in the given order; `total` is the number of records, if known."""
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
    """Encode a few records."""
    return [(place, _encoded(record, coder)) for place, record in chunk]


def encode_record(record: dict, coder: Coder) -> Encoded:
    """The examples of a record, each with an answer token.

    A conversation makes one example, or several if a later prompt in its token ids does not
    continue the earlier ones. A plain text makes one example per chunk. Token ids take precedence
    over messages, and messages over plain text.

    Raises InputError for an unusable record; equal faults have equal messages.
    """
    found = _of_record(record, coder)
    if not found.examples:
        raise InputError(f"no answer within {coder.limit} tokens; raise max_length and row_length")
    for example in found.examples:
        chat.check_tokens(example.tokens_T, coder.vocab_size)
    return found


def _of_record(record: dict, coder: Coder) -> Encoded:
    """The examples of a record; none if no answer is within the limit."""
    config, tokenizer, vocab_size = coder
    if (answers := records.answers_of(record)) is not None:
        examples = chat.encode_ids(answers, vocab_size, coder.limit)
        if config.answers == "reference":  # includes user turns after the first answer
            fill = np.logical_or.accumulate
            examples = [each._replace(response_T=fill(each.response_T)) for each in examples]
        return Encoded(examples, other_text=_have_other_text(tokenizer, answers, record))
    if (text := records.plain_text_of(record)) is not None:
        chunks = chat.encode_text(tokenizer, text, coder.limit)
        if not chunks:
            raise InputError("an empty text; remove it")
        return Encoded(chunks, records.unread_of(record, ["text"]))
    if config.answers == "reference":
        read = reference.reference_messages(record)
        example = reference.reference_encode(tokenizer, read.messages, vocab_size, coder.limit)
    else:
        read = records.read_record(record)
        example = chat.encode(tokenizer, read.messages, coder.limit, read.template_kwargs)
    unread = records.unread_by(tokenizer.chat_template, read)
    return Encoded([] if example is None else [example], unread)


def _have_other_text(tokenizer: PreTrainedTokenizerBase, answers: list[dict], record: dict) -> bool:
    """Whether the ids decode to other answers than the messages, as after a change of tokenizer."""
    try:
        messages = records.messages_of(record)
    except InputError:  # ids only
        return False
    for answer, place in zip(answers, records.generated_places(messages), strict=False):
        text = messages[place]["content"].strip()
        decoded = tokenizer.decode(answer["token_ids"], skip_special_tokens=True).strip()
        if decoded != text and "\ufffd" not in decoded:  # ids may hold a part of a character
            return True
    return False


def _encoded(record: dict | InputError, coder: Coder) -> Encoded | InputError:
    if isinstance(record, InputError):
        return record
    if not sources.is_from(record, coder.config.sources):
        return Encoded([])
    try:
        return encode_record(record, coder)
    except InputError as error:
        return error
