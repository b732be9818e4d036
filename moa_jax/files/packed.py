"""Stored tensors packed into arrays in the host's memory, by several threads.

    file    (out, in)    some rows at a time: jax's CPU client turns them into a core's cache,
      |
      v
    array   (in, out)    and they are cast into columns of the array

What takes longest is the kernel clearing the pages of these arrays, so each is written once, by
all threads, and devices that are CPUs take it over. Where this process needs some parts of an array
the rest is not read, and pages in which no part lies are not cleared either.

Pages are mapped as the system maps them. Numpy would ask for pages of 2 MiB. These are cleared two
to four times as fast where a machine owns its memory. But a virtual machine may hand free blocks of
2 MiB back to its host, and to fetch them again takes ten times longer, while smaller pages come
from what it kept.
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
from moa_jax.files.folders import TensorReader
from moa_jax.model import convert

PIECE_BYTES = 4 * 1024**2  # what a thread turns at once, so that a core's cache holds it
MOST_THREADS = 8


class _Piece(NamedTuple):
    """Rows of a stored tensor, and where they go."""

    given_OI: np.ndarray
    out_OI: np.ndarray  # a view of the array
    finite: bool  # whether all numbers have to be
    turned: bool  # whether numbers of a column lie side by side there


Box = tuple[range, ...]  # a part of a packed array, by axes


class Needed(NamedTuple):
    """An array to be read."""

    packing: convert.Packing
    turned: bool  # on the host, if it turns
    boxes: Collection[Box] | None = None  # the parts to be filled; None for all
    finite: bool = False  # whether NaN and infinity are refused


def read_packed(reader: TensorReader, wanted: Iterable[Needed], dtype: Any) -> Iterator[np.ndarray]:
    """Yield the arrays that are wanted; the next is read while the caller has one.

    One that turns and shall not be turned has its first axis last, and as its dtype the narrower
    of `dtype` and the tensors' own. All others have the shape of the packing, and `dtype`. There
    are two arrays at a time, if the caller keeps none, and a piece for each thread. Raises
    InputError as `TensorReader.read`, for numbers that a cast makes infinite, and for those that
    are not finite where they have to be.
    """
    with ThreadPoolExecutor(min(os.cpu_count() or 1, MOST_THREADS), "read") as threads:
        begun: collections.deque[tuple[Needed, np.ndarray, list[Future[bool]]]]
        begun = collections.deque()
        try:
            for each in wanted:
                array, pieces = _planned(reader, each, dtype)
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
    """The array once it is filled; the tensors are read again only for what an error says."""
    if any([piece.result() for piece in pieces]):
        for name in wanted.packing.names:
            where = f"{reader.file_of[name]}: {name}"
            if error := casts.refusal(reader.read(name), array.dtype, where):
                raise error
    return array


def _planned(reader: TensorReader, wanted: Needed, dtype: Any) -> tuple[np.ndarray, list[_Piece]]:
    """A new array, and the pieces that fill it."""
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
    """Where boxes lie among outputs, which make rows, and inputs, as `convert.runs` has them."""
    for box in [tuple(map(range, packing.shape))] if boxes is None else boxes:
        shape, outputs, columns = packing.shape, box, range(1)
        if packing.turns:
            shape, outputs, columns = shape[1:], box[1:], box[0]
        yield from ((rows, columns) for rows in _spans(shape, outputs))


def _spans(shape: convert.Shape, box: Box) -> Iterator[range]:
    """The numbers of a box by their places in the whole array, in runs side by side."""
    sizes = [math.prod(shape[axis + 1 :]) for axis in range(len(shape))]
    cut = max((axis for axis, size in enumerate(shape) if len(box[axis]) < size), default=0)
    for lead in itertools.product(*box[:cut]):
        place = sum(map(operator.mul, lead, sizes))
        yield range(place + box[cut].start * sizes[cut], place + box[cut].stop * sizes[cut])


def _narrower(own: set[np.dtype], dtype: np.dtype) -> np.dtype:
    (only,) = own if len(own) == 1 else (dtype,)
    return only if only.itemsize < dtype.itemsize else dtype


def _rows_at_once(row_bytes: int) -> int:
    """How many rows make a piece: whole lines of a cache where there are many."""
    rows = max(PIECE_BYTES // row_bytes, 1)
    return rows if rows < 64 else rows // 64 * 64


def _paged(shape: convert.Shape, dtype: np.dtype) -> np.ndarray:
    """A new array that starts with a page."""
    size = math.prod(shape) * dtype.itemsize
    pages = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    return np.frombuffer(pages, dtype).reshape(shape)


def _fill(piece: _Piece) -> bool:
    """Fills a part of the array, and says whether it holds what it may not."""
    given_OI, out_OI = piece.given_OI, piece.out_OI
    if given_OI.itemsize >= out_OI.itemsize:  # so that fewer bytes are turned
        given_OI = casts.to_dtype(given_OI, out_OI.dtype)
    is_faulty = casts.is_faulty(piece.given_OI, given_OI, piece.finite)
    if piece.turned:
        given_OI = _turned(given_OI)
    if given_OI.dtype == out_OI.dtype:  # numpy copies bfloat16 one by one unless it is integers
        given_OI, out_OI = (array.view(f"u{array.itemsize}") for array in (given_OI, out_OI))
    np.copyto(out_OI, given_OI, casting="unsafe")
    return is_faulty


def _turned(rows_OI: np.ndarray) -> np.ndarray:
    """The same rows, with the numbers of a column side by side in memory."""
    cpu = _cpu()
    if cpu is None:
        return rows_OI
    # Numpy turns 1 GB/s, the client's own copy of an array with strides 6.
    return np.asarray(jax.device_put(rows_OI.T, cpu)).T


@functools.cache
def _cpu() -> Any:
    """This process's first CPU device; None where jax was told to use others alone."""
    try:
        return jax.local_devices(backend="cpu")[0]
    except RuntimeError:
        return None
