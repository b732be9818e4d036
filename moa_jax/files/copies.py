"""Duplicate tensors: compared before one of them is ignored.

Two stored tensors are copies if they are equal after a cast to the dtype of either one: a bfloat16
file of a float32 model is a copy, and so is a float16 file of a bfloat16 model. Dequantized values
are compared with a tolerance, since quantization rounds more than any cast.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np

from moa_jax.config import BlockConfig, TargetConfig
from moa_jax.errors import InputError
from moa_jax.files import model_folder, tensor_reader
from moa_jax.files.casts import to_dtype
from moa_jax.files.tensor_reader import TensorReader
from moa_jax.model.convert import Shape
from moa_jax.model.layers import inverse_frequencies

EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
PIECE = 1 << 22  # numbers compared at a time, to limit memory
# Relative error of a tensor: about 0.3 from two-bit quantization, 1.4 for another model's tensor.
MOST_QUANTISED = 0.5


def same(one: np.ndarray, other: np.ndarray, quantized: bool = False) -> bool:
    """Whether two tensors are copies, over the rows that both have, compared in small pieces.

    `quantized`: one of the tensors was dequantized.
    """
    if one.shape[1:] != other.shape[1:]:
        return False
    if quantized:
        parts = [_squares(*piece) for piece in _pieces(one, other)]
        error, size = np.sum(parts, axis=0)
        return bool(error <= MOST_QUANTISED**2 * size)
    ways = {one.dtype, other.dtype}  # a copy may have a narrower or a wider dtype
    for a, b in _pieces(one, other):
        ways = {dtype for dtype in ways if _equal(to_dtype(a, dtype), to_dtype(b, dtype))}
        if not ways:
            return False
    return True


def with_own_head(
    cfg: TargetConfig, shapes: Mapping[str, Shape], read: Callable[[str], np.ndarray]
) -> TargetConfig:
    """The config of a model, untied if its files hold a head that differs from the embedding.

    References: transformers 5 then loads both tensors, regardless of `tie_word_embeddings`.
    """
    both = EMBEDDING in shapes and HEAD in shapes
    if not cfg.tie_word_embeddings or not both:
        return cfg
    if shapes[EMBEDDING] == shapes[HEAD] and same(read(EMBEDDING), read(HEAD)):
        return cfg
    return dataclasses.replace(cfg, tie_word_embeddings=False)


def differing(
    reader: TensorReader, of_target: TensorReader, copies: Mapping[str, str]
) -> Iterator[tuple[str, str]]:
    """Yield the copies in a drafter's files that differ, each with the name of the target's tensor.

    `copies` maps tensor names of the drafter to tensor names of the target. Tensors that the
    drafter's or the target's folder omits are skipped.
    """
    for name, original in copies.items():
        if original == HEAD and HEAD not in of_target.shapes:
            original = EMBEDDING  # the target is tied
        if name not in reader.shapes or original not in of_target.shapes:
            continue
        quantized = of_target.stored(original).dtype not in tensor_reader.FLOATS
        if not same(reader.read(name), of_target.read(original), quantized):
            yield name, original


def check_files(folder: Path) -> None:
    """Raise InputError if two files of a folder hold different tensors under one name.

    Also refuses an adapter beside the weights, which transformers would apply.
    """
    if (adapter := folder / "adapter_config.json").is_file():
        raise InputError(
            f"{adapter}: an adapter is not read; merge it into the weights and remove this file"
        )
    seen: dict[str, TensorReader] = {}
    for reader in model_folder.readers_of_files(folder):
        for name in reader.shapes:
            first = seen.setdefault(name, reader)
            if first is reader:
                continue
            if first.shapes[name] != reader.shapes[name] or not same(
                first.read(name), reader.read(name)
            ):
                raise InputError(
                    f"{first.file_of[name]} and {reader.file_of[name]} hold different tensors "
                    f"{name}; remove the file that does not belong to this model"
                )


def check_rotary(
    shapes: Iterable[str], read: Callable[[str], np.ndarray], block: BlockConfig
) -> None:
    """Raise InputError for a stored table of rotary frequencies that contradicts config.json.

    Old files hold such tables, unscaled or scaled. float16 rounds the lowest frequencies of a base
    of 500,000 by 2.5 %, so the tolerance is 5 %.
    """
    scalings = (None, block.rope_scaling)
    tables = [inverse_frequencies(block.head_dim, block.rope_theta, each) for each in scalings]
    for name in rotary_tables(shapes):
        stored = np.asarray(read(name), np.float32).reshape(-1)
        if not any(
            stored.shape == table.shape and np.allclose(stored, table, rtol=0.05, atol=1e-7)
            for table in tables
        ):
            raise InputError(
                f"{name} is not the table of rope_theta {block.rope_theta:g} in config.json; use "
                "the config.json of these weights"
            )


def rotary_tables(names: Iterable[str]) -> list[str]:
    """Names of stored tables of rotary frequencies."""
    return [name for name in names if name.endswith("rotary_emb.inv_freq")]


def _pieces(one: np.ndarray, other: np.ndarray) -> Iterator[tuple[np.ndarray, np.ndarray]]:
    """Yield both tensors flat, over the rows that both have, `PIECE` numbers at a time."""
    numbers = min(one.size, other.size)
    one, other = one.reshape(-1), other.reshape(-1)
    for start in range(0, numbers, PIECE):
        piece = slice(start, min(start + PIECE, numbers))
        yield one[piece], other[piece]


def _equal(one: np.ndarray, other: np.ndarray) -> bool:
    """Whether all values are equal, NaN included; comparing bits is faster than numbers."""
    bits = f"u{one.itemsize}"
    if np.array_equal(one.view(bits), other.view(bits)):
        return True
    if one.dtype.kind in "iub":
        return False
    wide = np.promote_types(one.dtype, np.float32)
    return np.array_equal(one.astype(wide), other.astype(wide), equal_nan=True)


def _squares(one: np.ndarray, other: np.ndarray) -> tuple[float, float]:
    """Sums of squares of the difference and of the second tensor."""
    a, b = one.astype(np.float32), other.astype(np.float32)
    return float(np.sum((a - b) ** 2, dtype=np.float64)), float(np.sum(b * b, dtype=np.float64))
