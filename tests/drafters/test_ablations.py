"""MoA without some of its parts, and without the T-step bound; the grid of both."""

# ruff: noqa: F811 (an imported fixture is an argument too)

import dataclasses
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import load_drafter, load_target
from moa_jax.config import MaskConfig, Objective
from moa_jax.data.batch import Batch
from moa_jax.drafters import DRAFTERS, losses
from moa_jax.drafters.api import TargetActivations
from moa_jax.drafters.moa import Moa, block_configs, make, train
from moa_jax.model import convert
from moa_jax.model.cache import KV
from moa_jax.model.llama import unembed
from moa_jax.pretrained import LoadedDrafter, save_drafter
from tests.compare import assert_close, assert_value
from tests.drafters.test_moa import PAPER, MoaPair, stages_of
from tests.model_folders import tensors_of
from tests.oracle import random_pair

ABLATIONS: dict[str, dict[str, Any]] = {
    "mean": dict(layer_mixing="mean"),
    "last": dict(layer_mixing="last"),
    "no-sa": dict(has_self_attention=False),
    "bare": dict(layer_mixing="mean", has_self_attention=False),
    "hidden": dict(hidden_in_memory=True),
    "norms": dict(norms=True),
}
T, PROMPT = 18, 7
UNBOUNDED = Objective(MaskConfig(bounded=False))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """Returns a target and a drafter that has every part; some drafts are accepted."""
    folder = tmp_path_factory.mktemp("pair")
    config, model = random_pair.random_target("qwen3", 21, 0.2, num_hidden_layers=3)
    draft = random_pair.random_drafter(config, random_pair.draft_sizes(config), 22, 0.2)
    random_pair.save_pair(folder / "target", folder / "draft", model, draft)
    target = load_target(folder / "target", jnp.float32)
    return target, load_drafter(folder / "draft", target, target_layer_inference=0)


def without(drafter: LoadedDrafter, **changes: Any) -> LoadedDrafter:
    """Returns the drafter with other settings, and without the weights that these do not use."""
    cfg = dataclasses.replace(drafter.config, **changes)
    gone = {"self_attention"} if not cfg.has_self_attention else set()
    gone |= {"layer_self_attention"} if cfg.layer_mixing != "attention" else set()
    kept = {name: part for name, part in drafter.params.items() if name not in gone}
    if cfg.hidden_in_memory:
        width = drafter.params["ekv2e"]["bias"].shape[0]
        kept["hidden2e"] = {"kernel": 0.2 * jax.random.normal(jax.random.key(9), (width, width))}
    if cfg.norms:
        scales = {name: {"scale": jnp.linspace(0.5, 2, 16)} for name in ("q_norm", "k_norm")}
        for part in ("self_attention", "cross_attention", "layer_self_attention"):
            kept[part] = kept[part] | {"attention": scales | kept[part]["attention"]}
        kept["memory_norm"] = {"scale": jnp.linspace(0.5, 2, kept["ekv2e"]["kernel"].shape[0])}
    return drafter._replace(config=cfg, params=kept)


def batch_of(rows: int, seed: int = 3) -> Batch:
    """Returns a batch with the same prompt and answer in every row."""
    tokens_T = np.random.default_rng(seed).integers(3, 101, T).astype(np.int32)
    tokens_BT, position_BT = (np.tile(row, (rows, 1)) for row in (tokens_T, np.arange(T)))
    return Batch(tokens_BT, np.ones((rows, T), np.int32), position_BT, position_BT >= PROMPT)


def trained(pair: MoaPair, batch: Batch, objective: Objective = PAPER):
    """Returns the logits (B, T, V) of the training forward; draws mark only prompts as known."""
    draws = train.Draws(~batch.response_BT, jnp.zeros(len(batch.tokens_BT), bool))
    return pair.trace(batch, draws, objective)[1]


# ---- drafting -----------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("name", "num_reused"), [("hidden", 1), ("bare", 0), ("norms", 1)])
def test_cached_drafting_equals_training(name, num_reused, whole):
    target, drafter = whole
    drafter = without(drafter, **ABLATIONS[name], target_layer_inference=num_reused)
    pair, batch = stages_of(target, drafter), batch_of(1)
    trained_TV = trained(pair, batch)[0]
    drafted_JV = pair.cached(batch, [PROMPT], T - PROMPT)[0]
    assert_close(drafted_JV, trained_TV[PROMPT:], name)


@pytest.mark.slow
def test_memory_is_that_of_an_lsa_that_adds_nothing(whole):
    """An LSA block whose outputs are zero returns its input, so the mean over layers is left."""
    target, drafter = whole
    shape = (target.config.num_layers, 2, 2, T, 16)
    rows_LBKTE = KV(*(jax.random.normal(jax.random.key(i), shape) for i in range(2)))
    hidden_BTD = jax.random.normal(jax.random.key(2), (2, T, target.config.block.hidden_size))

    def memory(drafter: LoadedDrafter, rows_LBKTE: KV, chunk: int = 0):
        tapped = TargetActivations(rows_LBKTE, (), hidden_BTD)
        blocks = block_configs(drafter.config, target.config)
        moa = Moa(drafter.config, target.config, blocks)
        return jax.jit(partial(moa.memory, chunk=chunk))(drafter.params, tapped)

    lsa = dict(drafter.params["layer_self_attention"])
    for part, last in (("attention", "out"), ("mlp", "down")):
        lsa[part] = lsa[part] | {last: jax.tree.map(jnp.zeros_like, lsa[part][last])}
    idle = drafter._replace(params=drafter.params | {"layer_self_attention": lsa})
    mean, last = (without(drafter, layer_mixing=how) for how in ("mean", "last"))
    assert_close(memory(mean, rows_LBKTE), memory(idle, rows_LBKTE), "mean")
    only = jax.tree.map(lambda a: a[-1:], rows_LBKTE)
    assert_close(memory(last, rows_LBKTE), memory(idle, only), "last")
    assert_close(memory(last, rows_LBKTE, 5), memory(idle, only), "last, in chunks")
    error = np.abs(memory(mean, rows_LBKTE) - memory(drafter, rows_LBKTE)).max()
    assert error > 1e-2
    seeing = without(drafter, hidden_in_memory=True)
    added_BTD = hidden_BTD @ seeing.params["hidden2e"]["kernel"]
    assert_close(memory(seeing, rows_LBKTE, 5), memory(drafter, rows_LBKTE) + added_BTD, "hidden")


# ---- training without the bound -----------------------------------------------------------


ROOTS = np.arange(PROMPT, T)


@pytest.fixture(scope="module")
def pair(whole) -> MoaPair:
    """Returns the drafter with every part; it reuses one layer."""
    target, drafter = whole
    return stages_of(target, without(drafter, target_layer_inference=1))


@pytest.mark.slow
def test_every_token_is_the_first_of_a_round(pair):
    """Unbounded training gives each token the logits that decoding gives to a root there."""
    batch = batch_of(len(ROOTS))
    free_BTV, bound_BTV = (trained(pair, batch, each) for each in (UNBOUNDED, PAPER))
    drafted_BV = pair.cached(batch, ROOTS, 1)[:, 0]
    assert_close(free_BTV[0, ROOTS], drafted_BV, "roots")
    assert_close(bound_BTV[0, PROMPT], drafted_BV[0], "the first of the bounded ones is a root")
    error_B = np.abs(bound_BTV[0, ROOTS] - drafted_BV).max(axis=1)
    assert (error_B[1:] > 1e-2).all()


@pytest.mark.slow
def test_the_flag_chooses_the_rule(pair):
    """The loss is that of the unbounded forward, without staircase and known answer tokens."""
    batch = batch_of(len(ROOTS))
    key, progress = jax.random.key(1), jnp.float32(0)
    for flag in (True, False):
        draws = train.draw(MaskConfig(bounded=flag), key, batch, progress)
        assert draws.staircase_B.all() == flag == draws.known_BT[:, PROMPT:].any()
        assert draws.known_BT[:, :PROMPT].all()
    tapped = pair.tap(batch)
    loss = jax.jit(train.make_loss(pair.moa, UNBOUNDED))
    _, parts = loss(pair.drafter.params, pair.shared, batch, tapped, key, progress)
    target_BTV = unembed(pair.shared, tapped.hidden_BTD)
    each_BT = losses.soft_cross_entropy(target_BTV, trained(pair, batch, UNBOUNDED))
    expected = losses.answer_mean(each_BT, batch.response_BT)
    assert_value(parts["cross_entropy"], expected, "cross-entropy")


@pytest.mark.slow
def test_first_tokens_are_trained_beside_the_others(pair):
    """The loss of two passes over one memory is their mean loss, and so is its gradient."""
    batch = batch_of(3)
    rest = (pair.shared, batch, pair.tap(batch), jax.random.key(1), jnp.float32(0.4))

    def gradient(**masks: bool):
        loss = train.make_loss(pair.moa, Objective(MaskConfig(**masks)))
        return jax.jit(jax.grad(loss, has_aux=True))(pair.drafter.params, *rest)

    both, bound, free = gradient(first_tokens=True), gradient(), gradient(bounded=False)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, bound, free)
    jax.tree.map(lambda a, b: assert_close(a, b, "both"), both, mean)
    assert abs(bound[1]["loss"] - free[1]["loss"]) > 1e-4


# ---- files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ABLATIONS)
def test_files_hold_what_is_there(name, whole, tmp_path):
    target, drafter = whole
    ablated = without(drafter, **ABLATIONS[name], target_layer_inference=2)
    table = DRAFTERS["moa"].table(ablated.config, target.config)
    shapes = jax.eval_shape(make(ablated.config, target.config).init, jax.random.key(0))
    found = convert.nest({path: packing.shape for path, packing in table.items()})
    assert found == jax.tree.map(lambda leaf: leaf.shape, shapes)

    save_drafter(tmp_path / "d", "moa", ablated.config, ablated.params, target)
    parts = {tensor.split(".")[0] for tensor in tensors_of(tmp_path / "d")}
    assert {part.replace("2E", "2e").lower() for part in parts} == set(ablated.params)
    stated = json.loads((tmp_path / "d" / "config.json").read_text())
    assert stated.items() >= ABLATIONS[name].items()
    assert stated["disable_LSA"] == ("layer_mixing" in ABLATIONS[name])  # the vLLM fork's name
    again = load_drafter(tmp_path / "d", target)
    assert again.config == ablated.config and not again.notices
    jax.tree.map(np.testing.assert_array_equal, again.params, ablated.params)
