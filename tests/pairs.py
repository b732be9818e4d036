"""Random pairs, and pairs of recorded generations, that decoding tests share."""

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape, EagleConfig
from moa_jax.pretrained import LoadedDrafter
from tests.conftest import arrays_of
from tests.model_folders import save_random_pair
from tests.oracle import random_pair

NO_STOP: list[int] = []  # stop ids: none


class Pair:
    """Both sessions of a pair on disk, and the torch model if it exists."""

    def __init__(self, folder: Path, num_reused: int | None, model=None, method=None) -> None:
        self.model = model
        self.target = load_target(folder / "target", jnp.float32)
        self.drafter = load_drafter(
            folder / "draft", self.target, method=method, target_layer_inference=num_reused
        )
        self.plain = Session(self.target)
        self.session = functools.cache(self._session)

    def _session(self, shape: DraftShape | int) -> Session:
        """Returns a session; an int is the number of levels of a chain."""
        shape = DraftShape(shape) if isinstance(shape, int) else shape
        return Session(self.target, self.drafter, shape)


def random_pair_of(num_reused: int, folder: Path) -> Pair:
    """Saves a random pair with at least two layers that the drafter does not reuse.

    Programs are traced and compiled layer by layer, which takes most of a test's time.
    """
    sizes = dict(num_hidden_layers=max(3, num_reused + 2))
    config, model = random_pair.random_target("llama", 21, 0.2, **sizes)
    draft = random_pair.random_drafter(config, random_pair.draft_sizes(config, num_reused), 22, 0.2)
    random_pair.save_pair(folder / "target", folder / "draft", model, draft)
    return Pair(folder, num_reused, model)


@pytest.fixture(scope="module")
def simple_pair(tmp_path_factory) -> Pair:
    """Returns a random pair for tests that run with any pair."""
    folder = tmp_path_factory.mktemp("simple")
    return Pair(folder, 0, save_random_pair(folder, "llama", seed=21, num_hidden_layers=2))


PROMPTS = [[5, 17, 60, 33, 9, 71, 12], [80, 3, 44], [7]]
METHODS = {"independent": "independent-borrowed"}  # what the authors call differently


def method_of_case(folder: Path) -> str:
    """Returns the kind of a recorded case's drafter, which its files may lack."""
    method = json.loads((folder / "moa.json").read_text())["method"]
    return METHODS.get(method, method)


def options_of_case(folder: Path) -> dict[str, Any]:
    """Returns the arguments of `load_drafter` that the files of a recorded case may lack."""
    settings = json.loads((folder / "moa.json").read_text())
    reused = settings["train_args"].get("target_layer_inference")
    return {"method": method_of_case(folder), "target_layer_inference": reused}


def as_recorded(drafter: LoadedDrafter) -> LoadedDrafter:
    """Returns the drafter as the authors' code ran it: EAGLE with a mask one column off."""
    if not isinstance(drafter.config, EagleConfig):
        return drafter
    return drafter._replace(config=dataclasses.replace(drafter.config, shifted_mask=True))


@functools.cache
def recorded(folder: Path) -> tuple[Pair, dict[str, np.ndarray]]:
    options = options_of_case(folder)
    pair = Pair(folder, options["target_layer_inference"], method=options["method"])
    pair.drafter = as_recorded(pair.drafter)
    return pair, arrays_of(folder / "generate.npz")


def prompts_of(arrays):
    for name in sorted(key.split("/")[0] for key in arrays if key.endswith("/prompt")):
        prompt = arrays[f"{name}/prompt"].reshape(-1).tolist()
        yield name, prompt, arrays[f"{name}/vanilla"].reshape(-1).tolist()[len(prompt) :]
