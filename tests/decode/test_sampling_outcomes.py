"""On tiny vocabularies, no draft changes the output distribution, in exact numbers.

Each outcome of a round is weighted by its probability, so nothing is left to chance.
"""

import itertools

import jax
import numpy as np
import pytest

from moa_jax.decode import sampling
from moa_jax.decode.verify import verify
from moa_jax.drafters.api import NO_TOKEN, Tree

CHAIN = ((0,), (0, 0), (0, 0, 0))
PAIRS = ((0,), (1,), (0, 0), (0, 1), (1, 0))
TRIPLE = ((0,), (1,), (2,), (0, 0))
DEEP = ((0,), (1,), (0, 0), (0, 1), (0, 0, 0))
TREES = [(3, CHAIN), (4, CHAIN), (3, PAIRS), (4, TRIPLE), (3, DEEP)]
LENGTH = 4  # tokens of the joint distributions that are compared: the most that a round can emit


def random_table(size: int, seed: int, support: int | None = None) -> dict:
    """Returns {path: distribution of the next token}; `support` limits the possible tokens."""
    rng = np.random.default_rng(seed)
    table = {}
    for length in range(LENGTH):
        for path in itertools.product(range(size), repeat=length):
            law_V = rng.dirichlet(np.full(size, 0.7)) + 0.02
            law_V[rng.permutation(size)[support:] if support else []] = 0.0
            table[path] = law_V / law_V.sum()
    return table


def joint_probs(table: dict, size: int, given: tuple = ()) -> np.ndarray:
    """Returns the joint distribution of LENGTH tokens that start with `given`, as one axis."""
    law = np.zeros((size,) * LENGTH)
    for tokens in itertools.product(range(size), repeat=LENGTH - len(given)):
        whole = given + tokens
        law[whole] = np.prod([table[whole[:k]][whole[k]] for k in range(len(given), LENGTH)])
    return law.ravel()


def in_order(law_V: np.ndarray, count: int, given: tuple = ()) -> list[tuple[tuple, float]]:
    """Returns all ordered draws without replacement; without mass, the lowest id is next."""
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
    """Returns every ({node's path of ranks: its path of tokens}, its probability)."""
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
    spread = lambda row_N: np.broadcast_to(row_N, tokens_BN.shape)
    depth_N = np.array([len(path) for path in nodes])
    return Tree(tokens_BN, spread(parent_N), spread(depth_N), ancestor_NN[None])


our_verify = jax.jit(verify, static_argnums=2)
our_children = jax.jit(sampling.children, static_argnums=1)


def output_probs(paths: tuple, drafts: list, target: dict, drafter: dict, choice_probs):
    """Returns each draft's distribution of LENGTH tokens (D, V ** LENGTH), by one real `verify`.

    The target's distribution continues the tokens that a round emits.
    """
    nodes, size = ((), *paths), len(target[()])
    token = lambda path: path[-1] if path else 0
    tokens_DN = np.array([[token(draft[node]) for node in nodes] for draft, _ in drafts])
    unreached = np.full(size, 1 / size)  # what follows a missing node
    follows = lambda table, path: table.get(path, unreached)
    laws = [
        np.array([[follows(table, draft[node]) for node in nodes] for draft, _ in drafts])
        for table in (target, drafter)
    ]
    most = 1 + max(map(max, paths))
    child_DNk = np.asarray(our_children(tree_of(paths, tokens_DN), most))
    chance_DNV = choice_probs(*laws, child_DNk)
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
            law += mass_D[:, None] * joint_probs(target, size, prefix)
    return law


our_reject = jax.jit(sampling.reject)


def by_rejection(law_DNV, draft_DNV, child_DNk):
    """Returns the distribution of the choice if the children are tried one after the other."""
    found = our_reject(law_DNV, draft_DNV, child_DNk)
    accept_DNk, residual_DNV = (np.asarray(part, np.float64) for part in found)
    chance_DNV, untried_DN = np.zeros(law_DNV.shape), np.ones(law_DNV.shape[:2])
    for k in range(child_DNk.shape[-1]):
        taken_DN = untried_DN * accept_DNk[..., k]
        chance_DNV += taken_DN[..., None] * np.eye(law_DNV.shape[-1])[child_DNk[..., k]]
        untried_DN = untried_DN - taken_DN
    return chance_DNV + untried_DN[..., None] * residual_DNV


@pytest.mark.parametrize(("size", "paths"), TREES)
def test_fixed_candidates_change_no_distribution(size, paths):
    """Trees may hold unlikely tokens and missing nodes; each draft is checked by itself."""
    target, drafter = random_table(size, 1), random_table(size, 2)
    drafts = all_drafts(paths, drafter)[::7]
    last_gone = lambda path, tokens: (*tokens[:-1], NO_TOKEN) if path[:1] == (0,) else tokens
    gone = [({path: last_gone(path, d[path]) for path in d}, 1.0) for d, _ in drafts[:2]]
    alone = lambda law_DNV, draft_DNV, child_DNk: law_DNV
    laws_DX = output_probs(paths, drafts + gone, target, drafter, alone)
    expected_X = joint_probs(target, size)
    np.testing.assert_allclose(
        laws_DX, np.broadcast_to(expected_X, laws_DX.shape), rtol=0, atol=1e-12
    )


# A drafter with fewer tokens than the tree has children proposes some that it did not draw.
@pytest.mark.parametrize("support", [None, 2, 1])
@pytest.mark.parametrize(("size", "paths"), TREES)
def test_sampled_candidates_change_no_distribution(size, paths, support):
    target = random_table(size, 3, support and 2)
    drafter = random_table(size, 4, support)
    drafts = all_drafts(paths, drafter)
    chance_D = np.array([chance for _, chance in drafts])
    assert abs(chance_D.sum() - 1) < 1e-12
    laws_DX = output_probs(paths, drafts, target, drafter, by_rejection)
    expected_X = joint_probs(target, size)
    np.testing.assert_allclose(chance_D @ laws_DX, expected_X, rtol=0, atol=1e-6)
    if support is None:
        assert np.abs(laws_DX - expected_X).max() > 0.05, "no draft mattered, so nothing was shown"
