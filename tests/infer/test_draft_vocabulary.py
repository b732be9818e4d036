"""The draft vocabulary in a drafter's folder: its use in drafting, and unchanged texts."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from infer import convert, evaluate, generate
from infer.bench.candidates import describe, load_candidates
from infer.cli.flags import pair as pair_flags
from moa_jax import Session
from moa_jax.data.tokenizer import train_tokenizer
from moa_jax.decode.draft_vocabulary import FILE, save_vocabulary, vocabulary_of
from moa_jax.files import client_files
from moa_jax.files.model_folder import file_hash
from moa_jax.pretrained import describe_target
from tests.model_folders import edit_json
from tests.oracle import random_pair
from tests.pairs import PROMPTS

IDS = np.arange(0, 300, 2, dtype=np.int32)  # half of the target's tokens


@pytest.fixture(scope="module")
def stored(tmp_path_factory) -> Path:
    """Returns a pair whose drafter has the draft vocabulary IDS; to be read, not changed."""
    folder = tmp_path_factory.mktemp("pair")
    config, model = random_pair.random_target("llama", 21, 0.2, num_hidden_layers=2, vocab_size=300)
    draft = random_pair.random_drafter(config, random_pair.draft_sizes(config, 0), 22, 0.2)
    random_pair.save_pair(folder / "target", folder / "draft", model, draft)
    edit_json(folder / "draft" / "config.json", target_layer_inference=0)
    train_tokenizer(iter(["Good morning, how can I help?"] * 9), 290, folder / "tokenizer")
    for file in (folder / "tokenizer").iterdir():
        file.rename(folder / "target" / file.name)
    target = describe_target(folder / "target")
    save_vocabulary(folder / "draft" / FILE, vocabulary_of(IDS, target))
    lines = "".join(json.dumps({"prompt_ids": prompt}) + "\n" for prompt in PROMPTS)
    (folder / "prompts.jsonl").write_text(lines)
    return folder


@pytest.fixture
def folder(stored, tmp_path) -> Path:
    """Returns a copy of the stored pair, to be changed or damaged."""
    return Path(shutil.copytree(stored, tmp_path / "pair"))


def named(folder: Path) -> list[str]:
    return ["--target", f"{folder}/target", "--draft", f"{folder}/draft"]


@pytest.fixture
def opened(monkeypatch, capsys):
    """Returns the session that infer.generate opens for some flags, and its stderr until then."""

    def stop(*arguments: Any, **settings: Any) -> None:
        raise CaughtSession(Session(*arguments, **settings))

    def opened(*flags: str) -> tuple[Session, str]:
        with monkeypatch.context() as patch, pytest.raises(CaughtSession) as found:
            patch.setattr(pair_flags, "Session", stop)
            generate.main([*flags, "--prompt-ids", "5"])
        return found.value.args[0], capsys.readouterr().err

    return opened


class CaughtSession(Exception):
    """Carries a session out of a program."""


# ---- drafting with the vocabulary ---------------------------------------------------------


def test_the_flag_overrides_the_default(stored, folder, opened, tmp_path):
    """Without a drafter or a file, nothing is printed."""
    session, err = opened(*named(stored))
    assert session.weights.vocabulary.ids_U.tolist() == IDS.tolist()
    assert session.vocabulary.file == stored / "draft" / FILE and "drafts from 150 of" in err
    session, err = opened(*named(stored), "--draft-vocabulary", "none")
    assert session.weights.vocabulary is None and "drafts from" not in err
    target = describe_target(stored / "target")
    other = save_vocabulary(tmp_path / "other.safetensors", vocabulary_of(IDS[:9], target))
    session, err = opened(*named(stored), "--draft-vocabulary", str(other))
    assert session.weights.vocabulary.head_DU.shape == (60, 9) and "drafts from" not in err
    assert session.vocabulary.file == other
    (folder / "draft" / FILE).unlink()
    for where, *flags in ((stored, "--mode", "plain"), (folder,)):
        session, err = opened(*named(where), *flags)
        assert session.vocabulary is None and "drafts from" not in err


def test_evaluation_gives_each_drafter_its_own(stored, tmp_path, capsys):
    without = tmp_path / "without"
    shutil.copytree(stored / "draft", without, ignore=lambda *_: [FILE])
    where = ["--target", f"{stored}/target", "--modes", "chain,tree"]
    where += ["--draft", f"a={stored}/draft", "--draft", f"b={without}"]
    found = {}
    for flag in ([], ["--draft-vocabulary", "none"]):
        args = evaluate._parser().parse_args([*where, *flag])
        target, entered = load_candidates(args)
        narrowed = {c.name for c in entered if c.session.weights.vocabulary}
        found[bool(flag)] = narrowed, describe(args, target, entered)["draft_vocabulary"]
        assert capsys.readouterr().err.count("drafts from 150 of") == len(narrowed) // 2
    hash = file_hash(stored / "draft" / FILE)
    assert found[False] == ({"a-chain", "a-tree"}, {"a-chain": hash, "a-tree": hash})
    assert found[True] == (set(), None)


# ---- copies of the file -------------------------------------------------------------------


def test_converting_keeps_it_in_our_layout(folder, capsys):
    for layout, is_kept in (("ours", True), ("authors", False)):
        file = folder / layout / FILE
        flags = ["--target-layer-inference", "0", "--to", layout, "--output", str(file.parent)]
        convert.main([*named(folder), *flags])
        assert file.exists() == is_kept
        assert ("has no draft vocabulary" in capsys.readouterr().err) != is_kept
    kept = folder / "ours" / FILE
    assert kept.read_bytes() == (folder / "draft" / FILE).read_bytes()


def test_a_pair_is_the_same_with_and_without_it(folder):
    """A split client drafts from all tokens, so the hash ignores the draft vocabulary."""
    before = client_files.model_hash(folder / "draft")
    (folder / "draft" / FILE).unlink()
    assert client_files.model_hash(folder / "draft") == before
