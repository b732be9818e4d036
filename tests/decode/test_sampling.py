"""Sampling settings: the law that they make of logits, and the settings that are refused.

The laws are those of numpy's definition and of transformers' processors. That no draft changes
them is the subject of test_sampling_outcomes.py and test_sampling_texts.py.
"""

import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
from transformers.generation import logits_process as hf

from moa_jax.config import DraftShape, Sampling
from moa_jax.decode import sample, step
from moa_jax.decode.sample import law_of
from moa_jax.decode.session import rows_of
from moa_jax.decode.step import Setup, Weights
from tests.model_folders import refusal
from tests.sampling_law import PLAIN, law_by_definition

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
]


def law_by_transformers(logits_V, seen: set[int], row: Sampling) -> np.ndarray:
    """The same from transformers' processors, in the order of its `generate`."""
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
def our_log_law(law, logits_BNV, seen_BNV):
    return sample.log_law(law, sample.adjust(law, logits_BNV, seen_BNV, law.bias_BV))


def random_logits(spread: float, seed: int = 0):
    """Logits (B, 2, V) for the rows of SETTINGS, and which tokens were seen."""
    rng = np.random.default_rng(seed)
    shape = len(SETTINGS), 2, V
    return rng.normal(0, spread, shape).astype(np.float32), rng.random(shape) < 0.4


@pytest.mark.parametrize("spread", [1.0, 4.0])
def test_law_equals_its_definition_and_transformers(spread):
    logits_BNV, seen_BNV = random_logits(spread)
    law_BNV = np.exp(our_log_law(law_of(SETTINGS, V), logits_BNV, seen_BNV))
    for b, n in itertools.product(*map(range, law_BNV.shape[:2])):
        seen = set(np.flatnonzero(seen_BNV[b, n]).tolist())
        for expected in (law_by_definition, law_by_transformers):
            law_V = expected(logits_BNV[b, n], seen, SETTINGS[b])
            np.testing.assert_allclose(law_BNV[b, n], law_V, atol=1e-6, err_msg=f"{SETTINGS[b]}")
            assert ((law_BNV[b, n] > 0) == (law_V > 1e-30)).all(), SETTINGS[b]


def test_settings_that_are_off_change_nothing():
    """Not even an unlikely tail beside rows that use them; and alone they cost nothing."""
    logits_BNV, seen_BNV = random_logits(15.0)
    log_BNV = our_log_law(law_of(SETTINGS, V), logits_BNV, seen_BNV)
    np.testing.assert_allclose(log_BNV[0], jax.nn.log_softmax(logits_BNV[0]), rtol=1e-6)
    off = law_of([PLAIN], V)
    assert [value is None for value in off] == [False, False, *[True] * 5]
    np.testing.assert_allclose(our_log_law(off, logits_BNV[:1], None), log_BNV[:1], rtol=1e-6)
    assert law_of([Sampling(seed=5)], V) == sample.Law()


def test_extreme_temperatures_are_finite():
    """Towards 0 all on the likeliest token, as at 0; towards infinity nearly all alike."""
    rows = [Sampling(temperature=value) for value in (0.0, 1e-37, 1e-6, 1e6)]
    logits_V = np.array([3.0, 90.0, -50.0, 89.0], np.float32)
    law_BNV = np.exp(our_log_law(law_of(rows, 4), np.tile(logits_V, (4, 1, 1)), None))
    np.testing.assert_array_equal(law_BNV[:3, 0], [[0, 1, 0, 0]] * 3)
    expected_V = law_by_definition(logits_V, set(), rows[3])
    # Two steps of float32 at log 1/4; a temperature that is 1% off makes seven.
    np.testing.assert_allclose(law_BNV[3, 0], expected_V, rtol=2 * np.finfo(np.float32).eps)


def test_drafts_are_guided_by_the_settings_of_the_target():
    """The drafter's law has the same bias and penalty, of committed and of drafted tokens."""
    logits_BNV, seen_BNV = random_logits(1.0, seed=1)
    path_BNP = np.full((*seen_BNV.shape[:2], 2), [[0, 1], [0, 2]])
    law, ids_U = law_of(SETTINGS, V), np.array([1, 2, 3, 5, 7, 11])
    drafter = SimpleNamespace(draft_ids=None)
    setup = Setup(SimpleNamespace(vocab_size=V), drafter, DraftShape(3, sampled=True))

    @jax.jit
    def guided(weights, law, logits_BNU):
        now = step.RoundState(None, np.zeros(1, bool), seen_BNV[:, 0])
        return step.guide(setup, weights, now, law).log_law(logits_BNU, path_BNP)

    whole_BNV = guided(Weights(None, None), law, logits_BNV)
    narrow = Weights(None, None, step.Vocabulary(ids_U, None))
    narrow_BNU = guided(narrow, law, logits_BNV[..., ids_U])
    for b, n in itertools.product(*map(range, whole_BNV.shape[:2])):
        seen = set(np.flatnonzero(seen_BNV[b, 0]).tolist()) | set(path_BNP[b, n].tolist())
        expected = law_by_definition(logits_BNV[b, n], seen, SETTINGS[b])
        np.testing.assert_allclose(np.exp(whole_BNV[b, n]), expected, atol=1e-6)
        row = SETTINGS[b]
        place = {int(token): u for u, token in enumerate(ids_U)}
        bias = tuple((place[token], x) for token, x in row.logit_bias if token in place)
        row = Sampling(**{**vars(row), "logit_bias": bias})
        seen = {place[token] for token in seen if token in place}
        expected = law_by_definition(logits_BNV[b, n][ids_U], seen, row)
        np.testing.assert_allclose(np.exp(narrow_BNU[b, n]), expected, atol=1e-6)


# ---- bad input ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("settings", "line"),
    [
        (dict(temperature=-0.1), "temperature is -0.1: choose from 0"),
        (dict(temperature=math.nan), "temperature is nan"),
        (dict(temperature=math.inf), "temperature is inf"),
        (dict(top_p=0.0), "top_p is 0.0: choose above 0"),
        (dict(top_p=1.1), "top_p is 1.1"),
        (dict(min_p=-0.1), "min_p is -0.1: choose from 0"),
        (dict(min_p=1.1), "min_p is 1.1"),
        (dict(top_k=-1), "top_k is -1"),
        (dict(top_k=1.5), "top_k is 1.5: choose a whole number"),
        (dict(repetition_penalty=0.0), "repetition_penalty is 0.0: choose above 0"),
        (dict(seed=-1), "seed is -1"),
        (dict(seed=1 << 32), "seed is 4294967296"),
        (dict(logit_bias=((1, math.nan),)), "logit_bias holds nan"),
        (dict(logit_bias=((1, math.inf),)), "logit_bias holds inf"),
    ],
)
def test_impossible_settings_are_one_line(settings, line):
    assert line in refusal(Sampling, **settings)


def test_settings_that_do_not_fit_the_pair_are_one_line():
    for token in (V, -1):
        bias = Sampling(logit_bias=((token, 1.0),))
        assert f"logit_bias names the id {token} of {V}" in refusal(law_of, [bias], V)
    assert "2 samplings for 3 prompts" in refusal(rows_of, [PLAIN] * 2, 3)


def test_large_settings_are_taken():
    rows = [Sampling(temperature=1, top_k=1 << 40), Sampling(temperature=1, top_k=2)]
    logits_BNV = jnp.zeros((2, 1, V)).at[:, :, :2].set(3.0)
    law_BNV = np.exp(our_log_law(law_of(rows, V), logits_BNV, None))
    assert (law_BNV > 0).sum(-1).tolist() == [[V], [2]]
