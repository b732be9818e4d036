"""Sampling is lossless: the law of the text is the target's own, whatever was drafted.

laws          settings -> law, against numpy and transformers
enumeration   every draft and every choice on tiny vocabularies, in exact numbers
tables        whole programs, with tables of logits in place of the models' layers
a pair        whole programs, with a small random pair
"""

import dataclasses
import functools
import itertools
import math
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
import torch
from transformers.generation import logits_process as hf

from moa_jax import Session, load_drafter, load_target
from moa_jax.config import DraftShape, Sampling
from moa_jax.drafters import grow
from moa_jax.drafters.api import NOTHING, Drafter, Taps, Tree
from moa_jax.session import law_of, rows_of
from moa_jax.spec import sample, step
from moa_jax.spec.step import DecodeState, Limits, Setup, Weights
from moa_jax.spec.verify import verify
from tests.model_folders import refusal
from tests.oracle import random_pair

NO_STOP: list[int] = []
PLAIN = Sampling(temperature=1.0)

# ---- laws ---------------------------------------------------------------------------------

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


def law_by_definition(logits_V, seen: set[int], row: Sampling) -> np.ndarray:
    """The probabilities of the next token in float64."""
    logits = np.array(logits_V, np.float64)
    for token, bias in row.logit_bias:
        logits[token] += bias
    for token in seen:
        factor = row.repetition_penalty
        logits[token] *= factor if logits[token] < 0 else 1 / factor
    order = np.argsort(-logits, kind="stable")
    if row.temperature == 0:
        return np.eye(len(logits))[order[0]]
    mass = np.exp((logits - logits.max()) / row.temperature)
    kept = order[: row.top_k] if row.top_k else order
    before = np.cumsum(mass[kept]) - mass[kept]
    if row.top_p < 1:
        kept = kept[before < row.top_p * mass[kept].sum()]
    kept = kept[mass[kept] >= row.min_p * mass.max()]
    law = np.zeros_like(mass)
    law[kept] = mass[kept] / mass[kept].sum()
    return law


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
    """Towards 0 all on the likeliest token, as at 0; towards infinity all alike."""
    rows = [Sampling(temperature=value) for value in (0.0, 1e-37, 1e-6, 1e6)]
    logits_BNV = jnp.broadcast_to(jnp.array([3.0, 90.0, -50.0, 89.0]), (4, 1, 4))
    law_BNV = np.exp(our_log_law(law_of(rows, 4), logits_BNV, None))
    np.testing.assert_array_equal(law_BNV[:3, 0], [[0, 1, 0, 0]] * 3)
    np.testing.assert_allclose(law_BNV[3, 0], [0.25] * 4, atol=1e-4)


def test_drafts_are_guided_by_the_settings_of_the_target():
    """The drafter's law has the same bias and penalty, of committed and of drafted tokens."""
    logits_BNV, seen_BNV = random_logits(1.0, seed=1)
    path_BNP = np.full((*seen_BNV.shape[:2], 2), [[0, 1], [0, 2]])
    law, ids_U = law_of(SETTINGS, V), np.array([1, 2, 3, 5, 7, 11])
    setup = Setup(SimpleNamespace(vocab_size=V), None, DraftShape(3, sampled=True))

    @jax.jit
    def guided(weights, law, logits_BNU):
        state = SimpleNamespace(seen_BV=seen_BNV[:, 0], done_B=np.zeros(1, bool))
        return step._guide(setup, weights, state, law).log_law(logits_BNU, path_BNP)

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


# ---- enumeration --------------------------------------------------------------------------

CHAIN = ((0,), (0, 0), (0, 0, 0))
PAIRS = ((0,), (1,), (0, 0), (0, 1), (1, 0))
TRIPLE = ((0,), (1,), (2,), (0, 0))
DEEP = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
TREES = [(3, CHAIN), (4, CHAIN), (3, PAIRS), (4, TRIPLE), (3, DEEP)]
LENGTH = 4  # tokens whose joint law is compared: as many as a round can emit


def random_table(size: int, seed: int, support: int | None = None) -> dict:
    """{path: law of the next token}; with a `support` only so many tokens are possible."""
    rng = np.random.default_rng(seed)
    table = {}
    for length in range(LENGTH):
        for path in itertools.product(range(size), repeat=length):
            law_V = rng.dirichlet(np.full(size, 0.7)) + 0.02
            law_V[rng.permutation(size)[support:] if support else []] = 0.0
            table[path] = law_V / law_V.sum()
    return table


def joint_law(table: dict, size: int, given: tuple = ()) -> np.ndarray:
    """The law of LENGTH tokens, `given` the first ones, as one axis."""
    law = np.zeros((size,) * LENGTH)
    for tokens in itertools.product(range(size), repeat=LENGTH - len(given)):
        whole = given + tokens
        law[whole] = np.prod([table[whole[:k]][whole[k]] for k in range(len(given), LENGTH)])
    return law.ravel()


def in_order(law_V: np.ndarray, count: int, given: tuple = ()) -> list[tuple[tuple, float]]:
    """All ordered draws without replacement; those that nothing is left for are lowest first."""
    if len(given) == count:
        return [(given, 1.0)]
    rest_V = np.where(np.isin(np.arange(len(law_V)), given), 0.0, law_V)
    if not rest_V.any():
        unused = [token for token in range(len(law_V)) if token not in given]
        return [((*given, *unused)[:count], 1.0)]
    return [
        (tokens, rest_V[token] / rest_V.sum() * chance)
        for token in np.flatnonzero(rest_V).tolist()
        for tokens, chance in in_order(law_V, count, (*given, token))
    ]


def all_drafts(paths: tuple, table: dict) -> list[tuple[dict, float]]:
    """Every ({node's path of ranks: its path of tokens}, its probability)."""
    drafts = [({(): ()}, 1.0)]
    for node in ((), *paths):
        count = sum(path[:-1] == node for path in paths)
        drafts = [
            (draft | {(*node, k): (*draft[node], token) for k, token in enumerate(tokens)}, w * c)
            for draft, w in drafts
            for tokens, c in (in_order(table[draft[node]], count) if count else [((), 1.0)])
        ]
    return drafts


def tree_of(paths: tuple, tokens_BN: np.ndarray) -> Tree:
    nodes = ((), *paths)
    parent_N = np.array([nodes.index(path[:-1]) for path in nodes])
    ancestor_NN = np.array([[path[: len(up)] == up for up in nodes] for path in nodes])
    spread = lambda row_N: np.broadcast_to(row_N, tokens_BN.shape)  # noqa: E731
    depth_N = np.array([len(path) for path in nodes])
    return Tree(tokens_BN, spread(parent_N), spread(depth_N), ancestor_NN[None])


our_verify = jax.jit(verify, static_argnums=2)
our_children = jax.jit(sample.children, static_argnums=1)


def output_laws(paths: tuple, drafts: list, target: dict, drafter: dict, choice_law):
    """Each draft's law of LENGTH tokens (D, V ** LENGTH): one real `verify` of all choices.

    What a round emits is continued by the target's own law.
    """
    nodes, size = ((), *paths), len(target[()])
    token = lambda path: path[-1] if path else 0  # noqa: E731
    tokens_DN = np.array([[token(draft[node]) for node in nodes] for draft, _ in drafts])
    unreached = np.full(size, 1 / size)  # what follows a missing node
    follows = lambda table, path: table.get(path, unreached)  # noqa: E731
    laws = [
        np.array([[follows(table, draft[node]) for node in nodes] for draft, _ in drafts])
        for table in (target, drafter)
    ]
    most = 1 + max(map(max, paths))
    child_DNk = np.asarray(our_children(tree_of(paths, tokens_DN), most))
    chance_DNV = choice_law(*laws, child_DNk)
    np.testing.assert_allclose(chance_DNV.sum(-1), 1.0, atol=1e-6)

    choice_AN = np.array(list(itertools.product(range(size), repeat=len(nodes))))
    weight_DA = np.prod(
        [chance_DNV[:, n, choice_AN[:, n]] for n in range(len(nodes))], axis=0, dtype=np.float64
    )
    (D, A), levels = weight_DA.shape, 1 + max(map(len, paths))
    tree = tree_of(paths, np.repeat(tokens_DN, A, axis=0))
    verdict = our_verify(tree, np.tile(choice_AN, (D, 1)), levels)
    count_X, emitted_XD = np.asarray(verdict.count_B), np.asarray(verdict.emitted_BD)
    law = np.zeros((D, size**LENGTH))
    for count in range(1, levels + 1):
        for prefix in itertools.product(range(size), repeat=count):
            same_X = (count_X == count) & (emitted_XD[:, :count] == prefix).all(axis=1)
            mass_D = (weight_DA * same_X.reshape(D, A)).sum(axis=1)
            law += mass_D[:, None] * joint_law(target, size, prefix)
    return law


def expected_law(drafts: list, laws_DX: np.ndarray) -> np.ndarray:
    return np.array([chance for _, chance in drafts]) @ laws_DX


def point_masses(law_DNV, draft_DNV, child_DNk):
    return law_DNV


def sampled(reject):
    """The law of the choice when the children are tried one after the other."""

    def choice_law(law_DNV, draft_DNV, child_DNk):
        found = reject(law_DNV, draft_DNV, child_DNk)
        accept_DNk, residual_DNV = (np.asarray(part, np.float64) for part in found)
        chance_DNV, untried_DN = np.zeros(law_DNV.shape), np.ones(law_DNV.shape[:2])
        for k in range(child_DNk.shape[-1]):
            taken_DN = untried_DN * accept_DNk[..., k]
            chance_DNV += taken_DN[..., None] * np.eye(law_DNV.shape[-1])[child_DNk[..., k]]
            untried_DN = untried_DN - taken_DN
        return chance_DNV + untried_DN[..., None] * residual_DNV

    return choice_law


our_reject = jax.jit(sample.reject)


@pytest.mark.parametrize(("size", "paths"), TREES)
def test_fixed_candidates_change_no_law(size, paths):
    """Whatever stands in the tree, unlikely tokens and missing nodes too: each draft alone."""
    target, drafter = random_table(size, 1), random_table(size, 2)
    drafts = all_drafts(paths, drafter)[::7]
    gone = [
        ({path: (*tokens[:-1], NOTHING) if path[:1] == (0,) else tokens for path, tokens in d}, 1.0)
        for d in [draft.items() for draft, _ in drafts[:2]]
    ]
    laws_DX = output_laws(paths, drafts + gone, target, drafter, point_masses)
    expected_X = joint_law(target, size)
    np.testing.assert_allclose(
        laws_DX, np.broadcast_to(expected_X, laws_DX.shape), rtol=0, atol=1e-12
    )


# A drafter that knows fewer tokens than there are children proposes some that it did not draw.
@pytest.mark.parametrize("support", [None, 2, 1])
@pytest.mark.parametrize(("size", "paths"), TREES)
def test_sampled_candidates_change_no_law(size, paths, support):
    target = random_table(size, 3, support and 2)
    drafter = random_table(size, 4, support)
    drafts = all_drafts(paths, drafter)
    assert abs(sum(chance for _, chance in drafts) - 1) < 1e-12
    laws_DX = output_laws(paths, drafts, target, drafter, sampled(our_reject))
    expected_X = joint_law(target, size)
    np.testing.assert_allclose(expected_law(drafts, laws_DX), expected_X, rtol=0, atol=1e-6)
    if support is None:
        assert np.abs(laws_DX - expected_X).max() > 0.05, "no draft mattered, so nothing was shown"


def rejection(
    law_DNV,
    draft_DNV,
    child_DNk,
    chance=lambda wanted, drafted: wanted / drafted,
    left=lambda law_V, draft_V: np.maximum(law_V - draft_V, 0.0),
    others=lambda draft_V, token: np.where(np.arange(len(draft_V)) == token, 0.0, draft_V),
):
    """`sample.reject` by its definition in float64, to be broken in one place."""
    accept_DNk, residual_DNV = np.zeros(child_DNk.shape), np.empty(law_DNV.shape)
    for d, n in itertools.product(*map(range, child_DNk.shape[:2])):
        law_V, draft_V = law_DNV[d, n], draft_DNV[d, n]
        for k, token in enumerate(child_DNk[d, n]):
            if token < 0 or draft_V[token] == 0:
                continue
            accept_DNk[d, n, k] = min(1.0, chance(law_V[token], draft_V[token]))
            law_V = normalised(left(law_V, draft_V), law_V)
            draft_V = normalised(others(draft_V, token), draft_V * 0)
        residual_DNV[d, n] = law_V
    return accept_DNk, residual_DNV


def normalised(mass_V, otherwise_V):
    return mass_V / mass_V.sum() if mass_V.any() else otherwise_V


BROKEN = {
    "the residual is the law itself": dict(left=lambda law_V, draft_V: law_V),
    "the drafter's law keeps what was refused": dict(others=lambda draft_V, token: draft_V),
    "the ratio is upside down": dict(chance=lambda wanted, drafted: drafted / max(wanted, 1e-9)),
}


def distance_of(reject, drafter, paths=PAIRS) -> float:
    """How far sampled candidates are from the law of three tokens of random tables."""
    target = random_table(3, 3)
    drafts = all_drafts(paths, drafter)
    laws_DX = output_laws(paths, drafts, target, drafter, sampled(reject))
    return np.abs(expected_law(drafts, laws_DX) - joint_law(target, 3)).max()


def test_rejection_by_its_definition_changes_no_law():
    assert distance_of(rejection, random_table(3, 4)) < 1e-12


UNIFORM = dict.fromkeys(random_table(3, 4), np.full(3, 1 / 3))


@pytest.mark.parametrize("what", BROKEN)
def test_broken_rejection_changes_the_law(what):
    """Seen with a biased drafter; a uniform one would hide the second of the three."""
    broken = functools.partial(rejection, **BROKEN[what])
    assert distance_of(broken, random_table(3, 4)) > 1e-3
    assert (distance_of(broken, UNIFORM) < 1e-12) == (what == list(BROKEN)[1])


def distance_when_chosen(choose, drafter) -> float:
    """The same for a chain of one, which `choose` makes of two candidates in drawn order."""
    target = random_table(3, 3)
    drafts = [
        ({(): (), (0,): (choose(drafter[()], pair[(0,)][0], pair[(1,)][0]),)}, chance)
        for pair, chance in all_drafts(((0,), (1,)), drafter)
    ]
    laws_DX = output_laws(((0,),), drafts, target, drafter, sampled(our_reject))
    return np.abs(expected_law(drafts, laws_DX) - joint_law(target, 3)).max()


BY_LUCK = {
    "the likelier of two stays": lambda law_V, a, b: max(a, b, key=lambda t: law_V[t]),
    "an unlikely one is left out": lambda law_V, a, b: a if law_V[a] > 0.4 else NOTHING,
}


@pytest.mark.parametrize("what", BY_LUCK)
def test_choosing_by_luck_changes_the_law(what):
    """What is kept may depend on the drafter's law, not on what was drawn from it."""
    drafter = random_table(3, 4)
    assert distance_when_chosen(lambda law_V, a, b: a, drafter) < 1e-6
    assert distance_when_chosen(lambda law_V, a, b: NOTHING, drafter) < 1e-6
    assert distance_when_chosen(BY_LUCK[what], drafter) > 1e-3
    assert distance_when_chosen(BY_LUCK[what], UNIFORM) < 1e-6  # which would hide it


# ---- tables -------------------------------------------------------------------------------

SIZE, ROWS = 5, 1 << 13  # tokens of the vocabulary, texts for each setting
TOKENS = 4
LEAST_P = 1e-4  # seeds are fixed: a test that passes once passes always
LOGITS_VV = np.random.default_rng(7).normal(0, 1.5, (2, SIZE, SIZE)).astype(np.float32)
MIXED = [
    PLAIN,
    Sampling(temperature=0.8, top_k=2),  # fewer tokens than children
    Sampling(1.2, 4, 0.9, 0.05, 1.5, ((1, 1.0),)),
    Sampling(temperature=0.0, repetition_penalty=1.2),
]


def table_drafter(logits_VV) -> Drafter:
    """Drafts from logits that the last token alone decides."""

    def propose(params, shared, cache, root_B, length_B, shape, guide):
        def level(cache, tokens_BW, ancestor_BWX, depth):
            logits_BWV = jnp.asarray(logits_VV)[tokens_BW]
            head_DU = shared.get("lm_head")
            return logits_BWV if head_DU is None else logits_BWV @ head_DU, cache

        return grow.grow(level, cache, root_B, shape, guide)

    nothing = lambda *arguments: ()  # noqa: E731
    return Drafter(Taps(), lambda params: {}, None, nothing, nothing, propose, None, None)


def table_texts(monkeypatch, shape, rows, ids=None) -> np.ndarray:
    """TOKENS tokens after token 0, for ROWS seeds of each setting, by the loop of rounds itself.

    `ids` is a draft vocabulary.
    """

    def target_pass(setup, weights, tree, caches, length_B):
        return step.target.Pass(jax.nn.one_hot(tree.tokens_BN, SIZE), (), (), ())

    B = ROWS * len(rows)
    law = law_of(rows, SIZE)
    spread = lambda a: None if a is None else jnp.repeat(jnp.asarray(a), ROWS, axis=0)  # noqa: E731
    key_B = jax.vmap(jax.random.key)(jnp.arange(B, dtype=jnp.uint32))
    law = sample.Law(key_B, *map(spread, law[1:]))
    setup = Setup(SimpleNamespace(vocab_size=SIZE), table_drafter(LOGITS_VV[1]), shape)
    zero_B, zero_BR = jnp.zeros(B, jnp.int32), jnp.zeros((B, TOKENS + 1), jnp.int32)
    seen_BV = jnp.zeros((B, SIZE), bool).at[:, 0].set(True)
    state = DecodeState(
        *(jnp.zeros((B, TOKENS + shape.levels + 2), jnp.int32), zero_B, zero_B > 0, (), ()),
        *(zero_B, zero_BR, zero_BR, None if law.repetition_B is None else seen_BV),
    )
    limits = Limits(zero_B + TOKENS + 1, jnp.full((B, 1), -1), jnp.int32(99))
    head = ids and step.Vocabulary(jnp.array(ids), jnp.eye(SIZE)[:, jnp.array(ids)])
    with monkeypatch.context() as patch:
        patch.setattr(step, "_target_pass", target_pass)
        patch.setattr(step.target, "unembed", lambda table_VV, hidden_BNV: hidden_BNV @ table_VV)
        decode = jax.jit(functools.partial(step.decode, setup))
        state = decode(Weights(jnp.asarray(LOGITS_VV[0]), None, head), state, limits, law)
    accepted = np.asarray(state.accept_lengths_BR).sum() / np.asarray(state.rounds_B).sum()
    assert accepted > 1.05, "hardly a draft was accepted, so nothing was shown"
    return np.asarray(state.tokens_BC)[:, 1 : TOKENS + 1].reshape(len(rows), ROWS, TOKENS)


def table_law(row: Sampling) -> dict[tuple, float]:
    """The law of those tokens, from the definition of the settings."""
    law = {(): 1.0}
    for _ in range(TOKENS):
        law = {
            (*text, token): chance * p
            for text, chance in law.items()
            for token, p in enumerate(
                law_by_definition(LOGITS_VV[0][(0, *text)[-1]], {0, *text}, row)
            )
            if p > 0
        }
    return law


def p_value(texts: np.ndarray, law: dict[tuple, float]) -> float:
    """Chi-square of texts (rows) against their law; texts expected under 5 times are one."""
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


def assert_law_of_the_target(monkeypatch, shape, rows, ids=None) -> None:
    for texts, row in zip(table_texts(monkeypatch, shape, rows, ids), rows, strict=True):
        assert p_value(texts, table_law(row)) > LEAST_P, row


STATIC = DraftShape.static([[0], [1], [2], [0, 0], [0, 1], [1, 0], [0, 0, 0]], sampled=True)

TWO_LINES = DraftShape.static([[0], [1], [0, 0], [1, 0], [0, 0, 0], [1, 0, 0]], sampled=True)


@pytest.mark.parametrize("shape", [STATIC, DraftShape(4, sampled=True)], ids=str)
def test_texts_have_the_law_of_the_target(monkeypatch, shape):
    """Several rounds in all, so that noise of one round that returned in the next would show."""
    assert_law_of_the_target(monkeypatch, shape, MIXED)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "ids"),
    [
        (DraftShape(4, sampled=True, confidence=0.25), None),
        (dataclasses.replace(TWO_LINES, confidence=0.1), None),
        (STATIC, (1, 2, 4)),
        (DraftShape(3, 3, 6), None),
    ],
    ids=str,
)
def test_texts_of_any_shape_have_the_law_of_the_target(monkeypatch, shape, ids):
    assert_law_of_the_target(monkeypatch, shape, MIXED, ids)


def with_broken_residual(law_BNV, *rest):
    return unbroken(law_BNV, *rest)._replace(residual_BNV=law_BNV)


unbroken = sample.reject


@pytest.mark.slow
def test_a_broken_residual_shows_in_the_texts(monkeypatch):
    monkeypatch.setattr(sample, "reject", with_broken_residual)
    (texts,) = table_texts(monkeypatch, STATIC, [PLAIN])
    assert p_value(texts, table_law(PLAIN)) < LEAST_P / 100


# ---- a pair -------------------------------------------------------------------------------

PROMPTS = [[5, 17, 9, 3, 12], [8, 3, 21], [7], [5, 17, 9], [20, 2, 2, 11], [13] * 9]
TREE = DraftShape(4, 3, 8)
COUPLED = [  # every row another one; the first two use all that there is
    Sampling(0.8, 12, 0.95, 0.01, 1.2, ((4, 1.5), (9, -math.inf)), seed=3),
    Sampling(1.4, 9, 0.8, 0.05, 0.8, ((2, -1.0),), seed=4),
    Sampling(temperature=1.0, seed=5),
    Sampling(temperature=2.0, top_p=0.7, seed=7),
    Sampling(temperature=0.0, repetition_penalty=1.3),
    Sampling(temperature=0.0, repetition_penalty=1.1, logit_bias=((13, -3.0), (4, 2.0))),
]
GREEDY_ROWS = (4, 5)


class Pair:
    """A small random pair that agrees now and then, its sessions, and its torch model."""

    def __init__(self, folder) -> None:
        sizes = dict(vocab_size=24, num_hidden_layers=2, eos_token_id=None)
        config, self.model = random_pair.random_target("llama", 31, 0.3, **sizes)
        draft = random_pair.random_drafter(config, random_pair.draft_sizes(config), 32, 0.3)
        random_pair.save_pair(folder / "target", folder / "draft", self.model, draft)
        self.target = load_target(folder / "target", jnp.float32)
        self.drafter = load_drafter(folder / "draft", self.target)
        self.session = functools.cache(self.new_session)
        self.results = functools.cache(
            lambda shape: self.session(shape).generate(PROMPTS, 20, NO_STOP, COUPLED)
        )

    def new_session(self, shape: DraftShape | None) -> Session:
        return Session(self.target, shape and self.drafter, shape)

    def law(self, prompt, row: Sampling, count: int) -> dict[tuple, float]:
        """The law of `count` tokens by the torch model."""
        law = {(): 1.0}
        for _ in range(count):
            texts = torch.tensor([[*prompt, *text] for text in law])
            logits_XV = self.model(texts).logits[:, -1].numpy()
            law = {
                (*text, int(token)): chance * law_V[token]
                for (text, chance), logits_V in zip(law.items(), logits_XV, strict=True)
                for law_V in [law_by_definition(logits_V, {*prompt, *text}, row)]
                for token in np.flatnonzero(law_V)
            }
        return law


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    return Pair(tmp_path_factory.mktemp("sampled"))


def assert_coupled(pair: Pair, shape: DraftShape) -> None:
    """The same seed gives the same text, plain or drafted."""
    plain, drafted = pair.results(None), pair.results(shape)
    assert [row.token_ids for row in drafted] == [row.token_ids for row in plain]
    assert all(row.tau > 1 for row in drafted), "no draft was accepted, so nothing was shown"
    assert 9 not in plain[0].token_ids  # banned


def test_likeliest_candidates_change_no_text(pair):
    assert_coupled(pair, TREE)


@pytest.mark.parametrize("shape", [None, TREE], ids=str)
def test_greedy_with_penalty_and_bias_equals_transformers(pair, shape):
    """As rows of a batch whose other rows are sampled."""
    for i in GREEDY_ROWS:
        assert pair.results(shape)[i].token_ids == greedy_by_transformers(pair, i)


def greedy_by_transformers(pair: Pair, i: int) -> list[int]:
    row, prompt = COUPLED[i], PROMPTS[i]
    found = pair.model.generate(
        torch.tensor([prompt]),
        attention_mask=torch.ones(1, len(prompt), dtype=torch.int64),
        max_new_tokens=20,
        do_sample=False,
        repetition_penalty=row.repetition_penalty,
        sequence_bias={(token,): bias for token, bias in row.logit_bias} or None,
    )
    return found[0, len(prompt) :].tolist()


def test_seeds_decide(pair):
    """Of one setting, rows get seeds of their own; the same seed gives the same text."""
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


def test_texts_go_on_as_they_began(pair):
    """Noise belongs to positions, so it is another one after the prompt than in the first round."""
    texts = [result.token_ids for result in pair.results(None)]
    prompts = [prompt + text[:7] for prompt, text in zip(PROMPTS, texts, strict=True)]
    again = pair.session(None).generate(prompts, 13, NO_STOP, COUPLED)
    assert [result.token_ids for result in again] == [text[7:] for text in texts]


@pytest.mark.slow
@pytest.mark.parametrize(
    "shape",
    [
        TREE,
        DraftShape(4),
        dataclasses.replace(STATIC, sampled=False),
        dataclasses.replace(TREE, confidence=0.05),
    ],
    ids=str,
)
def test_likeliest_candidates_of_any_shape_change_no_text_alone(pair, shape):
    assert_coupled(pair, shape)
    for i in (0, 1):
        (alone,) = pair.session(shape).generate(PROMPTS[i : i + 1], 20, NO_STOP, COUPLED[i])
        assert alone.token_ids == pair.results(shape)[i].token_ids
        assert alone.accept_lengths == pair.results(shape)[i].accept_lengths


@pytest.mark.slow
@pytest.mark.parametrize("shape", [None, TREE], ids=str)
def test_a_greedy_batch_with_penalty_and_bias_equals_transformers(pair, shape):
    """Without any row that is sampled, where no noise is drawn at all."""
    rows = [COUPLED[i] for i in GREEDY_ROWS]
    prompts = [PROMPTS[i] for i in GREEDY_ROWS]
    found = pair.session(shape).generate(prompts, 20, NO_STOP, rows)
    for i, result in zip(GREEDY_ROWS, found, strict=True):
        assert result.token_ids == greedy_by_transformers(pair, i)
        assert shape is None or result.tau > 1


SHARP = Sampling(temperature=1.3, top_k=3, repetition_penalty=1.2, seed=11)


def texts_of(session: Session, row: Sampling) -> np.ndarray:
    """Four tokens after one prompt for 4096 seeds."""
    found = session.generate([PROMPTS[0]] * 4096, TOKENS, NO_STOP, row)
    assert np.mean([result.tau for result in found]) > 1.05
    return np.array([result.token_ids for result in found])


@pytest.mark.slow
def test_sampled_candidates_of_a_pair_change_no_law(pair):
    """And in a program with a broken residual they do."""
    law = pair.law(PROMPTS[0], SHARP, TOKENS)
    assert p_value(texts_of(pair.new_session(STATIC), SHARP), law) > LEAST_P
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sample, "reject", with_broken_residual)
        assert p_value(texts_of(pair.new_session(STATIC), SHARP), law) < LEAST_P / 100


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
