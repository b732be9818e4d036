"""The run logger: steps that are not finite, speed, progress, TensorBoard."""

from __future__ import annotations

import json
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

import jax
import numpy as np
import pytest

from moa_jax.training import metrics
from tests.model_folders import refusal
from tests.train.toy_run import placed_batch, steps_of, toy_config, toy_job
from train.run.loop import fit
from train.run.start import describe
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

    def batch(step: int) -> Any:
        if step == 9:
            raise KeyboardInterrupt
        return spoilt_batch(step)

    with pytest.raises(KeyboardInterrupt):
        fit(toy_job(config, batch=batch, layout="8 chips"), None)
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


def test_a_resume_states_the_hours_at_the_speed_since_the_start():
    def record(kind: str, step: int, time: float) -> dict:
        return {"kind": kind, "step": step, "time": time, "layout": "8 chips"}

    earlier = [record("speed", 90, 1.0), record("start", 90, 5.0)]
    earlier += [record("speed", step, 10.0 * step) for step in (100, 110, 120)]
    line = describe(120, 1200, "8 chips", earlier, is_resumed=True)
    assert line.endswith("; 1080 steps left, about 3.0 h at the speed so far")


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


def test_prompts_are_decoded_at_checkpoints_and_the_summary_names_the_best(tmp_path, capsys):
    decoded, simulated = iter([1.25, 1.75, 1.5]), iter([1.5, 2.5, 2.0, 2.25])
    evaluate = lambda params, frozen: {"simulated_tau": next(simulated)}
    job = toy_job(
        toy_config(tmp_path), evaluate=evaluate, decode=lambda _: {"decoded_tau": next(decoded)}
    )
    fit(job, None)
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


def test_a_run_that_begins_anew_keeps_the_log_of_the_one_before(tmp_path):
    for number in range(3):
        log = metrics.MetricsLog(tmp_path / "metrics.jsonl", -1)
        log.write(number, "train", {"loss": 1.0})
        log.close()
    names = ("metrics.1.jsonl", "metrics.2.jsonl", "metrics.jsonl")
    assert sorted(path.name for path in tmp_path.iterdir()) == sorted(names)
    assert [metrics.read_records(tmp_path / name)[0]["step"] for name in names] == [0, 1, 2]
