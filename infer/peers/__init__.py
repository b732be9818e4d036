"""Other software on the same weights and prompts, each in a process of its own.

A peer is a program beside this file that nothing imports: it reads a JSON document from stdin,
writes one to stdout, and may use what the project itself does without.

transformers_generate.py  greedy decoding by transformers, plain and with prompt lookup
transformers_logits.py    logits of transformers, with which infer.check compares
unpickle.py               rewrites pickled weights as safetensors; a command of its own
"""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from moa_jax.errors import InputError

# And the packages that each needs; accelerate reads GGUF files.
PEERS = {"transformers": ("torch", "transformers", "accelerate")}


def check_peer(name: str, flag: str = "--compare") -> None:
    """Raise InputError for a peer that is not known or lacks a package."""
    if name not in PEERS:
        raise InputError(f"{flag} {name}: known are {', '.join(PEERS)}")
    for package in PEERS[name]:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{flag} {name}: {package} is missing: pip install '.[test]'")


def run_peer(
    name: str, task: dict[str, Any], flag: str = "--compare", work: str = "generate"
) -> dict[str, Any]:
    """The answer of `{name}_{work}.py` to a task; InputError with its last line if it fails."""
    program = Path(__file__).with_name(f"{name}_{work}.py")
    done = subprocess.run(
        [sys.executable, str(program)],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        errors="replace",  # of libraries, in any encoding
    )
    if done.returncode:
        line = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise InputError(f"{flag} {name}: it failed: {line}")
    return json.loads(done.stdout)
