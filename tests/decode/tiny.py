"""A tiny random target, and a drafter of every kind with a moderate acceptance rate."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from infer.bench import random_pair
from moa_jax import Session
from moa_jax.config import (
    BlockConfig,
    BorrowedConfig,
    DraftShape,
    Eagle3Config,
    EagleConfig,
    GlideConfig,
    IndependentConfig,
    LookupConfig,
    MoaConfig,
    TargetConfig,
)
from moa_jax.model.quantize import Format, quantize_params
from moa_jax.pretrained import LoadedDrafter, Target

CONFIG = TargetConfig(  # layers take most of a program's time
    "llama", 64, 2, BlockConfig(16, 2, 1, 8, 24, 1e-5, 10000.0, None), False, 256
)


def configs_for(target: TargetConfig, heads: int) -> dict[str, tuple[str, Any]]:
    """Returns methods and configs of drafters with this number of key-value heads."""
    small, moa = dataclasses.replace(target, num_layers=1), (heads, 24, heads, 24, heads, 16)
    taps, half = (0, 1, 1), tuple(range(1, target.vocab_size, 2))
    return {
        "moa-0": ("moa", MoaConfig(*moa)),
        "moa-1": ("moa", MoaConfig(*moa, target_layer_inference=1)),
        "moa-2": ("moa", MoaConfig(*moa, target_layer_inference=2)),
        "eagle": ("eagle", EagleConfig(heads, 24)),
        "eagle3": ("eagle3", Eagle3Config(heads, 24, tapped_layers=taps)),
        "glide": ("glide", GlideConfig(heads, 24, 3)),
        "independent": ("independent", IndependentConfig(small)),
        "borrowed": ("independent-borrowed", BorrowedConfig(small)),
        "lookup": ("lookup", LookupConfig()),
        "eagle-authors": (
            "eagle",
            EagleConfig(heads, 24, input_norm=True, fc_bias=False, names="authors"),
        ),
        "eagle3-ids": ("eagle3", Eagle3Config(heads, 24, draft_ids=half, tapped_layers=taps)),
    }


class TinyPairs:
    """A target, and a drafter of every kind for it, in float32 or quantized, on any mesh."""

    def __init__(self, config: TargetConfig, heads: int = 1) -> None:
        self.config, self.configs = config, configs_for(config, heads)
        self.target = functools.cache(self._target)
        self.drafter = functools.cache(self._drafter)

    def _target(self, weights: Format | None = None, mesh: Mesh | None = None) -> Target:
        """Scales layers to the embedding's size, so that every cache row affects the output."""
        found = random_pair.random_target(self.config, jnp.float32, Path("tiny"), mesh=mesh)
        return grown(found, weights)

    def _drafter(
        self, name: str, weights: Format | None = None, mesh: Mesh | None = None
    ) -> LoadedDrafter:
        method, config = self.configs[name]
        target = self.target(None, mesh)
        return grown(random_pair.random_drafter(method, config, target, jnp.float32), weights)


def grown(found: Any, weights: Format | None) -> Any:
    params = jax.tree.map(lambda leaf: leaf if leaf.ndim == 1 else 10 * leaf, found.params)
    return found._replace(params=quantize_params(params, weights) if weights else params)


TINY = TinyPairs(CONFIG)
target, drafter = TINY.target, TINY.drafter
KINDS = list(TINY.configs)[:9]  # the rest are variants of these


class Script:
    """A controller that repeats its choices and records what it observes."""

    def __init__(self, *choices: tuple[DraftShape, int]) -> None:
        self.choices, self.observed = itertools.cycle(choices), []

    def next(self, costs, lag_ms):
        return next(self.choices)

    def observe(self, costs, shape, accepted, rounds, batch, round_ms):
        self.observed.append((shape, [*map(int, accepted)], rounds))


def follow(session: Session, *choices: tuple[DraftShape, int]) -> Session:
    """The session uses these shapes and rounds in turn, and compiles missing programs at once."""
    session.controller = Script(*choices)
    session.round_costs = lambda batch, length: dict.fromkeys(session.ways, 1.0)
    session._is_ready = lambda way, arrays: True
    return session
