"""The flags with which several processes find each other, train as one and end as one."""

from __future__ import annotations

import argparse
import contextlib
import sys
import traceback
from collections.abc import Iterator

import jax

from infer.program import BAD_INPUT, BROKEN_PIPE, INTERRUPTED, refusal_of
from moa_jax.errors import InputError, first_line
from moa_jax.training.processes import ending_together


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--distributed on a cluster that tells each process its place, else three flags."""
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes, as Slurm, Kubernetes or the TPU slice says",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--processes", type=int, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")


@contextlib.contextmanager
def joined(args: argparse.Namespace, program: str) -> Iterator[None]:
    """Meets the other processes, if there are any, and ends with them if one of them fails.

    It must be entered before jax looks for devices. Raises InputError for flags that do not say
    all, and where the others are not found.
    """
    _join(args)
    say = lambda line: print(f"{program}: {line}", file=sys.stderr, flush=True)  # noqa: E731
    with ending_together(_described, say):
        yield


def _join(args: argparse.Namespace) -> None:
    place = (args.coordinator, args.processes, args.process)
    if place == (None, None, None) and not args.distributed:
        return
    if args.distributed and place != (None, None, None):
        raise InputError("--distributed finds all by itself: leave out --coordinator and the rest")
    if not args.distributed and None in place:
        raise InputError("--coordinator, --processes and --process go together: give all three")
    if not args.distributed and not 0 <= args.process < args.processes:
        raise InputError(f"--process {args.process}: choose from 0 to {args.processes - 1}")
    try:
        jax.distributed.initialize(*(() if args.distributed else place))
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the other processes were not found ({first_line(error)}): check --coordinator and "
            "that all of them run"
        ) from error


def _described(error: BaseException) -> tuple[str, int]:
    """One line and an exit code; prints the traceback of a fault of ours."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, BrokenPipeError):
        return "the reader of the output is gone", BROKEN_PIPE
    if line := refusal_of(error):
        return line, BAD_INPUT
    traceback.print_exception(error)
    return f"{type(error).__name__}: {first_line(error)}", 1
