"""Folders in eight bits: kept so in memory, equal to their dequantized weights, or refused."""

from __future__ import annotations

import shutil
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from moa_jax.model import quantize
from moa_jax.model.quantize import Quantized
from moa_jax.pretrained import load_target
from tests.compare import assert_close
from tests.conftest import slow
from tests.files.test_config_faults import eight_bits, quantized
from tests.model.test_target import run
from tests.model_folders import edit_json, edit_tensors, refusal, tensors_of

KEY = "model.layers.1.self_attn.k_proj"
GROUPS = {"strategy": "group", "group_size": 4}
# keys of config.json, and the outputs and inputs that share a scale (0: all)
CASES = {
    "pack-quantized": (eight_bits(), (1, 0)),
    "pack-quantized, groups": (eight_bits(**GROUPS), (1, 4)),
    "int-quantized": (eight_bits("int-quantized"), (1, 0)),
    "float-quantized": (eight_bits("float-quantized"), (1, 0)),
    "float-quantized, tensor": (eight_bits("float-quantized", strategy="tensor"), (0, 0)),
    "fp8, blocks": (quantized("fp8", weight_block_size=[16, 4]), (16, 4)),
}


def save_quantized(folder: Path, name: str) -> None:
    """Makes `target` the folder `wide`, and adds `eight`, whose layers are quantized."""
    (config, share), stored, wide = CASES[name], {}, {}
    shutil.copytree(folder / "target", folder / "eight")
    (folder / "target").rename(folder / "wide")
    edit_json(folder / "eight" / "config.json", **config)
    for weight, w_OI in tensors_of(folder / "wide").items():
        if "_proj" not in weight:
            stored[weight] = torch.from_numpy(w_OI)
            continue
        sizes = [step or size for step, size in zip(share, w_OI.shape, strict=True)]
        scale = np.abs(w_OI)
        for axis, size in enumerate(sizes):
            scale = np.maximum.reduceat(scale, range(0, w_OI.shape[axis], size), axis) / 11
        spread = scale.repeat(sizes[0], 0)[: len(w_OI)].repeat(sizes[1], 1)
        values = torch.from_numpy(w_OI / spread)
        values = values.to(torch.float8_e4m3fn) if "f" in name[:2] else values.round().char()
        wide[weight] = values.float().numpy() * spread
        if "pack" in name:
            words = (values.int().numpy() + 128).astype(np.uint8).view(np.int32)
            stored[f"{weight}_packed"] = torch.from_numpy(words)
            stored[f"{weight}_shape"] = torch.tensor(w_OI.shape)
        else:
            stored[weight] = values
        scales = "weight_scale_inv" if "blocks" in name else "weight_scale"
        scale = scale.reshape(-1) if "tensor" in name else scale
        stored[weight.replace("weight", scales)] = torch.from_numpy(scale)
    edit_tensors(folder / "wide", **wide)
    save_file(stored, folder / "eight" / "model.safetensors")


@pytest.mark.parametrize(
    "family, name",
    [("llama", name) for name in CASES]
    + [slow("qwen3_moe", name) for name in [*CASES][1::2]]
    + [slow("gemma3_text", name) for name in [*CASES][::2]],
)
def test_eight_bits_are_kept_and_equal_wide_weights(saved, tmp_path, monkeypatch, family, name):
    shutil.copytree(saved / family / "target", tmp_path / "target")
    save_quantized(tmp_path, name)
    found, wide = (load_target(tmp_path / kind, jnp.float32) for kind in ("eight", "wide"))
    is_matrix = lambda leaf: isinstance(leaf, Quantized)
    whole = lambda path, leaf: quantize.restored((path[-1].key,), leaf) if is_matrix(leaf) else leaf
    restored = jax.tree.map_with_path(whole, found.params, is_leaf=is_matrix)
    jax.tree.map(np.testing.assert_array_equal, restored, wide.params)
    eight = [leaf for leaf in jax.tree.leaves(found.params) if leaf.dtype.itemsize == 1]
    assert len(eight) == 4 * found.config.num_layers
    stacked = load_target(tmp_path / "eight", jnp.float32, layers="stacked")
    monkeypatch.setattr(quantize, "MOST_ROWS_OF_GROUPS", 4)
    many_BT = jnp.asarray([[5, 9, 33, 7, 11], [8, 8, 1, 60, 2]])
    for model, rows_BT in ((found, many_BT[:1, :1]), (found, many_BT), (stacked, many_BT)):
        assert_close(run(model, rows_BT).hidden_BTD, run(wide, rows_BT).hidden_BTD, "hidden")


FAULTS = {
    f"{KEY}.weight is stored as I32 with 0 tensors of scales": (f"{KEY}.weight_scale", {}, {}),
    "not finite": (" ", {"weight_scale": np.float32([[np.nan] * 15] * 20)}, {}),
    "states 1 x 4 that share": (" ", {"weight_scale": np.ones((20, 5), np.float32)}, {}),
    "form one matrix, but not all": (KEY, {"weight": np.ones((20, 60), np.float32)}, {}),
    "in eight bits already; leave out --weights int8": (" ", {}, {"weights": "int8"}),
    "float16 has no room for the scales": (" ", {}, {"dtype": "float16"}),
}


@pytest.mark.parametrize("says", FAULTS)
def test_folders_that_cannot_be_read_are_refused_in_one_line(pair, says):
    save_quantized(pair, "pack-quantized, groups")
    drop, changes, options = FAULTS[says]
    edit_tensors(pair / "eight", drop, **{f"{KEY}.{kind}": x for kind, x in changes.items()})
    assert says in refusal(load_target, pair / "eight", **options)
