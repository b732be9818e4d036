"""Runs that start from a trained drafter: their start, and refused starts."""

import dataclasses
import functools
import shutil
import tarfile
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import demo_drafter
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape, Eagle3Config, EagleConfig, MoaConfig
from moa_jax.model import sharding
from moa_jax.pretrained import describe_target, save_drafter
from moa_jax.training.distillation import make_train_step
from tests.conftest import slow
from tests.model_folders import refusal
from tests.train.test_training import CONVERSATIONS, changed, distill_config, metrics, run_config
from train import distill
from train.run.warm_start import warm_params

FIGURES = ("kl", "cross_entropy", "agreement", "simulated_tau")


def warm_config(folder: Path, target: Path, start: Path):
    return dataclasses.replace(distill_config(folder, target), init_from=str(start))


def evaluations(folder: Path) -> list[list]:
    return [[record[name] for name in FIGURES] for record in metrics(folder, "eval")]


@pytest.mark.slow
def test_a_run_starts_from_the_weights_of_another(small_target, distilled, tmp_path):
    """The run starts at the other's last evaluation, with a new optimiser and another rate."""
    config = warm_config(tmp_path, small_target, distilled / "run")
    distill.distill(changed(config, optim_learning_rate=1e-4, optim_peak=1.0))
    before, after = evaluations(distilled), evaluations(tmp_path)
    assert after[0] == before[-1] != before[0]
    assert [record["step"] for record in metrics(tmp_path, "eval")] == [0, 6, 12]
    assert after[-1][0] < before[-1][0]


# Without the extra parts, because the authors' layouts lack them.
MOA = dataclasses.replace(demo_drafter.config.drafter, hidden_in_memory=False)
EAGLE3 = Eagle3Config(1, 24, draft_ids=tuple(range(0, 2048, 4)))  # its head covers some tokens


STARTS = [("moa", "authors"), *(slow("eagle3", layout) for layout in ("ours", "speculators"))]


@pytest.mark.parametrize(("method", "layout"), STARTS)
def test_every_layout_is_a_start(method, layout, tmp_path):
    """The weights are the same, bit for bit, for any content of config.json."""
    config, start = demo_drafter.config, tmp_path / "draft"
    drafter = EAGLE3 if method == "eagle3" else MOA
    config = changed(config, drafter=drafter, run=run_config(tmp_path), init_from=str(start))
    target = describe_target(config.target)
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    program = make_train_step(config, target.config, mesh)
    wanted = jax.jit(program.init)(jax.random.key(1)).params
    save_drafter(start, method, drafter, wanted, target, layout=layout)
    found = warm_params(config, target, program.abstract_state())
    jax.tree.map(np.testing.assert_array_equal, found, wanted)


@pytest.mark.slow
def test_another_start_is_refused_before_the_target_is_loaded(
    small_target, distilled, tmp_path, monkeypatch
):
    monkeypatch.setattr(distill, "load_target", None)
    step, narrow = distilled / "run" / "checkpoints" / "12", MoaConfig(1, 20, 1, 24, 1, 16)
    for start, drafter, line in (
        (step, narrow, "drafter.self_attention_intermediate_size: 24 -> 20; name"),
        (step.with_name("5"), narrow, "5: no such checkpoint"),
        (distilled / "draft", EagleConfig(1, 24), "of kind moa, and the config's is eagle"),
        (distilled / "draft", narrow, "self_attention_intermediate_size is 24, and"),
    ):
        config = changed(warm_config(tmp_path, small_target, start), drafter=drafter)
        assert line in refusal(distill.distill, config)
    assert list(tmp_path.iterdir()) == []


# ---- a run of an earlier version ----------------------------------------------------------


@pytest.fixture
def earlier(tmp_path, monkeypatch) -> Path:
    """Returns the working directory, with the run that commit 757377e saved.

    This run of `distill_config` has the checkpoint of step 8 of 12, the finished drafter and its
    target. All paths are relative.
    """
    with tarfile.open(Path(__file__).with_name("run_of_757377e.tar.gz")) as archive:
        archive.extractall(tmp_path, filter="data")
    shutil.copy(CONVERSATIONS, tmp_path)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.slow
def test_an_earlier_checkpoint_resumes_and_an_earlier_drafter_decodes(earlier, capsys):
    target = load_target("target", np.float32)
    session = Session(target, load_drafter("draft", target), DraftShape(3))
    drafted, plain = (
        each.generate([[5, 9, 40, 7]], 16, stop_ids=()) for each in (session, Session(target))
    )
    assert drafted[0].token_ids == plain[0].token_ids
    paths, finished = (Path(CONVERSATIONS).name,), load_drafter("draft", target).params
    config = distill_config(Path(), Path("target"))
    config = changed(config, data_train=paths, data_validation=paths)
    assert "something other than this run wrote" in refusal(distill.distill, config)
    distill.distill(config, overwrite=True)  # earlier versions recorded no run
    assert "12 steps, the last 4 in" in capsys.readouterr().err
    close = functools.partial(np.testing.assert_allclose, atol=2e-5)
    jax.tree.map(close, finished, load_drafter("draft", target).params)
