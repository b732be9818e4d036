"""Training masks as intervals; the kernels that read intervals equal the einsum.

On CPUs, kernels are interpreted; elsewhere they are compiled for the device.
"""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.model import attention, masks
from moa_jax.model.cache import KV
from moa_jax.model.kernels import train_intervals
from moa_jax.model.kernels.train_intervals import How
from moa_jax.training import flops
from tests.conftest import slow

B, T = 3, 256


def packed(seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns segments and positions (B, T) of packed conversations, and the known tokens."""
    draw = np.random.default_rng(seed)
    segment_BT, position_BT = np.zeros((B, T), np.int32), np.zeros((B, T), np.int32)
    for b in range(B):
        ends = np.sort(draw.choice(np.arange(1, T), 4, replace=False))
        for index, (begin, end) in enumerate(zip([0, *ends], [*ends, T][: 5 - b], strict=False)):
            segment_BT[b, begin:end] = index + 1
            position_BT[b, begin:end] = np.arange(end - begin)
    return segment_BT, position_BT, draw.random((B, T)) < 0.3


def by_definition(name: str, seed: int) -> np.ndarray:
    """Returns a mask by the docstrings of `masks`, token by token."""
    segment_BT, position_BT, known_BT = packed(seed)
    begin_BT = np.asarray(masks.known_until(np.zeros_like(known_BT), segment_BT))
    start_BT = np.asarray(masks.known_until(known_BT, segment_BT))
    q_T1, k_1T = np.arange(T)[:, None], np.arange(T)[None, :]
    same_BTT = segment_BT[:, :, None] == segment_BT[:, None, :]
    causal_BTT = same_BTT & (k_1T <= q_T1)
    after_BTT = k_1T > start_BT[:, :, None]
    block_BT = position_BT // 10
    first_B1T = (begin_BT == np.arange(T))[:, None]
    fed = same_BTT & (q_T1 - k_1T >= 2) & ~first_B1T
    latest = (same_BTT & (q_T1 - k_1T == 1), same_BTT & (q_T1 == k_1T))
    found = {
        "causal": causal_BTT,
        "bounded_memory": causal_BTT & ~after_BTT,
        "staircase": causal_BTT & (after_BTT | np.eye(T, dtype=bool)),
        "on_policy": np.concatenate([causal_BTT & ~after_BTT, causal_BTT & after_BTT], -1),
        "earlier_blocks": causal_BTT & (block_BT[:, None, :] < block_BT[:, :, None]),
        "fed_back_0": (same_BTT & (k_1T <= q_T1) & ~first_B1T) | np.eye(T, dtype=bool),
        "fed_back_2": np.concatenate([fed, *latest], -1),
    }
    return found[name]


def intervals(name: str, seed: int) -> masks.IntervalMask:
    segment_BT, position_BT, known_BT = map(jnp.asarray, packed(seed))
    start_BT = masks.known_until(known_BT, segment_BT)
    if name.startswith("fed_back"):
        return masks.fed_back(segment_BT, int(name[-1]))
    given = {"causal": (segment_BT,), "staircase": (start_BT,)}
    given["earlier_blocks"] = (position_BT, segment_BT, 10)
    return getattr(masks, name)(*given.get(name, (start_BT, segment_BT)))


MASKS = "causal bounded_memory staircase on_policy earlier_blocks fed_back_0 fed_back_2".split()


@pytest.mark.parametrize("name", MASKS)
def test_masks_equal_their_definitions(name):
    for seed in range(3):
        np.testing.assert_array_equal(intervals(name, seed).mask(), by_definition(name, seed))


def drawn(num_parts: int) -> tuple[tuple[jax.Array, KV], jax.Array]:
    """Returns heads (B, K, G, T, E), keys and values of parts, and a direction of the output."""
    (K, G, E), draw = (2, 2, 64), np.random.default_rng(num_parts)
    normal = lambda *shape: jnp.asarray(draw.standard_normal(shape, np.float32))
    rows = (normal(B, K, num_parts * T, E) for _ in range(2))
    return (normal(B, K, G, T, E), KV(*rows)), normal(B, T, K, G, E)


def difference(one: object, other: object) -> float:
    far = jax.tree.map(lambda a, b: jnp.abs(a - b).max(), one, other)
    return float(max(jax.tree.leaves(far)))


def loss_and_gradient(attend, given, seen, towards_BTKGE):
    loss = lambda given: jnp.sum(attend(*given, seen) * towards_BTKGE)
    return jax.jit(jax.value_and_grad(loss))(given)


@pytest.mark.parametrize("chunk", [T, T // 3])
def test_rows_at_offsets_equal_a_mask_over_all_parts(chunk, monkeypatch):
    """Only the first part of a drafter that is fed its own features has scores of all rows."""
    monkeypatch.setattr(attention, "QUERY_CHUNK", chunk)
    seen = intervals("fed_back_2", 1)
    given, towards_BTKGE = drawn(3)
    with jax.default_matmul_precision("highest"):
        ours = loss_and_gradient(attention.attend, given, seen, towards_BTKGE)
        wanted = loss_and_gradient(attention.attend, given, seen.mask(), towards_BTKGE)
    assert float(ours[0]) == pytest.approx(float(wanted[0]), rel=1e-5)
    assert difference(ours[1], wanted[1]) < 2e-5
    program = jax.make_jaxpr(attention.attend)(*given, seen)
    whole = jax.make_jaxpr(attention.attend)(*given, seen.mask())
    assert flops.of_program(program) < 0.4 * flops.of_program(whole)


HERE = jax.default_backend()
PLATFORMS = ["gpu", "tpu"] if HERE == "cpu" else [HERE]


@pytest.mark.parametrize("platform", PLATFORMS)
@pytest.mark.parametrize("name", ["staircase", *map(slow, (*MASKS[1:4:2], "fed_back_2"))])
def test_kernels_equal_the_einsum_forward_and_backward(name, platform):
    """Rows are packed and padded; some tokens attend to no token of a part, or to all tokens."""
    seen = intervals(name, 1)
    given, towards_BTKGE = drawn(seen.first_PBT.shape[0])
    sees_BT11 = attention.sees_anything(seen)[..., None, None]

    def found(attend, given):
        mixed_BTKGE = jnp.where(sees_BT11, attend(*given, seen), 0.0)
        return jnp.sum(mixed_BTKGE * towards_BTKGE), mixed_BTKGE

    how = How.on(platform, T)._replace(is_interpreted=HERE == "cpu")
    kernels = functools.partial(train_intervals.attend, how=how)
    with jax.default_matmul_precision("highest"):
        ours, wanted = (
            jax.jit(jax.value_and_grad(functools.partial(found, way), has_aux=True))(given)
            for way in (kernels, attention.attend)
        )
    assert difference(ours[0][1], wanted[0][1]) < 2e-6
    assert difference(ours[1], wanted[1]) < 2e-5
