"""The tokenizer in a GGUF file's metadata, as tokenizer.json and tokenizer_config.json.

    tokenizer.ggml.model   gpt2    byte-level BPE; `pre` names the pattern that splits text first
                           llama   SentencePiece's BPE with bytes; scores rank the merges
    tokenizer.ggml.pre     llama-bpe, qwen2, smollm, gpt-2 and other names of the same patterns

References: llama.cpp's src/llama-vocab.cpp for patterns and defaults; the tokenizer.json files of
Llama 2, Llama 3, Qwen2.5 and SmolLM2.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_jax.errors import InputError, first_line

if TYPE_CHECKING:
    from tokenizers import Tokenizer

Get = Callable[..., Any]  # (key, default=None) -> value of a metadata key

CONTROL, USER_DEFINED = 3, 4  # token types that are matched before text is split
SPACE = "\u2581"  # SentencePiece's symbol for a space

# The patterns differ in the number of digits that stay together.
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
_REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3, QWEN2 = _WORDS + r"\p{N}{1,3}" + _REST, _WORDS + r"\p{N}" + _REST
SPLITS = dict.fromkeys(("llama-bpe", "llama3", "llama-v3", "falcon3", "smaug-bpe"), LLAMA3)
SPLITS |= dict.fromkeys(("qwen2", "deepseek-r1-qwen", "megrez"), QWEN2)
DIGITS = ("smollm", "starcoder", "refact", "command-r", "codeshell")  # GPT-2's, each digit alone
GPT2 = ("gpt-2", "olmo", "jais", "phi-2")


def write_tokenizer(folder: Path, get: Get, where: str) -> None:
    """Write the tokenizer that the metadata describes; `where` names the file in errors.

    Raises InputError for metadata that is incomplete or invalid.
    """
    tokens, kind = _need(get, "tokens", where), _need(get, "model", where)
    if kind not in ("gpt2", "llama"):
        raise InputError(f"{where}: tokenizer {kind!r} is not supported; use one of gpt2, llama")
    if len(set(tokens)) < len(tokens):
        raise InputError(f"{where}: two of its {len(tokens)} tokens are equal; convert it again")
    try:
        tokenizer = (_byte_level if kind == "gpt2" else _sentencepiece)(get, tokens, where)
    except InputError:
        raise
    except Exception as error:  # tokenizers raises plain Exceptions for bad vocabularies
        raise InputError(
            f"{where}: its metadata make no tokenizer ({first_line(error)}); convert it again"
        ) from error
    kinds = _need(get, "token_type", where)
    if len(kinds) != len(tokens):
        raise InputError(
            f"{where}: tokenizer.ggml.token_type has {len(kinds)} entries for {len(tokens)} "
            "tokens; convert it again"
        )
    _add_special(tokenizer, tokens, kinds)
    named = {name: get(f"tokenizer.ggml.{key}_token_id") for name, key in _NAMED.items()}
    settings = {f"{name}_token": tokens[id] for name, id in named.items() if id is not None}
    adds_bos = get("tokenizer.ggml.add_bos_token", kind == "llama" or _pre(get) in _ADDS_BOS)
    if adds_bos and named["bos"] is not None:
        _begin_with(tokenizer, tokens[named["bos"]], named["bos"])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings |= {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "clean_up_tokenization_spaces": False,
        "chat_template": get("tokenizer.chat_template"),
    }
    settings = {key: value for key, value in settings.items() if value is not None}
    content = json.dumps(settings, indent=2, sort_keys=True) + "\n"
    (folder / "tokenizer_config.json").write_text(content, encoding="utf-8")


_NAMED = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
_ADDS_BOS = ("llama-bpe", "llama3", "llama-v3")


def _need(get: Get, key: str, where: str) -> Any:
    if not (value := get(f"tokenizer.ggml.{key}")):
        raise InputError(
            f"{where}: tokenizer.ggml.{key} is missing; convert the model again with its tokenizer"
        )
    return value


def _pre(get: Get) -> str | None:
    return get("tokenizer.ggml.pre")


def _byte_level(get: Get, tokens: Sequence[str], where: str) -> Tokenizer:
    """Byte-level BPE with the split pattern named in the metadata."""
    from tokenizers import Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers

    pre, merges = _need(get, "pre", where), _need(get, "merges", where)
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    gpt2 = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre in SPLITS:
        split = pre_tokenizers.Split(Regex(SPLITS[pre]), "isolated")
        before = pre_tokenizers.Sequence([split, bytes_only])
    elif pre in DIGITS:
        before = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), gpt2])
    elif pre in GPT2:
        before = gpt2
    else:
        known = ", ".join((*SPLITS, *DIGITS, *GPT2))
        raise InputError(
            f"{where}: tokenizer.ggml.pre {pre!r} is not supported; use one of {known}"
        )
    # Llama 3 keeps a word that is a token, even if merges would not produce the token.
    model = models.BPE(
        {token: id for id, token in enumerate(tokens)},
        [tuple(merge.split(" ", 1)) for merge in merges],
        ignore_merges=SPLITS.get(pre) == LLAMA3,
    )
    tokenizer = Tokenizer(model)
    if SPLITS.get(pre) == QWEN2:
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.pre_tokenizer, tokenizer.decoder = before, decoders.ByteLevel()
    return tokenizer


def _sentencepiece(get: Get, tokens: Sequence[str], where: str) -> Tokenizer:
    """SentencePiece's BPE: merges in the order of their scores, with fallback to bytes."""
    from tokenizers import Tokenizer, decoders, models, normalizers

    unknown = get("tokenizer.ggml.unknown_token_id", 0)
    model = models.BPE(
        {token: id for id, token in enumerate(tokens)},
        list(_merges(tokens, _need(get, "scores", where))),
        unk_token=tokens[unknown],
        fuse_unk=True,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    spaces = [normalizers.Replace(" ", SPACE)]
    strips = []
    if get("tokenizer.ggml.add_space_prefix", True):
        spaces, strips = [normalizers.Prepend(SPACE), *spaces], [decoders.Strip(" ", 1, 0)]
    tokenizer.normalizer = normalizers.Sequence(spaces)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse(), *strips]
    )
    return tokenizer


def _merges(tokens: Sequence[str], scores: Sequence[float]) -> Iterator[tuple[str, str]]:
    """Yield all pairs of tokens that form a third, in descending order of that token's score."""
    known = {token: id for id, token in enumerate(tokens)}
    for id in sorted(range(len(tokens)), key=lambda id: -scores[id]):
        token = tokens[id]
        for cut in range(1, len(token)):
            if token[:cut] in known and token[cut:] in known:
                yield token[:cut], token[cut:]


def _add_special(tokenizer: Tokenizer, tokens: Sequence[str], kinds: Sequence[int]) -> None:
    """Mark control and user-defined tokens, which are matched whole in text."""
    from tokenizers import AddedToken

    of_kind = lambda kind: [t for t, found in zip(tokens, kinds, strict=True) if found == kind]
    tokenizer.add_special_tokens([AddedToken(t, normalized=False) for t in of_kind(CONTROL)])
    tokenizer.add_tokens([AddedToken(t, normalized=False) for t in of_kind(USER_DEFINED)])


def _begin_with(tokenizer: Tokenizer, token: str, id: int) -> None:
    from tokenizers.processors import TemplateProcessing

    tokenizer.post_processor = TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B:1", special_tokens=[(token, id)]
    )
