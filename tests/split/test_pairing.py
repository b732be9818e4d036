"""The facts that client and server compare: what changes them, and how a difference reads."""

from __future__ import annotations

import shutil

import jax.numpy as jnp
import pytest

from moa_jax import load_drafter, load_target
from moa_jax.split.pairing import mismatch, pairing_of


def facts(folder, **named):
    target = load_target(folder / "target", jnp.float32)
    return pairing_of(target, load_drafter(folder / "draft", target, **named))


@pytest.fixture
def other(pair, tmp_path):
    """A second copy of the pair."""
    return shutil.copytree(pair, tmp_path / "other")


def test_copies_of_a_pair_go_together_wherever_they_lie(pair, other):
    assert facts(pair, target_layer_inference=0) == facts(other, target_layer_inference=0)
    assert mismatch(facts(pair), facts(other)) == ""


def test_the_facts_are_plain_and_name_the_sizes(pair):
    found = facts(pair)
    target = load_target(pair / "target", jnp.float32)
    assert found["method"] == "moa" and found["target_layer_inference"] == 0
    assert found["vocab_size"] == target.config.vocab_size
    assert all(type(value) in (str, int) for value in found.values())


def test_a_drafter_without_files_and_none_at_all(pair):
    target = load_target(pair / "target", jnp.float32)
    lookup = pairing_of(target, load_drafter("lookup", target))
    none = pairing_of(target, None)
    assert (lookup["method"], none["method"], none["drafter_sha256"]) == ("lookup", "none", "")
    assert len(lookup["drafter_sha256"]) == 64
    assert mismatch(lookup, none) == "method: lookup on the server, none on the client"


def test_a_refusal_names_both_values():
    server, client = {"vocab_size": 96, "method": "moa"}, {"vocab_size": 128, "method": "moa"}
    line = mismatch(server, client)
    assert line == "the size of the vocabulary: 96 on the server, 128 on the client"
    assert "none on the client" in mismatch(server, {"vocab_size": 96})
    assert mismatch(client, client | {"depth": 3}) == "depth: none on the server, 3 on the client"
