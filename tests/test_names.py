"""Names: a package lists all of its files, and identifiers are the words of the field."""

from __future__ import annotations

import ast
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = ("moa_jax", "infer", "train", "configs")
LISTED = re.compile(r"\b(\w+)\.py\b")
# Words of an earlier private language.
WORDS = frozenset(
    "seat seats shelf heard hear hears nobody whoever likeliest luck rehearse tell tells told "
    "telling mend mends".split()
)


def trees(*packages: str, name: str = "*.py") -> dict[Path, ast.Module]:
    paths = [path for package in packages for path in sorted((ROOT / package).rglob(name))]
    return {path.relative_to(ROOT): ast.parse(path.read_text(encoding="utf-8")) for path in paths}


def test_a_package_that_lists_its_files_lists_all_of_them():
    """It may name files of other folders, too."""
    everywhere = {f.stem for each in (*PACKAGES, "tests") for f in (ROOT / each).rglob("*.py")}
    found, lists = [], 0
    for path, tree in trees(*PACKAGES, "tests", name="__init__.py").items():
        listed = set(LISTED.findall(ast.get_docstring(tree) or ""))
        here = {file.stem for file in (ROOT / path).parent.glob("[!_]*.py")}
        lists += bool(listed)
        found += [f"{path} lists no {name}.py" for name in here - listed if listed]
        found += [f"{path} lists {name}.py, which is gone" for name in listed - everywhere]
    assert lists > 10 and not found, "\n" + "\n".join(found)


def private_names(tree: ast.Module) -> set[str]:
    """Returns names with a word of WORDS that a file defines or uses, without attributes."""
    fields = [getattr(node, "name", getattr(node, "arg", None)) for node in ast.walk(tree)]
    fields += [node.id for node in ast.walk(tree) if isinstance(node, ast.Name)]
    apart = lambda name: re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    return {name for name in {*fields} if isinstance(name, str) and WORDS & set(apart(name))}


def test_names_are_those_of_the_field():
    files = trees(*PACKAGES)
    found = {str(path): names for path, tree in files.items() if (names := private_names(tree))}
    assert len(files) > 150 and not found, found
    assert private_names(ast.parse("def take_seat(luck): a = 1")) == {"take_seat", "luck"}
