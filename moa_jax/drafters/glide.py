"""The GLIDE drafter (2402.02082): one decoder layer that also reads the target's last layer.

    embeddings -> self-attention -> cross-attention -> feed-forward -> target's head
                                        ^
                    keys and values of the target's last layer, verified tokens only

Cross-attention has only a query and an output projection: its memory is the target's cache, with
keys rotated a second time. Neither cross-attention nor the head has a norm before it. Files have
the tensor names of the MoA paper's code (its train/glide.py).
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moa_jax.config import BlockConfig, GlideConfig, Objective, TargetConfig
from moa_jax.data.batch import Batch
from moa_jax.drafters import distill_loss
from moa_jax.drafters.api import Drafter, DrafterLoss, Params, Shared, TapSpec, TargetActivations
from moa_jax.drafters.tree import Nodes, by_level
from moa_jax.errors import InputError
from moa_jax.files.hf_config import check_same_block, target_config_to_hf
from moa_jax.files.registry import (
    DrafterKind,
    FileLayout,
    Files,
    check_pairing,
    check_stated,
    layer_sizes,
    mispaired,
    sizes_of_layer,
)
from moa_jax.model import cache as kv_cache
from moa_jax.model import convert, llama, masks
from moa_jax.model.attention import Seen, sees_anything
from moa_jax.model.cache import KV
from moa_jax.model.layers import (
    MLP,
    Attention,
    CrossAttention,
    RMSNorm,
    Rotation,
    rotate,
    rotation,
    rows_of,
)

Array = jax.Array

SELF, CROSS = "self_attention.", "cross_attention."  # prefixes of stored tensor names
SIZES = ("self_attention_num_key_value_heads", "self_attention_intermediate_size")


class GlideCache(NamedTuple):
    """Rows of the drafter's self-attention, and of the target's last layer; n = length.

    row       0 ......... n-1 | n ............ | ....... S-1
    own       verified tokens | root, drafts   | left-overs, never seen
    memory    verified tokens | left-overs, never seen
    """

    own: KV
    memory: KV


class GlideTrace(NamedTuple):
    """Stages of a pass, for the loss and for parity tests."""

    self_BTD: Array  # after self-attention and its residual; the input of cross-attention's queries
    cross_BTD: Array  # output of cross-attention
    feature_BTD: Array  # input of the head


class GlideLayer(nn.Module):
    """A pre-norm decoder layer with cross-attention between self-attention and feed-forward."""

    block: BlockConfig
    memory: BlockConfig  # the target's layer whose rows are read
    block_size: int  # tokens per block; in training a token sees the memory of earlier blocks

    def setup(self) -> None:
        eps = self.block.rms_norm_eps
        self.input_norm, self.post_attention_norm = RMSNorm(eps), RMSNorm(eps)
        self.attention = Attention(self.block)
        # Its queries have no norm, and its `kv` projection is not used.
        self.cross_attention = CrossAttention(dataclasses.replace(self.memory, qk_norm=False))
        self.mlp = MLP(self.block)

    def rows(self, x_BTD: Array, turn: Rotation) -> KV:
        """The cache rows of these tokens, without attention or feed-forward."""
        return rows_of(self.attention.project(self.input_norm.parts(x_BTD), turn))

    def __call__(
        self,
        x_BTD: Array,
        turn: Rotation,
        seen: Seen,
        memory: KV,
        memory_seen: Seen,
        past: KV | None = None,
    ) -> tuple[GlideTrace, KV | None]:
        """The stages, and the cache with the rows of these tokens written."""
        y_BTD, _, past = self.attention(self.input_norm.parts(x_BTD), turn, seen, past)
        x_BTD = x_BTD + y_BTD
        cross_BTD = self.cross_attention(x_BTD, turn, memory, memory_seen)
        # If no row is visible, softmax would give the mean over all rows, including future ones.
        cross_BTD = jnp.where(sees_anything(memory_seen), cross_BTD, 0.0)
        y_BTD = x_BTD + cross_BTD
        feature_BTD = y_BTD + self.mlp(self.post_attention_norm.parts(y_BTD))
        return GlideTrace(x_BTD, cross_BTD, feature_BTD), past


def make(cfg: GlideConfig, target_cfg: TargetConfig, objective: Objective | None = None) -> Drafter:
    """The drafter as pure functions; `objective` matters for training only."""
    layer = layer_of(cfg, target_cfg)
    propose, draft_one = by_level(partial(step, layer))
    return Drafter(
        taps=TapSpec(rows=True),
        shared_params=lambda params: {k: params[k] for k in ("embed", "lm_head") if k in params},
        init=partial(init, layer),
        init_cache=partial(init_cache, layer),
        extend=partial(extend, layer),
        propose=propose,
        condense=partial(condense, layer),
        draft_one=draft_one,
        loss=make_loss(layer, objective or Objective()),
        teacher_forced=partial(teacher_forced, layer),
    )


def layer_of(cfg: GlideConfig, target_cfg: TargetConfig) -> GlideLayer:
    """The drafter's layer for a target: the target's block config, except for two sizes."""
    memory = target_cfg.block.llama_like
    block = dataclasses.replace(
        memory,
        num_kv_heads=cfg.self_attention_num_key_value_heads,
        intermediate_size=cfg.self_attention_intermediate_size,
    )
    return GlideLayer(block, memory, cfg.block_size)


def init(layer: GlideLayer, key: Array) -> Params:
    """N(0, 0.02) weights, unit norms."""
    x_BTD = jnp.zeros((1, 1, layer.block.hidden_size))
    turn = rotation(layer.block, jnp.zeros((1, 1), jnp.int32))
    memory = kv_cache.empty(layer.memory, 1, 1, jnp.float32)
    return layer.init(key, x_BTD, turn, masks.causal_tree(1), memory, masks.causal_tree(1))[
        "params"
    ]


def memory_of(tapped: TargetActivations, turn: Rotation) -> KV:
    """The rows of the target's last layer, whose keys are rotated a second time.

    References: authors' train/cross_attention.py, which rotates the keys of the target's cache.
    """
    last = jax.tree.map(lambda rows_LBKTE: rows_LBKTE[-1], tapped.rows_LBKTE)
    return last._replace(k_BKSE=rotate(last.k_BKSE.swapaxes(1, 2), turn).swapaxes(1, 2))


# ---- decoding -----------------------------------------------------------------------------


def init_cache(layer: GlideLayer, batch: int, rows: int, dtype: jnp.dtype) -> GlideCache:
    """Empty rows for both attentions."""
    empty = partial(kv_cache.empty, batch=batch, rows=rows, dtype=dtype)
    return GlideCache(empty(layer.block), empty(layer.memory))


def condense(layer: GlideLayer, params: Params, length_B: Array, tapped: TargetActivations) -> KV:
    """Memory of verified tokens: the rows of the target's last layer."""
    position_BT = length_B[:, None] + jnp.arange(tapped.rows_LBKTE.k_BKSE.shape[3])
    return memory_of(tapped, rotation(layer.block, position_BT))


def extend(
    layer: GlideLayer,
    params: Params,
    shared: Shared,
    cache: GlideCache,
    tokens_BT: Array,
    length_B: Array,
    memory: KV,
) -> GlideCache:
    """Adds verified tokens: self-attention rows from embeddings, and the target's rows."""
    turn = rotation(layer.block, length_B[:, None] + jnp.arange(tokens_BT.shape[1]))
    x_BTD = llama.embed(shared, tokens_BT)
    rows = layer.apply({"params": params}, x_BTD, turn, method="rows")
    return GlideCache(
        kv_cache.write(cache.own, rows, length_B), kv_cache.write(cache.memory, memory, length_B)
    )


def step(
    layer: GlideLayer, params: Params, shared: Shared, cache: GlideCache, nodes: Nodes
) -> tuple[Array, GlideCache]:
    """Logits after some nodes, which see all rows before the root, ancestors, and known memory."""
    found, own = layer.apply(
        {"params": params},
        llama.embed(shared, nodes.tokens_BW),
        rotation(layer.block, nodes.position_BW),
        nodes.seen,
        cache.memory,
        nodes.known,
        cache.own,
    )
    return llama.unembed(shared, found.feature_BTD), cache._replace(own=own)


# ---- training -----------------------------------------------------------------------------


def trace(
    layer: GlideLayer,
    params: Params,
    shared: Shared,
    batch: Batch,
    tapped: TargetActivations,
    memory_seen: masks.IntervalMask,
) -> GlideTrace:
    """The training forward over whole conversations; `memory_seen` masks the memory."""
    turn = rotation(layer.block, batch.position_BT)
    found, _ = layer.apply(
        {"params": params},
        llama.embed(shared, batch.tokens_BT, tapped.hidden_BTD.dtype),
        turn,
        masks.causal(batch.segment_BT),
        memory_of(tapped, turn),
        memory_seen,
    )
    return found


def make_loss(layer: GlideLayer, objective: Objective) -> DrafterLoss:
    """The token loss; each token sees the memory of the blocks before its own block.

    References: 2402.02082; authors' train/glide.py, whose first block sees the whole memory.
    """

    def loss(
        params: Params,
        shared: Shared,
        batch: Batch,
        tapped: TargetActivations,
        key: Array,
        progress: Array,
    ) -> tuple[Array, dict[str, Array]]:
        seen = masks.earlier_blocks(batch.position_BT, batch.segment_BT, layer.block_size)
        found = trace(layer, params, shared, batch, tapped, seen)
        draft = distill_loss.Draft(found.feature_BTD, batch.response_BT, tapped.draftable_BT)
        (parts,) = distill_loss.token_losses(objective, shared, None, tapped.hidden_BTD, [draft])
        return distill_loss.weighted(objective.loss, parts, None, progress)

    return loss


def teacher_forced(
    layer: GlideLayer,
    params: Params,
    shared: Shared,
    batch: Batch,
    tapped: TargetActivations,
    known_BT: Array,
    horizon: int,
) -> Array:
    """The features of unknown tokens, exactly as in decoding from the last known token."""
    start_BT = masks.known_until(known_BT, batch.segment_BT)
    seen = masks.bounded_memory(start_BT, batch.segment_BT)
    return trace(layer, params, shared, batch, tapped, seen).feature_BTD


# ---- files --------------------------------------------------------------------------------


def table(cfg: GlideConfig, target_cfg: TargetConfig) -> convert.Table:
    """The table of the drafter's stored tensors."""
    layer = layer_of(cfg, target_cfg)
    width, queries = layer.memory.hidden_size, layer.memory.num_heads * layer.memory.head_dim
    return convert.block_table(layer.block, SELF) | {
        ("cross_attention", "q", "kernel"): convert.kernel(
            ("embed", "heads"), (f"{CROSS}q_proj.weight",), width, (queries,)
        ),
        ("cross_attention", "out", "kernel"): convert.kernel(
            ("heads", "embed"), (f"{CROSS}o_proj.weight",), queries, (width,)
        ),
    }


def detect(config: dict[str, Any], names: set[str]) -> bool:
    """Whether the files hold a GLIDE drafter, by their config or else by their tensors."""
    return "Glide" in (config.get("architectures") or ()) or f"{CROSS}q_proj.weight" in names


def read_config(
    files: Files, target_cfg: TargetConfig, reused: int | None
) -> tuple[GlideConfig, tuple[str, ...]]:
    """Read sizes from the tensors; InputError if the files contradict the target."""
    check_pairing(files.config, layer_sizes(target_cfg))
    check_same_block(files.config, target_cfg, "config.json")
    width, found = target_cfg.block.hidden_size, files.shapes.get(f"{SELF}self_attn.k_proj.weight")
    if found and found[1] != width:
        raise mispaired("hidden_size", found[1], width)
    sizes = sizes_of_layer(files.shapes, SELF, target_cfg.block.head_dim)
    check_stated(files.config, dict(zip(SIZES, sizes, strict=True)))
    rest = {"block_size": files.config["block_size"]} if "block_size" in files.config else {}
    return GlideConfig(*sizes, **rest), ()


def write_config(
    cfg: GlideConfig, target_cfg: TargetConfig, layout: FileLayout = "ours"
) -> dict[str, Any]:
    """The config.json of a drafter; InputError for layouts without GLIDE."""
    if layout == "authors":
        return target_config_to_hf(target_cfg) | {"architectures": ["Glide"]}
    if layout == "ours":
        return {"architectures": ["Glide"], **dataclasses.asdict(cfg)}
    raise InputError(f"layout {layout} has no GLIDE drafters; choose ours or authors")


KIND = DrafterKind(GlideConfig, detect, read_config, table, write_config, make)
