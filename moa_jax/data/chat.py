"""Conversations: from any common record style to tokens, and which of them are answers.

    text       <s> [user] Hi [end] [assistant] Hello! [end] \\n [user] Bye [end] ...
    response    0    0    0    0        0        1      1    1    0     0    0

An answer begins where the template's generation prompt ends, as it does in decoding, and holds
whatever the template writes before the next turn: its end mark, and ChatML's newline after it.
"""

from __future__ import annotations

import itertools
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from moa_jax.config.checks import is_id, is_utf8
from moa_jax.errors import InputError, first_line

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Message = dict[str, str]  # role: system, user or assistant; content: text

ROLES = {
    "system": "system",
    "user": "user",
    "human": "user",
    "assistant": "assistant",
    "gpt": "assistant",
}
MARK = "\ufdd0"  # a Unicode non-character, so no text to be exchanged holds it


class Example(NamedTuple):
    """One encoded conversation of T tokens: int32 ids, and bool, True on tokens of answers."""

    tokens_T: np.ndarray
    response_T: np.ndarray


def messages_of(record: dict) -> list[Message]:
    """The messages of a record of any common style, roles named system, user and assistant.

    Styles: `messages` or `history` (role, content), ShareGPT `conversations` (from, value, or role,
    content), UltraChat `data` (texts in turn), Alpaca (`instruction`, `input`, `output`).
    Raises InputError for another style, an unknown role and an empty message; its line is the
    same for all records with the same fault.
    """
    return [{"role": _role(turn), "content": _content(turn)} for turn in _turns(record)]


def encode(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], max_length: int
) -> Example | None:
    """Encode a conversation and mark the tokens of all its answers, for any chat template.

    Only the first `max_length` tokens are kept; None if they hold no answer token.
    Raises InputError without an answer or a chat template, and where the template refuses the
    messages or hides which part of its text is the answer.
    """
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError("a record without an answer: give each an assistant message")
    text = render(tokenizer, messages)
    encoding = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True, verbose=False)
    begin_T, end_T = np.array(encoding["offset_mapping"], np.int64).reshape(-1, 2)[:max_length].T
    response_T = np.zeros(len(begin_T), bool)
    for begin, end in _answer_spans(tokenizer, messages, text):
        # A token that crosses the end belongs to the answer unless they share only blanks.
        solid_end = begin + len(text[begin:end].rstrip())
        response_T |= (end_T > begin) & ((end_T <= end) | (begin_T < solid_end))
    if not response_T.any():
        return None
    return Example(np.array(encoding["input_ids"][:max_length], np.int32), response_T)


def encode_record(
    tokenizer: PreTrainedTokenizerBase, record: dict, vocab_size: int, max_length: int
) -> list[Example]:
    """Encode a record: the token ids of its answers where it holds them, else its messages.

    Empty if no answer token is within `max_length`. Raises InputError for a record of unknown
    style, and as `encode_ids` and `encode` do.
    """
    answers = answers_of(record)
    if answers is not None:
        return encode_ids(answers, vocab_size, max_length)
    example = encode(tokenizer, messages_of(record), max_length)
    return [] if example is None else [example]


def answers_of(record: dict) -> list[dict] | None:
    """The objects of a record that hold `prompt_ids` and `token_ids`; None if it holds no ids.

    A record has a list of them in `answers`, as `train.regenerate` writes it, or is one itself.
    """
    if record.get("token_ids") is not None:  # tables that mix both styles hold None
        return [record]
    answers = _objects(record.get("answers"))
    if not isinstance(answers, list):
        return None
    # Other data sets have a key `answers`, too, and no ids in it.
    has_ids = any(isinstance(each, dict) and "token_ids" in each for each in answers)
    return answers if has_ids else None


def encode_ids(answers: list[dict], vocab_size: int, max_length: int) -> list[Example]:
    """Encode answers as they were decoded: the `token_ids` of each after its `prompt_ids`.

    An answer whose prompt begins with the previous prompt and answer continues that example;
    any other begins an example. Each example is cut to `max_length`, and dropped if no answer
    token is left. Raises InputError for an answer without lists of known ids.
    """
    rows: list[tuple[list[int], list[bool]]] = []
    tokens: list[int] = []
    for answer in answers:
        if not isinstance(answer, dict):
            raise InputError("an answer that is not an object: write prompt_ids and token_ids")
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
    """Raise InputError unless `ids` is a list of ids of the vocabulary."""
    if not isinstance(ids, list) or not all(is_id(each, vocab_size) for each in ids):
        raise InputError(f"ids outside the vocabulary of {vocab_size}: use the target's own")


def encode_text(tokenizer: PreTrainedTokenizerBase, text: str, max_length: int) -> list[Example]:
    """Cut plain text into examples of at most `max_length` tokens, each after the bos token.

    Every token counts as response.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    bos = [] if tokenizer.bos_token_id is None else [tokenizer.bos_token_id]
    stride = max_length - len(bos)
    if stride < 1:
        raise InputError(f"max_length {max_length} leaves no room for text: ask for 2 or more")
    chunks = [bos + ids[start : start + stride] for start in range(0, len(ids), stride)]
    return [Example(np.array(c, np.int32), np.ones(len(c), bool)) for c in chunks]


def prompt_ids(tokenizer: PreTrainedTokenizerBase, messages: list[Message]) -> list[int]:
    """Token ids of a conversation with the generation prompt behind it, ready to be answered.

    Raises InputError without a chat template, and for an empty prompt.
    """
    if not messages or not messages[-1]["content"].strip():
        raise InputError("the prompt is empty: write what the model should answer")
    text = render(tokenizer, messages, generation_prompt=True)
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    if not ids:
        raise InputError("the chat template makes an empty prompt: use --prompt-ids")
    return ids


def pad_id(tokenizer: PreTrainedTokenizerBase, vocab_size: int) -> int:
    """The id that fills rows up: the tokenizer's own, else the last of the model's vocabulary."""
    return vocab_size - 1 if tokenizer.pad_token_id is None else tokenizer.pad_token_id


def render(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], generation_prompt: bool = False
) -> str:
    """The text that the tokenizer's chat template makes of messages; InputError if it cannot."""
    if not tokenizer.chat_template:
        raise InputError(
            "the tokenizer has no chat template: add one to its tokenizer_config.json, "
            "or work with token ids"
        )
    try:
        text = tokenizer.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=generation_prompt
        )
    except Exception as error:  # a template is a program of its own and may raise anything
        reason = first_line(error)
        raise InputError(f"the chat template refuses the messages: {reason}") from error
    if not is_utf8(text):
        raise InputError("the messages are not valid UTF-8: write them in UTF-8")
    return text


def _turns(record: dict) -> list[dict]:
    for style in ("messages", "history", "conversations", "data"):
        if turns := record.get(style):
            break
    else:
        if "instruction" not in record or "output" not in record:
            raise InputError(
                "a record of unknown style: give it `messages`, `history`, `conversations`, "
                "`data`, or `instruction` and `output`"
            )
        question = [str(record[key]).strip() for key in ("instruction", "input") if record.get(key)]
        style, turns = "data", ["\n\n".join(question), str(record["output"] or "").strip()]
    turns = _objects(turns)
    if not isinstance(turns, list | tuple):
        raise InputError(f"a record whose `{style}` is not a list: write a list of messages")
    if style == "data":  # bare texts, in turn
        roles = itertools.cycle(("user", "assistant"))
        return [{"role": role, "content": text} for role, text in zip(roles, turns, strict=False)]
    return list(turns)


def _objects(found: Any) -> Any:
    """A list of objects from a column per key, as TensorFlow Datasets keeps it; else `found`."""
    if not isinstance(found, dict) or not all(isinstance(each, list) for each in found.values()):
        return found
    columns = zip(*found.values(), strict=False)
    return [dict(zip(found, values, strict=True)) for values in columns]


def _role(turn: dict) -> str:
    if not isinstance(turn, dict):
        raise InputError("a message that is not an object: write role and content")
    name = turn.get("role", turn.get("from"))
    if not isinstance(name, str) or name not in ROLES:
        raise InputError(f"a message with role {name!r}: use system, user or assistant")
    return ROLES[name]


def _content(turn: dict) -> str:
    content = turn.get("content", turn.get("value"))
    if not isinstance(content, str) or not content.strip():
        raise InputError("a message without text: fill or remove it")
    return content


def _answer_spans(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], text: str
) -> list[tuple[int, int]]:
    """Where the answers lie in the rendered text, as (begin, end) in characters."""
    spans = []
    for i, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        prompt = render(tokenizer, messages[:i], generation_prompt=True)
        through = text if i + 1 == len(messages) else render(tokenizer, messages[: i + 1])
        if text.startswith(through) and through.startswith(prompt):
            spans.append((len(prompt), len(through)))
        else:
            spans.extend(_marked_span(tokenizer, messages, i, text, prompt))
    return spans


def _marked_span(
    tokenizer: PreTrainedTokenizerBase, messages: list[Message], i: int, text: str, prompt: str
) -> list[tuple[int, int]]:
    """The span of answer `i` under a template that writes earlier turns unlike the last.

    Templates of reasoning models do: they cut thoughts out of all answers but the last. So the
    answer is replaced by a mark, and what stands around the mark stands around the answer too.
    Empty if the template leaves this turn out.
    """
    marked = {**messages[i], "content": MARK}
    around = render(tokenizer, [*messages[:i], marked, *messages[i + 1 :]])
    before, mark, after = around.partition(MARK)
    if not mark:
        return []
    fits = text.startswith(before) and text[len(before) :].endswith(after)
    if MARK in after or not fits:
        raise InputError(
            "the chat template changes its text around an answer with the answer: "
            "use one that writes each turn once"
        )
    end_mark = render(tokenizer, [*messages[:i], marked]).partition(MARK)[2]
    begin = len(prompt) if before.startswith(prompt) else len(before)
    end = len(text) - len(after)
    return [(begin, end + len(end_mark) if after.startswith(end_mark) else end)]
