"""The target equals transformers' torch models, layer by layer, and at the sizes of real ones."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from moa_jax import load_target
from moa_jax.model import llama, masks
from tests.compare import assert_close
from tests.conftest import slow
from tests.oracle import moa as oracle
from tests.oracle import random_pair

LENGTHS = (19, 7, 13)
YARN, WINDOWS = random_pair.YARN, {"use_sliding_window": True, "sliding_window": 5}
LINEAR = {"rope_theta": 1e4, "rope_type": "linear", "factor": 3.0}
DYNAMIC = LINEAR | {"rope_type": "dynamic", "factor": 19 / 8}
MORE = {"mscale": 0.7, "mscale_all_dim": 1.4, "truncate": False, "beta_fast": 4.0, "beta_slow": 0.5}
TARGETS = {
    "llama": ("llama", {}),
    "llama-tied": ("llama", {"num_key_value_heads": 3, "tie_word_embeddings": True}),
    "llama-biases": ("llama", {"attention_bias": True, "mlp_bias": True}),
    "llama-odd": ("llama", {"hidden_size": 36, "intermediate_size": 23, "vocab_size": 37}),
    "llama31": ("llama31", {}),
    "qwen2": ("qwen2", {}),
    "qwen2-untied": ("qwen2", {"num_key_value_heads": 1, "tie_word_embeddings": False}),
    "qwen3": ("qwen3", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen3_moe-unscaled": ("qwen3_moe", {"norm_topk_prob": False, "num_experts_per_tok": 1}),
    "mistral": ("mistral", {}),
    "mistral-full": ("mistral", {"sliding_window": None}),
    "ministral": ("ministral", {"layer_types": ["full_attention", *["sliding_attention"] * 2]}),
    "ministral3": ("ministral3", {}),
    "ministral3-windows": ("ministral3", {"sliding_window": 6}),
    "gemma3_text": ("gemma3_text", {}),
    "qwen2-windows": ("qwen2", WINDOWS | {"layer_types": None, "max_window_layers": 1}),
    "qwen3-yarn": ("qwen3", {"rope_parameters": YARN}),
    "llama-linear": ("llama", {"rope_parameters": LINEAR}),
    "llama-yarn": ("llama", {"rope_parameters": YARN | MORE}),
    # transformers' frequencies are those of the longest row, here of all 19 positions.
    "llama-dynamic": ("llama", {"rope_parameters": DYNAMIC, "max_position_embeddings": 8}),
}
FAMILIES = "llama llama31 qwen2 qwen3 mistral ministral3 qwen3_moe gemma3_text".split()


@pytest.fixture(scope="module")
def saved(request, tmp_path_factory):
    """Returns a random torch model, right-padded tokens, and the folder that transformers wrote."""
    family, sizes = TARGETS[request.param]
    config, model = random_pair.random_target(family, seed=7, num_hidden_layers=3, **sizes)
    folder = tmp_path_factory.mktemp("target")
    model.save_pretrained(folder)
    return model, random_pair.random_batch(config.vocab_size, LENGTHS, seed=3), folder


def run(loaded, tokens_BT):
    """Runs one pass without caches, and taps every residual stream."""
    B, T = tokens_BT.shape

    def run(params, tokens_BT):
        position_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
        context = llama.Context(position_BT, masks.causal(jnp.ones((B, T), jnp.int32)))
        tap = range(loaded.config.num_layers)
        return llama.forward(loaded.config, params, tokens_BT, context, tap)

    return jax.jit(run)(loaded.params, tokens_BT)


@pytest.mark.parametrize(
    "saved, layers",
    [(name, "list") if name in FAMILIES else slow(name, "list") for name in TARGETS]
    + [slow(name, "stacked") for name in ("qwen2", "qwen3", "qwen3_moe", "mistral", "gemma3_text")],
    indirect=["saved"],
)
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
    tokens_first, theirs = (1, 3, 0, 2, 4), (seen.key_LBKTE, seen.value_LBKTE)
    for ours, expected in zip(llama.stack_rows(found.rows), theirs, strict=True):
        ours, expected = (np.asarray(x).transpose(tokens_first) for x in (ours, expected))
        assert_close(ours[real_BT], expected[real_BT], "cache")
    with torch.no_grad():
        logits = model(batch.input_ids, attention_mask=batch.attention_mask).logits.numpy()
    assert_close(llama.unembed(loaded.params, found.hidden_BTD)[real_BT], logits[real_BT], "logits")


@pytest.mark.parametrize("saved", [*map(slow, FAMILIES[:-2]), *FAMILIES[-2:]], indirect=True)
def test_cached_pass_equals_whole_pass(saved):
    """Runs a prompt in one piece, then tokens one and three at a time, at uneven lengths.

    The prompt is as wide as the last piece, so that both use one program.
    """
    _, batch, folder = saved
    loaded = load_target(folder, jnp.float32)
    cfg, params = loaded.config, loaded.params
    forward = jax.jit(functools.partial(llama.forward, cfg))
    tokens_BT = jnp.asarray(batch.input_ids.numpy(), jnp.int32)
    whole_BTD = np.asarray(run(loaded, tokens_BT).hidden_BTD)
    caches, length_B = llama.init_caches(cfg, 3, 24, jnp.float32), jnp.zeros(3, jnp.int32)
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
