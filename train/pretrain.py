"""Trains a small target from text: `python -m train.pretrain --config configs/demo_target.py`.

Packs whole conversations into rows; the loss covers every token but the first per conversation.
The same command resumes an interrupted run from its last checkpoint.
"""

from __future__ import annotations

import functools
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from infer.cli.program import TRY_AGAIN, progress, run
from moa_jax.config import PretrainConfig, output_of
from moa_jax.data import batches
from moa_jax.data import sources as sources_lib
from moa_jax.data.batch import Batch
from moa_jax.data.records import messages_of, plain_text_of
from moa_jax.data.tokenizer import load_tokenizer, train_tokenizer
from moa_jax.drafters.losses import next_token_loss
from moa_jax.errors import InputError
from moa_jax.model import attention, llama, masks
from moa_jax.pretrained import save_target
from moa_jax.training.checkpoint import check_directory
from moa_jax.training.optim import optimizer
from moa_jax.training.update import abstract, init_state, make_update
from train.run import output
from train.run.loop import TrainJob, check, fit
from train.run.settings import config_parser, parse_config
from train.run.start import check_data, layout, working_on
from train.run.stop import StopRequest


def pretrain(config: PretrainConfig, overwrite: bool = False) -> bool:
    """Trains a tokenizer if missing, then the target; returns False if a signal stopped the run.

    With `overwrite` the target may replace that of another run.
    """
    with StopRequest() as stop:
        return _pretrain(config, overwrite, stop)


def _pretrain(config: PretrainConfig, overwrite: bool, stop: StopRequest) -> bool:
    check(config)
    optim, tx, key = config.optim, optimizer(config.optim), jax.random.key(config.run.seed)
    start = lambda: init_state(llama.init(config.target, key), tx)
    shapes = abstract(jax.eval_shape(start), SingleDeviceSharding(jax.devices()[0]))
    check_directory(config, shapes)
    output.check_writable(config, overwrite)
    if line := check_data(config.data):
        print(f"train.pretrain: {line}", file=sys.stderr)
    tokenizer = _tokenizer(config)
    vocab_size = config.target.vocab_size
    load = functools.partial(batches.load, config.data, tokenizer, vocab_size, watch=progress)
    validation, validation_report = load("validation")
    train, report = load("train")
    print(f"data: {report}\nvalidation: {validation_report}", file=sys.stderr)
    loss = lambda params, frozen, batch, key, progress: _loss(config, params, batch)
    update = make_update(loss, tx, config.run.seed, optim.total_steps, optim.accumulate)
    job = TrainJob(
        config=config,
        start=start,
        abstract=shapes,
        batch=train.batch,
        update=jax.jit(update, donate_argnums=0),
        evaluate=_evaluation(config, validation),
        data=batches.facts_of(train),
        steps_per_epoch=len(train),
        layout=layout(jax.devices()[:1]),
    )
    params = fit(job, None, stop)
    if params is None:
        return False
    beside = output.record(config, config.optim.total_steps)
    save_target(output_of(config), config.target, params, config.tokenizer, beside=beside)
    return True


def _loss(config: PretrainConfig, params: Any, batch: Batch) -> tuple[Any, dict[str, Any]]:
    context = llama.Context(batch.position_BT, masks.causal(batch.segment_BT))
    dtype = jnp.dtype(config.run.dtype)
    with attention.computed(config.run.attention):
        found = llama.forward(config.target, params, batch.tokens_BT, context, dtype=dtype)
    return next_token_loss(llama.unembed(params, found.hidden_BTD), batch)


def _evaluation(config: PretrainConfig, validation: batches.Batches) -> Any:
    one = jax.jit(lambda params, batch: _loss(config, params, batch)[1])
    count = min(config.run.eval_batches, len(validation))

    def evaluate(params: Any, frozen: None) -> dict[str, float]:
        found = [one(params, validation.batch(i)) for i in range(count)]
        return {name: sum(float(f[name]) for f in found) / count for name in found[0]}

    return evaluate


def _tokenizer(config: PretrainConfig) -> Any:
    if not Path(config.tokenizer).exists():
        found = (record for path in config.data.train for _, record in sources_lib.read_all(path))
        sources = config.data.sources
        records = (r for r in found if isinstance(r, dict) and sources_lib.is_from(r, sources))
        texts = (text for record in records for text in _texts(record))
        train_tokenizer(texts, config.target.vocab_size, Path(config.tokenizer))
    return load_tokenizer(config.tokenizer)


def _texts(record: dict[str, Any]) -> list[str]:
    """All texts of a record; empty for a record that `batches.load` will drop and count."""
    if (text := plain_text_of(record)) is not None:
        return [text]
    try:
        return [message["content"] for message in messages_of(record)]
    except InputError:
        return []


def main(arguments: list[str] | None = None) -> int | None:
    parser = config_parser("train.pretrain", __doc__)
    output.add_flag(parser)
    config, args = parse_config(parser, PretrainConfig, arguments)
    with working_on("preparing the run"):
        return None if pretrain(config, args.overwrite) else TRY_AGAIN


if __name__ == "__main__":
    run(main)
