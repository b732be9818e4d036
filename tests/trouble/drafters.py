"""Random drafters of one layer as files, without the time that initialising them takes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import save_file

from moa_jax.config import Eagle3Config, EagleConfig
from moa_jax.drafters import DRAFTERS
from moa_jax.model import convert
from moa_jax.pretrained import describe_target

CONFIGS = {
    "eagle": EagleConfig(num_key_value_heads=2, intermediate_size=32),
    "eagle3": Eagle3Config(
        num_key_value_heads=2, intermediate_size=32, draft_ids=tuple(range(3, 43))
    ),
}


def save_random_drafter(folder: Path, method: str, target: Path, /, **changes: Any) -> Path:
    """Write a drafter in its official layout; `changes` are keys of its config.json."""
    kind, cfg, target_cfg = DRAFTERS[method], CONFIGS[method], describe_target(target).config
    draw = np.random.default_rng(0)
    shapes = convert.stored_shapes(kind.table(cfg, target_cfg))
    tensors = {k: 0.1 * draw.standard_normal(v, np.float32) for k, v in shapes.items()}
    folder.mkdir()
    save_file(tensors | kind.constants(cfg, target_cfg), folder / "model.safetensors")
    config = kind.write_config(cfg, target_cfg, "authors") | changes
    (folder / "config.json").write_text(json.dumps(config))
    return folder
