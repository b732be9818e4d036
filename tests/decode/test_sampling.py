"""Sampling settings: the distribution that they make of logits, and the settings that are refused.

The expected distributions are those of numpy's definition and of transformers' processors.
test_sampling_outcomes.py and test_sampling_texts.py show that no draft changes them.
"""

import itertools
from types import SimpleNamespace

import jax
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from moa_jax.config import DraftShape, Sampling
from moa_jax.decode import sampling, step
from moa_jax.decode.sampling import TokenCounts, make_batch_sampling
from moa_jax.decode.session import rows_of
from moa_jax.decode.state import RoundState, StaticConfig, Weights
from tests.model_folders import refusal
from tests.sampling_law import PLAIN, probs_by_definition

V = 13
SETTINGS = [
    Sampling(temperature=1.0, top_k=V, top_p=1.0),  # all off
    Sampling(temperature=0.3),
    Sampling(temperature=0.7, top_k=4),
    Sampling(temperature=1.5, top_p=0.6),
    Sampling(temperature=2.0, min_p=0.3),
    Sampling(temperature=1.0, repetition_penalty=1.8),
    Sampling(temperature=1.3, top_k=6, top_p=0.7, min_p=0.2, repetition_penalty=0.6),
    Sampling(temperature=0.9, top_k=5, top_p=0.8, logit_bias=((3, 4.0), (7, -100.0))),
    Sampling(temperature=0.0, repetition_penalty=1.3, logit_bias=((5, 2.0),)),
    Sampling(temperature=1.0, presence_penalty=1.5),
    Sampling(temperature=1.0, frequency_penalty=-0.7),
    Sampling(0.9, 8, 0.9, 0.0, 1.4, ((2, 1.5),), presence_penalty=-1.0, frequency_penalty=2.0),
    Sampling(temperature=0.0, presence_penalty=0.4, frequency_penalty=0.6),
]


def probs_by_transformers(logits_V, seen: set[int], row: Sampling) -> np.ndarray:
    """Returns the distribution of transformers' processors, in the order of its `generate`.

    transformers has no presence and no frequency penalty.
    """
    processors = hf.LogitsProcessorList()
    if row.logit_bias:
        bias = {(token,): value for token, value in row.logit_bias}
        processors.append(hf.SequenceBiasLogitsProcessor(bias))
    processors.append(hf.RepetitionPenaltyLogitsProcessor(row.repetition_penalty))
    if row.temperature:
        processors.append(hf.TemperatureLogitsWarper(row.temperature))
        if row.top_k:
            processors.append(hf.TopKLogitsWarper(row.top_k))
        if row.top_p < 1:
            processors.append(hf.TopPLogitsWarper(row.top_p))
        processors.append(hf.MinPLogitsWarper(row.min_p))
    scores = processors(torch.tensor([sorted(seen)]), torch.tensor(logits_V)[None].double())[0]
    if not row.temperature:
        return np.eye(len(scores))[int(scores.argmax())]
    return scores.softmax(-1).numpy()


@jax.jit
def our_log_probs(law, logits_BNV, said):
    return sampling.log_probs(law, sampling.apply_penalties(law, logits_BNV, said, law.bias_BV))


def random_logits(spread: float, seed: int = 0) -> tuple[np.ndarray, TokenCounts]:
    """Returns logits (B, 2, V) for the rows of SETTINGS, and token counts."""
    rng = np.random.default_rng(seed)
    shape = len(SETTINGS), 2, V
    logits_BNV = rng.normal(0, spread, shape).astype(np.float32)
    times_BNV = rng.integers(1, 4, shape) * (rng.random(shape) < 0.3)
    return logits_BNV, TokenCounts((rng.random(shape) < 0.3) | (times_BNV > 0), times_BNV)


def in_words(said: TokenCounts, b: int, n: int) -> tuple[set[int], list[int]]:
    """Returns the tokens that a node has seen, and the tokens of its answer in some order."""
    return (
        set(np.flatnonzero(said.seen[b, n]).tolist()),
        np.repeat(np.arange(V), said.times[b, n]).tolist(),
    )


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_the_distribution_equals_its_definition_and_transformers(spread):
    logits_BNV, said = random_logits(spread)
    law_BNV = np.exp(our_log_probs(make_batch_sampling(SETTINGS, V), logits_BNV, said))
    for b, n in itertools.product(*map(range, law_BNV.shape[:2])):
        seen, answer = in_words(said, b, n)
        expected = [probs_by_definition(logits_BNV[b, n], seen, SETTINGS[b], answer)]
        if not (SETTINGS[b].presence_penalty or SETTINGS[b].frequency_penalty):
            expected.append(probs_by_transformers(logits_BNV[b, n], seen, SETTINGS[b]))
        for law_V in expected:
            np.testing.assert_allclose(law_BNV[b, n], law_V, atol=1e-6, err_msg=f"{SETTINGS[b]}")
            assert ((law_BNV[b, n] > 0) == (law_V > 1e-30)).all(), SETTINGS[b]


def test_token_counts_of_texts():
    """Prompt tokens are seen, not counted; padding and negative tokens are neither."""
    tokens_BC = np.array([[1, 1, 2, 1, 3, 3, 7], [4, 5, 6, 6, 6, -1, -1]])
    law = make_batch_sampling([Sampling(repetition_penalty=2.0, presence_penalty=1.0)] * 2, V)
    prompt_length_B, count_B = np.array([2, 1]), np.array([6, 7])
    counts_in = jax.jit(sampling.counts_in, static_argnums=3)
    said = counts_in(law, tokens_BC, prompt_length_B, V, count_B)
    assert [set(np.flatnonzero(seen_V)) for seen_V in said.seen] == [{1, 2, 3}, {4, 5, 6}]
    np.testing.assert_array_equal(
        said.times, [np.bincount(row, minlength=V) for row in ([2, 1, 3, 3], [5, 6, 6, 6])]
    )
    some = counts_in(law, tokens_BC, prompt_length_B, V, np.array([4, 2]))
    more_BT = np.array([[3, 3, 9], [6, 6, 6]])
    some = jax.jit(sampling.add_answer_tokens)(some, more_BT, np.array([2, 3]))
    for ours, theirs in zip(some, said, strict=True):
        np.testing.assert_array_equal(ours, theirs)
    assert (
        sampling.counts_in(sampling.BatchSampling(), tokens_BC, prompt_length_B, V) == TokenCounts()
    )


def test_disabled_settings_change_nothing():
    """Unlikely tokens are kept beside rows with settings; unused settings have no array."""
    logits_BNV, said = random_logits(15.0)
    log_BNV = our_log_probs(make_batch_sampling(SETTINGS, V), logits_BNV, said)
    np.testing.assert_allclose(log_BNV[0], jax.nn.log_softmax(logits_BNV[0]), rtol=1e-6)
    off = make_batch_sampling([PLAIN], V)
    assert [value is None for value in off] == [False, False, *[True] * (len(off) - 2)]
    np.testing.assert_allclose(
        our_log_probs(off, logits_BNV[:1], TokenCounts()), log_BNV[:1], rtol=1e-6
    )
    assert make_batch_sampling([Sampling(seed=5)], V) == sampling.BatchSampling()


def kept_by_sorting(log_V: np.ndarray, k: int, p: float) -> tuple[np.ndarray, float]:
    """Returns the tokens that top-k and then top-p keep, by sorting, and top-p's margin."""
    sorted_V = -np.sort(-log_V)
    mass_V = np.where(np.arange(len(log_V)) < k, np.exp(sorted_V.astype(np.float64)), 0)
    before_V = np.cumsum(mass_V) - mass_V
    enough = p * mass_V.sum() if p < 1 else np.inf
    # Equal values are kept or removed together, so their sum starts at the first of them.
    first_V = np.searchsorted(-sorted_V, -sorted_V)
    chosen_V = (before_V[first_V] < enough) & (np.arange(len(log_V)) < k)
    return log_V >= sorted_V[chosen_V].min(), np.abs(before_V[first_V] - enough).min()


@pytest.mark.parametrize("size", [7, 200, pytest.param(128256, marks=pytest.mark.slow)])
@pytest.mark.parametrize("ties", [False, True])
def test_top_k_and_top_p_keep_what_sorting_keeps(size, ties):
    """Skips tokens that the last bits of a sum decide, for distributions of all spreads."""
    rng = np.random.default_rng(size)
    spreads = (0.0, 0.01, 1.0, 4.0, 30.0)
    rows = [
        Sampling(temperature=0.7, top_k=k, top_p=p)
        for k in (0, 1, 5, size, size + 3)
        for p in (1e-6, 0.3, 0.9, 0.999999, 1.0)
    ]
    logits_BNV = rng.normal(size=(len(rows), len(spreads), size)) * np.array(spreads)[:, None]
    logits_BNV = (np.round(logits_BNV) if ties else logits_BNV).astype(np.float32)
    law, decided = make_batch_sampling(rows, size + 3), 0
    log_BNV = np.asarray(jax.jit(jax.nn.log_softmax)(logits_BNV))
    found_BNV = np.asarray(jax.jit(sampling._kept)(law, log_BNV))
    for b, n in itertools.product(*map(range, log_BNV.shape[:2])):
        row = rows[b]
        kept_V, margin = kept_by_sorting(log_BNV[b, n], row.top_k or size, row.top_p)
        if margin > 3e-7:
            np.testing.assert_array_equal(found_BNV[b, n], kept_V, f"{row} {spreads[n]}")
            decided += 1
    assert decided > 0.8 * len(rows) * len(spreads)


def test_extreme_temperatures_are_finite():
    """Near 0 the argmax has all probability, as at 0; near infinity the distribution is uniform."""
    rows = [Sampling(temperature=value) for value in (0.0, 1e-37, 1e-6, 1e6)]
    logits_V = np.array([3.0, 90.0, -50.0, 89.0], np.float32)
    law_BNV = np.exp(
        our_log_probs(make_batch_sampling(rows, 4), np.tile(logits_V, (4, 1, 1)), TokenCounts())
    )
    np.testing.assert_array_equal(law_BNV[:3, 0], [[0, 1, 0, 0]] * 3)
    expected_V = probs_by_definition(logits_V, set(), rows[3])
    # Two steps of float32 at log 1/4; a temperature that is 1% off makes seven.
    np.testing.assert_allclose(law_BNV[3, 0], expected_V, rtol=2 * np.finfo(np.float32).eps)


def test_drafts_are_guided_by_the_settings_of_the_target():
    """The drafter has the same bias and penalties, for committed and for drafted tokens.

    The root 0 is committed, so it is not counted again.
    """
    logits_BNV, said = random_logits(1.0, seed=1)
    said.seen[:, :, 0], said.times[:, :, 0] = True, 2
    path_BNP = np.full((*logits_BNV.shape[:2], 3), [[0, 1, 1], [0, 2, 3]])
    law = make_batch_sampling(SETTINGS, V)
    drafter = SimpleNamespace(draft_ids=None)
    setup = StaticConfig(SimpleNamespace(vocab_size=V), drafter, DraftShape(3, sampled=True))

    @jax.jit
    def guided(weights, law, logits_BNU):
        now = RoundState(None, np.zeros(1, bool), TokenCounts(said.seen[:, 0], said.times[:, 0]))
        return step.candidate_sampler(setup, weights, now, law).adjusted(logits_BNU, path_BNP)

    whole_BNV = guided(Weights(None, None), law, logits_BNV)
    for b, n in itertools.product(*map(range, whole_BNV.shape[:2])):
        seen, answer = in_words(said, b, 0)
        answer += path_BNP[b, n, 1:].tolist()
        seen |= set(answer)
        expected = probs_by_definition(logits_BNV[b, n], seen, SETTINGS[b], answer)
        np.testing.assert_allclose(np.exp(whole_BNV[b, n]), expected, atol=1e-6)


# ---- bad input ----------------------------------------------------------------------------


def test_settings_that_do_not_fit_the_pair_are_one_line():
    for token in (V, -1):
        bias = Sampling(logit_bias=((token, 1.0),))
        assert f"logit_bias names the id {token} of {V}" in refusal(make_batch_sampling, [bias], V)
    assert "2 samplings for 3 prompts" in refusal(rows_of, [PLAIN] * 2, 3)
