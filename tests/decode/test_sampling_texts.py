"""Sampled texts of whole programs have the target's distribution, or equal plain decoding's.

tables        tables of logits replace the models' layers
a pair        a small random pair
"""

import dataclasses
import functools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch

from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape, Sampling
from moa_jax.decode import sampling, step
from moa_jax.decode.sampling import make_batch_sampling
from moa_jax.decode.state import (
    DecodeState,
    RoundState,
    StaticConfig,
    StopConditions,
    Vocabulary,
    Weights,
)
from moa_jax.drafters import tree as tree_lib
from moa_jax.drafters.api import Drafter, TapSpec
from tests.oracle import random_pair
from tests.pairs import NO_STOP
from tests.sampling_law import PLAIN, probs_by_definition

# ---- tables -------------------------------------------------------------------------------

SIZE, ROWS = 5, 1 << 13  # tokens of the vocabulary, texts for each setting
TOKENS = 4
LEAST_P = 1e-4  # seeds are fixed: a test that passes once passes always
LOGITS_VV = np.random.default_rng(7).normal(0, 1.5, (2, SIZE, SIZE)).astype(np.float32)
MIXED = [
    PLAIN,
    Sampling(temperature=0.8, top_k=2),  # fewer tokens than children
    Sampling(1.2, 4, 0.9, 0.05, 1.5, ((1, 1.0),), presence_penalty=0.5, frequency_penalty=-0.8),
    Sampling(temperature=0.0, repetition_penalty=1.2, frequency_penalty=0.7),
]


def table_drafter(logits_VV) -> Drafter:
    """Returns a drafter whose logits depend on the last token alone."""

    def propose(params, shared, cache, root_B, length_B, shape, guide):
        def level(cache, tokens_BW, ancestor_BWX, depth):
            logits_BWV = jnp.asarray(logits_VV)[tokens_BW]
            head_DU = shared.get("lm_head")
            return logits_BWV if head_DU is None else logits_BWV @ head_DU, cache

        return tree_lib.grow(level, cache, root_B, shape, guide)

    nothing = lambda *arguments: ()
    return Drafter(TapSpec(), lambda params: {}, None, nothing, nothing, propose, None, None, None)


def table_texts(monkeypatch, shape, rows, ids=None) -> np.ndarray:
    """Returns TOKENS tokens after token 0, for ROWS seeds of each setting, by the loop of rounds.

    `ids` is a draft vocabulary.
    """

    def target_pass(setup, weights, tree, caches, length_B):
        return step.llama.ForwardOutput(jax.nn.one_hot(tree.tokens_BN, SIZE), (), (), ())

    B = ROWS * len(rows)
    law = make_batch_sampling(rows, SIZE)
    spread = lambda a: None if a is None else jnp.repeat(jnp.asarray(a), ROWS, axis=0)
    key_B = jax.vmap(jax.random.key)(jnp.arange(B, dtype=jnp.uint32))
    law = sampling.BatchSampling(key_B, *map(spread, law[1:]))
    sizes = SimpleNamespace(vocab_size=SIZE, sliding_windows=())
    setup = StaticConfig(sizes, table_drafter(LOGITS_VV[1]), shape)
    zero_B, zero_B2R = jnp.zeros(B, jnp.int32), jnp.zeros((B, 2, TOKENS + 1), jnp.int32)
    said = sampling.counts_in(law, zero_B[:, None], zero_B + 1, SIZE)
    now = RoundState(zero_B, zero_B > 0, said, draft_cache=())
    tokens_BC = jnp.zeros((B, TOKENS + shape.levels + 2), jnp.int32)
    state = DecodeState(now, tokens_BC, zero_B, zero_B2R)
    limits = StopConditions(zero_B + TOKENS + 1, jnp.full((B, 1), -1))
    head = ids and Vocabulary(jnp.array(ids), jnp.eye(SIZE)[:, jnp.array(ids)])
    with monkeypatch.context() as patch:
        patch.setattr(step, "target_pass", target_pass)
        patch.setattr(step.llama, "unembed", lambda table_VV, hidden_BNV: hidden_BNV @ table_VV)
        decode = jax.jit(functools.partial(step.decode, setup))
        state = decode(Weights(jnp.asarray(LOGITS_VV[0]), None, head), state, limits, law)
    accepted = np.asarray(state.accept_lengths_BR).sum() / np.asarray(state.rounds_B).sum()
    assert accepted > 1.05, "hardly a draft was accepted, so nothing was shown"
    return np.asarray(state.tokens_BC)[:, 1 : TOKENS + 1].reshape(len(rows), ROWS, TOKENS)


def text_probs(prompt: list[int], row: Sampling, logits_of) -> dict[tuple, float]:
    """Returns the distribution of TOKENS tokens after the prompt, by logits of each text."""
    law = {(): 1.0}
    for _ in range(TOKENS):
        logits_XV = logits_of([[*prompt, *text] for text in law])
        law = {
            (*text, int(token)): chance * law_V[token]
            for (text, chance), logits_V in zip(law.items(), logits_XV, strict=True)
            for law_V in [probs_by_definition(logits_V, {*prompt, *text}, row, text)]
            for token in np.flatnonzero(law_V)
        }
    return law


def table_probs(row: Sampling) -> dict[tuple, float]:
    return text_probs([0], row, lambda texts: [LOGITS_VV[0][text[-1]] for text in texts])


def p_value(texts: np.ndarray, law: dict[tuple, float]) -> float:
    """Returns chi-square's p of texts (rows); texts that are expected under 5 times are joined."""
    assert abs(sum(law.values()) - 1) < 1e-9
    rows, counts = np.unique(texts, axis=0, return_counts=True)
    seen = {tuple(row): count for row, count in zip(rows.tolist(), counts, strict=True)}
    if not seen.keys() <= law.keys():
        return 0.0
    pairs = np.array([(seen.get(text, 0), chance * len(texts)) for text, chance in law.items()])
    rare = pairs[:, 1] < 5
    pairs = np.concatenate([pairs[~rare], pairs[rare].sum(axis=0, keepdims=True)])
    pairs = pairs[pairs[:, 1] > 0]
    return scipy.stats.chisquare(*pairs.T).pvalue if len(pairs) > 1 else 1.0


STATIC = DraftShape.static([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]], sampled=True)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "ids"),
    [
        pytest.param(DraftShape(4, sampled=True), None, id="chain"),
        pytest.param(STATIC, (1, 2, 4), id="tree-of-some-tokens"),
        pytest.param(DraftShape(3, 3, 6), None, id="most-likely-tree"),
    ],
)
def test_texts_have_the_distribution_of_the_target(monkeypatch, shape, ids):
    """The text takes several rounds, so noise that is reused in the next round would be noticed."""
    for texts, row in zip(table_texts(monkeypatch, shape, MIXED, ids), MIXED, strict=True):
        assert p_value(texts, table_probs(row)) > LEAST_P, row


# ---- a pair -------------------------------------------------------------------------------

PROMPTS = [[5, 17, 9, 3, 12], [8, 3, 21], [7], [5, 17, 9], [20, 2, 2, 11], [13] * 9]
PROMPTS += [[9] * 3, [6, 6], [5, 17, 9], [3, 3, 5]]
CHAIN = DraftShape(4)
BAD_WORDS = ((15, 23, 21), (21, 9, 13), *((a, (a + b) % 24) for b in (0, 4) for a in range(24)))
COUPLED = [  # all rows differ; the first two use all settings
    Sampling(0.8, 12, 0.95, 0.01, 1.2, ((4, 1.5), (9, -math.inf)), seed=3),
    Sampling(1.4, 9, 0.8, 0.05, 0.8, ((2, -1.0),), seed=4),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=2.0, top_p=0.7, seed=7),
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=0.0, repetition_penalty=1.1, logit_bias=((13, -3.0), (4, 2.0))),
    # Tokens repeat; a token counted twice or late would change both texts.
    Sampling(temperature=0.7, presence_penalty=-1.0, frequency_penalty=0.5, seed=6),
    Sampling(temperature=0.0, presence_penalty=-1.0, frequency_penalty=0.5),
    Sampling(temperature=0.0, min_tokens=11, bad_words=BAD_WORDS),
    Sampling(temperature=0.7, seed=9, min_tokens=15, bad_words=BAD_WORDS),
]
STOPS = [[]] * 8 + [[*range(0, 24, 2)]] * 2
PENALISED_ROWS = (6, 7, 8, 9)


class SampledPair:
    """A small random pair that accepts some drafts, its sessions, and its torch model."""

    def __init__(self, folder) -> None:
        sizes = dict(vocab_size=24, num_hidden_layers=2, eos_token_id=None)
        config, self.model = random_pair.random_target("llama", 31, 0.3, **sizes)
        draft = random_pair.random_drafter(config, random_pair.draft_sizes(config), 32, 0.3)
        random_pair.save_pair(folder / "target", folder / "draft", self.model, draft)
        self.target = load_target(folder / "target", jnp.float32)
        self.drafter = load_drafter(folder / "draft", self.target)
        self.session = functools.cache(self._session)
        self.results = functools.cache(
            lambda shape: self.session(shape).generate(PROMPTS, 20, STOPS, COUPLED)
        )

    def _session(self, shape: DraftShape | None) -> Session:
        return Session(self.target, shape and self.drafter, shape)

    def logits_of(self, texts: list[list[int]]) -> np.ndarray:
        """Returns the torch model's logits after each text."""
        return self.model(torch.tensor(texts)).logits[:, -1].numpy()


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> SampledPair:
    return SampledPair(tmp_path_factory.mktemp("sampled"))


@pytest.mark.slow
def test_penalties_of_answers_equal_their_definition(pair):
    """Compares each token with torch's logits and numpy's distribution, sampled and greedy."""
    for i in PENALISED_ROWS:
        found, expected = pair.results(CHAIN)[i], text_by_definition(pair, i, COUPLED[i])
        assert found.token_ids == expected and found.tau > 1
        assert len(expected) >= COUPLED[i].min_tokens
        penalties = {"presence_penalty": 0.0, "frequency_penalty": 0.0}
        for off in (penalties, {"min_tokens": 0}, {"bad_words": ()}):
            row = dataclasses.replace(COUPLED[i], **off)
            assert row == COUPLED[i] or text_by_definition(pair, i, row) != expected, off


def text_by_definition(pair: SampledPair, i: int, row: Sampling) -> list[int]:
    """Returns the text that follows the i-th prompt."""
    prompt, answer = PROMPTS[i], []
    law = sampling.make_batch_sampling(
        [dataclasses.replace(row, temperature=1.0)], 24
    )  # for the noise
    for position in range(len(prompt), len(prompt) + 20):
        (logits_V,) = pair.logits_of([[*prompt, *answer]])
        law_V = probs_by_definition(logits_V, {*prompt, *answer}, row, answer, STOPS[i])
        noise_V = sampling.gumbel(law, sampling.TARGET, jnp.array([[position]]), 24)[0, 0]
        with np.errstate(divide="ignore"):
            answer.append(int(np.argmax(np.log(law_V) + noise_V)))
        if answer[-1] in STOPS[i]:
            break
    return answer


@pytest.mark.slow
def test_seeds_decide(pair):
    """Rows of one setting get different seeds; the same seed gives the same text."""
    texts = {
        seed: [
            row.token_ids
            for row in pair.session(None).generate(
                [[7]] * 6, 20, NO_STOP, dataclasses.replace(COUPLED[1], seed=seed)
            )
        ]
        for seed in (2**32 - 2, 0)
    }
    assert texts[2**32 - 2][2:] == texts[0][:4]
    assert len(set(map(tuple, texts[0]))) == 6


@pytest.mark.slow
def test_texts_go_on_as_they_began(pair):
    """Noise depends on the position, so the noise after the prompt differs from that of round one.

    With answer penalties, the text depends on the length of the prompt, so it may differ.
    """
    some = slice(PENALISED_ROWS[0])
    texts = [result.token_ids for result in pair.results(None)[some]]
    prompts = [prompt + text[:7] for prompt, text in zip(PROMPTS[some], texts, strict=True)]
    again = pair.session(None).generate(prompts, 13, NO_STOP, COUPLED[some])
    assert [result.token_ids for result in again] == [text[7:] for text in texts]
