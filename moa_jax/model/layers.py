"""The parts of a decoder layer: RMSNorm, rotary embeddings, grouped attention, SwiGLU, block.

The modules hold shapes only; weights are a plain dict of arrays that goes through `apply`.
Norms, rotary angles and softmax are float32 whatever the weights are: in bfloat16 they would
lose more than they save. Queries, keys and values are packed by key-value head, gate and up side
by side, so that one product reads each weight once and a mesh can split the heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import BlockConfig, RopeScaling
from moa_jax.model import cache, chunks
from moa_jax.model.cache import KV

Array = jax.Array

INIT_STDDEV = 0.02
QUERY_CHUNK = 512  # tokens whose attention scores are held at a time


class Rotation(NamedTuple):
    """Cosine and sine of each token's rotary angles, float32."""

    cos_BTE: Array  # last axis: half a head, E / 2
    sin_BTE: Array


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Rotary frequencies, float32 of (head_dim / 2,), radians per position.

    References: RoFormer (2104.09864); `llama3` scaling as released with Llama 3.1: wavelengths
    up to original / high are kept, those beyond original / low are divided by `factor`,
    and between the two the frequencies are blended.
    """
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = (1.0 / (np.float32(theta) ** exponent)).astype(np.float32)
    if scaling is None:
        return frequency
    if scaling.rope_type == "linear":
        return frequency / np.float32(scaling.factor)
    turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
    low, high = scaling.low_freq_factor, scaling.high_freq_factor
    kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (frequency * (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def rotation(cfg: BlockConfig, position_BT: Array) -> Rotation:
    """The rotary angles of `position_BT` for heads of `cfg`."""
    frequency = inverse_frequencies(cfg.head_dim, cfg.rope_theta, cfg.rope_scaling)
    angle_BTE = position_BT[..., None].astype(jnp.float32) * frequency
    return Rotation(jnp.cos(angle_BTE), jnp.sin(angle_BTE))


def rotate(x: Array, turn: Rotation) -> Array:
    """`x` (B, T, heads..., E) rotated by its token's angles; the two halves of E are the pairs."""
    spread = (slice(None), slice(None), *(None,) * (x.ndim - 3))
    cos, sin = turn.cos_BTE[spread], turn.sin_BTE[spread]
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def attend(q_BTKGE: Array, kv: KV, mask_BTS: Array) -> Array:
    """Grouped softmax attention over the visible rows; returns (B, T, K, G, E).

    The queries of a group join the token axis, so that both products are plain batched
    matrix products and the scores, the largest array here, are never transposed.
    """
    if q_BTKGE.shape[1] > QUERY_CHUNK:  # the scores of long rows would outgrow the weights
        part = lambda piece: _attend(piece[0], kv, piece[1])  # noqa: E731
        mask_BTS = jnp.broadcast_to(mask_BTS, (q_BTKGE.shape[0], *mask_BTS.shape[1:]))
        return chunks.map_over(part, (q_BTKGE, mask_BTS), QUERY_CHUNK, axis=1)
    return _attend(q_BTKGE, kv, mask_BTS)


def _attend(q_BTKGE: Array, kv: KV, mask_BTS: Array) -> Array:
    B, T, K, G, E = q_BTKGE.shape
    q_BKXE = q_BTKGE.swapaxes(1, 2).reshape(B, K, T * G, E)
    score_BKXS = jnp.einsum(
        "BKXE,BKSE->BKXS", q_BKXE, kv.k_BKSE, preferred_element_type=jnp.float32
    )
    score_BKTGS = score_BKXS.reshape(B, K, T, G, -1) * E**-0.5
    hidden = jnp.finfo(jnp.float32).min  # not -inf: rows of padding may see nothing at all
    score_BKTGS = jnp.where(mask_BTS[:, None, :, None], score_BKTGS, hidden)
    weight_BKXS = jax.nn.softmax(score_BKTGS, axis=-1).reshape(B, K, T * G, -1)
    mixed_BKXE = jnp.einsum("BKXS,BKSE->BKXE", weight_BKXS.astype(q_BKXE.dtype), kv.v_BKSE)
    return mixed_BKXE.reshape(B, K, T, G, E).swapaxes(1, 2)


class RMSNorm(nn.Module):
    """Divides by the root mean square of the last axis, then scales."""

    eps: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
        x32 = x.astype(jnp.float32)
        x32 = x32 * jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)
        return (x32.astype(x.dtype) * scale.astype(x.dtype)).astype(x.dtype)


class Linear(nn.Module):
    """x @ kernel + bias; the kernel is (inputs, *outputs), multiplied as one matrix."""

    outputs: tuple[int, ...]
    bias: bool = False

    @nn.compact
    def __call__(self, x: Array) -> Array:
        init = nn.initializers.normal(INIT_STDDEV)
        kernel = self.param("kernel", init, (x.shape[-1], *self.outputs)).astype(x.dtype)
        y = (x @ kernel.reshape(x.shape[-1], -1)).reshape(*x.shape[:-1], *self.outputs)
        if self.bias:
            y = y + self.param("bias", nn.initializers.zeros, self.outputs).astype(x.dtype)
        return y


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings, grouped heads and an optional cache."""

    cfg: BlockConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.qkv = Linear((cfg.num_kv_heads, cfg.group_size + 2, cfg.head_dim), cfg.qkv_bias)
        self.out = Linear((cfg.hidden_size,), cfg.out_bias)
        if cfg.qk_norm:
            self.q_norm = RMSNorm(cfg.rms_norm_eps)
            self.k_norm = RMSNorm(cfg.rms_norm_eps)

    def project(self, x_BTD: Array, turn: Rotation) -> tuple[Array, KV]:
        """Rotated queries (B, T, K, G, E) and the new cache rows of these tokens."""
        packed_BTKXE = self.qkv(x_BTD)
        q_BTKGE, k_BTKE, v_BTKE = (
            packed_BTKXE[..., :-2, :],
            packed_BTKXE[..., -2, :],
            packed_BTKXE[..., -1, :],
        )
        if self.cfg.qk_norm:
            q_BTKGE, k_BTKE = self.q_norm(q_BTKGE), self.k_norm(k_BTKE)
        rows = KV(rotate(k_BTKE, turn).swapaxes(1, 2), v_BTKE.swapaxes(1, 2))
        return rotate(q_BTKGE, turn), rows

    def __call__(
        self, x_BTD: Array, turn: Rotation, mask_BTS: Array, past: KV | None, start_B: Array | None
    ) -> tuple[Array, KV, KV | None]:
        q_BTKGE, rows = self.project(x_BTD, turn)
        past = None if past is None else cache.write(past, rows, start_B)
        mixed_BTKGE = attend(q_BTKGE, rows if past is None else past, mask_BTS)
        return self.out(mixed_BTKGE.reshape(*x_BTD.shape[:2], -1)), rows, past


class MLP(nn.Module):
    """SwiGLU: down(silu(gate) * up)."""

    cfg: BlockConfig

    @nn.compact
    def __call__(self, x_BTD: Array) -> Array:
        cfg = self.cfg
        both = Linear((2, cfg.intermediate_size), cfg.mlp_bias, name="gate_up")(x_BTD)
        y_BTF = jax.nn.silu(both[..., 0, :]) * both[..., 1, :]
        return Linear((cfg.hidden_size,), cfg.mlp_bias, name="down")(y_BTF)


class Block(nn.Module):
    """A pre-norm decoder layer of the Llama family, residuals included."""

    cfg: BlockConfig

    def setup(self) -> None:
        self.input_norm = RMSNorm(self.cfg.rms_norm_eps)
        self.attention = Attention(self.cfg)
        self.post_attention_norm = RMSNorm(self.cfg.rms_norm_eps)
        self.mlp = MLP(self.cfg)

    def rows(self, x_BTD: Array, turn: Rotation) -> KV:
        """The cache rows of these tokens alone: no attention, no feed-forward."""
        return self.attention.project(self.input_norm(x_BTD), turn)[1]

    def __call__(
        self,
        x_BTD: Array,
        turn: Rotation,
        mask_BTS: Array,
        past: KV | None = None,
        start_B: Array | None = None,
    ) -> tuple[Array, KV, KV | None]:
        """The block's output, its new rows, and the cache with these rows written at `start_B`.

        Without a cache, tokens attend to each other only and S is T.
        """
        y_BTD, rows, past = self.attention(self.input_norm(x_BTD), turn, mask_BTS, past, start_B)
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(self.post_attention_norm(x_BTD)), rows, past


class CrossBlock(nn.Module):
    """A decoder layer whose queries come from one stream, keys and values from a memory.

    Both streams go through the same input norm; the residual follows the queries.
    References: paper section 3.2; authors' train/cross_attention.py.
    """

    cfg: BlockConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.input_norm = RMSNorm(cfg.rms_norm_eps)
        self.attention = CrossAttention(cfg)
        self.post_attention_norm = RMSNorm(cfg.rms_norm_eps)
        self.mlp = MLP(cfg)

    def rows(self, memory_BTD: Array, turn: Rotation) -> KV:
        """The cache rows of memory vectors, with keys rotated by the positions of their tokens."""
        return self.attention.rows(self.input_norm(memory_BTD), turn)

    def __call__(self, x_BTD: Array, turn: Rotation, memory: KV, mask_BTS: Array) -> Array:
        """The block's output for queries `x_BTD` over the visible rows of `memory`."""
        x_BTD = x_BTD + self.attention(self.input_norm(x_BTD), turn, memory, mask_BTS)
        return x_BTD + self.mlp(self.post_attention_norm(x_BTD))

    def both(self, x_BTD: Array, memory_BTD: Array, turn: Rotation, mask_BTT: Array) -> Array:
        """The block's output where queries and memory are of the same tokens, as in training."""
        return self(x_BTD, turn, self.rows(memory_BTD, turn), mask_BTT)


class CrossAttention(nn.Module):
    """Attention from queries to memory rows: q and k, v are separate products."""

    cfg: BlockConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.q = Linear((cfg.num_heads * cfg.head_dim,))
        self.kv = Linear((cfg.num_kv_heads, 2, cfg.head_dim))
        self.out = Linear((cfg.hidden_size,))

    def rows(self, memory_BTD: Array, turn: Rotation) -> KV:
        kv_BTK2E = self.kv(memory_BTD)
        k_BTKE, v_BTKE = kv_BTK2E[..., 0, :], kv_BTK2E[..., 1, :]
        return KV(rotate(k_BTKE, turn).swapaxes(1, 2), v_BTKE.swapaxes(1, 2))

    def __call__(self, x_BTD: Array, turn: Rotation, memory: KV, mask_BTS: Array) -> Array:
        cfg = self.cfg
        shape = (*x_BTD.shape[:2], cfg.num_kv_heads, cfg.group_size, cfg.head_dim)
        mixed_BTKGE = attend(rotate(self.q(x_BTD).reshape(shape), turn), memory, mask_BTS)
        return self.out(mixed_BTKGE.reshape(*x_BTD.shape[:2], -1))
