"""Compiles grammars in another process first, since a grammar may crash or block llguidance.

    server       limits, tokenizer ------> trial process
                 grammar ----------------> compiles, and makes the first mask
                 "" or an error <---------  and the grammar, with GBNF as Lark

A long chain of references overflows the stack, and a long run of optional characters compiles for
minutes; llguidance's own limits catch neither. The server compiles a grammar that has passed.

This file is also the program of the trial process, which imports llguidance alone.
"""

from __future__ import annotations

import contextlib
import json
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from typing import IO, Any

STACK = 1 << 20  # bytes; a thread of the server has more
MOST_MEMORY = 4 << 30  # bytes
LARK_OR_GBNF = "lark_or_gbnf"  # a key of llguidance's format, which only the trial process reads
START_SECONDS = 120  # for a tokenizer of 250k tokens


class TrialFailed(Exception):
    """The process does not start, or has ended; the message is the reason."""

    def __init__(self, reason: str, status: int | None = None) -> None:
        super().__init__(reason)
        self.status = status


class Trial:
    """The trial process, which is started when it is needed; one thread may use it."""

    def __init__(self, settings: dict[str, Any]) -> None:
        """`settings` are those of `_compiler`."""
        self._settings, self._process = settings, None

    def result_of(self, text: str, seconds: int) -> tuple[str, str]:
        """Why a grammar does not compile, or an empty string; and the grammar for llguidance.

        Raises TrialFailed if the process does not start or is killed, for example because the
        system lacks memory: the grammar may be valid then.
        """
        if self._process is not None and self._process.poll() is not None:  # it died while idle
            self._forget()
        if self._process is None:
            self._start()
        try:
            error, text = self._exchange(text, seconds)
            return error, text
        except TrialFailed as error:
            if error.status == -signal.SIGKILL:
                raise
            if error.status == -signal.SIGPROF:
                return f"it does not compile within {seconds} s", ""
            return f"llguidance crashes while it compiles the grammar ({error})", ""

    def _start(self) -> None:
        command = [sys.executable, "-P", __file__]  # this folder is not for the process to import
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        try:
            log = tempfile.TemporaryFile()
            with contextlib.ExitStack() as files:
                files.callback(log.close)
                self._process = subprocess.Popen(command, stderr=log, text=True, **pipes)
                files.pop_all()
        except OSError as error:
            raise TrialFailed(str(error)) from error
        self._log, self._close = log, weakref.finalize(self, _end, self._process, log)
        self._exchange(self._settings, START_SECONDS)

    def _exchange(self, message: Any, seconds: int) -> Any:
        """The reply to a message; raises TrialFailed if the process ends instead."""
        process, line = self._process, ""
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(f"{json.dumps([message, seconds])}\n")
            process.stdin.flush()
            line = process.stdout.readline()
        if line:
            return json.loads(line)
        process.wait()
        self._log.seek(0)
        lines = self._log.read().decode(errors="replace").strip().splitlines()
        self._forget()
        reason = lines[-1] if lines else f"exit status {process.returncode}"
        raise TrialFailed(reason, process.returncode)

    def _forget(self) -> None:
        """Closes the files of a process that has ended."""
        self._close()
        self._process = None


def _end(process: subprocess.Popen[str], log: IO[bytes]) -> None:
    """Ends a process, and closes its pipes and its log."""
    process.kill()
    process.communicate()
    log.close()


def _compiler(tokenizer: str, vocab_size: int, eos_ids: list[int], limits: dict[str, Any]) -> Any:
    """A function that compiles a grammar and returns the error, or an empty string."""
    from llguidance import LLMatcher, LLParserLimits, LLTokenizer

    made = LLTokenizer(tokenizer, n_vocab=vocab_size, eos_token=eos_ids)

    def error_of(text: str) -> str:
        matcher = LLMatcher(made, text, log_level=0, limits=LLParserLimits(**limits))
        if not matcher.is_error():
            matcher.compute_bitmask()
        return matcher.get_error()

    return error_of


def _for_llguidance(text: str) -> str:
    """A grammar with GBNF as Lark; raises exceptions of any kind for faulty GBNF."""
    from llguidance.gbnf_to_lark import any_to_lark

    if not text.startswith("{") or f'"{LARK_OR_GBNF}"' not in text:
        return text
    found = json.loads(text)
    for part in found["grammars"]:
        if LARK_OR_GBNF in part:
            part["lark_grammar"] = any_to_lark(part.pop(LARK_OR_GBNF))
    return json.dumps(found)


def _answer_all() -> None:
    """Reads settings and then grammars; SIGPROF ends the process at the limit of CPU time."""
    error_of: Any = None
    for line in sys.stdin:
        message, seconds = json.loads(line)
        signal.setitimer(signal.ITIMER_PROF, seconds)
        if error_of is None:
            error_of, reply = _compiler(**message), ("", "")
        else:
            try:
                text = _for_llguidance(message)
                reply = error_of(text), text
            except Exception as error:
                reply = f"not GBNF: {error}", ""
        signal.setitimer(signal.ITIMER_PROF, 0)
        print(json.dumps(reply), flush=True)


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):  # sent to the server's group: it may drain
        signal.signal(number, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_AS, (MOST_MEMORY, MOST_MEMORY))
    threading.stack_size(STACK)
    thread = threading.Thread(target=_answer_all)
    thread.start()
    thread.join()
