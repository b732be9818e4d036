"""Draft vocabularies, the target's tokens that a drafter may propose, and their files.

Most text uses a small part of the target's tokens, so a drafter that scores only frequent tokens
reads a slice of the target's head. The target still verifies over its whole vocabulary, so the
output stays the same; a token outside the slice only ends a draft early. A drafter's folder may
contain such a vocabulary in a file of a fixed name. Axis U is the draft vocabulary, in the order of
target ids. The file format is that of EAGLE-3:

    target id    0  1  2  3  4  5  6  7          ids_U   1  4  5
    t2d          .  x  .  .  x  x  .  .          d2t     1  3  3     target = draft + d2t[draft]
    draft id        0        1  2

References: FR-Spec (arXiv 2502.14856) for the ranking; EAGLE-3 (arXiv 2503.01840) for the files.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save

from moa_jax.errors import InputError, first_line
from moa_jax.files import token_ids, whole_files
from moa_jax.pretrained import LoadedDrafter, Target, functions_of

FILE = "draft_vocabulary.safetensors"  # in a drafter's folder
_D2T, _T2D, _VOCABULARY = "d2t", "t2d", "vocabulary"
_FILE_SHA256 = "tokenizer_sha256"  # hash of tokenizer.json, in files of earlier versions
_DTYPES = {_D2T: ("I64", "I32"), _T2D: ("BOOL",)}


class DraftVocabulary(NamedTuple):
    """The target's tokens that may be drafted, with the size and fingerprint of its vocabulary."""

    ids_U: np.ndarray  # int32, ascending target ids
    vocab_size: int  # of the target
    fingerprint: str | None = None  # of the target's tokenizer (`files/token_ids.py`), if known
    file: Path | None = None  # the file that holds the vocabulary


def vocabulary_of(ids_U: np.ndarray, target: Target) -> DraftVocabulary:
    """Returns the draft vocabulary of these ids, with the fingerprint of the target's tokenizer."""
    tokens = token_ids.read_token_ids(target.folder)
    fingerprint = None if tokens is None else token_ids.fingerprint(tokens)
    return DraftVocabulary(ids_U, target.config.vocab_size, fingerprint)


def count_tokens(token_lists: Iterable[Sequence[int]], vocab_size: int) -> np.ndarray:
    """Counts each token, int64 (V,); raises InputError for an id outside the vocabulary."""
    count_V = np.zeros(vocab_size, np.int64)
    for tokens in token_lists:
        ids = np.asarray(tokens, np.int64)
        _check_inside(ids, vocab_size, "the text")
        np.add.at(count_V, ids, 1)
    return count_V


def most_frequent(count_V: np.ndarray, size: int, always: Sequence[int] = ()) -> np.ndarray:
    """Returns the `size` ids with the highest counts, including `always`: int32 (U,), ascending.

    `always` are ids to keep, such as end-of-text ids. Among equal counts the lower id comes first.
    Raises InputError as `check_size`.
    """
    check_size(size, len(count_V), always)
    needed = np.unique(np.asarray(always, np.int64))
    rank_V = np.argsort(-count_V, kind="stable")
    others = rank_V[~np.isin(rank_V, needed)]
    return np.union1d(needed, others[: size - len(needed)]).astype(np.int32)


def check_size(size: int, vocab_size: int, always: Sequence[int] = ()) -> None:
    """Raises InputError unless `size` is between the number of `always` ids and `vocab_size`.

    Also raises InputError for a size of 0, and for an id in `always` outside the vocabulary.
    """
    _check_inside(np.asarray(always, np.int64), vocab_size, "the list of ids to keep")
    least = max(1, len(set(always)))
    if least <= size <= vocab_size:
        return
    reason = f"{least} must be in it" if size < least else f"the target has {vocab_size} tokens"
    raise InputError(
        f"a draft vocabulary of {size}: {reason}; ask for a size from {least} to {vocab_size}"
    )


def coverage(count_V: np.ndarray, ids_U: np.ndarray) -> float:
    """Returns the share of counted tokens in the draft vocabulary, 0 to 1; 0 without any counts."""
    return float(count_V[ids_U].sum() / max(count_V.sum(), 1))


def save_vocabulary(path: str | os.PathLike[str], vocabulary: DraftVocabulary) -> Path:
    """Writes `content_of` a vocabulary to a file, replacing an existing file.

    The write is atomic. Raises OSError if the file cannot be written.
    """
    path = Path(path).expanduser()
    path.parent.mkdir(parents=True, exist_ok=True)
    whole_files.write_whole(path, content_of(vocabulary))
    return path


def content_of(vocabulary: DraftVocabulary) -> bytes:
    """Returns the bytes of a vocabulary's file: d2t (int64), t2d (bool), tokenizer fingerprint.

    The bytes are deterministic, because the file has at most one entry of metadata; safetensors
    writes several entries in any order.
    """
    ids = vocabulary.ids_U.astype(np.int64)
    t2d_V = np.zeros(vocabulary.vocab_size, bool)
    t2d_V[ids] = True
    metadata = {_VOCABULARY: vocabulary.fingerprint} if vocabulary.fingerprint else None
    return save({_D2T: ids - np.arange(len(ids)), _T2D: t2d_V}, metadata)


def vocabulary_beside(target: Target, drafter: LoadedDrafter) -> DraftVocabulary | None:
    """Returns the draft vocabulary in a drafter's folder; None if the folder has no such file.

    Programs draft from these tokens by default, since `train.distill` may have trained the drafter
    for these tokens only. A drafter with a head of its own does not use the target's head, so the
    result is None. Raises InputError as `load_vocabulary`.
    """
    path = drafter.folder / FILE
    if functions_of(drafter, target.config).own_head or not path.is_file():
        return None
    return load_vocabulary(path, target)


def load_vocabulary(path: str | os.PathLike[str], target: Target) -> DraftVocabulary:
    """Loads a safetensors file, or a folder's draft_vocabulary.safetensors, for this target.

    The file needs d2t or t2d, and its other tensors are ignored. Raises InputError for a file that
    cannot be read or has neither tensor, for invalid ids of this target, and for a vocabulary of
    another tokenizer.
    """
    file = _find(path)
    d2t_U, t2d_V, metadata = _read(file)
    tokens, stated = token_ids.read_token_ids(target.folder), metadata.get(_VOCABULARY)
    file_sha256 = metadata.get(_FILE_SHA256)
    same = token_ids.is_same(target.folder, tokens, stated, file_sha256)
    known = None if tokens is None else token_ids.fingerprint(tokens)
    if same is False:
        raise InputError(
            f"this draft vocabulary was made for another tokenizer: {file} states the vocabulary "
            f"(ids:sha256) {stated} and the target's is {known}; make one for this target with "
            "train.vocabulary"
        )
    vocab_size = target.config.vocab_size
    if same and t2d_V is not None and not t2d_V[vocab_size:].any():
        # Models of one tokenizer have embeddings with more or fewer unused rows.
        t2d_V = np.pad(t2d_V[:vocab_size], (0, max(vocab_size - len(t2d_V), 0)))
    if d2t_U is not None:
        ids = _ids_of_d2t(d2t_U, vocab_size, file)
    if t2d_V is not None:
        marked = _ids_of_t2d(t2d_V, vocab_size, file)
        if d2t_U is not None and not np.array_equal(ids, marked):
            raise InputError(
                f"{file}: {_D2T} gives {len(ids)} ids and {_T2D} marks {len(marked)}, not the same "
                "ones; make it anew with train.vocabulary"
            )
        ids = marked
    if not len(ids):
        raise InputError(f"{file} holds no ids; make it anew with train.vocabulary")
    if same is None and tokens is not None and file_sha256 is not None:
        token_ids.notice_unknown(file)
    return DraftVocabulary(ids.astype(np.int32), vocab_size, known if same else stated, file)


def _find(path: str | os.PathLike[str]) -> Path:
    found = Path(path).expanduser()
    if not found.is_dir():
        return found
    if not (found / FILE).is_file():
        raise InputError(f"{found} holds no {FILE}; name the file itself")
    return found / FILE


def _read(file: Path) -> tuple[np.ndarray | None, np.ndarray | None, dict[str, str]]:
    """Reads d2t_U and t2d_V, None for a tensor that is not in the file, and the file's metadata."""
    try:
        with safe_open(file, framework="np") as tensors:
            names = set(tensors.keys())
            if not names & {_D2T, _T2D}:
                raise InputError(
                    f"{file} holds neither {_D2T} nor {_T2D}; make one with train.vocabulary"
                )
            d2t_U, t2d_V = (
                _vector(tensors, name, file) if name in names else None for name in (_D2T, _T2D)
            )
            return d2t_U, t2d_V, tensors.metadata() or {}
    except FileNotFoundError as error:
        raise InputError(f"no draft vocabulary {file}; check the path") from error
    except (SafetensorError, OSError) as error:
        raise InputError(
            f"{file} cannot be read as safetensors ({first_line(error)}); "
            "make it with train.vocabulary, or fetch it again"
        ) from error


def _vector(tensors: Any, name: str, file: Path) -> np.ndarray:
    """Reads a tensor; raises InputError unless it has one axis and the dtype required by `name`."""
    found = tensors.get_slice(name)
    shape, dtype = found.get_shape(), found.get_dtype()
    if len(shape) != 1 or dtype not in _DTYPES[name]:
        raise InputError(
            f"{file}: {name} is {dtype} of shape {shape}; it must be {_DTYPES[name][0]} with one "
            "axis: make it anew with train.vocabulary"
        )
    return tensors.get_tensor(name)


def _ids_of_d2t(d2t_U: np.ndarray, vocab_size: int, file: Path) -> np.ndarray:
    """Returns the target ids, ascending; the order of ids in a foreign head does not matter."""
    ids = np.sort(d2t_U.astype(np.int64) + np.arange(len(d2t_U)))
    _check_inside(ids, vocab_size, f"{file}: {_D2T}")
    twice = ids[1:][ids[1:] == ids[:-1]]
    if len(twice):
        raise InputError(
            f"{file}: {_D2T} gives the id {twice[0]} more than once; store the target id less the "
            "draft id in each place"
        )
    return ids


def _ids_of_t2d(t2d_V: np.ndarray, vocab_size: int, file: Path) -> np.ndarray:
    if len(t2d_V) != vocab_size:
        raise InputError(
            f"{file}: {_T2D} has {len(t2d_V)} entries and the target {vocab_size} tokens; "
            "use the draft vocabulary of this target"
        )
    return np.flatnonzero(t2d_V)


def _check_inside(ids: np.ndarray, vocab_size: int, what: str) -> None:
    outside = ids[(ids < 0) | (ids >= vocab_size)]
    if len(outside):
        raise InputError(
            f"{what} holds the id {outside[0]}, which is outside the vocabulary of {vocab_size}; "
            "use what belongs to this target"
        )
