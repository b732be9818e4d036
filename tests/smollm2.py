"""Where SmolLM2-135M-Instruct lies: tests of real weights read it, and skip where it is not."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from moa_jax.errors import InputError
from moa_jax.pairs import locate


def find_gguf() -> Path:
    """The GGUF file that $MOA_SMOLLM2 names, else that of the pair `smollm2`, fetched once.

    Skips the test with one line where it cannot be fetched.
    """
    if named := os.environ.get("MOA_SMOLLM2"):
        return Path(named)
    try:
        return locate("smollm2")[0]
    except InputError as error:
        pytest.skip(str(error))
