"""The MoA drafter against the authors' recorded numbers, and against the torch oracle."""

import dataclasses
import functools
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from moa_jax import load_drafter, load_target
from moa_jax.config import MaskConfig, Objective, OptimConfig
from moa_jax.data.batch import Batch
from moa_jax.drafters.moa import Moa, block_configs, decode, make, train
from moa_jax.drafters.tree import Nodes
from moa_jax.model import masks
from moa_jax.model.llama import unembed
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.training.distillation import tap
from moa_jax.training.optim import optimizer, schedule
from moa_jax.training.update import init_state, make_update
from tests.compare import assert_close, assert_norm_close, assert_value
from tests.conftest import arrays_of, golden_cases
from tests.drafting import batch_of, stored
from tests.oracle import learn, random_pair
from tests.oracle import moa as oracle
from tests.pairs import options_of_case

PAPER = Objective()

recorded = pytest.mark.parametrize("folder", golden_cases("moa_", "train.npz", ("moa_llama_n1",)))
PAIRS = [("llama31", 3), ("qwen2", 1)]


@dataclasses.dataclass(frozen=True)
class MoaPair:
    """A loaded pair, and the stages of its drafter."""

    target: Target
    drafter: LoadedDrafter
    moa: Moa
    shared: dict

    @functools.cached_property
    def tap(self):
        """(batch) -> the activations of a target pass that the drafter reads."""
        functions = make(self.drafter.config, self.target.config)
        given = (self.target.config, functions, self.target.params)
        return jax.jit(lambda batch: tap(*given, batch, jnp.float32))

    @functools.cached_property
    def trace(self):
        """(batch, draws, objective) -> the training forward, its logits and its losses."""

        def trace(batch: Batch, draws: train.Draws, objective: Objective = PAPER):
            tapped = self.tap(batch)
            given = (self.drafter.params, self.shared, batch, tapped, draws)
            found = train.trace(self.moa, objective, *given)
            parts = train.loss_of([found], self.shared, batch, tapped, objective, jnp.float32(0))[1]
            return found, unembed(self.shared, found.feature_BTD), parts

        return jax.jit(trace, static_argnames="objective")

    @functools.cached_property
    def gradient(self):
        """(batch, draws) -> the loss's gradient and its parts."""

        def gradient(batch: Batch, draws: train.Draws):
            gradient = jax.grad(self.loss(draws), has_aux=True)
            return gradient(self.drafter.params, None, batch, None, 0.0)

        return jax.jit(gradient)

    def cached(self, batch: Batch, start_B, count: int):
        """Returns cached logits (B, count, V) of a chain after `start_B` verified tokens."""
        given = (self.moa, self.drafter.params, self.shared, batch.tokens_BT, self.tap(batch))
        return drafted_logits(*given, np.asarray(start_B), count)

    def loss(self, draws: train.Draws):
        """Returns the training loss with given draws, as a function that training accepts."""

        def loss(params, frozen, batch, key, progress):
            tapped = self.tap(batch)
            found = train.trace(self.moa, PAPER, params, self.shared, batch, tapped, draws)
            return train.loss_of([found], self.shared, batch, tapped, PAPER, progress)

        return loss


def open_pair(folder: Path, num_reused: int) -> MoaPair:
    loaded = load_target(folder / "target", jnp.float32)
    drafter = load_drafter(folder / "draft", loaded, target_layer_inference=num_reused)
    return stages_of(loaded, drafter)


def stages_of(target: Target, drafter: LoadedDrafter) -> MoaPair:
    cfg = drafter.config
    stages = Moa(cfg, target.config, block_configs(cfg, target.config))
    return MoaPair(target, drafter, stages, stages.shared_params(target.params))


@functools.cache
def recorded_pair(folder: Path) -> tuple[dict[str, np.ndarray], MoaPair, Batch]:
    arrays, reused = arrays_of(folder / "train.npz"), options_of_case(folder)
    rows = [arrays[name] for name in ("input_ids", "attention_mask", "response_mask")]
    return arrays, open_pair(folder, reused["target_layer_inference"]), batch_of(*rows)


def draws_of(arrays: dict[str, np.ndarray], variant: str) -> train.Draws:
    noisy_BT = arrays[f"{variant}/response_mask_noisy"]
    staircase_B = arrays.get(f"{variant}/staircase_rows", np.zeros(len(noisy_BT), bool))
    return train.Draws(jnp.asarray(noisy_BT == 0), jnp.asarray(staircase_B))


# ---- recorded cases -----------------------------------------------------------------------


@recorded
def test_draft_training_forward(folder):
    arrays, pair, batch = recorded_pair(folder)
    real_BT = arrays["attention_mask"] == 1
    reuses = pair.drafter.config.target_layer_inference > 0
    both_BTT = real_BT[:, :, None] & real_BT[:, None, :]
    for variant in sorted({name.split("/")[0] for name in arrays if "/" in name}):
        trace, logits_BTV, parts = pair.trace(batch, draws_of(arrays, variant))
        for name, ours in (("sa_mask", trace.sa_seen.mask()), ("ca_mask", trace.ca_seen.mask())):
            wanted = np.broadcast_to(arrays[f"{variant}/{name}"], ours.shape)
            np.testing.assert_array_equal(np.asarray(ours)[both_BTT], wanted[both_BTT], name)
        stages = dict(sa_out=trace.sa_BTD, ca_out=trace.ca_BTD, logits=logits_BTV)
        if reuses:
            stages |= dict(tli_in=trace.entry_BTD, feature=trace.feature_BTD)
        for name, ours in stages.items():
            assert_close(ours[real_BT], arrays[f"{variant}/{name}"][real_BT], name)
        names = dict(forward_KL="cross_entropy", feature_loss="feature_loss", loss="loss")
        if reuses:
            names["prev_feature_loss"] = "prev_feature_loss"
        for theirs, ours in names.items():
            assert_value(parts[ours], arrays[f"{variant}/{theirs}"], f"{variant} {theirs}")


@pytest.mark.parametrize("folder", golden_cases("moa_", "grads.npz", ("moa_llama_n1",)))
def test_draft_gradients(folder):
    arrays, pair, batch = recorded_pair(folder)
    recorded_grads = arrays_of(folder / "grads.npz")
    for variant in sorted({name.split("/")[0] for name in recorded_grads}):
        gradient, _ = pair.gradient(batch, draws_of(arrays, variant))
        for name, ours in stored(pair.target, pair.drafter, gradient).items():
            assert_norm_close(ours, recorded_grads[f"{variant}/{name}"], name)


@pytest.mark.parametrize("folder", golden_cases("moa_", "steps.npz"))
def test_draft_optimiser_steps(folder):
    arrays, pair, batch = recorded_pair(folder)
    steps = arrays_of(folder / "steps.npz")
    cfg = OptimConfig(
        learning_rate=float(steps["learning_rate"]),
        warmup_steps=int(steps["warmup_steps"]),
        decay_steps=int(steps["decay_steps"]),
        peak=float(steps["peak_lr"] / steps["learning_rate"]),
        total_steps=len(steps["loss"]),
        max_grad_norm=float(steps["max_grad_norm"]),
    )
    tx, loss = optimizer(cfg), pair.loss(draws_of(arrays, "vfl0_sc0"))
    update = jax.jit(make_update(loss, tx, seed=0, total_steps=cfg.total_steps))
    state = init_state(pair.drafter.params, tx)
    for index in range(cfg.total_steps):
        assert_value(schedule(cfg)(index) + 1.0, steps["lr"][index] + 1.0, "learning rate")
        state, found = update(state, None, batch)
        for ours, theirs in (("loss", "loss"), ("cross_entropy", "forward_KL")):
            assert_value(found[ours], steps[theirs][index], f"step {index} {ours}")
        assert_value(found["grad_norm"], steps["grad_norm"][index], "gradient norm", 1e-4)
    final = stored(pair.target, pair.drafter, state.params)
    for name in (key.removeprefix("final/") for key in steps if key.startswith("final/")):
        assert_norm_close(final[name], steps[f"final/{name}"], name)


@partial(jax.jit, static_argnums=(0, 6))
def drafted_logits(moa: Moa, params, shared, tokens_BT, tapped, start_B, count: int):
    """Returns logits (B, count, V): tokens before `start_B` are verified, the others are one chain.
    The padding of a short answer follows the chain.
    """
    B, T = tokens_BT.shape
    cache, none_B = decode.init_cache(moa, B, T + count, jnp.float32), jnp.zeros(B, jnp.int32)
    digest = decode.condense(moa, params, none_B, tapped)
    cache = decode.extend(moa, params, shared, cache, tokens_BT, none_B, digest)
    index_BW = jnp.minimum(start_B[:, None] + jnp.arange(count), T - 1)
    tokens_BW = jnp.take_along_axis(tokens_BT, index_BW, axis=1)
    nodes = Nodes(tokens_BW, masks.causal_tree(count), start_B, start_B, jnp.arange(count))
    return decode.step(moa, params, shared, cache, nodes)[0]


# ---- random pairs, against the oracle -----------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("family", "num_reused"), PAIRS)
def test_random_draft_equals_oracle(family, num_reused, tmp_path):
    config, model = random_pair.random_target(family, seed=11)
    draft = random_pair.random_drafter(config, random_pair.draft_sizes(config, num_reused), seed=12)
    rows = random_pair.random_batch(config.vocab_size, (23, 17, 12), seed=13)
    noisy_BT = oracle.noisy_response(rows.response_mask, torch.tensor([6, 7, 9]))
    seen = oracle.observe(model, rows.input_ids, rows.attention_mask)
    stairs_B = torch.tensor([True, False, True])
    sample = learn.Sample(seen, rows.attention_mask, rows.response_mask, noisy_BT, stairs_B)
    state = {k: v.detach() for k, v in model.state_dict().items()}
    forward, loss = learn.evaluate(oracle.make_drafter(config, state, draft, num_reused), sample)
    gradients = learn.gradients(config, state, draft, num_reused, sample)

    random_pair.save_pair(tmp_path / "target", tmp_path / "draft", model, draft)
    pair, batch = open_pair(tmp_path, num_reused), batch_of(*(x.numpy() for x in rows))
    draws = train.Draws(*(jnp.asarray(x.numpy()) for x in (noisy_BT == 0, stairs_B)))
    trace, logits_BTV, parts = pair.trace(batch, draws)
    real_BT = rows.attention_mask.numpy() == 1
    ours = trace._asdict() | {"logits_BTV": logits_BTV}
    for name in ("memory_BTD", "sa_BTD", "ca_BTD", "feature_BTD", "logits_BTV"):
        expected = getattr(forward, name).detach().numpy()
        assert_close(ours[name][real_BT], expected[real_BT], name)
    gradient, parts = pair.gradient(batch, draws)
    assert_value(parts["loss"], loss, "loss")
    for name, ours in stored(pair.target, pair.drafter, gradient).items():
        assert_norm_close(ours, gradients[name].numpy(), name)


# ---- draws and schedules ------------------------------------------------------------------


def test_draws_follow_the_schedule():
    """Periods are in 6 to 14; the share of staircase rows falls from all to none."""
    B, T = 512, 40
    index_BT = jnp.broadcast_to(jnp.arange(T), (B, T))
    batch = Batch(index_BT, jnp.ones((B, T), int), index_BT, index_BT > 2)
    for progress, share in ((0.0, 1.0), (0.25, 0.5), (0.5, 0.0), (1.0, 0.0)):
        draws = train.draw(MaskConfig(), jax.random.key(0), batch, jnp.float32(progress))
        assert abs(float(draws.staircase_B.mean()) - share) < 0.08
        known_BT = np.asarray(draws.known_BT)
        periods = {int(np.flatnonzero(row[3:])[0]) + 3 for row in known_BT}
        assert periods == set(range(6, 15))
        assert known_BT[:, :3].all()
    whole = MaskConfig(variable_future_length=False)
    draws = train.draw(whole, jax.random.key(0), batch, jnp.float32(0))
    assert (draws.known_BT == ~batch.response_BT).all()


@pytest.mark.parametrize("folder", golden_cases("dataprep", "schedule.npz"))
def test_schedule_as_recorded(folder):
    """Compares the authors' factors, with and without a peak."""
    found = arrays_of(folder / "schedule.npz")
    for name, peak in (("default", 20.0), ("flat", 1.0)):
        cfg = OptimConfig(1.0, 50, 6400, peak, 40 * 6400)
        ours = [float(schedule(cfg)(int(step))) for step in found[f"{name}_step"]]
        np.testing.assert_allclose(ours, found[f"{name}_factor"], rtol=1e-6)
