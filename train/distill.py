"""Trains a drafter for a frozen target: `python -m train.distill --config configs/tiny.py`.

Dotted flags override settings of the config file, as in --optim.total_steps 200.
The same command resumes an interrupted run from its last checkpoint, on any number of devices and
processes. `--init-from` starts from the weights of an earlier drafter, with a fresh optimiser.
`--target-cache DIR` runs the target once per row of the training data, for any number of epochs
and drafters. The exit code is 0 if the run is finished, 2 for bad input, and 75 if the same command
may succeed later: a signal stopped the run, a process, the hub or room on the disk was missing, or
another run holds the lock.
"""

from __future__ import annotations

import dataclasses
import functools
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from infer.cli.flags import cluster
from infer.cli.program import TRY_AGAIN, progress, run
from moa_jax.config import DistillConfig, EagleConfig, output_of
from moa_jax.data import batches
from moa_jax.data.batch import Batch, TappedBatch
from moa_jax.data.shards import tokenizer_hash
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.draft_vocabulary import (
    FILE,
    DraftVocabulary,
    check_size,
    content_of,
    load_vocabulary,
)
from moa_jax.drafters import DRAFTERS, method_of
from moa_jax.errors import InputError
from moa_jax.files.client_files import model_hash
from moa_jax.files.model_folder import find_folder
from moa_jax.files.paths import is_stored, place
from moa_jax.model import sharding
from moa_jax.pretrained import Target, describe_target, load_target, save_drafter
from moa_jax.runtime import multihost
from moa_jax.training.checkpoint import check_directory
from moa_jax.training.distillation import TrainStep, make_train_step, summarise
from moa_jax.training.fingerprint import common
from moa_jax.training.flops import model_flops_per_token
from moa_jax.training.target_cache import rows_hash
from moa_jax.training.update import Params, TrainState
from moa_jax.version import __version__
from train.run import output, target_cache
from train.run.decoding import make_decode, prompts_to_decode, with_decode_prompts
from train.run.draft_vocabulary import facts_of_vocabulary, frequent_in
from train.run.loop import Figures, TrainJob, check, fit
from train.run.settings import config_parser, parse_config
from train.run.start import check_data, layout, working_on
from train.run.stop import StopRequest
from train.run.target_cache import CacheFlags, ReadParts, build_cache, open_cache
from train.run.warm_start import start_hash, warm_params


def distill(
    config: DistillConfig, flags: CacheFlags | None = None, overwrite: bool = False
) -> bool:
    """Trains a drafter and writes its folder; returns False if a signal stopped the run.

    With `flags` the run reads the target's activations from a cache, which is built if missing.
    With `overwrite` the drafter may replace that of another run. Raises InputError before the
    target is loaded: for settings that contradict each other or the data, a directory that is in
    use, of another run or not shared, an output that another run wrote, and for processes that
    differ.
    """
    with StopRequest() as stop:
        return _distill(config, flags, overwrite, stop)


def _distill(
    config: DistillConfig, flags: CacheFlags | None, overwrite: bool, stop: StopRequest
) -> bool:
    multihost.check_same(common(config), "settings")
    mesh = sharding.make_mesh(config.mesh, jax.devices())
    described = describe_target(config.target)
    config = with_vocabulary(config, described)
    program = make_train_step(config, described.config, mesh)
    check(config)
    config, decoding = with_decode_prompts(config, described.config, program, mesh)
    notices = (*described.notices, warn_unused_feature_loss(config), check_data(config.data))
    if multihost.is_first():
        for line in filter(None, (*notices, decoding)):
            print(f"train.distill: {line}", file=sys.stderr)
    check_directory(config, program.abstract_state())
    multihost.on_first(lambda: output.check_writable(config, overwrite))
    with working_on("loading the first weights"):
        warm = warm_params(config, described, program.abstract_state())
    with working_on("loading the tokenizer"):
        tokenizer = load_tokenizer(described.folder)
    vocab_size = described.config.vocab_size
    watch = progress if multihost.is_first() else None
    load = functools.partial(batches.load, config.data, tokenizer, vocab_size, watch=watch)
    with working_on("tokenising"):  # the larger split last: a fault of the other is found first
        validation, validation_report = load("validation")
        train, report = load("train")
    if multihost.is_first():
        print(f"data: {report}\nvalidation: {validation_report}", file=sys.stderr)
    vocabulary = None
    if config.draft_vocabulary is not None:
        vocabulary = frequent_in(train, config.draft_vocabulary, described)
        program = make_train_step(config, described.config, mesh, draft_ids=vocabulary.ids_U)
    with working_on("comparing the processes: target, data and settings"):
        facts = _facts(config, described, tokenizer, train, validation)
        if facts:  # several processes
            facts |= {"target over fsdp": program.target_place, "first weights": start_hash(config)}
            facts |= {"decode_prompts": config.run.decode_prompts}
        multihost.check_same(facts, "run")
    prompts = prompts_to_decode(config, described, validation, required=not decoding)
    cache = None if flags is None else open_cache(flags, config, described, train)
    dtype = jnp.dtype(config.run.dtype)
    with working_on("loading the target"):
        target = load_target(config.target, dtype, layers="stacked", sharding=program.frozen_at)
    with jax.set_mesh(mesh):
        kept = cache and build_cache(cache, flags, config, target, train, mesh)
        decode = make_decode(config, target, prompts, mesh, vocabulary) if prompts else None
        data, rest = (train, validation), {"kept": kept, "warm": warm, "decode": decode}
        rest["vocabulary"] = vocabulary
        rest["layout"] = layout(mesh.devices.flat, mesh, program.target_place)
        params = fit(_job(config, program, target, *data, **rest), target.params, stop)
        if params is None:  # a signal stopped the run
            return False
        params = multihost.gathered(params)
    if multihost.is_first():
        with working_on("writing the drafter"):
            save(config, params, target, vocabulary, config.optim.total_steps)
    return True


def warn_unused_feature_loss(config: DistillConfig) -> str | None:
    """A warning if no loss trains the features that an EAGLE drafter feeds back, else None."""
    feeds_itself = isinstance(config.drafter, EagleConfig) and config.feedback.steps == 1
    if not feeds_itself or config.loss.feature_weight:
        return None
    return (
        "loss.feature_weight is 0, but an EAGLE drafter reads its own features, which nothing "
        "trains then: its second token will fail; give it a weight, or raise feedback.steps"
    )


def _facts(
    config: DistillConfig,
    target: Target,
    tokenizer: Any,
    train: batches.Batches,
    validation: batches.Batches,
) -> dict[str, Any]:
    """Facts that all processes of a run must share, by name; empty for a single process."""
    if jax.process_count() == 1:
        return {}  # the hashes are slow to compute
    return (
        common(config)
        | batches.facts_of(train)
        | {
            "version": __version__,
            "jax": jax.__version__,
            "target": model_hash(find_folder(config.target)),  # weights included
            "tokenizer": tokenizer_hash(tokenizer),
            "rows": rows_hash(train),
            "validation rows": rows_hash(validation),
        }
    )


def with_vocabulary(config: DistillConfig, target: Target) -> DistillConfig:
    """The config with the ids of `config.vocabulary` as its drafter's `draft_ids`.

    Raises InputError for a vocabulary file of another target, for a `vocabulary` of a drafter
    that uses the target's head, and for a `draft_vocabulary` that training could not write.
    """
    if config.draft_vocabulary is not None:
        _check_draft_vocabulary(config, target)
    if config.vocabulary is None:
        return config
    if not hasattr(config.drafter, "draft_ids"):
        raise InputError(
            f"vocabulary {config.vocabulary}: only a drafter with a head of its own is trained "
            "with one; others take it in decoding, by --draft-vocabulary"
        )
    ids_U = load_vocabulary(config.vocabulary, target).ids_U
    drafter = dataclasses.replace(config.drafter, draft_ids=tuple(ids_U.tolist()))
    return dataclasses.replace(config, drafter=drafter)


def _check_draft_vocabulary(config: DistillConfig, target: Target) -> None:
    size, method = config.draft_vocabulary, method_of(config.drafter)
    if DRAFTERS[method].make(config.drafter, target.config).own_head:
        raise InputError(
            f"draft_vocabulary {size}: a drafter of kind {method} has a head of its own, and this "
            "is a slice of the target's; leave it out"
        )
    check_size(size, target.config.vocab_size, target.generation.eos_ids)


def _job(
    config: DistillConfig,
    program: TrainStep,
    target: Target,
    train: batches.Batches,
    validation: batches.Batches,
    *,
    kept: ReadParts | None,
    warm: Params | None,
    decode: Callable[[Params], Figures] | None,
    vocabulary: DraftVocabulary | None,
    layout: str,
) -> TrainJob:
    key = jax.random.key(config.run.seed)
    shardings = (program.state_sharding, None)

    def start() -> TrainState:
        state = jax.jit(program.init, out_shardings=program.state_sharding)(key)
        return state if warm is None else state._replace(params=warm)

    return TrainJob(
        config=config,
        start=start,
        starts_trained=config.init_from is not None,
        abstract=program.abstract_state(),
        update=jax.jit(program.update, donate_argnums=0, out_shardings=shardings),
        batch=_placed(program, train, kept),
        evaluate=_evaluation(config, program, validation),
        data=batches.facts_of(train) | facts_of_vocabulary(vocabulary),
        decode=decode,
        flops_per_token=model_flops_per_token(config, target.config, cached=kept is not None),
        steps_per_epoch=len(train),
        layout=layout,
    )


def _placed(
    program: TrainStep, source: batches.Batches, kept: ReadParts | None = None
) -> Callable[[int], Batch | TappedBatch]:
    """(step) -> the batch of that step on its devices; every process reads its own rows."""

    def batch(step: int) -> Batch | TappedBatch:
        def read(rows: slice) -> Batch | TappedBatch:
            found = source.batch(step, rows)
            return TappedBatch(*found, kept(source.numbers(step, rows))) if kept else found

        return sharding.place_rows(read, program.rows_sharding, (source.rows_per_batch,))

    return batch


def _evaluation(config: DistillConfig, program: TrainStep, validation: batches.Batches) -> Any:
    probe, batch = jax.jit(program.probe), _placed(program, validation)
    count = min(config.run.eval_batches, len(validation))

    def evaluate(params: Any, frozen: Any) -> dict[str, Any]:
        found = [probe(params, frozen, batch(i)) for i in range(count)]
        return summarise(jax.tree.map(lambda *sums: sum(sums), *found))

    return evaluate


def save(
    config: DistillConfig,
    params: Any,
    target: Target,
    vocabulary: DraftVocabulary | None,
    step: int,
) -> None:
    """Writes the drafter of a step as the folder `output_of(config)`, with its vocabulary if any.

    If `vocabulary` is None, the draft vocabulary of an earlier folder is kept, as train.vocabulary
    may have written that file. A vocabulary that cannot be read or belongs to another target is
    removed, with a line on stderr.
    """
    folder = place(output_of(config))
    if vocabulary is None and not is_stored(folder) and (folder / FILE).is_file():
        try:
            vocabulary = load_vocabulary(folder, target)
        except InputError as error:
            print(f"the earlier draft vocabulary is removed: {error}", file=sys.stderr)
    content = None if vocabulary is None else content_of(vocabulary)
    save_drafter(
        folder,
        method_of(config.drafter),
        config.drafter,
        params,
        target,
        jnp.bfloat16,
        depth=config.horizon + 1,
        beside={FILE: content, **output.record(config, step)},
    )


def main(arguments: list[str] | None = None) -> int | None:
    parser = config_parser("train.distill", __doc__)
    target_cache.add_flags(parser)
    cluster.add_flags(parser)
    output.add_flag(parser)
    parser.add_argument(
        "--init-from", metavar="DIR", help="start from the weights of this drafter or run"
    )
    config, args = parse_config(parser, DistillConfig, arguments)
    if args.init_from is not None:
        config = dataclasses.replace(config, init_from=args.init_from)
    with cluster.joined(args, parser.prog), working_on("preparing the run"):
        finished = distill(config, target_cache.flags_of(args), args.overwrite)
    return None if finished else TRY_AGAIN


if __name__ == "__main__":
    run(main)
