"""Imports go one way: every room of the house sees only the rooms below it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moa_jax", "train", "infer", "configs")
BANNED = ("torch", "tensorflow", "tests")  # in PACKAGES: tests may use what it likes
# Programs of other software that infer.bench runs as processes; no row may import them.
PEERS = {
    "infer.peers.transformers_generate": ("torch",),
    "infer.peers.unpickle": ("torch",),
}

BASE = {"errors", "config", "batch", "axes", "chunks"}
BLOCKS = BASE | {"masks", "layers", "cache", "precision", "branch"}
MODELS = BLOCKS | {"target", "convert", "hf_config", "folders", "placement", "sharding"}
DRAFTERS = MODELS | {"losses", "drafters", "drafters.api"}
DECODING = MODELS | {"drafters.api", "spec"}  # never a drafter by name
SIDE = {"processes", "data", "tokenizer", "metrics", "optim", "training", "checkpoint", "version"}
LOADING = {"parts", "pretrained", "session", "vocabulary", "exactness"}
LIBRARY = DRAFTERS | DECODING | SIDE | LOADING | {"distillation", "serve", "bench"}
SHARED = {"infer.cli", "infer.config_file", "infer.plot"}  # by all programs

# What each room may import, besides itself. A room is a module or package of moa_jax, named
# without the prefix, `moa_jax` its front door, or a package of programs.
TABLE: dict[str, set[str]] = {
    "version": set(),
    "errors": set(),
    "config": {"errors"},
    "batch": BASE,
    "axes": BASE,
    "data": BASE,
    "tokenizer": BASE,
    "metrics": BASE,
    "optim": BASE,
    "training": BASE | {"optim"},
    "fingerprint": {"config"},
    "checkpoint": BASE | {"training", "fingerprint", "processes"},  # the state that it stores
    "masks": BLOCKS,
    "precision": BLOCKS,
    "branch": BASE,
    "chunks": set(),
    "processes": {"errors"},
    "layers": BLOCKS,
    "cache": BLOCKS,
    "target": MODELS,
    "convert": BLOCKS,
    "sharding": {"errors", "config", "convert"},
    "hf_config": MODELS,
    "folders": MODELS,
    "placement": MODELS,
    "losses": BLOCKS,
    "drafters.api": MODELS,
    "drafters": DRAFTERS,
    "parts": {"errors", "convert", "folders"},
    "pretrained": DRAFTERS | {"parts", "tokenizer"},
    "vocabulary": {"errors", "folders", "pretrained"},
    "spec": DECODING,
    "machines": {"errors", "metrics"},
    "hlo": set(),
    "lowering": DECODING,
    "session": DRAFTERS | DECODING | {"pretrained", "tokenizer", "vocabulary"},
    "exactness": DECODING | {"pretrained", "session"},
    "distillation": LIBRARY - {"serve", "bench"},
    "flops": BASE | {"distillation", "drafters"},
    "planning": LIBRARY - {"serve", "bench"} | {"flops", "hlo", "machines"},
    "serve": DECODING | LOADING | {"tokenizer"},
    "bench": LIBRARY - {"distillation", "serve"},
    "moa_jax": LIBRARY,
    "configs": {"config"},
    "infer.cli": {"errors", "version"},
    "infer.config_file": {"errors"},
    "infer.plot": {"errors"},
    "infer": LIBRARY | {"moa_jax", "configs", *SHARED},
    "train": LIBRARY
    | {"fingerprint", "flops", "planning", "machines", "moa_jax", "configs", *SHARED},
    "infer.peers.unpickle": {"infer.cli", "errors", "folders"},
    "infer.peers.transformers_generate": set(),
}


def room_of(module: str) -> str | None:
    """The row of TABLE with the longest matching name; None for a module that has no row."""
    if module == "moa_jax":
        return module
    parts = module.removeprefix("moa_jax.").split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in TABLE), None)


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Dotted names of all that a file of `package` imports, wherever in the file it stands."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_and_package(path: Path) -> tuple[str, str]:
    """Dotted names of a file, whose path starts at the root, and of the package it is in."""
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return module, module if path.name == "__init__.py" else module.rpartition(".")[0]


def faults(path: Path, source: str) -> Iterator[str]:
    """One line for each import of a file that TABLE does not allow."""
    module, package = module_and_package(path)
    room = room_of(module)
    if room is None:
        yield f"{path}: give this module a row in the TABLE of tests/test_imports.py"
        return
    for name in imported_modules(source, package):
        top = name.partition(".")[0]
        if top in BANNED and top not in PEERS.get(module, ()):
            yield f"{path} imports {name}: {top} is for tests only"
        elif top in PACKAGES:
            seen = room_of(name) or "moa_jax"
            if seen != room and seen not in TABLE[room]:
                yield f"{path} imports {name}: {room} may import {sorted(TABLE[room])}"


def our_files() -> Iterator[tuple[Path, str]]:
    for package in PACKAGES:
        for path in sorted((ROOT / package).rglob("*.py")):
            yield path.relative_to(ROOT), path.read_text(encoding="utf-8")


def test_imports_follow_the_table():
    files = list(our_files())
    found = [fault for path, source in files for fault in faults(path, source)]
    assert files
    assert not found, "\n" + "\n".join(found)


def test_rooms_import_each_other_one_way():
    rooms: dict[str, set[str]] = {}
    for path, source in our_files():
        module, package = module_and_package(path)
        names = (n for n in imported_modules(source, package) if n.partition(".")[0] in PACKAGES)
        seen = {room_of(name) or "moa_jax" for name in names}
        room = room_of(module) or module
        rooms.setdefault(room, set()).update(seen - {room})
    graphlib.TopologicalSorter(rooms).prepare()  # a CycleError names the rooms of the circle


def one_fault(path: str, source: str) -> bool:
    return len(list(faults(Path(path), source))) == 1


def test_faults_are_found():
    assert one_fault("moa_jax/masks.py", "from moa_jax.target import forward")
    assert one_fault("moa_jax/masks.py", "from moa_jax import target")
    assert one_fault("moa_jax/masks.py", "def f():\n    import moa_jax.spec.verify")
    assert one_fault("moa_jax/config.py", "from . import batch")
    assert one_fault("moa_jax/spec/verify.py", "from ..drafters.moa import make")
    assert one_fault("moa_jax/spec/verify.py", "from moa_jax.drafters import DRAFTERS")
    assert one_fault("moa_jax/serve/engine.py", "from moa_jax.drafters import moa")
    assert one_fault("moa_jax/data/chat.py", "from moa_jax.target import forward")
    assert one_fault("moa_jax/pretrained.py", "from moa_jax import generate")
    assert one_fault("moa_jax/pretrained.py", "from train.settings import load_config")
    assert one_fault("moa_jax/convert.py", "import torch.nn")
    assert one_fault("train/distill.py", "from infer.generate import main")
    assert one_fault("infer/config_file.py", "from moa_jax.config import DistillConfig")
    assert one_fault("infer/bench.py", "from infer.peers import transformers_generate")
    assert one_fault("infer/bench.py", "import torch")
    assert one_fault("infer/peers/transformers_generate.py", "import tensorflow")
    assert one_fault("infer/peers/transformers_generate.py", "from moa_jax import Session")
    assert one_fault("configs/tiny.py", "from moa_jax.optim import optimizer")
    assert one_fault("moa_jax/unheard_of.py", "")


def test_what_the_table_allows_is_no_fault():
    allowed = [
        ("moa_jax/spec/verify.py", "from ..drafters.api import Drafter\nfrom . import tree"),
        ("moa_jax/spec/step.py", "from moa_jax.drafters import api\nimport numpy as np"),
        ("moa_jax/drafters/__init__.py", "from . import moa\nfrom moa_jax.drafters.api import X"),
        ("moa_jax/__init__.py", "from .pretrained import load_target"),
        ("train/distill.py", "from infer.cli import run\nfrom moa_jax import generate"),
        ("train/settings.py", "from infer.config_file import read_config"),
        ("configs/tiny.py", "from moa_jax.config import RunConfig\nimport tensorflow_datasets"),
        ("infer/peers/transformers_generate.py", "import torch\nimport transformers"),
    ]
    for path, source in allowed:
        assert not list(faults(Path(path), source)), path
