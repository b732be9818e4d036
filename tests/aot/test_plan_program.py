"""train.plan as a program: verdicts, refusals, and real compilers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from configs import tiny
from infer.bench.plan import machines, training
from infer.bench.plan.machines import GIB, machine
from moa_jax.config import DistillConfig, Eagle3Config
from moa_jax.decode.draft_vocabulary import DraftVocabulary, save_vocabulary
from tests.aot.compiling import needs, run_plan
from tests.model_folders import refusal
from train import plan
from train.run.settings import load_config

# ---- the program --------------------------------------------------------------------------


def a_plan(rows: int, parts: int = 1, limit: float = 15.75, **rest: Any) -> dict[str, Any]:
    """Returns the plan that `training.plan` would return if every 16 rows took one GiB."""
    temporary = rows / 16 / parts
    memory = dict(target=0.935, drafter=0.0625, optimizer=0.125, batch=0.001)
    peak = sum(memory.values()) + temporary
    memory |= dict(temporary=temporary, peak=peak, limit=limit)
    found = dict(topology="v5e:4x4", chips=16, mesh={"data": 1, "fsdp": 16, "tensor": 1})
    found |= dict(rows_per_batch=rows, row_length=2048, accumulate=parts, target_place="copied")
    found["memory"] = {part: int(size * GIB) for part, size in memory.items()}
    found |= dict(evaluation_peak=0, hurried=True, fits=peak <= limit, model_flops=1.6e15)
    found |= dict(flops=1.25e14, bytes=1e11, total_steps=3_600_000, total_tokens=10**12, mfu=0.5)
    found["collectives"] = {"all-gather": {"count": 224, "bytes": 15 * GIB}}
    found |= dict(step_s=rows / 32, hours=rows / 32 * 1000, tokens_per_s=65_536.0)
    found["parts_s"] = {"products": rows / 40, "memory": 0.1, "network": 0.02}
    return found | rest


@pytest.fixture
def planned(monkeypatch):
    """Replaces the compiler with `a_plan`; returns the list of requested (rows, hurried)."""
    asked = []

    def fake(config, target_cfg, wanted, hurry=False):
        rows, parts = config.data.rows_per_batch, config.optim.accumulate
        place = "cut" if config.mesh.target == "cut" else "copied"
        asked.append((rows, hurry))
        return a_plan(rows, parts, hurried=hurry, target_place=place)

    monkeypatch.setattr(training, "plan", fake)
    return asked


CONFIG = "configs/moa_llama3_8b.py"
COMMAND = ["--config", CONFIG, "--topology", "v5e:4x4"]
LLAMA = "meta-llama/Meta-Llama-3-8B-Instruct"


@pytest.mark.parametrize("rows, code, verdict", [(32, 0, "fits"), (512, 3, "does not fit")])
def test_the_last_line_is_the_verdict(planned, capsys, rows, code, verdict):
    assert plan.main([*COMMAND, "--data.rows_per_batch", str(rows)]) == code
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[-1] == verdict and ("try --mesh.target cut; --fit adds" in err) == bool(code)
    assert planned == [(rows, True)]
    assert f"peak {1.123 + rows / 16:.3f}, limit 15.750" in "\n".join(lines)
    assert lines[0].endswith("preset v5e:4x4")  # the config has a preset
    assert "collectives of a step: 224 all-gather of 15.000 GiB" in lines
    assert "65,536 tokens/s with padding, 50.0% model FLOP utilisation" in lines
    hours = f"{rows / 32 * 1000:,.2f}"
    assert f"the whole run: 3,600,000 steps in {hours} hours, 1e+12 tokens with padding" in lines


def test_settings_are_added_until_the_step_fits(planned, capsys):
    assert plan.main([*COMMAND, "--data.rows_per_batch", "512", "--fit"]) == 0
    line = "this is the plan with --mesh.target cut --optim.accumulate 4"
    assert capsys.readouterr().out.splitlines()[-2:] == [line, "fits"]
    assert plan.main([*COMMAND, "--data.rows_per_batch", "499", "--fit"]) == 3  # in no equal parts
    assert "no setting is left that lowers the memory" in capsys.readouterr().err


@pytest.mark.parametrize("flags, preset", [((), "v5e:4x4"), (("--preset", "none"), None)])
def test_json_is_all_of_stdout(planned, capsys, flags, preset):
    """The preset of a topology can be left out."""
    assert plan.main([*COMMAND, "--json", "--full", "--data.rows_per_batch", "512", *flags]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found == a_plan(512, hurried=False) | {"preset": preset, "added": ""}
    assert planned == [(512, False)]
    config, _ = plan._asked([*COMMAND, *flags])
    assert config == load_config(COMMAND[1], DistillConfig, [], preset)


@pytest.mark.parametrize("target", [LLAMA, tiny.config.target], ids=["known", "folder"])
def test_a_drafter_is_planned_with_its_draft_vocabulary(target, tmp_path):
    path, drafter = tmp_path / "vocabulary.safetensors", Eagle3Config(1, 24)
    config = dataclasses.replace(tiny.config, target=target, drafter=drafter)
    vocab_size = plan.with_shapes(config)[1].vocab_size
    save_vocabulary(path, DraftVocabulary(np.array([1, 4, 5], np.int32), vocab_size))
    config = dataclasses.replace(config, vocabulary=str(path))
    assert plan.with_shapes(config)[0].drafter.draft_ids == (1, 4, 5)


def test_close_to_the_limit_a_run_is_compiled_as_it_is(planned):
    """The figure of a hurried compile is right within some percent."""
    plan.main([*COMMAND, "--data.rows_per_batch", "224"])
    assert planned == [(224, True), (224, False)]


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(machines, "has_compiler", lambda compiler: False)
    assert "make env PLAN=1" in refusal(plan.main, COMMAND)


# ---- real compilers -----------------------------------------------------------------------

AIM = 0.45  # model FLOP utilisation


@pytest.mark.slow
@needs["tpu"]
def test_the_8b_step_fits_16_tpu_chips():
    """Two chips share a copy of the target, and each of them drafts its own rows."""
    code, found = run_plan(plan, *COMMAND)
    memory = found["memory"]
    assert code == plan.FITS and memory["peak"] < memory["limit"] and found["hurried"]
    assert {"fits", "bytes", "topology", "mesh", "rows_per_batch", "preset"} <= found.keys()
    assert found["mfu"] > 0.9 * AIM  # a hurried compile costs a tenth of the speed
    assert memory["target"] == pytest.approx(8.03e9 * 2 / 2, rel=0.01)
    assert memory["drafter"] == pytest.approx(264e6 * 4 / 16, rel=0.01)
    assert memory["optimizer"] == pytest.approx(2 * memory["drafter"], rel=0.01)
    assert found["collectives"]["all-gather"]["bytes"] < 5 * GIB  # 60 with a head in each chunk
    received = sum(kind["bytes"] for kind in found["collectives"].values())
    assert received < 8 * GIB  # 93 with a head in each chunk, 15.5 with all weights cut
    assert_modelled(found, again=0.12)


@pytest.mark.slow
@needs["cuda"]
def test_where_there_is_room_each_gpu_has_a_copy_of_the_target():
    code, found = run_plan(plan, "--config", CONFIG, "--topology", "a100:8")
    assert code == plan.FITS and found["mfu"] > AIM
    assert found["memory"]["target"] == pytest.approx(8.03e9 * 2, rel=0.01)
    assert found["memory"]["optimizer"] == pytest.approx(2 * 264e6 * 4 / 8, rel=0.01)
    assert found["collectives"]["all-gather"]["bytes"] < 10 * GIB  # 108 with all weights cut
    assert_modelled(found, again=0.04)


def assert_modelled(found: dict[str, Any], again: float) -> None:
    """No logits are recomputed, and no step is faster than its products and its bytes allow.

    Masked scores are 2 to 3 % of the FLOPs that a step needs. Chunks of memory compute the forward
    of LSA again, 7.6 %, and logits would be 4.2 %.
    """
    assert 1 < found["flops"] * found["chips"] / found["model_flops"] < 1 + again
    assert found["step_s"] == pytest.approx(sum(found["parts_s"].values()))
    chip = machine(found["topology"]).chip
    assert found["step_s"] > found["bytes"] / chip.bandwidth * 0.5
    assert found["step_s"] > found["flops"] / chip.flops("bfloat16")
    assert 0 < found["mfu"] < training.ATTAINED
