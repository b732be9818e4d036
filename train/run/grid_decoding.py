"""Real tau of a grid's drafters: held-out prompts decoded greedily."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator, Sequence
from typing import Any

import jax

from infer.cli.flags.pair import open_drafter, open_target
from moa_jax.config import GridConfig
from moa_jax.data import batches
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.session import Session
from moa_jax.errors import InputError
from moa_jax.pretrained import Target
from train.run.decoding import conversations, fitting_prompts
from train.run.grid_runs import GridRun

BATCH = 16  # prompts decoded together; the batch does not change tau
ENDINGS = {"tau": None, "tau_past_end": []}  # stop ids per tau; None: the target's own
DecodedCounts = dict[str, list[int]]  # tokens and rounds per prompt, of one shape and ending
Decoded = list[dict[str, DecodedCounts]]  # per shape, the counts by ending


def decode(grid: GridConfig, runs: Sequence[GridRun]) -> Iterator[tuple[GridRun, Decoded]]:
    """Decodes the prompts with the drafters of these runs, one after the other."""
    if not runs:
        return
    target = open_target(grid.cells[0][1].target)
    prompts = prompts_of(grid, target)
    for run in runs:
        drafter, limit = open_drafter(run.config.output, target), grid.max_new_tokens
        sessions = [Session(target, drafter, shape) for shape in grid.shapes]
        yield run, [{k: _counts(s, prompts, limit, ENDINGS[k]) for k in ENDINGS} for s in sessions]
        jax.clear_caches()


def decoding_of(grid: GridConfig) -> dict[str, Any]:
    """The decoding settings of all drafters of a grid, with the values that JSON reads back."""
    return {
        "shapes": [json.loads(json.dumps(dataclasses.asdict(shape))) for shape in grid.shapes],
        "prompts": grid.prompts,
        "max_new_tokens": grid.max_new_tokens,
    }


def prompts_of(grid: GridConfig, target: Target) -> list[list[int]]:
    """The prompts that all drafters answer, from the validation data of the reference cell.

    Prompts that occur in the training data of any cell are left out. `target` needs no weights.
    Raises InputError if no prompt is left.
    """
    tokenizer = load_tokenizer(target.folder)
    load = lambda data, split: batches.load(data, tokenizer, target.config.vocab_size, split)[0]
    validation = load(dict(grid.cells)[grid.reference].data, "validation")
    left = dict.fromkeys(map(tuple, fitting_prompts(validation, target, grid.max_new_tokens)))
    for data in dict.fromkeys(config.data for _, config in grid.cells):
        rows = load(data, "train")
        for prompt in itertools.chain.from_iterable(conversations(rows, range(rows.num_rows))):
            left.pop(prompt, None)
    if not left:
        raise InputError(
            f"no prompt of the validation data leaves max_new_tokens {grid.max_new_tokens} of the "
            f"target's {target.config.max_position_embeddings} positions free, or the training "
            "data has them all; lower it, or give other data"
        )
    return list(map(list, itertools.islice(left, grid.prompts)))


def _counts(
    session: Session, prompts: list[list[int]], max_new_tokens: int, stops: list[int] | None
) -> DecodedCounts:
    """Tokens after the first token, and rounds, per prompt."""
    found = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        filled = part + part[:1] * (BATCH - len(part))  # one batch size, so one program
        found += session.generate(filled, max_new_tokens, stops)[: len(part)]
    return {
        "tokens": [sum(each.accept_lengths) for each in found],
        "rounds": [each.rounds for each in found],
    }
