"""A tiny random target, and a drafter of every kind whose drafts are accepted now and then."""

from __future__ import annotations

import functools
import itertools
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

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

BLOCK = BlockConfig(16, 2, 1, 8, 24, 1e-5, 10000.0, None)
CONFIG = TargetConfig("llama", 64, 2, BLOCK, False, 256)  # layers are most of a program's time
SMALL = TargetConfig("llama", 64, 1, BLOCK, False, 256)
MOA = (1, 24, 1, 24, 1, 16)
KINDS: dict[str, tuple[str, Any]] = {
    "moa-0": ("moa", MoaConfig(*MOA)),
    "moa-1": ("moa", MoaConfig(*MOA, target_layer_inference=1)),
    "moa-2": ("moa", MoaConfig(*MOA, target_layer_inference=2)),
    "eagle": ("eagle", EagleConfig(1, 24)),
    "eagle3": ("eagle3", Eagle3Config(1, 24, tapped_layers=(0, 1, 1))),
    "glide": ("glide", GlideConfig(1, 24, 3)),
    "independent": ("independent", IndependentConfig(SMALL)),
    "borrowed": ("independent-borrowed", BorrowedConfig(SMALL)),
    "lookup": ("lookup", LookupConfig()),
}
VARIANTS = KINDS | {
    "eagle-authors": ("eagle", EagleConfig(1, 24, input_norm=True, fc_bias=False, names="authors")),
    "eagle3-ids": (
        "eagle3",
        Eagle3Config(1, 24, draft_ids=tuple(range(1, 64, 2)), tapped_layers=(0, 1, 1)),
    ),
}


@functools.cache
def target(weights: Format | None = None) -> Target:
    """A target whose layers weigh as much as its embedding, so that every row it reads counts."""
    if weights:
        return target()._replace(params=quantize_params(target().params, weights))
    return large(random_pair.random_target(CONFIG, jnp.float32, Path("tiny")))


@functools.cache
def drafter(name: str, weights: Format | None = None) -> LoadedDrafter:
    if weights:
        whole = drafter(name)
        return whole._replace(params=quantize_params(whole.params, weights))
    method, config = VARIANTS[name]
    return large(random_pair.random_drafter(method, config, target(), jnp.float32))


def large(found: Any) -> Any:
    grown = lambda leaf: leaf if leaf.ndim == 1 else 10 * leaf
    return found._replace(params=jax.tree.map(grown, found.params))


class Script:
    """A controller that repeats its choices and records what it observes."""

    def __init__(self, *choices: tuple[DraftShape, int]) -> None:
        self.choices, self.observed = itertools.cycle(choices), []

    def next(self, costs, lag_ms):
        return next(self.choices)

    def observe(self, costs, shape, accepted, rounds, batch):
        self.observed.append((shape, [*map(int, accepted)], rounds))


def follow(session: Session, *choices: tuple[DraftShape, int]) -> Session:
    """The session takes these shapes and rounds in turns, and compiles what it lacks at once."""
    session.controller = Script(*choices)
    session.round_costs = lambda batch, length: dict.fromkeys(session.ways, 1.0)
    session._is_ready = lambda way, arrays: True
    return session
