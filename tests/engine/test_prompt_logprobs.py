"""Log-probabilities of prompts, computed in chunks, equal those of one pass over the text."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import replace

import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import Session
from moa_jax.config import Sampling
from moa_jax.decode import logprobs
from moa_jax.engine import Engine, Request
from tests.decode.tiny import log_probs_along, target
from tests.engine.engines import Listener, alone, answers, engine_of, mixed

CHUNK = 32
RANDOM = np.random.default_rng(3)
TEXT = tuple(RANDOM.integers(0, 61, 90).tolist())


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    """Returns an engine without background compiles, so that its programs do not depend on time."""
    made = engine_of(None, chunk=CHUNK)
    made.session.background.submit = lambda *job, **rest: None
    made.start()
    yield made
    made.close()


scoring = functools.cache(lambda: Session(target(), chunk=CHUNK, top_logprobs=20))


def asking(prompt: tuple[int, ...], new: int, top: int = 3, **rest) -> Request:
    settings = {"stop_ids": (), "sampling": Sampling(0.9, top_k=9, seed=4)} | rest
    return Request(prompt, new, **settings, top_logprobs=top, prompt_logprobs=True)


by_one_pass = functools.cache(lambda: log_probs_along(target(), TEXT))


def of_prompt(listener: Listener) -> list[logprobs.TokenLogprob | None]:
    return [each for output in listener.all for each in output.prompt_logprobs]


def assert_as_one_pass(request: Request, listener: Listener) -> None:
    listener.assert_one_end()
    nothing, *likely = of_prompt(listener)
    tokens = request.prompt_ids
    assert nothing is None and tokens == TEXT[: len(tokens)]
    log_TV = by_one_pass()[: len(tokens) - 1]
    for token, each, log_V in zip(tokens[1:], likely, log_TV, strict=True):
        assert each.logprob == pytest.approx(log_V[token], abs=1e-4)
        likeliest = np.sort(log_V)[::-1][: request.top_logprobs]
        np.testing.assert_allclose([p for _, p in each.top], likeliest, atol=1e-4)
        np.testing.assert_allclose([log_V[id] for id, _ in each.top], likeliest, atol=1e-4)


# Lengths and numbers of top tokens; the last chunk of the last two starts at an earlier token.
ASKED = {1: 3, 2: 0, CHUNK - 1: 1, CHUNK: 20, CHUNK + 1: 2, len(TEXT): 5}


@pytest.mark.parametrize("new", [0, 1, 7])
def test_they_are_those_of_one_pass_over_the_prompt(engine, new):
    """Other requests with any settings run beside them; the answer is plain decoding's."""
    requests = [asking(TEXT[:length], new, top) for length, top in ASKED.items()]
    others = mixed(4, 6)
    found = answers(engine, [*requests, *others])
    for request, listener in zip(requests, found, strict=False):
        assert_as_one_pass(request, listener)
        wanted = alone(replace(request, top_logprobs=None)) if new else ([], "length")
        assert (listener.token_ids, listener.all[-1].finish_reason) == wanted
        own = [each for output in listener.all for each in output.logprobs]
        assert [len(each.top) for each in own] == [request.top_logprobs] * new
        if new:
            prompt, settings = [list(request.prompt_ids)], ((), [request.sampling])
            (row,) = scoring().generate(prompt, new, *settings)
            values = [each.logprob for each in row.logprobs]
            assert [each.logprob for each in own] == pytest.approx(values, abs=1e-4)
    for request, listener in zip(others, found[len(requests) :], strict=True):
        assert (listener.token_ids, listener.all[-1].finish_reason) == alone(request)
        assert not of_prompt(listener)


def test_all_tokens_are_read_despite_a_cached_prefix(engine):
    """A request with prompt log-probabilities reuses no prefix; later requests reuse its own."""
    engine._slots.clear()
    before, request = engine.stats(), asking(TEXT, 0)
    for _ in range(2):
        (listener,) = answers(engine, [request])
        assert_as_one_pass(request, listener)
    assert engine.stats().prefix_lookup_tokens == before.prefix_lookup_tokens
    assert engine.stats().prompt_tokens == before.prompt_tokens + 2 * len(TEXT)
    plain = Request((*TEXT, 5), 9, ())
    (listener,) = answers(engine, [plain])
    assert (listener.token_ids, listener.all[-1].finish_reason) == alone(plain)
    assert engine.stats().prefix_tokens == before.prefix_tokens + len(TEXT)


@pytest.mark.parametrize("width", [1, 8, 21])
def test_pieces_make_no_difference(width, monkeypatch):
    monkeypatch.setattr(logprobs, "PIECE", 8)
    hidden_BTD = jnp.asarray(RANDOM.normal(size=(2, width, 5)), jnp.float32)
    head_DV = jnp.asarray(RANDOM.normal(size=(5, 17)), jnp.float32)
    tokens_BT = jnp.asarray(RANDOM.integers(0, 17, (2, width)))
    found = logprobs.logprobs_along(lambda x: x @ head_DV, hidden_BTD, tokens_BT, 3)
    wanted = logprobs.logprobs_of(hidden_BTD @ head_DV, tokens_BT, 3)
    for ours, theirs in zip(found, wanted, strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-6)
