"""Plain and drafted decoding of the same prompts in turns, for `infer.generate --compare`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from infer.bench.statistics import Run, beside, summarise
from infer.bench.suites import choose, load_suite
from infer.bench.tables import number, table_of, with_quartiles
from infer.flags.prompts import asking
from moa_jax import Session
from moa_jax.measure.turns import rotated

SECONDS = 10.0
# (index of a prompt) -> `stop_ids`, `sampling` and `stop_when` of its answers
Settings = Callable[[int], dict[str, Any]]


def bundled_questions(tokenizer: Any | None) -> list[list[int]]:
    """The first question of each bundled set as a prompt."""
    questions, _ = choose(load_suite("demo"), 1, lambda question: None)
    return [asking(question.turns[0], tokenizer) for question in questions]


def compare_in_turns(
    ways: dict[str, Session],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    settings: Settings,
) -> str:
    """A table of all ways, of which the first is plain decoding, and a sentence on it.

    All prompts are decoded in all ways before they come again, until ten seconds are over. The
    first time, in which programs are compiled, does not count.
    """
    runs: dict[str, list[Run]] = {name: [] for name in ways}
    for repeat in itertools.count():
        if repeat == 1:
            begin = time.perf_counter()
        for index, prompt in enumerate(prompts):
            for name in rotated([*ways], repeat + index):
                results = ways[name].generate([prompt], max_new_tokens, **settings(index))
                runs[name] += [Run(index, tuple(results))] if repeat else []
        for session in ways.values():
            session.background.wait()
        if repeat and time.perf_counter() > begin + SECONDS:
            return _table(runs, len(prompts), repeat)


def _table(runs: dict[str, list[Run]], prompts: int, repeats: int) -> str:
    plain, *_ = runs
    rows = {name: summarise(own, 1) | beside(own, runs[plain]) for name, own in runs.items()}
    cells = [
        {
            "mode": name,
            "tokens/s": with_quartiles(row, "tokens_per_s", 1),
            "speedup": with_quartiles(row, "speedup", 2),
            "tau": number(row["tau"]),
            "same tokens": f"{row['same_as_plain']}/{row['answers']}",
        }
        for name, row in rows.items()
    ]
    verdicts = [
        f"{name} writes {'the same' if row['same_as_plain'] == row['answers'] else 'DIFFERENT'} "
        f"tokens, {number(row['speedup'])} x as fast as {plain} decoding"
        for name, row in rows.items()
        if name != plain
    ]
    times = "once" if repeats == 1 else f"{repeats} times"
    about = f"{prompts} prompt{'s' if prompts > 1 else ''}, {times} each, in turns"
    return "\n".join([table_of(cells), f"{'; '.join(verdicts)} ({about}; medians and quartiles)"])
