"""Checks that hold for a drafter of any kind, and their helpers."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape, Objective, Sampling
from moa_jax.data.batch import Batch
from moa_jax.drafters import DRAFTERS
from moa_jax.drafters.api import CandidateSampler, Drafter
from moa_jax.model import convert
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.training.distillation import tap
from tests.compare import assert_close
from tests.oracle import random_pair
from tests.pairs import NO_STOP, PROMPTS, method_of_case
from tests.train.test_training import distill_config, metrics
from train import distill

CHAIN, TREE = DraftShape(4), DraftShape(4, 3, 8)
NUM_NEW = 20
LAWS = (Sampling(), Sampling(temperature=0.7, top_k=20, seed=3), Sampling(0.9, seed=4))


def make(target: Target, drafter: LoadedDrafter, objective: Objective | None = None) -> Drafter:
    """Returns the drafter's functions."""
    return DRAFTERS[drafter.method].make(drafter.config, target.config, objective)


def batch_of(tokens_BT, attention_BT, response_BT) -> Batch:
    """Returns right-padded rows of one conversation each; padding is segment 0."""
    attention_BT = attention_BT.astype(np.int32)
    position_BT = np.maximum(attention_BT.cumsum(1) - 1, 0) * attention_BT
    rows = (tokens_BT.astype(np.int32), attention_BT, position_BT.astype(np.int32))
    return Batch(*map(jnp.asarray, rows), jnp.asarray(response_BT == 1))


def stored(target: Target, drafter: LoadedDrafter, params: Any) -> dict[str, np.ndarray]:
    """Returns parameters (or gradients) by the names and in the layout of the drafter's files."""
    table = DRAFTERS[drafter.method].table(drafter.config, target.config)
    leaves = ((packing, convert.leaf_at(params, path)) for path, packing in table.items())
    return dict(named for packing, x in leaves for named in convert.unpack(packing, np.asarray(x)))


def shown(docstring: str, name: str) -> list[float]:
    """Returns the numbers that follow the name of an array in a docstring, up to a wider gap."""
    (found,) = re.findall(rf"^ *{name} +((?:-?[\d.]+ {{0,7}})+)", docstring, re.MULTILINE)
    return [float(number) for number in found.split()]


# ---- recorded cases -----------------------------------------------------------------------


@functools.cache
def recorded_training(folder: Path) -> tuple[Target, LoadedDrafter, dict[str, np.ndarray], Batch]:
    """Returns a recorded pair, the arrays of its training forward, and their batch."""
    target = load_target(folder / "target", jnp.float32)
    drafter = load_drafter(folder / "draft", target, method=method_of_case(folder))
    with np.load(folder / "train.npz") as file:
        arrays = dict(file)
    rows = (arrays[name] for name in ("input_ids", "attention_mask", "response_mask"))
    return target, drafter, arrays, batch_of(*rows)


def loss_and_gradient(
    target: Target, drafter: LoadedDrafter, batch: Batch, objective: Objective | None = None
) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Returns the parts of the training loss, and its gradient by the names of files."""
    functions = make(target, drafter, objective or Objective())
    shared = functions.shared_params(target.params)

    def loss(params: Any, batch: Batch) -> Any:
        tapped = tap(target.config, functions, target.params, batch, jnp.float32)
        return functions.loss(params, shared, batch, tapped, jax.random.key(0), jnp.float32(0))

    gradient, parts = jax.jit(jax.grad(loss, has_aux=True))(drafter.params, batch)
    return parts, stored(target, drafter, gradient)


# ---- any pair -----------------------------------------------------------------------------


@pytest.fixture(scope="session")
def calm_target(tmp_path_factory) -> Target:
    """Returns a random target in which the last token weighs most, so that drafts may agree."""
    return calm_target_of(3, tmp_path_factory.mktemp("calm") / "target")


def calm_target_of(num_layers: int, folder: Path) -> Target:
    """Returns such a target; its compile time grows with its number of layers."""
    _, model = random_pair.random_target("llama", 21, calm=0.2, num_hidden_layers=num_layers)
    model.save_pretrained(folder)
    return load_target(folder, jnp.float32)


_STARTED: dict[Any, Any] = {}  # parameters of drafters, by their configs


def untrained(target: Target, method: str, config: Any, seed: int = 1) -> LoadedDrafter:
    """Returns a drafter with the weights at the start of training."""
    key = (target.config, method, config, seed)
    if key not in _STARTED:
        init = jax.jit(DRAFTERS[method].make(config, target.config).init)
        _STARTED[key] = init(jax.random.key(seed))
    return LoadedDrafter(method, config, _STARTED[key], (), Path(method), None)


def assert_drafting_equals_training(
    target: Target, drafter: LoadedDrafter, prompts: Sequence[list[int]] = PROMPTS, depth: int = 5
) -> None:
    """Asserts that a chain drafted with caches has the logits of one pass over the whole text.

    The last token of each prompt is the root, the others are verified. `draft_one` drafts the same
    chain token by token, from the same logits.
    """
    functions, vocab_size = make(target, drafter), target.config.vocab_size
    prompts = [prompt for prompt in prompts if len(prompt) > 1]
    B, T = len(prompts), max(map(len, prompts)) + depth
    length_B = np.array([len(prompt) - 1 for prompt in prompts], np.int32)
    tokens_BT = np.zeros((B, T), np.int32)
    for row, prompt in zip(tokens_BT, prompts, strict=True):
        row[: len(prompt)] = prompt
    root_B = jnp.asarray(tokens_BT[np.arange(B), length_B])
    shared = functions.shared_params(target.params)

    @jax.jit
    def drafted(tokens_BT):
        batch = batch_of(tokens_BT, np.ones((B, T)), np.ones((B, T)))
        tapped = tap(target.config, functions, target.params, batch, jnp.float32)
        cache = functions.init_cache(B, T + depth, jnp.float32)
        zero_B = jnp.zeros(B, jnp.int32)
        digest = functions.condense(drafter.params, zero_B, tapped)
        for leaf in jax.tree.leaves(digest):
            assert (leaf.shape[0], leaf.shape[-2]) == (B, T)
        cache = functions.extend(drafter.params, shared, cache, tokens_BT, zero_B, digest)
        alone_BJV = None
        if functions.draft_one is not None:
            given = (drafter.params, shared, cache, root_B, length_B)
            alone_BJV = _alone(functions, *given, depth - 1)
        seen = []
        law = lambda logits_BWV, _: seen.append(logits_BWV) or logits_BWV
        guide = CandidateSampler(law, None, None, vocab_size)
        rest = (root_B, jnp.asarray(length_B), DraftShape(depth), guide)
        tree, _ = functions.propose(drafter.params, shared, cache, *rest)
        return tree.tokens_BN, jnp.concatenate(seen, axis=1), alone_BJV

    @jax.jit
    def taught(tokens_BT):
        batch = batch_of(tokens_BT, np.ones((B, T)), np.ones((B, T)))
        tapped = tap(target.config, functions, target.params, batch, jnp.float32)
        known_BT = jnp.arange(T) < length_B[:, None]
        given = (drafter.params, shared, batch, tapped, known_BT, depth)
        return functions.head(drafter.params, shared, functions.teacher_forced(*given))

    drafted_BN, logits_BNV, alone_BJV = drafted(tokens_BT)
    if alone_BJV is not None:
        assert_close(alone_BJV, logits_BNV, "token by token")
    for row, start, nodes in zip(tokens_BT, length_B, np.asarray(drafted_BN), strict=True):
        row[start : start + depth] = nodes
    expected_BTV = np.asarray(taught(tokens_BT))
    for b, start in enumerate(length_B):
        assert_close(logits_BNV[b], expected_BTV[b, start : start + depth - 1], f"row {b}")


def _alone(functions, params, shared, cache, root_B, length_B, count: int):
    """Returns the logits (B, count, U) of a chain that the drafter continues alone."""
    token_B, known_B, found = root_B, jnp.asarray(length_B), []
    for index in range(count):
        place_B = known_B + index
        logits_BU, cache = functions.draft_one(params, shared, cache, token_B, place_B, known_B)
        found.append(logits_BU)
        token_B = jnp.argmax(logits_BU, axis=-1)  # in `propose` too, ids of a draft vocabulary
    return jnp.stack(found, axis=1)


def assert_changes_nothing(target: Target, drafter: LoadedDrafter) -> None:
    """Asserts that uneven rows of a chain, one greedy and two sampled, equal plain decoding."""
    plain, drafted = (
        session.generate(PROMPTS, NUM_NEW, NO_STOP, LAWS)
        for session in (Session(target), Session(target, drafter, CHAIN))
    )
    assert [row.token_ids for row in drafted] == [row.token_ids for row in plain]


def assert_training_makes_a_drafter(folder: Path, scratch: Path, config: Any) -> None:
    """Trains a drafter for a dozen updates: the loss falls, and its files decode."""
    distill.distill(dataclasses.replace(distill_config(scratch, folder), drafter=config))
    first, *_, last = metrics(scratch, "train")
    assert last["loss"] < first["loss"] and last["kl"] < 0.97 * first["kl"]
    target = load_target(folder, jnp.float32)
    drafter = load_drafter(scratch / "draft", target)
    assert drafter.config == config
    assert_changes_nothing(target, drafter)
