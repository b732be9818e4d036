"""The parts of a MoA drafter that decoding and training share: shapes, weights, memory.

    target's keys and values of all L layers, one verified token
        -> LSA (attention over the layer axis) -> mean -> Ekv2E  = one memory vector
    [the token's final-normed state -> Hidden2E, added with `hidden_in_memory`]

Memory is computed once per verified token, so that drafting needs no activation of the target
(T-step bounded). Without LSA, memory is the plain mean over layers, or the last layer, projected.
Keys and values of the last layer are computed before its MLP; the final-normed state, after the
MLP, determines the next token.
"""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moa_jax.config import BlockConfig, MoaConfig, TargetConfig
from moa_jax.drafters.api import Params, Shared, TargetActivations
from moa_jax.errors import InputError
from moa_jax.model import chunks, masks
from moa_jax.model.cache import KV
from moa_jax.model.layers import Block, CrossBlock, Linear, RMSNorm, rotation

Array = jax.Array


class Blocks(NamedTuple):
    """The shapes of the attention blocks, as in the authors' train/moa_spec.py.

    None is a block that an ablation removes.
    """

    self_attention: BlockConfig | None  # like the target's, with RoPE scaling, biases, q/k norms
    cross_attention: BlockConfig  # plain Llama: no biases, RoPE never scaled; q/k norms by `norms`
    layer_self_attention: BlockConfig | None  # width M over the layer axis, RoPE never scaled


def block_configs(cfg: MoaConfig, target_cfg: TargetConfig) -> Blocks:
    """Block configs of SA, CA and LSA for a target; InputError if LSA had heads of odd size."""
    block = target_cfg.block.llama_like
    if not 0 <= cfg.target_layer_inference <= target_cfg.num_layers:
        raise InputError(
            f"target_layer_inference is {cfg.target_layer_inference}, but the target has "
            f"{target_cfg.num_layers} layers; give a number from 0 to that"
        )
    no_biases = dict(qkv_bias=False, out_bias=False, mlp_bias=False)
    plain = dataclasses.replace(block, rope_scaling=None, qk_norm=cfg.norms, **no_biases)
    self_attention = dataclasses.replace(
        block,
        num_kv_heads=cfg.self_attention_num_key_value_heads,
        intermediate_size=cfg.self_attention_intermediate_size,
        qk_norm=block.qk_norm or cfg.norms,
    )
    cross_attention = dataclasses.replace(
        plain,
        num_kv_heads=cfg.cross_attention_num_key_value_heads,
        intermediate_size=cfg.cross_attention_intermediate_size,
    )
    return Blocks(
        self_attention if cfg.has_self_attention else None,
        cross_attention,
        _over_layers(cfg, target_cfg, plain) if cfg.layer_mixing == "attention" else None,
    )


def _over_layers(cfg: MoaConfig, target_cfg: TargetConfig, plain: BlockConfig) -> BlockConfig:
    width, heads = target_cfg.memory_width, plain.num_heads
    size = width // heads
    if size % 2 or not size:
        raise InputError(
            f"layer self-attention would split a memory of width {width} into {heads} heads of "
            f"odd size {size}, but rotary embeddings turn pairs; for this target choose "
            "layer_mixing mean or last"
        )
    return dataclasses.replace(
        plain,
        hidden_size=width,
        head_dim=size,
        num_kv_heads=cfg.layer_self_attention_num_key_value_heads,
        intermediate_size=cfg.layer_self_attention_intermediate_size,
        qkv_bias=target_cfg.family == "qwen2",
    )


@dataclasses.dataclass(frozen=True)
class Moa:
    """A drafter for one target: shapes, without weights."""

    cfg: MoaConfig
    target_cfg: TargetConfig
    blocks: Blocks

    def shared_params(self, params: Params) -> Shared:
        """The target's embedding, head, final norm and last N layers."""
        reused = self.cfg.target_layer_inference
        shared = {k: v for k, v in params.items() if k != "layers"}
        layers = params["layers"]
        last = slice(self.target_cfg.num_layers - reused, None)
        cut = layers[last] if isinstance(layers, list) else jax.tree.map(lambda a: a[last], layers)
        return shared | {"layers": cut}

    def init(self, key: Array) -> Params:
        """N(0, 0.02) weights, unit norms."""
        sa_key, ca_key, lsa_key, out_key = jax.random.split(key, 4)
        x = jnp.zeros((1, 1, self.target_cfg.block.hidden_size))
        width = jnp.zeros((1, 1, self.target_cfg.memory_width))
        position = jnp.zeros((1, 1), jnp.int32)
        sa, ca, lsa = self.blocks
        mask = masks.causal_tree(1)
        drawn = {
            "cross_attention": CrossBlock(ca).init(
                ca_key, x, x, rotation(ca, position), mask, method=CrossBlock.both
            ),
            "ekv2e": self._ekv2e.init(out_key, width),
        }
        if sa is not None:
            drawn["self_attention"] = Block(sa).init(sa_key, x, rotation(sa, position), mask)
        if lsa is not None:
            turn = rotation(lsa, position)
            drawn["layer_self_attention"] = Block(lsa).init(lsa_key, width, turn, mask)
        if self.cfg.norms:
            drawn["memory_norm"] = self._memory_norm.init(key, width)
        if self.cfg.hidden_in_memory:
            drawn["hidden2e"] = self._hidden2e.init(jax.random.fold_in(key, 0), x)
        return {name: found["params"] for name, found in drawn.items()}

    @property
    def _ekv2e(self) -> nn.Module:
        return Linear((self.target_cfg.block.hidden_size,), bias=True)

    @property
    def _memory_norm(self) -> RMSNorm:
        return RMSNorm(self.blocks.cross_attention.rms_norm_eps)

    @property
    def _hidden2e(self) -> nn.Module:
        return Linear((self.target_cfg.block.hidden_size,))

    def memory(self, params: Params, tapped: TargetActivations, chunk: int = 0) -> Array:
        """One vector (B, T, D) per token, from the token's keys and values in all layers.

        Tokens do not see each other, so `chunk` tokens can be computed at a time; 0 is all.
        References: paper section 3.1; authors' train/moa_spec.py (per head: key, then value).
        """
        rows_LBKTE = tapped.rows_LBKTE
        if self.cfg.layer_mixing == "last":
            rows_LBKTE = jax.tree.map(lambda a: a[-1:], rows_LBKTE)
        token_axis = 3
        of_rows = partial(self._of_rows, params)
        memory_BTD = chunks.map_over(of_rows, rows_LBKTE, chunk, token_axis)
        if self.cfg.hidden_in_memory:
            memory_BTD += self._hidden2e.apply({"params": params["hidden2e"]}, tapped.hidden_BTD)
        return memory_BTD

    def _of_rows(self, params: Params, rows_LBKTE: KV) -> Array:
        L, B, K, T, E = rows_LBKTE.k_BKSE.shape
        kv_LBKT2E = jnp.stack(rows_LBKTE, axis=-2)
        kv_XLM = kv_LBKT2E.transpose(1, 3, 0, 2, 4, 5).reshape(B * T, L, 2 * K * E)
        if (cfg := self.blocks.layer_self_attention) is not None:
            layer = jnp.arange(L)[None]
            kv_XLM, *_ = Block(cfg).apply(
                {"params": params["layer_self_attention"]},
                kv_XLM,
                rotation(cfg, layer),
                jnp.ones((1, L, L), bool),
            )
        mean_BTM = kv_XLM.mean(axis=1).reshape(B, T, -1)
        if self.cfg.norms:
            mean_BTM = self._memory_norm.apply({"params": params["memory_norm"]}, mean_BTM)
        return self._ekv2e.apply({"params": params["ekv2e"]}, mean_BTM)
