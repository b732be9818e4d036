"""Small models as drafters, which read tokens and no activations of the target.

    independent            a whole model, of any width, with the target's token ids
    independent-borrowed   the decoder layers and final norm of a model of the target's width,
                           between the target's embedding and the target's head

The first kind is usually called a draft model; the second kind is that of the MoA paper's code (its
train/independent.py). In training and in decoding, each token sees all earlier tokens.

Embeddings of the same vocabulary may have different numbers of rows, since some are padded. The
last logits of a model with more rows than the target are dropped. A model with fewer rows drafts
only ids that have a row, and reads any other id as its last row.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moa_jax.config import BorrowedConfig, IndependentConfig, Objective, TargetConfig
from moa_jax.data.batch import Batch
from moa_jax.drafters import distill_loss, losses
from moa_jax.drafters.api import Drafter, DrafterLoss, Params, Shared, TapSpec, TargetActivations
from moa_jax.drafters.tree import Nodes, by_level
from moa_jax.errors import InputError
from moa_jax.files.copies import EMBEDDING, HEAD, check_rotary, with_own_head
from moa_jax.files.hf_config import target_config_from_hf, target_config_to_hf
from moa_jax.files.registry import DrafterKind, FileLayout, Files, check_pairing, target_sizes
from moa_jax.model import convert, llama, masks

Array = jax.Array

OUTER = ("embed", "lm_head")  # parts of a model besides its layers and final norm


class DraftModel(NamedTuple):
    """A small model, and the source of its weights."""

    model: TargetConfig
    # (params, shared) -> a whole model's weights
    weights: Callable[[Params, Shared], Params]
    learns_features: bool  # whether training fits the head's input to the target's
    num_ids: int  # number of target ids that have an embedding


def make_own(
    cfg: IndependentConfig, target_cfg: TargetConfig, objective: Objective | None = None
) -> Drafter:
    """A drafter with a whole model; `objective` matters for training only."""
    if objective is not None:  # files come with tokenizers, a training config does not
        check_pairing(target_sizes(cfg.model), {"vocab_size": target_cfg.vocab_size})
    num_ids = min(cfg.model.vocab_size, target_cfg.vocab_size)
    small = DraftModel(
        cfg.model, lambda params, shared: params, learns_features=False, num_ids=num_ids
    )
    drafter = _make(small, objective, partial(llama.init, cfg.model))
    has_all = num_ids == target_cfg.vocab_size
    return drafter._replace(own_head=True, draft_ids=None if has_all else tuple(range(num_ids)))


def make_borrowed(
    cfg: BorrowedConfig, target_cfg: TargetConfig, objective: Objective | None = None
) -> Drafter:
    """Layers between the target's embedding and head; `objective` matters for training only."""
    check_pairing(target_sizes(cfg.model), {"hidden_size": target_cfg.block.hidden_size})

    def init(key: Array) -> Params:
        drawn = llama.init(cfg.model, key)
        return {name: part for name, part in drawn.items() if name not in OUTER}

    weights = lambda params, shared: shared | params
    num_ids = target_cfg.vocab_size
    return _make(
        DraftModel(cfg.model, weights, learns_features=True, num_ids=num_ids), objective, init
    )


def _make(
    small: DraftModel, objective: Objective | None, init: Callable[[Array], Params]
) -> Drafter:
    propose, draft_one = by_level(partial(step, small))
    return Drafter(
        taps=TapSpec(),
        shared_params=lambda params: {name: params[name] for name in OUTER if name in params},
        init=init,
        init_cache=partial(llama.init_caches, small.model),
        extend=partial(extend, small),
        propose=propose,
        condense=lambda params, length_B, tapped: (),
        draft_one=draft_one,
        loss=make_loss(small, objective or Objective()),
        teacher_forced=partial(teacher_forced, small),
        head=partial(head, small),
    )


def head(small: DraftModel, params: Params, shared: Shared, feature_BTD: Array) -> Array:
    """Logits of the model's own or the borrowed head, without rows beyond `num_ids`."""
    return llama.unembed(small.weights(params, shared), feature_BTD)[..., : small.num_ids]


# ---- decoding -----------------------------------------------------------------------------


def extend(
    small: DraftModel,
    params: Params,
    shared: Shared,
    caches: llama.Caches,
    tokens_BT: Array,
    length_B: Array,
    digest: tuple[()],
) -> llama.Caches:
    """Runs the model over verified tokens, whose rows in a drafted tree were at other positions."""
    T = tokens_BT.shape[1]
    position_BT = length_B[:, None] + jnp.arange(T)
    context = llama.Context(position_BT, masks.cache_mask(length_B, masks.causal_tree(T)), caches)
    return _forward(small, params, shared, tokens_BT, context).caches


def step(
    small: DraftModel, params: Params, shared: Shared, caches: llama.Caches, nodes: Nodes
) -> tuple[Array, llama.Caches]:
    """Logits after some nodes, which see all rows before the root and their ancestors."""
    context = llama.Context(nodes.position_BW, nodes.seen, caches)
    found = _forward(small, params, shared, nodes.tokens_BW, context)
    return head(small, params, shared, found.hidden_BTD), found.caches


def _forward(
    small: DraftModel, params: Params, shared: Shared, tokens_BT: Array, context: llama.Context
) -> llama.ForwardOutput:
    """A pass that replaces ids without an embedding by the last id with an embedding."""
    tokens_BT = jnp.minimum(tokens_BT, small.num_ids - 1)
    return llama.forward(small.model, small.weights(params, shared), tokens_BT, context)


# ---- training -----------------------------------------------------------------------------


def feature(small: DraftModel, params: Params, shared: Shared, batch: Batch, dtype: Any) -> Array:
    """Inputs of the head (B, T, D) over whole conversations."""
    weights = small.weights(params, shared)
    context = llama.Context(batch.position_BT, masks.causal(batch.segment_BT))
    return llama.forward(small.model, weights, batch.tokens_BT, context, dtype=dtype).hidden_BTD


def make_loss(small: DraftModel, objective: Objective) -> DrafterLoss:
    """The token loss and, with a borrowed head, the distance of features.

    References: authors' train/independent.py, which starts from a trained model and freezes its
    final norm; our model starts from random weights, and its norm is trained too.
    """

    def loss(
        params: Params,
        shared: Shared,
        batch: Batch,
        tapped: TargetActivations,
        key: Array,
        progress: Array,
    ) -> tuple[Array, dict[str, Array]]:
        feature_BTD = feature(small, params, shared, batch, tapped.hidden_BTD.dtype)
        draft = distill_loss.Draft(feature_BTD, batch.response_BT, tapped.draftable_BT)
        own_head = None if small.learns_features else partial(head, small, params, shared)
        (parts,) = distill_loss.token_losses(
            objective, shared, own_head, tapped.hidden_BTD, [draft]
        )
        if not small.learns_features:
            return distill_loss.weighted(objective.loss, parts, None, progress)
        distance_BT = losses.smooth_l1(feature_BTD, tapped.hidden_BTD)
        parts["feature_loss"] = losses.answer_mean(distance_BT, batch.response_BT)
        return distill_loss.weighted(objective.loss, parts, parts["feature_loss"], progress)

    return loss


def teacher_forced(
    small: DraftModel,
    params: Params,
    shared: Shared,
    batch: Batch,
    tapped: TargetActivations,
    known_BT: Array,
    horizon: int,
) -> Array:
    """The training forward, since the drafter never depends on the target's activations."""
    return feature(small, params, shared, batch, tapped.hidden_BTD.dtype)


# ---- files --------------------------------------------------------------------------------


def borrowed_table(cfg: BorrowedConfig, target_cfg: TargetConfig) -> convert.Table:
    """The tensors of a whole model, except its embedding and head."""
    whole = convert.target_table(cfg.model)
    return {path: packing for path, packing in whole.items() if path[0] not in OUTER}


def detect_own(config: dict[str, Any], names: set[str]) -> bool:
    """Whether the files hold a whole model."""
    return {"model.embed_tokens.weight", "model.norm.weight"} <= names


def read_own(
    files: Files, target_cfg: TargetConfig, reused: int | None
) -> tuple[IndependentConfig, tuple[str, ...]]:
    """Read a model's config, with a notice if its files untie the head from the embedding."""
    cfg = _model_config(files)
    model = with_own_head(cfg, files.shapes, files.read)
    if model == cfg:
        return IndependentConfig(model), ()
    notice = f"{HEAD} differs from {EMBEDDING}, so the drafter uses it although its config.json"
    return IndependentConfig(model), (f"{notice} ties the two",)


def read_borrowed(
    files: Files, target_cfg: TargetConfig, reused: int | None
) -> tuple[BorrowedConfig, tuple[str, ...]]:
    """Read a model's config; InputError if its width is not the target's.

    A notice lists an embedding or a head in the files, which is not used: that of the trained
    model may differ from the target's (authors' train/independent.py).
    """
    check_pairing(files.config, {"hidden_size": target_cfg.block.hidden_size})
    own = [name for name in (EMBEDDING, HEAD) if name in files.shapes]
    notice = f"the drafter's own {' and '.join(own)} are not used: this kind uses the target's"
    return BorrowedConfig(_model_config(files)), (notice,) if own else ()


def _model_config(files: Files) -> TargetConfig:
    cfg = target_config_from_hf(files.config)
    check_rotary(files.shapes, files.read, cfg.block)
    return cfg


def write_own(
    cfg: IndependentConfig, target_cfg: TargetConfig, layout: FileLayout = "ours"
) -> dict[str, Any]:
    """The config.json of the model, readable by any library that loads models."""
    return target_config_to_hf(cfg.model)


def write_borrowed(
    cfg: BorrowedConfig, target_cfg: TargetConfig, layout: FileLayout = "ours"
) -> dict[str, Any]:
    """The config.json of the whole model; no other library loads files without OUTER."""
    if layout != "ours":
        raise InputError(
            f"layout {layout} has no models that borrow embedding and head; choose ours"
        )
    return target_config_to_hf(cfg.model)


INDEPENDENT = DrafterKind(
    IndependentConfig,
    detect_own,
    read_own,
    lambda cfg, target_cfg: convert.target_table(cfg.model),
    write_own,
    make_own,
    extras=(HEAD,),  # a second copy of a tied head
)
INDEPENDENT_BORROWED = DrafterKind(
    BorrowedConfig,
    lambda config, names: False,  # the files look like those of a whole model
    read_borrowed,
    borrowed_table,
    write_borrowed,
    make_borrowed,
    extras=(EMBEDDING, HEAD),  # the authors' files keep them
)
