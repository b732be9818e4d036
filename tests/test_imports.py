"""Imports have one direction: every package sees only the packages below it."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moa_jax", "train", "infer", "configs")
BANNED = ("torch", "tensorflow", "tests")  # in PACKAGES: tests may import anything
# Modules that may import torch, which is not a requirement.
PEERS = ("transformers_generate", "transformers_logits", "vllm_generate")
WITH_TORCH = ["moa_jax.files.pickles", *(f"infer.peers.{name}" for name in PEERS)]

# A layer is a folder or module of moa_jax, named without the prefix, `moa_jax` itself, or a folder
# of programs. A layer imports only from earlier ones in this order.
ORDER = """
errors version measure config runtime model files data speculation drafters.api drafters pretrained
pairs training decode grammar engine split moa_jax configs infer.server_process infer.http.auth
infer.cli infer.cli.flags infer.http infer.openai infer.split_server infer.split_client
infer.bench.tables infer.bench.drawing infer.bench.statistics infer.bench.suites infer.bench.plan
infer.peers infer.bench infer.split infer train
""".split()
SHOWN = {f"infer.bench.{name}" for name in "tables drawing statistics suites plan".split()}
SERVER = set("errors version config decode grammar engine infer.http infer.http.auth".split())

# Layers that import no more than these.
ONLY: dict[str, set[str]] = {
    "configs": {"config"},
    "speculation": {"errors", "version", "config", "files", "measure"},
    "training": set(ORDER[: ORDER.index("pretrained")]),
    "infer.server_process": {"errors"},
    "infer.http.auth": {"errors"},
    "infer.cli": {"errors", "config", "version", "files", "infer.server_process"},
    "infer.http": {"errors", "files", "infer.cli"},
    "infer.openai": SERVER | {"data"},
    "infer.split_server": SERVER | {"split"},
    "infer.split_client": {"errors", "version", "config", "speculation", "split", "infer.cli"},
    "infer.peers": {"errors", "files", "infer.cli"},
}
# Layers that import none of these: decoding uses the interface of drafters, never one by name.
NEVER: dict[str, set[str]] = {
    **dict.fromkeys(("decode", "grammar", "engine"), {"data", "drafters", "pairs", "training"}),
    "split": {"data", "drafters", "pairs", "training", "engine"},
    "moa_jax": {"training", "engine", "split"},
    "infer.bench": {"training"},
    "infer": {"training"},
    "train": {layer for layer in ORDER if layer.startswith("infer.bench")} - SHOWN
    | {"infer", "split"},
}


def may_import(layer: str, other: str) -> bool:
    if layer in ONLY:
        return other in ONLY[layer]
    return ORDER.index(other) < ORDER.index(layer) and other not in NEVER.get(layer, ())


def layer_of(module: str) -> str | None:
    """Returns the layer with the longest matching name, or None for a module without a layer."""
    if module == "moa_jax":
        return module
    parts = module.removeprefix("moa_jax.").split(".")
    names = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    return next((name for name in names if name in ORDER), None)


def imported_modules(source: str, package: str) -> Iterator[str]:
    """Yields dotted names of all that a file of `package` imports, at any place in the file."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            above = package.split(".")[: 1 - node.level or None] if node.level else []
            base = ".".join([*above, *filter(None, [node.module])])
            yield from (f"{base}.{alias.name}" for alias in node.names)


def module_and_package(path: Path) -> tuple[str, str]:
    """Returns dotted names of a file, with a path from the root, and of its package."""
    module = ".".join(path.with_suffix("").parts).removesuffix(".__init__")
    return module, module if path.name == "__init__.py" else module.rpartition(".")[0]


def faults(path: Path, source: str) -> Iterator[str]:
    """Yields one line for each import of a file that its layer may not have."""
    module, package = module_and_package(path)
    layer = layer_of(module)
    if layer is None:
        yield f"{path}; give this module a place in the ORDER of tests/test_imports.py"
        return
    for name in imported_modules(source, package):
        top = name.partition(".")[0]
        if top in BANNED and not (top == "torch" and module in WITH_TORCH):
            yield f"{path} imports {name}: {top} is for tests only"
        elif top in PACKAGES:
            seen = layer_of(name) or "moa_jax"
            if seen != layer and not may_import(layer, seen):
                yield f"{path} imports {name}: {layer} may not import {seen}"


def test_imports_follow_the_order():
    files = [path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))]
    found = [f for path in files for f in faults(path.relative_to(ROOT), path.read_text("utf-8"))]
    assert files and not found, "\n" + "\n".join(found)


def test_faults_are_found():
    for path, source, count in (
        ("moa_jax/model/masks.py", "def f():\n    import moa_jax.decode.verify", 1),
        ("moa_jax/config/__init__.py", "from .. import model", 1),
        ("moa_jax/decode/verify.py", "from ..drafters.moa import make", 1),
        ("moa_jax/model/convert.py", "import torch.nn", 1),
        ("moa_jax/unheard_of.py", "", 1),
        ("moa_jax/decode/verify.py", "from ..drafters.api import Drafter\nfrom . import tree", 0),
        ("infer/peers/transformers_generate.py", "import torch\nimport transformers", 0),
    ):
        assert len(list(faults(Path(path), source))) == count, path
