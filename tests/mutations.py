"""Runs the breaks of `mutations.toml`, each of which a named selection of tests must catch.

    python -m tests.mutations             all breaks, in order
    python -m tests.mutations 3 17        these breaks, by their numbers
    python -m tests.mutations --list      numbers and sentences alone

Each selection runs once unbroken, so that a selection that fails or collects nothing catches
nothing. Breaks are applied one at a time to a copy of the tracked files of the working tree. Prints
one line per break and exits with 1 unless all are caught.
"""

from __future__ import annotations

import os
import resource
import shlex
import shutil
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
SECONDS = 300  # per selection; a break that makes tests hang is caught
BYTES = 10 * 1024**3  # that a test process may allocate; a break that makes tests grow is caught
FAILED, HANGS = 1, -1  # pytest's exit status for failed tests, and that of a run out of time


class Mutation(NamedTuple):
    """A break of one behaviour."""

    what: str  # the broken behaviour
    path: str  # of the file
    old: str  # occurs once in the file
    new: str
    tests: str  # arguments of pytest


MUTATIONS = [
    Mutation(**each)
    for each in tomllib.loads((ROOT / "tests/mutations.toml").read_text("utf-8"))["mutation"]
]


def copy_tree(folder: Path) -> Path:
    """Copies the tracked files of the working tree, next to a link to the recorded data."""
    tree, listed = folder / "tree", ["git", "-C", str(ROOT), "ls-files", "-z"]
    names = subprocess.run(listed, capture_output=True, text=True, check=True).stdout.split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, tree / name)
    (folder / "shared").symlink_to(ROOT.parent / "shared")
    return tree


def run_python(tree: Path, *arguments: str) -> int:
    """Returns the exit status of Python in the copied tree, or HANGS."""
    cache = os.environ.get("JAX_COMPILATION_CACHE_DIR") or str(ROOT / ".jax_cache")
    own = {"JAX_COMPILATION_CACHE_DIR": cache, "PYTHONDONTWRITEBYTECODE": "1"}
    command, quiet = [sys.executable, *arguments], subprocess.DEVNULL
    with subprocess.Popen(command, cwd=tree, env=os.environ | own, stdout=quiet, stderr=quiet) as p:
        try:
            return p.wait(SECONDS)
        except subprocess.TimeoutExpired:
            p.kill()
            return HANGS


def run_tests(tree: Path, tests: str) -> int:
    """Returns the exit status of pytest for a selection; slow tests may be selected."""
    options = ["-x", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", "-m", "not hub"]
    return run_python(tree, "-m", "pytest", *options, *shlex.split(tests))


def outcome(tree: Path, mutation: Mutation) -> str:
    """Applies a break, runs its selection and undoes the break."""
    path, module = tree / mutation.path, mutation.path.removesuffix(".py").replace("/", ".")
    source = path.read_text("utf-8")
    if source.count(mutation.old) != 1:
        return "does not apply"
    path.write_text(source.replace(mutation.old, mutation.new), "utf-8")
    try:
        if run_python(tree, "-c", f"import {module}"):
            return "does not apply: the module cannot be imported"
        status = run_tests(tree, mutation.tests)
    finally:
        path.write_text(source, "utf-8")
    if status == FAILED or status < 0:  # below 0: HANGS, or ended by a signal
        return "caught"
    return "SURVIVED" if status == 0 else f"does not apply: pytest exits with {status}"


def main(arguments: list[str]) -> int:
    numbered = list(enumerate(MUTATIONS, 1))
    if arguments == ["--list"]:
        print(*(f"{number:3} {mutation.what}" for number, mutation in numbered), sep="\n")
        return 0
    resource.setrlimit(resource.RLIMIT_DATA, (BYTES, BYTES))  # of all processes that follow
    chosen = [each for each in numbered if not arguments or str(each[0]) in arguments]
    caught = 0
    with tempfile.TemporaryDirectory(prefix="mutations-") as folder:
        tree, unbroken = copy_tree(Path(folder)), {}
        for number, mutation in chosen:
            if mutation.tests not in unbroken:
                unbroken[mutation.tests] = run_tests(tree, mutation.tests)
            if status := unbroken[mutation.tests]:
                found = f"does not apply: unbroken, pytest exits with {status}"
            else:
                found = outcome(tree, mutation)
            caught += found == "caught"
            print(f"{number:3} {found}: {mutation.what}", flush=True)
    print(f"{caught} of {len(chosen)} breaks are caught")
    return int(caught < len(chosen))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
