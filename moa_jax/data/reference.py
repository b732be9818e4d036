"""Answers as the paper's code marks them: everything after the first answer header.

    text       <s> [user] Hi [end] [assistant] Hello! [end] [user] Bye [end] [assistant] ...
    response    0    0    0    0        0        1      1     1     1    1        1

This rule is for experiments that repeat the paper; `moa_jax.data.chat` has the preferred rule. The
reference finds answers by the token ids around them. So the reference drops conversations that open
with another system message, and marks later user turns as answers (its instruction template
includes the opening of the conversation, which occurs only once).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from moa_jax.data.chat import Example, pad_id, render
from moa_jax.data.records import Message, ReadRecord, text_of_parts, unread_of
from moa_jax.errors import InputError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Templates(NamedTuple):
    """The text before the first question, and the text between a question and its answer."""

    instruction: str
    response: str


def reference_messages(record: dict) -> ReadRecord:
    """The messages of a record as the reference reads them: any speaker but `gpt` is the user.

    Raises InputError for styles other than `messages`, `history`, `conversations` (from, value),
    and `instruction` with `output`.
    """
    styles = ("messages", "history", "conversations")
    style = next((style for style in styles if record.get(style)), "instruction")
    try:
        if style == "instruction":
            keys, texts = [style, "output"], [record["instruction"], record["output"]]
            turns = [("user", texts[0].strip()), ("assistant", texts[1].strip())]
        else:
            keys, turns = [style], [_turn(turn, style) for turn in record[style]]
    except (KeyError, TypeError, AttributeError) as error:
        raise InputError(
            "a record of unknown style; give it `messages`, `history`, `conversations` "
            "(from, value), or `instruction` and `output`"
        ) from error
    messages = [{"role": role, "content": text} for role, text in turns]
    return ReadRecord(messages, unread_of(record, keys, messages))


def _turn(turn: dict, style: str) -> tuple[str, str]:
    """Role and content of a turn; null keys count as absent, as in a table of two styles."""
    if style == "conversations" and turn.get("from") is not None:
        role, content = "assistant" if turn["from"] == "gpt" else "user", turn["value"]
    else:
        role, content = turn["role"], turn["content"]
    return role, text_of_parts(content) + ""  # TypeError for other values


def reference_templates(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> Templates:
    """Split a rendered conversation at a sentinel, the last token of the model's vocabulary.

    Raises InputError if the tokenizer has no such token, as with a padded vocabulary, and for a
    template that does not write each message once.
    """
    sentinel = tokenizer.convert_ids_to_tokens(vocab_size - 1)
    if sentinel is None:
        raise InputError(
            f"the tokenizer has no token {vocab_size - 1}, which answers='reference' needs; "
            "use answers='turns'"
        )
    pair = [{"role": role, "content": sentinel} for role in ("user", "assistant")]
    parts = render(tokenizer, pair).split(sentinel)
    if len(parts) != 3:
        raise InputError(
            "the chat template does not write each message once, as answers='reference' needs; "
            "use answers='turns'"
        )
    return Templates(*parts[:2])


def reference_encode(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], vocab_size: int, max_length: int
) -> Example | None:
    """Encode as the paper's code does (moa_spec/utils.py, with the collator of trl 0.8.2).

    Truncates to `max_length` tokens; None if the reference drops the conversation.
    Raises InputError for a conversation with the sentinel token, id `vocab_size` - 1.
    """
    templates = reference_templates(tokenizer, vocab_size)
    tokens_T = _ids(tokenizer, render(tokenizer, messages))[:max_length]
    if (tokens_T == vocab_size - 1).any():
        raise InputError(
            f"token {vocab_size - 1} is the sentinel of answers='reference' and occurs in a text; "
            "remove that record"
        )
    headers = [_ids(tokenizer, template) for template in templates]
    question_starts, answer_headers = (_find(tokens_T, header) for header in headers)
    answer_starts = answer_headers + len(headers[1])
    response_T = _label(len(tokens_T), question_starts, answer_starts)
    response_T &= tokens_T != pad_id(tokenizer, vocab_size)
    return Example(tokens_T, response_T) if response_T.any() else None


def _label(length: int, question_starts: np.ndarray, answer_starts: np.ndarray) -> np.ndarray:
    """Label all tokens but those from a question's start to the answer start of equal rank.

    The first answer's mask extends back to the start of the sequence, and a question without an
    answer (after truncation) is masked to the end.
    """
    if not len(question_starts) or not len(answer_starts):
        return np.zeros(length, bool)
    response_T = np.ones(length, bool)
    if question_starts[0] > answer_starts[0]:
        question_starts = np.concatenate([[0], question_starts])
    for question, answer in zip(question_starts, answer_starts, strict=False):
        response_T[question:answer] = False
    response_T[: answer_starts[0]] = False
    if len(answer_starts) < len(question_starts):
        response_T[question_starts[-1] :] = False
    return response_T


def _find(tokens_T: np.ndarray, needle: np.ndarray) -> np.ndarray:
    """Start indices of all occurrences of `needle`."""
    if not len(needle) or len(needle) > len(tokens_T):
        return np.zeros(0, int)
    windows = np.lib.stride_tricks.sliding_window_view(tokens_T, len(needle))
    return np.flatnonzero((windows == needle).all(axis=1))


def _ids(tokenizer: PreTrainedTokenizerBase, text: str) -> np.ndarray:
    return np.array(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"], np.int32)
