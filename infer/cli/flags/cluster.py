"""Flags of runs of several processes, and the context that starts and ends them together."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from collections.abc import Iterator, Mapping

import jax

from infer.cli import streams
from infer.cli.program import BROKEN_PIPE, INTERRUPTED, code_of, positive, refusal_of
from moa_jax.errors import InputError, TemporaryError, first_line
from moa_jax.runtime.multihost import ProcessGroup, check_same, ending_together, is_first, join
from moa_jax.runtime.rendezvous import ProcessSpec
from moa_jax.version import __version__


def add_flags(parser: argparse.ArgumentParser) -> None:
    """Adds --distributed, --coordinator, --processes, --process and --join-timeout."""
    group = parser.add_argument_group("processes")
    group.add_argument(
        "--distributed",
        action="store_true",
        help="run as one of several processes, detected from Slurm, Kubernetes, MPI or a TPU slice",
    )
    group.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    group.add_argument("--processes", type=positive, metavar="N", help="number of processes")
    group.add_argument("--process", type=int, metavar="I", help="id of this process, from 0")
    group.add_argument(
        "--join-timeout",
        type=positive,
        default=300,
        metavar="SECONDS",
        help="time for all processes to connect; default: %(default)s",
    )


def is_asked(args: argparse.Namespace) -> bool:
    """Whether the flags describe several processes."""
    return args.distributed or _spec(args) != (None, None, None)


@contextlib.contextmanager
def joined(args: argparse.Namespace, program: str) -> Iterator[ProcessGroup]:
    """Connects to the other processes, if any, and ends with them if one fails.

    Must be entered before jax starts a backend. Raises InputError for flags that contradict each
    other or are incomplete, and TemporaryError for processes that do not connect.
    """
    stderr = sys.stderr  # `first_speaks` may redirect `sys.stderr` later

    def say(line: str) -> None:
        stderr.write(f"{program}: {line}\n")
        stderr.flush()  # libraries write to the descriptor, too

    if not is_asked(args):
        yield ProcessGroup(say)
        return
    _check(args)
    try:
        spec = _detected(args.join_timeout) if args.distributed else _spec(args)
        group = join(spec, args.join_timeout, say)
    except InputError:
        raise
    except (RuntimeError, ValueError) as error:
        raise TemporaryError(
            f"jax.distributed failed to start: {first_line(error)}; check that all processes run"
        ) from error
    _keep_stdout()
    with ending_together(group, _described):
        yield group


@contextlib.contextmanager
def first_speaks() -> Iterator[None]:
    """Silences stdout and stderr of all processes but the first."""
    with contextlib.ExitStack() as stack:
        if not is_first():
            nowhere = stack.enter_context(open(os.devnull, "w", encoding="utf-8"))
            stack.enter_context(contextlib.redirect_stdout(nowhere))
            stack.enter_context(contextlib.redirect_stderr(nowhere))
        yield


def check_alike(args: argparse.Namespace, files: Mapping[str, str]) -> None:
    """Raises InputError if flags, versions or `files`, hashes by name, differ from process 0's.

    Does not start a backend.
    """
    flags = {f"--{name.replace('_', '-')}": value for name, value in vars(args).items()}
    del flags["--process"]
    check_same(flags | files | {"version": __version__, "jax": jax.__version__}, "start")


def _spec(args: argparse.Namespace) -> ProcessSpec:
    return ProcessSpec(args.coordinator, args.processes, args.process)


def _check(args: argparse.Namespace) -> None:
    if args.distributed and _spec(args) != (None, None, None):
        raise InputError("--distributed finds all by itself; leave out --coordinator and the rest")
    if args.distributed:
        return
    if None in _spec(args):
        raise InputError("--coordinator, --processes and --process go together; give all three")
    if not 0 <= args.process < args.processes:
        raise InputError(f"--process {args.process}; choose from 0 to {args.processes - 1}")
    host, _, port = args.coordinator.rpartition(":")
    if not (host and port.isdecimal() and 0 < int(port) < 1 << 16):
        raise InputError(f"--coordinator {args.coordinator}; write HOST:PORT, as in 10.0.0.1:8476")


def _detected(timeout_s: int) -> ProcessSpec:
    """The arguments of `jax.distributed.initialize` as jax detects them under a launcher.

    `jax.distributed.initialize` detects the arguments itself, but aborts if a process is missing,
    and jax has no public function that returns them.
    """
    from jax._src.clusters import ClusterEnv  # private, for want of a public function

    address = os.environ.get("JAX_COORDINATOR_ADDRESS")  # overrides the launcher's address
    spec = ClusterEnv.auto_detect_unset_distributed_params(
        address, None, None, None, None, timeout_s
    )[:3]
    if None in spec:
        raise InputError(
            "--distributed: no launcher says where the other processes are; run under Slurm, "
            "Kubernetes or MPI or on a TPU slice, or give --coordinator, --processes and --process"
        )
    return ProcessSpec(*spec)


def _keep_stdout() -> None:
    """Redirects descriptor 1 to stderr, since gloo prints its ranks, but not sys.stdout."""
    if sys.stdout is None:  # closed by the caller
        return
    sys.stdout.flush()
    sys.stdout = streams.writer("stdout", sys.stdout, os.dup(1))
    os.dup2(2, 1)


def _described(error: BaseException) -> tuple[str, int]:
    """Line and exit code of an exception; prints the traceback of an unexpected one."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", INTERRUPTED
    if isinstance(error, SystemExit):
        return "ended by SIGTERM", error.code
    if isinstance(error, BrokenPipeError):
        return "stdout was closed", BROKEN_PIPE
    if line := refusal_of(error):
        return line, code_of(error)
    with contextlib.suppress(OSError, ValueError):  # stderr was closed
        traceback.print_exception(error)
    return f"{type(error).__name__}: {first_line(error)}", 1
