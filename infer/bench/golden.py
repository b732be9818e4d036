"""Golden files: a reference's logits after each token of some prompts, for `infer.check`.

A file has one JSON line for the header and one per prompt:

    {"format": "moa-jax golden", "version": 1, "made_by", "dtype", "top": K, "prompts": N,
     "target": {"vocab_size", "hidden_size", ...}, "vocabulary_sha256"}
    {"prompt_ids": [...], "token_ids": [...], "ids": [[K ids], ...], "logits": [[K + 1], ...]}

`token_ids` is the answer after the prompt. Each of the T positions of prompt and answer has the
`ids` of the top-K tokens, most likely first, and their `logits`, to six decimals. The last logit is
the logsumexp of all other tokens' logits. A position takes about 500 bytes; the full logits of a
vocabulary of 49,152 would take 500,000. KL over the K tokens and the rest is a lower bound of KL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infer.bench.fidelity import TopLogits
from moa_jax.data import chat, sources
from moa_jax.errors import InputError
from moa_jax.files.model_folder import json_hash
from moa_jax.files.registry import target_sizes
from moa_jax.files.token_ids import read_token_ids
from moa_jax.files.whole_files import write_whole
from moa_jax.pretrained import Target

FORMAT, VERSION = "moa-jax golden", 1
# On SmolLM2 the top 32 tokens hold 0.97 of the probability at the median position, 0.91 on average;
# KL of int8 weights over these tokens and the rest is 0.0049 nats, and the full KL is 0.0058.
TOP = 32


class GoldenPrompt(NamedTuple):
    """A prompt, its answer, and the reference's logits after every token of both."""

    prompt_ids: list[int]
    token_ids: list[int]
    top: TopLogits


class Golden(NamedTuple):
    """The header and the prompts of a golden file."""

    header: Mapping[str, Any]
    prompts: list[GoldenPrompt]


def model_of(target: Target) -> dict[str, Any]:
    """The part of a header that describes a target: its sizes and its vocabulary."""
    tokens = read_token_ids(target.folder)
    return {
        "target": target_sizes(target.config),
        "vocabulary_sha256": None if tokens is None else json_hash(tokens),
    }


def check_replaceable(path: Path) -> None:
    """Raises InputError for an existing file that is not a golden file, such as the prompts."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        is_golden = FORMAT.encode() in file.readline(64)
    if not is_golden:
        raise InputError(f"--write-golden {path}: not a golden file; choose another path")


def write(path: Path, about: Mapping[str, Any], prompts: Sequence[GoldenPrompt]) -> None:
    """Writes a file atomically; `about` has `made_by`, `dtype` and the entries of `model_of`."""
    top = prompts[0].top.ids_TK.shape[1]
    header = {"format": FORMAT, "version": VERSION, **about, "top": top, "prompts": len(prompts)}
    write_whole(path, "".join(json.dumps(line) + "\n" for line in [header, *map(_line, prompts)]))


def read(path: Path, target: Target) -> Golden:
    """Reads a file; raises InputError for a damaged file or another target's file."""
    lines = list(sources.read_numbered(str(path)))
    header = lines[0][1] if lines else {}
    again, count = "write it again with --write-golden", header.get("prompts")
    if header.get("format") != FORMAT:
        raise InputError(f"{path} is not a golden file; write one with --write-golden")
    if (version := header.get("version")) != VERSION:
        raise InputError(f"{path} has the format version {version}, not {VERSION}: {again}")
    types = {"target": dict, "vocabulary_sha256": str | None, "made_by": str}
    if not all(isinstance(header.get(key), kind) for key, kind in types.items()):
        raise InputError(f"{path} has a damaged first line: {again}")
    _check_model(path, header, model_of(target))
    if len(lines) < 2 or len(lines) - 1 != count:
        raise InputError(f"{path} holds {len(lines) - 1} of {count} prompts: {again}")
    vocab_size = target.config.vocab_size
    return Golden(header, [_prompt(place, line, vocab_size) for place, line in lines[1:]])


def _check_model(path: Path, header: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises InputError for another target's sizes, or for different vocabularies if both have one.

    With equal vocabularies, `vocab_size` may differ: embeddings may have different sizes.
    """
    hashes = [each["vocabulary_sha256"] for each in (header, ours)]
    stated, known = dict(header["target"]), dict(ours["target"])
    if None not in hashes:
        stated["vocabulary"], known["vocabulary"] = (each[:12] for each in hashes)
        if hashes[0] == hashes[1]:
            del known["vocab_size"]
    for key, value in known.items():
        if stated.get(key) != value:
            raise InputError(
                f"{path} was made with another target: {key} is {stated.get(key)} in the file and "
                f"{value} in the target; choose the target's own golden file"
            )


def _line(prompt: GoldenPrompt) -> dict[str, Any]:
    logits_TN = np.round(np.asarray(prompt.top.logits_TN, np.float64), 6)
    ids_TK = np.asarray(prompt.top.ids_TK)
    tokens = {"prompt_ids": prompt.prompt_ids, "token_ids": prompt.token_ids}
    return tokens | {"ids": ids_TK.tolist(), "logits": logits_TN.tolist()}


def _prompt(place: str, line: Mapping[str, Any], vocab_size: int) -> GoldenPrompt:
    """The prompt of a line; raises InputError with the line's place."""
    try:
        ids_TK, logits_TN = np.array(line["ids"]), np.array(line["logits"], np.float32)
        prompt, answer = line["prompt_ids"], line["token_ids"]
        chat.check_ids([*prompt, *answer, *ids_TK.ravel().tolist()], vocab_size)
        T, K = ids_TK.shape
        sound = len(prompt) > 0 and len(prompt) + len(answer) == T and K > 0
        sound &= logits_TN.shape == (T, K + 1) and bool(np.isfinite(logits_TN).all())
    except (KeyError, TypeError, ValueError, OverflowError, InputError):
        sound = False
    if not sound:
        raise InputError(f"{place} is not a prompt of a golden file; write it again")
    return GoldenPrompt(prompt, answer, TopLogits(ids_TK.astype(np.int32), logits_TN))
