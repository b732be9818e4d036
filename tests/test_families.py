"""Each family of targets from end to end: a trained drafter, exact drafts, parity, a mesh."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
import sys

import jax.numpy as jnp
import pytest
import torch

from infer.bench.random_pair import random_drafter
from infer.cli.flags.pair import DEMO
from infer.info import ROOT
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape, MoaConfig
from moa_jax.files.families import FAMILIES
from tests.oracle import random_pair
from tests.train.test_training import changed, distill_config, metrics
from train import distill

CHECK = "import sys, jax; jax.config.update('jax_num_cpu_devices', 2); from infer import check; "
CHECK += "check.main(sys.argv[1:])"


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_from_training_to_a_mesh(family, tmp_path):
    """`infer.check` compares logits with transformers, and chains and trees with plain decoding.

    Prompt and training rows are longer than windows and than the original length of YaRN. On one
    device, tests/model/test_target.py compares each family, and tests/infer/test_check.py checks.
    """
    target = tmp_path / "target"
    sizes = dict(vocab_size=2048, num_hidden_layers=3)
    random_pair.random_target(family, 5, 0.5, **sizes)[1].save_pretrained(target)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEMO / "target" / name, target / name)
    config = distill_config(tmp_path, target)
    rarely = dict(run_eval_every=20, run_save_every=20)
    reusing = dataclasses.replace(config.drafter, target_layer_inference=1)
    distill.distill(changed(config, drafter=reusing, optim_total_steps=20, **rarely))
    losses = [record["loss"] for record in metrics(tmp_path, "train")]
    assert len(losses) == 10 and losses[-1] < losses[0]
    flags = f"--mesh tensor=2 --target {target} --draft {tmp_path}/draft --max-new-tokens 16"
    flags += " --prompt-ids 9,8,7,300,42,9,8,7,300,42,11,12"
    command = [sys.executable, "-c", CHECK, *flags.split()]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert done.stdout.count("PASSED") == 1, done.stdout + done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("family", ["ministral", "mistral", "gemma3_text"])
def test_texts_beyond_a_window_are_those_of_transformers(family, tmp_path, monkeypatch):
    """A ring has a window, a chunk and some tokens more: 20 rows to 41."""
    monkeypatch.setattr("moa_jax.model.cache.TILE", 1)
    model = random_pair.random_target(family, 5, 0.5)[1]
    model.save_pretrained(tmp_path)
    target, prompt = load_target(tmp_path, jnp.float32), [9, 8, 7, 30, 42, 9, 8, 7, 30, 42, 11, 12]
    given = torch.tensor([prompt])
    expected = model.generate(given, max_new_tokens=80, do_sample=False, eos_token_id=None)
    moa = random_drafter("moa", MoaConfig(1, 24, 1, 24, 1, 16, 1), target, jnp.float32)
    lookup, chain, tree = load_drafter("lookup", target), DraftShape(4), DraftShape(3, 3, 6)
    for drafter, shape in ((None, None), (lookup, chain), (moa, tree)):
        (found,) = Session(target, drafter, shape, chunk=5).generate([prompt], 80, [])
        assert found.token_ids == expected[0, len(prompt) :].tolist(), shape
