"""Seeds: -1 draws one, and a value that is no seed is refused in one line."""

import json

import pytest

from moa_jax.config import Sampling
from moa_jax.decode.session import rows_of
from tests.trouble.conftest import ROOT

DRAWN = ["--prompt-ids", "5,6", "--max-new-tokens", 12, "--temperature", 1, "--json"]


def test_minus_one_draws_another_seed_each_time(run, saved):
    flags = ["--target", saved / "llama" / "target", "--mode", "plain", *DRAWN]
    found = [json.loads(run("infer.generate", *flags, "--seed", -1).out) for _ in range(2)]
    seeds = [document["settings"]["seed"] for document in found]
    texts = [document["results"][0]["token_ids"] for document in found]
    assert seeds[0] != seeds[1] and texts[0] != texts[1] and min(seeds) >= 0
    again = json.loads(run("infer.generate", *flags, "--seed", seeds[0]).out)
    assert again["results"][0]["token_ids"] == texts[0]


@pytest.mark.parametrize("seed", ["-2", str(2**32), str(2**64), "1.5", "x", "True"])
def test_no_seed_is_one_line(run, seed):
    for program in ("infer.generate", "train.regenerate"):
        line = run(program, "--prompts", "x", "--output", "y", "--seed", seed).refusal()
        assert "seed" in line


@pytest.mark.parametrize("seed", ["-1", str(2**64), "1.5"])
def test_no_seed_of_a_run_is_one_line(run, seed):
    line = run("train.distill", "--config", ROOT / "configs" / "tiny.py", "--run.seed", seed)
    assert "seed" in line.refusal()


def test_samplings_of_a_session_are_drawn_at_each_call():
    row = Sampling(temperature=1.0, seed=-1)
    first, second = rows_of(row, 2), rows_of(row, 2)
    assert (first[0].seed + 1) % 2**32 == first[1].seed and first[0] != second[0]
    assert all(each.seed >= 0 for each in rows_of([row, row], 2))
