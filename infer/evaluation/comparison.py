"""Plain and drafted decoding of the same prompts in turns, until it says something."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from infer.evaluation.suites import choose, load_suite
from infer.flags.prompts import asking
from moa_jax import Session
from moa_jax.measure import figures
from moa_jax.measure.figures import Run
from moa_jax.measure.report import with_quartiles
from moa_jax.measure.tables import number, table_of
from moa_jax.measure.turns import rotated

SECONDS = 10.0
Ways = dict[str, Session]  # the first is plain decoding
# (index of a prompt) -> `stop_ids`, `sampling` and `stop_when` of its answers
Settings = Callable[[int], dict[str, Any]]


def bundled_questions(tokenizer: Any | None) -> list[list[int]]:
    """The first question of each bundled set as a prompt."""
    questions, _ = choose(load_suite("demo"), 1, lambda question: None)
    return [asking(question.turns[0], tokenizer) for question in questions]


def in_figures(
    ways: Ways, prompts: Sequence[list[int]], max_new_tokens: int, settings: Settings
) -> str:
    """A table of both ways, and a sentence on what it shows.

    All prompts are decoded both ways before they come again, until ten seconds have gone. A first
    time, in which programs are compiled, does not count.
    """
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    _once(ways, prompts, max_new_tokens, settings, 0)
    for session in ways.values():
        session.background.wait()
    begin = time.perf_counter()
    for repeat in itertools.count(1):
        for name, run in _once(ways, prompts, max_new_tokens, settings, repeat):
            runs[name].append(run)
        if time.perf_counter() > begin + SECONDS:
            return _table(runs, repeat)


def _once(
    ways: Ways, prompts: Sequence[list[int]], max_new_tokens: int, settings: Settings, first: int
) -> list[tuple[str, Run]]:
    """Every prompt decoded in all ways, in another order each time."""
    found = []
    for index, prompt in enumerate(prompts):
        for name in rotated([*ways], first + index):
            results = ways[name].generate([prompt], max_new_tokens, **settings(index))
            found.append((name, Run(index, tuple(results))))
    return found


def _table(runs: dict[str, list[Run]], repeats: int) -> str:
    plain, *others = runs
    rows, said = [], []
    for name, found in runs.items():
        row = figures.summarise(found, 1) | figures.beside(found, runs[plain])
        rows.append(
            {
                "mode": name,
                "tokens/s": with_quartiles(row, "tokens_per_s", 1),
                "speedup": with_quartiles(row, "speedup", 2),
                "tau": number(row["tau"], 2),
                "same tokens": f"{row['same_as_plain']}/{row['answers']}",
            }
        )
        if name in others:
            same = row["same_as_plain"] == row["answers"]
            said.append(
                f"{name} writes {'the same' if same else 'DIFFERENT'} tokens, "
                f"{number(row['speedup'], 2)} x as fast as {plain} decoding"
            )
    count = len({run.batch for run in runs[plain]})
    times = "once" if repeats == 1 else f"{repeats} times"
    about = f"{count} prompt{'s' if count > 1 else ''}, {times} each, in turns"
    return "\n".join([table_of(rows), f"{'; '.join(said)} ({about}; medians and quartiles)"])
