"""SmolLM2-135M-Instruct in float32: drafts and batches change no token of plain decoding."""

from __future__ import annotations

import os

import jax.numpy as jnp
import pytest

from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape
from moa_jax.decode.exactness import compare
from tests.model.test_smollm2 import TIE, prompts_for

pytestmark = pytest.mark.slow

SHAPES = {"plain": None, "chain": DraftShape(5)}
# Tokens of an answer. 128 of 20 prompts, and batches of 32, take minutes, so .ci/run sets fewer.
LENGTH = int(os.environ.get("MOA_SMOLLM2_TOKENS", "128"))
BATCHES, COUNT = ((1, 8, 32), 20) if LENGTH >= 128 else ((4,), 4)
CASES = [(shape, batch) for shape in SHAPES for batch in BATCHES if (shape, batch) != ("plain", 1)]
CASES = CASES if LENGTH >= 128 else CASES[-1:]


@pytest.fixture(scope="module")
def given(smollm2_gguf):
    """Returns the target, prompts, and the plain decoding of each prompt alone."""
    target = load_target(smollm2_gguf, jnp.float32)
    prompts = prompts_for(target)[:COUNT]
    assert len(prompts) == COUNT
    session = Session(target)
    alone = [session.generate([prompt], LENGTH)[0].token_ids for prompt in prompts]
    return target, prompts, alone


@pytest.mark.parametrize("shape, batch", CASES)
def test_answers_equal_plain_decoding_of_one_prompt(given, shape, batch):
    """Only a tie in float32 may be decided differently; the test prints it."""
    target, prompts, alone = given
    session = Session(target, SHAPES[shape] and load_drafter("lookup", target), SHAPES[shape])
    places = [index % len(prompts) for index in range(-(-len(prompts) // batch) * batch)]
    for first in range(0, len(places), batch):
        rows = places[first : first + batch]
        results = session.generate([prompts[row] for row in rows], LENGTH)
        for row, result in zip(rows, results, strict=True):
            if found := compare(target, prompts[row], alone[row], result.token_ids):
                print(f"prompt {row}, {shape}, batch {batch}: {found}")
                assert found.margin is not None and abs(found.margin) < TIE, found
