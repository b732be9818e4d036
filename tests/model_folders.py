"""Helpers for tests that save model folders, damage them and compare them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from moa_jax.config import Eagle3Config, EagleConfig
from moa_jax.drafters import DRAFTERS
from moa_jax.errors import InputError
from moa_jax.model import convert
from moa_jax.pretrained import describe_target
from tests.oracle import random_pair

ONE_LAYER = {
    "eagle": EagleConfig(num_key_value_heads=2, intermediate_size=32),
    "eagle3": Eagle3Config(
        num_key_value_heads=2, intermediate_size=32, draft_ids=tuple(range(3, 43))
    ),
}


def save_random_pair(
    folder: Path, family: str, seed: int, num_reused: int = 0, **target_sizes: int
) -> None:
    """Saves a random pair in `target` and `draft`, as transformers and the authors' code do."""
    config, model = random_pair.random_target(family, seed, **target_sizes)
    sizes = random_pair.draft_sizes(config, num_reused)
    draft = random_pair.random_drafter(config, sizes, seed)
    random_pair.save_pair(folder / "target", folder / "draft", model, draft)


def save_random_drafter(folder: Path, method: str, target: Path, /, **changes: Any) -> Path:
    """Saves a drafter of one layer in its official layout; `changes` are keys of config.json."""
    kind, cfg, target_cfg = DRAFTERS[method], ONE_LAYER[method], describe_target(target).config
    draw = np.random.default_rng(0)
    shapes = convert.stored_shapes(kind.table(cfg, target_cfg))
    tensors = {k: 0.1 * draw.standard_normal(v, np.float32) for k, v in shapes.items()}
    folder.mkdir()
    save_file(tensors | kind.constants(cfg, target_cfg), folder / "model.safetensors")
    config = kind.write_config(cfg, target_cfg, "authors") | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def tensors_of(folder: Path) -> dict[str, np.ndarray]:
    return {k: v for path in folder.glob("*.safetensors") for k, v in load_file(path).items()}


def assert_same_tensors(folder: Path, other: Path) -> None:
    """Asserts equal names, dtypes and bits."""
    one, two = tensors_of(folder), tensors_of(other)
    assert one.keys() == two.keys()
    for name in one:
        assert one[name].dtype == two[name].dtype
        np.testing.assert_array_equal(one[name], two[name], err_msg=name)


def edit_json(path: Path, **changes: Any) -> None:
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder: Path, drop: str = " ", **changes: np.ndarray) -> None:
    """Removes the tensors with `drop` in their names, and adds `changes`."""
    kept = {k: v for k, v in tensors_of(folder).items() if drop not in k}
    save_file(kept | changes, folder / "model.safetensors")


def save_shards(folder: Path, tensors: dict[str, np.ndarray]) -> dict[str, str]:
    """Writes two shards with an index, and returns the file of each tensor."""
    names, file_of = sorted(tensors), {}
    for number, part in enumerate((names[::2], names[1::2]), 1):
        file = f"model-{number:05d}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, folder / file, {"by": "another"})
        file_of |= dict.fromkeys(part, file)
    index = {"metadata": {}, "weight_map": file_of}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    return file_of


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Returns the error of one line with which a call refuses its input."""
    with pytest.raises(InputError) as error:
        function(*arguments, **named)
    assert "\n" not in str(error.value)
    return str(error.value)
