"""The EAGLE-1 and EAGLE-2 drafter (2401.15077, 2406.16858): one layer over token and feature.

    embedding of the token --+
                             +--> fc --> decoder layer --> feature --> target's head
    feature before it -------+

A feature is trained to match the target's final-normed state. EAGLE-1 and EAGLE-2 differ only in
the drafted trees, which are set by a `DraftShape`, not by the drafter. Files have one of two
layouts: the official layout, or the layout of the MoA paper's code (its train/eagle.py), whose
layer has an input norm and whose fc has no bias.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from moa_jax.config import EagleConfig, Objective, TargetConfig
from moa_jax.drafters import distill_loss, eagle_common, losses
from moa_jax.drafters.api import Drafter, Shared, TapSpec
from moa_jax.files.copies import EMBEDDING, HEAD
from moa_jax.files.layer_files import block_of, read_sizes, write_sizes
from moa_jax.files.registry import DrafterKind, FileLayout, Files
from moa_jax.model import convert
from moa_jax.model.convert import Table
from moa_jax.model.layers import Linear, RMSNorm

Array = jax.Array

PREFIXES = {"official": ("fc", "layers.0."), "authors": ("spec_model_fc", "spec_model.")}


class Eagle2Layer(eagle_common.EagleLayer):
    """fc, then a decoder layer with or without an input norm."""

    input_norm_there: bool
    fc_bias: bool

    def setup(self) -> None:
        super().setup()
        self.fc = Linear((self.block.hidden_size,), self.fc_bias)
        if self.input_norm_there:
            self.input_norm = RMSNorm(self.block.rms_norm_eps)

    def layer_inputs(self, embedding_BTD: Array, feature_BTD: Array) -> tuple[Array, Array]:
        x_BTD = self.fc(jnp.concatenate([embedding_BTD, feature_BTD], axis=-1))
        return x_BTD, self.input_norm(x_BTD) if self.input_norm_there else x_BTD


def make(cfg: EagleConfig, target_cfg: TargetConfig, objective: Objective | None = None) -> Drafter:
    """The drafter as pure functions; `objective` matters for training only."""
    return eagle_common.make(layer(cfg, target_cfg), objective or Objective())


def layer(cfg: EagleConfig, target_cfg: TargetConfig) -> eagle_common.Layer:
    """The drafter's layer for a target."""
    block = block_of(cfg, target_cfg)
    module = Eagle2Layer(block, cfg.input_norm, cfg.fc_bias)
    return eagle_common.Layer(
        block=block,
        taps=TapSpec(hidden=True),
        init=partial(eagle_common.init_layer, module),
        fuse=lambda params, tapped: tapped.hidden_BTD,
        rows=lambda params, *rest: module.apply({"params": params}, *rest, method="rows"),
        apply=lambda params, *rest: module.apply({"params": params}, *rest),
        loss=loss,
        shifted_mask=cfg.shifted_mask,
    )


def loss(
    objective: Objective,
    shared: Shared,
    head: Callable[[Array], Array] | None,
    drafts: Sequence[distill_loss.Draft],
    goal_BTD: Array,
    progress: Array,
) -> tuple[Array, dict[str, Array]]:
    """The token loss and the distance of features, over answer tokens that follow another token.

    References: authors' train/eagle.py (0.1 x cross-entropy + feature distance).
    """
    each = distill_loss.token_losses(objective, shared, head, goal_BTD, drafts)
    for parts, draft in zip(each, drafts, strict=True):
        distance_BT = losses.smooth_l1(draft.feature_BTD, goal_BTD)
        parts["feature_loss"] = losses.answer_mean(distance_BT, draft.response_BT)
    parts = eagle_common.mean_of_passes(each, objective.feedback.decay)
    return distill_loss.weighted(objective.loss, parts, parts["feature_loss"], progress)


# ---- files --------------------------------------------------------------------------------


def table(cfg: EagleConfig, target_cfg: TargetConfig) -> Table:
    """The table of the drafter's stored tensors."""
    block = block_of(cfg, target_cfg)
    fc, prefix = PREFIXES[cfg.names]
    width = block.hidden_size
    found = convert.block_table(block, prefix) | {
        ("fc", "kernel"): convert.kernel(
            ("features", "embed"), (f"{fc}.weight",), 2 * width, (width,)
        )
    }
    if cfg.fc_bias:
        found["fc", "bias"] = convert.vector((None,), (f"{fc}.bias",), (width,))
    if not cfg.input_norm:
        del found["input_norm", "scale"]
    return found


def detect(config: dict[str, Any], names: set[str]) -> bool:
    """Whether the files hold an EAGLE-1 or EAGLE-2 drafter."""
    official = {"fc.weight", "layers.0.self_attn.q_proj.weight"} <= names
    return official or "spec_model_fc.weight" in names


def read_config(
    files: Files, target_cfg: TargetConfig, reused: int | None
) -> tuple[EagleConfig, tuple[str, ...]]:
    """Read sizes and layout from the tensors, heads and RoPE from config.json.

    Raises InputError if the files contradict the target.
    """
    names = "authors" if "spec_model_fc.weight" in files.shapes else "official"
    fc, prefix = PREFIXES[names]
    cfg = EagleConfig(
        **read_sizes(files, target_cfg, prefix),
        input_norm=f"{prefix}input_layernorm.weight" in files.shapes,
        fc_bias=f"{fc}.bias" in files.shapes,
        names=names,
        shifted_mask=bool(files.config.get("shifted_mask", False)),
    )
    return cfg, ()


def write_config(
    cfg: EagleConfig, target_cfg: TargetConfig, layout: FileLayout = "ours"
) -> dict[str, Any]:
    """The config.json of a drafter; `cfg.names` sets the tensor names in every layout."""
    config = write_sizes(cfg, target_cfg, layout, "eagle")
    if layout == "ours":
        config["shifted_mask"] = cfg.shifted_mask
    return config | ({"architectures": ["EAGLE"]} if cfg.names == "authors" else {})


KIND = DrafterKind(
    EagleConfig,
    detect,
    read_config,
    table,
    write_config,
    make,
    copies={"embed_tokens.weight": EMBEDDING, "lm_head.weight": HEAD},
)
