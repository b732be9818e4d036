"""Parts that every program shares: parser, one-line errors and progress on stderr."""

from __future__ import annotations

import argparse
import contextlib
import errno
import importlib.util
import logging
import os
import re
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar, NoReturn, Self

from tqdm import tqdm

from infer.cli import compile_cache, streams
from moa_jax.config.checks import is_utf8
from moa_jax.errors import InputError, first_line, is_temporary
from moa_jax.version import __version__

BAD_INPUT = 2
TRY_AGAIN = 75  # EX_TEMPFAIL of sysexits.h: launchers start the program again
INTERRUPTED, BROKEN_PIPE = 130, 141  # 128 + signal, as in shells
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# Refusals that only the system's owner can lift, whatever named the path.
REFUSED = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG)
SECONDS_BETWEEN_LINES = 10.0
LOWER_MEMORY = (
    "lower --slots, --batch, --cache-rows, --max-tokens or --max-new-tokens, or give --weights int8"
)
XLA_BRIDGE = "jax._src.xla_bridge"  # the logger of the module that starts backends

Main = Callable[[list[str] | None], int | None]


class Parser(argparse.ArgumentParser):
    """An argument parser with `--version`, defaults in its help and errors of one line."""

    def __init__(self, prog: str, description: str | None = None) -> None:
        super().__init__(prog, description=description, formatter_class=_Help, allow_abbrev=False)
        version = f"moa-jax {__version__}"
        self.add_argument("--version", action="version", version=version)
        self._finish: list[Callable[[argparse.Namespace], None]] = []

    def finish_with(self, action: Callable[[argparse.Namespace], None]) -> None:
        """Registers an action on the parsed flags, for example to expand one flag into others."""
        self._finish.append(action)

    def parse_args(self, *arguments: Any, **named: Any) -> argparse.Namespace:
        """Parses the flags and runs the registered actions, which may raise InputError."""
        found = super().parse_args(*arguments, **named)
        for action in self._finish:
            action(found)
        return found

    def print_help(self, file: Any = None) -> None:
        """Writes the help; raises OSError for a full device, unlike argparse's own method."""
        (file or sys.stdout).write(self.format_help())

    def error(self, message: str) -> NoReturn:
        """Exits with code 2 after one line, without the usage."""
        line = " ".join(message.split())
        self.exit(BAD_INPUT, f"{self.prog}: {line}; see --help\n")


class _Help(argparse.ArgumentDefaultsHelpFormatter, argparse.RawDescriptionHelpFormatter):
    """Keeps the line breaks of a description; shows defaults other than None, False and empty."""

    def _get_help_string(self, action: argparse.Action) -> str | None:
        value = action.default
        if isinstance(value, list | tuple) and value:  # as a user types it
            return f"{action.help} (default: {','.join(map(str, value))})"
        silent = value is None or value is False or value in ("", [], ())
        return action.help if silent else super()._get_help_string(action)


def names(text: str) -> list[str]:
    """The names of a comma-separated flag."""
    return [name for name in text.split(",") if name]


def utf8(text: str) -> str:
    """Type of a flag with text for a tokenizer or for clients: valid UTF-8."""
    if not is_utf8(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not valid UTF-8; give text in UTF-8")
    return text


def positive(text: str) -> int:
    """Type of a flag that takes a whole number of at least 1."""
    if not text.strip().isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def whole(text: str) -> int:
    """Type of a flag that takes a whole number of at least 0."""
    if not text.strip().isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 0")
    return int(text)


def above_zero(text: str) -> float:
    """Type of a flag that takes a finite number above 0."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value


def local_path(text: str) -> Path:
    """Type of a flag with a path to write; rejects URLs, which would become local folders."""
    if "://" in text:
        raise argparse.ArgumentTypeError(
            f"{text} is a URL, and files are written to a file system only; mount the store and "
            "give a path in it"
        )
    return Path(text).expanduser()


# Device files of NVIDIA (WSL: dxg) and TPU drivers in /dev, and the jax plugins for such devices.
DEVICES = ("nvidia*", "dxg", "accel*", "vfio/[0-9]*")
PLUGINS = ("jax_cuda13_plugin", "jax_cuda12_plugin", "libtpu")


def keep_to_cpu_without_devices() -> None:
    """Restricts jax to the CPU if accelerator plugins are installed without a device.

    `make env PLAN=1` installs such plugins: jax would print long errors about missing devices.
    """
    if os.environ.get("JAX_PLATFORMS") or any(any(Path("/dev").glob(kind)) for kind in DEVICES):
        return
    if any(importlib.util.find_spec(plugin) for plugin in PLUGINS):
        import jax  # deferred: parsing flags needs no jax

        jax.config.update("jax_platforms", "cpu")


def keep_to_32_bits() -> None:
    """Turns JAX_ENABLE_X64 off, so that the variable does not change results."""
    if "JAX_ENABLE_X64" in os.environ:
        os.environ["JAX_ENABLE_X64"] = "0"  # for child processes
    if "jax" in sys.modules:  # jax has read its variables already
        sys.modules["jax"].config.update("jax_enable_x64", False)


def need(program: str, *packages: str) -> None:
    """Exits with code 2 and one line if a package of the extra `serve` is not installed."""
    for package in packages:
        if importlib.util.find_spec(package) is None:
            line = f"the package {package} is missing; pip install 'moa-jax[serve]'"
            print(f"{program}: {line}", file=sys.stderr)
            sys.exit(BAD_INPUT)


def run(main: Main, arguments: list[str] | None = None) -> NoReturn:
    """Runs a program and exits with its code, or after one line with 2 or 75.

    2 is for bad input, which includes a path of the command line that the system rejects, too
    little memory and a backend of JAX_PLATFORMS that jax cannot start; 75 is for what may pass
    (`is_temporary`): a full disk, a held lock, a network that is away, and without JAX_PLATFORMS a
    chip that does not start. Ctrl-C exits with 130 and a closed pipe
    (`| head`) with 141, both silently. Any other exception is a bug and keeps its traceback,
    including an OSError about another path. jax's compilation cache is persistent
    (`compile_cache`).
    """
    streams.prepare()
    compile_cache.use()
    keep_to_cpu_without_devices()
    keep_to_32_bits()
    logging.getLogger(XLA_BRIDGE).addFilter(_without_traceback)
    try:
        code = _run_main(main, arguments)
    except KeyboardInterrupt:
        code = INTERRUPTED
    except BrokenPipeError:
        code = BROKEN_PIPE
    except Exception as error:
        if (line := refusal_of(error, arguments)) is None:
            raise
        spec = sys.modules[main.__module__].__spec__
        name = spec.name if spec else Path(sys.argv[0]).stem  # infer.info after `-m infer.info`
        with contextlib.suppress(BrokenPipeError):
            print(f"{name}: {line}", file=sys.stderr)
        code = code_of(error)
    streams.finish()
    sys.exit(code)


def _run_main(main: Main, arguments: list[str] | None) -> object:
    """Runs `main` and flushes stdout; returns the exit code, including that of a SystemExit."""
    try:
        code = main(arguments) or 0
    except SystemExit as end:
        code = end.code
    sys.stdout.flush()
    return code


def code_of(error: BaseException) -> int:
    """The exit code for an error that `refusal_of` prints."""
    # A chip that another process holds, or that is about to be replaced.
    is_chip = "JAX_PLATFORMS" not in os.environ and _backend_refusal(error) is not None
    return TRY_AGAIN if is_chip or is_temporary(error) else BAD_INPUT


def refusal_of(error: BaseException, arguments: list[str] | None = None) -> str | None:
    """A one-line message for bad input and for errors of the system or jax; None for a bug.

    `arguments` is the command line, by default that of the process.
    """
    if isinstance(error, InputError):
        return " ".join(str(error).split())
    if line := _memory_refusal(error) or _backend_refusal(error) or _variable_refusal(error):
        return line
    if not isinstance(error, OSError):
        return None
    named = isinstance(error.filename, str | bytes | os.PathLike)
    path = os.fsdecode(error.filename) if named else None
    if error.errno in DISK_FULL:
        where = "" if path is None else f"{path}: "
        return f"{where}{error.strerror}; make room, or choose another path"
    arguments = sys.argv[1:] if arguments is None else arguments
    known = error.errno in REFUSED or path in streams.NAMES
    if path is None or not (known or _is_given(path, arguments)):
        return None
    reason = str(error.strerror)
    return f"cannot open {path}: {reason[:1].lower()}{reason[1:]}; choose a path that can be used"


def _is_given(path: str, arguments: list[str]) -> bool:
    """Whether a path is in the command line, below or above such a path, or a file next to one.

    The name of a file next to a given path, for example a lock, begins with that path's stem.
    """
    found = Path(os.path.abspath(path))
    texts = {part for text in arguments for part in (text, *re.split("[=,]", text)) if part}
    for text in texts:
        given = Path(os.path.abspath(os.path.expanduser(text)))
        is_path = "/" in text or bool(given.suffix)  # a word of a prompt is not
        for each in (found, *found.parents):
            stem = each.name.lstrip(".").startswith(given.stem)
            beside = is_path and stem and each.parent == given.parent
            if beside or each == given:
                return True
        if found in given.parents:
            return True
    return False


def _memory_refusal(error: BaseException) -> str | None:
    """The message for exhausted memory of the host or of a jax device, or None."""
    is_jax = type(error).__name__ == "JaxRuntimeError" and "RESOURCE_EXHAUSTED" in str(error)
    if not isinstance(error, MemoryError) and not is_jax:
        return None
    return f"out of memory: {first_line(error)}: {LOWER_MEMORY}"


def _backend_refusal(error: BaseException) -> str | None:
    """The message for a backend that jax cannot start, or None; some such errors have no text."""
    starts = error.__traceback__ and traceback.extract_tb(error.__traceback__)[-1]
    own = isinstance(error, AssertionError) and Path(starts.filename).stem == "xla_bridge"
    if not own and not str(error).startswith("Unable to initialize backend"):
        return None
    reason = (
        first_line(error).partition(" (set JAX_PLATFORMS")[0].rstrip(".")
        if str(error)
        else "no such device"
    )
    if (platforms := os.environ.get("JAX_PLATFORMS")) is None:
        return f"{reason}; try again, or set JAX_PLATFORMS to cpu"
    return f"JAX_PLATFORMS={platforms}: {reason}; unset JAX_PLATFORMS, or set it to cpu"


def _variable_refusal(error: BaseException) -> str | None:
    """The message for JAX_DISABLE_JIT, with which jax does not compile, or None."""
    if isinstance(error, ValueError) and str(error).startswith("Disable jit is not supported"):
        return "JAX_DISABLE_JIT is on, and all programs are compiled; unset it"
    return None


def _without_traceback(record: logging.LogRecord) -> bool:
    """Log filter: replaces the traceback of a plugin that fails to load by its first line."""
    if record.exc_info and record.exc_info[1] is not None:
        record.msg = f"{record.getMessage()}: {first_line(record.exc_info[1])}"
        record.args, record.exc_info = (), None
    return True


class _Shown:
    """State of stderr: when the newest progress was shown, and the stages that are not over."""

    at_s = 0.0  # by `time.monotonic`
    stages: ClassVar[list[tuple[str, float]]] = []  # label and start, outermost first


class Progress:
    """Progress of long work; this class is silent, its subclasses write to stderr."""

    def step(self, count: int = 1) -> None:
        """Count units of work as done."""

    def note(self, figures: Mapping[str, object]) -> None:
        """Show figures, such as a loss, next to the count."""

    def line(self, text: str) -> None:
        """Print a separate line without disturbing the bar."""

    def close(self) -> None:
        """Show the final count."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


class _Bar(Progress):
    """A progress bar, for terminals."""

    def __init__(self, total: int | None, label: str, initial: int) -> None:
        self._bar = tqdm(
            total=total, desc=label, initial=initial, file=sys.stderr, dynamic_ncols=True
        )

    def step(self, count: int = 1) -> None:
        _Shown.at_s = time.monotonic()
        self._bar.update(count)

    def note(self, figures: Mapping[str, object]) -> None:
        self._bar.set_postfix_str(", ".join(_pairs(figures)), refresh=False)

    def line(self, text: str) -> None:
        self._bar.write(text, file=sys.stderr)

    def close(self) -> None:
        self._bar.close()


class _Lines(Progress):
    """A plain line every ten seconds and one at the end, for logs and pipes."""

    def __init__(self, total: int | None, label: str, initial: int) -> None:
        self._total, self._label = total, label
        self._initial = self._done = initial
        self._began = self._shown = time.monotonic()
        self._figures: Mapping[str, object] = {}

    def step(self, count: int = 1) -> None:
        self._done += count
        now = _Shown.at_s = time.monotonic()
        if now - self._shown >= SECONDS_BETWEEN_LINES:
            self._show()

    def note(self, figures: Mapping[str, object]) -> None:
        self._figures = figures

    def line(self, text: str) -> None:
        print(text, file=sys.stderr, flush=True)

    def close(self) -> None:
        self._show()

    def _show(self) -> None:
        self._shown = _Shown.at_s = time.monotonic()
        count = f"{self._done}/{self._total}" if self._total else f"{self._done}"
        elapsed, done = self._shown - self._began, self._done - self._initial
        parts = [f"{self._label} {count}", f"{elapsed:.0f} s"]
        if done and elapsed:
            parts.append(f"{done / elapsed:.3g}/s")
            if self._total and self._done < self._total:
                parts.append(f"{duration((self._total - self._done) * elapsed / done)} left")
        self.line(", ".join(parts + _pairs(self._figures)))


def progress(total: int | None, label: str, *, initial: int = 0, quiet: bool = False) -> Progress:
    """Progress of `total` units of which `initial` are done: a bar on a terminal, else lines."""
    if quiet:
        return Progress()
    return (_Bar if sys.stderr.isatty() else _Lines)(total, label, initial)


@contextlib.contextmanager
def stage(label: str, *, quiet: bool = False) -> Iterator[None]:
    """Prints `label` and its elapsed time after every ten seconds of the block without a line.

    A stage may contain others, whose labels are printed while they last: silence counts from the
    start of the outermost stage.
    """
    if quiet:
        yield
        return
    began, ended = time.monotonic(), threading.Event()
    _Shown.stages.append((label, began))
    watch = threading.Thread(target=_print_stages, args=(began, ended), daemon=True)
    if is_outermost := len(_Shown.stages) == 1:
        watch.start()
    try:
        yield
    finally:
        _Shown.stages.pop()
        if is_outermost:
            ended.set()
            watch.join()


def _print_stages(began: float, ended: threading.Event) -> None:
    """Prints the innermost stage after every ten seconds since `began` without a line."""
    silent_s = 0.0
    while not ended.wait(SECONDS_BETWEEN_LINES - silent_s):
        now = time.monotonic()
        silent_s = now - max(began, _Shown.at_s)
        if silent_s >= SECONDS_BETWEEN_LINES and (stages := _Shown.stages[-1:]):
            ((label, since),) = stages
            _print_between_bars(f"{label}, {duration(now - since)}")
            _Shown.at_s, silent_s = now, 0.0


def _print_between_bars(text: str) -> None:
    """Prints a line on stderr from any thread; a stream that is closed or full ends no work."""
    with contextlib.suppress(OSError, ValueError):
        if sys.stderr.isatty():
            tqdm.write(text, file=sys.stderr)
        else:
            print(text, file=sys.stderr, flush=True)


def duration(seconds: float) -> str:
    """A time as `90 s`, or as `2.5 h` from an hour on."""
    return f"{seconds:.0f} s" if seconds < 3600 else f"{seconds / 3600:.1f} h"


def _pairs(figures: Mapping[str, object]) -> list[str]:
    shown = {k: f"{v:.4g}" if isinstance(v, float) else str(v) for k, v in figures.items()}
    return [f"{name} {value}" for name, value in shown.items()]
