"""The target: a causal LM of the Llama family (Llama 3.x, Qwen2, Qwen2.5, Qwen3, Mistral, Gemma 3).

Weights are a plain dict:

    embed (V, D)    layers    final_norm.scale (D,)    lm_head (D, V), absent when tied

Any matrix may be quantized (`model/quantize.py`); its dtype is then the activations' dtype.
For decoding, `layers` is a list of L blocks, run one after the other: each weight and each cache
is a separate array, so that nothing is copied. For training, `layers` is one block whose leaves
have a leading L axis, run by `scan`, so that compile time does not depend on the depth. Prefill,
plain decoding, chains and trees use the same pass and differ only in positions and masks. Layers
with a sliding window differ from others in mask, rotary angles and the rows of their caches.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from moa_jax.config import BlockConfig, TargetConfig
from moa_jax.model import cache, convert, masks, quantize, sharding
from moa_jax.model.attention import Seen
from moa_jax.model.cache import KV
from moa_jax.model.layers import INIT_STDDEV, Block, norm_of, rotation
from moa_jax.model.rotary import Rotation

Array = jax.Array
Params = dict[str, Any]
Caches = tuple[KV, ...]
Rows = tuple[KV, ...] | KV  # one per layer, or (L, B, K, T, E) if the layers are stacked


class Context(NamedTuple):
    """Positions of the T tokens of a pass, and the rows that they attend to.

    In decoding `seen` is a `CacheMask` of the caches, and the pass writes the tokens' rows to the
    caches. In training `seen` is an `IntervalMask` or a mask over the P past rows in `caches`, if
    any, and the T rows of the pass.
    """

    position_BT: Array
    seen: Seen
    caches: Caches | None = None


class ForwardOutput(NamedTuple):
    """Outputs of one target pass over T tokens."""

    hidden_BTD: Array  # after the final norm; `unembed` turns it into logits
    rows: Rows  # the tokens' keys (after RoPE) and values in every layer
    tapped: tuple[Array, ...]  # the residual streams named by `tap`, (B, T, D) each
    caches: Caches | None  # with the rows written


def init(cfg: TargetConfig, key: Array) -> Params:
    """Random float32 weights with a list of layers, N(0, 0.02) and unit norms."""
    embed_key, head_key, *layer_keys = jax.random.split(key, cfg.num_layers + 2)
    x_BTD = jnp.zeros((1, 1, cfg.block.hidden_size))
    turn = rotation(cfg.block, jnp.zeros((1, 1), jnp.int32))
    block = lambda k: Block(cfg.block).init(k, x_BTD, turn, masks.causal_tree(1))["params"]
    shape = (cfg.vocab_size, cfg.block.hidden_size)
    params = {
        "embed": INIT_STDDEV * jax.random.normal(embed_key, shape),
        "layers": [block(k) for k in layer_keys],
        "final_norm": norm_of(cfg.block).init(head_key, x_BTD)["params"],
    }
    if not cfg.tie_word_embeddings:
        params["lm_head"] = INIT_STDDEV * jax.random.normal(head_key, shape[::-1])
    return params


def init_caches(
    cfg: TargetConfig, batch: int, rows: int, dtype: jnp.dtype, ahead: int | None = None
) -> Caches:
    """One empty cache per layer; `ahead` is that of `cache.ring_rows`."""
    sizes = (cache.ring_rows(window, rows, ahead) for window in cfg.windows_of_last(cfg.num_layers))
    return tuple(cache.empty(cfg.block, batch, size, dtype) for size in sizes)


def keeps_prefix(cfg: TargetConfig, rows: int, ahead: int, count: int, written: int) -> bool:
    """Whether a sequence can continue after its first `count` of `written` tokens.

    `rows` and `ahead` are those of `init_caches`. It can after all tokens, and if no ring has
    overwritten a row.
    """
    sizes = [cache.ring_rows(window, rows, ahead) for window in cfg.sliding_windows]
    return count == written or min(written + ahead, rows) <= min(sizes, default=rows)


def inputs(
    cfg: TargetConfig, params: Params, tokens_BT: Array, dtype: jnp.dtype | None = None
) -> Array:
    """The inputs of the first layer: embeddings times the target's `embed_scale`."""
    x_BTD = embed(params, tokens_BT, dtype)
    return x_BTD if cfg.embed_scale == 1 else x_BTD * jnp.asarray(cfg.embed_scale, x_BTD.dtype)


def embed(params: Params, tokens_BT: Array, dtype: jnp.dtype | None = None) -> Array:
    """Token embeddings, unscaled, in `dtype` or, by default, the weights' dtype."""
    tokens_BT = sharding.constrain_inner(tokens_BT, "head_rows")  # the table is not moved
    x_BTD = sharding.constrain_inner(quantize.lookup(params["embed"], tokens_BT), "head_rows")
    return x_BTD if dtype is None else x_BTD.astype(dtype)


def unembed(params: Params, hidden_BTD: Array) -> Array:
    """Float32 logits (B, T, V) of final-normed states; uses the embedding if there is no head."""
    if "lm_head" in params:
        return quantize.matmul(hidden_BTD, params["lm_head"], jnp.float32)
    return quantize.matmul_rows(hidden_BTD, params["embed"], jnp.float32)


def final_norm(cfg: BlockConfig, params: Params, x_BTD: Array) -> Array:
    """The target's last RMSNorm."""
    return norm_of(cfg).apply({"params": params["final_norm"]}, x_BTD)


def forward(
    cfg: TargetConfig,
    params: Params,
    tokens_BT: Array,
    context: Context,
    tap: Sequence[int] = (),
    dtype: jnp.dtype | None = None,
) -> ForwardOutput:
    """One pass over T new tokens.

    `tap` lists residual streams to return, by the layer they enter: 0 is the embedding.
    """
    x_BTD = sharding.constrain(inputs(cfg, params, tokens_BT, dtype), "rows")
    x_BTD, rows, tapped, caches = apply_blocks(cfg, params["layers"], x_BTD, context, tap)
    return ForwardOutput(final_norm(cfg.block, params, x_BTD), rows, tapped, caches)


def stack_rows(rows: Rows) -> KV:
    """Stacks the keys of all layers, and the values, to (L, B, K, T, E).

    In memory the layers of a token are contiguous, as drafters read them.
    """
    if isinstance(rows, KV):
        return rows
    by_token = lambda *each: jnp.stack([x.swapaxes(1, 2) for x in each], axis=2)
    return jax.tree.map(lambda *each: by_token(*each).transpose(2, 0, 3, 1, 4), *rows)


def apply_blocks(
    cfg: TargetConfig,
    layers: list[Params] | Params,
    x_BTD: Array,
    context: Context,
    tap: Sequence[int] = (),
) -> tuple[Array, Rows, tuple[Array, ...], Caches | None]:
    """Runs the last layers of `cfg`: a list one by one, or stacked by `scan`, without caches."""
    block, caches = Block(cfg.block), context.caches
    is_list = isinstance(layers, list)
    windows = cfg.windows_of_last(len(layers) if is_list else len(jax.tree.leaves(layers)[0]))
    kinds = {window: _view(cfg.block, context, window) for window in windows}
    if is_list:
        streams, rows, written = [], [], []
        for index, layer in enumerate(layers):
            streams.append(x_BTD)
            past = None if caches is None else caches[index]
            x_BTD, new, past = block.apply({"params": layer}, x_BTD, *kinds[windows[index]], past)
            rows.append(new)
            written.append(past)
        caches = None if caches is None else tuple(written)
        return x_BTD, tuple(rows), tuple(streams[i] for i in tap), caches

    # A scan has one body for layers of all kinds, which selects angles and mask.
    select = lambda kind, *views: lax.select_n(kind, *views) if len(views) > 1 else views[0]
    kind_L = np.array([list(kinds).index(window) for window in windows], np.int32)

    def body(carry, scanned):
        index, x_BTD, tapped = carry
        layer, kind = scanned
        layer = sharding.gathered(layer, convert.block_table(cfg.block, ""))
        tapped = tuple(jnp.where(index == i, x_BTD, t) for i, t in zip(tap, tapped, strict=True))
        view = jax.tree.map(functools.partial(select, kind), *kinds.values())
        x_BTD, new, _ = block.apply({"params": layer}, x_BTD, *view)
        new = jax.tree.map(lambda row: sharding.constrain(row, "rows", "kv_heads"), new)
        return (index + 1, sharding.constrain(x_BTD, "rows"), tapped), new

    start = (0, x_BTD, tuple(jnp.zeros_like(x_BTD) for _ in tap))
    (_, x_BTD, tapped), rows_LBKTE = lax.scan(body, start, (layers, kind_L))
    return x_BTD, rows_LBKTE, tapped, None


def _view(cfg: BlockConfig, context: Context, window: int) -> tuple[Rotation, Seen]:
    """Rotary angles and mask of the layers with this window; 0 is full attention."""
    turn = rotation(cfg, context.position_BT, is_local=window > 0)
    return turn, masks.windowed(context.seen, window)
