"""Numbers that are not: NaN in weights, casts that overflow, JSON that has no word for them."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.model_folders import edit_json, edit_tensors, tensors_of

WEIGHT = "model.layers.1.mlp.down_proj.weight"
PROMPT = ("--prompt-ids", "5,6,7", "--max-new-tokens", "6")


def damage(folder: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Changes one tensor of a folder in place."""
    tensor = tensors_of(folder)[name].copy()
    change(tensor)
    edit_tensors(folder, **{name: tensor})


def nan_at(*place: int) -> Callable[[np.ndarray], None]:
    def change(tensor: np.ndarray) -> None:
        tensor[place] = np.nan

    return change


def models(pair: Path) -> tuple[str, ...]:
    return "--target", str(pair / "target"), "--draft", str(pair / "draft")


@pytest.mark.parametrize(
    "flags", ["--mode plain", "--mode tree --check", "--mode chain --temperature 1 --json"]
)
def test_nan_in_a_weight_is_named(run, pair, flags):
    damage(pair / "target", WEIGHT, nan_at(0, 3))
    line = run("infer.generate", *models(pair), *PROMPT, *flags.split()).refusal()
    assert f"logits of prompt 0 after 3 tokens hold NaN or infinity: {WEIGHT}" in line


def test_one_logit_that_is_nan_is_named(run, pair):
    """Others are larger to a comparison, and XLA's maximum on CPUs leaves it out."""
    damage(pair / "target", "lm_head.weight", nan_at(40, 0))
    line = run("infer.generate", *models(pair), *PROMPT, "--mode", "plain").refusal()
    assert "NaN or infinity: lm_head.weight" in line


@pytest.mark.parametrize("mode", ["plain", "chain"])
def test_nan_behind_some_tokens_is_named(run, pair, mode):
    flags = (*models(pair), *PROMPT, "--mode", mode, "--json")
    (healthy,) = json.loads(run("infer.generate", *flags).out)["results"]
    answer = healthy["token_ids"]
    place = next(i for i in range(1, 6) if answer[i] not in (5, 6, 7, *answer[:i]))
    damage(pair / "target", "model.embed_tokens.weight", nan_at(answer[place]))
    line = run("infer.generate", *flags).refusal()
    assert f"after {3 + place + 1} tokens hold NaN" in line and "embed_tokens" in line


def test_overflow_is_told_from_nan_in_a_file(run, pair):
    damage(pair / "target", "model.norm.weight", lambda tensor: tensor.fill(3e38))
    line = run("infer.generate", *models(pair), *PROMPT, "--mode", "plain").refusal()
    assert "hold NaN or infinity: the target's activations overflow in float32" in line


def test_a_drafter_with_nan_is_refused(run, pair):
    """It changes no text, so that only a tau that is 1 or made up would tell of it."""
    name = "cross_attention.mlp.down_proj.weight"
    damage(pair / "draft", name, nan_at(2, 3))
    line = run("infer.generate", *models(pair), *PROMPT, "--mode", "chain").refusal()
    assert line.endswith(f"{name} holds 1 NaN or infinite values: fetch the model again")


def test_eight_bits_do_not_hide_nan(run, pair):
    damage(pair / "target", WEIGHT, nan_at(0, 3))
    line = run(
        "infer.generate", *models(pair), *PROMPT, "--mode", "plain", "--weights", "int8"
    ).refusal()
    assert f"{WEIGHT} holds values that are not finite" in line


@pytest.mark.parametrize("model", ["target", "draft"])
def test_a_cast_that_overflows_writes_nothing(run, pair, tmp_path, model):
    name = WEIGHT if model == "target" else "cross_attention.mlp.down_proj.weight"
    damage(pair / model, name, lambda tensor: tensor.__setitem__(0, 1e5))
    width = tensors_of(pair / model)[name].shape[1]
    source = models(pair)[: 2 if model == "target" else 4]
    flags = (*source, "--output", tmp_path / "out", "--dtype")
    line = run("infer.convert", *flags, "float16").refusal()
    assert f"{name}: {width} finite numbers become infinite in float16" in line
    assert line.endswith("choose bfloat16 or float32") and not (tmp_path / "out").exists()
    assert run("infer.convert", *flags, "bfloat16").code == 0


def strict(text: str) -> dict:
    """A document as parsers other than Python's read it."""

    def refuse(word: str) -> None:
        raise AssertionError(f"{word} is not a word of JSON")

    return json.loads(text, parse_constant=refuse)


def test_documents_hold_no_words_that_json_lacks(run, pair):
    flags = ("--prompt-ids", "5", "--max-new-tokens", "1", "--json", "--logprobs", "2")
    done = run("infer.generate", *models(pair), *flags, "--logit-bias", "9:-inf")
    document = strict(done.out)
    assert document["results"][0]["tau"] is None
    assert document["settings"]["logit_bias"] == [[9, None]]


@pytest.mark.parametrize("key", ["rms_norm_eps", "rope_theta"])
def test_a_config_with_nan_is_refused(run, pair, key):
    edit_json(pair / "target" / "config.json", **{key: float("nan")})
    line = run("infer.generate", *models(pair), *PROMPT, "--mode", "plain").refusal()
    assert f"{key} is nan: choose a finite number" in line
