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
PEERS = {
    "infer.peers.transformers_generate": ("torch",),
    "infer.peers.transformers_logits": ("torch",),
    "infer.peers.unpickle": ("torch",),
}

# What each room may import, besides itself: the rooms below it. A room is a folder or module of
# moa_jax, named without the prefix, `moa_jax` its front door, or a folder of programs.
BASE = {"errors", "config"}
MODEL = BASE | {"model", "runtime"}
DRAFTERS = MODEL | {"files", "data", "drafters", "drafters.api"}
LOADER = DRAFTERS | {"pretrained"}
DECODE = LOADER - {"drafters", "data"} | {
    "drafters.api",
    "speculation",
    "measure",
    "decode",
}  # never a drafter by name
LIBRARY = LOADER | DECODE | {"engine", "pairs", "training", "split", "moa_jax", "version"}
PAIR = {"infer.cli.flags.pair", "infer.cli.flags.auto", "infer.cli.flags.vocabulary"}
SHARED = PAIR | {
    "infer.cli.program",
    "infer.cli.streams",
    "infer.cli.compile_cache",
    "infer.cli.flags.config_file",
    "infer.cli.flags.cluster",
    "infer.cli.flags.mesh",
    "infer.cli.flags.sampling",
    "infer.cli.flags",
    "infer.cli.documents",
    "infer.server_process",
    "infer.http.auth",
}
SERVER = {"errors", "version", "config", "decode", "engine", "infer.http", "infer.http.auth"}
SERVERS = {"infer.http", "infer.openai", "infer.split_server", "infer.split_client"}
# What shows figures, also those of training; all else in infer/bench is for programs of infer.
SHOWN = {"infer.bench.tables", "infer.bench.drawing", "infer.bench.statistics"}
BENCH = LIBRARY - {"training"} | SHARED | SERVERS | SHOWN | {"configs", "infer"}

TABLE: dict[str, set[str]] = {
    "errors": set(),
    "version": set(),
    "config": {"errors"},
    "runtime": {"errors"},
    "model": BASE | {"runtime"},
    "files": MODEL,
    "data": BASE | {"files"},
    "drafters.api": MODEL | {"data"},
    "drafters": MODEL | {"files", "data", "drafters.api"},
    "pretrained": DRAFTERS,
    "pairs": {"errors", "files", "pretrained"},
    "training": DRAFTERS,
    "decode": DECODE,
    "engine": DECODE | {"engine"},
    "split": DECODE,
    "measure": set(),
    "speculation": BASE | {"files", "measure"},
    "moa_jax": LOADER | {"decode", "pairs", "version"},
    "configs": {"config"},
    "infer.cli.compile_cache": {"config", "files"},
    "infer.cli.program": {
        "errors",
        "config",
        "version",
        "infer.cli.compile_cache",
        "infer.cli.streams",
    },
    "infer.cli.streams": set(),
    "infer.cli.flags.config_file": {"errors"},
    "infer.cli.flags.cluster": {
        "errors",
        "version",
        "files",
        "runtime",
        "infer.cli.program",
        "infer.cli.streams",
    },
    "infer.cli.flags.mesh": {"errors", "model", "infer.cli.program"},
    "infer.cli.flags.sampling": DECODE | {"infer.cli.program"},
    "infer.cli.flags.auto": DECODE,
    "infer.cli.flags.vocabulary": DECODE | {"infer.cli.flags.auto"},
    "infer.cli.flags.pair": LIBRARY - {"training", "split"}
    | PAIR
    | {"infer.cli.program", "infer.cli.flags.mesh"},
    "infer.cli.flags": LIBRARY - {"training", "split"} | PAIR | SHARED,
    "infer.cli.documents": {"errors", "files", "infer.cli.program", "infer.server_process"},
    "infer.server_process": {"errors"},
    "infer.http.auth": {"errors"},
    "infer.http": {"errors", "files", "infer.cli.program", "infer.cli.streams"},
    "infer.openai": SERVER | {"data"},
    "infer.split_server": SERVER | {"split"},
    "infer.split_client": {
        "errors",
        "version",
        "config",
        "speculation",
        "split",
        "infer.cli.program",
    },
    "infer": LIBRARY - {"training"} | SHARED | SERVERS | {"configs"},
    "infer.bench.tables": set(),
    "infer.bench.drawing": {"errors", "files"},
    "infer.bench.statistics": DECODE,
    "infer.bench": BENCH,
    "infer.split.network": {"infer.cli.program", "infer.bench"},
    "infer.generate": BENCH | {"infer.bench"},
    "infer.evaluate": BENCH | {"infer.bench"},
    "infer.check": BENCH | {"infer.bench"},
    "infer.bench.plan": DECODE | {"training"},
    "infer.plan": BENCH | {"infer.bench", "infer.bench.plan"},
    "train": LIBRARY - {"split"} | SHARED | SHOWN | {"infer.bench.plan", "configs"},
    "infer.peers.unpickle": {"infer.cli.program", "errors", "files"},
    "infer.peers.transformers_generate": set(),
    "infer.peers.transformers_logits": set(),
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
    "path, source",
    [
        ("moa_jax/model/masks.py", "from moa_jax.files.model_folder import read"),
        ("moa_jax/model/masks.py", "def f():\n    import moa_jax.decode.verify"),
        ("moa_jax/config/__init__.py", "from .. import model"),
        ("moa_jax/decode/verify.py", "from ..drafters.moa import make"),
        ("moa_jax/decode/verify.py", "from moa_jax.drafters import DRAFTERS"),
        ("moa_jax/split/server_target.py", "from infer.bench import tables"),
        ("moa_jax/pretrained.py", "from moa_jax import generate"),
        ("moa_jax/model/convert.py", "import torch.nn"),
        ("train/distill.py", "from infer.generate import main"),
        ("infer/openai/app.py", "from infer.split_server.app import SplitServer"),
        ("infer/peers/transformers_generate.py", "import tensorflow"),
        ("configs/tiny.py", "from moa_jax.training.optim import optimizer"),
        ("moa_jax/unheard_of.py", ""),
    ],
)
def test_faults_are_found(path, source):
    assert len(list(faults(Path(path), source))) == 1


@pytest.mark.parametrize(
    "path, source",
    [
        ("moa_jax/decode/verify.py", "from ..drafters.api import Drafter\nfrom . import tree"),
        ("moa_jax/drafters/__init__.py", "from . import moa\nfrom moa_jax.drafters.api import X"),
        ("train/distill.py", "from infer.cli.program import run\nfrom moa_jax import generate"),
        ("configs/tiny.py", "from moa_jax.config import RunConfig\nimport tensorflow_datasets"),
        ("infer/peers/transformers_generate.py", "import torch\nimport transformers"),
    ],
)
def test_what_the_table_allows_is_no_fault(path, source):
    assert not list(faults(Path(path), source))
