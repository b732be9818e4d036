"""What tests of real compilers share: marks for those that need one, and plans made once."""

from __future__ import annotations

import contextlib
import functools
import io
import json
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


@functools.cache
def run_plan(program: ModuleType, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit code and the plan of infer.plan or train.plan, compiled in its child process."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        code = program.main([*flags, "--json"])
    return code, json.loads(said.getvalue())
