"""The Mixture-of-Attentions drafter (arXiv 2410.03804).

    target's keys and values of all L layers, one verified token
        -> LSA (attention over the layer axis) -> mean -> Ekv2E  = one memory vector
    embeddings of drafted tokens
        -> SA (causal) -> CA (over the memory of verified tokens) -> [last N target layers,
           final norm] -> the target's head

N is `target_layer_inference`. With N = 0 the output of CA goes to the head as it is: it is
trained to resemble the target's final-normed state. Memory is computed once per verified
token; drafting T tokens ahead needs no activation of the target (T-step bounded).
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from moa_jax import cache as kv_cache
from moa_jax import losses, masks, target
from moa_jax.batch import Batch
from moa_jax.cache import KV
from moa_jax.config import BlockConfig, DraftShape, MaskConfig, MoaConfig, TargetConfig
from moa_jax.drafters.api import Drafter, Params, Shared, Tapped, Taps, Tree
from moa_jax.drafters.grow import grow_chain
from moa_jax.errors import InputError
from moa_jax.layers import Block, CrossBlock, Linear, rotation

Array = jax.Array

SHORTEST_PERIOD, LONGEST_PERIOD = 6, 14  # of the known tokens that variable length sprinkles


class Blocks(NamedTuple):
    """The shapes of the three attention blocks (reference: which config each part gets)."""

    self_attention: BlockConfig  # the target's own kind, with its RoPE scaling, biases, norms
    cross_attention: BlockConfig  # plain Llama: no biases, RoPE never scaled
    layer_self_attention: BlockConfig  # width M over the layer axis, RoPE never scaled


def block_configs(cfg: MoaConfig, target_cfg: TargetConfig) -> Blocks:
    """Sizes of SA, CA and LSA for a target; InputError when LSA's heads come out odd."""
    block = target_cfg.block
    plain = dataclasses.replace(
        block, rope_scaling=None, qkv_bias=False, out_bias=False, mlp_bias=False, qk_norm=False
    )
    width = target_cfg.memory_width
    if (width // block.num_heads) % 2 or width < 2 * block.num_heads:
        raise InputError(
            f"layer self-attention would split a memory of width {width} into {block.num_heads} "
            f"heads of odd size {width // block.num_heads}, and rotary embeddings turn pairs: "
            "this target cannot have a MoA drafter with its own number of heads"
        )
    return Blocks(
        dataclasses.replace(
            block,
            num_kv_heads=cfg.self_attention_num_key_value_heads,
            intermediate_size=cfg.self_attention_intermediate_size,
        ),
        dataclasses.replace(
            plain,
            num_kv_heads=cfg.cross_attention_num_key_value_heads,
            intermediate_size=cfg.cross_attention_intermediate_size,
        ),
        dataclasses.replace(
            plain,
            hidden_size=width,
            head_dim=width // block.num_heads,
            num_kv_heads=cfg.layer_self_attention_num_key_value_heads,
            intermediate_size=cfg.layer_self_attention_intermediate_size,
            qkv_bias=target_cfg.family == "qwen2",
        ),
    )


class MoaCache(NamedTuple):
    """Rows of verified tokens in SA, CA and (N > 0) the drafter's copy of the last N layers."""

    self_attention: KV
    cross_attention: KV
    reused: tuple[KV, ...]


class Draws(NamedTuple):
    """The random choices of one training step."""

    known_BT: Array  # bool: tokens whose target activations the drafter may read
    staircase_B: Array  # bool: rows whose SA sees only tokens after the last known one


class Trace(NamedTuple):
    """Every stage of the training forward, for the loss and for parity tests."""

    memory_BTD: Array
    sa_mask_BTT: Array
    ca_mask_BTT: Array
    sa_BTD: Array
    ca_BTD: Array
    entry_BTD: Array | None  # N > 0: what enters the reused layers
    feature_BTD: Array  # goes to the head
    logits_BTV: Array


def make(cfg: MoaConfig, target_cfg: TargetConfig, mask_cfg: MaskConfig | None = None) -> Drafter:
    """The drafter as pure functions; `mask_cfg` matters for training only."""
    moa = Moa(cfg, target_cfg, block_configs(cfg, target_cfg), mask_cfg or MaskConfig())
    reused = cfg.target_layer_inference
    if not 0 <= reused <= target_cfg.num_layers:
        raise InputError(
            f"target_layer_inference {reused}: the target has {target_cfg.num_layers} layers"
        )
    streams = (target_cfg.num_layers - reused,) if reused else ()
    return Drafter(
        taps=Taps(rows=True, streams=streams),
        borrow=moa.borrow,
        init=moa.init,
        init_cache=moa.init_cache,
        extend=moa.extend,
        propose=moa.propose,
        loss=moa.loss,
        teacher_forced=moa.teacher_forced,
    )


@dataclasses.dataclass(frozen=True)
class Moa:
    """The functions of one drafter; holds shapes only."""

    cfg: MoaConfig
    target_cfg: TargetConfig
    blocks: Blocks
    mask_cfg: MaskConfig

    # --- weights ---------------------------------------------------------------------------

    def borrow(self, params: Params) -> Shared:
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
        mask = masks.line(1)
        drawn = {
            "self_attention": Block(sa).init(sa_key, x, rotation(sa, position), mask),
            "cross_attention": CrossBlock(ca).init(
                ca_key, x, x, rotation(ca, position), mask, method=CrossBlock.both
            ),
            "layer_self_attention": Block(lsa).init(lsa_key, width, rotation(lsa, position), mask),
            "ekv2e": self._ekv2e.init(out_key, width),
        }
        return {name: found["params"] for name, found in drawn.items()}

    @property
    def _ekv2e(self) -> nn.Module:
        return Linear((self.target_cfg.block.hidden_size,), bias=True)

    # --- memory ----------------------------------------------------------------------------

    def memory(self, params: Params, rows_LBKTE: KV) -> Array:
        """One vector (B, T, D) a token from its keys and values in all layers.

        References: paper section 3.1; authors' train/moa_spec.py (per head: key, then value).
        """
        cfg = self.blocks.layer_self_attention
        L, B, K, T, E = rows_LBKTE.k_BKSE.shape
        kv_LBKT2E = jnp.stack(rows_LBKTE, axis=-2)
        kv_XLM = kv_LBKT2E.transpose(1, 3, 0, 2, 4, 5).reshape(B * T, L, 2 * K * E)
        layer = jnp.arange(L)[None]
        mixed_XLM, *_ = Block(cfg).apply(
            {"params": params["layer_self_attention"]},
            kv_XLM,
            rotation(cfg, layer),
            jnp.ones((1, L, L), bool),
        )
        mean_BTM = mixed_XLM.mean(axis=1).reshape(B, T, -1)
        return self._ekv2e.apply({"params": params["ekv2e"]}, mean_BTM)

    # --- decoding --------------------------------------------------------------------------

    def init_cache(self, batch: int, rows: int, dtype: jnp.dtype) -> MoaCache:
        """Empty rows for every part."""
        sa, ca, _ = self.blocks
        reused = range(self.cfg.target_layer_inference)
        return MoaCache(
            kv_cache.empty(sa, batch, rows, dtype),
            kv_cache.empty(ca, batch, rows, dtype),
            tuple(kv_cache.empty(self.target_cfg.block, batch, rows, dtype) for _ in reused),
        )

    def extend(
        self,
        params: Params,
        shared: Shared,
        cache: MoaCache,
        tokens_BT: Array,
        length_B: Array,
        tapped: Tapped,
    ) -> MoaCache:
        """Adds verified tokens: SA rows from embeddings, CA rows from memory, copies for TLI."""
        sa, ca, _ = self.blocks
        position_BT = length_B[:, None] + jnp.arange(tokens_BT.shape[1])
        x_BTD = target.embed(shared, tokens_BT)
        sa_rows = Block(sa).apply(
            {"params": params["self_attention"]}, x_BTD, rotation(sa, position_BT), method="rows"
        )
        ca_rows = CrossBlock(ca).apply(
            {"params": params["cross_attention"]},
            self.memory(params, tapped.rows_LBKTE),
            rotation(ca, position_BT),
            method="rows",
        )
        last = [
            jax.tree.map(lambda a, i=i: a[i - len(cache.reused)], tapped.rows_LBKTE)
            for i in range(len(cache.reused))
        ]
        return MoaCache(
            kv_cache.write(cache.self_attention, sa_rows, length_B),
            kv_cache.write(cache.cross_attention, ca_rows, length_B),
            tuple(kv_cache.write(c, r, length_B) for c, r in zip(cache.reused, last, strict=True)),
        )

    def propose(
        self,
        params: Params,
        shared: Shared,
        cache: MoaCache,
        root_B: Array,
        length_B: Array,
        shape: DraftShape,
    ) -> tuple[Tree, MoaCache]:
        """A chain of `shape.num_drafted` tokens after the root."""

        def step(cache: MoaCache, tokens_B1: Array, index: int) -> tuple[Array, MoaCache]:
            return self.step(params, shared, cache, tokens_B1, length_B, index)

        return grow_chain(step, cache, root_B, shape.num_drafted)

    def step(
        self,
        params: Params,
        shared: Shared,
        cache: MoaCache,
        tokens_B1: Array,
        length_B: Array,
        index: int,
    ) -> tuple[Array, MoaCache]:
        """Logits after the `index`-th token of a chain that starts at the root (0).

        SA and the reused layers see verified rows and the chain so far, CA verified rows only:

            row        0 .. n-1 | n     n+1   ...     n = length
            SA, TLI    x .. x   | root  draft ...
            CA         x .. x   | .     .
        """
        sa, ca, _ = self.blocks
        row_B = length_B + index
        position_B1 = row_B[:, None]
        rows = cache.self_attention.k_BKSE.shape[2]
        seen_B1S = masks.cached(masks.line(1), row_B, rows)
        verified_B1S = (jnp.arange(rows) < length_B[:, None])[:, None, :]
        x_B1D, _, sa_cache = Block(sa).apply(
            {"params": params["self_attention"]},
            target.embed(shared, tokens_B1),
            rotation(sa, position_B1),
            seen_B1S,
            cache.self_attention,
            row_B,
        )
        x_B1D = CrossBlock(ca).apply(
            {"params": params["cross_attention"]},
            x_B1D,
            rotation(ca, position_B1),
            cache.cross_attention,
            verified_B1S,
        )
        reused = cache.reused
        if reused:
            block = self.target_cfg.block
            turn = rotation(block, position_B1)
            x_B1D, _, _, reused = target.apply_blocks(
                block, shared["layers"], x_B1D, turn, seen_B1S, reused, row_B
            )
            x_B1D = target.final_norm(block, shared, x_B1D)
        cache = MoaCache(sa_cache, cache.cross_attention, reused)
        return target.unembed(shared, x_B1D), cache

    # --- training --------------------------------------------------------------------------

    def draw(self, key: Array, batch: Batch, progress: Array) -> Draws:
        """Which answer tokens count as known, and which rows use the staircase.

        Known are all prompt tokens and, with variable future length, every 6th to 14th token
        (one period a row, counted from the start of its conversation). A row uses the
        staircase with a probability that falls from 1 to 0 over the first half of the run.
        References: paper section 3.3; the authors step the probability once an epoch.
        """
        period_key, stair_key = jax.random.split(key)
        B = batch.tokens_BT.shape[0]
        known_BT = ~batch.response_BT
        if self.mask_cfg.variable_future_length:
            period_B1 = jax.random.randint(period_key, (B, 1), SHORTEST_PERIOD, LONGEST_PERIOD + 1)
            known_BT |= batch.position_BT % period_B1 == 0
        draw_B = jax.random.uniform(stair_key, (B,))
        staircase_B = (draw_B >= staircase_threshold(progress)) & self.mask_cfg.staircase
        return Draws(known_BT, staircase_B)

    def trace(
        self, params: Params, shared: Shared, batch: Batch, tapped: Tapped, draws: Draws
    ) -> Trace:
        """The training forward, every stage of it.

        References: paper section 3; authors' train/moa_spec.py, `forward`.
        """
        sa, ca, _ = self.blocks
        segment_BT = batch.segment_BT
        start_BT = masks.known_until(draws.known_BT, segment_BT)
        causal_BTT = masks.causal(segment_BT)
        stairs_BTT = masks.staircase(start_BT, segment_BT)
        sa_mask_BTT = jnp.where(draws.staircase_B[:, None, None], stairs_BTT, causal_BTT)
        ca_mask_BTT = masks.bounded_memory(start_BT, segment_BT)

        memory_BTD = self.memory(params, tapped.rows_LBKTE)
        x_BTD = target.embed(shared, batch.tokens_BT, memory_BTD.dtype)
        sa_BTD, *_ = Block(sa).apply(
            {"params": params["self_attention"]},
            x_BTD,
            rotation(sa, batch.position_BT),
            sa_mask_BTT,
        )
        ca_BTD = CrossBlock(ca).apply(
            {"params": params["cross_attention"]},
            sa_BTD,
            memory_BTD,
            rotation(ca, batch.position_BT),
            ca_mask_BTT,
            method=CrossBlock.both,
        )
        entry_BTD, feature_BTD = self._reuse(shared, batch, tapped, draws, ca_BTD, causal_BTT)
        logits_BTV = target.unembed(shared, feature_BTD)
        return Trace(
            memory_BTD, sa_mask_BTT, ca_mask_BTT, sa_BTD, ca_BTD, entry_BTD, feature_BTD, logits_BTV
        )

    def _reuse(
        self,
        shared: Shared,
        batch: Batch,
        tapped: Tapped,
        draws: Draws,
        ca_BTD: Array,
        causal_BTT: Array,
    ) -> tuple[Array | None, Array]:
        """TLI: known tokens enter the reused layers with the target's own stream."""
        if not self.cfg.target_layer_inference:
            return None, ca_BTD
        block = self.target_cfg.block
        entry_BTD = jnp.where(draws.known_BT[..., None], tapped.streams[0], ca_BTD)
        turn = rotation(block, batch.position_BT)
        x_BTD, *_ = target.apply_blocks(block, shared["layers"], entry_BTD, turn, causal_BTT)
        return entry_BTD, target.final_norm(block, shared, x_BTD)

    def loss(
        self,
        params: Params,
        shared: Shared,
        batch: Batch,
        tapped: Tapped,
        key: Array,
        progress: Array,
    ) -> tuple[Array, dict[str, Array]]:
        """0.1 x cross-entropy to the target + feature distance (TLI: both its ends, halved).

        References: paper section 3.4; authors' train/moa_spec.py.
        """
        draws = self.draw(key, batch, progress)
        trace = self.trace(params, shared, batch, tapped, draws)
        return self.loss_of(trace, shared, batch, tapped)

    def loss_of(
        self, trace: Trace, shared: Shared, batch: Batch, tapped: Tapped
    ) -> tuple[Array, dict[str, Array]]:
        """The loss and its parts for a training forward."""
        mean = lambda x_BT: losses.answer_mean(x_BT, batch.response_BT)  # noqa: E731
        target_logits_BTV = target.unembed(shared, tapped.hidden_BTD)
        cross_entropy = mean(losses.soft_cross_entropy(target_logits_BTV, trace.logits_BTV))
        feature = mean(losses.smooth_l1(trace.feature_BTD, tapped.hidden_BTD))
        parts = {
            "cross_entropy": cross_entropy,
            "kl": cross_entropy - mean(losses.entropy(target_logits_BTV)),
            "feature_loss": feature,
        }
        if trace.entry_BTD is None:
            loss = 0.1 * cross_entropy + feature
        else:
            entry = mean(losses.smooth_l1(trace.entry_BTD, tapped.streams[0]))
            parts["prev_feature_loss"] = entry
            loss = 0.1 * cross_entropy + 0.5 * feature + 0.5 * entry
        return loss, {"loss": loss} | parts

    def teacher_forced(
        self, params: Params, shared: Shared, batch: Batch, tapped: Tapped, known_BT: Array
    ) -> Array:
        """Draft logits with memory of known tokens only and plain causal SA, as in decoding."""
        draws = Draws(known_BT, jnp.zeros(batch.tokens_BT.shape[0], bool))
        return self.trace(params, shared, batch, tapped, draws).logits_BTV


def staircase_threshold(progress: Array) -> Array:
    """A row's uniform draw at or above this uses the staircase: 0 at first, 1 from half time."""
    return jnp.minimum(2.0 * progress, 1.0)
