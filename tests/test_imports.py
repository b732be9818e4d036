"""Imports go one way: every room of the house sees only the rooms below it."""

from __future__ import annotations

import ast
import graphlib
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moa_jax", "train", "infer", "configs")
BANNED = ("torch", "tensorflow", "tests")  # in PACKAGES: tests may use what it likes
# Programs of other software that run as processes; no row may import them.
PEERS = [f"infer.peers.{n}" for n in ("transformers_generate", "transformers_logits", "unpickle")]

# What each room may import, besides itself: the rooms below it. A room is a folder or module of
# moa_jax, named without the prefix, `moa_jax` its front door, or a folder of programs.
BASE = {"errors", "config"}
MODEL = BASE | {"model", "runtime"}
DRAFTERS = MODEL | {"files", "data", "drafters", "drafters.api"}
DECODE = MODEL | {"files", "drafters.api", "pretrained", "speculation", "measure", "decode"}
FRONT = DRAFTERS | DECODE | {"engine", "pairs", "moa_jax", "version"}
LIBRARY = FRONT | {"training", "split", "configs"}
CLI = {"infer.cli", "infer.cli.flags", "infer.server_process", "infer.http.auth"}
SERVER = BASE | {"version", "decode", "engine", "infer.http", "infer.http.auth"}
SERVERS = {"infer.http", "infer.openai", "infer.split_server", "infer.split_client"}
# What shows figures, also those of training; all else in infer/bench is for programs of infer.
SHOWN = {"infer.bench.tables", "infer.bench.drawing", "infer.bench.statistics"}
BENCH = LIBRARY - {"training"} | CLI | SERVERS | SHOWN | {"infer", "infer.peers"}
SPLIT_CLIENT = BASE | {"version", "speculation", "split", "infer.cli"}

TABLE: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "measure": set(),
    "config": {"errors"},
    "runtime": {"errors"},
    "configs": {"config"},
    "model": BASE | {"runtime"},
    "files": MODEL,
    "data": BASE | {"files"},
    "speculation": BASE | {"files", "measure"},
    "drafters.api": MODEL | {"data"},
    "drafters": DRAFTERS,
    "pretrained": DRAFTERS,
    "pairs": {"errors", "files", "pretrained"},
    "training": DRAFTERS,
    "decode": DECODE,  # never a drafter by name
    "engine": DECODE,
    "split": DECODE,
    "moa_jax": DRAFTERS | {"pretrained", "decode", "pairs", "version"},
    "infer.cli": BASE | {"version", "files", "infer.server_process"},
    "infer.cli.flags": FRONT | {"infer.cli"},
    "infer.server_process": {"errors"},
    "infer.http.auth": {"errors"},
    "infer.http": {"errors", "files", "infer.cli"},
    "infer.openai": SERVER | {"data"},
    "infer.split_server": SERVER | {"split"},
    "infer.split_client": SPLIT_CLIENT,
    "infer": BENCH,
    "infer.bench.tables": set(),
    "infer.bench.drawing": {"errors", "files"},
    "infer.bench.statistics": DECODE,
    "infer.bench": BENCH,
    "infer.bench.plan": DECODE | {"training"},
    "infer.split.network": {"infer.cli", "infer.bench"},
    "infer.generate": BENCH | {"infer.bench"},
    "infer.evaluate": BENCH | {"infer.bench"},
    "infer.check": BENCH | {"infer.bench"},
    "infer.plan": BENCH | {"infer.bench", "infer.bench.plan"},
    "infer.peers": {"infer.cli", "errors", "files"},
    "train": LIBRARY - {"split"} | CLI | SHOWN | {"infer.bench.plan"},
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
        yield f"{path}; give this module a row in the TABLE of tests/test_imports.py"
        return
    for name in imported_modules(source, package):
        top = name.partition(".")[0]
        if top in BANNED and not (top == "torch" and module in PEERS):
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


def test_nothing_imports_a_program_of_infer():
    """What programs share is a library: infer/cli, infer/http, infer/openai, moa_jax."""
    files = [(path, path.read_text(encoding="utf-8")) for path in (ROOT / "infer").glob("*.py")]
    programs = {f"infer.{path.stem}" for path, source in files if "\ndef main(" in source}
    found = [
        f"{path} imports {name}"
        for path, source in our_files()
        for name in imported_modules(source, module_and_package(path)[1])
        if name in programs or name.rpartition(".")[0] in programs
    ]
    assert len(programs) >= 7 and not found, "\n" + "\n".join(found)


@pytest.mark.parametrize(
    "path, source, count",
    [
        ("moa_jax/model/masks.py", "def f():\n    import moa_jax.decode.verify", 1),
        ("moa_jax/config/__init__.py", "from .. import model", 1),
        ("moa_jax/decode/verify.py", "from ..drafters.moa import make", 1),
        ("moa_jax/model/convert.py", "import torch.nn", 1),
        ("moa_jax/unheard_of.py", "", 1),
        ("moa_jax/decode/verify.py", "from ..drafters.api import Drafter\nfrom . import tree", 0),
        ("infer/peers/transformers_generate.py", "import torch\nimport transformers", 0),
    ],
)
def test_faults_are_found(path, source, count):
    assert len(list(faults(Path(path), source))) == count
