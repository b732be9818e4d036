"""Prefill in chunks leaves the same tokens and caches as one pass over whole prompts."""

import functools

import jax
import numpy as np
import pytest

from moa_jax import Session
from moa_jax.config import DraftShape, Sampling
from moa_jax.decode.programs import chunks_for, chunks_of
from moa_jax.decode.session import GREEDY
from tests.conftest import slow
from tests.decode.tiny import drafter, target
from tests.pairs import NO_STOP

WHOLE = 500  # tokens of a chunk that is larger than any prompt here
LENGTHS = (1, 61, 2, 40, 7, 8, 9)
PROMPTS = [
    [(5 + 3 * i * i) % 61 for i in range(start, start + n)] for start, n in enumerate(LENGTHS)
]
NEW = 12


@functools.cache
def session(name: str | None, chunk: int | None, **rest: int) -> Session:
    return Session(target(), name and drafter(name), DraftShape(4), chunk=chunk, **rest)


def started(session: Session, prompts=PROMPTS, sampling=GREEDY):
    return session.start(prompts, NEW, NO_STOP, sampling)[:3]


def assert_same_start(found, expected, lengths=LENGTHS):
    """Asserts the same tokens, and the same cache rows of every prompt."""
    for name in ("tokens_BC", "rounds_B"):
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name))
    for name in ("length_B", "done_B"):
        pair = (getattr(found.round, name), getattr(expected.round, name))
        np.testing.assert_array_equal(*pair, err_msg=name)
    for ours, theirs in zip(found.round.token_counts, expected.round.token_counts, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert_same_rows(found.round.target_caches, expected.round.target_caches, lengths)
    assert_same_rows(found.round.draft_cache, expected.round.draft_cache, lengths)


def assert_same_rows(found, expected, lengths, first=0):
    """Asserts that the rows of every prompt are equal in all leaves, from `first` on."""
    leaves = zip(*map(jax.tree.leaves_with_path, (found, expected)), strict=True)
    for (path, ours), (_, theirs) in leaves:
        assert ours.shape == theirs.shape
        # The first token has no feature before it, so feature-based drafters never write row 0.
        begin = first or int(".rows" in jax.tree_util.keystr(path))
        axis = 0 if ours.ndim == 2 else 1  # of rows, in one prompt's part: a text, or (K, S, E)
        for index, length in enumerate(lengths):
            rows = range(begin, length)
            some = [np.take(np.asarray(x)[index], rows, axis) for x in (ours, theirs)]
            largest = abs(some[1]).max(initial=0)
            assert largest > 0 or not rows
            np.testing.assert_allclose(*some, rtol=0, atol=1e-5 * largest)


@pytest.mark.parametrize("name", ["lookup", *map(slow, ("moa-1", "eagle3", "glide", "borrowed"))])
def test_every_drafter_reads_chunks_as_it_reads_whole_prompts(name):
    """Compares caches, tokens and accept lengths for rows of 1 to 61 tokens in chunks of 7."""
    expected, limits, law = started(session(name, WHOLE))
    found, *_ = started(session(name, 7))
    assert_same_start(found, expected)
    loop, weights = session(name, 7).loop(found, limits, law), session(name, 7).weights
    found, expected = (loop(weights, state, limits, law) for state in (found, expected))
    np.testing.assert_array_equal(found.tokens_BC, expected.tokens_BC)
    np.testing.assert_array_equal(found.accept_lengths_BR, expected.accept_lengths_BR)


@pytest.mark.parametrize("lengths", [(1,), (17,), (49,), slow((90, 3, 17))])
def test_the_end_of_a_prompt_is_read_in_smaller_chunks(lengths):
    prompts = [[(7 * i + length) % 61 for i in range(length)] for length in lengths]
    expected, *_ = started(session("eagle", WHOLE, least_rows=256), prompts)
    found, *_ = started(session("eagle", None, least_rows=256), prompts)
    assert_same_start(found, expected, lengths)


def test_chunks_fill_a_cache_to_its_last_row():
    """The third chunk of a prompt would exceed the cache, so it starts earlier."""
    length = 128 - NEW - DraftShape(4).num_rows
    prompts = [[(5 + i * i) % 61 for i in range(length)], [9] * 51]
    expected, *_ = started(session("moa-1", WHOLE, cache_rows=128), prompts)
    found, *_ = started(session("moa-1", 50, cache_rows=128), prompts)
    assert_same_start(found, expected, (length, 51))
    assert found.round.target_caches[0].k_BKSE.shape[2] == 128 < 3 * 50


def test_a_penalty_sees_the_prompt_and_the_first_token_alone():
    """Tokens that the target would choose after earlier chunks are not counted."""
    sampling = Sampling(0.8, repetition_penalty=1.5, presence_penalty=1.0, seed=3)
    expected, *_ = started(session(None, WHOLE), sampling=sampling)
    found, *_ = started(session(None, 7), sampling=sampling)
    assert_same_start(found, expected)
    rows = zip(*found.round.token_counts[:2], found.tokens_BC, PROMPTS, strict=True)
    for seen_V, times_V, tokens_C, prompt in rows:
        first = int(tokens_C[len(prompt)])
        assert set(np.flatnonzero(seen_V).tolist()) == {*prompt, first}
        assert {int(v): int(times_V[v]) for v in np.flatnonzero(times_V)} == {first: 1}


def test_sizes_of_chunks():
    """Full chunks are preferred, and the rows of a batch share one size."""
    sizes = (64, 32, 16)
    found = [chunks_of(length, sizes) for length in (1, 17, 48, 64, 200)]
    assert found == [[16], [32], [32, 16], [64], [64, 64, 64, 16]]
    assert [chunks_for("cpu", batch)[0] for batch in (1, 64)] == [64, 64]
    assert [chunks_for("cuda", batch) for batch in (1, 4, 8, 32)] == [(512,), (128,), (64,), (64,)]
