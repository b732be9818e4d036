"""The bundled pair decodes real text exactly."""

import jax.numpy as jnp
import pytest

from infer.cli.flags.pair import DEMO
from infer.cli.flags.prompts import asking
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import Sampling
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.model.quantize import format_of

PROMPTS = (
    "I need a cheap hotel in the north of town.",
    "Can you book a table for two at seven?",
    "My bank balance, please.",
)


@pytest.mark.slow
@pytest.mark.parametrize("weights", [None, "int8"])
def test_drafts_change_nothing_and_help(weights):
    """Holds for greedy and for sampled text."""
    target = load_target(DEMO / "target", jnp.float32, weights=weights)
    drafter = load_drafter(DEMO / "draft", target, weights=weights)
    assert format_of(target.params) == format_of(drafter.params) == weights
    tokenizer = load_tokenizer(DEMO / "target")
    prompts = [asking(text, tokenizer) for text in PROMPTS]
    laws = [Sampling(), Sampling(), Sampling(0.8, seed=5)]
    plain, found = (
        session.generate(prompts, 64, [], laws)
        for session in (Session(target), Session(target, drafter))
    )
    assert [row.token_ids for row in found] == [row.token_ids for row in plain]
    assert sum(row.tau for row in found) > 1.3 * len(found)
