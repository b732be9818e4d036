"""The real tau during training: a few validation prompts decoded with the drafter as it is."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np

from moa_jax.config import DistillConfig, DraftShape
from moa_jax.data.batch import Batch
from moa_jax.data.batches import Batches
from moa_jax.decode.room import Room
from moa_jax.decode.session import Session
from moa_jax.drafters import method_of
from moa_jax.errors import InputError
from moa_jax.pretrained import LoadedDrafter, Target

MAX_NEW_TOKENS = 64


def make_decode(
    config: DistillConfig, target: Target, validation: Batches
) -> Callable[[Any], dict[str, float]]:
    """(params) -> tau of greedy chains of the config's horizon on `run.decode_prompts` prompts.

    Decoding wants layers one by one, so the target is held twice. It takes one process. Raises
    InputError where no prompt leaves room.
    """
    prompts = fitting_prompts(validation, target, MAX_NEW_TOKENS, config.run.decode_prompts)
    if not prompts:
        raise InputError(
            f"run.decode_prompts: no validation prompt leaves {MAX_NEW_TOKENS} of the target's "
            "positions free: set it to 0"
        )
    layers = target.params["layers"]
    one = lambda index: jax.tree.map(lambda leaf: leaf[index], layers)  # noqa: E731
    each = [one(index) for index in range(target.config.num_layers)]
    unstacked = target._replace(params=target.params | {"layers": each})
    session: Session | None = None

    def decode(params: Any) -> dict[str, float]:
        nonlocal session
        params = jax.tree.map(lambda leaf: leaf.astype(target.params["embed"].dtype), params)
        if session is None:
            method, depth = method_of(config.drafter), config.horizon + 1
            drafter = LoadedDrafter(method, config.drafter, params, (), Path(), depth)
            session = Session(unstacked, drafter, DraftShape(config.horizon + 1))
        session.weights = session.weights._replace(drafter=params)
        found = [session.generate([prompt], MAX_NEW_TOKENS)[0] for prompt in prompts]
        rounds = sum(result.rounds for result in found)
        return {"tau": sum(sum(result.accept_lengths) for result in found) / max(rounds, 1)}

    return decode


def fitting_prompts(
    validation: Batches, target: Target, max_new_tokens: int, most: int
) -> list[list[int]]:
    """The first prompts of the validation data, at most `most`, that leave room for an answer."""
    room = Room(target.config.max_position_embeddings)
    fitting = (p for p in prompts_of(validation) if room.behind(len(p)) >= max_new_tokens)
    return list(itertools.islice(fitting, most))


def prompts_of(validation: Batches) -> Iterator[list[int]]:
    """What stands before the first answer of each conversation, from the first batch on."""
    for step in range(len(validation)):
        for row in zip(*validation.batch(step), strict=True):
            yield from _row_prompts(Batch(*row))


def _row_prompts(row: Batch) -> list[list[int]]:
    found = []
    for segment in range(1, int(row.segment_BT.max()) + 1):
        here_T = row.segment_BT == segment
        answer_T = row.response_BT[here_T]
        first = int(np.argmax(answer_T))
        if answer_T.any() and first:
            found.append(row.tokens_BT[here_T][:first].tolist())
    return found
