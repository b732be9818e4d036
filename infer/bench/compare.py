"""Alternates plain and speculative decoding of the same prompts for `infer.generate --compare`."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Any

from infer.bench.decode_tables import SPEED
from infer.bench.statistics import Run, beside, summarise
from infer.bench.suites import choose, load_suite
from infer.bench.tables import TableColumn, number, table_of
from infer.cli.flags.prompts import asking
from moa_jax import Session
from moa_jax.measure.turns import rotated

SECONDS = 10.0
COLUMNS: dict[str, TableColumn] = {
    "mode": "mode",
    **{key: SPEED[key] for key in ("tokens/s", "speedup", "tau")},
    "same tokens": SPEED["same as plain"],
}
# prompt index -> `stop_ids`, `sampling` and `stop_when` of its answers
Settings = Callable[[int], dict[str, Any]]


def bundled_questions(tokenizer: Any | None) -> list[list[int]]:
    """The first question of every bundled set as a prompt."""
    questions, _ = choose(load_suite("demo"), 1, lambda question: None)
    return [asking(question.turns[0], tokenizer) for question in questions]


def compare_in_turns(
    ways: dict[str, Session],
    prompts: Sequence[list[int]],
    max_new_tokens: int,
    settings: Settings,
) -> str:
    """A Markdown table of all sessions, the first of them plain decoding, and a summary line.

    Repeats passes of all prompts through all sessions until SECONDS have passed. The first pass,
    which compiles the programs, is not counted.
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
    verdicts = [
        f"{name} writes {'the same' if row['same_as_plain'] == row['answers'] else 'DIFFERENT'} "
        f"tokens, {number(row['speedup'])} x as fast as {plain} decoding"
        for name, row in rows.items()
        if name != plain
    ]
    times = "once" if repeats == 1 else f"{repeats} times"
    about = f"{prompts} prompt{'s' if prompts > 1 else ''}, {times} each, in turns"
    shown = table_of([{"mode": name, **row} for name, row in rows.items()], COLUMNS)
    return f"{shown}\n{'; '.join(verdicts)} ({about}; medians and quartiles)"
