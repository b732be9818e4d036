"""Prompts are read in chunks: what is left behind is what one pass over whole prompts leaves."""

import functools
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.bench import random_pair
from moa_jax import Session
from moa_jax.config import (
    BlockConfig,
    BorrowedConfig,
    DraftShape,
    Eagle3Config,
    EagleConfig,
    GlideConfig,
    IndependentConfig,
    LookupConfig,
    MoaConfig,
    Sampling,
    TargetConfig,
)
from moa_jax.decode.programs import chunks_for, chunks_of
from moa_jax.decode.session import GREEDY
from moa_jax.pretrained import LoadedDrafter, Target
from tests.pairs import NO_STOP

BLOCK = BlockConfig(16, 2, 1, 8, 24, 1e-5, 10000.0, None)
CONFIG = TargetConfig("llama", 64, 2, BLOCK, False, 256)  # layers are most of a program's time
SMALL = TargetConfig("llama", 64, 1, BLOCK, False, 256)
MOA = (1, 24, 1, 24, 1, 16)
KINDS = {
    "moa-0": ("moa", MoaConfig(*MOA)),
    "moa-1": ("moa", MoaConfig(*MOA, target_layer_inference=1)),
    "moa-2": ("moa", MoaConfig(*MOA, target_layer_inference=2)),
    "eagle": ("eagle", EagleConfig(1, 24)),
    "eagle3": ("eagle3", Eagle3Config(1, 24, tapped_layers=(0, 1, 1))),
    "glide": ("glide", GlideConfig(1, 24, 3)),
    "independent": ("independent", IndependentConfig(SMALL)),
    "borrowed": ("independent-borrowed", BorrowedConfig(SMALL)),
    "lookup": ("lookup", LookupConfig()),
}
FAST = ("moa-1", "lookup")
WHOLE = 500  # tokens of a chunk that is larger than any prompt here
LENGTHS = (1, 61, 2, 40, 7, 8, 9)
PROMPTS = [
    [(5 + 3 * i * i) % 61 for i in range(start, start + n)] for start, n in enumerate(LENGTHS)
]
NEW = 12


@functools.cache
def target() -> Target:
    """A target whose layers weigh as much as its embedding, so that every row it reads counts."""
    return large(random_pair.random_target(CONFIG, jnp.float32, Path("tiny")))


@functools.cache
def drafter(name: str) -> LoadedDrafter:
    method, config = KINDS[name]
    return large(random_pair.random_drafter(method, config, target(), jnp.float32))


def large(found):
    grown = lambda leaf: leaf if leaf.ndim == 1 else 10 * leaf
    return found._replace(params=jax.tree.map(grown, found.params))


@functools.cache
def session(name: str | None, chunk: int | None, **rest: int) -> Session:
    return Session(target(), name and drafter(name), DraftShape(4), chunk=chunk, **rest)


def started(session: Session, prompts=PROMPTS, sampling=GREEDY):
    return session.start(prompts, NEW, NO_STOP, sampling)[:3]


def assert_same_start(found, expected, lengths=LENGTHS):
    """The same tokens, and in every cache the same rows of every prompt."""
    for name in ("tokens_BC", "rounds_B"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("length_B", "done_B"):
        pair = (getattr(found.round, name), getattr(expected.round, name))
        np.testing.assert_array_equal(*pair, err_msg=name)
    for ours, theirs in zip(found.round.token_counts, expected.round.token_counts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    parts = lambda state: {"target": state.round.target_caches, "draft": state.round.draft_cache}
    leaves = zip(
        *(jax.tree.leaves_with_path(parts(state)) for state in (found, expected)), strict=True
    )
    for (path, ours), (_, theirs) in leaves:
        assert ours.shape == theirs.shape
        # No feature stands before the first token, so drafters that are fed them never see row 0.
        first = int(".rows" in jax.tree_util.keystr(path))
        axis = 0 if ours.ndim == 2 else 1  # of rows, in one prompt's part: a text, or (K, S, E)
        for index, length in enumerate(lengths):
            rows = range(first, length)
            some = [np.take(np.asarray(x)[index], rows, axis) for x in (ours, theirs)]
            largest = abs(some[1]).max(initial=0)
            assert largest > 0 or not rows
            np.testing.assert_allclose(*some, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize(
    "name", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in KINDS]
)
def test_every_drafter_reads_chunks_as_it_reads_whole_prompts(name):
    """Rows of 1 to 61 tokens in chunks of 7: caches, then texts and accept lengths."""
    expected, limits, law = started(session(name, WHOLE))
    found, *_ = started(session(name, 7))
    assert_same_start(found, expected)
    loop, weights = session(name, 7).loop(found, limits, law), session(name, 7).weights
    found, expected = (loop(weights, state, limits, law) for state in (found, expected))
    np.testing.assert_array_equal(found.tokens_BC, expected.tokens_BC)
    np.testing.assert_array_equal(found.accept_lengths_BR, expected.accept_lengths_BR)
    for row, prompt in enumerate(PROMPTS):
        (alone,) = session(None, WHOLE).generate([prompt], NEW, NO_STOP)
        text = [*prompt, *alone.token_ids]
        assert found.tokens_BC[row, : len(text)].tolist() == text


@pytest.mark.parametrize("chunk", [1, 3, 32])
def test_any_chunk_gives_the_same(chunk):
    prompt = PROMPTS[1:2]
    expected, *_ = started(session("eagle", WHOLE), prompt)
    found, *_ = started(session("eagle", chunk), prompt)
    assert_same_start(found, expected, LENGTHS[1:2])


@pytest.mark.parametrize("lengths", [(1,), (16,), (17,), (33,), (49,), (61,), (90, 3, 17)])
def test_the_end_of_a_prompt_is_read_in_smaller_chunks(lengths):
    prompts = [[(7 * i + length) % 61 for i in range(length)] for length in lengths]
    expected, *_ = started(session("eagle", WHOLE, least_rows=256), prompts)
    found, *_ = started(session("eagle", None, least_rows=256), prompts)
    assert_same_start(found, expected, lengths)


def test_chunks_that_are_filled_are_preferred():
    sizes = (64, 32, 16)
    found = [chunks_of(length, sizes) for length in (1, 16, 17, 48, 49, 64, 65, 200)]
    assert found[:4] == [[16], [16], [32], [32, 16]]
    assert found[4:] == [[64], [64], [64, 16], [64, 64, 64, 16]]
    assert chunks_of(130, (64,)) == [64] * 3


def test_chunks_fill_a_cache_to_its_last_row():
    """The third chunk of a prompt would end behind the cache, so it begins earlier."""
    length = 128 - NEW - DraftShape(4).num_rows
    prompts = [[(5 + i * i) % 61 for i in range(length)], [9] * 51]
    expected, *_ = started(session("moa-1", WHOLE, cache_rows=128), prompts)
    found, *_ = started(session("moa-1", 50, cache_rows=128), prompts)
    assert_same_start(found, expected, (length, 51))
    assert found.round.target_caches[0].k_BKSE.shape[2] == 128 < 3 * 50


def test_a_penalty_sees_the_prompt_and_the_first_token_alone():
    """What the target would have chosen after earlier chunks was never said."""
    sampling = Sampling(0.8, repetition_penalty=1.5, presence_penalty=1.0, seed=3)
    expected, *_ = started(session(None, WHOLE), sampling=sampling)
    found, *_ = started(session(None, 7), sampling=sampling)
    assert_same_start(found, expected)
    rows = zip(*found.round.token_counts, found.tokens_BC, PROMPTS, strict=True)
    for seen_V, times_V, tokens_C, prompt in rows:
        first = int(tokens_C[len(prompt)])
        assert set(np.flatnonzero(seen_V).tolist()) == {*prompt, first}
        assert {int(v): int(times_V[v]) for v in np.flatnonzero(times_V)} == {first: 1}


def test_the_first_token_may_be_the_last():
    (whole,) = session(None, 7).generate([PROMPTS[3]], NEW, NO_STOP)
    (one,) = session(None, 7).generate([PROMPTS[3]], 1, NO_STOP)
    (stopped,) = session(None, 7).generate([PROMPTS[3]], NEW, whole.token_ids[:1])
    assert one.token_ids == stopped.token_ids == whole.token_ids[:1]
    assert (one.finish_reason, stopped.finish_reason) == ("length", "stop")
    assert one.rounds == stopped.rounds == 0


def test_the_rows_of_a_batch_share_a_chunk():
    assert [chunks_for("cpu", batch)[0] for batch in (1, 64)] == [64, 64]
    assert [chunks_for("cuda", batch) for batch in (1, 4, 8, 32)] == [(512,), (128,), (64,), (64,)]
