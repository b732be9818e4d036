"""What a round costs in each way that a session may take: the numbers that it chooses by.

    turn      a prompt is read | rounds that are not counted | rounds that are

All ways take turns, so drift of the machine hits them alike. Counted rounds are one call, so a
price holds what a call costs the host. A CPU's caches hold what was read last, the prompt's or
another way's, and some fifteen rounds pass until they serve this way as well as they can. These
are not counted, for a choice mostly repeats the last one.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from moa_jax.config import DraftShape
from moa_jax.decode.generation import Call, Generation
from moa_jax.decode.session import GREEDY, Session
from moa_jax.decode.step import CATCH_UP
from moa_jax.errors import InputError
from moa_jax.measure.turns import in_turns

ROUNDS_BEFORE, ROUNDS = 16, 8  # of a turn: not counted, and counted
TURNS = 7  # that are counted, of each way
PROMPT, NEW = 64, 128  # tokens
NO_STOP: list[int] = []


def price(
    session: Session, batch: int = 1, go_on: Callable[[], bool] = lambda: True
) -> dict[DraftShape, float]:
    """Median milliseconds of a round of each way, in a batch of such a size.

    All ways are compiled first. As soon as it may not `go_on` it gives up, and nothing is known.
    Raises InputError where the caches are too small for the prompts.
    """
    seconds: dict[DraftShape, list[float]] = {way: [] for way in session.ways}
    for turn in in_turns(len(session.ways), 1, TURNS):
        if not go_on():
            return {}
        found, (way, rounds, spent) = _decoded(session, batch, session.ways[turn.way])
        if not way.num_drafted:  # it pays for its share of catching up
            spent += found.catch_up() * rounds / CATCH_UP
        if turn.is_counted and rounds:
            seconds[way].append(spent / rounds)
    return {way: 1e3 * float(np.median(each)) for way, each in seconds.items() if each}


def _decoded(session: Session, batch: int, way: DraftShape) -> tuple[Generation, Call]:
    """A generation, and the call of it that counts."""
    found = _begin(session, batch)
    before, counted = found.take(way, ROUNDS_BEFORE), found.take(way, ROUNDS)
    if counted.rounds == ROUNDS:
        return found, counted
    # Where most drafts are accepted the text ends early: once more, and half of its rounds count.
    total = before.rounds + counted.rounds
    rounds = min(-(-total // 2), ROUNDS)
    found = _begin(session, batch)
    found.take(way, total - rounds)
    return found, found.take(way, rounds)


def _begin(session: Session, batch: int) -> Generation:
    """A batch of random prompts whose answers go on to their limit."""
    room = session.room.max_new_tokens(1)
    if room < 2:
        raise InputError("the caches have no room to measure what a round costs; make them larger")
    prompt, new = (PROMPT, NEW) if room > PROMPT + NEW else (room // 2, room // 2)
    size = (batch, prompt)
    prompts = np.random.default_rng(0).integers(session.target.config.vocab_size, size=size)
    return session.begin(prompts.tolist(), new, NO_STOP, GREEDY, teaches=False)
