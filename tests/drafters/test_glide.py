"""The GLIDE drafter against the authors' recordings."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.drafters import glide, losses
from moa_jax.model import masks
from moa_jax.training.distillation import tap
from tests.compare import assert_close, assert_norm_close, assert_value
from tests.conftest import arrays_of, golden_cases
from tests.drafting import loss_and_gradient, make, recorded_training

recorded = pytest.mark.parametrize("folder", golden_cases("glide_", "train.npz"))


# ---- recorded cases -----------------------------------------------------------------------


@recorded
def test_draft_training_forward(folder):
    target, drafter, arrays, batch = recorded_training(folder)
    cfg, functions = drafter.config, make(target, drafter)
    assert cfg.block_size == arrays["block_size"]
    seen = masks.earlier_blocks(batch.position_BT, batch.segment_BT, cfg.block_size)
    np.testing.assert_array_equal(seen.mask(), arrays["ca_mask"])

    @jax.jit
    def trace(batch):
        tapped = tap(target.config, functions, target.params, batch, jnp.float32)
        layer, shared = glide.layer_of(cfg, target.config), functions.shared_params(target.params)
        found = glide.trace(layer, drafter.params, shared, batch, tapped, seen)
        return found, functions.head(drafter.params, shared, found.feature_BTD)

    found, logits_BTV = trace(batch)
    later = (slice(None), slice(cfg.block_size, None))
    assert_close(found.self_BTD, arrays["ca_in"], "self-attention")
    assert_close(found.cross_BTD[later], arrays["ca_out"][later], "cross-attention")
    assert (np.asarray(found.cross_BTD[:, : cfg.block_size]) == 0).all()
    assert_close(found.feature_BTD[later], arrays["feature"][later], "feature")
    assert_close(logits_BTV[later], arrays["logits"][later], "logits")


@recorded
def test_draft_loss_and_gradients(folder):
    """Compares answers after the first block, and the recordings if that block has no answer.

    In the recordings, the first block reads all of the memory. With one layer, it does not affect
    later tokens, which are equal in both.
    """
    target, drafter, arrays, batch = recorded_training(folder)
    later_BT = batch.position_BT >= drafter.config.block_size
    some = batch._replace(response_BT=batch.response_BT & later_BT)
    parts, gradient = loss_and_gradient(target, drafter, some)
    goal_BTV = arrays["hidden_states"][-1] @ np.asarray(target.params["lm_head"])
    each_BT = losses.soft_cross_entropy(jnp.asarray(goal_BTV), jnp.asarray(arrays["logits"]))
    expected = losses.answer_mean(each_BT, some.response_BT)
    assert_value(parts["cross_entropy"], expected, "cross-entropy")
    assert_value(parts["loss"], 0.1 * expected, "loss")
    if bool((some.response_BT == batch.response_BT).all()):
        assert_value(parts["cross_entropy"], arrays["forward_KL"], "recorded cross-entropy")
        assert_value(parts["loss"], arrays["loss"], "recorded loss")
        grads = arrays_of(folder / "grads.npz")
        assert gradient.keys() == set(grads)
        for name, ours in gradient.items():
            assert_norm_close(ours, grads[name], name)
