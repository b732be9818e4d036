"""The kernels of accelerators equal the einsum: lengths, trees, heads.

On CPUs, kernels are interpreted; elsewhere they are compiled for the device.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

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


def tree(key: jax.Array, B: int, T: int, X: int) -> jax.Array:
    """Returns random ancestors; each token is its own ancestor."""
    itself_TX = jnp.arange(X) == jnp.arange(X - T, X)[:, None]
    return jax.random.bernoulli(key, 0.5, (B, T, X)) | itself_TX


def drawn(lengths: list[int], shape: tuple[int, ...], S: int, X: int, dtype=jnp.float32):
    """Returns packed heads (B, T, K, G, E), rows for X > 0, their angles, a cache of S rows."""
    B, K, G, T, E = shape
    keys = jax.random.split(jax.random.key(T + S + X), 4)
    packed = jax.random.normal(keys[0], (B, T, K, G + 2 * (X > 0), E), dtype)
    past = KV(*(jax.random.normal(key, (B, K, S, E), dtype) for key in keys[1:3]))
    angle_BTE = jax.random.uniform(keys[3], (B, T, E // 2), maxval=6.0)
    turn = Rotation(jnp.cos(angle_BTE), jnp.sin(angle_BTE))
    return (packed, turn, past), jnp.array(lengths, jnp.int32)


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
}


FAST = {("plain", "gpu"), ("level-of-a-draft", "gpu"), ("level-of-a-draft", "tpu")}
FAST |= {(case, "compiled") for case in CASES}


@pytest.mark.parametrize(
    "case, kernel",
    [
        (case, kernel) if (case, kernel) in FAST else slow(case, kernel)
        for case in CASES
        for kernel in KERNELS
    ],
)
def test_kernels_equal_the_einsum(case, kernel):
    lengths, shape, S, X, first = CASES[case]
    given, length_B = drawn(lengths, shape, S, X)
    ancestor = tree(jax.random.key(1), shape[0], shape[3], X) if X else None
    sight = masks.cache_mask(length_B, ancestor, first)
    mixed, written = jax.jit(KERNELS[kernel])(*given, sight)
    expected, rows = by_einsum(*given, sight)
    np.testing.assert_allclose(mixed, expected, atol=2e-6)
    np.testing.assert_allclose(written.k_BKSE, rows.k_BKSE, atol=1e-6)
    np.testing.assert_array_equal(written.v_BKSE, rows.v_BKSE)


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
    ancestor = tree(jax.random.key(1), 3, T, X) if X else None
    sight = masks.cache_mask(length_B, ancestor, first)
    foul = jax.tree.map(lambda rows: rows.at[:, :, read:].set(jnp.nan), past)
    mixed, written = jax.jit(attention.by_einsum)(packed, turn, foul, sight)
    short = jax.tree.map(lambda rows: rows[:, :, :read], past)
    expected, _ = attention.by_einsum(packed, turn, short, sight)
    atol = 2e-6 if dtype == "float32" else 2e-2
    np.testing.assert_allclose(*map(np.float32, (mixed, expected)), atol=atol)
    assert np.isnan(np.float32(written.k_BKSE[:, :, read:])).all()


@pytest.mark.parametrize("case", ["plain", "level-of-a-draft", "hidden-row", "memory", "long"])
@pytest.mark.parametrize("kernel", [*KERNELS, "einsum"])
def test_sequences_use_their_slots_alone(case, kernel):
    """Slots are used in any order, in place, beside rows of NaN, and equal separate caches."""
    lengths, shape, S, X, first = CASES[case]
    (packed, turn, past), length_B = drawn(lengths, shape, S, X)
    B = len(lengths)
    slot_B = jnp.array([4, 1, 6][:B])
    used_BS = jnp.arange(S) < (length_B + X)[:, None]
    spoilt = lambda rows: jnp.where(used_BS[:, None, :, None], rows, jnp.nan)
    of_slots = lambda rows: jnp.full((8, *rows.shape[1:]), jnp.nan).at[slot_B].set(spoilt(rows))
    slots = SlotCache(jax.tree.map(of_slots, past), slot_B)
    ancestor = tree(jax.random.key(1), B, shape[3], X) if X else None
    sight = masks.cache_mask(length_B, ancestor, first)
    attend = KERNELS.get(kernel, attention.by_einsum)
    mixed, written = jax.jit(attend)(packed, turn, slots, sight)
    expected, rows = by_einsum(packed, turn, past, sight)
    if first:  # a token that attends to nothing has zeros
        expected = jnp.where(attention.sees_anything(sight)[..., None, None], expected, 0)
    np.testing.assert_allclose(mixed, expected, atol=2e-6)
    for leaf, one in zip(written.arrays, rows, strict=True):
        held_B = jnp.where(used_BS[:, None, :, None], leaf[slot_B], 0)
        np.testing.assert_allclose(held_B, jnp.where(used_BS[:, None, :, None], one, 0), atol=1e-6)
        assert np.isnan(np.delete(leaf, slot_B, axis=0)).all()


def test_nothing_is_written_beyond_a_cache_that_is_too_small():
    """The last rows hold the tokens that fit; a further row would overwrite the next head."""
    (packed, turn, past), length_B = drawn([254], (1, 3, 1, 4, 64), 256, 4)
    sight = masks.cache_mask(length_B, masks.causal_tree(4))
    _, written = jax.jit(KERNELS.get("gpu", attention.attend_cached))(packed, turn, past, sight)
    heads = rotate_packed(packed, turn)
    for head, rows, old in zip((-2, -1), written, past, strict=True):
        np.testing.assert_array_equal(rows[:, :, :254], old[:, :, :254])
        np.testing.assert_allclose(rows[:, :, 254:], heads[:, :, head, :2], atol=1e-6)


def test_a_path_is_moved_to_the_front():
    keys = jax.random.split(jax.random.key(0), 6)
    arrays = [jax.random.normal(key, (2, 3, 40, 64)) for key in keys]
    caches = tuple(KV(*arrays[i : i + 2]) for i in (0, 2, 4))
    path_BD, length_B = jnp.array([[0, 2, 5], [0, 1, 4]]), jnp.array([7, 20])
    rows = [cache.take(past, length_B[:, None] + path_BD) for past in caches]
    expected = attention.keep_path(caches, tuple(rows), path_BD, length_B)
    found = decode_gpu.keep_path(caches, path_BD, length_B, interpret=True)
    jax.tree.map(np.testing.assert_array_equal, found, expected)
    slot_B = jnp.array([2, 0])
    in_slots = lambda past: SlotCache(
        KV(*(jnp.zeros((3, *rows.shape[1:])).at[slot_B].set(rows) for rows in past)), slot_B
    )
    slots = decode_gpu.keep_path(tuple(map(in_slots, caches)), path_BD, length_B, interpret=True)
    jax.tree.map(np.testing.assert_array_equal, slots, tuple(map(in_slots, expected)))
    assert np.array_equal(found[1].k_BKSE[1, :, 22], caches[1].k_BKSE[1, :, 24])
