"""The target against transformers' torch models, layer by layer, and at the sizes of real ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from moa_jax import load_target
from moa_jax.files.hf_config import target_config_from_hf
from moa_jax.model import llama, masks
from tests.compare import assert_close
from tests.oracle import moa as oracle
from tests.oracle import random_pair

LENGTHS = (19, 7, 13)
TARGETS = [
    ("llama", {}),
    ("llama", {"num_key_value_heads": 1}),
    ("llama", {"num_key_value_heads": 3, "tie_word_embeddings": True}),
    ("llama", {"num_key_value_heads": 6, "attention_bias": True, "mlp_bias": True}),
    ("llama", {"hidden_size": 36, "intermediate_size": 23, "vocab_size": 37}),
    ("llama31", {}),
    ("llama31", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
    ("qwen2", {}),
    ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    ("qwen3", {}),
    ("qwen3", {"num_key_value_heads": 4, "tie_word_embeddings": True}),
]


def named(case) -> str:
    return "-".join([case[0], *(f"{key}={value}" for key, value in case[1].items())])


@pytest.fixture(scope="module", params=TARGETS, ids=named)
def saved(request, tmp_path_factory):
    """A random torch model, right-padded tokens, and the folder that transformers wrote."""
    family, sizes = request.param
    config, model = random_pair.random_target(family, seed=7, **sizes)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return model, random_pair.random_batch(config.vocab_size, LENGTHS, seed=3), folder


def run(loaded, tokens_BT):
    """One pass without caches, every residual stream tapped."""
    B, T = tokens_BT.shape

    def run(params, tokens_BT):
        position_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        context = llama.Context(position_BT, masks.causal(jnp.ones((B, T), jnp.int32)))
        tap = range(loaded.config.num_layers)
        return llama.forward(loaded.config, params, tokens_BT, context, tap)

    return jax.jit(run)(loaded.params, tokens_BT)


@pytest.mark.parametrize("layers", ["list", pytest.param("stacked", marks=pytest.mark.slow)])
def test_every_layer_equals_transformers(saved, layers):
    model, batch, folder = saved
    loaded = load_target(folder, jnp.float32, layers=layers)
    seen = oracle.observe(model, batch.input_ids, batch.attention_mask)
    found = run(loaded, jnp.asarray(batch.input_ids.numpy(), jnp.int32))
    real_BT = batch.attention_mask.numpy() == 1
    for index, stream_BTD in enumerate(found.tapped):
        expected = seen.hidden_LBTD[index].numpy()
        assert_close(stream_BTD[real_BT], expected[real_BT], f"stream {index}")
    assert_close(found.hidden_BTD[real_BT], seen.hidden_LBTD[-1].numpy()[real_BT], "final")
    tokens_first = (1, 3, 0, 2, 4)
    for ours, expected in zip(
        llama.stack_rows(found.rows), (seen.key_LBKTE, seen.value_LBKTE), strict=True
    ):
        ours, expected = (np.asarray(x).transpose(tokens_first) for x in (ours, expected))
        assert_close(ours[real_BT], expected[real_BT], "cache")
    with torch.no_grad():
        logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits.numpy()
    assert_close(llama.unembed(loaded.params, found.hidden_BTD)[real_BT], logits[real_BT], "logits")


# One of each family is fast; llama31 has a single head of keys and values.
CACHED = [pytest.param(case, marks=pytest.mark.slow if case[1] else []) for case in TARGETS]


@pytest.mark.parametrize("saved", CACHED, indirect=True, ids=named)
def test_cached_pass_equals_whole_pass(saved):
    """A prompt in one piece, then tokens one and three at a time, at uneven lengths.

    The prompt is as wide as the last piece, so both are one program.
    """
    _, batch, folder = saved
    loaded = load_target(folder, jnp.float32)
    cfg, params = loaded.config, loaded.params
    forward = jax.jit(functools.partial(llama.forward, cfg))
    tokens_BT = jnp.asarray(batch.input_ids.numpy(), jnp.int32)
    whole_BTD = np.asarray(run(loaded, tokens_BT).hidden_BTD)
    rows = 24
    caches = llama.init_caches(cfg, 3, rows, jnp.float32)
    length_B = jnp.zeros(3, jnp.int32)
    for advance_B, count in (([3, 1, 2], 3), ([1, 1, 1], 1), ([3, 2, 1], 3)):
        index_BT = length_B[:, None] + jnp.arange(count)
        new_BT = jnp.take_along_axis(tokens_BT, index_BT, axis=1)
        sight = masks.cache_mask(length_B, masks.causal_tree(count))
        found = forward(params, new_BT, llama.Context(index_BT, sight, caches))
        hidden_BWD = np.asarray(found.hidden_BTD)
        for b, advance in enumerate(advance_B):
            start = int(length_B[b])
            expected = whole_BTD[b, start : start + advance]
            assert_close(hidden_BWD[b, :advance], expected, f"row {b} from {start}")
        caches, length_B = found.caches, length_B + jnp.array(advance_B)


def test_causality_by_gradient():
    """No state depends on a later token, nor on another conversation of its row."""
    config, _ = random_pair.random_target("llama", seed=1)
    cfg = target_config_from_hf(config.to_dict(), "test")
    params = jax.jit(functools.partial(llama.init, cfg))(jax.random.key(0))
    segment_BT = jnp.array([[1, 1, 1, 2, 2, 2]])
    position_BT = jnp.array([[0, 1, 2, 0, 1, 2]])

    def state(x_BTD, token):
        context = llama.Context(position_BT, masks.causal(segment_BT))
        x_BTD, *_ = llama.apply_blocks(cfg.block, params["layers"], x_BTD, context)
        return x_BTD[0, token].sum()

    x_BTD = jax.random.normal(jax.random.key(1), (1, 6, cfg.block.hidden_size))
    gradient = jax.jit(jax.grad(state))
    for token in range(6):
        gradient_T = np.abs(gradient(x_BTD, token)[0]).sum(-1)
        same = np.asarray(segment_BT[0] == segment_BT[0, token])
        expected_T = same & (np.arange(6) <= token)
        np.testing.assert_array_equal(gradient_T > 0, expected_T)


REAL = {
    "8B": dict(hidden_size=4096, num_hidden_layers=32, num_attention_heads=32, parameters=8.03e9)
    | dict(intermediate_size=14336),
    "70B": dict(hidden_size=8192, num_hidden_layers=80, num_attention_heads=64, parameters=70.55e9)
    | dict(intermediate_size=28672),
}


@pytest.mark.parametrize("size", REAL)
def test_shapes_of_real_llama3(size):
    hf = dict(REAL[size], model_type="llama", vocab_size=128256, num_key_value_heads=8)
    expected = hf.pop("parameters")
    hf |= dict(rms_norm_eps=1e-5, rope_theta=5e5, rope_scaling=None, hidden_act="silu")
    hf |= dict(tie_word_embeddings=False, max_position_embeddings=8192)
    cfg = target_config_from_hf(hf, "test")
    params = jax.eval_shape(lambda key: llama.init(cfg, key), jax.random.key(0))
    count = sum(leaf.size for leaf in jax.tree.leaves(params))
    assert abs(count / expected - 1) < 1e-3
    stack = lambda layers: jax.tree.map(lambda *leaves: jnp.stack(leaves), *layers)
    stacked = params | {"layers": jax.eval_shape(stack, params["layers"])}
    tokens_BT = jax.ShapeDtypeStruct((2, 128), jnp.int32)
    logits = jax.eval_shape(
        lambda p, t: llama.unembed(
            p,
            llama.forward(
                cfg, p, t, llama.Context(t, masks.causal(t)), dtype=jnp.bfloat16
            ).hidden_BTD,
        ),
        stacked,
        tokens_BT,
    )
    assert logits.shape == (2, 128, 128256) and logits.dtype == jnp.float32
