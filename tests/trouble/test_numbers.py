"""Numbers that are not finite: NaN in weights, casts that overflow, and JSON, which has none."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from infer.cli.flags.pair import DEMO
from tests.model_folders import edit_json, edit_tensors, tensors_of

WEIGHT = "model.layers.1.mlp.down_proj.weight"
DRAFT_WEIGHT = "cross_attention.mlp.down_proj.weight"
OVERFLOW = "hold NaN or infinity: the target's activations overflow in float32"
PROMPT = ("--prompt-ids", "5,6,7", "--max-new-tokens", "6")


def damage(folder: Path, name: str, change: Callable[[np.ndarray], None]) -> None:
    """Changes one tensor of a folder in place."""
    tensor = tensors_of(folder)[name].copy()
    change(tensor)
    edit_tensors(folder, **{name: tensor})


def nan_at(*place: int) -> Callable[[np.ndarray], None]:
    return lambda tensor: tensor.__setitem__(place, np.nan)


def models(pair: Path) -> tuple[object, ...]:
    return "--target", pair / "target", "--draft", pair / "draft"


# NaN in a drafter changes no text. XLA's maximum on CPUs ignores one NaN among logits.
@pytest.mark.parametrize(
    "model, name, change, mode, says",
    [
        ("target", WEIGHT, nan_at(0, 3), "plain", f"after 3 tokens hold NaN or infinity: {WEIGHT}"),
        ("target", "lm_head.weight", nan_at(40, 0), "plain", "NaN or infinity: lm_head.weight"),
        ("target", "model.norm.weight", lambda tensor: tensor.fill(3e38), "plain", OVERFLOW),
        ("draft", DRAFT_WEIGHT, nan_at(2, 3), "chain", f"{DRAFT_WEIGHT} holds 1 NaN or infinite"),
    ],
)
def test_numbers_that_are_not_finite_are_named(run, pair, model, name, change, mode, says):
    damage(pair / model, name, change)
    assert says in run("infer.generate", *models(pair), *PROMPT, "--mode", mode).refusal()


@pytest.mark.slow
def test_nan_after_some_tokens_is_named(run, pair):
    flags = (*models(pair), *PROMPT, "--mode", "chain", "--depth", "2", "--json")
    (healthy,) = json.loads(run("infer.generate", *flags).out)["results"]
    answer = healthy["token_ids"]
    place = next(i for i in range(1, 6) if answer[i] not in (5, 6, 7, *answer[:i]))
    damage(pair / "target", "model.embed_tokens.weight", nan_at(answer[place]))
    line = run("infer.generate", *flags).refusal()
    assert f"after {3 + place + 1} tokens hold NaN" in line and "embed_tokens" in line


def test_eight_bits_do_not_hide_nan(run, tmp_path):
    """XLA's maximum on CPUs ignores NaN in matrices that are not small."""
    target = shutil.copytree(DEMO / "target", tmp_path / "target")
    damage(target, WEIGHT, nan_at(0, 3))
    flags = ("--target", target, *PROMPT, "--mode", "plain", "--weights", "int8")
    assert f"{WEIGHT} holds values that are not finite" in run("infer.generate", *flags).refusal()


@pytest.mark.parametrize("model, name", [("target", WEIGHT), ("draft", DRAFT_WEIGHT)])
def test_a_cast_that_overflows_writes_nothing(run, pair, tmp_path, model, name):
    damage(pair / model, name, lambda tensor: tensor.__setitem__(0, 1e5))
    width = tensors_of(pair / model)[name].shape[1]
    source = models(pair)[:2] if model == "target" else (*models(pair), "--to", "authors")
    flags = (*source, "--output", tmp_path / "out", "--dtype")
    line = run("infer.convert", *flags, "float16").refusal()
    assert f"{name}: {width} finite numbers become infinite in float16" in line
    assert line.endswith("choose bfloat16 or float32") and not (tmp_path / "out").exists()
    assert run("infer.convert", *flags, "bfloat16").code == 0


def test_documents_hold_no_words_that_json_lacks(run, pair):
    flags = ("--prompt-ids", "5", "--max-new-tokens", "1", "--json", "--logprobs", "2")
    flags += ("--mode", "plain", "--logit-bias", "9:-inf")
    text = run("infer.generate", *models(pair), *flags).out
    assert "NaN" not in text and "Infinity" not in text
    found = json.loads(text)
    assert (found["results"][0]["tau"], found["settings"]["logit_bias"]) == (None, [[9, None]])


# ---- servers, and data of one's own ---------------------------------------------------------

GOOD, BAD = [7, 8, 9, 10], [7, 8, 90, 10]


@pytest.mark.slow
def test_a_server_answers_with_an_error_and_continues(small_target, served, tmp_path):
    folder = shutil.copytree(small_target, tmp_path / "target")
    edit_json(folder / "config.json", tie_word_embeddings=False)
    edit_tensors(folder, **{"lm_head.weight": tensors_of(folder)["model.embed_tokens.weight"]})
    damage(folder, "model.embed_tokens.weight", nan_at(BAD[2]))
    flags = ("--target", folder, "--slots", 2, "--max-tokens", 128)
    with served("infer.serve", *flags) as (url, _):

        def ask(prompt: list[int], **fields: Any) -> httpx.Response:
            fields = {"prompt": prompt, "max_tokens": 3, "temperature": 0} | fields
            return httpx.post(f"{url}/v1/completions", json=fields, timeout=60)

        before = ask(GOOD).json()["choices"][0]["text"]
        for fields in ({}, {"echo": True, "logprobs": 1, "max_tokens": 1}):
            answer = ask(BAD, **fields)
            assert answer.status_code == 500
            assert "hold NaN or infinity: model.embed_tokens" in answer.json()["error"]["message"]
            assert str(tmp_path) not in answer.text
        assert "hold NaN or infinity" in ask(BAD, stream=True).text
        assert ask(GOOD).json()["choices"][0]["text"] == before
        assert ask([*BAD[:2], 11]).status_code == 200  # it starts like the bad request
        assert httpx.get(f"{url}/health").status_code == 200
