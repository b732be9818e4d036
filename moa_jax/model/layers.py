"""The parts of a decoder layer: RMSNorm, rotary embeddings, grouped attention, SwiGLU, block.

The modules hold shapes only; weights are a plain dict of arrays passed to `apply`.
Norms, rotary angles and softmax are float32 for any weight dtype, since bfloat16 would lose more
than it saves. Queries, keys and values are packed by key-value head, gate and up side by side, so
that one product reads each weight once and a mesh can split the heads.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import BlockConfig, RopeScaling
from moa_jax.model import cache, experts, quantize, sharding
from moa_jax.model.attention import Seen, attend, attend_cached
from moa_jax.model.cache import KV
from moa_jax.model.kernels.cpu import Panels
from moa_jax.model.masks import CacheMask
from moa_jax.model.rotary import Rotation, rotate, rotate_packed
from moa_jax.runtime.devices import traced_platform

Array = jax.Array

INIT_STDDEV = 0.02


def inverse_frequencies(head_dim: int, theta: float, scaling: RopeScaling | None) -> np.ndarray:
    """Rotary frequencies, float32 of (head_dim / 2,), radians per position.

    References: RoFormer (2104.09864); `llama3` scaling as released with Llama 3.1: wavelengths
    up to original / high keep their frequency, the frequencies of wavelengths beyond
    original / low are divided by `factor`, and frequencies between these limits are blended;
    `yarn` (2309.00071): the same with limits by the number of turns over the original length.

    The frequencies of `dynamic` scaling grow with the sequence in transformers, so that a key's
    angle would depend on the pass that computed it. As in vLLM, they are those of the longest
    sequence, at every length: cached keys stay valid, and drafts exact.
    """
    if scaling is not None and scaling.rope_type == "dynamic":
        growth = scaling.factor**2 - (scaling.factor - 1)  # at `factor` times the original length
        theta *= growth ** (head_dim / (head_dim - 2))
    exponent = np.arange(0, head_dim, 2, dtype=np.float32) / np.float32(head_dim)
    frequency = (1.0 / (np.float32(theta) ** exponent)).astype(np.float32)
    if scaling is None or scaling.rope_type == "dynamic":
        return frequency
    if scaling.rope_type == "linear":
        return frequency / np.float32(scaling.factor)
    if scaling.rope_type == "yarn":
        low, high = _yarn_limits(head_dim, theta, scaling)
        kept = 1 - np.clip((np.arange(head_dim // 2) - low) / ((high - low) or 0.001), 0.0, 1.0)
    else:
        turns = scaling.original_max_position_embeddings * frequency / (2 * math.pi)
        low, high = scaling.low_freq_factor, scaling.high_freq_factor
        kept = np.clip((turns - low) / (high - low), 0.0, 1.0)
    return (frequency * (kept + (1 - kept) / scaling.factor)).astype(np.float32)


def _yarn_limits(head_dim: int, theta: float, scaling: RopeScaling) -> tuple[float, float]:
    """Indices of the pairs with `beta_fast` and with `beta_slow` turns over the original length."""
    length = scaling.original_max_position_embeddings
    at = lambda turns: head_dim * math.log(length / (turns * 2 * math.pi)) / (2 * math.log(theta))
    low, high = at(scaling.beta_fast), at(scaling.beta_slow)
    if scaling.truncate:
        low, high = math.floor(low), math.ceil(high)
    return max(low, 0), min(high, head_dim - 1)


def rotation(cfg: BlockConfig, position_BT: Array, is_local: bool = False) -> Rotation:
    """The rotary angles of `position_BT` for heads of `cfg`; `is_local`: of a layer with a window.

    References: Llama 4's attention temperature, by which Ministral 3 scales queries.
    """
    theta, scaling = cfg.rope_theta, cfg.rope_scaling
    if is_local and cfg.local_rope_theta is not None:
        theta, scaling = cfg.local_rope_theta, None
    frequency = inverse_frequencies(cfg.head_dim, theta, scaling)
    angle_BTE = position_BT[..., None].astype(jnp.float32) * frequency
    found = Rotation(jnp.cos(angle_BTE), jnp.sin(angle_BTE))
    if scaling is None:
        return found
    if scaling.attention_factor != 1:
        found = Rotation(*(x_BTE * scaling.attention_factor for x_BTE in found[:2]))
    if beta := scaling.llama_4_scaling_beta:
        lengths_BT = position_BT // scaling.original_max_position_embeddings
        found = found._replace(query_scale_BT=1 + beta * jnp.log1p(lengths_BT.astype(jnp.float32)))
    return found


class Normed(NamedTuple):
    """A normed array as a product of two parts.

    A linear layer multiplies by `factor` after its matrix product, at no extra cost; multiplying
    before the product would be a separate kernel that the product waits for.
    """

    scaled: Array
    factor: Array | None  # float32, the last axis is 1; None means 1


class RMSNorm(nn.Module):
    """Divides by the root mean square of the last axis, then scales by offset + weight.

    With an offset the product is float32, as in Gemma.
    """

    eps: float
    offset: float = 0.0

    def __call__(self, x: Array) -> Array:
        scale = self._scale(x.shape[-1])
        x32 = x.astype(jnp.float32) * self._factor(x)
        if self.offset:
            return (x32 * scale).astype(x.dtype)
        return x32.astype(x.dtype) * _spread(scale, x)

    def parts(self, x: Array) -> Normed:
        """The normed array for a linear layer, in two parts if that is cheaper.

        On GPUs XLA compiles the norm of several rows to one kernel. For a single row XLA makes two
        kernels, but one if the parts are kept apart. TPUs would store the weights of a float32
        product in float32.
        """
        if x.size > x.shape[-1] or traced_platform() != "gpu":
            return Normed(self(x), None)
        scale = self._scale(x.shape[-1])
        scale = scale if self.offset else scale.astype(x.dtype)
        return Normed((x * scale).astype(x.dtype), self._factor(x))

    @nn.compact
    def _scale(self, width: int) -> Array:
        scale = self.param("scale", nn.initializers.constant(1 - self.offset), (width,))
        return scale.astype(jnp.float32) + self.offset if self.offset else scale

    def _factor(self, x: Array) -> Array:
        x32 = x.astype(jnp.float32)
        return jax.lax.rsqrt(jnp.mean(x32 * x32, axis=-1, keepdims=True) + self.eps)


def _spread(vector: Array, x: Array) -> Array:
    """Broadcasts `vector` to `x`, then casts, so that its gradient is summed in its own dtype."""
    return jnp.broadcast_to(vector, x.shape).astype(x.dtype)


class Linear(nn.Module):
    """x @ kernel + bias; the kernel is (inputs, *outputs), quantized or not."""

    outputs: tuple[int, ...]
    bias: bool = False

    @nn.compact
    def __call__(self, x: Array | Normed) -> Array:
        x, factor = x if isinstance(x, Normed) else (x, None)
        init = nn.initializers.normal(INIT_STDDEV)
        kernel = self.get_variable("params", "kernel")
        if not isinstance(kernel, Panels):  # Flax would reject the shape of a panel array
            kernel = self.param("kernel", init, (x.shape[-1], *self.outputs))
        if factor is None:
            y = quantize.matmul(x, kernel, x.dtype)
        else:
            y = quantize.matmul(x, kernel, jnp.float32)
            y = (y * factor.reshape(*x.shape[:-1], *(1 for _ in self.outputs))).astype(x.dtype)
        if self.bias:
            y = y + _spread(self.param("bias", nn.initializers.zeros, self.outputs), y)
        return y


class Attention(nn.Module):
    """Causal self-attention with rotary embeddings, grouped heads and an optional cache."""

    cfg: BlockConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.qkv = Linear((cfg.num_kv_heads, cfg.group_size + 2, cfg.head_dim), cfg.qkv_bias)
        self.out = Linear((cfg.hidden_size,), cfg.out_bias)
        if cfg.qk_norm:
            self.q_norm, self.k_norm = norm_of(cfg), norm_of(cfg)

    def packed(self, x_BTD: Array | Normed) -> Array:
        """Queries, keys and values of these tokens as one array, not yet rotated.

        packed_BTKXE   X:  0 .. G-1 queries | G keys | G+1 values
        """
        packed_BTKXE = self.qkv(x_BTD)
        if not self.cfg.qk_norm:
            return packed_BTKXE
        G = self.cfg.group_size
        q_BTKGE, k_BTK1E, v_BTK1E = jnp.split(packed_BTKXE, (G, G + 1), axis=3)
        return jnp.concatenate([self.q_norm(q_BTKGE), self.k_norm(k_BTK1E), v_BTK1E], axis=3)

    def project(self, x_BTD: Array | Normed, turn: Rotation) -> Array:
        """Rotated queries and the new cache rows of these tokens, heads_BKXTE."""
        return rotate_packed(self.packed(x_BTD), turn)

    def _scaled(self, packed_BTKXE: Array, turn: Rotation) -> Array:
        """Packed heads with the factors of queries besides 1 / sqrt(E), which attention applies."""
        cfg, scale = self.cfg, turn.query_scale_BT
        if cfg.query_pre_attn_scalar not in (None, cfg.head_dim):
            own = (cfg.head_dim / cfg.query_pre_attn_scalar) ** 0.5
            scale = own if scale is None else own * scale
        if scale is None:
            return packed_BTKXE
        scale_BT = jnp.broadcast_to(jnp.float32(scale), packed_BTKXE.shape[:2])
        is_query_X = np.arange(packed_BTKXE.shape[3]) < cfg.group_size
        scale_BTX = jnp.where(is_query_X, scale_BT[..., None], 1)
        return packed_BTKXE * scale_BTX[:, :, None, :, None].astype(packed_BTKXE.dtype)

    def __call__(
        self, x_BTD: Array | Normed, turn: Rotation, seen: Seen, past: KV | None = None
    ) -> tuple[Array, KV, KV | None]:
        packed_BTKXE = self._scaled(self.packed(x_BTD), turn)
        packed_BTKXE = sharding.constrain_inner(packed_BTKXE, "rows", None, "kv_heads")
        heads_BKXTE = rotate_packed(packed_BTKXE, turn)  # a kernel rotates heads itself; for `rows`
        q_BKGTE, rows = parted(heads_BKXTE)
        if isinstance(seen, CacheMask):
            mixed_BTKGE, past = attend_cached(packed_BTKXE, turn, past, seen)
        else:
            every = rows if past is None else cache.join(past, rows)
            mixed_BTKGE = attend(q_BKGTE, every, seen)
        B, T = mixed_BTKGE.shape[:2]
        return self.out(mixed_BTKGE.reshape(B, T, -1)), rows, past


def parted(heads_BKXTE: Array) -> tuple[Array, KV]:
    """Packed heads as queries (B, K, G, T, E), and keys and values.

    The gradient of a split is one concatenation; that of slices is a sum of three padded arrays.
    """
    G = heads_BKXTE.shape[2] - 2
    q_BKGTE, k_BK1TE, v_BK1TE = jnp.split(heads_BKXTE, (G, G + 1), axis=2)
    return q_BKGTE, KV(k_BK1TE.squeeze(2), v_BK1TE.squeeze(2))


def rows_of(heads_BKXTE: Array) -> KV:
    """The keys and values among packed heads."""
    return parted(heads_BKXTE)[1]


def norm_of(cfg: BlockConfig) -> RMSNorm:
    """A norm of a target's layers, or the norm after the last layer."""
    return RMSNorm(cfg.rms_norm_eps, offset=1.0 if cfg.gemma_norms else 0.0)


class MLP(nn.Module):
    """SwiGLU: down(silu(gate) * up); in Gemma GeGLU, with GELU in its tanh approximation."""

    cfg: BlockConfig

    @nn.compact
    def __call__(self, x_BTD: Array | Normed) -> Array:
        cfg = self.cfg
        both = Linear((2, cfg.intermediate_size), cfg.mlp_bias, name="gate_up")(x_BTD)
        both = sharding.constrain_inner(both, "rows", None, None, "mlp")
        act = jax.nn.silu if cfg.hidden_act == "silu" else jax.nn.gelu  # gelu: tanh by default
        y_BTF = act(both[..., 0, :]) * both[..., 1, :]
        return Linear((cfg.hidden_size,), cfg.mlp_bias, name="down")(y_BTF)


class Experts(nn.Module):
    """A feed-forward of experts, of which each token uses few; see `experts.py`."""

    cfg: BlockConfig

    @nn.compact
    def __call__(self, x_BTD: Array | Normed) -> Array:
        x_BTD, factor = x_BTD if isinstance(x_BTD, Normed) else (x_BTD, None)
        if factor is not None:
            x_BTD = (x_BTD.astype(jnp.float32) * factor).astype(x_BTD.dtype)
        D, cfg = self.cfg.hidden_size, self.cfg.experts
        X, F = cfg.num_experts, cfg.moe_intermediate_size
        shapes = {"router": (X, D), "gate_up": (X, 2, F, D), "down": (X, D, F)}
        init = nn.initializers.normal(INIT_STDDEV)
        params = {name: self.param(name, init, shape) for name, shape in shapes.items()}
        return experts.mix(cfg, params, x_BTD.reshape(-1, D)).reshape(x_BTD.shape)


class Block(nn.Module):
    """A pre-norm decoder layer of the Llama family, residuals included.

    Llama    x + attention(norm(x))          then  x + mlp(norm(x))
    Gemma    x + norm(attention(norm(x)))    then  x + norm(mlp(norm(x)))
    """

    cfg: BlockConfig

    def setup(self) -> None:
        self.input_norm = norm_of(self.cfg)
        self.attention = Attention(self.cfg)
        self.post_attention_norm = norm_of(self.cfg)
        self.mlp = Experts(self.cfg) if self.cfg.experts else MLP(self.cfg)
        if self.cfg.gemma_norms:
            self.pre_feedforward_norm = norm_of(self.cfg)
            self.post_feedforward_norm = norm_of(self.cfg)

    def rows(self, x_BTD: Array, turn: Rotation) -> KV:
        """The cache rows of these tokens, without attention or feed-forward."""
        return rows_of(self.attention.project(self.input_norm.parts(x_BTD), turn))

    def __call__(
        self, x_BTD: Array, turn: Rotation, seen: Seen, past: KV | None = None
    ) -> tuple[Array, KV, KV | None]:
        """The block's output, its new rows, and the cache with these rows written.

        With an `IntervalMask` or a mask (B, T, S) as `seen`, tokens attend to the P rows of `past`,
        if any, and to each other; S is P + T, and no rows are written.
        """
        y_BTD, rows, past = self.attention(self.input_norm.parts(x_BTD), turn, seen, past)
        if self.cfg.gemma_norms:
            x_BTD = x_BTD + self.post_attention_norm(y_BTD)
            y_BTD = self.mlp(self.pre_feedforward_norm.parts(x_BTD))
            return x_BTD + self.post_feedforward_norm(y_BTD), rows, past
        x_BTD = x_BTD + y_BTD
        return x_BTD + self.mlp(self.post_attention_norm.parts(x_BTD)), rows, past


class CrossBlock(nn.Module):
    """A decoder layer whose queries come from one stream, keys and values from a memory.

    Both streams share one input norm; the residual connection is that of the queries.
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
        return self.attention.rows(self.input_norm.parts(memory_BTD), turn)

    def __call__(self, x_BTD: Array, turn: Rotation, memory: KV, seen: Seen) -> Array:
        """The block's output for queries `x_BTD` over the visible rows of `memory`."""
        x_BTD = x_BTD + self.attention(self.input_norm.parts(x_BTD), turn, memory, seen)
        return x_BTD + self.mlp(self.post_attention_norm.parts(x_BTD))

    def both(self, x_BTD: Array, memory_BTD: Array, turn: Rotation, seen: Seen) -> Array:
        """The block's output for queries and memory of the same tokens, as in training."""
        return self(x_BTD, turn, self.rows(memory_BTD, turn), seen)


class CrossAttention(nn.Module):
    """Attention from queries to memory rows, with one projection for q and one for k and v."""

    cfg: BlockConfig

    def setup(self) -> None:
        cfg = self.cfg
        self.q = Linear((cfg.num_heads * cfg.head_dim,))
        self.kv = Linear((cfg.num_kv_heads, 2, cfg.head_dim))
        self.out = Linear((cfg.hidden_size,))
        if cfg.qk_norm:
            self.q_norm, self.k_norm = norm_of(cfg), norm_of(cfg)

    def rows(self, memory_BTD: Array | Normed, turn: Rotation) -> KV:
        kv_BTK2E = self.kv(memory_BTD)
        k_BTKE, v_BTKE = kv_BTK2E[..., 0, :], kv_BTK2E[..., 1, :]
        k_BTKE = self.k_norm(k_BTKE) if self.cfg.qk_norm else k_BTKE
        return KV(rotate(k_BTKE, turn).swapaxes(1, 2), v_BTKE.swapaxes(1, 2))

    def __call__(self, x_BTD: Array | Normed, turn: Rotation, memory: KV, seen: Seen) -> Array:
        cfg = self.cfg
        q_BTX = self.q(x_BTD)
        B, T, _ = q_BTX.shape
        q_BTKGE = q_BTX.reshape(B, T, cfg.num_kv_heads, cfg.group_size, cfg.head_dim)
        q_BTKGE = self.q_norm(q_BTKGE) if cfg.qk_norm else q_BTKGE
        if isinstance(seen, CacheMask):
            mixed_BTKGE, _ = attend_cached(q_BTKGE, turn, memory, seen)
        else:
            q_BKGTE = rotate_packed(q_BTKGE, turn, has_rows=False)
            mixed_BTKGE = attend(q_BKGTE, memory, seen)
        return self.out(mixed_BTKGE.reshape(B, T, -1))
