"""Benchmarks: the programs of `infer.bench`, which programs and tests alone import.

decode.py     plain, chain, tree and automatic decoding side by side
serving/      --serve: infer.serve under load
split/        --split: client and server over several networks
network.py    a TCP proxy that plays a slow, jittery, lossy link and fails on demand
"""

from __future__ import annotations

import sys

SPLIT, SERVE = "--split", "--serve"  # lead to other benchmarks, with flags of their own


def main(arguments: list[str] | None = None) -> int | None:
    """Runs the benchmark that the command line names; returns an exit code."""
    from moa_jax.errors import InputError

    arguments = sys.argv[1:] if arguments is None else arguments
    if SPLIT in arguments and SERVE in arguments:
        raise InputError("--split and --serve are two benchmarks: choose one of them")
    if SPLIT in arguments:
        from infer.bench.split import run as split  # which needs the extra `serve`

        return split.main([text for text in arguments if text != SPLIT])
    if SERVE in arguments:
        from infer.bench.serving import run as serve  # which needs the extra, too

        return serve.main([text for text in arguments if text != SERVE])
    from infer.bench import decode

    return decode.main(arguments)
