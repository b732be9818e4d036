"""The flags with which several processes find each other, work as one and end as one."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping

import jax
from jax._src.clusters import ClusterEnv  # no public name tells the place before all have met

from infer import streams
from infer.program import BAD_INPUT, BROKEN_PIPE, INTERRUPTED, positive, refusal_of
from moa_jax.errors import InputError, first_line
from moa_jax.runtime.multihost import Ending, check_same, ending_together, is_broken, is_first
from moa_jax.runtime.rendezvous import Meeting, meet
from moa_jax.version import __version__


def add_flags(parser: argparse.ArgumentParser) -> None:
    """--distributed on a cluster that tells each process its place, else three flags."""
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="one of several processes, as Slurm, Kubernetes or the TPU slice says",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--processes", type=positive, metavar="N", help="how many there are")
    group.add_argument("--process", type=int, metavar="I", help="which one this is, from 0")
    group.add_argument(
        "--join-timeout",
        type=positive,
        default=300,
        metavar="SECONDS",
        help="in which all must have come, or those that have end; default: %(default)s",
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the flags speak of several processes."""
    return args.distributed or _place(args) != (None, None, None)


@contextlib.contextmanager
def joined(args: argparse.Namespace, program: str) -> Iterator[Ending]:
    """Meets the other processes, if there are any, and ends with them if one of them fails.

    It must be entered before jax looks for devices. Raises InputError for flags that do not say
    all, and where the others are not found.
    """
    people = sys.stderr  # whatever becomes of it inside

    def say(line: str) -> None:
        people.write(f"{program}: {line}\n")  # at once, for libraries write there, too
        people.flush()

    ending = Ending(say)
    _join(args, ending)
    with ending_together(_described, ending):
        yield ending


@contextlib.contextmanager
def first_speaks() -> Iterator[None]:
    """What the other processes print is left out: all of them print the same."""
    with contextlib.ExitStack() as stack:
        if not is_first():
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def check_alike(args: argparse.Namespace, files: Mapping[str, str]) -> None:
    """Raises InputError where processes have other flags, files or versions than process 0.

    `files` are hashes by names for people. No device is started.
    """
    flags = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
    del flags["--process"]
    check_same(flags | files | {"version": __version__, "jax": jax.__version__}, "start")


def _join(args: argparse.Namespace, ending: Ending) -> None:
    place = _place(args)
    if not is_asked(args):
        return
    if args.distributed and place != (None, None, None):
        raise InputError("--distributed finds all by itself: leave out --coordinator and the rest")
    if not args.distributed and None in place:
        raise InputError("--coordinator, --processes and --process go together: give all three")
    if not args.distributed and not 0 <= args.process < args.processes:
        raise InputError(f"--process {args.process}: choose from 0 to {args.processes - 1}")
    host, _, port = (args.coordinator or "").rpartition(":")
    if not args.distributed and not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise InputError(f"--coordinator {args.coordinator}: write HOST:PORT, as in 10.0.0.1:8476")
    try:
        place = _detected(args.join_timeout) if args.distributed else Meeting(*place)
        ending.watch(meet(place, args.join_timeout))
        jax.distributed.initialize(*place, initialization_timeout=args.join_timeout)
    except InputError:
        raise
    except (RuntimeError, ValueError) as error:
        raise InputError(
            f"the other processes were not found ({first_line(error)}): see that all of them run"
        ) from error
    _keep_stdout()


def _detected(seconds: int) -> Meeting:
    """What the launcher says."""
    first = os.environ.get("JAX_COORDINATOR_ADDRESS")  # which comes before the launcher's word
    unknown = (first, None, None, None, None)  # what jax is to find, and how
    found = ClusterEnv.auto_detect_unset_distributed_params(*unknown, seconds)[:3]
    if None in found:
        raise InputError(
            "--distributed: no launcher says where the other processes are: run under Slurm, "
            "Kubernetes or MPI or on a TPU slice, or give --coordinator, --processes and --process"
        )
    return Meeting(*found)


def _keep_stdout() -> None:
    """Sends to stderr what libraries write to the descriptor of stdout: gloo tells its ranks."""
    if sys.stdout is None:  # it was closed
        return
    sys.stdout.flush()
    sys.stdout = streams.writer("stdout", sys.stdout, os.dup(1))
    os.dup2(2, 1)


def _place(args: argparse.Namespace) -> tuple[str | None, int | None, int | None]:
    return args.coordinator, args.processes, args.process


def _described(error: BaseException) -> tuple[str, int]:
    """One line and an exit code; prints the traceback of a fault of ours."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, SystemExit):
        return "ended by SIGTERM", error.code
    if isinstance(error, BrokenPipeError):
        return "the reader of the output is gone", BROKEN_PIPE
    if line := refusal_of(error):
        return line, BAD_INPUT
    with contextlib.suppress(OSError, ValueError):  # nobody reads
        traceback.print_exception(error)
    if is_broken(error):
        return f"a collective broke, as where another process has died: {first_line(error)}", 1
    return f"{type(error).__name__}: {first_line(error)}", 1
