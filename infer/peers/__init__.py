"""Other software on the same weights and prompts, each in a separate process.

A peer is a program in this folder that no module imports: the peer reads a JSON document from
stdin, writes one to stdout, and may use packages that the project itself does not require. A peer
may run in another Python, whose environment has these packages.

transformers_generate.py  greedy decoding by transformers, plain and with prompt lookup
transformers_logits.py    logits of transformers, the reference of infer.check
vllm_generate.py          greedy decoding by vLLM, plain and with an EAGLE-3 drafter
unpickle.py               rewrites pickled weights as safetensors; a separate command
"""

from __future__ import annotations

import importlib.util
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

from moa_jax.errors import InputError

# The packages that each peer requires; accelerate reads GGUF files.
PEERS = {"transformers": ("torch", "transformers", "accelerate"), "vllm": ("vllm",)}
INSTALL = {
    "transformers": "pip install '.[test]'",
    "vllm": "pip install it into another environment, and name its Python with --peer-python",
}


def check_peer(name: str, flag: str = "--compare", python: str | None = None) -> None:
    """Raises InputError for an unknown peer, and for one whose packages this Python lacks.

    The packages of another `python` are not checked.
    """
    if name not in PEERS:
        raise InputError(f"{flag} {name} is no peer; choose from {', '.join(PEERS)}")
    for package in () if python else PEERS[name]:
        if importlib.util.find_spec(package) is None:
            raise InputError(f"{flag} {name}: {package} is missing; {INSTALL[name]}")
    if python and shutil.which(python) is None:
        raise InputError(f"--peer-python {python}: no such program; name a Python")


def run_peer(
    name: str,
    task: dict[str, Any],
    flag: str = "--compare",
    work: str = "generate",
    python: str | None = None,
) -> dict[str, Any]:
    """Runs `{name}_{work}.py` on a task; raises InputError with its last line if the run fails."""
    program = Path(__file__).with_name(f"{name}_{work}.py")
    done = subprocess.run(
        [python or sys.executable, str(program)],
        input=json.dumps(task),
        capture_output=True,
        text=True,
        errors="replace",  # output of libraries, in any encoding
    )
    try:
        if done.returncode == 0:
            return json.loads(done.stdout)
    except ValueError:  # another program than a Python
        pass
    line = (done.stderr.strip().splitlines() or [f"exit {done.returncode}, no document"])[-1]
    raise InputError(f"{flag} {name}: {line}; see that {name} can load this model")
