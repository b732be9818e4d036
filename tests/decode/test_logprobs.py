"""Log-probabilities of new tokens equal those of one pass over the text, for any draft shape."""

import functools

import numpy as np
import pytest

from moa_jax import Session
from moa_jax.config import DraftShape, Sampling
from tests.decode.tiny import log_probs_along
from tests.pairs import NO_STOP, Pair, random_pair_of

PROMPTS = [[5, 9, 4, 17, 23], [11]]
NEW, TOP = 20, 3
TREE = DraftShape(4, 3, 8)
# Raw log-probabilities ignore these settings.
LAWS = [
    Sampling(0.9, top_k=9, frequency_penalty=1.0, seed=4),
    Sampling(repetition_penalty=1.2, logit_bias=((3, 2.0),)),
]


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return random_pair_of(1, tmp_path_factory.mktemp("pair"))


@pytest.fixture(scope="module")
def answers(pair):
    """Returns the results for a shape, or of plain decoding for None. The chunk size is 4."""

    @functools.cache
    def of(shape: DraftShape | None):
        drafter = shape and pair.drafter
        session = Session(pair.target, drafter, shape, chunk=4, top_logprobs=TOP)
        return session.generate(PROMPTS, NEW, NO_STOP, LAWS)

    return of


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, TREE], ids=str)
def test_they_are_those_of_one_pass_over_the_text(pair, answers, shape):
    for prompt, result in zip(PROMPTS, answers(shape), strict=True):
        assert shape is None or result.tau > 1
        assert len(result.logprobs) == len(result.token_ids) == NEW
        text = [*prompt, *result.token_ids]
        log_TV = log_probs_along(pair.target, text)[len(prompt) - 1 : -1]
        for token, likely, log_V in zip(result.token_ids, result.logprobs, log_TV, strict=True):
            ids, values = zip(*likely.top, strict=True)
            assert likely.logprob == pytest.approx(log_V[token], abs=1e-5)
            np.testing.assert_allclose(values, np.sort(log_V)[::-1][:TOP], atol=1e-5)
            np.testing.assert_allclose(values, log_V[list(ids)], atol=1e-5)
            assert len(set(ids)) == TOP


@pytest.mark.slow
def test_an_answer_that_is_cut_keeps_its_own(pair, answers):
    """Stops come from the device or from the host, in rounds of a tree."""
    session = Session(pair.target, pair.drafter, TREE, chunk=4, top_logprobs=0)
    whole = answers(TREE)[1]
    stop = whole.token_ids[7]
    first = whole.token_ids.index(stop) + 1
    (stopped,) = session.generate(PROMPTS[1:], NEW, [stop], LAWS[1])
    find = lambda tokens: 5 if len(tokens) > 5 else None
    (cut,) = session.generate(PROMPTS[1:], NEW, NO_STOP, LAWS[1], find)
    for result, length in ((stopped, first), (cut, 5)):
        assert len(result.logprobs) == len(result.token_ids) == length
        for ours, theirs in zip(result.logprobs, whole.logprobs, strict=False):
            assert ours.top == [] and ours.logprob == pytest.approx(theirs.logprob, abs=1e-5)
