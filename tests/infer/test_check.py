"""`infer.check`: verdicts by figures, golden files that are read or refused, exit codes."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import scipy.stats

from infer import check
from infer.bench import fidelity, golden
from infer.bench.thresholds import THRESHOLDS, faults_of
from infer.cli.flags.pair import DEMO
from infer.cli.program import run
from moa_jax.decode.exactness import Difference
from moa_jax.pretrained import describe_target
from tests.model_folders import edit_tensors, refusal, save_random_pair, tensors_of

PROMPTS = [[5, 6, 7], [60, 3]]  # no other prompt and no answer contains the token 60
LOOSE = (  # flags under which no figure is a fault
    "--max-kl 99 --max-mean-kl 99 --max-logit-difference 99 --min-top1 0.01 --min-top5 0.01"
).split()
FIGURES = {*("tokens", "mean_kl", "worst_kl", "agreement", "top5_agreement", "logit_difference")}


@pytest.fixture
def ask(run):
    """Runs the program; returns its exit code, stdout and stderr."""
    return functools.partial(run, "infer.check")


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Returns a random target, prompts, and a golden file that this program wrote for both."""
    folder = tmp_path_factory.mktemp("check")
    save_random_pair(folder, "llama", seed=5, num_hidden_layers=2)
    lines = [json.dumps({"prompt_ids": prompt}) + "\n" for prompt in PROMPTS]
    (folder / "prompts.jsonl").write_text("".join(lines))
    flags = ["--target", folder / "target", "--prompts", folder / "prompts.jsonl"]
    flags += ["--max-new-tokens", "6", "--write-golden", folder / "golden.jsonl"]
    with pytest.raises(SystemExit) as end:
        run(check.main, list(map(str, flags)))
    assert end.value.code == 0
    return folder


@pytest.fixture
def lines(folder) -> list[str]:
    return (folder / "golden.jsonl").read_text().splitlines(keepends=True)


def against(folder: Path, *flags: object, target: str = "target") -> list[object]:
    reference = ["--reference", folder / "golden.jsonl"]
    return ["--target", folder / target, *reference, "--max-new-tokens", "6", *flags]


@pytest.mark.slow
def test_a_target_equals_transformers_and_its_golden_file(ask, folder, tmp_path):
    """The target is then compared with the golden file of transformers."""
    path = tmp_path / "golden.jsonl"
    flags = ["--target", folder / "target", "--max-new-tokens", "6", "--json"]
    theirs = ["--reference", "transformers", "--write-golden", path]
    code, out, _ = ask(*flags, "--prompt-ids", "9,8,7", *theirs)
    whole = json.loads(out)
    assert code == 0 and out.count("\n") == 1
    assert whole.keys() == {"passed", "prompts", "all", "thresholds", "settings"}
    (prompt,) = whole["prompts"]
    assert prompt.keys() == {"prompt_ids", "token_ids", "figures", "differences", "faults"}
    assert prompt["figures"].keys() == FIGURES and prompt["figures"] == whole["all"]
    assert prompt["differences"] == {"chain": None} and prompt["faults"] == []
    assert whole["all"]["tokens"] == len(prompt["prompt_ids"]) + len(prompt["token_ids"])
    assert 0 < whole["all"]["mean_kl"] < 1e-9 and 0 < whole["all"]["logit_difference"] < 1e-3
    assert "transformers" in whole["settings"]["made_by"] and whole["settings"]["kl"] == "whole"
    code, out, _ = ask(*flags, "--reference", path)
    found = json.loads(out)
    assert code == 0 and found["passed"] and found["settings"]["kl"] == "top and rest"
    assert found["prompts"][0]["token_ids"] == prompt["token_ids"]
    assert found["all"]["mean_kl"] < 1e-9 and found["all"]["logit_difference"] < 1e-3


def test_a_target_equals_its_own_golden_file(ask, folder):
    code, out, _ = ask(*against(folder))
    assert code == 0 and out.rstrip().endswith("PASSED")
    assert "lower bound" in out and "moa-jax" in out.splitlines()[0]


@pytest.mark.slow
def test_one_changed_row_fails_the_prompt_that_reads_it(ask, folder, lines):
    """Only prompt 2 contains the token whose embedding is changed."""
    read = [json.loads(line) for line in lines[1:]]
    assert [60 in line["prompt_ids"] + line["token_ids"] for line in read] == [False, True]
    shutil.copytree(folder / "target", folder / "changed", dirs_exist_ok=True)
    name = "model.embed_tokens.weight"
    table_VD = tensors_of(folder / "target")[name].copy()
    table_VD[60] += 0.1
    edit_tensors(folder / "changed", **{name: table_VD})
    code, out, _ = ask(*against(folder, target="changed"))
    assert code == 1 and out.rstrip().endswith("FAILED: 1 of 2 prompts")
    assert "\nprompt 2: worst KL" in out and "\nprompt 1: " not in out
    assert ask(*against(folder, *LOOSE, target="changed"))[0] == 0


@pytest.mark.slow
def test_drafted_text_that_differs_fails_in_float32_alone(ask, folder, monkeypatch):
    monkeypatch.setattr(check, "compare", lambda *_: Difference(3, 5, 6, 0.01))
    code, out, _ = ask(*against(folder, "--json"))
    first, _ = json.loads(out)["prompts"]
    said = "token 3 is 6, plain 5; the target prefers plain's by 0.01"
    assert code == 1 and first["faults"] == [f"chain: {said}"]
    assert first["differences"]["chain"] == {"index": 3, "plain": 5, "drafted": 6, "margin": 0.01}
    code, out, _ = ask(*against(folder, "--dtype", "bfloat16", *LOOSE))
    assert code == 0 and f"prompt 2, chain: {said} (no fault in bfloat16)" in out


# ---- figures ----------------------------------------------------------------------------------


def test_figures_by_hand():
    """Compares whole logits, and the top logits with the rest as one token."""
    rng = np.random.default_rng(0)
    theirs_TV, ours_TV = rng.normal(0, 3, (2, 4, 50)).astype(np.float32)
    p_TV, q_TV = (scipy.special.softmax(x.astype(float), axis=1) for x in (theirs_TV, ours_TV))
    found = fidelity.closeness(theirs_TV[:3], ours_TV)  # of three of four positions
    expected_T = scipy.stats.entropy(p_TV, q_TV, axis=1)[:3]
    np.testing.assert_allclose(found.kl_T, expected_T, rtol=1e-4)
    np.testing.assert_allclose(found.difference_T, abs(theirs_TV - ours_TV).max(1)[:3], rtol=1e-6)
    five = [{*np.argsort(x)[-5:]} for x in theirs_TV], [{*np.argsort(x)[-5:]} for x in ours_TV]
    np.testing.assert_allclose(
        found.top5_T, [len(a & b) / 5 for a, b in zip(*five, strict=True)][:3], rtol=1e-6
    )
    top = fidelity.top_logits(theirs_TV, 8)
    ids_TK = np.asarray(top.ids_TK)
    assert (ids_TK == np.argsort(-theirs_TV)[:, :8]).all()
    merged = [
        np.concatenate([kept := np.take_along_axis(x, ids_TK, 1), 1 - kept.sum(1)[:, None]], 1)
        for x in (p_TV, q_TV)
    ]
    some = fidelity.closeness(top, ours_TV)
    np.testing.assert_allclose(some.kl_T, scipy.stats.entropy(*merged, axis=1), rtol=1e-4)
    assert (some.kl_T[:3] < found.kl_T).all() and (some.top5_T[:3] == found.top5_T).all()


def test_kl_of_logits_that_hardly_differ():
    """KL is half the variance of the difference, which cancellation in float32 would lose."""
    rng = np.random.default_rng(1)
    theirs_TV = rng.normal(0, 3, (2, 5000)).astype(np.float32)
    noise_TV = rng.normal(0, 1e-4, theirs_TV.shape)
    ours_TV = (theirs_TV + noise_TV).astype(np.float32)
    p_TV = scipy.special.softmax(theirs_TV.astype(float), axis=1)
    change_TV = ours_TV.astype(float) - theirs_TV
    mean_T1 = (p_TV * change_TV).sum(1, keepdims=True)
    expected_T = (p_TV * (change_TV - mean_T1) ** 2).sum(1) / 2
    found_T = fidelity.closeness(theirs_TV, ours_TV).kl_T
    np.testing.assert_allclose(found_T, expected_T, rtol=1e-2)
    assert (expected_T < 1e-8).all()


def test_a_figure_that_is_not_a_number_is_a_fault():
    limits = THRESHOLDS["float32"]
    assert not faults_of(fidelity.Fidelity(9, 0.0, 0.0, 1.0, 1.0, 0.0), limits)
    bad = fidelity.Fidelity(9, float("nan"), 1.0, 0.5, 1.0, 0.0)
    assert faults_of(bad, limits) == [
        f"mean KL nan is above {limits.mean_kl:g}",
        f"worst KL 1 is above {limits.worst_kl:g}",
        f"top-1 agreement 0.5 is below {limits.agreement:g}",
    ]


# ---- refusals ---------------------------------------------------------------------------------


def test_a_golden_file_of_another_vocabulary_is_refused(folder, tmp_path):
    demo = describe_target(DEMO / "target")
    said = refusal(golden.read, folder / "golden.jsonl", demo)
    assert "was made with another target: vocab_size is 101 in the file" in said
    about = {"made_by": "a test", "dtype": "float32", **golden.model_of(demo)}
    top = fidelity.TopLogits(np.arange(6).reshape(2, 3), np.ones((2, 4)))
    prompts = [golden.GoldenPrompt([1], [2], top)]
    golden.write(tmp_path / "g.jsonl", about | {"vocabulary_sha256": "0" * 64}, prompts)
    said = refusal(golden.read, tmp_path / "g.jsonl", demo)
    assert "vocabulary is 000000000000 in the file" in said


DAMAGE = {
    "line 3": lambda lines: "".join(lines)[:-200],
    "holds 1 of 2 prompts": lambda lines: "".join(lines[:2]),
    "is not a golden file": lambda lines: "".join(lines[1:]),
    "format version 2": lambda lines: "".join(lines).replace('"version": 1', '"version": 2'),
    "line 3 is not a prompt": lambda lines: "".join(lines).replace("[60, 3]", "[60, 101]"),
    "line 2 is not a prompt": lambda lines: "".join(lines).replace('"logits"', '"other"'),
    "first line": lambda lines: "".join(lines).replace('"target": {', '"other": {'),
}


@pytest.mark.parametrize("fault", DAMAGE)
def test_a_damaged_golden_file_is_refused(ask, folder, tmp_path, lines, fault):
    path = tmp_path / "golden.jsonl"
    path.write_text(DAMAGE[fault](lines))
    done = ask("--target", folder / "target", "--reference", path)
    assert not done.out and fault in done.refusal()
