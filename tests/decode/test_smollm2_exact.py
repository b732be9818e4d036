"""SmolLM2-135M-Instruct in float32: drafts and batches change no token of plain decoding."""

from __future__ import annotations

import os

import jax.numpy as jnp
import pytest

from infer.bench.inputs import TEXTS
from infer.bench.suites import load_suite
from infer.cli.flags.prompts import asking, tokenizer_of
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape
from moa_jax.decode.exactness import compare

pytestmark = pytest.mark.slow

SHAPES = {"plain": None, "chain": DraftShape(5)}
TIE = 1e-3  # logits; twice what float32 moves the logits of these weights by, and more
# Tokens of an answer. Batches of 32 prompts take minutes with 128, so .ci/run sets fewer.
LENGTH = int(os.environ.get("MOA_SMOLLM2_TOKENS", "128"))
BATCHES = (1, 8, 32) if LENGTH >= 128 else (1, 32)


@pytest.fixture(scope="module")
def given(smollm2_gguf):
    """Returns the target, 20 prompts, and the plain decoding of each prompt alone."""
    target = load_target(smollm2_gguf, jnp.float32)
    tokenizer = tokenizer_of(target.folder)
    questions = [turn for question in load_suite("demo") for turn in question.turns]
    prompts = [asking(text, tokenizer) for text in (*questions, *TEXTS)][:20]
    assert len(prompts) == 20
    session = Session(target)
    alone = [session.generate([prompt], LENGTH)[0].token_ids for prompt in prompts]
    return target, prompts, alone


@pytest.mark.parametrize("batch", BATCHES)
@pytest.mark.parametrize("shape", SHAPES)
def test_answers_equal_plain_decoding_of_one_prompt(given, shape, batch):
    """Only a tie in float32 may be decided differently; the test prints it."""
    target, prompts, alone = given
    if (shape, batch) == ("plain", 1):
        pytest.skip("plain decoding of one prompt is the reference")
    session = Session(target, SHAPES[shape] and load_drafter("lookup", target), SHAPES[shape])
    places = [index % len(prompts) for index in range(-(-len(prompts) // batch) * batch)]
    for first in range(0, len(places), batch):
        rows = places[first : first + batch]
        results = session.generate([prompts[row] for row in rows], LENGTH)
        for row, result in zip(rows, results, strict=True):
            if found := compare(target, prompts[row], alone[row], result.token_ids):
                print(f"prompt {row}, {shape}, batch {batch}: {found}")
                assert found.margin is not None and abs(found.margin) < TIE, found
