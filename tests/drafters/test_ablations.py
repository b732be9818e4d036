"""MoA with parts left out, and trained without the T-step bound; the grid of both."""

# ruff: noqa: F811 (an imported fixture is an argument too)

import dataclasses
import functools
import itertools
import json
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from configs import ablations, moa_qwen2_7b
from configs.shapes import SHAPES
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import (
    BlockConfig,
    DistillConfig,
    DraftShape,
    IndependentConfig,
    MaskConfig,
    Objective,
)
from moa_jax.data.batch import Batch
from moa_jax.drafters import DRAFTERS, losses
from moa_jax.drafters.api import TargetActivations
from moa_jax.drafters.moa import Moa, block_configs, make, train
from moa_jax.errors import InputError
from moa_jax.model import convert
from moa_jax.model.cache import KV
from moa_jax.model.llama import unembed
from moa_jax.pretrained import LoadedDrafter, save_drafter
from moa_jax.training.fingerprint import changes, fingerprint
from tests.compare import assert_close, assert_value
from tests.drafters.test_moa import PAPER, MoaPair, stages_of
from tests.model_folders import edit_json, edit_tensors, refusal, tensors_of
from tests.oracle import random_pair
from tests.train.test_training import distill_config, metrics, pretrain_config
from train import distill, pretrain
from train.run.settings import load_config

ABLATIONS: dict[str, dict[str, Any]] = {
    "mean": dict(layer_mixing="mean"),
    "last": dict(layer_mixing="last"),
    "no-sa": dict(has_self_attention=False),
    "bare": dict(layer_mixing="mean", has_self_attention=False),
    "hidden": dict(hidden_in_memory=True),
}
QUICK = [("last", 1), ("no-sa", 1), ("hidden", 1)]
CASES = [
    pytest.param(name, n, marks=[] if (name, n) in QUICK else pytest.mark.slow)
    for name, n in itertools.product(ABLATIONS, (0, 1))
]
T, PROMPT = 18, 7
UNBOUNDED = Objective(MaskConfig(bounded=False))


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """A target, and a drafter for it that has every part and agrees now and then."""
    folder = tmp_path_factory.mktemp("pair")
    config, model = random_pair.random_target("qwen3", 21, 0.2, num_hidden_layers=3)
    draft = random_pair.random_drafter(config, random_pair.draft_sizes(config), 22, 0.2)
    random_pair.save_pair(folder / "target", folder / "draft", model, draft)
    target = load_target(folder / "target", jnp.float32)
    return target, load_drafter(folder / "draft", target, target_layer_inference=0)


def without(drafter: LoadedDrafter, **changes: Any) -> LoadedDrafter:
    """The drafter with other choices, and without the weights that they leave out."""
    cfg = dataclasses.replace(drafter.config, **changes)
    gone = {"self_attention"} if not cfg.has_self_attention else set()
    gone |= {"layer_self_attention"} if cfg.layer_mixing != "attention" else set()
    kept = {name: part for name, part in drafter.params.items() if name not in gone}
    if cfg.hidden_in_memory:
        width = drafter.params["ekv2e"]["bias"].shape[0]
        kept["hidden2e"] = {"kernel": 0.2 * jax.random.normal(jax.random.key(9), (width, width))}
    return drafter._replace(config=cfg, params=kept)


def batch_of(rows: int, seed: int = 3) -> Batch:
    """The same prompt and answer in every row."""
    tokens_T = np.random.default_rng(seed).integers(3, 101, T).astype(np.int32)
    tokens_BT, position_BT = (np.tile(row, (rows, 1)) for row in (tokens_T, np.arange(T)))
    return Batch(tokens_BT, np.ones((rows, T), np.int32), position_BT, position_BT >= PROMPT)


def trained(pair: MoaPair, batch: Batch, objective: Objective = PAPER):
    """Logits (B, T, V) of the training forward where prompts are known."""
    draws = train.Draws(~batch.response_BT, jnp.zeros(len(batch.tokens_BT), bool))
    return pair.trace(batch, draws, objective)[1]


# ---- drafting -----------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "num_reused"), CASES)
def test_cached_drafting_equals_training(name, num_reused, whole):
    target, drafter = whole
    drafter = without(drafter, **ABLATIONS[name], target_layer_inference=num_reused)
    pair, batch = stages_of(target, drafter), batch_of(1)
    trained_TV = trained(pair, batch)[0]
    drafted_JV = pair.cached(batch, [PROMPT], T - PROMPT)[0]
    assert_close(drafted_JV, trained_TV[PROMPT:], name)


def test_memory_is_that_of_an_lsa_that_adds_nothing(whole):
    """Its block only adds to what enters it, so without that the mean over layers is left."""
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
def reusing(whole):
    """The whole drafter, reusing one layer."""
    target, drafter = whole
    return stages_of(target, without(drafter, target_layer_inference=1))


@pytest.mark.parametrize("num_reused", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_every_token_is_the_first_of_a_round(num_reused, whole, reusing):
    """What standard training gives at a token is what decoding gives at a root there."""
    pair, batch = reusing if num_reused else stages_of(*whole), batch_of(len(ROOTS))
    free_BTV, bound_BTV = (trained(pair, batch, each) for each in (UNBOUNDED, PAPER))
    drafted_BV = pair.cached(batch, ROOTS, 1)[:, 0]
    assert_close(free_BTV[0, ROOTS], drafted_BV, "roots")
    assert_close(bound_BTV[0, PROMPT], drafted_BV[0], "the first of the bounded ones is a root")
    error_B = np.abs(bound_BTV[0, ROOTS] - drafted_BV).max(axis=1)
    assert (error_B[1:] > 1e-2).all()


def test_the_flag_chooses_the_rule(reusing):
    """The loss is that of the unbounded forward; no staircase, no period of known tokens."""
    pair, batch = reusing, batch_of(len(ROOTS))
    key, progress = jax.random.key(1), jnp.float32(0)
    for flag in (True, False):
        draws = train.draw(MaskConfig(bounded=flag), key, batch, progress)
        assert draws.staircase_B.all() == flag == draws.known_BT[:, PROMPT:].any()
        assert draws.known_BT[:, :PROMPT].all()
    tapped = pair.tap(batch)
    loss = jax.jit(train.make_loss(pair.moa, UNBOUNDED))
    _, parts = loss(pair.drafter.params, pair.shared, batch, tapped, key, progress)
    expected = cross_entropy(pair.shared, tapped, trained(pair, batch, UNBOUNDED), batch)
    assert_value(parts["cross_entropy"], expected, "cross-entropy")


@pytest.mark.slow
@pytest.mark.parametrize("num_reused", [1, pytest.param(0, marks=pytest.mark.slow)])
def test_first_tokens_are_trained_beside_the_others(num_reused, whole, reusing):
    """The loss of two passes over one memory is the mean of theirs, and so is its gradient."""
    pair, batch = reusing if num_reused else stages_of(*whole), batch_of(3)
    rest = (pair.shared, batch, pair.tap(batch), jax.random.key(1), jnp.float32(0.4))

    def gradient(**masks: bool):
        loss = train.make_loss(pair.moa, Objective(MaskConfig(**masks)))
        return jax.jit(jax.grad(loss, has_aux=True))(pair.drafter.params, *rest)

    both, bound, free = gradient(first_tokens=True), gradient(), gradient(bounded=False)
    mean = jax.tree.map(lambda a, b: (a + b) / 2, bound, free)
    jax.tree.map(lambda a, b: assert_close(a, b, "both"), both, mean)
    assert abs(bound[1]["loss"] - free[1]["loss"]) > 1e-4


def test_first_tokens_without_the_bound_are_refused():
    with pytest.raises(InputError, match="leave first_tokens out"):
        MaskConfig(first_tokens=True, bounded=False)


@jax.jit
def cross_entropy(shared, tapped, logits_BTV, batch: Batch):
    each_BT = losses.soft_cross_entropy(unembed(shared, tapped.hidden_BTD), logits_BTV)
    return losses.answer_mean(each_BT, batch.response_BT)


# ---- files --------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ABLATIONS)
def test_files_hold_what_is_there(name, whole, tmp_path):
    target, drafter = whole
    ablated = without(drafter, **ABLATIONS[name], target_layer_inference=2)
    table = DRAFTERS["moa"].table(ablated.config, target.config)
    shapes = jax.eval_shape(make(ablated.config, target.config).init, jax.random.key(0))
    found = convert.nest({path: packing.shape for path, packing in table.items()})
    assert found == jax.tree.map(lambda leaf: leaf.shape, shapes)

    for layout in ("ours", "speculators"):
        folder = tmp_path / layout
        save_drafter(folder, "moa", ablated.config, ablated.params, target, layout=layout)
        parts = {tensor.split(".")[0] for tensor in tensors_of(folder)}
        assert {part.replace("2E", "2e").lower() for part in parts} == set(ablated.params)
        stated = json.loads((folder / "config.json").read_text())
        assert stated.items() >= ABLATIONS[name].items()
        if layout == "ours":  # as the vLLM fork calls it
            assert stated["disable_LSA"] == ("layer_mixing" in ABLATIONS[name])
        again = load_drafter(folder, target)
        assert again.config == ablated.config and not again.notices
        jax.tree.map(np.testing.assert_array_equal, again.params, ablated.params)
    for layout in ("authors", "vllm"):
        said = refusal(
            save_drafter, tmp_path / "new", "moa", ablated.config, {}, target, layout=layout
        )
        assert f"the layout '{layout}' cannot say" in said and "choose ours" in said


@pytest.mark.parametrize(
    "change, says",
    [
        ({"layer_mixing": "mean", "disable_LSA": True}, "9 tensors (layer_self_attention."),
        ({"has_self_attention": False}, "has unexpected 11 tensors (self_attention."),
    ],
)
def test_parts_that_a_config_leaves_out_are_unexpected(change, says, whole, tmp_path):
    target, drafter = whole
    save_drafter(tmp_path, "moa", drafter.config, drafter.params, target)
    edit_json(tmp_path / "config.json", **change)
    assert says in refusal(load_drafter, tmp_path, target)


@pytest.mark.parametrize("how", ["mean", "last"])
def test_files_without_layer_self_attention_say_what_memory_is_made_of(how, whole, tmp_path):
    target, drafter = whole
    save_drafter(tmp_path, "moa", drafter.config, drafter.params, target)
    edit_tensors(tmp_path, "layer_self")
    lacks = "lacks the tensor layer_self_attention.self_attn.k_proj.weight"
    assert lacks in refusal(load_drafter, tmp_path, target)
    edit_json(tmp_path / "config.json", disable_LSA=True)
    assert "what its memory is made of" in refusal(load_drafter, tmp_path, target)
    edit_json(tmp_path / "config.json", layer_mixing=how)
    assert load_drafter(tmp_path, target).config.layer_mixing == how
    edit_json(tmp_path / "config.json", layer_self_attention_intermediate_size=None)
    assert "layer_self_attention_intermediate_size is None; choose" in refusal(
        load_drafter, tmp_path, target
    )


# ---- settings -----------------------------------------------------------------------------


@functools.cache
def overridden(flags: str) -> DistillConfig:
    return load_config("configs/moa_llama3_8b.py", DistillConfig, flags.split())


def size_of(config: DistillConfig) -> int:
    table = DRAFTERS["moa"].table(config.drafter, SHAPES[config.target])
    return sum(int(np.prod(packing.shape)) for packing in table.values())


def test_a_drafter_for_qwen2():
    """28 heads do not divide a memory of width 1024, which leaves even heads of 36."""
    config = moa_qwen2_7b.config
    shape = SHAPES[config.target]
    count = sum(int(np.prod(p.shape)) for p in convert.target_table(shape).values())
    assert count == 7_615_616_512
    assert abs(size_of(config) / 1e6 - 250) < 2
    sa, ca, lsa = block_configs(config.drafter, shape)
    assert (lsa.head_dim, lsa.hidden_size, lsa.qkv_bias) == (36, 1024, True)
    assert sa.qkv_bias and not ca.qkv_bias


# ---- the grid of ablations ----------------------------------------------------------------

CELLS = dict(ablations.config.cells)


def at_toy_size(cell: DistillConfig, folder, target) -> DistillConfig:
    """Two updates of the cell for a toy target, with MLPs of a 16th."""
    toy, drafter = distill_config(folder, target), cell.drafter
    if isinstance(drafter, IndependentConfig):
        block = BlockConfig(16, 2, 1, 8, 24, 1e-5, 10_000.0, None)
        model = dataclasses.replace(drafter.model, vocab_size=320, block=block)
        drafter = dataclasses.replace(drafter, model=model)
    else:
        widths = [field.name for field in dataclasses.fields(drafter)]
        widths = {w: getattr(drafter, w) // 16 for w in widths if w.endswith("intermediate_size")}
        drafter = dataclasses.replace(drafter, **widths)
    return dataclasses.replace(
        cell,
        target=toy.target,
        drafter=drafter,
        data=toy.data,
        optim=dataclasses.replace(toy.optim, total_steps=2),
        run=toy.run,
        output=toy.output,
    )


def test_every_ablation_of_training_is_a_cell():
    """Each differs from MoA in the settings that its name says, and no two are alike."""
    base = fingerprint(CELLS["moa"])
    different = {
        name: frozenset(text.split(": ")[0] for text in changes(base, cell))
        for name, cell in CELLS.items()
    }
    width = "drafter.self_attention_intermediate_size"
    width = {width, width.replace("self", "cross")}
    assert {name: set(found) for name, found in different.items() if len(found) < 4} == {
        "moa": set(),
        "without_lsa_mean": width | {"drafter.layer_mixing"},
        "without_lsa_last": width | {"drafter.layer_mixing"},
        "without_sa": width | {"drafter.has_self_attention"},
        "without_bound": {"masks.bounded"},
        "without_staircase": {"masks.staircase"},
        "n1": {"drafter.target_layer_inference"},
        "n3": {"drafter.target_layer_inference"},
        "near_horizon": {"masks.shortest_future", "masks.longest_future"},
        "far_horizon": {"masks.shortest_future", "masks.longest_future"},
        "whole_answer": {"masks.variable_future_length"},
        "without_feature_loss": {"loss.feature_weight"},
        "half_width": width,
        "double_width": width,
    }
    assert len({json.dumps(fingerprint(cell)) for cell in CELLS.values()}) == len(CELLS) == 16


@pytest.mark.slow
@pytest.mark.parametrize("name", CELLS)
def test_every_cell_trains(name, small_target, tmp_path):
    config = at_toy_size(CELLS[name], tmp_path, small_target)
    assert distill.distill(config)
    (trained,), (evaluated,) = metrics(tmp_path, "train"), metrics(tmp_path, "eval")
    assert trained["step"] == 2 and 0 < trained["grad_norm"] < 1e3
    assert 1 <= evaluated["simulated_tau"] <= 1 + config.horizon
    assert load_drafter(tmp_path / "draft", load_target(small_target)).config == config.drafter


@pytest.mark.slow
def test_a_cell_trains_for_a_qwen2_target(small_target, tmp_path):
    """Its attention has biases, and MoA's self-attention has them too; drafted text is plain."""
    toy = pretrain_config(tmp_path / "target")
    block = dataclasses.replace(toy.target.block, qkv_bias=True)
    # transformers' Qwen tokenizer adds a token of its own to the 320
    qwen2 = dataclasses.replace(toy.target, family="qwen2", block=block, vocab_size=328)
    tokenizer = str(small_target.parent / "tokenizer")
    pretrain.pretrain(dataclasses.replace(toy, target=qwen2, tokenizer=tokenizer))
    config = at_toy_size(CELLS["n1"], tmp_path, toy.output)
    assert distill.distill(config)
    target = load_target(toy.output, jnp.float32)
    drafter = load_drafter(config.output, target)
    assert target.config == qwen2 and "bias" in drafter.params["self_attention"]["attention"]["qkv"]
    prompt = [[0, 1, 40, 41, 4, 2]]
    (found,) = Session(target, drafter, DraftShape(4)).generate(prompt, 12, [])
    (plain,) = Session(target).generate(prompt, 12, [])
    assert found.token_ids == plain.token_ids
