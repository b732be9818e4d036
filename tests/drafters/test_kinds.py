"""Every kind of drafter drafts as it is trained, can be saved and loaded, and can be trained."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from moa_jax import load_drafter, load_target
from moa_jax.config import BorrowedConfig, Eagle3Config, EagleConfig, GlideConfig, IndependentConfig
from moa_jax.pretrained import LoadedDrafter, Target, save_drafter
from tests import drafting
from tests.conftest import slow
from tests.drafting import calm_target_of, untrained
from tests.model_folders import refusal, tensors_of

SMALL = dict(hidden_size=24, num_heads=3, num_kv_heads=1, head_dim=8)


def one_layer(target: Target, **sizes: int) -> Any:
    """Returns the config of a model of one layer: the target's, but for `sizes` of its layer."""
    block = dataclasses.replace(target.config.block, **sizes)
    return dataclasses.replace(target.config, num_layers=1, block=block)


def qwen3_layer(target: Target) -> Eagle3Config:
    """Returns the config of a drafter as the speculators library may train it."""
    sizes = dict(num_kv_heads=2, intermediate_size=44)
    block = dataclasses.replace(target.config.block, **sizes, qk_norm=True)
    norms = dict.fromkeys(("norm_before_fc", "norm_before_residual", "norm_output"), True)
    return Eagle3Config(2, 44, block, tuple(range(3, 90, 2)), (0, 1, 3, 4), **norms)


# Of each kind, configs for a target of five layers.
KINDS: dict[str, tuple[str, Any]] = {
    "eagle": ("eagle", lambda _: EagleConfig(2, 44)),
    "eagle-authors": (
        "eagle",
        lambda _: EagleConfig(3, 36, input_norm=True, fc_bias=False, names="authors"),
    ),
    "eagle3": ("eagle3", lambda _: Eagle3Config(2, 44, draft_ids=tuple(range(3, 90, 2)))),
    "eagle3-whole": ("eagle3", lambda _: Eagle3Config(1, 36, tapped_layers=(0, 2, 4))),
    "eagle3.1": (
        "eagle3",
        lambda _: Eagle3Config(2, 44, tapped_layers=(1, 4), fc_norm=True, norm_output=True),
    ),
    "eagle3-qwen3": ("eagle3", qwen3_layer),
    "glide": ("glide", lambda _: GlideConfig(2, 44, 3)),
    "small": ("independent", lambda target: IndependentConfig(one_layer(target, **SMALL))),
    "borrowed": ("independent-borrowed", lambda target: BorrowedConfig(one_layer(target))),
}


@pytest.fixture(scope="module")
def wide_target(tmp_path_factory) -> Target:
    """Returns a calm target with layers enough for three tapped ones and some between them."""
    return calm_target_of(5, tmp_path_factory.mktemp("calm") / "target")


def drafter_of(kind: str, target: Target, scale: float = 6.0) -> LoadedDrafter:
    """Returns a drafter; its weights are large enough for its drafts to differ."""
    method, config_for = KINDS[kind]
    found = untrained(target, method, config_for(target))
    grown = lambda leaf: leaf * (np.linspace(0.5, 1.5, leaf.size) if leaf.ndim == 1 else scale)
    return found._replace(params=jax.tree.map(grown, found.params))


def cut_short(target: Target) -> LoadedDrafter:
    """Returns the target's first layer as a drafter."""
    params = target.params | {"layers": target.params["layers"][:1]}
    config = IndependentConfig(one_layer(target))
    return LoadedDrafter("independent", config, params, (), target.folder, None)


@pytest.mark.parametrize(
    "kind", ["eagle3", *map(slow, ("eagle", "eagle3-qwen3", "glide", "small", "borrowed"))]
)
def test_cached_drafting_equals_training(kind, wide_target):
    drafting.assert_drafting_equals_training(wide_target, drafter_of(kind, wide_target))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_as_it_is_loaded(kind, wide_target, tmp_path):
    drafter = drafter_of(kind, wide_target)
    saved = (drafter.method, drafter.config, drafter.params, wide_target)
    save_drafter(tmp_path / "d", *saved)
    assert json.loads((tmp_path / "d" / "config.json").read_text())["method"] == drafter.method
    again = load_drafter(tmp_path / "d", wide_target)
    assert (again.method, again.config) == (drafter.method, drafter.config)
    jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)
    if kind in ("eagle3-whole", "eagle3.1", "eagle3-qwen3"):
        save_drafter(tmp_path / "d", *saved, layout="speculators")
        assert ("d2t" in tensors_of(tmp_path / "d")) == bool(drafter.config.draft_ids)
        assert load_drafter(tmp_path / "d", wide_target).config == drafter.config
        return
    said = refusal(save_drafter, tmp_path / "d", *saved, layout="speculators")
    named = "layer_ids: layout speculators cannot have [2, 2, 2]"  # the default of five layers
    assert (named if kind == "eagle3" else f"no drafters of kind {drafter.method};") in said


@pytest.mark.slow
@pytest.mark.parametrize("method", ["glide", "independent"])
def test_a_trained_one_decodes(method, small_target, tmp_path):
    small = IndependentConfig(one_layer(load_target(small_target), intermediate_size=24))
    config = {"glide": GlideConfig(1, 24, 4), "independent": small}[method]
    drafting.assert_training_makes_a_drafter(small_target, tmp_path, config)
