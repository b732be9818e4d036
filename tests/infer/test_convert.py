"""Names and shapes: our arrays hold the stored tensors, and configs mean the same both ways."""

from __future__ import annotations

import dataclasses
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import transformers

from moa_jax.config import BlockConfig, MoaConfig, RopeScaling, TargetConfig
from moa_jax.drafters import moa
from moa_jax.drafters.moa import files
from moa_jax.errors import InputError
from moa_jax.files.hf_config import target_config_from_hf, target_config_to_hf
from moa_jax.model import convert, llama

BLOCK = BlockConfig(
    hidden_size=30,
    num_heads=6,
    num_kv_heads=2,
    head_dim=10,  # not 30 / 6; and memory of 40 leaves layer self-attention heads of 6
    intermediate_size=70,
    rms_norm_eps=1e-5,
    rope_theta=5e5,
    rope_scaling=None,
)
LLAMA3 = RopeScaling("llama3", 8.0, 1.0, 4.0, 64)
FLAGS = {
    "llama": {},
    "llama31": dict(rope_scaling=LLAMA3),
    "linear": dict(rope_scaling=RopeScaling("linear", 2.0)),
    "llama_bias": dict(qkv_bias=True, out_bias=True),
    "llama_mlp_bias": dict(mlp_bias=True),
    "qwen2": dict(qkv_bias=True),
    "qwen3": dict(qk_norm=True),
    "qwen3_bias": dict(qk_norm=True, qkv_bias=True, out_bias=True),
}
MOA = MoaConfig(3, 40, 2, 36, 1, 28, target_layer_inference=1)


def config_of(name, **changes):
    family = name[:5] if name.startswith("qwen") else "llama"
    block = dataclasses.replace(BLOCK, **FLAGS[name])
    fields = dict(vocab_size=50, num_layers=3, tie_word_embeddings=False)
    return TargetConfig(family, block=block, max_position_embeddings=99, **fields | changes)


def stored_tensors(table, dtype=np.float32):
    rng = np.random.default_rng(0)
    shapes = convert.stored_shapes(table)
    return {name: rng.normal(size=shape).astype(dtype) for name, shape in shapes.items()}


def packed_tree(table, tensors):
    return convert.nest(
        {
            path: convert.pack(packing, [tensors[name] for name in packing.names], np.float32)
            for path, packing in table.items()
        }
    )


# ---- arrays -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLAGS)
def test_unpack_undoes_pack(name):
    cfg = config_of(name)
    for table in (convert.target_table(cfg), files.table(MOA, cfg)):
        tensors = stored_tensors(table)
        tree = packed_tree(table, tensors)
        back = {}
        for path, packing in table.items():
            leaf = convert.leaf_at(tree, path)
            assert leaf.shape == packing.shape
            back |= convert.unpack(packing, leaf)
        assert back.keys() == tensors.keys()
        for key in tensors:
            np.testing.assert_array_equal(back[key], tensors[key])
            assert back[key].flags.c_contiguous


@pytest.mark.parametrize("name", FLAGS)
def test_tables_have_the_shapes_that_the_models_use(name):
    cfg = config_of(name)
    shapes = lambda tree: jax.tree.map(lambda leaf: leaf.shape, tree)
    leaves = {path: packing.shape for path, packing in convert.target_table(cfg).items()}
    made = jax.eval_shape(lambda: llama.init(cfg, jax.random.key(0)))
    assert convert.nest(leaves) == shapes(made)
    leaves = {path: packing.shape for path, packing in files.table(MOA, cfg).items()}
    made = jax.eval_shape(lambda: moa.make(MOA, cfg).init(jax.random.key(0)))
    assert convert.nest(leaves) == shapes(made)


def test_each_kv_head_lies_beside_the_query_heads_it_serves():
    table = convert.block_table(config_of("qwen2").block, "")
    tensors = stored_tensors(table)
    attention = packed_tree(table, tensors)["attention"]
    kernel_DKXE, bias_KXE = attention["qkv"]["kernel"], attention["qkv"]["bias"]
    size, group = BLOCK.head_dim, BLOCK.group_size
    for kv_head in range(BLOCK.num_kv_heads):
        queries = [("q", kv_head * group + g, g) for g in range(group)]
        for letter, head, slot in [*queries, ("k", kv_head, group), ("v", kv_head, group + 1)]:
            rows = slice(head * size, (head + 1) * size)
            weight, bias = (tensors[f"self_attn.{letter}_proj.{x}"] for x in ("weight", "bias"))
            np.testing.assert_array_equal(kernel_DKXE[:, kv_head, slot], weight[rows].T)
            np.testing.assert_array_equal(bias_KXE[kv_head, slot], bias[rows])
    np.testing.assert_array_equal(attention["out"]["kernel"], tensors["self_attn.o_proj.weight"].T)


def test_gate_is_0_and_up_is_1():
    table = convert.block_table(config_of("llama_mlp_bias").block, "")
    tensors = stored_tensors(table)
    mlp = packed_tree(table, tensors)["mlp"]
    for slot, name in enumerate(("gate", "up")):
        weight, bias = (tensors[f"mlp.{name}_proj.{x}"] for x in ("weight", "bias"))
        np.testing.assert_array_equal(mlp["gate_up"]["kernel"][:, slot], weight.T)
        np.testing.assert_array_equal(mlp["gate_up"]["bias"][slot], bias)


def test_a_tied_target_has_no_head():
    tied = convert.target_table(config_of("llama", tie_word_embeddings=True))
    assert ("lm_head",) in convert.target_table(config_of("llama"))
    assert ("lm_head",) not in tied and "lm_head.weight" not in convert.stored_shapes(tied)


def test_leaves_are_found_in_stacked_layers_too():
    cfg = config_of("llama")
    table = convert.target_table(cfg)
    listed = packed_tree(table, stored_tensors(table))
    layers = jax.tree.map(lambda *leaves: jnp.stack(leaves), *listed["layers"])
    stacked = listed | {"layers": layers}
    for path in table:
        np.testing.assert_array_equal(convert.leaf_at(listed, path), convert.leaf_at(stacked, path))


# ---- configs ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FLAGS)
@pytest.mark.parametrize("tied", [False, True])
def test_a_config_survives_writing_and_reading(name, tied):
    cfg = config_of(name, tie_word_embeddings=tied)
    assert target_config_from_hf(target_config_to_hf(cfg)) == cfg


@pytest.mark.parametrize("name", FLAGS)
def test_transformers_reads_our_config_and_we_read_its_own(name):
    cfg = config_of(name)
    written = target_config_to_hf(cfg)
    theirs = transformers.AutoConfig.for_model(**written)
    assert "rope_parameters" in theirs.to_dict() and "rope_scaling" in written
    assert target_config_from_hf(theirs.to_dict()) == cfg
    assert target_config_from_hf(theirs.to_diff_dict()) == cfg


def test_older_spellings_are_read():
    cfg = config_of("linear")
    written = target_config_to_hf(cfg) | {"rope_scaling": {"type": "linear", "factor": 2.0}}
    assert target_config_from_hf(written) == cfg
    bare = target_config_to_hf(config_of("llama"))
    for key in ("rope_scaling", "attention_bias", "mlp_bias", "tie_word_embeddings", "rope_theta"):
        del bare[key]
    bare |= {"hidden_size": 24, "num_key_value_heads": None, "head_dim": None}
    read = target_config_from_hf(bare)
    assert (read.block.rope_theta, read.block.rope_scaling) == (10000.0, None)
    assert (read.block.num_kv_heads, read.block.head_dim) == (6, 4)


@pytest.mark.parametrize(
    "change, says",
    [
        ({"model_type": "mistral"}, "model_type 'mistral' is not supported"),
        ({"model_type": None}, "model_type None is not supported"),
        ({"hidden_act": "gelu"}, 'hidden_act: "gelu" is not supported'),
        ({"hidden_size": None}, "hidden_size is missing"),
        ({"quantization_config": {"bits": 4}}, "quantized"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "rope scaling 'yarn'"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "rope scaling 'dynamic'"),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, "low_freq_factor is missing"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor: 0.5 is not supported"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "sliding-window"),
        (
            {"use_sliding_window": True, "sliding_window": 16, "max_window_layers": 1},
            "sliding-window",
        ),
        ({"num_key_value_heads": 4}, "do not share 4"),
        ({"num_key_value_heads": -1}, "num_kv_heads is -1; choose a whole number of at least 1"),
        ({"vocab_size": "50"}, "vocab_size is '50'; choose a whole number"),
        ({"num_hidden_layers": 2.5}, "num_layers is 2.5; choose a whole number"),
    ],
)
def test_what_we_cannot_run_is_refused(change, says):
    config = target_config_to_hf(config_of("llama")) | change
    with pytest.raises(InputError) as error:
        target_config_from_hf(config, "somewhere/config.json")
    assert says in str(error.value) and "\n" not in str(error.value)


def test_an_unused_sliding_window_is_no_matter():
    config = target_config_to_hf(config_of("qwen2")) | {"sliding_window": 16}
    windows = {"use_sliding_window": True, "max_window_layers": 3}  # the first 3 of 3 are full
    assert target_config_from_hf(config | windows) == config_of("qwen2")
    assert target_config_from_hf(config | {"use_sliding_window": False}) == config_of("qwen2")


def test_a_family_is_not_made_to_say_what_it_cannot():
    cfg = dataclasses.replace(config_of("llama"), family="qwen2")
    with pytest.raises(InputError, match="qwen2 config cannot say these biases"):
        target_config_to_hf(cfg)


def test_llama_3_8b_counts_its_known_parameters():
    block = BlockConfig(4096, 32, 8, 128, 14336, 1e-5, 5e5, None)
    cfg = TargetConfig("llama", 128256, 32, block, False, 8192)
    shapes = convert.stored_shapes(convert.target_table(cfg)).values()
    assert sum(map(math.prod, shapes)) == 8_030_261_248
    shapes = convert.stored_shapes(files.table(MoaConfig(4, 6144, 4, 6144, 8, 3072), cfg))
    assert round(sum(map(math.prod, shapes.values())) / 1e6, 1) == 264.3
