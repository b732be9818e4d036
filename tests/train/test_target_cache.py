"""A cache of a target's pass gives the same training, and other files are refused."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.cli.program import progress
from infer.info import ROOT
from moa_jax.config import Eagle3Config, FeedbackConfig, MoaConfig
from moa_jax.data.batch import Batch
from moa_jax.data.batches import Batches
from moa_jax.pretrained import describe_target
from moa_jax.training.target_cache import TargetCache, rows_hash
from tests.model_folders import refusal
from tests.train.test_training import changed, distill_config
from train import distill
from train.run.target_cache import CacheFlags

KINDS = {"last": jax.ShapeDtypeStruct((3, 2), jnp.float32)}
MORE = KINDS | {"stream-2": jax.ShapeDtypeStruct((3, 4), jnp.bfloat16)}
MADE_FROM = {"target": "t", "data": "d", "rows": 5, "row_length": 3, "dtype": "float32"}


# ---- the same training --------------------------------------------------------------------

DRAFTERS = {
    "moa": (MoaConfig(1, 24, 1, 24, 1, 16, 1), FeedbackConfig()),
    "eagle3": (Eagle3Config(1, 24, tapped_layers=(0, 1, 1)), FeedbackConfig(steps=2)),
}


def assert_same_runs(folder: Path, target: Path, kind: str) -> None:
    """Asserts that training with and without a cache is equal, bit by bit."""
    drafter, feedback = DRAFTERS[kind]
    with pytest.MonkeyPatch.context() as patch:  # evaluations read no cache
        patch.setattr(distill, "_evaluation", lambda *_: lambda *_: {})
        for name, flags in (("plain", None), ("cached", CacheFlags(folder / "cache", 1.0))):
            config = changed(distill_config(folder / name, target), run_log_every=1)
            config = changed(config, drafter=drafter, feedback=feedback, optim_accumulate=2)
            distill.distill(config, flags)
    for file in ("run/metrics.jsonl", "draft/model.safetensors"):
        plain, cached = ((folder / name / file).read_bytes() for name in ("plain", "cached"))
        assert plain == cached, file


@pytest.mark.slow
def test_a_run_with_a_cache_is_the_same_run(small_target, tmp_path, capsys):
    assert_same_runs(tmp_path, small_target, "eagle3")
    assert "GB to write: " in capsys.readouterr().err


@pytest.mark.slow
def test_programs_as_users_run_them_are_the_same(small_target, tmp_path):
    """With all optimisations, the compiler fuses computed and read arrays."""
    code = "from pathlib import Path; from tests.train.test_target_cache import assert_same_runs; "
    code += f"assert_same_runs(Path({str(tmp_path)!r}), Path({str(small_target)!r}), 'moa')"
    environment = os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "0"}
    subprocess.run([sys.executable, "-c", code], cwd=ROOT, env=environment, check=True)


# ---- files --------------------------------------------------------------------------------


def keep(number_B: np.ndarray) -> dict[str, np.ndarray]:
    """Returns arrays that identify their row."""
    last = 10.0 * number_B[:, None, None] + np.arange(6.0).reshape(3, 2)
    stream = np.broadcast_to(number_B[:, None, None], (len(number_B), 3, 4))
    return {"last": last.astype(np.float32), "stream-2": stream.astype(jnp.bfloat16)}


def cache_in(folder: Path, kinds=KINDS, **changes) -> TargetCache:
    return TargetCache(folder, MADE_FROM | changes, kinds)


def build(cache: TargetCache, keep=keep) -> TargetCache:
    cache.build(keep, 2, lambda *told: progress(*told, quiet=True))
    return cache


def test_existing_rows_are_not_computed_again_and_missing_rows_are_added(tmp_path):
    build(cache_in(tmp_path))
    before = (tmp_path / "last").stat()
    cache = cache_in(tmp_path, MORE)
    assert cache.missing() == ["stream-2"]
    built = []
    build(cache, lambda number_B: built.append(number_B.tolist()) or keep(number_B))
    assert built == [[0, 1], [2, 3], [4, 4]]  # in order, and always two
    assert (tmp_path / "last").stat() == before
    found, expected = cache.parts(list(MORE), np.arange(5)), keep(np.arange(5))
    jax.tree.map(np.testing.assert_array_equal, found, expected)


def test_a_build_that_is_cut_is_made_anew(tmp_path):
    def cut(number_B: np.ndarray) -> dict[str, np.ndarray]:
        if number_B[0] == 2:
            raise KeyboardInterrupt
        return keep(number_B)

    with pytest.raises(KeyboardInterrupt):
        build(cache_in(tmp_path), cut)
    assert sorted(os.listdir(tmp_path)) == ["cache.json", "lock"]
    (tmp_path / "last.partial").write_bytes(b"as a kill leaves it" * 100)
    found = build(cache_in(tmp_path)).parts(["last"], np.arange(5))["last"]
    np.testing.assert_array_equal(found, keep(np.arange(5))["last"])
    assert not list(tmp_path.glob("*.partial"))


def test_a_disk_without_room_is_refused_beforehand(tmp_path, monkeypatch):
    cache = cache_in(tmp_path, MORE)
    size = 5 * (4 + 6 * 4) + 5 * (4 + 12 * 2)
    assert "2.8e-07 GB to write: last, stream-2 of 5 rows of 3 tokens in f" in cache.described()
    assert "above the limit of" in refusal(cache.check_room, (size - 1) / 1e9)
    usage = shutil.disk_usage(tmp_path)._replace(free=size - 1)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage)
    assert "make room" in refusal(cache.check_room, 1.0)
    (tmp_path / "last.partial").write_bytes(b"1234")  # the build overwrites it
    cache.check_room(size / 1e9)


def test_a_cache_of_something_else_is_refused(tmp_path):
    build(cache_in(tmp_path))
    for changes, line in (
        (dict(target="other"), "of another target; name another folder"),
        (dict(data="other", rows=6), "of other data, rows 5, not 6"),
        (dict(dtype="bfloat16"), "of dtype float32, not bfloat16"),
    ):
        assert line in refusal(cache_in, tmp_path, **changes)


def test_damaged_files_are_refused(tmp_path):
    build(cache_in(tmp_path))
    whole = (tmp_path / "last").read_bytes()
    (tmp_path / "last").write_bytes(whole[:-1])
    assert f"{tmp_path / 'last'} is damaged (139 of 140 bytes)" in refusal(cache_in, tmp_path)
    for place in (28, 40):  # in the CRC and in the bytes of row 1
        damaged = bytearray(whole)
        damaged[place] ^= 1
        (tmp_path / "last").write_bytes(damaged)
        cache = cache_in(tmp_path)
        cache.parts(["last"], np.array([0, 2]))
        refused = refusal(cache.parts, ["last"], np.array([0, 1]))
        assert "last is damaged (row 1 has changed); remove it" in refused
    (tmp_path / "cache.json").write_text('{"target')
    assert "cache.json is not valid JSON" in refusal(cache_in, tmp_path)
    (tmp_path / "cache.json").rename(tmp_path / "letter.txt")  # a foreign folder is not changed
    assert "is no target cache" in refusal(cache_in, tmp_path)


@pytest.mark.slow
def test_a_cache_belongs_to_weights_whatever_the_tokenizer(small_target, tmp_path, monkeypatch):
    """This holds for weights that are fetched after the description, as from a hub."""
    bare, target = tmp_path / "bare", tmp_path / "target"
    shutil.copytree(small_target, bare, ignore=shutil.ignore_patterns("*.safetensors"))
    shutil.copytree(small_target, target)
    (target / "tokenizer.json").write_text((target / "tokenizer.json").read_text() + "\n")
    flags, rows = CacheFlags(tmp_path / "cache", 1.0), Batches(rows_of(0), 2, seed=0)

    def made_from(folder: Path, described: Path) -> dict:
        config, target = distill_config(tmp_path, folder), describe_target(described)
        return distill.open_cache(flags, config, target, rows)._made_from

    assert made_from(small_target, bare) == made_from(target, target) != made_from(bare, bare)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    refused = refusal(distill.open_cache, flags, None, None, None)
    assert "--target-cache needs one process" in refused


# ---- which rows ---------------------------------------------------------------------------


def rows_of(seed: int, count: int = 4, length: int = 6) -> Batch:
    rng = np.random.default_rng(seed)
    tokens_BT, position_BT = (rng.integers(0, 9, (count, length), np.int32) for _ in range(2))
    return Batch(tokens_BT, np.ones_like(tokens_BT), position_BT, tokens_BT > 3)


def test_the_hash_of_rows_covers_the_inputs_of_the_target():
    rows = rows_of(0)
    known = rows_hash(Batches(rows, 2, seed=0))
    assert rows_hash(Batches(rows._replace(response_BT=~rows.response_BT), 2, seed=1)) == known
    for name in ("tokens_BT", "segment_BT", "position_BT"):
        other = getattr(rows, name).copy()
        other[3, 5] += 1
        assert rows_hash(Batches(rows._replace(**{name: other}), 2, seed=0)) != known
    assert rows_hash(Batches(Batch(*(x[::-1] for x in rows)), 2, seed=0)) != known
