"""Decoded tau during training: decodes a few validation prompts with the current drafter."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import AxisType, Mesh

from moa_jax.config import DistillConfig, DraftShape, TargetConfig
from moa_jax.data.batch import Batch
from moa_jax.data.batches import Batches, Mixture
from moa_jax.decode.draft_vocabulary import DraftVocabulary
from moa_jax.decode.limits import CacheLimits
from moa_jax.decode.session import Session
from moa_jax.decode.state import Vocabulary, Weights
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.errors import InputError
from moa_jax.files.paths import place
from moa_jax.model import convert, sharding
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.runtime.memory import num_bytes_of
from moa_jax.runtime.multihost import on_first
from moa_jax.training.checkpoint import steps_of
from moa_jax.training.distillation import TrainStep, abstract_frozen
from moa_jax.training.metrics import read_records

MAX_NEW_TOKENS = 64
AUTO_PROMPTS, AUTO_SHARE = 8, 0.02  # of the time between two checkpoints
AUTO_MEMORY = 0.8  # of a device, for target, state and the copy of the target
# Training tokens that one device processes in the time of a round, rounded up: a round reads the
# target's weights, which takes an accelerator as long as the FLOPs of about a hundred tokens.
TOKENS_PER_ROUND = {"cpu": 32}
TOKENS_PER_ROUND_ELSE = 256


def decoding_share(config: DistillConfig, target: TargetConfig, mesh: Mesh) -> float:
    """An upper estimate of the share of the time that decoding AUTO_PROMPTS prompts takes.

    It depends on settings and the kind of device alone, so a resumed run decides alike. Every
    round is assumed to commit a single token; compilation is left out.
    """
    kind = mesh.devices.flat[0].platform
    tokens = TOKENS_PER_ROUND.get(kind, TOKENS_PER_ROUND_ELSE) * mesh.size / _tensor(mesh, target)
    trained = config.run.save_every * config.data.rows_per_batch * config.data.row_length
    return AUTO_PROMPTS * MAX_NEW_TOKENS * tokens / trained


def with_decode_prompts(
    config: DistillConfig,
    target: TargetConfig,
    program: TrainStep,
    mesh: Mesh,
    memory: int | None = None,
) -> tuple[DistillConfig, str]:
    """The config with a number as `run.decode_prompts`, and a line on that number, "" if set.

    None becomes AUTO_PROMPTS if decoding takes at most AUTO_SHARE of the time and its copy of the
    target fits beside the target and the state of the training step, else 0. A resumed run decodes
    if it did before, since one figure must rate all its checkpoints. `memory` is the memory of a
    device in bytes, None for the limit that the device reports.
    """
    if config.run.decode_prompts is not None:
        return config, ""
    share = decoding_share(config, target, mesh)
    limit = memory or (mesh.local_devices[0].memory_stats() or {}).get("bytes_limit")
    dtype = config.run.dtype
    fits = limit is None or _needed_bytes(target, program, mesh, dtype) <= AUTO_MEMORY * limit
    before = on_first(lambda: _decoded_before(config))
    count = AUTO_PROMPTS if fits and (share <= AUTO_SHARE if before is None else before) else 0
    kept = ", as before" if before is bool(count) else ""
    cost = f"up to {min(share, 1):.1%} of the time" if fits else "more memory than a device has"
    line = f"run.decode_prompts is {count}{kept}: decoding {AUTO_PROMPTS} prompts takes {cost}"
    if not count:
        line += "; the best checkpoint is chosen by simulated_tau"
    run = dataclasses.replace(config.run, decode_prompts=count)
    return dataclasses.replace(config, run=run), line


def _decoded_before(config: DistillConfig) -> bool | None:
    """Whether a run has decoded prompts; None if it has evaluated nothing yet."""
    records = read_records(place(config.run.directory) / "metrics.jsonl")
    kinds = {record["kind"] for record in records if steps_of(config)}
    return "decode" in kinds if kinds & {"eval", "decode"} else None


def _needed_bytes(target: TargetConfig, program: TrainStep, mesh: Mesh, dtype: str) -> float:
    """Bytes per device of the training state, the target and its copy for decoding."""
    frozen, state = abstract_frozen(target, dtype), program.abstract_state()
    pairs = [*zip(*map(jax.tree.leaves, (frozen, program.frozen_sharding)), strict=True)]
    pairs += [(leaf, leaf.sharding) for leaf in jax.tree.leaves(state)]
    held = sum(math.prod(at.shard_shape(x.shape)) * x.dtype.itemsize for x, at in pairs)
    return held + num_bytes_of(frozen) / _tensor(mesh, target)


def prompts_to_decode(
    config: DistillConfig, target: Target, validation: Batches, required: bool = True
) -> list[list[int]]:
    """Up to `run.decode_prompts` validation prompts; `target` needs no weights.

    Raises InputError if prompts are `required` and none leaves room for an answer.
    """
    wanted = config.run.decode_prompts or 0
    prompts = fitting_prompts(validation, target, MAX_NEW_TOKENS, wanted)
    if wanted and required and not prompts:
        raise InputError(
            f"run.decode_prompts: no validation prompt leaves {MAX_NEW_TOKENS} of the target's "
            "positions free; set it to 0"
        )
    return prompts


def make_decode(
    config: DistillConfig,
    target: Target,
    prompts: list[list[int]],
    mesh: Mesh,
    vocabulary: DraftVocabulary | None = None,
) -> Callable[[Any], dict[str, float]]:
    """(params) -> `decoded_tau` of greedy chains of depth `config.horizon + 1` on these prompts.

    Decoding needs unstacked layers, so each call holds a second copy of the target. All devices of
    the run's mesh decode together, and all processes must make the same calls.
    """
    method, depth = method_of(config.drafter), config.horizon + 1
    cut = _decoding_mesh(mesh, target.config)
    table = DRAFTERS[method].table(config.drafter, target.config)
    unstacked = lambda: _laid(target.params, _unstacked, convert.target_table(target.config), cut)
    dtype = target.params["embed"].dtype
    as_target = lambda params: jax.tree.map(lambda leaf: leaf.astype(dtype), params)
    session: Session | None = None
    head: Vocabulary | None = None  # of the draft vocabulary

    def decode(params: Any) -> dict[str, float]:
        nonlocal session, head
        params = _laid(params, as_target, table, cut)
        if session is None:
            drafter = LoadedDrafter(method, config.drafter, params, (), Path(), depth)
            whole = target._replace(params=unstacked())
            session = Session(whole, drafter, DraftShape(depth), vocabulary=vocabulary)
            head = session.weights.vocabulary
        else:
            session.weights = Weights(unstacked(), params, head)
        found = [session.generate([prompt], MAX_NEW_TOKENS)[0] for prompt in prompts]
        session.target, session.weights = target, Weights(None, None)  # frees the copy
        rounds = sum(result.rounds for result in found)
        tokens = sum(sum(result.accept_lengths) for result in found)
        return {"decoded_tau": tokens / max(rounds, 1)}

    return decode


def _decoding_mesh(mesh: Mesh, target: TargetConfig) -> Mesh | None:
    """A decoding mesh of the training mesh's devices, in the same order; None for one device."""
    if mesh.size == 1:
        return None
    tensor = _tensor(mesh, target)
    axes = (AxisType.Auto,) * len(sharding.DECODE_AXES)
    return Mesh(mesh.devices.reshape(-1, tensor), sharding.DECODE_AXES, axis_types=axes)


def _tensor(mesh: Mesh, target: TargetConfig) -> int:
    """The number of devices that share a copy of the target in decoding."""
    return math.gcd(mesh.size, target.block.num_kv_heads, target.block.split_width)


def _laid(
    params: Any, change: Callable[[Any], Any], table: convert.Table, mesh: Mesh | None
) -> Any:
    """`change(params)`, with the shardings of decoding unless `mesh` is None."""
    if mesh is None:
        return change(params)
    where = sharding.for_decoding(table, mesh).sharding_of
    places = sharding.tree_of(jax.eval_shape(change, params), where)
    return jax.jit(change, out_shardings=places)(params)


def _unstacked(params: Any) -> Any:
    layers = params["layers"]
    one = lambda index: jax.tree.map(lambda leaf: leaf[index], layers)
    return params | {"layers": [one(index) for index in range(len(jax.tree.leaves(layers)[0]))]}


def fitting_prompts(
    validation: Batches, target: Target, max_new_tokens: int, most: int | None = None
) -> list[list[int]]:
    """The first prompts of the validation data that leave room for an answer, up to `most`."""
    room = CacheLimits(target.config.max_position_embeddings)
    fitting = (p for p in prompts_of(validation) if room.max_new_tokens(len(p)) >= max_new_tokens)
    return list(map(list, itertools.islice(fitting, most)))


def prompts_of(source: Batches) -> Iterator[tuple[int, ...]]:
    """Distinct prompts: the first prompt of every conversation, then the second prompts, ...

    A prompt is all tokens before an answer. Conversations come in the order of an epoch's batches,
    then those in rows that fill no batch.
    """
    dealt = (int(number) for step in range(len(source)) for number in source.numbers(step))
    numbers = dict.fromkeys([*dealt, *range(source.num_rows)])
    later: list[list[tuple[int, ...]]] = []
    logged: set[tuple[int, ...]] = set()

    def by_turn() -> Iterator[tuple[int, ...]]:
        for first, *rest in filter(None, conversations(source, numbers)):
            later.append(rest)
            yield first
        for turn in itertools.zip_longest(*later):
            yield from filter(None, turn)

    for prompt in by_turn():
        if prompt not in logged:
            logged.add(prompt)
            yield prompt


def conversations(
    source: Batches | Mixture, numbers: Iterable[int]
) -> Iterator[list[tuple[int, ...]]]:
    """The prompts per conversation in the rows with these numbers."""
    for number in numbers:
        row = Batch(*(array[0] for array in source.take(np.array([number]))))
        for segment in range(1, int(row.segment_BT.max()) + 1):
            here_T = row.segment_BT == segment
            tokens, answer_T = row.tokens_BT[here_T].tolist(), row.response_BT[here_T]
            begins = np.flatnonzero(np.diff(answer_T.astype(np.int8), prepend=0) > 0)
            yield [tuple(tokens[:begin]) for begin in begins if begin]
