"""Ahead-of-time compilation in a child process, because compilers may crash.

    parent: run(module, request, ...) --> child: python -m module, which ends with serve(answer)

The request is a pickle on stdin, the answer a line of JSON on stdout.
"""

from __future__ import annotations

import io
import json
import logging
import os
import pickle
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax

from infer.bench.plan import machines
from infer.bench.plan.machines import Machine
from moa_jax.errors import InputError, first_line


class CompilerCrash(RuntimeError):
    """The compiler crashed without a verdict; the message is one line."""


def run(module: str, request: Any, machine: Machine, advice: str) -> dict[str, Any]:
    """Runs `module` in a child process that may compile for `machine`; returns its answer.

    Raises InputError without the machine's compiler and for a request that the child refuses.
    Raises CompilerCrash, with `advice`, if the compiler crashes.
    """
    machines.check_compiler(machine)
    ran = subprocess.run(
        [sys.executable, "-P", "-m", module],  # -P: ignores modules in the current folder
        input=pickle.dumps(request),
        env=os.environ | machines.ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
    )
    if ran.returncode < 0 or ran.returncode > 128:
        raise CompilerCrash(f"{machine.name}: {_crash(ran.returncode, advice)}")
    if ran.returncode:
        raise RuntimeError(ran.stderr.decode(errors="replace"))
    answer = json.loads(ran.stdout.splitlines()[-1])
    if "crash" in answer:
        raise CompilerCrash(f"{machine.name}: compiler error: {answer['crash']}: {advice}")
    if "input_error" in answer:
        raise InputError(answer["input_error"])
    return answer


def serve(answer: Callable[..., dict[str, Any]]) -> None:
    """Answers the request on stdin, in the child; `notices` of the answer hold the log."""
    request, log = pickle.load(sys.stdin.buffer), io.StringIO()
    logging.getLogger("moa_jax").addHandler(logging.StreamHandler(log))
    try:
        found = answer(*request) | {"notices": log.getvalue().splitlines()}
    except InputError as error:
        found = {"input_error": str(error)}
    except jax.errors.JaxRuntimeError as error:
        found = {"crash": first_line(error)[:500]}
    print(json.dumps(found))


def _crash(code: int, advice: str) -> str:
    number = -code if code < 0 else code - 128
    name = {each.value: each.name for each in signal.Signals}.get(number, f"code {code}")
    if number == signal.SIGKILL:
        return f"the compiler was killed ({name}): this machine may be out of memory"
    return f"the compiler crashed ({name}), no verdict: {advice}"
