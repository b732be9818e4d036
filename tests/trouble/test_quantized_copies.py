"""A copy of a tensor that is quantized elsewhere: compared with a tolerance."""

from __future__ import annotations

import pytest

from tests.model_folders import edit_tensors, tensors_of
from tests.trouble.conftest import ROOT
from tests.trouble.drafters import save_random_drafter

gguf_files = pytest.importorskip("tests.gguf_files")  # so that versions before it skip this
TARGET = ROOT / "moa_jax" / "demo" / "target"


def test_an_embedding_is_compared_with_a_quantized_one(run, tmp_path):
    embedding = tensors_of(TARGET)["model.embed_tokens.weight"]
    draft = save_random_drafter(tmp_path / "d", "eagle", TARGET)
    target = gguf_files.write_gguf(tmp_path / "x.gguf", TARGET, gguf_files.Q.Q8_0)
    pair = ("--target", target, "--draft", draft)
    edit_tensors(draft, **{"embed_tokens.weight": embedding})
    assert run("infer.convert", *pair, "--output", tmp_path / "new").code == 0
    edit_tensors(draft, **{"embed_tokens.weight": embedding[::-1].copy()})
    line = run("infer.convert", *pair, "--output", tmp_path / "other").refusal()
    assert "embed_tokens.weight differs from the target's" in line
