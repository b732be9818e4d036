"""Attention masks, queries before keys: an `IntervalMask` in training, a `CacheMask` in decoding.

True means visible in a boolean mask.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

Array = jax.Array


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["first_PBT", "last_PBT"],
    meta_fields=["offsets"],
)
@dataclasses.dataclass(frozen=True)
class IntervalMask:
    """Visible rows of P parts with T rows each: rows first to last of each part, if any.

        first 0 0 2    x . .
        last  0 1 2    x x .
                       . . x

    Every training mask is an `IntervalMask`. In the last parts, one per number in `offsets`, a
    token sees at most one row: the row of the token `offsets[i]` positions earlier.
    """

    first_PBT: Array
    last_PBT: Array
    offsets: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows of all parts together."""
        return self.first_PBT.shape[0] * self.first_PBT.shape[2]

    def apart(self) -> tuple[IntervalMask, IntervalMask | None]:
        """The masks of the first parts, and of the last parts, with `offsets`."""
        P = len(self.first_PBT) - len(self.offsets)
        first = IntervalMask(self.first_PBT[:P], self.last_PBT[:P])
        last = IntervalMask(self.first_PBT[P:], self.last_PBT[P:], self.offsets)
        return first, last if self.offsets else None

    def mask(self) -> Array:
        """The equivalent boolean mask, (B, T, P T)."""
        row_T = jnp.arange(self.first_PBT.shape[2])
        seen = (self.first_PBT[..., None] <= row_T) & (row_T <= self.last_PBT[..., None])
        return jnp.concatenate(list(seen), axis=-1)


def _intervals(*parts: tuple[Array, Array], offsets: tuple[int, ...] = ()) -> IntervalMask:
    first, last = zip(*parts, strict=True)
    return IntervalMask(jnp.stack(first), jnp.stack(last), offsets)


def _begin(segment_BT: Array) -> Array:
    """Start of each token's segment, (B, T); the tokens of a segment are contiguous."""
    return known_until(jnp.zeros(segment_BT.shape, bool), segment_BT)


def _index(segment_BT: Array) -> Array:
    return jnp.broadcast_to(jnp.arange(segment_BT.shape[1], dtype=jnp.int32), segment_BT.shape)


def causal(segment_BT: Array) -> IntervalMask:
    """Each token sees itself and the earlier tokens of its own segment.

    segment 1 1 1 2 2
          1 x . . . .
          1 x x . . .
          1 x x x . .
          2 . . . x .
          2 . . . x x
    """
    return _intervals((_begin(segment_BT), _index(segment_BT)))


def known_until(known_BT: Array, segment_BT: Array) -> Array:
    """Index of the last known token at or before each token, in its segment; (B, T) int32.

    Known tokens are those whose target activations are available to a drafter in decoding. In a
    segment without known tokens, the first token counts as known.

        known  1 1 0 0 0 1 0 0
        start  0 1 1 1 1 5 5 5

    References: paper section 3 (T-step bounded mask); authors' train/moa_spec.py.
    """
    B, T = segment_BT.shape
    index_T = jnp.arange(T, dtype=jnp.int32)
    previous_BT = jnp.concatenate([jnp.full((B, 1), -1, segment_BT.dtype), segment_BT[:, :-1]], 1)
    first_BT = segment_BT != previous_BT
    return lax.cummax(jnp.where(known_BT | first_BT, index_T, 0), axis=1)


def known_past(segment_BT: Array) -> Array:
    """`known_until` with every earlier token of the segment known; (B, T) int32.

    Every token is treated as the first token of a round, whose own activations do not exist yet.
    The first token of a segment has no earlier token and sees itself. With `bounded_memory`:

        segment 1 1 1 1 2 2
        start   0 0 1 2 4 4

              1 x . . . . .
              1 x . . . . .
              1 x x . . . .
              1 x x x . . .
              2 . . . . x .
              2 . . . . x .

    References: paper section 3, training without the T-step bound.
    """
    return jnp.maximum(_begin(segment_BT), _index(segment_BT) - 1)


def bounded_memory(start_BT: Array, segment_BT: Array) -> IntervalMask:
    """Cross-attention sees the memory of known tokens, never of future tokens.

    Queries 1, 2 and 3 steps after the last known token see the same memory, as in decoding,
    where the target has verified nothing newer.

        known  1 1 0 0 1 0
             1 x . . . . .
             1 x x . . . .
             0 x x . . . .
             0 x x . . . .
             1 x x x x x .
             0 x x x x x .

    References: paper section 3 (T-step bounded cross-attention).
    """
    return _intervals((_begin(segment_BT), start_BT))


def staircase(start_BT: Array) -> IntervalMask:
    """In self-attention a token sees the tokens after the last known one, and itself.

        known  1 1 0 0 1 0
             1 x . . . . .
             1 . x . . . .
             0 . . x . . .
             0 . . x x . .
             1 . . . . x .
             0 . . . . . x

    References: paper section 3.3; authors' train/moa_spec.py.
    """
    index_BT = _index(start_BT)
    return _intervals((jnp.minimum(start_BT + 1, index_BT), index_BT))


def on_policy(start_BT: Array, segment_BT: Array) -> IntervalMask:
    """Reused layers see the target's rows up to the last known token, then drafts: two parts.

    The first T rows are the target's keys and values of the tokens, the other T rows those of the
    drafter's stream. Tokens 1, 2 and 3 steps after the last known one see the same target rows
    and the drafts since that token, as a chain does in decoding.

        known      target's     drafts'
             1 x . . . . . | . . . . . .
             1 x x . . . . | . . . . . .
             0 x x . . . . | . . x . . .
             0 x x . . . . | . . x x . .
             1 x x x x x . | . . . . . .
             0 x x x x x . | . . . . . x

    References: ours. Authors' train/moa_spec.py uses `causal` instead, so that a token also sees
    the drafter's states of earlier tokens that decoding would already have verified.
    """
    return _intervals((_begin(segment_BT), start_BT), (start_BT + 1, _index(segment_BT)))


def fed_back(segment_BT: Array, step: int) -> IntervalMask:
    """Mask of pass `step` of a drafter that is fed its own features, with one part per pass.

    In pass j each token is the (j + 1)-th after the last known one. A token sees the rows of pass
    0, whose features are the target's, up to j tokens before itself, and one row of each later
    pass i, the row on its path. Pass 2 of one segment, whose first token 0 has no feature before
    itself and is visible to itself alone:

             pass 0         pass 1         pass 2
        0    . . . . .    | . . . . .    | x . . . .
        1    . . . . .    | x . . . .    | . x . . .
        2    . . . . .    | . x . . .    | . . x . .
        3    . x . . .    | . . x . .    | . . . x .
        4    . x x . .    | . . . x .    | . . . . x

    References: EAGLE-3 (2503.01840), training-time test; in pass 0 EAGLE (2401.15077).
    """
    begin_BT, index_BT = _begin(segment_BT), _index(segment_BT)
    if step == 0:
        return _intervals((jnp.minimum(begin_BT + 1, index_BT), index_BT))
    offsets = tuple(step - i for i in range(1, step + 1))
    # A path that would begin in another segment is an empty interval.
    paths = [(jnp.maximum(begin_BT, index_BT - far), index_BT - far) for far in offsets]
    return _intervals((begin_BT + 1, index_BT - step), *paths, offsets=offsets)


def earlier_blocks(position_BT: Array, segment_BT: Array, size: int) -> IntervalMask:
    """Cross-attention sees the whole blocks of `size` tokens before a token's own block.

    Blocks are counted from the start of each conversation. In decoding, memory ends with the last
    verified token; in this mask, memory ends with the previous block, 1 to `size` tokens back.
    Tokens of the first block see nothing. With a size of 2:

        block 0 0 1 1 2 0
            0 . . . . . .
            0 . . . . . .
            1 x x . . . .
            1 x x . . . .
            2 x x x x . .
            0 . . . . . .

    References: GLIDE (2402.02082); authors' train/glide.py.
    """
    begin_BT = _begin(segment_BT)
    return _intervals((begin_BT, begin_BT + position_BT // size * size - 1))


def cached(ancestor_BNX: Array, length_B: Array, rows: int) -> Array:
    """New nodes see all verified rows of the cache and, of the rows after them, their ancestors.

    Shape (B, N, rows). X nodes are stored at cache rows length to length + X - 1; the N attending
    nodes are the last N of the X. Later rows are left-overs and stay hidden. The ancestor matrix
    of a prompt, a chain or a single token is a lower triangle, see `causal_tree`.

        rows      0 1 2 | 3 4 5 | 6 7     length 3, N 3: a root with two children
        root      x x x | x . . | . .
        child a   x x x | x x . | . .
        child b   x x x | x . x | . .

    A node is one of its own ancestors; a first axis of 1 applies to every row of a batch.
    """
    B, shape = length_B.shape[0], ancestor_BNX.shape[1:]
    ancestor_BNX = jnp.broadcast_to(ancestor_BNX, (B, *shape))
    verified_BS = jnp.arange(rows) < length_B[:, None]
    empty_BNS = jnp.zeros((B, shape[0], rows), bool)
    place = jax.vmap(lambda row, block, start: lax.dynamic_update_slice(row, block, (0, start)))
    return place(empty_BNS, ancestor_BNX, length_B) | verified_BS[:, None, :]


@functools.partial(
    jax.tree_util.register_dataclass,
    data_fields=["length_B", "ancestor_BTX"],
    meta_fields=["tree_size", "first", "window"],
)
@dataclasses.dataclass(frozen=True)
class CacheMask:
    """Visible cache rows of the T tokens of a pass, without a mask over all rows."""

    length_B: Array
    ancestor_BTX: Array | None
    tree_size: int  # X
    first: int
    window: int = 0  # of `windowed`, for tokens that are among the X; 0 is none

    def start_B(self, num_tokens: int) -> Array:
        """The row of the first of the T tokens."""
        return self.length_B + (self.tree_size - num_tokens)

    def tree_mask(self, num_tokens: int) -> Array | np.ndarray:
        """Mask over the X rows after the prefix, (B, T, X); the first axis may be 1."""
        ancestor_BTX = self._ancestors(num_tokens)
        if not self.window:
            return ancestor_BTX
        after_BTX = ancestor_BTX[..., ::-1].cumsum(-1)[..., ::-1] - ancestor_BTX
        return ancestor_BTX & (after_BTX < self.window)  # up to the window's number of ancestors

    def _ancestors(self, num_tokens: int) -> Array | np.ndarray:
        if self.ancestor_BTX is not None:
            return self.ancestor_BTX
        return causal_tree(self.tree_size)[:, self.tree_size - num_tokens :]

    def first_BT(self, num_tokens: int) -> Array:
        """The first row in the window of each token, below 0 for short sequences.

        A token's position is the length and the number of its ancestors, less one.
        """
        return self.length_B[:, None] + self._ancestors(num_tokens).sum(-1) - self.window

    def mask(self, num_tokens: int, rows: int) -> Array:
        """The equivalent mask (B, T, rows); T is 1 without tokens after the verified rows."""
        if self.window:
            return self._mask_of_ring(num_tokens, rows)
        if self.tree_size:
            seen_BTS = cached(self.tree_mask(num_tokens), self.length_B, rows)
        else:
            seen_BTS = (jnp.arange(rows) < self.length_B[:, None])[:, None]
        return seen_BTS & (jnp.arange(rows) >= self.first) if self.first else seen_BTS

    def _mask_of_ring(self, num_tokens: int, rows: int) -> Array:
        """`mask` if the row of a position is the position mod `rows`.

        From the row of the root on, a ring has the X tokens, then its oldest to its newest row.
        """
        B, X = self.length_B.shape[0], self.tree_size
        tree_BTX = jnp.broadcast_to(self.tree_mask(num_tokens), (B, num_tokens, X))
        position_BZ = self.length_B[:, None] + np.arange(X, rows) - rows
        first_BT1 = jnp.maximum(self.first_BT(num_tokens), self.first)[..., None]
        seen_BTS = jnp.concatenate([tree_BTX, position_BZ[:, None] >= first_BT1], axis=-1)
        return jax.vmap(functools.partial(jnp.roll, axis=-1))(seen_BTS, self.length_B % rows)


def windowed(seen: Array | IntervalMask | CacheMask, window: int) -> Any:
    """`seen` without the tokens that are `window` or more positions before a token.

    A window of 0 hides nothing. A cache is a ring (`cache.py`), a node of a tree is at the position
    of its level. With a window of 3:

        within a pass        in a cache of 4 verified rows, a root and its
                             children a and b, and the child c of a

        segment 1 1 1 1 2    row    0 1 2 3 | 4 5 6 7
              1 x . . . .    root   . . x x | x . . .
              1 x x . . .    a      . . . x | x x . .
              1 x x x . .    b      . . . x | x . x .
              1 . x x x .    c      . . . . | x x . x
              2 . . . . x

    References: Longformer (2004.05150); Mistral 7B (2310.06825).
    """
    if not window:
        return seen
    if isinstance(seen, CacheMask):
        return dataclasses.replace(seen, window=window)
    if isinstance(seen, IntervalMask):  # row r of each part belongs to token r
        first_T = jnp.arange(seen.first_PBT.shape[2]) - (window - 1)
        return dataclasses.replace(seen, first_PBT=jnp.maximum(seen.first_PBT, first_T))
    T, S = seen.shape[1:]  # the tokens are the last T rows
    return seen & (np.arange(S) > np.arange(S - T, S)[:, None] - window)


def cache_mask(
    length_B: Array, ancestor_BTX: Array | np.ndarray | None = None, first: int = 0
) -> CacheMask:
    """The visible rows of T tokens: `length` verified rows, and ancestors among the X rows after.

    The T tokens are the last of the X, and a first axis of 1 applies to every row of a batch. A
    constant ancestor matrix of a chain is stored as its length alone. With `ancestor_BTX` None, X
    is 0 and the pass writes no rows. Rows before `first` are hidden.
    """
    if ancestor_BTX is None:
        return CacheMask(length_B, None, 0, first)
    T, X = ancestor_BTX.shape[1:]
    is_known = isinstance(ancestor_BTX, np.ndarray)
    is_line = is_known and np.array_equal(ancestor_BTX, causal_tree(X)[:, X - T :])
    return CacheMask(length_B, None if is_line else ancestor_BTX, X, first)


def causal_tree(num_nodes: int) -> np.ndarray:
    """The ancestor matrix of a chain, (1, N, N): all earlier nodes are ancestors of a node.

    root      x . .
    child     x x .
    its child x x x
    """
    return np.tril(np.ones((1, num_nodes, num_nodes), bool))
