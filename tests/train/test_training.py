"""The trainers end to end at toy size: a target, its drafter, interrupted and resumed."""

import dataclasses
import functools
import json
import os
import queue
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as P

from infer.bench.plan.machines import machine
from infer.cli.flags.config_file import SHAPES, presets_of, read_config
from infer.info import ROOT
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import (
    BlockConfig,
    DataConfig,
    DistillConfig,
    DraftShape,
    GridConfig,
    MoaConfig,
    OptimConfig,
    PretrainConfig,
    RunConfig,
    TargetConfig,
)
from moa_jax.data import batches
from moa_jax.data.batch import Batch
from moa_jax.data.batches import Batches
from moa_jax.decode.draft_vocabulary import FILE as VOCABULARY
from moa_jax.drafters.losses import next_token_loss
from moa_jax.errors import InputError
from moa_jax.files import replace
from moa_jax.model import sharding
from moa_jax.training import fingerprint
from moa_jax.training.distillation import make_train_step
from moa_jax.training.optim import optimizer, rate_of_update, schedule
from moa_jax.training.update import init_state, make_update
from tests.model_folders import refusal
from train import distill, export
from train.run import decoding, stop
from train.run.settings import load_config

CONVERSATIONS = str(ROOT / "moa_jax/demo/conversations.jsonl")
DATA = DataConfig((CONVERSATIONS,), (CONVERSATIONS,), 64, 64, rows_per_batch=4)
OPTIM = OptimConfig(learning_rate=1e-3, warmup_steps=2, decay_steps=10, peak=4.0, total_steps=12)


def run_config(folder: Path) -> RunConfig:
    return RunConfig(str(folder / "run"), log_every=2, eval_every=6, eval_batches=1, save_every=4)


def pretrain_config(folder: Path) -> PretrainConfig:
    block = BlockConfig(32, 4, 2, 8, 48, 1e-5, 10000.0, None)
    target = TargetConfig("llama", 320, 3, block, True, 256)
    places = dict(tokenizer=str(folder / "tokenizer"), output=str(folder / "target"))
    return PretrainConfig(target, DATA, OPTIM, run_config(folder), **places)


def distill_config(folder: Path, target: Path) -> DistillConfig:
    models = dict(target=str(target), drafter=MoaConfig(1, 24, 1, 24, 1, 16), horizon=3)
    places = dict(run=run_config(folder), output=str(folder / "draft"))
    return DistillConfig(data=DATA, optim=OPTIM, **models, **places)


def changed(config: Any, **changes: Any) -> Any:
    """Returns a config with other settings; `data_seed=1` sets the field `seed` of its `data`."""
    for name, value in changes.items():
        part, _, field = name.partition("_")
        if part in {"data", "loss", "masks", "optim", "run"} and field:
            part_of = dataclasses.replace(getattr(config, part), **{field: value})
            config = dataclasses.replace(config, **{part: part_of})
        else:
            config = dataclasses.replace(config, **{name: value})
    return config


def metrics(folder: Path, kind: str, run: str = "run") -> list[dict]:
    lines = (folder / run / "metrics.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["kind"] == kind]


def cut_at(monkeypatch, step: int) -> None:
    """Makes the batch of this step raise, as any fault would."""
    deal = Batches.batch

    def batch(self, index, *rows):
        if index == step:
            raise KeyboardInterrupt
        return deal(self, index, *rows)

    monkeypatch.setattr(Batches, "batch", batch)


def test_distilled_drafter_decodes(small_target, distilled):
    losses = [record["loss"] for record in metrics(small_target.parent, "train")]
    assert len(losses) == 6 and losses[-1] < 0.9 * losses[0]
    train = metrics(distilled, "train")
    assert train[-1]["kl"] < 0.9 * train[0]["kl"]
    for record in metrics(distilled, "eval"):
        assert len(record["agreement"]) == 3
        expected = 1 + np.cumprod(record["agreement"]).sum()
        assert record["simulated_tau"] == pytest.approx(expected, abs=1e-5)
        assert 0 <= record["kl"] < record["cross_entropy"]
    target = load_target(small_target, jnp.float32)
    drafter = load_drafter(distilled / "draft", target)
    prompt = [0, 1, 40, 41, 4, 2]
    (drafted,) = Session(target, drafter, DraftShape(4)).generate([prompt], 16, [])
    (plain,) = Session(target).generate([prompt], 16, [])
    assert drafted.token_ids == plain.token_ids


def test_a_signal_while_a_run_is_prepared_ends_the_run_at_once(small_target, tmp_path, monkeypatch):
    """A thread ends the process, even if the main thread is in a long call."""
    ended: queue.SimpleQueue = queue.SimpleQueue()
    monkeypatch.setattr(stop, "end_now", lambda *end: ended.put(end))

    def load(folder: Path) -> None:
        signal.raise_signal(signal.SIGTERM)
        raise InputError("{} ({})".format(*ended.get(timeout=30)))

    monkeypatch.setattr(distill, "load_tokenizer", load)
    line = refusal(distill.distill, distill_config(tmp_path, small_target))
    assert line.startswith("SIGTERM ended the run before its first update") and "(75)" in line


@pytest.mark.slow
def test_resume_is_exact(small_target, distilled, tmp_path, monkeypatch):
    """A run is cut after a checkpoint and resumed: the drafter and the metrics are the same."""
    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        cut_at(patch, step=8)
        distill.distill(distill_config(tmp_path / "cut", small_target))
    distill.distill(distill_config(tmp_path / "cut", small_target))
    for name in ("draft/model.safetensors", "run/metrics.jsonl"):
        assert (distilled / name).read_bytes() == (tmp_path / "cut" / name).read_bytes(), name
    assert [record["step"] for record in metrics(distilled, "train")] == [2, 4, 6, 8, 10, 12]


@pytest.mark.slow
def test_export_writes_the_drafter_of_a_checkpoint(small_target, tmp_path, capsys, monkeypatch):
    config = changed(distill_config(tmp_path, small_target), draft_vocabulary=40)
    config = changed(config, run_decode_prompts=1)
    distill.distill(changed(config, run_save_every=3))
    assert "draft vocabulary: 40 of 320 tokens cover " in capsys.readouterr().err
    file = tmp_path / "config.py"
    file.write_text(f"from moa_jax.config import *\nconfig = {config!r}\n")
    files = lambda folder: {p.name: p.read_bytes() for p in folder.iterdir() if p.suffix != ".md"}

    def exported(checkpoint: str, folder: str) -> dict[str, bytes]:
        command = ["--config", str(file), "--checkpoint", checkpoint]
        export.main([*command, "--output", str(tmp_path / folder)])
        return files(tmp_path / folder)

    final = files(tmp_path / "draft")
    assert set(final) == {"config.json", "model.safetensors", VOCABULARY, replace.RUN}
    assert exported("12", "twelve") == exported("newest", "newest") == final
    taus = {each["step"]: each["decoded_tau"] for each in metrics(tmp_path, "decode")}
    assert f"step 12, decoded_tau {taus[12]:.3f}" in capsys.readouterr().err
    assert all(0 < each["oov_mass"] < 1 for each in metrics(tmp_path, "eval"))
    assert exported("9", "nine") != final
    load_drafter(tmp_path / "nine", load_target(small_target))
    next((tmp_path / "run" / "checkpoints" / "9").glob("state/**/d/*")).write_bytes(b"")
    for checkpoint, line in {"7": "7: no such checkpoint", "9": "9: damaged"}.items():
        assert line in refusal(exported, checkpoint, "refused")
    count = export.frequent_in
    monkeypatch.setattr(export, "frequent_in", lambda train, size, of: count(train, size + 1, of))
    assert "other data: draft vocabulary: " in refusal(exported, "12", "refused")
    assert not (tmp_path / "refused").exists()


def test_best_checkpoint_is_that_of_the_highest_tau(small_target, tmp_path):
    config = distill_config(tmp_path, small_target)
    assert "no checkpoint yet; train" in refusal(export.step_of, config, "best")
    for step in ("4", "8", "12", "4.damaged"):
        (tmp_path / "run" / "checkpoints" / step).mkdir(parents=True)
    log = tmp_path / "run" / "metrics.jsonl"
    log.write_text('{"step": 4, "kind": "train", "loss": 1.0}\n')
    assert "none of the checkpoints" in refusal(export.step_of, config, "best")
    taus = {4: 2.0, 6: 9.0, 8: 3.0, 12: 2.5}
    records = [{"step": step, "kind": "eval", "simulated_tau": tau} for step, tau in taus.items()]
    log.write_text("".join(json.dumps(record) + "\n" for record in records))
    assert export.step_of(config, "best") == 8 and export.step_of(config, "newest") == 12
    with log.open("a") as file:  # a run that decodes is rated by decoding alone
        file.write('{"step": 4, "kind": "decode", "decoded_tau": 1.1}\n')
    assert export.step_of(config, "best") == 4


def test_accumulation_averages_the_gradients_of_micro_batches():
    tx = optimizer(dataclasses.replace(OPTIM, warmup_steps=1, max_grad_norm=1e9))
    params = {"w": jnp.ones((5, 7))}

    def loss(params, frozen, batch, key, progress):
        return next_token_loss(jax.nn.one_hot(batch.tokens_BT, 5) @ params["w"], batch)

    tokens_BT = np.random.default_rng(0).integers(0, 5, (4, 6)).astype(np.int32)
    ones_BT = np.ones_like(tokens_BT)
    batch = Batch(tokens_BT, ones_BT, ones_BT.cumsum(1) - 1, ones_BT > 0)
    halves = [Batch(*(x[half] for x in batch)) for half in (slice(2), slice(2, 4))]
    gradient = jax.jit(jax.grad(lambda params, batch: loss(params, 0, batch, 0, 0)[0]))
    one, other = (gradient(params, half)["w"] for half in halves)
    update = jax.jit(make_update(loss, tx, seed=0, total_steps=4, accumulate=2))
    _, found = update(init_state(params, tx), None, batch)
    assert float(found["grad_norm"]) == pytest.approx(np.linalg.norm((one + other) / 2), rel=1e-5)


def test_a_gradient_that_is_not_finite_changes_nothing():
    """The loss, the distance of a point from itself, is finite, and its gradient is not."""
    tx = optimizer(OPTIM)
    params = {"w": jnp.zeros(3), "b": jnp.ones(2)}

    def loss(params, frozen, batch, key, progress):
        return jnp.sqrt(jnp.sum(params["w"] ** 2)) + jnp.sum(params["b"]), {}

    ones_BT = np.ones((1, 4), np.int32)
    state = init_state(params, tx)
    update = jax.jit(make_update(loss, tx, seed=0, total_steps=4))
    found, metrics = update(state, None, Batch(ones_BT, ones_BT, ones_BT, ones_BT > 0))
    assert metrics["loss"] == 2.0 and not metrics["finite"] and metrics["tokens"] == 4
    assert found.step == 1
    same = jax.tree.map(np.array_equal, found._replace(step=0), state._replace(step=0))
    assert all(jax.tree.leaves(same))


# ---- refusals before the target is loaded ------------------------------------------------


def test_refused_before_the_target_is_loaded(small_target, distilled, monkeypatch, capsys):
    monkeypatch.setattr(distill, "load_target", None)
    monkeypatch.setitem(sys.modules, "tensorboardX", None)
    monkeypatch.setattr(decoding, "MAX_NEW_TOKENS", 999)
    config = distill_config(distilled, small_target)
    for changes, line in (
        (dict(run_tensorboard=True), "run.tensorboard: tensorboardX is missing"),
        (dict(run_decode_prompts=2), "no validation prompt leaves 999 of the target's positions"),
        (dict(optim_b2=0.5), "holds a run with other settings: optim.b2: 0.95 -> 0.5; restore"),
        (dict(draft_vocabulary=40), "other settings: draft_vocabulary: null -> 40; restore"),
        (dict(output=str(ROOT / "train")), "exists and is not a model folder; choose another"),
        (dict(output=str(distilled)), "is, or holds, run.directory "),
        (dict(run_directory="other"), f"draft holds a model that the run in {distilled}/run wrote"),
    ):
        assert line in refusal(distill.distill, changed(config, **changes))
    monkeypatch.setattr(batches, "load", None)  # refused before any data is tokenised
    monkeypatch.setattr(os, "statvfs", lambda folder: Mock(f_bavail=1, f_frsize=4096))
    for changes, line in (
        (dict(data_validation=("none.jsonl",)), "data.validation: no file or folder none.jsonl"),
        (dict(data_validation=()), "data.validation is empty; name a file"),
        (dict(run_directory=str(distilled / "new")), "0 MB free, and 3 checkpoints of the run"),
    ):
        assert line in refusal(distill.distill, changed(config, **changes))
    assert f"validation reads training data ({CONVERSATIONS})" in capsys.readouterr().err


def test_prompts_are_decoded_where_that_takes_little_time_and_memory(tmp_path):
    config, target = distill_config(tmp_path, tmp_path), pretrain_config(tmp_path).target
    mesh = sharding.make_mesh(config.mesh, jax.devices()[:1])
    step = make_train_step(config, target, mesh)

    def count(memory: float, **changes: int) -> tuple[int | None, bool]:
        chosen = decoding.with_decode_prompts(
            changed(config, **changes), target, step, mesh, memory
        )
        return chosen[0].run.decode_prompts, "run.decode_prompts is" in chosen[1]

    assert count(1e12, run_save_every=5000) == (8, True)
    assert count(1e12) == count(1e5, run_save_every=5000) == (0, True)
    assert count(1e12, run_decode_prompts=3) == (3, False)


@pytest.mark.parametrize("warmup, decay", [(2, 10), (0, 10), (3, 0)])
def test_the_logged_learning_rate_is_that_of_the_update(warmup, decay):
    optim = dataclasses.replace(OPTIM, warmup_steps=warmup, decay_steps=decay)
    for step in range(15):
        assert rate_of_update(optim, step) == pytest.approx(float(schedule(optim)(step)))


# ---- settings -----------------------------------------------------------------------------


@pytest.fixture
def settings_file(tmp_path) -> str:
    path = tmp_path / "settings.py"
    path.write_text(
        "from tests.train.test_training import distill_config\n"
        "from pathlib import Path\n"
        "config = distill_config(Path('runs'), Path('target'))\n"
    )
    return str(path)


def test_overrides_that_are_valid_together_need_no_order(settings_file):
    load = functools.partial(load_config, settings_file, DistillConfig)
    flags = ["--masks.shortest_future=20", "--masks.longest_future=28"]
    assert load(flags) == load(flags[::-1]) != load([])
    config = load(["--horizon=99", "--horizon=5", "--data.sources=a,b", "--data.pack", "false"])
    assert (config.horizon, config.data.sources, config.data.pack) == (5, ("a", "b"), False)


def test_a_tilde_is_the_folder_of_the_user(settings_file, monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    flags = ["--output", "~/drafter", "--run.directory", "~/run", "--data.cache", "~/cache"]
    config = load_config(settings_file, DistillConfig, flags)
    found = (config.output, config.run.directory, config.data.cache)
    assert found == tuple(str(tmp_path / name) for name in ("drafter", "run", "cache"))
    config = load_config(settings_file, DistillConfig, ["--run.directory", "run"])
    assert config.run.directory == str(Path("run").absolute())  # compared between processes


TINY = str(ROOT / "configs" / "tiny.py")


def defines_config(path: Path) -> bool:
    return re.search(r"^config *[:=]", path.read_text(), re.MULTILINE) is not None


CONFIGS = sorted(filter(defines_config, (ROOT / "configs").glob("*.py")))


@pytest.mark.parametrize("path", CONFIGS, ids=lambda p: p.name)
def test_committed_configs_load(path):
    config = read_config(str(path), PretrainConfig, DistillConfig, GridConfig)
    place = config.directory if isinstance(config, GridConfig) else config.run.directory
    assert place.startswith("runs/")


PRESETS = [(path, name) for path in CONFIGS for name in presets_of(str(path))]


@pytest.mark.parametrize(("path", "preset"), PRESETS, ids=lambda part: getattr(part, "stem", part))
def test_a_preset_splits_the_drafter_over_all_chips_and_copies_the_target(path, preset):
    """Chips that share a target have different rows; all runs compute the same, in parts or not."""
    plain, config = (load_config(str(path), DistillConfig, [], name) for name in (None, preset))
    lines = fingerprint.changes(dataclasses.asdict(plain), config)
    names = {line.partition(":")[0] for line in lines}
    wanted, tensor = machine(preset), config.mesh.tensor
    mesh = AbstractMesh((1, wanted.num_chips // tensor, tensor), sharding.MESH_AXES)
    step = make_train_step(config, SHAPES[config.target], mesh, wanted.chip.memory)
    down = step.state_sharding.params["self_attention"]["mlp"]["down"]["kernel"]
    assert down.spec == (P(None, ("fsdp", "tensor")) if tensor > 1 else P("tensor", "fsdp"))
    assert step.target_place == "copied" and names <= {"optim.accumulate"}


def test_a_preset_comes_before_flags_and_an_unknown_one_is_refused():
    path = str(ROOT / "configs" / "moa_llama3_8b.py")
    assert load_config(path, DistillConfig, [], "h200:1").optim.accumulate == 4
    flags = ["--optim.accumulate", "2"]
    assert load_config(path, DistillConfig, flags, "h200:1").optim.accumulate == 2
    assert load_config(path, DistillConfig, [], "none") == load_config(path, DistillConfig, [])
    for name, choice in ((path, "choose from v5e:4x4, "), (TINY, "leave the flag out")):
        line = refusal(distill.main, ["--config", name, "--preset", "h200:2"])
        assert line.startswith(f"--preset h200:2: no such preset in {name}; {choice}")
