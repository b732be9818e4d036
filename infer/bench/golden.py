"""Golden files: a reference's logits after each token of some prompts, for `infer.check`.

A file has a line for the header and a line for each prompt, all of them JSON:

    {"format": "moa-jax golden", "version": 1, "made_by", "dtype", "top": K, "prompts": N,
     "target": {"vocab_size", "hidden_size", ...}, "vocabulary_sha256"}
    {"prompt_ids": [...], "token_ids": [...], "ids": [[K ids], ...], "logits": [[K + 1], ...]}

`token_ids` is the answer after the prompt. Of each of the T positions of both there are the `ids`
of the K most likely tokens, most likely first, and their `logits`, to six decimals. The last logit
is the logsumexp of those of all other tokens. A position takes some 500 bytes, where the logits of
a vocabulary of 49,152 would take 500,000. KL over the K tokens and the rest is a lower bound of KL.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from infer.bench.fidelity import TopLogits
from moa_jax.data import corpora
from moa_jax.errors import InputError
from moa_jax.files.folders import json_hash, write_whole
from moa_jax.files.kinds import target_sizes
from moa_jax.files.token_ids import read_token_ids
from moa_jax.pretrained import Target

FORMAT, VERSION = "moa-jax golden", 1
# On SmolLM2 the 32 most likely tokens hold 0.97 of the probability at a median position, 0.91 on
# average; KL of int8 weights over them and the rest is 0.0049 nats, where the whole is 0.0058.
TOP = 32


class GoldenPrompt(NamedTuple):
    """A prompt, its answer, and the reference's logits after each of their tokens."""

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
    """Raises InputError for a file that is not a golden file, such as the prompts themselves."""
    if not path.is_file() or not path.stat().st_size:
        return
    with path.open("rb") as file:
        is_golden = FORMAT.encode() in file.readline(64)
    if not is_golden:
        raise InputError(f"--write-golden {path}: not a golden file; choose another path")


def write(path: Path, about: Mapping[str, Any], prompts: Sequence[GoldenPrompt]) -> None:
    """Writes a file as a whole; `about` has `made_by`, `dtype` and what `model_of` gives."""
    top = prompts[0].top.ids_TK.shape[1]
    header = {"format": FORMAT, "version": VERSION, **about, "top": top, "prompts": len(prompts)}
    write_whole(path, "".join(json.dumps(line) + "\n" for line in [header, *map(_line, prompts)]))


def read(path: Path, target: Target) -> Golden:
    """Reads a file; raises InputError if it is damaged, or was made with another target."""
    lines = list(corpora.read_numbered(str(path)))
    header = lines[0][1] if lines else {}
    if header.get("format") != FORMAT:
        raise InputError(f"{path} is not a golden file: write one with --write-golden")
    if header.get("version") != VERSION:
        raise InputError(
            f"{path} has the format version {header.get('version')}, and this program reads "
            f"{VERSION}: write it again with --write-golden"
        )
    if not (
        isinstance(header.get("target"), dict)
        and isinstance(header.get("vocabulary_sha256"), str | None)
        and isinstance(header.get("made_by"), str)
    ):
        raise InputError(f"{path} has a damaged first line: write it again with --write-golden")
    _check_model(path, header, model_of(target))
    if len(lines) < 2 or len(lines) - 1 != header.get("prompts"):
        raise InputError(
            f"{path} holds {len(lines) - 1} of {header.get('prompts')} prompts: write it again "
            "with --write-golden"
        )
    vocab_size = target.config.vocab_size
    return Golden(header, [_prompt(place, line, vocab_size) for place, line in lines[1:]])


def _check_model(path: Path, header: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raises InputError for another target's sizes, or another vocabulary where both have one.

    The same vocabulary may have embeddings of different sizes.
    """
    stated, known = dict(header.get("target") or {}), dict(ours["target"])
    for each, source in ((stated, header), (known, ours)):
        each["vocabulary"] = (source.get("vocabulary_sha256") or "")[:12] or None
    if known["vocabulary"] is not None and stated["vocabulary"] == known["vocabulary"]:
        del known["vocab_size"]
    for key, value in known.items():
        both_known = key != "vocabulary" or None not in (stated[key], value)
        if both_known and stated.get(key) != value:
            raise InputError(
                f"{path} was made with another target: {key} is {stated.get(key)} in the file and "
                f"{value} in the target: choose the target's own golden file"
            )


def _line(prompt: GoldenPrompt) -> dict[str, Any]:
    logits_TN = np.round(np.asarray(prompt.top.logits_TN, np.float64), 6)
    ids_TK = np.asarray(prompt.top.ids_TK)
    tokens = {"prompt_ids": prompt.prompt_ids, "token_ids": prompt.token_ids}
    return tokens | {"ids": ids_TK.tolist(), "logits": logits_TN.tolist()}


def _prompt(place: str, line: Mapping[str, Any], vocab_size: int) -> GoldenPrompt:
    """The prompt of a line; raises InputError that names the line."""
    try:
        given = [np.array(line[key]) for key in ("prompt_ids", "token_ids", "ids")]
        # An empty answer has no dtype of its own.
        whole = all(each.dtype.kind == "i" for each in given if each.size)
        prompt, answer, ids_TK = (each.astype(np.int32) for each in given)
        logits_TN = np.array(line["logits"], np.float32)
        T, K = ids_TK.shape
        sound = whole and prompt.ndim == answer.ndim == 1 and len(prompt) > 0 and K > 0
        sound &= len(prompt) + len(answer) == T and logits_TN.shape == (T, K + 1)
        ids = np.concatenate([prompt, answer, ids_TK.ravel()])
        sound &= bool(
            (0 <= ids).all() and (ids < vocab_size).all() and np.isfinite(logits_TN).all()
        )
    except (KeyError, TypeError, ValueError, OverflowError):
        sound = False
    if not sound:
        raise InputError(f"{place} is not a prompt of a golden file: write it again")
    return GoldenPrompt(prompt.tolist(), answer.tolist(), TopLogits(ids_TK, logits_TN))
