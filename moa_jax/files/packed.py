"""Packs stored tensors into arrays in host memory, with several threads.

    file    (out, in)    some rows at a time: jax's CPU client transposes them in a core's cache,
      |
      v
    array   (in, out)    and a cast writes them to columns of the array

Most of the time goes to the kernel, which zeroes the pages of these arrays. So each array is
written once, by all threads, and CPU devices take over its memory. If this process needs only
parts of an array, the rest is not read, and pages outside those parts are not zeroed.

Arrays have the system's default page size. Numpy would request pages of 2 MiB, which are zeroed two
to four times as fast on a physical machine. But a virtual machine may return free blocks of 2 MiB
to its host, and fetching such blocks again takes ten times longer, while smaller pages come from
memory that the virtual machine kept.
"""

from __future__ import annotations

import collections
import functools
import itertools
import math
import mmap
import operator
import os
from collections.abc import Collection, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, NamedTuple

import jax
import numpy as np

from moa_jax.files import casts
from moa_jax.files.tensor_reader import TensorReader
from moa_jax.model import convert

PIECE_BYTES = 4 * 1024**2  # transposed at a time by a thread; fits a core's cache
MOST_THREADS = 8


class _Piece(NamedTuple):
    """Rows of a stored tensor and their destination."""

    given_OI: np.ndarray
    out_OI: np.ndarray  # a view of the array
    finite: bool  # whether NaN and infinity are refused
    turned: bool  # whether columns of `out_OI` are contiguous


Box = tuple[range, ...]  # a part of a packed array: one range per axis


class Needed(NamedTuple):
    """An array to read."""

    packing: convert.Packing
    turned: bool  # whether the host transposes the array, if `packing.turns`
    boxes: Collection[Box] | None = None  # the parts to fill; None for all
    finite: bool = False  # whether NaN and infinity are refused
    dtype: Any = None  # of the array, if not that of the others; uint8 for bytes of any meaning


def read_packed(reader: TensorReader, wanted: Iterable[Needed], dtype: Any) -> Iterator[np.ndarray]:
    """Yield one array per item of `wanted`; the next is read while the caller uses one.

    If `packing.turns` but not `turned`, the array has its first axis last, and the narrower of
    `dtype` and the tensors' common dtype. All other arrays have the shape of the packing, and
    `dtype`. Two arrays are held at a time, if the caller keeps none, and one piece per thread.
    Raises InputError as `TensorReader.read`, for finite numbers that overflow in a cast, and with
    `Needed.finite` for any number that is not finite.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS), "read") as threads:
        begun: collections.deque[tuple[Needed, np.ndarray, list[Future[bool]]]]
        begun = collections.deque()
        try:
            for each in wanted:
                array, pieces = _planned(reader, each, each.dtype or dtype)
                begun.append((each, array, [threads.submit(_fill, piece) for piece in pieces]))
                del array, pieces
                if len(begun) == 2:
                    yield _finished(reader, *begun.popleft())
            yield from (_finished(reader, *begun.popleft()) for _ in range(len(begun)))
        finally:
            threads.shutdown(wait=False, cancel_futures=True)


def _finished(
    reader: TensorReader, wanted: Needed, array: np.ndarray, pieces: list[Future[bool]]
) -> np.ndarray:
    """The array once it is filled; the tensors are read again only to describe an error."""
    if any([piece.result() for piece in pieces]):
        for name in wanted.packing.names:
            where = f"{reader.file_of[name]}: {name}"
            if error := casts.refusal(reader.read(name), array.dtype, where):
                raise error
    return array


def _planned(reader: TensorReader, wanted: Needed, dtype: Any) -> tuple[np.ndarray, list[_Piece]]:
    """A new array and the pieces that fill it."""
    packing = wanted.packing
    tensors = [reader.read(name) for name in packing.names]
    turns, dtype = packing.turns, np.dtype(dtype)
    turned = wanted.turned and turns
    if turns and not turned:
        dtype = _narrower({tensor.dtype for tensor in tensors}, dtype)
    inputs = packing.shape[0] if turns else 1
    outputs = packing.shape[1:] if turns else packing.shape
    shape = packing.shape if turned else (*outputs, inputs) if turns else outputs
    array = _paged(shape, dtype)
    all_OI = array.reshape(inputs, -1).T if turned else array.reshape(-1, inputs)
    pieces = []
    for tensor, run in convert.runs(packing):
        given_OI = tensors[tensor].reshape(-1, inputs)[run.first :][: run.rows]
        out_OI = all_OI[run.place :][: run.rows]
        for rows, columns in _regions(packing, wanted.boxes):
            step = _rows_at_once(len(columns) * given_OI.itemsize)
            across = slice(columns.start, columns.stop)
            last = min(rows.stop - run.place, run.rows)
            for row in range(max(rows.start - run.place, 0), last, step):
                at = slice(row, min(row + step, last)), across
                pieces.append(_Piece(given_OI[at], out_OI[at], wanted.finite, turned))
    return array, pieces


def _regions(
    packing: convert.Packing, boxes: Collection[Box] | None
) -> Iterator[tuple[range, range]]:
    """Yield boxes as ranges of rows (outputs) and columns (inputs), as in `convert.runs`."""
    for box in [tuple(map(range, packing.shape))] if boxes is None else boxes:
        shape, outputs, columns = packing.shape, box, range(1)
        if packing.turns:
            shape, outputs, columns = shape[1:], box[1:], box[0]
        yield from ((rows, columns) for rows in _spans(shape, outputs))


def _spans(shape: convert.Shape, box: Box) -> Iterator[range]:
    """Yield the flat indices of a box in the whole array, as contiguous ranges."""
    sizes = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cut = max((axis for axis, size in enumerate(shape) if len(box[axis]) < size), default=0)
    for lead in itertools.product(*box[:cut]):
        place = sum(map(operator.mul, lead, sizes))
        yield range(place + box[cut].start * sizes[cut], place + box[cut].stop * sizes[cut])


def _narrower(own: set[np.dtype], dtype: np.dtype) -> np.dtype:
    (only,) = own if len(own) == 1 else (dtype,)
    return only if only.itemsize < dtype.itemsize else dtype


def _rows_at_once(row_bytes: int) -> int:
    """Number of rows per piece: whole cache lines if a piece has 64 rows or more."""
    rows = max(PIECE_BYTES // row_bytes, 1)
    return rows if rows < 64 else rows // 64 * 64


def _paged(shape: convert.Shape, dtype: np.dtype) -> np.ndarray:
    """A new array that starts at a page boundary."""
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)


def _fill(piece: _Piece) -> bool:
    """Fill a part of the array; returns whether a number in it must be refused."""
    given_OI, out_OI = piece.given_OI, piece.out_OI
    if given_OI.itemsize >= out_OI.itemsize:  # cast first, to transpose fewer bytes
        given_OI = casts.to_dtype(given_OI, out_OI.dtype)
    is_bytes = given_OI.dtype == np.uint8
    is_faulty = not is_bytes and casts.is_faulty(piece.given_OI, given_OI, piece.finite)
    if piece.turned:
        given_OI = _turned(given_OI)
    if given_OI.dtype == out_OI.dtype:  # numpy copies bfloat16 one by one, integers in bulk
        given_OI, out_OI = (array.view(f"u{array.itemsize}") for array in (given_OI, out_OI))
    np.copyto(out_OI, given_OI, casting="unsafe")
    return is_faulty


def _turned(rows_OI: np.ndarray) -> np.ndarray:
    """The same rows, with the numbers of a column contiguous in memory."""
    cpu = _cpu()
    if cpu is None:
        return rows_OI
    # Numpy transposes 1 GB/s; the CPU client copies an array with strides at 6 GB/s.
    return np.asarray(jax.device_put(rows_OI.T, cpu)).T


@functools.cache
def _cpu() -> Any:
    """This process's first CPU device; None if jax is restricted to other platforms."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
