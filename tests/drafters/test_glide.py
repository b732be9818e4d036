"""The GLIDE drafter against the authors' recorded numbers, as files, in packed rows."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import load_drafter, load_target
from moa_jax.config import GlideConfig
from moa_jax.data.batch import Batch
from moa_jax.drafters import glide, losses
from moa_jax.model import masks
from moa_jax.pretrained import save_drafter
from moa_jax.training.distillation import tap
from tests.compare import assert_close, assert_norm_close, assert_value
from tests.conftest import arrays_of, golden_cases
from tests.drafting import (
    calm_target,  # noqa: F401
    loss_and_gradient,
    make,
    recorded_training,
    untrained,
)
from tests.model_folders import assert_same_tensors, edit_json, refusal

CONFIG = GlideConfig(2, 44, 3)
recorded = pytest.mark.parametrize("folder", golden_cases("glide_", "train.npz"))


def comparable(batch: Batch, block_size: int) -> Batch:
    """Answers without the first block, whose tokens read all of the memory in the recordings.

    One layer mixes nothing of them into later tokens, which are the same in both.
    """
    later_BT = batch.position_BT >= block_size
    return batch._replace(response_BT=batch.response_BT & later_BT)


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
def test_draft_loss(folder):
    """Over answer tokens after the first block, and the recorded one where these are all."""
    target, drafter, arrays, batch = recorded_training(folder)
    some = comparable(batch, drafter.config.block_size)
    parts, _ = loss_and_gradient(target, drafter, some)
    goal_BTV = arrays["hidden_states"][-1] @ np.asarray(target.params["lm_head"])
    each_BT = losses.soft_cross_entropy(jnp.asarray(goal_BTV), jnp.asarray(arrays["logits"]))
    expected = losses.answer_mean(each_BT, some.response_BT)
    assert_value(parts["cross_entropy"], expected, "cross-entropy")
    assert_value(parts["loss"], 0.1 * expected, "loss")
    if bool((some.response_BT == batch.response_BT).all()):
        assert_value(parts["cross_entropy"], arrays["forward_KL"], "recorded cross-entropy")
        assert_value(parts["loss"], arrays["loss"], "recorded loss")


@pytest.mark.parametrize("folder", golden_cases("glide_", "grads.npz"))
def test_draft_gradients(folder):
    target, drafter, _, batch = recorded_training(folder)
    some = comparable(batch, drafter.config.block_size)
    if not bool((some.response_BT == batch.response_BT).all()):
        pytest.skip("answers start in the first block, which the recordings compute otherwise")
    _, gradient = loss_and_gradient(target, drafter, batch)
    expected = arrays_of(folder / "grads.npz")
    assert gradient.keys() == set(expected)
    for name, ours in gradient.items():
        assert_norm_close(ours, expected[name], name)


@pytest.mark.parametrize("folder", golden_cases("glide_", "draft/model.safetensors"))
def test_draft_files_are_read_and_written_bit_for_bit(folder, tmp_path):
    target = load_target(folder / "target", jnp.float32)
    drafter = load_drafter(folder / "draft", target)
    assert (drafter.method, drafter.notices) == ("glide", ())
    for layout in ("ours", "authors"):
        new = tmp_path / layout
        save_drafter(new, "glide", drafter.config, drafter.params, target, layout=layout)
        assert_same_tensors(folder / "draft", new)
        assert load_drafter(new, target).config == drafter.config
    for layout in ("vllm", "speculators"):
        said = refusal(
            save_drafter, tmp_path / layout, "glide", drafter.config, {}, target, layout=layout
        )
        assert f"layout {layout} has no GLIDE drafters" in said


# ---- any pair -----------------------------------------------------------------------------


def test_a_packed_row_gives_the_loss_of_rows_of_their_own(calm_target):  # noqa: F811
    """Blocks count from the start of each conversation, and none sees another."""
    drafter = untrained(calm_target, "glide", CONFIG)
    tokens = np.random.default_rng(5).integers(0, 101, 19).astype(np.int32)
    first, second = tokens[:11], tokens[11:]
    segment_BT = np.array([[1] * 11 + [2] * 8], np.int32)
    position_BT = np.concatenate([np.arange(11), np.arange(8)])[None].astype(np.int32)
    response_BT = position_BT > 4
    packed = Batch(*map(jnp.asarray, (tokens[None], segment_BT, position_BT, response_BT)))
    rows = np.zeros((2, 11), np.int32)
    rows[0], rows[1, :8] = first, second
    real_BT = np.arange(11) < np.array([[11], [8]])
    index_BT = np.tile(np.arange(11, dtype=np.int32), (2, 1)) * real_BT
    apart = (rows, real_BT.astype(np.int32), index_BT, (index_BT > 4) & real_BT)
    losses_of = [
        loss_and_gradient(calm_target, drafter, batch)[0]["loss"]
        for batch in (packed, Batch(*map(jnp.asarray, apart)))
    ]
    assert_value(*losses_of, "loss")


def test_it_is_for_its_target_alone(calm_target, tmp_path):  # noqa: F811
    drafter = untrained(calm_target, "glide", CONFIG)
    save_drafter(tmp_path / "draft", "glide", CONFIG, drafter.params, calm_target)
    for key, size in (("vocab_size", 102), ("num_layers", 4)):
        config = dataclasses.replace(calm_target.config, **{key: size})
        said = refusal(load_drafter, tmp_path / "draft", calm_target._replace(config=config))
        assert "belongs to another target" in said
    block = dataclasses.replace(calm_target.config.block, hidden_size=64)
    wide = calm_target._replace(config=dataclasses.replace(calm_target.config, block=block))
    edit_json(tmp_path / "draft" / "config.json", target={})
    assert "hidden_size is 60 in its files and 64" in refusal(
        load_drafter, tmp_path / "draft", wide
    )
