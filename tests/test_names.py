"""Names: a package lists all of its files, and identifiers are the words of the field."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

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


# Words of an earlier private language, and classes that have the field's names today.
WORDS = frozenset(
    "seat seats shelf heard hear hears nobody whoever likeliest luck rehearse tell tells told "
    "telling mend mends".split()
)
EARLIER_CLASSES = frozenset(
    "Text Task News Ticket Full Closed Seats Live Report Flight Heard Kind Shelf LeadingShelf Name "
    "Recipe Size Maker Making Readings Reading Prefixes Kept Load Totals Group Held RunCall Make "
    "Turns Order Chunk Advance Chooser Terms Position Trials Promised TrackRecord Pace "
    "TypicalSeconds Costs Place Behind Law Said Setup Limits Verdict Guide Tapped Taps Flat "
    "FedLayer Small Sight Intervals Pass States Room Ready Background Lines Signs Ending Wanted "
    "MostTokens Answering Part Scored Refusal DraftHalf Slots Served Gone Lost Denied Busy Watch "
    "Job Contender Interview".split()
)

# An earlier class in backticks, alone or in a dotted name, or after "raises".
NAMED = re.compile(r"(?:`(?:\w+\.)*|[Rr]aises )\b(\w+)\b")


def defined_names(tree: ast.Module) -> Iterator[str]:
    """Names that a file defines: classes, functions, arguments, variables and attributes."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            yield node.name
        elif isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.attr
        elif isinstance(node, ast.alias) and node.asname:
            yield node.asname


def private_names(tree: ast.Module) -> set[str]:
    """The defined names with a word of WORDS, and the classes of EARLIER_CLASSES."""
    apart = lambda name: re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", name).lower().split("_")
    found = {name for name in defined_names(tree) if WORDS & set(apart(name))}
    classes = {node.name for node in ast.walk(tree) if isinstance(node, ast.ClassDef)}
    return found | classes & EARLIER_CLASSES


def test_names_are_those_of_the_field():
    files = trees(*PACKAGES)
    found = {str(path): names for path, tree in files.items() if (names := private_names(tree))}
    assert len(files) > 150 and not found, found


@pytest.mark.parametrize(
    "source",
    [
        "class Slots: ...",
        "def take_seat(): ...",
        "likeliest_BN = 1",
        "def f(luck): ...",
        "a.told = 1",
    ],
)
def test_private_names_are_found(source):
    assert private_names(ast.parse(source))


def test_comments_and_pages_use_the_names_of_the_field():
    """Of the classes that were renamed; so a sentence with the old name is found."""
    paths = [*trees(*PACKAGES), *(path.relative_to(ROOT) for path in ROOT.rglob("*.md"))]
    paths = [path for path in paths if ".venv" not in str(path)]
    found = {}
    for path in paths:
        named = set(NAMED.findall((ROOT / path).read_text(encoding="utf-8"))) & EARLIER_CLASSES
        found |= {str(path): named} if named else {}
    assert not found, found


def test_names_of_other_libraries_may_be_used():
    source = "place = file.tell()\nlimits = httpx.Limits()\nclass NameTooLong: ..."
    assert not private_names(ast.parse(source))
