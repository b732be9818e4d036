"""Every drafter trains on packed conversations as on one conversation per row."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.config import (
    BlockConfig,
    Eagle3Config,
    EagleConfig,
    FeedbackConfig,
    GlideConfig,
    IndependentConfig,
    MaskConfig,
    MoaConfig,
    Objective,
    TargetConfig,
)
from moa_jax.data import batches, chat
from moa_jax.data.batch import Batch
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.model import llama
from moa_jax.training.distillation import make_loss, make_probe
from tests.train.blocks import in_blocks

BLOCK = BlockConfig(32, 4, 2, 8, 48, 1e-5, 1e4, None)
TARGET = TargetConfig("llama", 96, 3, BLOCK, False, 64)
SMALL = dataclasses.replace(TARGET, num_layers=1)
MOA = (1, 24, 1, 24, 2, 16)
# One period and no staircase: rows draw both, and packed rows hold other conversations.
MASKS = MaskConfig(shortest_future=6, longest_future=6, staircase=False)
KINDS = {
    "moa-reuse": (MoaConfig(*MOA, target_layer_inference=1), Objective(MASKS)),
    "moa-on-policy": (
        MoaConfig(*MOA, target_layer_inference=1),
        Objective(dataclasses.replace(MASKS, on_policy_reuse=True, first_tokens=True)),
    ),
    "eagle": (EagleConfig(1, 24), Objective()),
    "eagle3": (
        Eagle3Config(1, 24, tapped_layers=(0, 1, 2), draft_ids=tuple(range(0, 96, 2))),
        Objective(feedback=FeedbackConfig(steps=3)),
    ),
    "glide": (GlideConfig(1, 24, 3), Objective()),
    "independent": (IndependentConfig(SMALL), Objective()),
}
LENGTHS = (11, 17, 6)


@pytest.fixture(scope="module")
def laid_out() -> tuple[Batch, Batch]:
    """Returns the same conversations in one row, and in separate rows."""
    draw = np.random.default_rng(0)
    given = [
        chat.Example(draw.integers(0, 96, n).astype(np.int32), np.arange(n) >= n // 3)
        for n in LENGTHS
    ]
    packed, alone = batches.pack(given, 36, longest_first=True), batches.pad(given, 36)
    assert packed.segment_BT.shape[0] == 1 and packed.segment_BT.max() == len(LENGTHS)
    return packed, alone


@pytest.fixture(scope="module")
def frozen() -> dict:
    return frozen_weights(TARGET)


def frozen_weights(config: TargetConfig) -> dict:
    """Returns a random target with stacked layers."""
    params = jax.jit(lambda key: llama.init(config, key))(jax.random.key(1))
    return params | {"layers": jax.tree.map(lambda *each: jnp.stack(each), *params["layers"])}


def gradient_of(name: str) -> tuple:
    """Returns a drafter, its parameters, and its loss with gradients."""
    config, objective = KINDS[name]
    drafter = DRAFTERS[method_of(config)].make(config, TARGET, objective)
    params = jax.tree.map(lambda x: 3 * x, jax.jit(drafter.init)(jax.random.key(2)))
    gradient = jax.value_and_grad(make_loss(TARGET, drafter, jnp.float32), has_aux=True)
    return drafter, params, lambda *given: gradient(*given, jax.random.key(3), jnp.float32(0.7))


def assert_close(one, other) -> None:
    for ours, wanted in zip(*map(jax.tree.leaves, (one, other)), strict=True):
        np.testing.assert_allclose(ours, wanted, rtol=2e-4, atol=2e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moa-reuse", "moa-on-policy", "eagle3", "glide", "independent"])
def test_packed_is_alone(name, laid_out, frozen):
    """Compares loss, gradients and the figures of evaluations."""
    drafter, params, gradient = gradient_of(name)
    probe = make_probe(TARGET, drafter, jnp.float32, horizon=3)
    both = jax.jit(lambda *given: (gradient(*given), probe(*given)))
    assert_close(*(both(params, frozen, batch) for batch in laid_out))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["moa-on-policy", "eagle3"])
def test_scores_in_blocks_train_the_same(name, laid_out, frozen, monkeypatch):
    """Compares packed rows with the kernels of accelerators, in interpret mode, for all masks."""
    _, params, gradient = gradient_of(name)
    given = (params, frozen, laid_out[0])
    by_einsum = jax.jit(gradient)(*given)
    calls = in_blocks(monkeypatch, 12)
    assert_close(jax.jit(lambda *given: gradient(*given))(*given), by_einsum)
    assert len(calls) >= 2
