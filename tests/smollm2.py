"""Where SmolLM2-135M-Instruct lies: tests of real weights read it, and skip where it is not."""

from __future__ import annotations

import os
from pathlib import Path

NO_SMOLLM2 = "no SmolLM2: set MOA_SMOLLM2 to its .gguf file"


def find_gguf() -> Path | None:
    """The GGUF file that $MOA_SMOLLM2 names, if it is there."""
    path = Path(os.environ.get("MOA_SMOLLM2", ""))
    return path if path.is_file() else None
