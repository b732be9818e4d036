"""Stored tensors are converted to packed arrays piece by piece."""

from __future__ import annotations

import os
import threading

import ml_dtypes
import numpy as np
import pytest
from safetensors.numpy import save_file

from moa_jax.files import device_loader, model_folder, packed
from moa_jax.model import convert
from tests.model_folders import refusal

QKV, OUT, BIAS, GATE_UP = ("q", "k", "v"), ("out",), ("q_bias", "k_bias", "v_bias"), ("g", "u")
TABLE: convert.Table = {
    ("qkv",): convert.kernel((None,) * 4, QKV, 24, (2, 3, 4), (2, 1, 4), (2, 1, 4)),
    ("bias",): convert.vector((None,) * 3, BIAS, (2, 3, 4), (2, 1, 4), (2, 1, 4)),
    ("gate_up",): convert.kernel((None,) * 3, GATE_UP, 24, (1, 150), (1, 150)),
    ("out",): convert.kernel((None,) * 2, OUT, 24, (24,)),  # square: turned or not, the same shape
    ("embed",): convert.embedding("embed", 37, 24),
}


def save(folder, stored: str) -> dict[str, np.ndarray]:
    """Writes a folder with random tensors of the table."""
    rng = np.random.default_rng(0)
    shapes = convert.stored_shapes(TABLE)
    tensors = {name: rng.normal(size=shape) for name, shape in shapes.items()}
    bits = rng.integers(0, 1 << 16, shapes["u"], dtype=np.uint16)  # infinities, subnormal numbers
    tensors["u"] = np.nan_to_num(bits.view(np.float16), posinf=np.inf).astype(np.float32) * 1e-38
    tensors["g"] = np.nan_to_num(bits.view(ml_dtypes.bfloat16).astype(np.float32), posinf=np.inf)
    with np.errstate(over="ignore"):
        tensors = {name: tensor.astype(stored) for name, tensor in tensors.items()}
    save_file(tensors, folder / "model.safetensors")
    return tensors


def expected(tensors: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Returns the table's arrays by numpy alone, in the dtype of the tensors."""
    q, k, v = (tensors[name].reshape(2, -1, 4, 24) for name in QKV)
    biases = [tensors[name].reshape(2, -1, 4) for name in BIAS]
    gate, up = (tensors[name].T for name in GATE_UP)
    return {
        "qkv": np.concatenate([q, k, v], axis=1).transpose(3, 0, 1, 2),
        "bias": np.concatenate(biases, axis=1),
        "gate_up": np.stack([gate, up], axis=1),
        "out": tensors["out"].T,
        "embed": tensors["embed"],
    }


@pytest.mark.parametrize("turned_on_host", [None, 0])
@pytest.mark.parametrize("piece_bytes", [1, 200, 1 << 22])
@pytest.mark.parametrize(
    "stored, dtype", [("bfloat16", "bfloat16"), ("float16", "bfloat16"), ("float64", "float32")]
)
def test_pieces_make_the_arrays(stored, dtype, piece_bytes, turned_on_host, tmp_path, monkeypatch):
    monkeypatch.setattr(packed, "PIECE_BYTES", piece_bytes)
    monkeypatch.setattr(device_loader, "TURNED_ON_HOST", turned_on_host)
    tensors = save(tmp_path, stored)
    params = device_loader.read_params(model_folder.open_tensors(tmp_path), TABLE, dtype)
    for name, array in expected(tensors).items():
        found = np.asarray(params[name])
        assert found.dtype == np.dtype(dtype)
        np.testing.assert_array_equal(found, array.astype(dtype), err_msg=name)


def test_a_file_that_ends_while_it_is_read(tmp_path):
    """An access to the removed part of the mapping would end the process."""
    save(tmp_path, "float32")
    reader, path = model_folder.open_tensors(tmp_path), tmp_path / "model.safetensors"
    threads = set(threading.enumerate())
    os.truncate(path, path.stat().st_size // 2)
    said = refusal(device_loader.read_params, reader, TABLE, "float32")
    assert said.startswith(f"{path} ends within ") and said.endswith("; fetch it again")
    assert set(threading.enumerate()) <= threads
