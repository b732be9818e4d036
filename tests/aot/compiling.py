"""Marks for tests that need a real compiler, and plans that several tests share."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from infer.bench.plan.machines import has_compiler

needs = {
    compiler: pytest.mark.skipif(
        not has_compiler(compiler), reason=f"no compiler for {name} here: make env PLAN=1"
    )
    for compiler, name in (("tpu", "TPUs"), ("cuda", "NVIDIA GPUs"))
}


ROOT = Path(__file__).resolve().parents[2]


def _started(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    given = dict(cwd=ROOT, capture_output=True, text=True, timeout=600)
    variables = os.environ | {"JAX_PLATFORMS": "cpu"} | environment
    return subprocess.run([sys.executable, *arguments], env=variables, **given)


@functools.cache
def run_plan(program: ModuleType, *flags: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and the plan of infer.plan or train.plan, started as by a user."""
    as_users = {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    ran = _started("-m", program.__name__, *flags, "--json", **as_users)
    assert ran.returncode in (program.FITS, program.DOES_NOT_FIT), ran.stderr[-2000:]
    return ran.returncode, json.loads(ran.stdout)


@functools.cache
def in_child(function: Callable[..., Any], *arguments: Any) -> Any:
    """Returns the result of a function, run in its own process, because compilers may crash."""
    module, name = function.__module__, function.__name__
    code = f"import json; from {module} import {name}; print(json.dumps({name}(*{arguments!r})))"
    ran = _started("-c", code)
    assert ran.returncode == 0, f"compiler ended with {ran.returncode}: {ran.stderr[-2000:]}"
    return json.loads(ran.stdout.splitlines()[-1])
