"""Measurements: `infer.bench`, and the shared code of `infer.evaluate`, `infer.check`, --compare.

Only programs import this package.

    decode.py         infer.bench: plain, chain, tree and auto on the same prompts
    flags.py          its flags            inputs.py      its prompts and random models
    decode_tables.py  its tables           phases.py      time and bytes by phase
    random_pair.py    random weights       simulate.py    drafts accepted at random
    traffic.py        bytes that a program reads, bandwidth of the device

    suites.py           questions from files, the hub, tfds, the package
    conversations.py    questions from chat records, by source
    candidates.py       plain decoding, and each drafter in each mode
    question_runner.py  answers a question with all candidates, turn by turn, timed
    answers.py          answer files in Spec-Bench's format, resumable
    report.py           the report of infer.evaluate
    paper.py            the paper's figures
    plots.py            plots; drawing.py has their shared helpers

    fidelity.py   distance of a target's distributions from a reference's
    golden.py     golden files of infer.check    thresholds.py  its limits
    compare.py    infer.generate --compare
    serving/      --serve: infer.serve under load
    split/        --split: client and server over several networks
    network.py    a TCP proxy that emulates a slow, jittery, lossy link and fails on demand
    plan/         infer.plan and train.plan: programs for hardware that is not attached
    statistics.py, tables.py      figures and their formatting
"""

from __future__ import annotations

import importlib
import sys

from moa_jax.errors import InputError

# Server benchmarks: they have their own flags and need the extra `serve`.
SERVERS = {"--split": "infer.bench.split.run", "--serve": "infer.bench.serving.run"}


def main(arguments: list[str] | None = None) -> int | None:
    """Runs `infer.bench`; raises InputError for flags that contradict each other."""
    arguments = sys.argv[1:] if arguments is None else arguments
    chosen = [flag for flag in SERVERS if flag in arguments]
    if len(chosen) > 1:
        raise InputError("--split and --serve are two benchmarks; choose one of them")
    program = SERVERS[chosen[0]] if chosen else "infer.bench.decode"
    rest = [text for text in arguments if text not in chosen]
    return importlib.import_module(program).main(rest)
