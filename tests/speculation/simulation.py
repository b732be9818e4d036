"""Speed of the draft controller beside fixed draft shapes, on simulated texts without a clock.

    python -m tests.speculation.simulation    figures of the draft controller

Rounds take the time of a table. A round of a shape adds the mean number of committed tokens, so
that chance affects the choices alone.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from moa_jax.config import DraftShape
from moa_jax.speculation.controller import DraftController

NO_DRAFT, TREE, OWN = DraftShape(1), DraftShape(7, 8, 62), DraftShape(5)
CPU = {NO_DRAFT: 1.0, TREE: 4.0} | {
    DraftShape(depth): ms for depth, ms in ((2, 1.3), (3, 1.45), (4, 1.6), (6, 1.9), (8, 2.3))
}
GPU = {NO_DRAFT: 1.0, DraftShape(3): 1.22, DraftShape(5): 1.4, TREE: 1.65}
BUSY = {NO_DRAFT: 1.0, DraftShape(2): 1.6, DraftShape(3): 2.1, DraftShape(4): 2.6, TREE: 6.0}
LOADED = {NO_DRAFT: 1.0, DraftShape(2): 2.1, DraftShape(3): 3.2, DraftShape(4): 4.3, TREE: 9.0}
# As measured on a CPU with the bundled pair.
SLOW = {NO_DRAFT: 4.03, DraftShape(3): 6.67, OWN: 7.42, DraftShape(8): 9.08}
SLOW |= {DraftShape(5, 4, 16): 13.9}
TABLES = {"cpu": CPU, "gpu": GPU, "busy": BUSY, "loaded": LOADED, "slow": SLOW}

Costs = dict[DraftShape, float]  # milliseconds of a round
Stretch = tuple[int, Sequence[float]]  # tokens of a part of a text, and its rate per position
# (shape, accepted drafts of all rows, rounds)
Observe = Callable[[DraftShape, list[int], int], None]
Next = Callable[[], tuple[DraftShape, int]]


def even(rate: float, tokens: int = 3000) -> Stretch:
    return tokens, [rate] * 7


TEXTS: dict[str, list[Stretch]] = {
    **{str(rate): [even(rate)] for rate in (0.0, 0.3, 0.45, 0.6, 0.9)},
    "falling": [(3000, [0.85 * 0.75**place for place in range(7)])],
    "rising": [(3000, [0.5, 0.75, 0.85, 0.9, 0.9, 0.9, 0.9])],
    "0.0 to 0.9": [even(0.0, 1500), even(0.9, 1500)],
    "0.9 to 0.0": [even(0.9, 1500), even(0.0, 1500)],
    "0.3 to 0.9": [even(0.3, 1500), even(0.9, 1500)],
    "0.9 to 0.3": [even(0.9, 1500), even(0.3, 1500)],
}
# Rows, and the range of an answer's tokens; None is one long answer.
SETTINGS: dict[str, tuple[int, tuple[int, int] | None]] = {
    "one row": (1, None),
    "eight rows": (8, None),
    "answers of 60 to 200": (1, (60, 201)),
    "answers of 16 to 40": (1, (16, 41)),
}


class Figures(NamedTuple):
    """Speeds over all tables, texts and seeds."""

    least_over_plain: float
    mean_over_best: float  # the best fixed shape
    least_over_best: float


def rates_of(shape: DraftShape, stretch: Stretch) -> np.ndarray:
    rate_P = np.array(stretch[1][: shape.levels - 1])
    return rate_P if shape.is_chain else 1 - (1 - rate_P) ** 1.5


def speed(
    next_choice: Next,
    observe: Observe,
    costs: Costs,
    text: list[Stretch],
    seed: int,
    rows: int = 1,
    answers: tuple[int, int] | None = None,
) -> float:
    """Returns tokens per millisecond over a text. The last round of an answer is not observed."""
    rng, lengths = np.random.default_rng(seed), _lengths(answers, seed)
    ends = np.cumsum([tokens for tokens, _ in text])
    done = expected = spent = 0.0
    left = next(lengths)
    while done < ends[-1]:
        shape, rounds = next_choice()
        place = int(np.searchsorted(ends, done, side="right"))
        rate_P = rates_of(shape, text[place])
        mean = 1 + float(np.cumprod(rate_P).sum())
        accepted_RB = np.cumprod(rng.random((rounds, rows, len(rate_P))) < rate_P, 2).sum(2)
        observed = 0
        for committed in 1 + accepted_RB.mean(1):
            spent += costs[shape]
            if committed >= left:
                done, expected, left = done + left, expected + left, next(lengths)
                break
            done, expected, left = done + committed, expected + mean, left - committed
            observed += 1
            if done >= ends[place]:
                break
        observe(shape, accepted_RB[:observed].ravel().tolist(), observed)
    return expected / spent


def _lengths(answers: tuple[int, int] | None, seed: int) -> Iterator[float]:
    rng = np.random.default_rng(seed)
    while True:
        yield rng.integers(*answers) if answers else np.inf


def fixed(
    shape: DraftShape, ms: float, text: list[Stretch], answers: tuple[int, int] | None = None
) -> float:
    """Returns expected tokens per millisecond of one shape over a text."""
    total = sum(tokens for tokens, _ in text)
    return total / sum(
        stretch[0] * ms / _tokens_per_round(shape, stretch, answers) for stretch in text
    )


def _tokens_per_round(
    shape: DraftShape, stretch: Stretch, answers: tuple[int, int] | None
) -> float:
    reached_P = np.cumprod(rates_of(shape, stretch))
    if answers is None:
        return 1 + float(reached_P.sum())
    # Probabilities that a round commits 1, 2, ... tokens give the rounds of an answer.
    chance_P = -np.diff([1.0, *reached_P, 0.0])
    rounds = [0.0]
    for tokens in range(1, answers[1]):
        some = enumerate(chance_P, start=1)
        rounds.append(1 + sum(chance * rounds[max(tokens - n, 0)] for n, chance in some))
    return sum(range(*answers)) / sum(rounds[answers[0] :])


def best_fixed(costs: Costs, text: list[Stretch], answers: tuple[int, int] | None = None) -> float:
    return max(fixed(shape, ms, text, answers) for shape, ms in costs.items())


def figures(start: Callable[[Costs, int], tuple[Next, Observe]], setting: str) -> Figures:
    """Returns figures of a setting; `start` begins a choice for a table and a number of rows."""
    rows, answers = SETTINGS[setting]
    over_plain, over_best = [], []
    for costs in TABLES.values():
        for text in TEXTS.values():
            best = best_fixed(costs, text, answers)
            for seed in range(3):
                found = speed(*start(costs, rows), costs, text, seed, rows, answers)
                over_plain.append(found * costs[NO_DRAFT])
                over_best.append(found / best)
    return Figures(min(over_plain), float(np.mean(over_best)), min(over_best))


def controlled(costs: Costs, rows: int = 1) -> tuple[Next, Observe]:
    """Returns the functions of a new draft controller."""
    controller = DraftController(max(shape.levels for shape in costs) - 1)
    return (
        lambda: controller.next(costs),
        lambda shape, accepted, rounds: controller.observe(costs, shape, accepted, rounds, rows),
    )


if __name__ == "__main__":
    for name in SETTINGS:
        print(name, figures(controlled, name), flush=True)
