"""Numbers that are not: NaN in weights, casts that overflow, JSON that has no word for them."""

from __future__ import annotations

import contextlib
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from infer.cli.flags.pair import DEMO
from tests.meeting import wait_for
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


def test_nan_behind_some_tokens_is_named(run, pair):
    flags = (*models(pair), *PROMPT, "--mode", "chain", "--json")
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
    assert line.endswith(f"{name} holds 1 NaN or infinite values; fetch the model again")


def test_eight_bits_do_not_hide_nan(run, tmp_path):
    """XLA's maximum on CPUs leaves NaN out of matrices that are not small."""
    shutil.copytree(DEMO / "target", tmp_path / "target")
    damage(tmp_path / "target", WEIGHT, nan_at(0, 3))
    flags = ("--target", tmp_path / "target", *PROMPT, "--mode", "plain", "--weights", "int8")
    line = run("infer.generate", *flags).refusal()
    assert f"{WEIGHT} holds values that are not finite" in line


@pytest.mark.parametrize("model", ["target", "draft"])
def test_a_cast_that_overflows_writes_nothing(run, pair, tmp_path, model):
    name = WEIGHT if model == "target" else "cross_attention.mlp.down_proj.weight"
    damage(pair / model, name, lambda tensor: tensor.__setitem__(0, 1e5))
    width = tensors_of(pair / model)[name].shape[1]
    source = models(pair)[:2] if model == "target" else (*models(pair), "--to", "authors")
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


# ---- servers, and data of one's own ---------------------------------------------------------

GOOD, BAD = [7, 8, 9, 10], [7, 8, 90, 10]


def make_hole(folder: Path) -> None:
    """NaN for the embedding of one token of a target that is not tied."""
    damage(folder, "model.embed_tokens.weight", nan_at(BAD[2]))


@contextlib.contextmanager
def served(name: str, ready: Path, *flags: object) -> Iterator[str]:
    """The address of a server."""
    command = [sys.executable, "-m", name, "--port", "0", "--ready-file", ready, *flags]
    with subprocess.Popen([*map(str, command)], stderr=subprocess.DEVNULL) as server:
        try:
            wait_for(lambda: ready.exists() or server.poll() is not None, 120)
            yield json.loads(ready.read_text())["url"]
        finally:
            server.terminate()


@pytest.mark.slow
def test_a_server_answers_with_an_error_and_goes_on(small_target, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(small_target, folder)
    edit_json(folder / "config.json", tie_word_embeddings=False)
    edit_tensors(folder, **{"lm_head.weight": tensors_of(folder)["model.embed_tokens.weight"]})
    make_hole(folder)
    flags = ("--target", folder, "--slots", "2", "--max-tokens", "128")
    with served("infer.serve", tmp_path / "ready", *flags) as url:

        def ask(prompt: list[int], **fields: Any) -> httpx.Response:
            fields = {"prompt": prompt, "max_tokens": 3, "temperature": 0} | fields
            return httpx.post(f"{url}/completions", json=fields, timeout=60)

        before = ask(GOOD).json()["choices"][0]["text"]
        for fields in ({}, {"logprobs": 2}, {"echo": True, "logprobs": 1, "max_tokens": 1}):
            answer = ask(BAD, **fields)
            assert answer.status_code == 500
            assert "hold NaN or infinity: model.embed_tokens" in answer.json()["error"]["message"]
            assert str(tmp_path) not in answer.text
        assert "hold NaN or infinity" in ask(BAD, stream=True).text
        assert ask(GOOD).json()["choices"][0]["text"] == before
        assert ask([*BAD[:2], 11]).status_code == 200  # it begins as the bad one
        assert httpx.get(f"{url.removesuffix('/v1')}/health").status_code == 200


@pytest.mark.slow
def test_a_split_server_refuses_and_its_slot_stays_good(run, pair, tmp_path):
    make_hole(pair / "target")
    flags = (*models(pair), "--max-new-tokens", "4", "--json")
    with served("infer.server", tmp_path / "ready", *models(pair), "--slots", "1") as url:

        def ask(prompt: list[int]) -> Any:
            ids = ",".join(map(str, prompt))
            return run("infer.client", "--connect", url, *flags, "--prompt-ids", ids)

        before = strict(ask(GOOD).out)["results"][0]["token_ids"]
        assert "hold NaN or infinity: model.embed_tokens" in ask(BAD).refusal()
        assert strict(ask(GOOD).out)["results"][0]["token_ids"] == before


@pytest.mark.slow
def test_regenerate_names_nan(run, small_target, tmp_path):
    folder = tmp_path / "target"
    shutil.copytree(small_target, folder)
    damage(folder, WEIGHT, nan_at(0, 3))
    data = tmp_path / "data.jsonl"
    data.write_text(json.dumps({"messages": [{"role": "user", "content": "Hello."}]}) + "\n")
    flags = ("--prompts", data, "--output", tmp_path / "out.jsonl", "--max-new-tokens", "4")
    line = run("train.regenerate", "--target", folder, *flags, "--max-prompt", "64").refusal()
    assert f"hold NaN or infinity: {WEIGHT}" in line and not (tmp_path / "out.jsonl").exists()
