"""infer.info lists models, data and missing packages, and refuses folders without a model."""

from __future__ import annotations

import json

import pytest

from infer import info
from moa_jax.files.families import FAMILIES

SIZES = {"model_type": "llama", "vocab_size": 64, "hidden_size": 32, "num_hidden_layers": 2}


@pytest.fixture
def model(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(SIZES | {"rope_theta": 1e4}))
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    return folder


def test_json_is_one_document(model, capsys):
    info.main(["--json", "--target", str(model), "--draft", str(model)])
    report = json.loads(capsys.readouterr().out)
    assert {"moa-jax", "python", *info.PACKAGES} == set(report["versions"])
    assert report["devices"][0]["kind"] == "cpu" and report["device_error"] is None
    found = {"folder": str(model), "found": True, "weights_bytes": 3 * 2**20}
    assert report["pair"] == {"target": found | SIZES, "draft": found | SIZES}


def test_text_names_what_is_missing(monkeypatch, tmp_path, capsys):
    monkeypatch.setenv("MOA_GOLDENS", str(tmp_path / "nowhere"))
    monkeypatch.setenv("MOA_DATA", str(tmp_path))
    monkeypatch.setattr(info, "DEMO", tmp_path / "demo")
    info.main([])
    facts = dict(line.split(maxsplit=1) for line in capsys.readouterr().out.splitlines())
    assert facts["target"] == f"absent: no folder {tmp_path / 'demo' / 'target'}"
    assert facts["goldens"] == "none: set MOA_GOLDENS"
    assert facts["data"] == str(tmp_path)


def test_loading_is_timed_on_request(saved, capsys):
    target = str(saved / "llama" / "target")
    info.main(["--json", "--load", "--target", target, "--draft", target])
    report = json.loads(capsys.readouterr().out)
    loading, size = report["loading"], report["pair"]["target"]["weights_bytes"]
    assert loading["dtype"] == "float32"
    assert loading["seconds"] * loading["bytes_per_s"] == pytest.approx(size)
    line = info.render(report).splitlines()[-1]
    assert line.split()[0] == "loading" and line.endswith("GB/s")


def test_families_are_those_that_load(run):
    found = json.loads(run("infer.info", "--families", "--json").out)
    assert [each["family"] for each in found["families"]] == list(FAMILIES)
    assert {"yarn", "dynamic"} < set(found["rope_scalings"]) and "moa" in found["drafters"]
    text = run("infer.info", "--families").out
    assert "folders in eight bits: fp8, compressed-tensors pack-quantized, " in text
    gemma3 = "gemma3_text | gemma3_text, gemma3 | transformers Gemma3ForCausalLM | gemma3 | yes |"
    assert gemma3 in text and len(text.splitlines()) == len(FAMILIES) + 7
