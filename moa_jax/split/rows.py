"""Encodes rows of verified tokens as bytes and decodes them for the client's caches.

The leaves of the digest are concatenated in tree order. Encodings of T tokens of one leaf:

    float32    T x shape numbers of 4 bytes
    bfloat16   T x shape numbers of 2 bytes, rounded
    int8       a float32 scale per vector along the last axis, then T x shape bytes

Numbers are little-endian and stored in planes: all first bytes, then all second bytes, and so on.
Planes put exponents next to each other, which compresses well. Compressed rows are a zlib stream
with Huffman codes only: byte strings hardly repeat in the numbers, so string matching is slower
and gains nothing. Rows affect drafts only: a lossy codec lowers acceptance, never exactness.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np

from moa_jax.split.protocol import BadMessage, Codec

# The largest finite bfloat16; larger numbers would be encoded as infinity.
LARGEST = float(ml_dtypes.finfo(ml_dtypes.bfloat16).max)
SMALLEST_SCALE = np.finfo(np.float32).tiny  # also the scale of vectors of zeros
LARGEST_SCALE = np.float32(LARGEST) / np.float32(127)
DTYPES = {"float32": np.dtype("<f4"), "bfloat16": np.dtype(ml_dtypes.bfloat16)}


class LeafSpec(NamedTuple):
    """One array of a digest."""

    shape: tuple[int, ...]  # of one token's row, for example (KV heads, head size)
    dtype: Any  # of the client's cache


def bytes_per_token(specs: Sequence[LeafSpec], codec: Codec) -> int:
    """Size of one token's rows in bytes before compression."""
    return sum(_leaf_bytes(spec.shape, codec) for spec in specs)


def pack(rows: Sequence[np.ndarray], codec: Codec, compress: bool) -> bytes:
    """Encodes the rows (T, ...) of every leaf, of any float dtype; T = 0 encodes as b"".

    All encoded numbers are finite: NaN becomes 0, and magnitudes are clipped to the largest
    bfloat16.
    """
    data = b"".join(_packed(row, codec) for row in rows)
    if not compress or not data:
        return data
    stream = zlib.compressobj(level=1, strategy=zlib.Z_HUFFMAN_ONLY)
    return stream.compress(data) + stream.flush()


def unpack(
    data: bytes, count: int, specs: Sequence[LeafSpec], codec: Codec, compress: bool
) -> list[np.ndarray]:
    """Decodes the float32 rows (count, ...) of every leaf.

    Raises BadMessage for bytes that are not exactly these rows. Allocates no more memory than
    `count` tokens take; `MessageLimits.max_rows` bounds `count`.
    """
    size = count * bytes_per_token(specs, codec)
    if compress and size:
        data = _decompressed(data, size)
    if len(data) != size:
        raise BadMessage(f"rows of {count} tokens take {size} bytes, not {len(data)}")
    view, rows, start = memoryview(data), [], 0
    for shape in (spec.shape for spec in specs):
        end = start + count * _leaf_bytes(shape, codec)
        rows.append(_unpacked(view[start:end], (count, *shape), codec))
        start = end
    return rows


def _leaf_bytes(shape: tuple[int, ...], codec: Codec) -> int:
    if codec == "int8":
        return math.prod(shape) + 4 * math.prod(shape[:-1])
    return math.prod(shape) * DTYPES[codec].itemsize


def _packed(row: np.ndarray, codec: Codec) -> bytes:
    row = np.clip(np.nan_to_num(row.astype(np.float32)), -LARGEST, LARGEST)
    if codec != "int8":
        return _planes(row.astype(DTYPES[codec]))
    peaks = np.abs(row).max(axis=-1, keepdims=True, initial=0)
    scales = np.maximum(peaks / np.float32(127), SMALLEST_SCALE)
    return (
        _planes(scales.astype(DTYPES["float32"])) + np.rint(row / scales).astype(np.int8).tobytes()
    )


def _planes(row: np.ndarray) -> bytes:
    return row.reshape(-1, 1).view(np.uint8).T.tobytes()


def _from_planes(data: memoryview, dtype: np.dtype) -> np.ndarray:
    """The flat array that `_planes` encoded."""
    planes = np.frombuffer(data, np.uint8).reshape(dtype.itemsize, -1)
    return np.ascontiguousarray(planes.T).view(dtype)[:, 0]


def _unpacked(data: memoryview, shape: tuple[int, ...], codec: Codec) -> np.ndarray:
    """Decodes one leaf; `data` holds exactly its bytes."""
    if codec == "int8":
        split = 4 * math.prod(shape[:-1])
        scales = _from_planes(data[:split], DTYPES["float32"]).reshape(*shape[:-1], 1)
        if not np.all((scales >= 0) & (scales <= LARGEST_SCALE)):
            raise BadMessage("rows have a scale that is negative or not finite")
        return scales * np.frombuffer(data[split:], np.int8).reshape(shape)
    row = _from_planes(data, DTYPES[codec]).reshape(shape).astype(np.float32)
    if not np.isfinite(row).all():
        raise BadMessage("rows hold a number that is not finite")
    return row


def _decompressed(data: bytes, size: int) -> bytes:
    """Decompresses data; raises BadMessage unless the stream holds exactly `size` bytes."""
    stream = zlib.decompressobj()
    try:
        found = stream.decompress(data, size + 1)  # one byte more, to detect a longer stream
    except zlib.error:
        raise BadMessage("rows are not a zlib stream") from None
    if len(found) > size or not stream.eof or stream.unused_data:
        raise BadMessage(f"compressed rows do not hold exactly the {size} bytes of their tokens")
    return found
