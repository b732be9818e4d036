"""Tokenizers: trains a small byte-level BPE with a chat template, loads any from a folder or hub.

The rendered form of a conversation, with one special token before and after each message:

    <|begin|> <|user|> Hello. <|end|> <|assistant|> Good morning. <|end|>
"""

from __future__ import annotations

import itertools
import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from moa_jax.errors import InputError, first_line
from moa_jax.files.paths import check_folder
from moa_jax.files.turn_ends import chat_template_of

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

BEGIN, USER, ASSISTANT, SYSTEM, END, PAD = SPECIAL_TOKENS = (
    "<|begin|>",
    "<|user|>",
    "<|assistant|>",
    "<|system|>",
    "<|end|>",
    "<|pad|>",
)
SMALLEST_VOCAB = len(SPECIAL_TOKENS) + 256  # every byte has a token, so no text is unknown

CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% for message in messages %}"
    "{% if message['role'] not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('a message has the role ' ~ message['role']) }}"
    "{% endif %}"
    "{{ '<|' ~ message['role'] ~ '|>' ~ message['content'] | trim ~ eos_token }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


def train_tokenizer(texts: Iterator[str], vocab_size: int, folder: str | Path) -> None:
    """Train a byte-level BPE of at most `vocab_size` tokens and save a Hugging Face folder.

    Special tokens have the ids 0 to 5, bytes follow, then merges; each digit is its own token.
    Raises InputError for a vocabulary below 262, for an existing folder, and without text.
    """
    if vocab_size < SMALLEST_VOCAB:
        raise InputError(
            f"a vocabulary of {vocab_size} cannot hold 256 bytes and {len(SPECIAL_TOKENS)} special "
            f"tokens; ask for {SMALLEST_VOCAB} or more"
        )
    folder = Path(folder)
    check_folder(folder)
    if folder.exists():
        raise InputError(f"{folder} exists already; choose another folder or remove it")
    texts = iter(texts)
    first = next((text for text in texts if text.strip()), None)
    if first is None:
        raise InputError(f"no text to train the tokenizer {folder} on; check the data's paths")
    folder.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".tokenizer-") as scratch:
        unfinished = Path(scratch) / "tokenizer"
        unfinished.mkdir()
        _train_bpe(itertools.chain([first], texts), vocab_size).save(
            str(unfinished / "tokenizer.json")
        )
        settings = json.dumps(_settings(), indent=2) + "\n"
        (unfinished / "tokenizer_config.json").write_text(settings, encoding="utf-8")
        os.rename(unfinished, folder)


def load_tokenizer(path: str | Path) -> PreTrainedTokenizerBase:
    """Load the fast tokenizer of a Hugging Face folder or hub id; raises InputError without one."""
    # Without torch, transformers prints advice to install it on stderr.
    os.environ.setdefault("TRANSFORMERS_NO_ADVISORY_WARNINGS", "1")
    from transformers import AutoTokenizer

    if Path(path).is_dir() and not (Path(path) / "tokenizer.json").is_file():
        raise InputError(f"{path} holds no tokenizer.json; name a folder with a fast tokenizer")
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(path))
    except Exception as error:  # transformers and huggingface_hub raise a dozen unrelated types
        raise InputError(
            f"cannot load the tokenizer {path}; name a folder that holds tokenizer.json, "
            f"or a hub id while there is a network ({first_line(error)})"
        ) from error
    if not tokenizer.chat_template:  # chat_template.json is a processor's file
        tokenizer.chat_template = chat_template_of(Path(path))
    return tokenizer


def _train_bpe(texts: Iterator[str], vocab_size: int):
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL_TOKENS),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer=trainer)
    return tokenizer


def _settings() -> dict:
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",  # supported by transformers 4 and 5
        "bos_token": BEGIN,
        "eos_token": END,
        "pad_token": PAD,
        "additional_special_tokens": [USER, ASSISTANT, SYSTEM],
        "clean_up_tokenization_spaces": False,
        "chat_template": CHAT_TEMPLATE,
    }
