"""The kernels of accelerators equal the einsum: lengths, trees, heads.

On CPUs, kernels are interpreted; elsewhere they are compiled for the device.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.decode import slots
from moa_jax.model import attention, cache, masks
from moa_jax.model.cache import KV, SlotCache
from moa_jax.model.kernels import decode_gpu, decode_tpu
from moa_jax.model.rotary import Rotation, rotate_packed
from tests.conftest import slow

KERNELS = {
    "gpu": functools.partial(decode_gpu.attend, interpret=True),
    "tpu": functools.partial(decode_tpu.attend, interpret=True),
}
if jax.default_backend() != "cpu":  # as it is compiled for the device that is here
    KERNELS = {"compiled": attention.attend_cached}


@jax.jit
def by_einsum(*arrays):
    with jax.default_matmul_precision("highest"):
        return attention.by_einsum(*arrays)


def tree(B: int, T: int, X: int) -> jax.Array:
    """Returns random ancestors; each token is its own ancestor."""
    itself_TX = np.arange(X) == np.arange(X - T, X)[:, None]
    return jnp.asarray((np.random.default_rng(1).random((B, T, X)) < 0.5) | itself_TX)


def normal(draw: np.random.Generator, *shape: int, dtype=jnp.float32) -> jax.Array:
    """Draws with numpy: jax would compile a program for each shape."""
    return jnp.asarray(draw.standard_normal(shape, np.float32).astype(dtype))


def drawn(lengths: list[int], shape: tuple[int, ...], S: int, X: int, dtype=jnp.float32):
    """Returns packed heads (B, T, K, G, E), rows for X > 0, their angles, a cache of S rows."""
    B, K, G, T, E = shape
    draw = np.random.default_rng(T + S + X)
    packed = normal(draw, B, T, K, G + 2 * (X > 0), E, dtype=dtype)
    past = KV(*(normal(draw, B, K, S, E, dtype=dtype) for _ in range(2)))
    angle_BTE = draw.uniform(0, 6, (B, T, E // 2)).astype(np.float32)
    turn = Rotation(jnp.asarray(np.cos(angle_BTE)), jnp.asarray(np.sin(angle_BTE)))
    return (packed, turn, past), jnp.asarray(np.array(lengths, np.int32))


# lengths, (B, K, G, T, E), S, X, first; X - T tokens of the round are already in the cache
CASES = {
    "plain": ([300], (1, 2, 4, 1, 64), 512, 1, 0),
    "nothing-verified": ([0, 256], (2, 1, 2, 3, 64), 384, 3, 0),
    "level-of-a-draft": ([130, 7], (2, 2, 2, 8, 64), 256, 17, 0),
    "more-queries-than-a-block": ([200], (1, 1, 4, 63, 64), 384, 63, 0),
    "hidden-row": ([1, 129], (2, 2, 1, 5, 64), 256, 5, 1),
    "memory": ([5, 256, 1], (3, 2, 4, 8, 64), 256, 0, 0),
    "full": ([379], (1, 2, 2, 5, 128), 384, 5, 0),
    "long": ([1300, 1021, 60], (3, 1, 2, 3, 64), 1408, 3, 0),
    "halves-of-small-heads": ([100], (1, 2, 2, 3, 32), 128, 3, 0),
    "window-of-a-tree": ([500, 20], (2, 2, 2, 5, 64), 640, 7, 0),
    "window-of-a-chain": ([700], (1, 1, 2, 40, 64), 768, 50, 0),
}
WINDOWS = {"window-of-a-tree": 150, "window-of-a-chain": 30}


def sight_of(case: str, length_B: jax.Array) -> masks.CacheMask:
    """Returns the mask of a case, of a random tree unless it is named a chain."""
    lengths, (B, _, _, T, _), _, X, first = CASES[case]
    ancestor = tree(B, T, X) if X else None
    if "chain" in case:
        ancestor = masks.causal_tree(X)[:, X - T :]
    return masks.windowed(masks.cache_mask(length_B, ancestor, first), WINDOWS.get(case, 0))


SLOTS = {"level-of-a-draft", "hidden-row", "memory", "long", "window-of-a-tree"}  # caches in slots
QUICK = ("plain", "hidden-row", "memory", "window-of-a-tree")
PAIRS = [(case, name) for name in [*KERNELS, "einsum"] for case in CASES]
PAIRS = [
    pair if pair[0] in QUICK or "compiled" in KERNELS else slow(*pair)
    for pair in PAIRS
    if pair[0] in SLOTS or pair[1] != "einsum"
]


@pytest.mark.parametrize("case, kernel", PAIRS)
def test_kernels_equal_the_einsum(case, kernel):
    """Slots are used in any order, in place, beside rows of NaN, and equal separate caches."""
    lengths, shape, S, X, first = CASES[case]
    (packed, turn, past), length_B = drawn(lengths, shape, S, X)
    slot_B = np.array([4, 1, 6][: len(lengths)], np.int32)
    used_B1S1 = (np.arange(S) < (np.array(lengths) + X)[:, None])[:, None, :, None]

    def in_slots(rows: jax.Array) -> jax.Array:
        slots = np.full((8, *rows.shape[1:]), np.nan, np.float32)
        slots[slot_B] = np.where(used_B1S1, rows, np.nan)
        return jnp.asarray(slots)

    given = SlotCache(jax.tree.map(in_slots, past), jnp.asarray(slot_B)) if case in SLOTS else past
    sight, attend = sight_of(case, length_B), KERNELS.get(kernel, attention.by_einsum)
    mixed, written = jax.jit(attend)(packed, turn, given, sight)
    expected, rows = by_einsum(packed, turn, past, sight)
    if case not in SLOTS:
        np.testing.assert_allclose(mixed, expected, atol=2e-6)
        np.testing.assert_allclose(written.k_BKSE, rows.k_BKSE, atol=1e-6)
        np.testing.assert_array_equal(written.v_BKSE, rows.v_BKSE)
        return
    if first:  # a token that attends to nothing has zeros
        expected = np.where(attention.sees_anything(sight)[..., None, None], expected, 0)
    np.testing.assert_allclose(mixed, expected, atol=2e-6)
    for leaf, one in zip(map(np.asarray, written.arrays), rows, strict=True):
        held = (np.where(used_B1S1, each, 0) for each in (leaf[slot_B], one))
        np.testing.assert_allclose(*held, atol=1e-6)
        assert np.isnan(np.delete(leaf, slot_B, axis=0)).all()


@pytest.mark.skipif(jax.default_backend() != "cpu", reason="of programs for CPUs")
@pytest.mark.parametrize(
    "longest, read, T, X, first, dtype",
    [
        (150, 150, 1, 1, 0, "float32"),
        (151, 300, 3, 3, 1, "float32"),
        (300, 300, 2, 0, 0, "float32"),
        (301, 600, 2, 5, 0, "bfloat16"),
    ],
    ids=["plain", "tree", "memory", "level"],
)
def test_a_cpu_reads_only_the_used_rows_of_long_caches(T, X, first, dtype, longest, read):
    """Unused rows may hold any value; the result equals attention over the used rows."""
    lengths, S = [1, longest - X, 3], 600
    given, length_B = drawn(lengths, (3, 2, 2, T, 64), S, X, dtype)
    packed, turn, past = given
    sight = masks.cache_mask(length_B, tree(3, T, X) if X else None, first)
    is_read_S1 = np.arange(S)[:, None] < read
    foul = KV(
        *(jnp.asarray(np.where(is_read_S1, rows, np.array(np.nan, rows.dtype))) for rows in past)
    )
    attend = jax.jit(attention.by_einsum)
    mixed, written = attend(packed, turn, foul, sight)
    short = KV(*(jnp.asarray(np.asarray(rows)[:, :, :read]) for rows in past))
    expected, _ = attend(packed, turn, short, sight)
    atol = 2e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(*map(np.float32, (mixed, expected)), atol=atol)
    assert np.isnan(np.float32(written.k_BKSE[:, :, read:])).all()


def test_nothing_is_written_beyond_a_cache_that_is_too_small():
    """The last rows hold the tokens that fit; a further row would overwrite the next head."""
    (packed, turn, past), length_B = drawn([254], (1, 3, 1, 4, 64), 256, 4)
    sight = masks.cache_mask(length_B, masks.causal_tree(4))
    _, written = jax.jit(KERNELS.get("gpu", attention.attend_cached))(packed, turn, past, sight)
    heads = np.asarray(jax.jit(rotate_packed)(packed, turn))
    past = KV(*map(np.asarray, past))
    for head, rows, old in zip((-2, -1), map(np.asarray, written), past, strict=True):
        np.testing.assert_array_equal(rows[:, :, :254], old[:, :, :254])
        np.testing.assert_allclose(rows[:, :, 254:], heads[:, :, head, :2], atol=1e-6)


@pytest.mark.parametrize("in_slots", [False, True])
@pytest.mark.parametrize("kernel", [*KERNELS, "einsum"])
def test_a_ring_equals_a_cache_of_all_rows(kernel, in_slots):
    """The first sequence writes across the end of the ring; the last one has not filled it."""
    X, S, shape = 7, 256, (3, 2, 2, 5, 64)
    (packed, turn, past), length_B = drawn([507, 381, 20], shape, 640, X)
    sight = masks.cache_mask(length_B, tree(3, 5, X))
    sight, slot_B = masks.windowed(sight, 150), jnp.array([4, 1, 6])

    def ring_of(rows, count):
        newest_B1 = length_B[:, None] + count - 1
        position_BS = newest_B1 - (newest_B1 - jnp.arange(S)) % S
        held = cache.take(rows, jnp.maximum(position_BS, 0))
        is_empty = position_BS[:, None, :, None] < 0
        return jax.tree.map(lambda x: jnp.where(is_empty, jnp.nan, x), held)

    ring = ring_of(past, X - shape[3])
    if in_slots:
        slots = lambda x: jnp.full((8, *x.shape[1:]), jnp.nan).at[slot_B].set(x)
        ring = SlotCache(jax.tree.map(slots, ring), slot_B)
    else:
        ring = jax.tree.map(jnp.nan_to_num, ring)
    mixed, written = jax.jit(KERNELS.get(kernel, attention.by_einsum))(packed, turn, ring, sight)
    expected, rows = by_einsum(packed, turn, past, sight)
    np.testing.assert_allclose(mixed, expected, atol=2e-6)
    if in_slots:
        written = jax.tree.map(lambda x: x[slot_B], written.arrays)
    for ours, theirs in zip(written, ring_of(rows, X), strict=True):
        ours = ours if in_slots else jnp.where(jnp.isnan(theirs), jnp.nan, ours)
        np.testing.assert_allclose(ours, theirs, atol=1e-6)


@pytest.mark.parametrize("windows, longest", [((), 20), ((9, 9, 9), 38)])
def test_a_path_is_moved_to_the_front(windows, longest):
    draw = np.random.default_rng(0)
    caches = tuple(KV(*(normal(draw, 2, 3, 40, 64) for _ in range(2))) for _ in range(3))
    path_BD, length_B = jnp.array([[0, 2, 5], [0, 1, 4]]), jnp.array([7, longest])

    @jax.jit
    def by_rows(caches):
        rows = [cache.take(past, length_B[:, None] + path_BD, bool(windows)) for past in caches]
        return attention.keep_path(caches, tuple(rows), path_BD, length_B, windows)

    expected = by_rows(caches)
    is_ring = (bool(windows),) * 3
    keep = functools.partial(decode_gpu.keep_path, is_ring=is_ring, interpret=True)
    found = keep(caches, path_BD, length_B)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    slot_B = jnp.array([2, 0])
    in_slots = jax.jit(
        lambda past: SlotCache(
            KV(*(jnp.zeros((3, *rows.shape[1:])).at[slot_B].set(rows) for rows in past)), slot_B
        )
    )
    slots = keep(tuple(map(in_slots, caches)), path_BD, length_B)
    jax.tree.map(np.testing.assert_array_equal, slots, tuple(map(in_slots, expected)))
    old, new = (longest + 4) % 40, (longest + 2) % 40
    assert np.array_equal(found[1].k_BKSE[1, :, new], caches[1].k_BKSE[1, :, old])


def test_a_window_hides_tokens_of_a_pass_and_of_a_cache():
    """A tree of a root, its children a and b, b's child c and c's child d, after four rows."""
    segments = jnp.array([[1, 1, 1, 1, 2]])
    rows = ("10000", "11000", "10100", "10110", "10111")
    ancestor = np.array([[[node == "1" for node in row] for row in rows]])
    tree = masks.windowed(masks.cache_mask(jnp.array([4]), ancestor), 2).mask(5, 9)
    whole = masks.windowed(masks.causal(segments), 3).mask()
    for found, picture in (
        (tree, "...xx.... ....xx... ....x.x.. ......xx. .......xx"),
        (whole, "x.... xx... xxx.. .xxx. ....x"),
        (masks.windowed(masks.causal_tree(4), 2), "x... xx.. .xx. ..xx"),
    ):
        assert ["".join(".x"[int(seen)] for seen in row) for row in found[0]] == picture.split()


def test_a_copied_slot_has_no_earlier_nan(monkeypatch):
    """On a mesh that splits slots, attention multiplies the rows after the used ones by 0."""
    monkeypatch.setattr(slots, "_is_in_place", lambda: False)
    state = slots.SlotState((KV(*np.full((2, 3, 1, 4, 2), np.nan)),), np.zeros((3, 5)))
    for leaf in slots.batch_of(state, np.array([1]), np.array([2])).round[0]:
        assert np.isnan(leaf[:, :, :2]).all() and not leaf[:, :, 2:].any()
