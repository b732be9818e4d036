"""Distillation of any drafter: updates on a mesh, and estimates of its drafting quality."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import Mesh, NamedSharding

from moa_jax.config import DistillConfig, TargetConfig
from moa_jax.data.batch import Batch, TappedBatch
from moa_jax.drafters import DRAFTERS, losses, method_of
from moa_jax.drafters.api import Drafter, Shared, TapSpec, TargetActivations
from moa_jax.errors import InputError
from moa_jax.model import attention, chunks, convert, llama, masks, quantize, sharding
from moa_jax.training.optim import optimizer
from moa_jax.training.target_cache import Parts, parts_of, tapped_of
from moa_jax.training.update import Loss, Metrics, TrainState, abstract, init_state, make_update

Array = jax.Array

COPIED_SHARE = 0.25  # largest fraction of a device's memory for a copy of the target
EVALUATION_CHUNK = 256  # tokens per row whose logits are held at a time
Probe = Callable[[Any, Any, Batch], dict[str, Array]]
Keep = Callable[[Any, Batch], Parts]  # (target params, batch) -> arrays (B, ...)


def drafter_of(
    config: DistillConfig, target_cfg: TargetConfig, draft_ids: Sequence[int] | None = None
) -> Drafter:
    """The functions of the drafter that `config` trains, over its draft vocabulary if it has one.

    `draft_ids` are the ids of `config.draft_vocabulary`. None stands for the first ids, which is
    enough for shapes, plans and benchmarks.
    """
    drafter = DRAFTERS[method_of(config.drafter)].make(config.drafter, target_cfg, config)
    if config.draft_vocabulary is None:
        return drafter
    return over_vocabulary(
        drafter, range(config.draft_vocabulary) if draft_ids is None else draft_ids
    )


def over_vocabulary(drafter: Drafter, draft_ids: Sequence[int]) -> Drafter:
    """A drafter with the target's head, cut to the columns of `draft_ids`.

    The target's distribution in the token loss is cut to the same columns and renormalised, so no
    logits of the whole vocabulary are computed. The loss leaves out the tokens whose next token in
    the data is another one; on the target's own answers that is the rule of EAGLE-3 (2503.01840).
    """
    ids_U = np.array(draft_ids, np.int32)

    def shared_params(frozen: Any) -> Shared:
        shared = drafter.shared_params(frozen)
        if "lm_head" in shared:
            return shared | {"lm_head": quantize.columns(shared["lm_head"], ids_U)}
        return shared | {"lm_head": quantize.transposed(shared["embed"][ids_U])}

    return drafter._replace(shared_params=shared_params, draft_ids=tuple(ids_U.tolist()))


def tap(
    cfg: TargetConfig, drafter: Drafter, params: Any, batch: Batch, dtype: Any
) -> TargetActivations:
    """One pass of the frozen target over whole conversations, masked by their segments."""
    context = llama.Context(batch.position_BT, masks.causal(batch.segment_BT))
    found = llama.forward(cfg, params, batch.tokens_BT, context, drafter.taps.streams, dtype)
    tapped = TargetActivations(llama.stack_rows(found.rows), found.tapped, found.hidden_BTD)
    return jax.tree.map(jax.lax.stop_gradient, tapped)


def make_keep(cfg: TargetConfig, taps: TapSpec, dtype: Any, stored: Any = None) -> Keep:
    """Make a function that computes the parts of a target cache, for drafters that read `taps`.

    The pass is computed in `dtype`; its results are rounded to the dtype `stored`, if given.
    """

    def keep(frozen: Any, batch: Batch) -> Parts:
        batch = jax.tree.map(lambda x: sharding.constrain(x, "rows"), batch)
        context = llama.Context(batch.position_BT, masks.causal(batch.segment_BT))
        x_BTD = sharding.constrain(llama.inputs(cfg, frozen, batch.tokens_BT, dtype), "rows")
        layers = frozen["layers"]
        last_BTD, rows, streams, _ = llama.apply_blocks(cfg, layers, x_BTD, context, taps.streams)
        parts = parts_of(taps, llama.stack_rows(rows), streams, last_BTD)
        return parts if stored is None else jax.tree.map(lambda x: x.astype(stored), parts)

    return keep


def make_loss(
    cfg: TargetConfig, drafter: Drafter, dtype: Any, rules: sharding.AxisRules = sharding.TRAIN
) -> Loss:
    """Make the drafter's loss after a target pass; `frozen` is the target's parameters.

    A `TappedBatch` holds the activations of that pass, so the pass is skipped. On a mesh the
    drafter is sharded by `rules`. With a draft vocabulary that slices the target's head, the metric
    `oov_tokens` is the share of answer tokens whose next token is outside of the vocabulary.
    """
    draft_ids = None if drafter.own_head else drafter.draft_ids

    def loss(
        params: Any, frozen: Any, batch: Batch | TappedBatch, key: Array, progress: Array
    ) -> tuple[Array, Metrics]:
        batch = jax.tree.map(lambda x: sharding.constrain(x, "rows"), batch)
        if isinstance(batch, TappedBatch):
            parts, batch = _apart(batch.parts, progress < 0), batch.batch
            parts = jax.tree.map(lambda x: x.astype(dtype), parts)
            tapped = tapped_of(cfg, drafter.taps, frozen, parts)
        else:
            tapped = tap(cfg, drafter, frozen, batch, dtype)
        shared = _head_gathered(drafter.shared_params(frozen))
        if draft_ids is not None:
            tapped = tapped._replace(draftable_BT=_draftable(batch, draft_ids, cfg.vocab_size))
        with sharding.use_rules(rules):
            found = drafter.loss(params, shared, *_handed_over(batch, tapped), key, progress)
        if draft_ids is None:
            return found
        oov_tokens = losses.answer_mean(~tapped.draftable_BT, batch.response_BT)
        return found[0], found[1] | {"oov_tokens": oov_tokens}

    return loss


def _draftable(batch: Batch, draft_ids: Sequence[int], vocab_size: int) -> Array:
    """Whether the next token is in the draft vocabulary; True at the end of a conversation."""
    is_inside_V = np.zeros(vocab_size, bool)
    is_inside_V[list(draft_ids)] = True
    next_BT = jnp.roll(batch.tokens_BT, -1, axis=1)
    return jnp.asarray(is_inside_V)[next_BT] | ~_has_next(batch)


def _has_next(batch: Batch) -> Array:
    """Whether the next token of the row belongs to the same conversation, (B, T)."""
    same_BT = batch.segment_BT[:, 1:] == batch.segment_BT[:, :-1]
    return jnp.pad(same_BT, ((0, 0), (0, 1)))


def _handed_over(batch: Batch, tapped: TargetActivations) -> tuple[Batch, TargetActivations]:
    """The batch and activations that a drafter reads, with rows sharded by the drafter's rules."""
    layers, rest = tapped.rows_LBKTE, tapped._replace(rows_LBKTE=None)
    layers = jax.tree.map(lambda x: sharding.constrain(x, "layers", "rows", "kv_heads"), layers)
    batch, rest = jax.tree.map(lambda x: sharding.constrain(x, "rows"), (batch, rest))
    return batch, rest._replace(rows_LBKTE=layers)


def _head_gathered(shared: Shared) -> Shared:
    """The head with its width replicated on every device, and its vocabulary sharded as before.

    Otherwise each chunk of the loss would gather the head again, in both passes.
    """
    if "lm_head" in shared:
        return shared | {"lm_head": sharding.constrain(shared["lm_head"], None, "vocab")}
    return shared | {"embed": sharding.constrain(shared["embed"], "vocab", None)}


def _apart(parts: Parts, never: Array) -> Parts:
    """`parts` unchanged, passed through a branch that is never taken.

    A compiler fuses the read of a micro-batch with the operations after it, which then round
    differently than after the target's layers; a branch prevents this fusion.
    """
    blank = lambda x: jax.tree.map(jnp.zeros_like, x)
    return jax.lax.cond(never, blank, lambda x: x, parts)


def make_probe(
    cfg: TargetConfig,
    drafter: Drafter,
    dtype: Any,
    horizon: int,
    rules: sharding.AxisRules = sharding.TRAIN,
) -> Probe:
    """Make a probe: sums over one batch, with every (horizon + 1)-th token of an answer known.

    So each answer token is 0 to `horizon` steps after the last known token, as in rounds that
    all accept `horizon` drafts. Predictions at known tokens are not counted: decoding drafts after
    the root, one step further. The probe returns sums of cross-entropy and entropy with their
    token count, and hits and counts by distance; `summarise` turns sums into metrics. With a draft
    vocabulary it also sums the target's probability mass outside of the vocabulary.
    """

    def probe(params: Any, frozen: Any, batch: Batch) -> dict[str, Array]:
        tapped = tap(cfg, drafter, frozen, batch, dtype)
        shared = drafter.shared_params(frozen)
        known_BT = ~batch.response_BT | (batch.position_BT % (horizon + 1) == 0)
        with sharding.use_rules(rules):
            given = _handed_over(batch, tapped)
            feature_BTD = drafter.teacher_forced(params, shared, *given, known_BT, horizon)
        feature_BTD = sharding.constrain(feature_BTD, "rows")
        start_BT = masks.known_until(known_BT, batch.segment_BT)
        distance_BT = jnp.arange(start_BT.shape[1]) - start_BT
        next_is_answer_BT = jnp.roll(batch.response_BT, -1, axis=1) & _has_next(batch)
        asked_BT = batch.response_BT & next_is_answer_BT & (distance_BT > 0)

        def sums(piece: tuple[Array, ...]) -> dict[str, Array]:
            target_BTD, feature_BTD, distance_BT, asked_BT = piece
            target_BTV = llama.unembed(frozen, target_BTD)
            draft_BTU = drafter.head(params, shared, feature_BTD)
            # Guesses and entropies are limited to the draft vocabulary, the target's argmax is not.
            ids_U = None if drafter.draft_ids is None else jnp.array(drafter.draft_ids)
            target_BTU = target_BTV if ids_U is None else target_BTV[..., ids_U]
            guess_BT = jnp.argmax(draft_BTU, axis=-1)
            guess_BT = guess_BT if ids_U is None else ids_U[guess_BT]
            hit_BT = guess_BT == jnp.argmax(target_BTV, axis=-1)
            hits_J, counts_J = losses.agreement_by_distance(hit_BT, distance_BT, asked_BT, horizon)
            cross_BT = losses.soft_cross_entropy(target_BTU, draft_BTU)
            found = {
                "cross_entropy": jnp.sum(cross_BT * asked_BT),
                "entropy": jnp.sum(losses.entropy(target_BTU) * asked_BT),
                "tokens": jnp.sum(asked_BT),
                "hits_J": hits_J,
                "counts_J": counts_J,
            }
            if ids_U is not None:
                inside_BT, all_BT = (jax.nn.logsumexp(x, axis=-1) for x in (target_BTU, target_BTV))
                found["oov_mass"] = jnp.sum((1.0 - jnp.exp(inside_BT - all_BT)) * asked_BT)
            return found

        pieces = (tapped.hidden_BTD, feature_BTD, distance_BT, asked_BT)
        return chunks.sum_over(sums, pieces, EVALUATION_CHUNK)

    return probe


def summarise(sums: dict[str, Array]) -> dict[str, Any]:
    """Cross-entropy and KL per token, agreement by future position, and `simulated_tau`.

    `oov_mass` is the mean probability that the target gives to tokens outside a draft vocabulary.
    """
    tokens = jnp.maximum(sums["tokens"], 1)
    agreement_J = sums["hits_J"] / jnp.maximum(sums["counts_J"], 1)
    cross_entropy = sums["cross_entropy"] / tokens
    oov = {"oov_mass": sums["oov_mass"] / tokens} if "oov_mass" in sums else {}
    return oov | {
        "cross_entropy": cross_entropy,
        "kl": cross_entropy - sums["entropy"] / tokens,
        "simulated_tau": losses.simulated_tau(agreement_J),
        "agreement": agreement_J,
    }


# ---- on a mesh ----------------------------------------------------------------------------


class TrainStep(NamedTuple):
    """One training step as pure functions, with the shardings of all its arrays."""

    init: Callable[[Array], TrainState]
    update: Callable[[TrainState, Any, Batch], tuple[TrainState, Metrics]]
    probe: Probe
    state_sharding: TrainState  # trees of NamedSharding
    frozen_sharding: Any
    frozen_at: sharding.ShardingOf  # the same as a function, for loading the target
    rows_sharding: NamedSharding  # of every array of a batch
    target_place: Literal["copied", "cut"]  # over `fsdp`

    def abstract_state(self) -> TrainState:
        """The state as shapes with shardings, for compilation and for reading checkpoints."""
        shapes = jax.eval_shape(self.init, jax.eval_shape(lambda: jax.random.key(0)))
        return abstract(shapes, self.state_sharding)


def make_train_step(
    config: DistillConfig,
    target_cfg: TargetConfig,
    mesh: Mesh,
    memory: int | None = None,
    draft_ids: Sequence[int] | None = None,
) -> TrainStep:
    """The training step of `config` on `mesh`; one device is also a mesh.

    The trained drafter is sharded by `sharding.TRAIN` or `sharding.DRAFTER_RULES`, and the frozen
    target by `sharding.TRAIN` or `sharding.REPLICATED`, depending on `config.mesh.target`. `memory`
    is the memory of a device in bytes, None for the limit that the device reports. `draft_ids` is
    as in `drafter_of`. Raises InputError if the mesh does not divide the models, the batch or the
    draft vocabulary.
    """
    kind = DRAFTERS[method_of(config.drafter)]
    drafter = drafter_of(config, target_cfg, draft_ids)
    tx, dtype = optimizer(config.optim), jnp.dtype(config.run.dtype)
    _check_rows(config, mesh)

    def init(key: Array) -> TrainState:
        return init_state(drafter.init(key), tx)

    shapes = jax.eval_shape(init, jax.random.key(0))
    table = kind.table(config.drafter, target_cfg)
    rules, params = _drafter_at(config, drafter, table, shapes.params, mesh)
    everywhere = sharding.replicated(mesh)
    frozen = abstract_frozen(target_cfg, dtype)
    copied = _is_copied(config, frozen, mesh, memory)
    of_target = sharding.REPLICATED if copied else sharding.TRAIN
    frozen_at = sharding.of_table(convert.target_table(target_cfg), mesh, of_target)
    opt_state = optax.tree.map_params(
        tx,
        lambda _, where: where,
        shapes.opt_state,
        params,
        transform_non_params=lambda _: everywhere,
    )
    loss, optim = make_loss(target_cfg, drafter, dtype, rules), config.optim
    update = make_update(loss, tx, config.run.seed, optim.total_steps, optim.accumulate)
    traced = attention.computed(config.run.attention)
    return TrainStep(
        init,
        traced(update),
        traced(make_probe(target_cfg, drafter, dtype, config.horizon, rules)),
        TrainState(everywhere, params, opt_state),
        sharding.tree_of(frozen, frozen_at),
        frozen_at,
        sharding.rows(mesh),
        "copied" if copied else "cut",
    )


def _drafter_at(
    config: DistillConfig, drafter: Drafter, table: convert.Table, params: Any, mesh: Mesh
) -> tuple[sharding.AxisRules, Any]:
    """The axis rules of the drafter and the shardings of its weights: `TRAIN` or `DRAFTER_RULES`.

    `DRAFTER_RULES` applies if `tensor` shards the target, and all devices divide the rows and the
    widths. A drafter with its own head, which is large, keeps `TRAIN`: its vocabulary is sharded.
    """
    rows = config.data.rows_per_batch // config.optim.accumulate
    if mesh.shape["tensor"] > 1 and rows % mesh.size == 0 and not drafter.own_head:
        with contextlib.suppress(InputError):
            of_drafter = sharding.of_table(table, mesh, sharding.DRAFTER_RULES)
            return sharding.DRAFTER_RULES, sharding.tree_of(params, of_drafter)
    return sharding.TRAIN, sharding.tree_of(params, sharding.of_table(table, mesh))


def _is_copied(config: DistillConfig, frozen: Any, mesh: Mesh, memory: int | None) -> bool:
    """Whether `fsdp` copies the target; "auto" copies if a copy takes at most COPIED_SHARE."""
    if config.mesh.target != "auto":
        return config.mesh.target == "copied"
    if memory is None:
        memory = (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit", 0)
    size = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(frozen))
    return size / mesh.shape["tensor"] <= COPIED_SHARE * memory


def abstract_frozen(target_cfg: TargetConfig, dtype: Any = jnp.float32) -> Any:
    """The shapes of a target's weights with stacked layers."""
    shapes = jax.eval_shape(lambda: llama.init(target_cfg, jax.random.key(0)))
    layers = shapes["layers"]
    stack = lambda leaf: jax.ShapeDtypeStruct((len(layers), *leaf.shape), dtype)
    shapes = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype), shapes)
    return shapes | {"layers": jax.tree.map(stack, layers[0])}


def _check_rows(config: DistillConfig, mesh: Mesh) -> None:
    rows, parts = config.data.rows_per_batch, config.optim.accumulate
    cut, tensor = mesh.shape["data"] * mesh.shape["fsdp"], mesh.shape["tensor"]
    if (config.draft_vocabulary or 0) % tensor:
        raise InputError(
            f"draft_vocabulary {config.draft_vocabulary} does not split over mesh.tensor {tensor}; "
            "choose a multiple"
        )
    if rows % (parts * cut):
        raise InputError(
            f"data.rows_per_batch {rows} does not split into optim.accumulate {parts} parts on "
            f"{cut} devices (mesh data x fsdp); choose a multiple of {parts * cut}"
        )
