"""The run logger: steps that are not finite, speed, progress, TensorBoard."""

from __future__ import annotations

import json
import re
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest

from moa_jax.training import metrics
from moa_jax.training.checkpoint import run_id
from tests.model_folders import refusal
from tests.train.toy_run import cut_at, placed_batch, steps_of, toy_config, toy_job
from train.run import tracker
from train.run.loop import check, fit
from train.run.wall_time import WallTime, slow_lines

BAD = 6  # the batch of this step makes the loss NaN: it is update 7


def records(folder: Path, name: str = "metrics", kind: str | None = None) -> list[dict]:
    lines = (folder / "run" / f"{name}.jsonl").read_text().splitlines()
    return [r for r in map(json.loads, lines) if kind in (None, r["kind"])]


def spoilt_batch(step: int) -> Any:
    batch = placed_batch(step)
    return batch._replace(tokens_BT=batch.tokens_BT.at[2, 3].set(-1)) if step == BAD else batch


# ---- not finite ---------------------------------------------------------------------------


def test_a_step_that_is_not_finite_stops_the_run(tmp_path):
    line = refusal(fit, toy_job(toy_config(tmp_path), batch=spoilt_batch), None)
    assert line.startswith("step 7: loss nan, gradient norm nan: its batch is in ")
    assert "optim.learning_rate" in line and "--run.not_finite skip" in line
    with np.load(tmp_path / "run" / "not_finite_7.npz") as found:
        assert found["step"] == 7
        np.testing.assert_array_equal(found["tokens_BT"], spoilt_batch(BAD).tokens_BT)
    assert steps_of(tmp_path) == ["4"]
    before = tmp_path / "before"  # a save: the step is read first, not an update later
    config = toy_config(before, save_every=BAD + 1, eval_every=100)
    refusal(fit, toy_job(config, batch=spoilt_batch), None)
    assert steps_of(before) == []


def test_a_step_that_is_not_finite_can_be_skipped(tmp_path, capsys):
    """The count of skipped steps survives a resume, which names the earlier devices."""
    config = toy_config(tmp_path, not_finite="skip", save_every=8)
    with pytest.raises(KeyboardInterrupt):
        fit(toy_job(config, batch=cut_at(9, spoilt_batch), layout="8 chips"), None)
    fit(toy_job(config, batch=spoilt_batch, layout="4 chips", steps_per_epoch=8), None)
    (record,) = records(tmp_path, kind="not_finite")
    assert record["step"] == 7 and record["loss"] == "nan" and record["skipped"] == 1
    assert [r["step"] for r in records(tmp_path, kind="train")] == [2, 4, 6, 8, 10, 12]
    assert [r["restarts"] for r in records(tmp_path, "speed", "start")] == [0, 1]
    last = records(tmp_path, kind="train")[-1]
    assert (last["epoch"], last["learning_rate"]) == (1.5, 0.01)  # constant after the decay
    err = capsys.readouterr().err
    assert "starts at step 0 of 12 on 8 chips; 12 steps left\n" in err
    assert "resumes after step 8 of 12 on 4 chips (before: 8 chips); 4 steps left\n" in err
    assert "1 updates skipped" in err.splitlines()[-1]


# ---- figures ------------------------------------------------------------------------------


def test_speed_is_logged_with_the_metrics(tmp_path, monkeypatch, capsys):
    kind = jax.devices()[0].device_kind
    monkeypatch.setitem(metrics.PEAK_FLOPS, kind, 1e9)
    fit(toy_job(toy_config(tmp_path), flops_per_token=100.0), None)
    speed = records(tmp_path, "speed")
    assert [speed[0]["kind"], speed[-1]["kind"]] == ["start", "end"]
    speeds = [each for each in speed if "tokens_per_s" in each]
    assert speeds and all(0 <= each["goodput"] <= 1 for each in speeds)
    for record in speeds:
        assert record["flops_per_s"] == pytest.approx(100 * record["tokens_per_s"], rel=1e-6)
        share = record["flops_per_s"] / (1e9 * jax.device_count())
        assert record["mfu"] == pytest.approx(share, rel=1e-4, abs=1e-7)
        assert record["step_s"] > 0 and 0 < record["goodput"] <= 1
    assert all(r["tokens"] == 32 and "finite" not in r for r in records(tmp_path, kind="train"))
    assert not any("tokens_per_s" in record for record in records(tmp_path))
    (shown,) = [line for line in capsys.readouterr().err.splitlines() if "train 12/12" in line]
    assert "loss " in shown and "tokens/s " in shown and "MFU " in shown


def test_wall_time_is_useful_or_waits_or_restarts():
    """Lost updates belong to a restart, and the time after an end does not count."""
    first = [("start", 0, 1000), ("speed", 10, 1060), ("start", 10, 1100), ("speed", 20, 1160)]
    then = [("end", 20, 1170), ("start", 20, 9000), ("speed", 30, 9020)]
    known = [{"kind": kind, "step": step, "time": at} for kind, step, at in first + then]
    older = {"kind": "speed", "step": 5}  # of a version without times
    wall = WallTime([older, *(record | {"step_s": 2.0} for record in known)])
    line = wall.line(9030)  # 60 s of updates, 100 s of waits and 40 s of a restart
    assert line.startswith("goodput 30% of 0.06 h") and "; 50% waits" in line
    assert line.endswith("20% restarts (1)")


@pytest.mark.parametrize(
    "own_s, slow",
    [([0.1, 0.1, 0.3], [2]), ([0.3, 0.1], [0]), ([0.1, 0.18], []), ([0.01, 0.03], [])],
)
def test_a_host_with_twice_the_median_of_own_work_is_named(own_s, slow):
    """The second of hosts that differ by a small part of an update delays none."""
    lines = slow_lines("abc"[: len(own_s)], own_s, update_s=1.0)
    assert [line.partition(" is slow")[0] for line in lines] == [
        f"process {process} on {'abc'[process]}" for process in slow
    ]


def test_tensorboard_gets_every_loss(tmp_path, monkeypatch):
    fake = MagicMock(__spec__=ModuleSpec("tensorboardX", None))
    monkeypatch.setitem(sys.modules, "tensorboardX", fake)
    fit(toy_job(toy_config(tmp_path, tensorboard=True)), None)
    writer = fake.SummaryWriter.return_value.__enter__.return_value
    for record in records(tmp_path, kind="train"):
        writer.add_scalar.assert_any_call("train/loss", record["loss"], record["step"])


STAND_IN = """
import functools, json, os, time

def call(kind, /, *given, **named):
    with open(os.environ["CALLS"], "a") as file:
        print(json.dumps([kind, given, named]), file=file)
    if os.environ["FAULT"] == f"{kind} hangs": time.sleep(600)
    if os.environ["FAULT"] == f"{kind} raises": raise ConnectionError("no route\\nto host")

init, log, finish = (functools.partial(call, kind) for kind in ("init", "log", "finish"))
"""


@pytest.fixture
def calls(tmp_path, monkeypatch):
    """Puts stand-ins of the packages on the path, and returns a function with their calls."""
    for name in ("wandb", "trackio"):
        (tmp_path / f"{name}.py").write_text(STAND_IN)
    for name, value in {"PYTHONPATH": tmp_path, "CALLS": tmp_path / "calls", "FAULT": ""}.items():
        monkeypatch.setenv(name, str(value))
    monkeypatch.syspath_prepend(tmp_path)
    return lambda: [json.loads(line) for line in (tmp_path / "calls").read_text().splitlines()]


@pytest.mark.parametrize("package", ["wandb", "trackio"])
def test_a_resumed_run_goes_on_in_the_same_run_of_a_tracker(tmp_path, calls, package):
    """trackio.init has no parameter `id`."""
    config = toy_config(tmp_path, tracker=package)
    batch = lambda step: placed_batch(step) if step < 9 else sys.exit("killed")
    with pytest.raises(SystemExit):
        fit(toy_job(config, batch=batch), None)
    fit(toy_job(config), None)
    known = run_id(config)
    same = {"project": "moa-jax", "name": f"run-{known}", "resume": "allow"}
    same |= {"id": known} if package == "wandb" else {}
    began = [named for name, _, named in calls() if name == "init"]
    assert [each.pop("config")["run.seed"] for each in began] == [0, 0] and began == [same] * 2
    assert [name for name, *_ in calls()].count("finish") == 2
    logged = [(named["step"], *given) for _, given, named in calls() if given]
    losses = {step: data["train/loss"] for step, data in logged if "train/loss" in data}
    assert losses == {r["step"]: r["loss"] for r in records(tmp_path, kind="train")}


FAULTS = {
    "init raises": "ConnectionError at the start: no route to host; metrics.jsonl has all",
    "log raises": "ConnectionError: no route to host; metrics.jsonl has all records",
    "log hangs": r"it did not finish within 0.5 s and was stopped; at least [1-9]\d+ rec",
    "finish hangs": "it did not finish within 0.5 s and was stopped; ",
}


@pytest.mark.parametrize("fault, says", FAULTS.items())
def test_a_tracker_that_fails_changes_nothing(tmp_path, calls, monkeypatch, capfd, fault, says):
    """The pipe holds fewer numbers than the first evaluation has."""
    monkeypatch.setenv("FAULT", fault)
    monkeypatch.setattr(tracker, "END_S", 0.5 if "hangs" in fault else 60.0)
    evaluate = lambda params, frozen: {"agreement": np.arange(5000)}
    for folder, package in ((tmp_path, "wandb"), (tmp_path / "plain", "none")):
        fit(toy_job(toy_config(folder, tracker=package), evaluate=evaluate), None)
    assert records(tmp_path) == records(tmp_path / "plain")
    assert len(re.findall(f"^run.tracker wandb: {says}", capfd.readouterr().err, re.M)) == 1


def test_a_tracker_without_its_package_is_refused(tmp_path, monkeypatch):
    """The folder that W&B writes has a spec, too."""
    monkeypatch.setattr("importlib.util.find_spec", lambda name: ModuleSpec(name, None))
    line = refusal(check, toy_config(tmp_path, tracker="wandb"))
    assert line.endswith("the package wandb is missing; pip install 'moa-jax[wandb]'")


def test_prompts_are_decoded_at_checkpoints_and_the_summary_names_the_best(tmp_path, capsys):
    decoded, simulated = iter([1.25, 1.75, 1.5]), iter([1.5, 2.5, 2.0, 2.25])
    evaluate = lambda params, frozen: {"simulated_tau": next(simulated)}
    decode = lambda _: {"decoded_tau": next(decoded)}
    fit(toy_job(toy_config(tmp_path), evaluate=evaluate, decode=decode), None)
    found = [(r["step"], r["decoded_tau"]) for r in records(tmp_path, kind="decode")]
    assert found == [(4, 1.25), (8, 1.75), (12, 1.5)]
    err = capsys.readouterr().err
    assert "step 8 decode: decoded_tau 1.75, " in err
    newest = "simulated_tau 2.25 (step 12), decoded_tau 1.5 (step 12)"
    *_, bar, _, last = err.splitlines()
    assert bar.startswith("train 12/12") and bar.endswith(newest)  # not the taus before
    assert last.startswith("12 steps, the last 12 in ")
    assert newest.replace(",", ";") + "; best by decoded_tau 1.75 at step 8" in last
    assert str(tmp_path / "run") in last and str(tmp_path / "final") in last


def test_evaluations_multiply_as_updates_do(tmp_path):
    """Evaluations use float32, also on hardware with a faster, less exact mode."""
    seen = []
    evaluate = lambda *_: seen.append(jax.config.jax_default_matmul_precision) or {}
    fit(toy_job(toy_config(tmp_path), evaluate=evaluate), None)
    assert seen == ["highest"] * 4


def test_a_run_that_begins_anew_keeps_the_log_of_the_one_before(tmp_path):
    for number in range(3):
        log = metrics.MetricsLog(tmp_path / "metrics.jsonl", -1)
        log.write(number, "train", {"loss": 1.0})
        log.close()
    names = ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert [metrics.read_records(tmp_path / name)[0]["step"] for name in names] == [0, 1, 2]
