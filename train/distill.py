"""Trains a drafter for a frozen target: `python -m train.distill --config configs/tiny.py`.

Settings of the config file are overridden by dotted flags, as in --optim.total_steps 200.
A run that was cut off goes on from its last checkpoint when the same command is given again.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from infer.cli import run
from moa_jax.config import DistillConfig
from moa_jax.data import batches
from moa_jax.distillation import make_loss, make_probe, summarise
from moa_jax.drafters import DRAFTERS
from moa_jax.optim import optimizer
from moa_jax.pretrained import load_target, save_drafter
from moa_jax.tokenizer import load_tokenizer
from train.loop import Job, fingerprint, fit
from train.settings import config_of_flags

METHOD = "moa"


def distill(config: DistillConfig) -> None:
    """Target, data, training, and the finished drafter's folder."""
    dtype = jnp.dtype(config.run.dtype)
    target = load_target(config.target, dtype, layers="stacked")
    tokenizer = load_tokenizer(target.folder)
    vocab_size = target.config.vocab_size
    train, report = batches.load(config.data, tokenizer, vocab_size, "train")
    validation, _ = batches.load(config.data, tokenizer, vocab_size, "validation")
    print(f"data: {report}", file=sys.stderr)

    drafter = DRAFTERS[METHOD].make(config.drafter, target.config, config.masks)
    probe = make_probe(target.config, drafter, dtype, config.horizon)
    job = Job(
        run=config.run,
        optim=config.optim,
        config=fingerprint(config),
        loss=make_loss(target.config, drafter, dtype),
        evaluate=_evaluation(config, probe, validation),
        batches=train,
        optimizer=optimizer(config.optim),
    )
    params = fit(job, drafter.init(jax.random.key(config.run.seed)), frozen=target.params)
    save_drafter(
        Path(config.output),
        METHOD,
        config.drafter,
        params,
        target,
        jnp.bfloat16,
        depth=config.horizon + 1,
    )


def _evaluation(config: DistillConfig, probe: Any, validation: batches.Batches) -> Any:
    one = jax.jit(probe)
    count = min(config.run.eval_batches, len(validation))

    def evaluate(params: Any, frozen: Any) -> dict[str, Any]:
        found = [one(params, frozen, validation.batch(i)) for i in range(count)]
        return summarise(jax.tree.map(lambda *sums: sum(sums), *found))

    return evaluate


def main(arguments: list[str] | None = None) -> None:
    distill(config_of_flags("train.distill", __doc__, DistillConfig, arguments))


if __name__ == "__main__":
    run(main)
