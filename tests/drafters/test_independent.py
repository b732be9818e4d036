"""Small models as drafters, with their own embedding and head or with the target's."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import load_drafter
from moa_jax.pretrained import save_target
from moa_jax.training.distillation import tap
from tests.compare import assert_close, assert_norm_close, assert_value
from tests.conftest import arrays_of, golden_cases
from tests.drafters.test_kinds import cut_short
from tests.drafting import calm_target, loss_and_gradient, make, recorded_training  # noqa: F401
from tests.model_folders import refusal

BORROWED = "independent-borrowed"
AUTHORS = "spec_model."  # before the names of recorded gradients
recorded = pytest.mark.parametrize("folder", golden_cases("independent_", "train.npz"))


# ---- recorded cases -----------------------------------------------------------------------


@recorded
def test_draft_training_forward(folder):
    target, drafter, arrays, batch = recorded_training(folder)
    functions = make(target, drafter)
    shared = functions.shared_params(target.params)

    @jax.jit
    def forward(batch):
        tapped = tap(target.config, functions, target.params, batch, jnp.float32)
        known_BT = ~batch.response_BT
        rest = (batch, tapped, known_BT, 5)
        feature_BTD = functions.teacher_forced(drafter.params, shared, *rest)
        return feature_BTD, functions.head(drafter.params, shared, feature_BTD)

    real_BT = arrays["attention_mask"] == 1
    for name, ours in zip(("feature", "logits"), forward(batch), strict=True):
        assert_close(ours[real_BT], arrays[name][real_BT], name)


@pytest.mark.parametrize("folder", golden_cases("independent_", "grads.npz"))
def test_draft_loss_and_gradients(folder):
    """Compares gradients of the layers; the authors do not train the final norm, this code does."""
    target, drafter, arrays, batch = recorded_training(folder)
    parts, gradient = loss_and_gradient(target, drafter, batch)
    for theirs, ours in (("forward_KL", "cross_entropy"), ("feature_loss",) * 2, ("loss",) * 2):
        assert_value(parts[ours], arrays[theirs], theirs)
    expected = arrays_of(folder / "grads.npz")
    assert {AUTHORS + name for name in gradient} - set(expected) == {f"{AUTHORS}model.norm.weight"}
    for name in expected:
        assert_norm_close(gradient[name.removeprefix(AUTHORS)], expected[name], name)


# ---- any pair -----------------------------------------------------------------------------


def test_any_folder_of_a_model_is_a_drafter(calm_target, tmp_path):  # noqa: F811
    """A folder that transformers wrote needs no further settings."""
    drafter = load_drafter(calm_target.folder, calm_target)
    assert (drafter.method, drafter.notices) == ("independent", ())
    assert drafter.config.model == calm_target.config
    short = cut_short(calm_target)
    save_target(tmp_path / "short", short.config.model, short.params, dtype=jnp.float32)
    again = load_drafter(tmp_path / "short", calm_target)
    assert again.config == short.config
    jax.tree.map(np.testing.assert_array_equal, again.params, short.params)


def test_models_of_another_vocabulary_or_width_are_refused(calm_target, tmp_path):  # noqa: F811
    short = cut_short(calm_target)
    save_target(tmp_path / "short", short.config.model, short.params)
    more = dataclasses.replace(calm_target.config, vocab_size=102)
    said = refusal(load_drafter, tmp_path / "short", calm_target._replace(config=more))
    assert "vocab_size is 101 in its files and 102 in the target" in said
    block = dataclasses.replace(calm_target.config.block, hidden_size=64)
    wide = calm_target._replace(config=dataclasses.replace(calm_target.config, block=block))
    said = refusal(load_drafter, tmp_path / "short", wide, method=BORROWED)
    assert "hidden_size is 60 in its files and 64 in the target" in said
