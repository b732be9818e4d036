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

SIZES, DRAFT_IDS = dict(num_key_value_heads=2, intermediate_size=32), tuple(range(3, 43))
ONE_LAYER = {"eagle": EagleConfig(**SIZES), "eagle3": Eagle3Config(**SIZES, draft_ids=DRAFT_IDS)}


def save_random_pair(folder: Path, family: str, seed: int, num_reused=0, **sizes: int) -> Any:
    """Saves a random pair in `target` and `draft`, as transformers and the authors' code do.

    Returns the target's torch model.
    """
    config, model = random_pair.random_target(family, seed, **sizes)
    draft = random_pair.random_drafter(config, random_pair.draft_sizes(config, num_reused), seed)
    random_pair.save_pair(folder / "target", folder / "draft", model, draft)
    return model


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
    return {k: v for path in folder.glob("model*.safetensors") for k, v in load_file(path).items()}


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


def written_by(folder: Path, writer: str) -> Path:
    """Rewrites an official EAGLE folder with the names and the config.json of other software."""
    path, outside = folder / "config.json", ("lm_head.weight", "d2t", "t2d")
    config = json.loads(path.read_text())
    tensors = {k.replace("midlayer.", "layers.0."): v for k, v in tensors_of(folder).items()}
    if writer == "specjax":  # no more keys than these, and none that says EAGLE-3
        tensors, stated = tensors_of(folder), "model_type _size _heads _layers _dim rope_t rms"
        config = {k: v for k, v in config.items() if any(x in k for x in stated.split())}
        config["architectures"] = ["LlamaForCausalLM"]
    elif writer == "nemo":
        tensors = {k if k in outside else f"model.{k}": v for k, v in tensors.items()}
    elif writer == "nvidia":
        del config["eagle_aux_hidden_state_layer_ids"]
        config["eagle_config"] |= {"norm_before_fc": config.pop("norm_before_fc")}
        config["eagle_config"] |= {"use_aux_hidden_state": True, "parallel_draft_step": 1}
    elif writer == "speculators":
        del config["eagle_config"]
        outer = ("norm", "draft_vocab", "layer_ids")
        own = {k: config.pop(k) for k in [*config] if any(x in k for x in outer) and "rms" not in k}
        own |= {"speculators_model_type": "eagle3", "speculators_version": "0.8.0.dev0"}
        own |= {"architectures": ["Eagle3DraftModel"], "target_hidden_size": None}
        own |= {"auto_map": {"": "config.Eagle3SpeculatorConfig"}, "embed_requires_grad": False}
        config = own | {"transformer_layer_config": config, "tie_word_embeddings": False}
    path.write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def refusal(function: Callable[..., Any], *arguments: Any, **named: Any) -> str:
    """Returns the error of one line with which a call refuses its input."""
    with pytest.raises(InputError) as error:
        function(*arguments, **named)
    assert "\n" not in str(error.value)
    return str(error.value)
