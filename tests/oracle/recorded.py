"""Cases recorded from the authors' code, read as the oracle's own inputs.

A case is a folder with `target/`, `draft/`, `moa.json` and `train.npz`, and where they were
recorded `grads.npz`, `steps.npz` and `generate.npz`. The data's README describes these files.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from safetensors.torch import load_file
from torch import Tensor

from .learn import Sample
from .moa import Seen, TorchDrafter, make_drafter

Arrays = dict[str, Tensor]


@dataclasses.dataclass(frozen=True)
class Case:
    """One recorded pair; arrays come as torch tensors."""

    folder: Path

    @functools.cached_property
    def settings(self) -> dict[str, Any]:
        return json.loads((self.folder / "moa.json").read_text())

    @functools.cached_property
    def config(self) -> Any:
        return transformers.AutoConfig.from_pretrained(self.folder / "target")

    @functools.cached_property
    def model(self) -> Any:
        """Returns the target as a transformers model in float32."""
        load = transformers.AutoModelForCausalLM.from_pretrained
        return load(self.folder / "target", dtype=torch.float32).eval().requires_grad_(False)

    @functools.cached_property
    def target(self) -> Arrays:
        return load_file(self.folder / "target" / "model.safetensors")

    @functools.cached_property
    def draft(self) -> Arrays:
        return load_file(self.folder / "draft" / "model.safetensors")

    @property
    def num_reused(self) -> int:
        return self.settings["train_args"]["target_layer_inference"]

    def drafter(self) -> TorchDrafter:
        return make_drafter(self.config, self.target, self.draft, self.num_reused)

    def arrays(self, name: str) -> Arrays:
        """Returns all arrays of one .npz of the folder, by name."""
        with np.load(self.folder / name) as file:
            return {key: torch.from_numpy(file[key]) for key in file.files}

    @functools.cached_property
    def train(self) -> Arrays:
        return self.arrays("train.npz")

    @functools.cached_property
    def seen(self) -> Seen:
        return Seen(*(self.train[x] for x in ("hidden_states", "past_key", "past_value")))

    @property
    def real_BT(self) -> Tensor:
        """Returns True where a token is not padding: only these positions are comparable."""
        return self.train["attention_mask"] == 1

    @property
    def variants(self) -> list[str]:
        """Returns the recorded kinds of masks: vfl0_sc0 and so on."""
        return sorted({key.split("/")[0] for key in self.train if "/" in key})

    def sample(self, variant: str) -> Sample:
        """Returns the recorded batch with the recorded draws of one variant."""
        attention_BT = self.train["attention_mask"]
        noisy_BT = self.train[f"{variant}/response_mask_noisy"]
        nobody_B = torch.zeros(len(noisy_BT), dtype=torch.bool)
        staircase_B = self.train.get(f"{variant}/staircase_rows", nobody_B)
        response_BT = self.train["response_mask"]
        return Sample(self.seen, attention_BT, response_BT, noisy_BT, staircase_B)
