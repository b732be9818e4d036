"""Runs that start from a drafter that was trained before: where they start, and what is refused."""

import dataclasses
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest

from configs import demo_drafter
from moa_jax.config import Eagle3Config, EagleConfig, MoaConfig
from moa_jax.model import sharding
from moa_jax.pretrained import describe_target, save_drafter
from moa_jax.training.distillation import make_train_step
from tests.model_folders import refusal
from tests.train.test_training import changed, cut_at, distill_config, metrics, run_config
from tests.train.test_training import distilled as distilled  # a fixture
from train import distill
from train.run.warm_start import warm_params

FIGURES = ("kl", "cross_entropy", "agreement", "simulated_tau")


def warm_config(folder: Path, target: Path, start: Path):
    return dataclasses.replace(distill_config(folder, target), init_from=str(start))


def evaluations(folder: Path) -> list[list]:
    return [[record[name] for name in FIGURES] for record in metrics(folder, "eval")]


@pytest.mark.slow
def test_a_run_goes_on_from_the_weights_of_another(small_target, distilled, tmp_path):
    """It starts at the other's last evaluation, with a fresh optimiser and another rate."""
    config = warm_config(tmp_path, small_target, distilled / "run")
    log = tmp_path / "run" / "metrics.jsonl"  # of another start, which came to no checkpoint
    log.parent.mkdir()
    log.write_text('{"step": 0, "kind": "eval", "kl": 99.0}\n')
    distill.distill(changed(config, optim_learning_rate=1e-4, optim_peak=1.0))
    before, after = evaluations(distilled), evaluations(tmp_path)
    assert after[0] == before[-1] != before[0]
    assert [record["step"] for record in metrics(tmp_path, "eval")] == [0, 6, 12]
    assert after[-1][0] < before[-1][0]


@pytest.mark.slow
def test_a_drafters_folder_is_a_start(small_target, distilled, tmp_path, monkeypatch):
    """Its weights are bfloat16; and a cut run goes on without the folder."""
    start = shutil.copytree(distilled / "draft", tmp_path / "start")
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_at(patch, step=8)
        distill.distill(warm_config(tmp_path / "cut", small_target, start))
    distill.distill(warm_config(tmp_path / "whole", small_target, start))
    shutil.rmtree(start)
    distill.distill(warm_config(tmp_path / "cut", small_target, start))
    for name in ("cut", "whole"):
        kl, *_ = evaluations(tmp_path / name)[0]
        assert kl == pytest.approx(evaluations(distilled)[-1][0], rel=0.02)
    cut, whole = (tmp_path / name / "run" / "metrics.jsonl" for name in ("cut", "whole"))
    assert cut.read_bytes() == whole.read_bytes()


# Of the paper's parts, for the authors' layouts know no others.
MOA = dataclasses.replace(demo_drafter.config.drafter, hidden_in_memory=False)
EAGLE3 = Eagle3Config(1, 24, draft_ids=tuple(range(0, 2048, 4)))  # its head is of some tokens


STARTS = [("moa", layout) for layout in ("ours", "authors", "vllm", "speculators")]
STARTS += [("eagle3", layout) for layout in ("ours", "authors")]


@pytest.mark.parametrize(("method", "layout"), STARTS)
def test_every_layout_is_a_start(method, layout, tmp_path):
    """The same weights, bit for bit, whatever config.json tells of them."""
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
    step = distilled / "run" / "checkpoints" / "12"
    damaged = shutil.copytree(step, tmp_path / "other" / "checkpoints" / "12")
    max((damaged / "state").rglob("*"), key=lambda path: path.stat().st_size).write_bytes(b"")
    moa, narrow = (MoaConfig(1, width, 1, 24, 1, 16) for width in (24, 20))
    eagle = EagleConfig(1, 24)
    for start, drafter, line in (
        (step, narrow, "drafter.self_attention_intermediate_size: 24 -> 20; name"),
        (step.with_name("5"), moa, "5: no such checkpoint"),
        (damaged, moa, "12: damaged"),
        (distilled / "draft", eagle, "a drafter of kind moa, and the config's is eagle"),
        (distilled / "draft", narrow, "self_attention_intermediate_size is 24, and"),
        ("nowhere", moa, "nowhere"),
    ):
        config = warm_config(tmp_path, small_target, start)
        assert line in refusal(distill.distill, dataclasses.replace(config, drafter=drafter))
    assert [path.name for path in tmp_path.iterdir()] == ["other"]
