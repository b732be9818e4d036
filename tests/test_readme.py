"""The pages are correct: their code, commands, paths and links."""

import dataclasses
import functools
import importlib
import io
import re
import runpy
import types
from contextlib import redirect_stdout

import pytest

from infer.info import ROOT
from moa_jax import config
from moa_jax.config import DistillConfig
from moa_jax.drafters import DRAFTERS
from tests import drafting

calm_target = drafting.calm_target  # a fixture
README = ROOT / "README.md"
PAGES = [README, *(ROOT / name for name in ("CONTRIBUTING.md", "BENCHMARKS.md"))]
PAGES += sorted(
    page for top in ("moa_jax", "train", "infer", "reports") for page in (ROOT / top).rglob("*.md")
)
NAME = lambda file: str(file.relative_to(ROOT))
page = pytest.mark.parametrize("page", PAGES, ids=NAME)

FENCED = re.compile(r"```python\n(.*?)```", re.DOTALL)
LINK = re.compile(r"\]\(([^)#\s]+)?(?:#([\w-]+))?\)")
PATH = re.compile(r"\b(?:moa_jax|train|infer|configs|tests|reports|\.ci)/[\w./-]*\w")
COMMAND = re.compile(r"python -m ((?:train|infer)(?:\.\w+)+)( --split| --serve)?([^`\n#]*)")
FLAG = re.compile(r"(?<![\w-])--([a-z][\w-]*(?:\.\w+)*)")


# ---- pages ------------------------------------------------------------------------------------


@functools.cache
def flags_of(program: str, *first: str) -> frozenset[str]:
    """Returns the flags in a program's help, after those that choose between two command lines."""
    module = importlib.import_module(program)
    if not hasattr(module, "main"):  # a folder that runs as a program
        module = importlib.import_module(f"{program}.__main__")
    with redirect_stdout(io.StringIO()) as shown, pytest.raises(SystemExit):
        module.main([*first, "--help"])
    return frozenset(FLAG.findall(shown.getvalue()))


def is_setting(dotted: str) -> bool:
    """Returns whether a dotted flag names a field of DistillConfig or of one of its drafters."""
    name, _, rest = dotted.partition(".")
    if name == "drafter":
        kinds = [kind.config for kind in DRAFTERS.values()]
        return any(rest in kind.__dataclass_fields__ for kind in kinds)
    found = next((f for f in dataclasses.fields(DistillConfig) if f.name == name), None)
    part = getattr(config, str(found.type), None) if found else None
    return found is not None and (not rest or rest in part.__dataclass_fields__)


@page
def test_commands_have_their_flags(page):
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    text = re.sub(r"python -m\s*\n\s*", "python -m ", text)  # a command with a line break
    for program, kind, rest in COMMAND.findall(text):
        known = flags_of(program, *kind.split())
        for flag in FLAG.findall(rest):
            assert flag in known or "config" in known and is_setting(flag), f"{program} --{flag}"


@page
def test_links_lead_somewhere(page):
    for path, anchor in LINK.findall(page.read_text(encoding="utf-8")):
        if path.startswith(("https://", "http://")):
            continue
        found = page.parent / path if path else page
        assert found.exists(), path
        if anchor:
            heads = re.findall(r"^#+ (.+)$", found.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in [re.sub(r"[^\w -]", "", h).lower().replace(" ", "-") for h in heads]


@pytest.mark.parametrize("page", [*PAGES, *sorted((ROOT / ".ci").iterdir())], ids=NAME)
def test_paths_exist(page):
    text = FENCED.sub("", page.read_text(encoding="utf-8"))  # code names files that it creates
    for path in PATH.findall(text):
        assert (ROOT / path).exists(), path


def test_the_tree_names_existing_files():
    """The tree lists all folders and modules directly below moa_jax."""
    text = README.read_text(encoding="utf-8")
    tree = text[text.index("    moa_jax/  ") : text.index("    train/  ")]
    below = {p for p in (ROOT / "moa_jax").iterdir() if not p.name.startswith("__")}
    names = {path.name + "/" * path.is_dir() for path in below}
    assert set(re.findall(r"^ {6}(\S+)", tree, re.MULTILINE)) == names


@pytest.mark.slow
def test_the_readmes_python_runs(monkeypatch, tmp_path, capsys):
    monkeypatch.chdir(ROOT)
    (code,) = FENCED.findall(README.read_text(encoding="utf-8"))
    path = tmp_path / "code.py"
    path.write_text(code)
    results = runpy.run_path(str(path))["results"]
    for result, most in zip(results, [24, 16], strict=True):
        assert 1 < len(result.token_ids) <= most
    assert str(results[0].token_ids) in capsys.readouterr().out


# ---- the drafter in 60 lines ------------------------------------------------------------------


@pytest.fixture
def last_token(monkeypatch):
    """Registers the page's drafter and returns its config; checks its 60 lines."""
    text = (ROOT / "moa_jax" / "drafters" / "README.md").read_text(encoding="utf-8")
    assert "`moa_jax/config/__init__.py` exports" in text  # the next lines do this export
    sizes, code, _ = FENCED.findall(text)
    names = {"dataclasses": dataclasses}
    exec(sizes, names)
    monkeypatch.setattr(config, "LastTokenConfig", names["LastTokenConfig"], raising=False)
    assert len([line for line in code.splitlines()[1:] if line.strip()]) <= 60
    module = types.ModuleType("last_token")
    exec(code, module.__dict__)
    monkeypatch.setitem(DRAFTERS, "last-token", module.KIND)
    return names["LastTokenConfig"](24)


@pytest.mark.slow
def test_the_drafter_in_60_lines_drafts(last_token, calm_target):
    drafter = drafting.untrained(calm_target, "last-token", last_token)
    drafting.assert_drafting_equals_training(calm_target, drafter)
    drafting.assert_changes_nothing(calm_target, drafter)
