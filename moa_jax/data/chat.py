"""Conversations as tokens, with a mask of the answer tokens.

    text       <s> [user] Hi [end] [assistant] Hello! [end] \\n [user] Bye [end] ...
    response    0    0    0    0        0        1      1    1    0     0    0

An answer begins at the end of the template's generation prompt, as in decoding, and includes
everything that the template writes before the next turn: the end mark, and ChatML's newline.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moa_jax.config.checks import is_id, is_utf8
from moa_jax.data.records import (
    NO_KWARGS,
    REASONING,
    Message,
    answer_places,
    answers_of,
    read_record,
)
from moa_jax.errors import InputError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

MARK = "\ufdd0"  # a Unicode noncharacter, which valid text does not contain


class Example(NamedTuple):
    """One encoded conversation of T tokens: int32 ids, and bool, True on tokens of answers."""

    tokens_T: np.ndarray
    response_T: np.ndarray
    rewritten: bool = False  # the template renders a turn unlike its prompt and answer in decoding


def encode(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    max_length: int,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> Example | None:
    """Encode a conversation and mark the tokens of all its answers, for any chat template.

    Calls of tools and reasoning are part of an answer, replies of tools are not. Only the first
    `max_length` tokens are kept; None if they include no answer token.
    Raises InputError without an answer or a chat template, for messages that the template refuses,
    and for a template whose output does not reveal the span of an answer.
    """
    if not answer_places(messages):
        raise InputError("a record without an answer; give each an assistant message")
    write = functools.partial(render, tokenizer, template_kwargs=template_kwargs)
    text = write(messages)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begin_T, end_T = np.array(encoding["offset_mapping"], np.int64).reshape(-1, 2)[:max_length].T
    response_T = np.zeros(len(begin_T), bool)
    spans, rewritten = _answer_spans(write, messages, text)
    for begin, end in spans:
        # A token that crosses the end belongs to the answer unless the shared part is whitespace.
        solid_end = begin + len(text[begin:end].rstrip())
        response_T |= (end_T > begin) & ((end_T <= end) | (begin_T < solid_end))
    if not response_T.any():
        return None
    return Example(np.array(encoding["input_ids"][:max_length], np.int32), response_T, rewritten)


def encode_record(
    tokenizer: PreTrainedTokenizerBase, record: dict, vocab_size: int, max_length: int
) -> list[Example]:
    """Encode a record: the token ids of its answers if present, else its messages.

    Empty if no answer token is within `max_length`. Raises InputError for a record of unknown
    style, for ids outside the model's vocabulary, and as `encode_ids` and `encode` do.
    """
    answers = answers_of(record)
    if answers is not None:
        return encode_ids(answers, vocab_size, max_length)
    read = read_record(record)
    example = encode(tokenizer, read.messages, max_length, read.template_kwargs)
    if example is None:
        return []
    check_tokens(example.tokens_T, vocab_size)
    return [example]


def encode_ids(answers: list[dict], vocab_size: int, max_length: int) -> list[Example]:
    """Encode answers as they were decoded: the `token_ids` of each after its `prompt_ids`.

    An answer whose prompt begins with the previous prompt and answer continues that example;
    any other answer begins a new example. Each example is truncated to `max_length`, and dropped
    if no answer token is left. Raises InputError for an answer without lists of valid ids.
    """
    rows: list[tuple[list[int], list[bool]]] = []
    tokens: list[int] = []
    for answer in answers:
        if not isinstance(answer, dict):
            raise InputError("an answer that is not an object; write prompt_ids and token_ids")
        prompt, ids = answer.get("prompt_ids") or [], answer.get("token_ids")
        check_ids(prompt, vocab_size)
        check_ids(ids, vocab_size)
        if not rows or prompt[: len(tokens)] != tokens:
            rows.append(([], []))
        tokens, response = rows[-1]
        response += [False] * (len(prompt) - len(tokens)) + [True] * len(ids)
        tokens[:] = prompt + ids
    examples = [
        Example(np.array(tokens[:max_length], np.int32), np.array(response[:max_length], bool))
        for tokens, response in rows
    ]
    return [example for example in examples if example.response_T.any()]


def check_ids(ids: Any, vocab_size: int) -> None:
    """Raise InputError unless `ids` is a list of ids in the vocabulary."""
    if not isinstance(ids, list) or not all(is_id(each, vocab_size) for each in ids):
        raise _unknown_ids(vocab_size)


def check_tokens(tokens_T: np.ndarray, vocab_size: int) -> None:
    """Raise InputError for a token outside the model's vocabulary; a tokenizer may have more."""
    if tokens_T.max(initial=0) >= vocab_size:
        raise _unknown_ids(vocab_size)


def _unknown_ids(vocab_size: int) -> InputError:
    return InputError(f"ids outside the vocabulary of {vocab_size}; use the target's own")


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> list[Example]:
    """Split plain text into examples of at most `max_length` tokens, each with a leading bos token.

    Every token counts as response.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    stride = max_length - len(bos)
    if stride < 1:
        raise InputError(f"max_length {max_length} leaves no room for text; ask for 2 or more")
    chunks = [bos + ids[start : start + stride] for start in range(0, len(ids), stride)]
    return [Example(np.array(c, np.int32), np.ones(len(c), bool)) for c in chunks]


def prompt_ids(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> list[int]:
    """Token ids of a conversation, followed by the generation prompt.

    Raises InputError without a chat template, and for an empty prompt.
    """
    if not messages or not (messages[-1]["content"].strip() or messages[-1]["role"] == "tool"):
        raise InputError("the prompt is empty; write what the model should answer")
    text = render(tokenizer, messages, generation_prompt=True, template_kwargs=template_kwargs)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise InputError("the chat template makes an empty prompt; use --prompt-ids")
    return ids


def pad_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """The id of padding: the tokenizer's own, else the last id of the model's vocabulary.

    A tokenizer's pad token may be outside the model's vocabulary.
    """
    own = tokenizer.pad_token_id
    return own if is_id(own, vocab_size) else vocab_size - 1


def render(
    tokenizer: PreTrainedTokenizerBase,
    messages: list[Message],
    generation_prompt: bool = False,
    template_kwargs: Mapping[str, Any] = NO_KWARGS,
) -> str:
    """Render messages with the tokenizer's chat template; raises InputError on failure.

    `template_kwargs` holds the tools and other arguments of the template. A message with the role
    developer gets the role system unless the template names developers.
    """
    if not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template; add one to its tokenizer_config.json, "
            "or work with token ids"
        )
    template = str(tokenizer.chat_template)
    if "tool_calls" not in template and any("tool_calls" in message for message in messages):
        raise InputError("the chat template writes no tool calls; use one that does")
    if "developer" not in template:
        as_system = {"role": "system"}
        messages = [each | as_system if each["role"] == "developer" else each for each in messages]
    options = {"tokenize": False, "add_generation_prompt": generation_prompt}
    try:
        text = tokenizer.apply_chat_template(messages, **options, **template_kwargs)
    except Exception as error:  # a template is a program of its own and may raise anything
        reason = first_line(error)
        raise InputError(
            f"the chat template refuses the messages ({reason}); change them or the template"
        ) from error
    if not is_utf8(text):
        raise InputError("the messages are not valid UTF-8; write them in UTF-8")
    return text


def _answer_spans(
    write: Callable[..., str], messages: list[Message], text: str
) -> tuple[list[tuple[int, int]], bool]:
    """Spans of the answers in the rendered text, as (begin, end) in characters.

    `write` renders messages, and `text` holds all messages as it renders them.
    The second value is True if the text lacks the prompt or the end of a turn as they were
    when that turn was decoded.
    """
    spans, rewritten = [], False
    for i in answer_places(messages):
        prompt = write(messages[:i], generation_prompt=True)
        through = text if i + 1 == len(messages) else write(messages[: i + 1])
        if not text.startswith(through) or not through.startswith(prompt):
            rewritten = True
            bare = {name: each for name, each in messages[i].items() if name not in REASONING}
            through = write([*messages[:i], bare]) if bare != messages[i] else through
        if text.startswith(through) and through.startswith(prompt):
            spans.append((len(prompt), len(through)))
        else:
            spans.extend(_marked_span(write, messages, i, text, prompt))
    return spans, rewritten


def _marked_span(
    write: Callable[..., str], messages: list[Message], i: int, text: str, prompt: str
) -> list[tuple[int, int]]:
    """The span of answer `i` under a template that renders earlier turns unlike the last turn.

    Templates of reasoning models remove the reasoning from all answers but the last. So the answer
    is replaced by a mark, and the text around the mark is also the text around the answer.
    Empty if the template omits this turn.
    """
    marked = {**messages[i], "content": MARK}
    if "tool_calls" in marked:  # a template may write a mark and an empty content differently
        with contextlib.suppress(InputError):
            if spans := _span_of_mark(write, messages, i, marked, text, prompt):
                return spans
        del marked["tool_calls"]
    return _span_of_mark(write, messages, i, marked, text, prompt)


def _span_of_mark(
    write: Callable[..., str],
    messages: list[Message],
    i: int,
    marked: Message,
    text: str,
    prompt: str,
) -> list[tuple[int, int]]:
    """The span in `text` of the message that `marked` replaces; empty if the mark is not written.

    Raises InputError if the text around the mark is not the text around the message.
    """
    try:
        around = write([*messages[:i], marked, *messages[i + 1 :]])
    except InputError as error:
        raise InputError(
            "the chat template renders this answer and no other one, so its place is not found; "
            "train on the token ids that train.regenerate writes"
        ) from error
    before, mark, after = around.partition(MARK)
    if not mark:
        return []
    fits = text.startswith(before) and text[len(before) :].endswith(after)
    if MARK in after or not fits:
        raise InputError(
            "the chat template changes its text around an answer with the answer; "
            "use one that writes each turn once"
        )
    end_mark = write([*messages[:i], marked]).partition(MARK)[2]
    begin = len(prompt) if before.startswith(prompt) else len(before)
    end = len(text) - len(after)
    return [(begin, end + len(end_mark) if after.startswith(end_mark) else end)]
