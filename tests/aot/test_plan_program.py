"""train.plan as a program: verdicts, refusals, and real compilers."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import numpy as np
import pytest

from configs import tiny
from configs.shapes import SHAPES
from infer.bench.plan import child, lowering, machines, training
from infer.bench.plan.machines import GIB, machine
from moa_jax.config import DistillConfig, Eagle3Config
from moa_jax.decode.draft_vocabulary import DraftVocabulary, save_vocabulary
from moa_jax.errors import InputError
from tests.aot.compiling import needs, run_plan
from tests.model_folders import refusal
from train import plan
from train.run.settings import load_config

# ---- the program --------------------------------------------------------------------------


def a_plan(rows: int, limit: float = 15.75, **rest: Any) -> dict[str, Any]:
    """What `training.plan` would find where every 16 rows take a GiB."""
    temporary = rows / 16
    memory = dict(target=0.935, drafter=0.0625, optimizer=0.125, batch=0.001)
    peak = sum(memory.values()) + temporary
    memory |= dict(temporary=temporary, evaluation=0.5, peak=peak, limit=limit)
    return {
        "topology": "v5e:4x4",
        "chips": 16,
        "mesh": {"data": 1, "fsdp": 16, "tensor": 1},
        "rows_per_batch": rows,
        "rows_unit": 16,
        "row_length": 2048,
        "accumulate": 1,
        "memory": {part: int(size * GIB) for part, size in memory.items()},
        "compile_s": {"step": 40.0, "evaluation": 20.0},
        "hurried": True,
        "refused": False,
        "fits": peak <= limit,
        "model_flops": 1.6e15,
        "model_flops_per_token": 2.5e10,
        "traced_flops": 2e15,
        "flops": 1.25e14,
        "bytes": 1e11,
        "collectives": {"all-gather": {"count": 224, "bytes": 15 * GIB}},
        "loops_of_unknown_length": 0,
        "links": {"count": 2, "bytes_per_s": 50e9},
        "bound_s": {"compute": 0.6, "memory": 0.01, "network": 0.08},
        "peak_flops": 16 * 197e12,
        "step_s": rows / 32,
        "parts_s": {"products": rows / 40, "memory": 0.1, "network": 0.02},
        "kernels": {"attend_forward": 34},
    } | rest


@pytest.fixture
def planned(monkeypatch):
    """Replaces the compiler by `a_plan`; gives the list of (rows, in a hurry) that were asked."""
    asked = []

    def fake(config, target_cfg, wanted, hurry=False):
        asked.append((config.data.rows_per_batch, hurry))
        return a_plan(config.data.rows_per_batch, hurried=hurry)

    monkeypatch.setattr(training, "plan", fake)
    monkeypatch.setattr(plan, "check_compiler", lambda wanted: None)
    return asked


COMMAND = ["--config", "configs/moa_llama3_8b.py", "--topology", "v5e:4x4"]


@pytest.mark.parametrize("rows, code, verdict", [(32, 0, "fits"), (512, 3, "does not fit")])
def test_the_last_line_is_the_verdict(planned, capsys, rows, code, verdict):
    assert plan.main([*COMMAND, "--data.rows_per_batch", str(rows), "--fill", "0.5"]) == code
    lines = capsys.readouterr().out.splitlines()
    assert lines[-1] == verdict
    assert planned == [(rows, True)]
    peak = next(line for line in lines if line.startswith("  peak"))
    assert f"{1.123 + rows / 16:.3f} of 15.75" in peak
    assert "  the chip with the fewest links has 2, each of 50 GB/s" in lines
    assert "rows are 50% full (--fill)" in lines
    assert "kernels of attention: attend_forward 34" in lines
    assert lines[0].endswith("with --preset v5e:4x4")  # the config has one for it
    # 32 rows of 2,048 tokens take a second, and half of them are padding
    assert "so 32,768 tokens/s, 26.0% model FLOP utilisation" in lines


@pytest.mark.parametrize("flags, preset", [((), "v5e:4x4"), (("--preset", "none"), None)])
def test_the_preset_of_a_topology_can_be_left_out(planned, capsys, flags, preset):
    plan.main([*COMMAND, "--json", *flags])
    assert json.loads(capsys.readouterr().out)["preset"] == preset
    config, _ = plan._asked([*COMMAND, *flags])
    assert config == load_config(COMMAND[1], DistillConfig, [], preset)


def test_json_is_all_of_stdout(planned, capsys):
    assert plan.main([*COMMAND, "--json", "--data.rows_per_batch", "512"]) == 3
    found = json.loads(capsys.readouterr().out)
    assert found.items() >= a_plan(512).items()
    contract = {"collectives", "flops", "bytes", "step_s", "mfu", "memory", "fits"}
    assert contract <= found.keys()
    assert set(found["collectives"]["all-gather"]) == {"count", "bytes"}
    assert found["tokens_per_s"] == pytest.approx(found["fill"] * 512 * 2048 / 16)
    assert found["mfu"] == pytest.approx(found["tokens_per_s"] * 2.5e10 / (16 * 197e12))


def test_a_drafter_is_planned_with_its_draft_vocabulary(tmp_path):
    """Of a known target, which needs no files, and of a folder."""
    path = tmp_path / "vocabulary.safetensors"
    for target in ("meta-llama/Meta-Llama-3-8B-Instruct", tiny.config.target):
        config = dataclasses.replace(
            tiny.config, target=target, drafter=Eagle3Config(1, 24), vocabulary=str(path)
        )
        plain = dataclasses.replace(config, vocabulary=None)
        vocab_size = plan.with_shapes(plain)[1].vocab_size
        save_vocabulary(path, DraftVocabulary(np.array([1, 4, 5], np.int32), vocab_size))
        found, sizes = plan.with_shapes(config)
        assert found.drafter.draft_ids == (1, 4, 5) and sizes.vocab_size == vocab_size
    found = dataclasses.replace(config, target="meta-llama/Meta-Llama-3-8B-Instruct")
    assert "use the draft vocabulary of this target" in refusal(plan.with_shapes, found)


def test_an_impossible_fill_is_refused(planned):
    with pytest.raises(InputError, match="--fill 1.2; choose above 0 and at most 1"):
        plan.main([*COMMAND, "--fill", "1.2"])


def test_a_close_verdict_is_compiled_in_full(planned, capsys):
    assert plan.main([*COMMAND, "--data.rows_per_batch", "224"]) == 0
    assert planned == [(224, True), (224, False)]


def test_the_largest_batch_is_searched(planned, capsys):
    assert plan.main([*COMMAND, "--largest", "--data.rows_per_batch", "32"]) == 0
    captured = capsys.readouterr()
    assert "largest data.rows_per_batch that fits: 224" in captured.out
    assert captured.out.splitlines()[-1] == "fits"
    assert planned == [(32, True), (224, True), (240, True)]
    assert "240 rows do not fit" in captured.err


def test_a_search_hurries_even_from_a_close_batch(planned):
    plan.main([*COMMAND, "--largest", "--data.rows_per_batch", "240"])
    assert planned == [(240, True), (240, False), (224, True)]


def test_a_refused_batch_has_no_collectives(planned, capsys, monkeypatch):
    nothing = a_plan(512, refused=True, collectives={})
    nothing["memory"] |= {"evaluation": None}
    nothing["bound_s"] |= {"network": None}
    nothing |= training.UNKNOWN
    monkeypatch.setattr(training, "plan", lambda *_: nothing)
    assert plan.main(COMMAND) == 3
    out = capsys.readouterr().out
    assert "peak, at least" in out and "not known" in out


@pytest.mark.parametrize(
    "end, name",
    [("kill -SEGV $$", "SIGSEGV"), ("exit 139", "SIGSEGV"), ("kill -KILL $$", "out of memory")],
)
def test_a_crash_is_no_verdict(monkeypatch, capsys, tmp_path, end, name):
    python = tmp_path / "python"
    python.write_text(f"#!/bin/sh\necho stack >&2\n{end}\n", encoding="utf-8")
    python.chmod(0o755)
    monkeypatch.setattr(child.sys, "executable", str(python))
    for module in (plan, machines):
        monkeypatch.setattr(module, "check_compiler", lambda wanted: None)
    assert plan.main(COMMAND) == plan.CRASHED
    captured = capsys.readouterr()
    assert captured.out == "" and len(captured.err.splitlines()) == 1
    assert name in captured.err


def test_without_the_extra_one_line_says_how_to_get_it(monkeypatch):
    monkeypatch.setattr(machines, "has_compiler", lambda compiler: False)
    with pytest.raises(InputError, match="make env PLAN=1"):
        plan.main(COMMAND)


def test_libtpu_says_how_much_is_too_much():
    used = lowering.needed
    gib = 1024**3
    assert used("required for HLO temporaries (33.50G) exceeds available HBM (15.75G).") == (
        33.5 * gib
    )
    assert used("Used 20.5G of 15.75G hbm. Exceeded hbm capacity by 4.75G") == 20.5 * gib
    assert used("(512.00M) exceeds") == gib / 2
    assert used("Ran out.") is None


# ---- real compilers -----------------------------------------------------------------------

LLAMA = "configs/moa_llama3_8b.py"
PAPER = ("--config", "configs/moa_llama3_8b_paper.py")
# 4 rows of 2048 tokens at once on one H200.
ALONE = (*PAPER, "--topology", "h200:1", "--data.rows_per_batch", "4", "--optim.accumulate", "1")
AIM = 0.45  # model FLOP utilisation


def of_flagship(topology: str) -> dict[str, Any]:
    """Its plan as `train.plan` makes it without further flags."""
    config = load_config(LLAMA, DistillConfig, [], topology)
    found = training.plan(config, SHAPES[config.target], machine(topology), hurry=True)
    return training.filled(found, config)


@pytest.mark.slow
@needs["tpu"]
def test_the_8b_step_fits_16_tpu_chips():
    """Two chips share a copy of the target, and each drafts rows of its own."""
    found = of_flagship("v5e:4x4")
    memory = found["memory"]
    assert found["fits"] and memory["peak"] < memory["limit"]
    assert found["mfu"] > 0.9 * AIM  # a hurried compile costs a tenth of the speed
    assert memory["target"] == pytest.approx(8.03e9 * 2 / 2, rel=0.01)
    assert memory["drafter"] == pytest.approx(264e6 * 4 / 16, rel=0.01)
    assert memory["optimizer"] == pytest.approx(2 * memory["drafter"], rel=0.01)
    assert found["collectives"]["all-gather"]["bytes"] < 5 * GIB  # 60 with a head in each chunk
    received = sum(kind["bytes"] for kind in found["collectives"].values())
    assert received < 8 * GIB  # 93 with a head in each chunk, 15.5 with all weights cut
    assert found["traced_flops"] < 1.1 * found["model_flops"]  # no logits are made again
    assert found["loops_of_unknown_length"] == 0
    assert found["bound_s"]["compute"] == found["traced_flops"] / (16 * 197e12)
    assert found["bound_s"]["network"] == received / (2 * 50e9)  # as a corner receives it
    assert_modelled(found)


@pytest.mark.slow
@needs["cuda"]
def test_where_there_is_room_each_gpu_has_a_copy_of_the_target():
    found = of_flagship("h200:8")
    assert found["fits"] and found["mfu"] > AIM
    assert found["memory"]["target"] == pytest.approx(8.03e9 * 2, rel=0.01)
    assert found["memory"]["optimizer"] == pytest.approx(2 * 264e6 * 4 / 8, rel=0.01)
    assert found["collectives"]["all-gather"]["bytes"] < 10 * GIB  # 108 with all weights cut
    assert_modelled(found)


def assert_modelled(found: dict[str, Any]) -> None:
    """The compiled operations hold what was traced, and take longer than any bound.

    Attention is in kernels: of the target's 32 layers, and of two of the drafter's with gradients.
    """
    assert found["kernels"] == {"attend_forward": 34, "attend_dq": 2, "attend_dkv": 2}
    assert not found["notices"]
    assert found["flops"] * found["chips"] == pytest.approx(found["traced_flops"], rel=0.05)
    assert found["step_s"] == pytest.approx(sum(found["parts_s"].values()), rel=0.05)
    assert found["step_s"] > max(found["bound_s"]["compute"], found["bound_s"]["memory"])
    assert 0 < found["mfu"] < found["fill"] * training.ATTAINED


@pytest.mark.slow
@needs["cuda"]
def test_the_8b_step_fits_one_h200_with_room():
    code, found = run_plan(plan, *ALONE)
    assert code == plan.FITS
    assert found["memory"]["peak"] < 0.25 * found["memory"]["limit"]
    assert found["collectives"] == {}
    assert 1 < found["traced_flops"] / found["model_flops"] < 1.25


@pytest.mark.slow
@needs["cuda"]
def test_chunks_save_three_quarters_of_temporary_memory():
    chunked, whole = (run_plan(plan, *ALONE, *flags)[1] for flags in ((), ("--plain",)))
    assert whole["memory"]["temporary"] > 4 * chunked["memory"]["temporary"]
    # Without chunks kernels alone compute something again, scores in the backward pass.
    assert 1 < whole["traced_flops"] / whole["model_flops"] < 1.02


@pytest.mark.slow
@pytest.mark.parametrize(
    "topology, refused",
    [
        pytest.param("v5e:4x4", True, marks=needs["tpu"]),
        pytest.param("h200:1", False, marks=needs["cuda"]),
    ],
)
def test_a_batch_far_too_large_does_not_fit(topology, refused):
    flags = ("--data.rows_per_batch", "128", "--optim.accumulate", "1")
    code, found = run_plan(plan, "--config", LLAMA, "--topology", topology, *flags)
    assert code == plan.DOES_NOT_FIT and found["refused"] == refused
    assert found["memory"]["peak"] > 2 * found["memory"]["limit"]


@pytest.mark.slow
@needs["cuda"]
@pytest.mark.parametrize(
    "flags, fault",
    [
        (("--mesh.tensor", "2"), "does not divide"),
        (("--mesh.data", "3"), "does not use 2 devices"),
        (("--data.rows_per_batch", "7"), "does not split"),
    ],
)
def test_a_mesh_that_does_not_divide_is_refused(flags, fault):
    with pytest.raises(InputError, match=fault) as refusal:
        plan.main(["--config", "configs/tiny.py", "--topology", "h200:2", *flags])
    assert len(str(refusal.value).splitlines()) == 1


@pytest.mark.slow
@needs["tpu"]
def test_a_slice_that_libtpu_does_not_know_is_refused():
    with pytest.raises(InputError, match="no such slice"):
        plan.main(["--config", "configs/tiny.py", "--topology", "v5e:3x5"])
