"""Writers keep files of others, links and inputs, and a truncated write is never read as whole."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from infer.cli.flags.pair import DEMO
from infer.info import ROOT
from moa_jax.files import model_folder
from moa_jax.pretrained import stored_dtype

OTHERS = {".git/HEAD": "ref: main", "README.md": "by hand", "notes/a/plan.txt": "long"}


def others_in(folder: Path) -> Path:
    """Writes files of others into a folder, as in a clone of a repository."""
    for name, text in OTHERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def assert_others_stay(folder: Path) -> None:
    for name, text in OTHERS.items():
        assert (folder / name).read_text() == text
    assert [path.name for path in folder.glob(".*")] == [".git"]


def content_of(folder: Path) -> dict[str, bytes]:
    """Returns all files below a folder."""
    return {str(f.relative_to(folder)): f.read_bytes() for f in folder.rglob("*") if f.is_file()}


def as_float16(pair: Path, output: Path) -> list[object]:
    """Returns a command that writes the pair's target in another dtype."""
    flags = ["--target", pair / "target", "--dtype", "float16", "--output", output]
    return ["infer.convert", *flags, "--overwrite"]


@pytest.fixture
def clone(pair) -> Path:
    """Returns a drafter of the pair in a clone of a repository."""
    return others_in(shutil.copytree(pair / "draft", pair.parent / "clone"))


# ---- convert ------------------------------------------------------------------------------


def test_files_of_others_stay(run, pair, clone, tmp_path):
    """Outputs are a folder of an earlier model, a relative link, and a new clone."""
    link, new = tmp_path / "link", others_in(tmp_path / "new")
    link.symlink_to(clone.name)
    for output in (link, new):
        assert run(*as_float16(pair, output)).code == 0
        assert_others_stay(output)
        assert stored_dtype(output) == "float16"
    assert os.readlink(link) == clone.name
    drafter = ["--draft", pair / "draft", "--target-layer-inference", "0"]
    assert run(*as_float16(pair, clone), *drafter).code == 0
    assert_others_stay(clone)
    assert stored_dtype(clone) == "float16"
    (new / "config.json").unlink()  # this program did not write these weights
    assert "is not a model folder" in run(*as_float16(pair, new)).refusal()


def test_an_input_is_never_overwritten(run, pair, tmp_path):
    before = content_of(pair)
    (tmp_path / "link").symlink_to(pair / "target")
    (tmp_path / "round").symlink_to(pair)
    model, draft = ["--target", pair / "target"], ["--draft", pair / "draft"]
    for flags in (
        [*model, "--dtype", "float16", "--output", tmp_path / "link"],
        [*model, *draft, "--to", "vllm", "--output", tmp_path / "round" / "draft"],
        [*model, *draft, "--for-client", "--output", pair],
    ):
        assert "choose another output" in run("infer.convert", *flags, "--overwrite").refusal()
        assert content_of(pair) == before and (tmp_path / "link").is_symlink()


# ---- a write that is cut ------------------------------------------------------------------


class Failure(BaseException):
    """Simulates an error at the move of a file."""


@pytest.mark.parametrize("failing", [0, 2, 4])
def test_a_write_that_fails_leaves_the_earlier_model(run, pair, clone, monkeypatch, failing):
    before, count, rename = content_of(clone), iter(range(1000)), Path.rename

    def move(self: Path, to: Path) -> Path:
        if next(count) == failing:
            raise Failure
        return rename(self, to)

    monkeypatch.setattr(Path, "rename", move)
    with pytest.raises(Failure):
        run(*as_float16(pair, clone))
    assert content_of(clone) == before


KILL = """if True:
    import itertools, os, sys
    from pathlib import Path
    from infer.convert import main
    failing, count, rename = int(sys.argv.pop(1)), itertools.count(), Path.rename
    def move(self, to):
        return os.kill(os.getpid(), 9) if next(count) == failing else rename(self, to)
    Path.rename = move
    main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_folder_that_is_refused(run, pair, clone):
    command = [str(each) for each in as_float16(pair, clone)[1:]]
    for moves in (1, 3, 4):
        done = subprocess.run([sys.executable, "-c", KILL, str(moves), *command], cwd=ROOT)
        assert done.returncode == -9
        line = run("infer.convert", "--target", clone, "--output", clone.parent / "x").refusal()
        assert str(clone) in line
        assert (clone / "README.md").read_text() == OTHERS["README.md"]
    assert run("infer.convert", *command).code == 0
    assert run("infer.convert", "--target", clone, "--output", clone.parent / "x").code == 0
    assert_others_stay(clone)


# ---- earlier files ------------------------------------------------------------------------


def test_files_of_an_earlier_model_are_not_mixed_in(run, pair, tmp_path, monkeypatch):
    output = others_in(tmp_path / "target")
    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "_MAX_FILE_BYTES", 20_000)
        assert run(*as_float16(pair, output)).code == 0
    assert len([*output.glob("model-*")]) > 1
    foreign = output / "model-of-mine.safetensors"
    foreign.write_bytes(b"mine")
    (output / "chat_template.jinja").write_text("{{ 'of the earlier model' }}")
    (output / "parts.json").write_text('{"left_out": {}}')
    assert run(*as_float16(pair, output)).code == 0
    assert sorted(output.glob("model*")) == sorted([foreign, output / "model.safetensors"])
    assert not (output / "chat_template.jinja").exists() and not (output / "parts.json").exists()
    assert_others_stay(output)


def test_weights_of_others_that_would_be_read_instead_are_named(run, pair, clone):
    index = clone / "model.safetensors.index.json"
    index.write_text('{"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}')
    (clone / "model-00001-of-00002.safetensors").write_bytes(b"large")
    before = content_of(clone)
    line = run(*as_float16(pair, clone)).refusal()
    assert index.name in line and "remove them or choose another output" in line
    assert content_of(clone) == before


# ---- training -----------------------------------------------------------------------------


@pytest.fixture
def train(small_target, tmp_path) -> list[object]:
    """Returns flags of a run of one step; its output does not exist yet."""
    (tmp_path / "distill.py").write_text(
        "from pathlib import Path\nfrom tests.train.test_training import distill_config\n"
        "config = distill_config(Path('.'), Path('target'))\n"
    )
    flags = ["--config", tmp_path / "distill.py", "--target", small_target]
    return [*flags, "--run.directory", tmp_path / "run", "--optim.total_steps", 1, "--output"]


@pytest.mark.slow
def test_training_into_a_clone_keeps_its_history(run, train, tmp_path):
    clone, link = others_in(tmp_path / "disk"), tmp_path / "link"
    (clone / "config.json").write_text("{}")
    link.symlink_to(clone)
    assert run("train.distill", *train, link).refusal().endswith("with --overwrite")
    assert run("train.distill", *train, link, "--overwrite").code == 0
    (clone / "model.safetensors").unlink()
    assert run("train.export", *train, link, "--checkpoint", "newest").code == 0
    assert link.is_symlink() and (clone / "model.safetensors").exists()
    assert_others_stay(clone)


def test_invalid_outputs_are_refused_before_a_load(run, pair, train, tmp_path, monkeypatch):
    for name in ("infer.convert.load_target", "train.distill.load_tokenizer"):
        monkeypatch.setattr(name, None)
    (file := tmp_path / "file").write_text("mine")
    (link := tmp_path / "link").symlink_to(tmp_path / "unmounted" / "disk")
    both = ["--target", pair / "target", "--draft", pair / "draft"]
    for output, why in ((file, "is a file"), (link, "is a dangling link to ")):
        for command in (
            ["infer.convert", *both, "--overwrite", "--output", output],
            ["infer.evaluate", *both, "--output", output],
            ["train.distill", *train, output],
            ["train.distill", *train, tmp_path / "new", "--run.directory", output],
        ):
            line = run(*command).refusal()
            assert f"cannot write {output}: " in line and why in line, command
    golden = run("infer.check", *both[:2], "--write-golden", link).refusal()
    assert "is a dangling link to " in golden
    assert file.read_text() == "mine" and link.is_symlink()


# ---- one file -----------------------------------------------------------------------------


def test_a_picture_stays_with_its_link_and_mode(run, tmp_path, monkeypatch):
    agreement = '{"step": 1, "kind": "eval", "agreement": [0.9, 0.5]}\n'
    (tmp_path / "metrics.jsonl").write_text(agreement)
    assert run("train.plot", tmp_path).code == 0 and (tmp_path / "curves.png").is_file()
    picture, link = tmp_path / "disk" / "curves.png", tmp_path / "link.png"
    picture.parent.mkdir()
    picture.write_bytes(b"old")
    picture.chmod(0o600)
    link.symlink_to(picture)
    assert run("train.plot", tmp_path, "--output", link).code == 0
    assert link.is_symlink() and picture.stat().st_mode & 0o777 == 0o600
    drawn = picture.read_bytes()
    assert drawn[1:4] == b"PNG"

    def full_disk(fresh: Path, content: bytes) -> None:
        with fresh.open("wb") as file:
            file.write(content[:9])
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(Path, "write_bytes", full_disk)
    line = run("train.plot", tmp_path, "--output", link).refusal(75)
    assert "No space left on device" in line and picture.read_bytes() == drawn
    assert [path.name for path in picture.parent.iterdir()] == ["curves.png"]


def test_a_file_that_is_not_ours_is_kept(run, pair, tmp_path, monkeypatch):
    """Files are partial answers, a report, the prompts of --write-golden, and a --ready-file."""
    monkeypatch.setattr("train.regenerate.Engine.start", lambda engine: None)  # it would compile
    prompts, notes = tmp_path / "prompts.jsonl", tmp_path / "notes.md"
    partial, report = tmp_path / "answers.jsonl.partial", tmp_path / "report.md"
    prompts.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    for file in (notes, partial, report):
        file.write_text("mine")
    before, target = content_of(tmp_path), ["--target", pair / "target"]
    nowhere = ["--port", 0, "--target", tmp_path]
    answers = ["--prompts", prompts, "--max-prompt", 20, "--output", tmp_path / "answers.jsonl"]
    for command, says in (
        (["train.regenerate", "--target", DEMO / "target", *answers], "has no header"),
        (["infer.evaluate", *target, "--draft", pair / "draft", "--output", tmp_path], "report.md"),
        (["infer.check", *target, "--write-golden", prompts], f"{prompts}: not a golden file"),
        (["infer.serve", *nowhere, "--ready-file", notes], f"{notes}: not a ready file"),
        (["infer.server", *nowhere, "--ready-file", notes], f"{notes}: not a ready file"),
    ):
        assert says in run(*command).refusal()
        assert content_of(tmp_path) == before
