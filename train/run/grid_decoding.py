"""Real tau of a grid's drafters: held-out prompts decoded greedily, kept beside each run."""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from infer.flags.pair import open_drafter, open_target
from moa_jax.config import DraftShape, GridConfig
from moa_jax.data import batches
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.session import Session
from moa_jax.errors import InputError
from moa_jax.files.folders import read_json, write_json
from moa_jax.pretrained import Target
from moa_jax.training.fingerprint import changes, fingerprint
from train.run.decoding import conversations, fitting_prompts
from train.run.grid_report import ENDINGS, FIRST, FORMER_PROMPTS, Decoded, Tau
from train.run.grid_runs import GridRun

BATCH = 16  # prompts decoded side by side; tau is that of each alone
DECODED = "decoded.json"
PROMPTS = "distinct, first turns before later ones, none of them trained on"


def decode(grid: GridConfig, todo: Sequence[GridRun]) -> None:
    """Decode with the runs that have no real tau yet, and store it beside them."""
    if not todo:
        return
    target = open_target(grid.cells[0][1].target)
    prompts = prompts_of(grid, target)
    for each in todo:
        drafter = open_drafter(each.config.output, target)
        found = {"prompts": len(prompts), "settings": settings_of(grid, each), "shapes": []}
        for shape in grid.shapes:
            session = Session(target, drafter, shape)
            entry: dict[str, Any] = {"shape": _name_of(shape), "counts": {}}
            for key, stops in ENDINGS.items():
                counts = _counts(session, prompts, grid.max_new_tokens, stops)
                entry["counts"][key] = counts
                entry[key] = sum(counts["tokens"]) / max(sum(counts["rounds"]), 1)
            found["shapes"].append(entry)
        write_json(Path(each.config.run.directory) / DECODED, found)
        jax.clear_caches()


def prompts_of(grid: GridConfig, target: Target) -> list[list[int]]:
    """The prompts of the reference's validation data that all drafters answer.

    No conversation of any cell's training data has one. Raises InputError where there is none.
    `target` needs no weights.
    """
    tokenizer = load_tokenizer(target.folder)
    load = lambda data, split: batches.load(data, tokenizer, target.config.vocab_size, split)[0]
    validation = load(dict(grid.cells)[grid.reference].data, "validation")
    fitting = fitting_prompts(validation, target, grid.max_new_tokens)
    left = dict.fromkeys(map(tuple, fitting))
    for data in dict.fromkeys(config.data for _, config in grid.cells):
        rows = load(data, "train")
        for prompt in itertools.chain.from_iterable(conversations(rows, range(rows.num_rows))):
            left.pop(prompt, None)
    if not left:
        raise InputError(
            f"no prompt of the validation data leaves max_new_tokens {grid.max_new_tokens} of the "
            f"target's {target.config.max_position_embeddings} positions free, or the training "
            "data has them all: lower it, or give other data"
        )
    return list(map(list, itertools.islice(left, grid.prompts)))


def _counts(
    session: Session, prompts: list[list[int]], max_new_tokens: int, stops: list[int] | None
) -> dict[str, list[int]]:
    """Tokens after the first one, and rounds, of each prompt; what the first positions accepted."""
    found = []
    for start in range(0, len(prompts), BATCH):
        part = prompts[start : start + BATCH]
        filled = part + part[:1] * (BATCH - len(part))  # one program for all
        found += session.generate(filled, max_new_tokens, stops)[: len(part)]
    whole = [length for result in found for length in result.accept_lengths[:-1]]
    at_least = [sum(length >= least for length in whole) for least in range(1, FIRST + 2)]
    return {
        "tokens": [sum(result.accept_lengths) for result in found],
        "rounds": [result.rounds for result in found],
        "reached": at_least[:-1],
        "accepted": at_least[1:],
    }


def settings_of(grid: GridConfig, each: GridRun) -> dict[str, Any]:
    """What a decoding depends on beside the drafter's run."""
    return {
        "run": fingerprint(each.config),
        **decoding_of(grid),
    }


def decoding_of(grid: GridConfig) -> dict[str, Any]:
    """How every drafter of a grid decodes."""
    return {
        "shapes": [_name_of(shape) for shape in grid.shapes],
        # Two static trees may have one name.
        "shapes_in_full": [json.loads(json.dumps(dataclasses.asdict(s))) for s in grid.shapes],
        "prompts": grid.prompts,
        "prompts_are": PROMPTS,
        "max_new_tokens": grid.max_new_tokens,
    }


def decoding_changes(saved: Mapping[str, Any], decoding: Mapping[str, Any]) -> list[str]:
    """One text for each way in which a grid does not decode as `saved` says.

    What a file of an earlier version does not say may have been the same, but for its prompts.
    """
    saved = {"prompts_are": FORMER_PROMPTS, **saved}
    return [
        f"{name}: {saved[name]} -> {value}"
        for name, value in decoding.items()
        if saved.get(name, value) != value
    ]


def decoded_of(grid: GridConfig, each: GridRun) -> Decoded | None:
    """What was decoded with these settings; None also for a damaged file, to be made again."""
    try:
        found = read_json(Path(each.config.run.directory) / DECODED)
        taus = [{key: _tau(shape, key) for key in ENDINGS} for shape in found["shapes"]]
        different = changes(found["settings"]["run"], each.config)
        different += decoding_changes(found["settings"], decoding_of(grid))
        is_other = different or len(taus) != len(grid.shapes)
        return None if is_other else Decoded(int(found["prompts"]), taus)
    except (InputError, AttributeError, KeyError, TypeError, ValueError):
        return None


def _tau(shape: dict[str, Any], key: str) -> Tau:
    counts = shape["counts"][key] if "counts" in shape else {}
    by_prompt = (np.array(counts[name], int) for name in ("tokens", "rounds") if counts)
    by_position = (tuple(counts.get(name, ())) for name in ("reached", "accepted") if counts)
    return Tau(float(shape[key]), *by_prompt, *by_position)


def _name_of(shape: DraftShape) -> str:
    if shape.is_chain:
        return f"chain {shape.depth}"
    return f"tree {shape.depth}/{shape.breadth}/{shape.num_drafted}"
