"""What a machine and its variables do to programs: one line, or the same answer."""

from __future__ import annotations

import re

import pytest

PROMPT = ("--prompt", "Hello", "--max-new-tokens", 4, "--mode", "plain")
SIZES = r"need \S+ GiB of memory, and \w+ has \S+ GiB; lower .*"


def test_a_backend_that_is_not_there_is_one_line(start):
    line = start("infer.generate", *PROMPT, JAX_PLATFORMS="nonsense").refusal()
    assert "JAX_PLATFORMS=nonsense" in line and "set it to cpu" in line


def test_a_variable_that_turns_compiling_off_is_named(start):
    line = start("infer.generate", *PROMPT, JAX_DISABLE_JIT="1", JAX_PLATFORMS="cpu").refusal()
    assert "JAX_DISABLE_JIT is on" in line


@pytest.mark.parametrize(
    "flags",
    [
        ("infer.generate", "--prompt", "Hello", "--cache-rows", 10**22),
        ("infer.serve", "--port", 0, "--slots", 100_000),
        ("infer.server", "--port", 0, "--slots", 100_000),
    ],
)
def test_more_memory_than_there_is_is_refused_before_it_is_taken(flags, run):
    line = run(*flags).refusal()
    assert re.search(SIZES, line) and flags[-2] in line
