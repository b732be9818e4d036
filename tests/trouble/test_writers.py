"""Writers: files of others, links and inputs stay, and a cut write is never read as whole."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from infer.cli.flags.pair import DEMO
from infer.http.address import bind
from infer.info import ROOT
from moa_jax.files import model_folder

OTHERS = {
    ".git/HEAD": "ref: main",
    "README.md": "by hand",
    "notes/a/plan.txt": "long",
    "x.bin": "x",
}


def others_in(folder: Path) -> Path:
    """Puts files of others into a folder, as a clone of a repository has them."""
    for name, text in OTHERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)
    return folder


def assert_others_stay(folder: Path) -> None:
    for name, text in OTHERS.items():
        assert (folder / name).read_text() == text
    assert not [path.name for path in folder.glob(".*") if path.name != ".git"]


def content_of(folder: Path) -> dict[str, bytes]:
    """All files below a folder."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def as_float16(pair: Path, output: Path) -> list[object]:
    """A command that writes the pair's target in another dtype."""
    return ["infer.convert", "--target", pair / "target", "--dtype", "float16", "--output", output]


@pytest.fixture
def clone(pair) -> Path:
    """A drafter of the pair in a clone of a repository."""
    return others_in(shutil.copytree(pair / "draft", pair.parent / "clone"))


# ---- convert ------------------------------------------------------------------------------


@pytest.mark.parametrize("written", ["draft", "target"])
def test_files_of_others_stay(run, pair, clone, written):
    model = ["--target", pair / "target", "--dtype", "float16"]
    if written == "draft":
        model += ["--draft", pair / "draft", "--target-layer-inference", "0"]
    done = run("infer.convert", *model, "--output", clone, "--overwrite")
    assert done.code == 0, done
    assert_others_stay(clone)
    dtypes = {str(each.dtype) for each in load_file(clone / "model.safetensors").values()}
    assert dtypes == {"float16"}
    assert (clone / "tokenizer.json").exists() == (pair / written / "tokenizer.json").exists()


def test_a_new_clone_is_written(run, pair, tmp_path):
    clone = others_in(tmp_path / "clone")
    assert run(*as_float16(pair, clone), "--overwrite").code == 0
    assert_others_stay(clone)
    (clone / "config.json").unlink()  # weights that are not known to be ours
    assert "is not a model folder" in run(*as_float16(pair, clone), "--overwrite").refusal()


def test_a_client_part_is_written_beside_files_of_others(run, pair, tmp_path):
    flags = ["--target", pair / "target", "--draft", pair / "draft", "--for-client"]
    flags += ["--output", tmp_path / "part"]
    assert run("infer.convert", *flags).code == 0
    whole = content_of(tmp_path / "part")
    for folder in ("", "target", "draft"):
        others_in(tmp_path / "part" / folder)
    done = run("infer.convert", *flags, "--overwrite", "--json")
    assert done.code == 0 and json.loads(done.out)["bytes"].keys() == {"target", "draft"}
    for folder in ("", "target", "draft"):
        assert_others_stay(tmp_path / "part" / folder)
    assert content_of(tmp_path / "part").items() > whole.items()


def test_the_folder_behind_a_link_is_written(run, pair, clone, tmp_path):
    link = tmp_path / "link"
    link.symlink_to(clone.name)  # relative
    assert run(*as_float16(pair, link), "--overwrite").code == 0
    assert os.readlink(link) == clone.name and (clone / "generation_config.json").exists()
    assert_others_stay(clone)


def test_an_input_is_never_overwritten(run, pair, tmp_path):
    before = content_of(pair)
    (tmp_path / "link").symlink_to(pair / "target")
    (tmp_path / "round").symlink_to(pair)
    model, draft = ["--target", pair / "target"], ["--draft", pair / "draft"]
    for flags in (
        [*model, "--dtype", "float16", "--output", pair / "target"],
        [*model, "--dtype", "float16", "--output", tmp_path / "link"],
        [*model, *draft, "--to", "vllm", "--output", tmp_path / "round" / "draft"],
        [*model, *draft, "--to", "vllm", "--output", pair / "target"],
        [*model, *draft, "--for-client", "--output", pair],
    ):
        line = run("infer.convert", *flags, "--overwrite").refusal()
        assert "choose another output" in line
        assert content_of(pair) == before and (tmp_path / "link").is_symlink()


def unusable(tmp_path: Path) -> dict[Path, str]:
    """Outputs that no folder can be written to, with a part of the line that refuses each."""
    (tmp_path / "file").write_text("mine")
    (tmp_path / "dangling").symlink_to(tmp_path / "unmounted" / "disk")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    return {
        tmp_path / "file": "is a file",
        tmp_path / "file" / "below": "is a file",
        tmp_path / "dangling": "is a dangling link to ",
        tmp_path / "dangling" / "below": "is a dangling link to ",
        tmp_path / "loop": "is a dangling link to ",
    }


# ---- a write that is cut ------------------------------------------------------------------


class NoMoreMoves(BaseException):
    """Stands for the end of a process: from now on no file is moved any more."""


@pytest.mark.parametrize("undone", [False, True], ids=["killed", "failed"])
def test_a_cut_write_is_never_read_as_whole(run, pair, clone, tmp_path, monkeypatch, undone):
    assert run(*as_float16(pair, clone), "--overwrite").code == 0
    old = load_file(clone / "model.safetensors")
    new = {name: -2 * each for name, each in load_file(pair / "target/model.safetensors").items()}
    save_file(new, pair / "target" / "model.safetensors")
    rename, states = Path.rename, []
    for moves in range(100):
        folder, count = tmp_path / f"cut-{moves}", iter(range(1000))
        shutil.copytree(clone, folder)

        def cut(self: Path, to: Path, moves: int = moves, count=count) -> Path:
            number = next(count)
            if number == moves or (number > moves and not undone):
                raise NoMoreMoves
            return rename(self, to)

        with monkeypatch.context() as patch:
            patch.setattr(Path, "rename", cut)
            try:
                whole = run(*as_float16(pair, folder), "--overwrite").code == 0
            except NoMoreMoves:
                whole = False
        for name, text in OTHERS.items():
            assert (folder / name).read_text() == text
        read = run("infer.convert", "--target", folder, "--output", tmp_path / f"copy-{moves}")
        if read.code:
            assert f"{folder}" in read.refusal()
            states.append("refused")
            assert run(*as_float16(pair, folder), "--overwrite").code == 0  # and goes on
            assert_others_stay(folder)  # and nothing is left of the first
        else:
            expected = {name: each.astype(np.float16) for name, each in new.items()}
            expected = expected if whole else old
            found = load_file(tmp_path / f"copy-{moves}" / "model.safetensors")
            for name in expected:
                np.testing.assert_array_equal(found[name], expected[name])
            states.append("new" if whole else "old")
        if whole:
            break
    assert states[-1] == "new" and states[0] == "old"
    assert set(states[1:-1]) == ({"old"} if undone else {"refused"})


KILL = """
import os, sys
from pathlib import Path
from infer.convert import main

moves, rename = int(sys.argv.pop(1)), Path.rename

def killed(self, to):
    global moves
    moves -= 1
    if moves < 0:
        os.kill(os.getpid(), 9)
    return rename(self, to)

Path.rename = killed
main(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_process_leaves_a_folder_that_is_refused(run, pair, clone):
    command = [str(each) for each in [*as_float16(pair, clone)[1:], "--overwrite"]]
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


def test_what_an_earlier_model_left_is_not_mixed_in(run, pair, tmp_path, monkeypatch):
    output = others_in(tmp_path / "target")
    shutil.copy(pair / "target" / "config.json", output)
    with monkeypatch.context() as patch:
        patch.setattr(model_folder, "_MAX_FILE_BYTES", 20_000)
        assert run(*as_float16(pair, output), "--overwrite").code == 0
    shards = sorted(path.name for path in output.glob("model-*"))
    assert len(shards) > 1 and (output / "model.safetensors.index.json").exists()
    foreign = output / "model-of-mine.safetensors"
    foreign.write_bytes(b"mine")
    (output / "chat_template.jinja").write_text("{{ 'of the earlier model' }}")
    (output / "parts.json").write_text('{"left_out": {}}')
    assert run(*as_float16(pair, output), "--overwrite").code == 0
    assert sorted(output.glob("model*")) == sorted([foreign, output / "model.safetensors"])
    assert not (output / "chat_template.jinja").exists() and not (output / "parts.json").exists()
    assert_others_stay(output)
    with monkeypatch.context() as patch:  # and back
        patch.setattr(model_folder, "_MAX_FILE_BYTES", 20_000)
        assert run(*as_float16(pair, output), "--overwrite").code == 0
    assert sorted(path.name for path in output.glob("model-0*")) == shards
    assert not (output / "model.safetensors").exists()


@pytest.mark.parametrize("name", ["model.safetensors.index.json", "gguf_tensors.json"])
def test_weights_of_others_that_would_be_read_instead_are_named(run, pair, clone, name):
    weight_map = {"weight_map": {"model.norm.weight": "model-00001-of-00002.safetensors"}}
    (clone / name).write_text(json.dumps({"metadata": {"total_size": 1}} | weight_map))
    (clone / "model-00001-of-00002.safetensors").write_bytes(b"large")
    before = content_of(clone)
    line = run(*as_float16(pair, clone), "--overwrite").refusal()
    assert name in line and "remove them or choose another output" in line
    assert content_of(clone) == before


# ---- training -----------------------------------------------------------------------------


@pytest.fixture
def settings(tmp_path) -> Path:
    """Config files of a target and of a drafter for it, of one step each."""
    for name in ("pretrain", "distill"):
        given = "Path('.')" + (", Path('target')" if name == "distill" else "")
        (tmp_path / f"{name}.py").write_text(
            "from tests.train.test_training import distill_config, pretrain_config\n"
            f"from pathlib import Path\nconfig = {name}_config({given})\n"
        )
    return tmp_path


def trained(settings: Path, name: str, output: Path, *more: object) -> list[object]:
    flags = {"optim.total_steps": 1, "run.directory": settings / f"run-{name}", "output": output}
    if name == "distill":
        flags["target"] = settings / "model"
    else:
        flags["tokenizer"] = settings / "tokenizer"
    dotted = [each for flag, value in flags.items() for each in (f"--{flag}", value)]
    return [f"train.{name}", "--config", settings / f"{name}.py", *dotted, *more]


def test_training_into_a_clone_keeps_its_history(run, settings):
    link, clone = settings / "model", others_in(settings / "disk")
    (clone / "config.json").write_text("{}")
    link.symlink_to(clone)
    assert run(*trained(settings, "pretrain", link)).code == 0
    draft = others_in(settings / "draft")
    (draft / "config.json").write_text("{}")
    (settings / "link").symlink_to(draft)
    assert run(*trained(settings, "distill", settings / "link")).code == 0
    (draft / "model.safetensors").unlink()
    export = ["train.export", *trained(settings, "distill", draft)[1:], "--checkpoint", "newest"]
    assert run(*export).code == 0
    assert link.is_symlink() and (settings / "link").is_symlink()
    for folder in (clone, draft):
        assert_others_stay(folder)
        assert (folder / "model.safetensors").exists()


def test_what_cannot_be_written_is_refused_before_anything_is_loaded(
    run, pair, settings, monkeypatch
):
    for name in ("infer.convert.load_target", "infer.convert.load_drafter"):
        monkeypatch.setattr(name, None)
    for name in ("infer.evaluate.load_candidates", "train.export.read_state"):
        monkeypatch.setattr(name, None)
    for module in ("distill", "pretrain"):
        monkeypatch.setattr(f"train.{module}.load_tokenizer", None)
    (settings / "model").mkdir()
    shutil.copy(DEMO / "target" / "config.json", settings / "model")
    (settings / "corpus.jsonl").write_text('{"text": "a"}\n')
    both = ["--target", pair / "target", "--draft", pair / "draft"]
    corpus = [*both[:2], "--corpus", settings / "corpus.jsonl", "--size", "9"]
    for output, why in unusable(settings).items():
        said = f"cannot write {output}: "
        folder = ["--output", output]
        for command in (
            ["infer.convert", *both[:2], *folder, "--overwrite"],
            ["infer.convert", *both, *folder, "--overwrite"],
            ["infer.convert", *both, "--for-client", *folder, "--overwrite"],
            ["infer.evaluate", *both, *folder],
            ["train.export", *trained(settings, "distill", output)[1:], "--checkpoint", "1"],
            *(trained(settings, name, output) for name in ("pretrain", "distill")),
            *(
                trained(settings, name, settings / "new", "--run.directory", output)
                for name in ("pretrain", "distill")
            ),
        ):
            line = run(*command).refusal()
            assert said in line and why in line, command
    link = settings / "link.png"
    link.symlink_to(settings / "unmounted" / "file.png")
    for command in (
        ["train.plot", settings, "--output", link],
        ["train.vocabulary", *corpus, "--output", link],
        ["train.regenerate", *both[:2], "--prompts", settings / "corpus.jsonl", "--output", link],
        ["infer.check", *both[:2], "--write-golden", link],
    ):
        assert "is a dangling link to " in run(*command).refusal()
    start = ["--init-from", settings / "model"]
    line = run(*trained(settings, "distill", settings / "model", *start)).refusal()
    assert "choose another output" in line
    assert (settings / "file").read_text() == "mine" and link.is_symlink()
    assert not (settings / "unmounted").exists()


# ---- one file -----------------------------------------------------------------------------


def test_a_picture_stays_with_its_link_and_mode(run, tmp_path, monkeypatch):
    run_folder, picture = tmp_path / "run", tmp_path / "disk" / "curves.png"
    run_folder.mkdir()
    (run_folder / "metrics.jsonl").write_text('{"step": 1, "kind": "train", "loss": 2.0}\n')
    picture.parent.mkdir()
    picture.write_bytes(b"old")
    picture.chmod(0o600)
    (tmp_path / "link.png").symlink_to(picture)
    assert run("train.plot", run_folder, "--output", tmp_path / "link.png").code == 0
    assert (tmp_path / "link.png").is_symlink() and picture.read_bytes()[1:4] == b"PNG"
    assert picture.stat().st_mode & 0o777 == 0o600
    drawn = picture.read_bytes()

    def full_disk(self: object, to: object, **_: object) -> None:
        if isinstance(to, Path):
            to.write_bytes(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full_disk)
    line = run("train.plot", run_folder, "--output", tmp_path / "link.png").refusal()
    assert "No space left on device" in line and picture.read_bytes() == drawn
    assert [path.name for path in picture.parent.iterdir()] == ["curves.png"]


def test_a_ready_file_behind_a_link_is_removed_and_not_the_link(tmp_path):
    ready, link = tmp_path / "ready.json", tmp_path / "link"
    ready.write_text("{}")
    link.symlink_to(ready)
    bind("127.0.0.1", 0, str(link)).close()
    assert link.is_symlink() and not ready.exists()
    os.mkfifo(tmp_path / "pipe")  # no file of ours, as /dev/null is none
    bind("127.0.0.1", 0, str(tmp_path / "pipe")).close()
    assert (tmp_path / "pipe").exists()


def test_a_partial_file_of_others_is_not_overwritten(run, tmp_path):
    corpus, output = tmp_path / "corpus.jsonl", tmp_path / "answers.jsonl"
    corpus.write_text('{"messages": [{"role": "user", "content": "Hi"}]}\n')
    (tmp_path / "answers.jsonl.partial").write_text("mine, without an end of line")
    (tmp_path / "answers.jsonl.tmp").write_text("mine")
    flags = ["--target", DEMO / "target", "--prompts", corpus, "--max-prompt", "20"]
    assert "has no header" in run("train.regenerate", *flags, "--output", output).refusal()
    assert (tmp_path / "answers.jsonl.partial").read_text() == "mine, without an end of line"


def test_a_report_of_something_else_is_not_overwritten(run, pair, tmp_path):
    (tmp_path / "report.md").write_text("mine")
    both = ["--target", pair / "target", "--draft", pair / "draft"]
    line = run("infer.evaluate", *both, "--output", tmp_path).refusal()
    assert "report.md" in line and (tmp_path / "report.md").read_text() == "mine"


def test_a_file_that_is_not_ours_is_kept(run, pair, tmp_path):
    """The prompts under --write-golden, and notes under --ready-file."""
    prompts, notes = tmp_path / "prompts.jsonl", tmp_path / "notes.md"
    prompts.write_text('{"prompt": "Hi"}\n')
    notes.write_text("mine")
    golden = ("--target", pair / "target", "--prompts", prompts, "--write-golden")
    for file in (prompts, notes):
        before = file.read_bytes()
        assert f"{file}: not a golden file" in run("infer.check", *golden, file).refusal()
        for program in ("infer.serve", "infer.server"):
            line = run(program, "--port", 0, "--target", tmp_path, "--ready-file", file).refusal()
            assert f"{file}: not a ready file" in line
        assert file.read_bytes() == before
