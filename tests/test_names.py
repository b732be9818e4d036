"""What names promise: a class name means one thing, and a package lists all its files."""

from __future__ import annotations

import ast
import re
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moa_jax", "infer", "train", "configs")
LISTED = re.compile(r"\b(\w+)\.py\b")


def trees(*packages: str, name: str = "*.py") -> dict[Path, ast.Module]:
    paths = [path for package in packages for path in sorted((ROOT / package).rglob(name))]
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def classes(*packages: str) -> dict[str, list[str]]:
    """The places of each class name."""
    places: dict[str, list[str]] = defaultdict(list)
    for path, tree in trees(*packages).items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path}:{node.lineno}")
    return places


def test_a_class_name_is_defined_once():
    places = classes(*PACKAGES, "tests")
    twice = [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]
    assert len(places) > 300 and not twice, "\n" + "\n".join(twice)


def test_no_other_type_is_called_like_a_class():
    places = classes(*PACKAGES)
    found = [
        f"{path}:{node.lineno}: {name.id} is a class in {places[name.id][0]}"
        for path, tree in trees(*PACKAGES).items()
        for node in tree.body
        for name in (node.targets if isinstance(node, ast.Assign) else ())
        if isinstance(name, ast.Name) and name.id in places
    ]
    assert not found, "\n" + "\n".join(found)


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
