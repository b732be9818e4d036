"""Every kind of drafter drafts as it is trained, can be saved and loaded, and can be trained."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import jax
import numpy as np
import pytest

from moa_jax import load_drafter, load_target
from moa_jax.config import (
    BorrowedConfig,
    Eagle3Config,
    EagleConfig,
    GlideConfig,
    IndependentConfig,
    MoaConfig,
)
from moa_jax.pretrained import LoadedDrafter, Target, save_drafter
from tests.conftest import slow
from tests.drafting import (
    assert_drafting_equals_training,
    assert_training_makes_a_drafter,
    calm_target_of,
    untrained,
)

SMALL = dict(hidden_size=24, num_heads=3, num_kv_heads=1, head_dim=8)


def one_layer(target: Target, **sizes: int) -> Any:
    """Returns the config of a model of one layer: the target's, but for `sizes` of its layer."""
    block = dataclasses.replace(target.config.block, **sizes)
    return dataclasses.replace(target.config, num_layers=1, block=block)


# Of each kind, configs for a target of five layers.
KINDS: dict[str, tuple[str, Any]] = {
    "eagle": ("eagle", lambda _: EagleConfig(2, 44)),
    "eagle-authors": (
        "eagle",
        lambda _: EagleConfig(3, 36, input_norm=True, fc_bias=False, names="authors"),
    ),
    "eagle3": ("eagle3", lambda _: Eagle3Config(2, 44, draft_ids=tuple(range(3, 90, 2)))),
    "eagle3-whole": ("eagle3", lambda _: Eagle3Config(1, 36, tapped_layers=(0, 2, 4))),
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
    grown = lambda leaf: leaf if leaf.ndim == 1 else scale * leaf
    return found._replace(params=jax.tree.map(grown, found.params))


def cut_short(target: Target) -> LoadedDrafter:
    """Returns the target's first layer as a drafter."""
    params = target.params | {"layers": target.params["layers"][:1]}
    return LoadedDrafter(
        "independent", IndependentConfig(one_layer(target)), params, (), target.folder, None
    )


@pytest.mark.parametrize("kind", ["eagle3", *(slow(x) for x in KINDS if x != "eagle3")])
def test_cached_drafting_equals_training(kind, wide_target):
    assert_drafting_equals_training(wide_target, drafter_of(kind, wide_target))


@pytest.mark.parametrize("kind", KINDS)
def test_saved_as_it_is_loaded(kind, wide_target, tmp_path):
    drafter = drafter_of(kind, wide_target)
    save_drafter(tmp_path / "d", drafter.method, drafter.config, drafter.params, wide_target)
    assert json.loads((tmp_path / "d" / "config.json").read_text())["method"] == drafter.method
    again = load_drafter(tmp_path / "d", wide_target)
    assert (again.method, again.config) == (drafter.method, drafter.config)
    jax.tree.map(np.testing.assert_array_equal, again.params, drafter.params)


@pytest.mark.slow
@pytest.mark.parametrize(
    "config_for",
    [
        lambda _: MoaConfig(1, 24, 1, 24, 1, 16, layer_mixing="last", has_self_attention=False),
        lambda _: GlideConfig(1, 24, 4),
        lambda target: BorrowedConfig(one_layer(target, intermediate_size=24)),
        lambda target: IndependentConfig(one_layer(target, intermediate_size=24)),
    ],
    ids=["moa-ablated", "glide", "borrowed", "independent"],
)
def test_a_trained_one_decodes(config_for, small_target, tmp_path):
    config = config_for(load_target(small_target))
    assert_training_makes_a_drafter(small_target, tmp_path, config)
