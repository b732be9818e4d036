"""A class name means one thing in the whole tree."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moa_jax", "infer", "train", "configs")


def test_a_class_name_is_defined_once():
    places: dict[str, list[str]] = defaultdict(list)
    for path in (path for package in PACKAGES for path in sorted((ROOT / package).rglob("*.py"))):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(f"{path.relative_to(ROOT)}:{node.lineno}")
    twice = [f"{name}: {', '.join(found)}" for name, found in places.items() if len(found) > 1]
    assert len(places) > 200 and not twice, "\n" + "\n".join(twice)
