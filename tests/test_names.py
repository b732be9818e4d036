"""A package that lists its files lists all of them."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moa_jax", "infer", "train", "configs")
LISTED = re.compile(r"\b(\w+)\.py\b")


def trees(*packages: str, name: str = "*.py") -> dict[Path, ast.Module]:
    paths = [path for package in packages for path in sorted((ROOT / package).rglob(name))]
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_a_package_that_lists_its_files_lists_all_of_them():
    """It may name files of other folders, too."""
    everywhere = {path.stem for path in trees(*PACKAGES, "tests")}
    found, lists = [], 0
    for path, tree in trees(*PACKAGES, "tests", name="__init__.py").items():
        listed = set(LISTED.findall(ast.get_docstring(tree) or ""))
        here = {file.stem for file in (ROOT / path).parent.glob("[!_]*.py")}
        lists += bool(listed)
        found += [f"{path} lists no {name}.py" for name in here - listed if listed]
        found += [f"{path} lists {name}.py, which is gone" for name in listed - everywhere]
    assert lists > 10 and not found, "\n" + "\n".join(found)
