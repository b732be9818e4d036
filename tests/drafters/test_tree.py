"""The worked examples in the docstrings of tree.py, and the candidates of a level."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax.config import DraftShape
from moa_jax.drafters import tree as tree_lib
from moa_jax.drafters.api import CandidateSampler
from moa_jax.model.topk import PIECE
from tests.drafting import shown

GUIDE = CandidateSampler(lambda x, _: x, None, None, 10)
AFTER = {  # token -> probabilities of the next token; tokens that the docstring omits have less
    5: {7: 0.5, 8: 0.4, 0: 0.1},
    7: {1: 0.5, 2: 0.3, 0: 0.2},
    8: {3: 0.9, 4: 0.1},
    3: {6: 0.8, 9: 0.1, 0: 0.05, 1: 0.05},
    1: {6: 0.7, 2: 0.2, 0: 0.1},
}


def step(fed: list, tokens_BW, ancestor_BWX, depth):
    """Returns the logits after each token; `fed` records the inputs."""
    fed = [*fed, (tokens_BW[0].tolist(), ancestor_BWX[0].astype(int).tolist())]
    law = [[AFTER[token].get(v, 1e-9) for v in range(10)] for token in tokens_BW[0].tolist()]
    return jnp.log(jnp.array([law], jnp.float32)), fed


@pytest.fixture
def example(monkeypatch):
    """Returns the arrays of the stages of a dynamic tree, by their names in the docstring."""
    seen, frontier, select = {}, tree_lib._frontier, tree_lib.select

    def keep_frontier(level, flat, breadth):
        below, score_BW, best_BW = frontier(level, flat, breadth)
        seen["best_BW"] = best_BW[0]  # of level 2, the last
        return below, score_BW, best_BW

    def keep_flat(root_B, flat, shape):
        seen.update(tokens_BX=flat.tokens_BX[0], parent_BX=flat.parent_BX[0])
        seen.update(score_BX=jnp.exp(flat.score_BX[0]))
        return select(root_B, flat, shape)

    monkeypatch.setattr(tree_lib, "_frontier", keep_frontier)
    monkeypatch.setattr(tree_lib, "select", keep_flat)
    tree, seen["fed"] = tree_lib.grow(step, [], jnp.array([5]), DraftShape(4, 2, 4), GUIDE)
    return seen | {name: np.asarray(x)[0] for name, x in tree._asdict().items() if x is not None}


@pytest.mark.parametrize(
    "name", ["tokens_BX", "score_BX", "parent_BX", "best_BW", "tokens_BN", "parent_BN", "depth_BN"]
)
def test_the_example_of_a_dynamic_tree(example, name):
    np.testing.assert_allclose(example[name], shown(tree_lib.__doc__, name), rtol=1e-6)
    root, level_1, level_2 = example["fed"]
    assert root == ([5], [[1]])
    assert level_1 == ([7, 8], [[1, 1, 0], [1, 0, 1]])
    assert level_2 == ([3, 1], [[1, 0, 1, 1, 0], [1, 1, 0, 0, 1]])


def test_the_example_of_a_static_tree():
    paths = ((0,), (1,), (1, 0), (1, 1))
    tree, fed = tree_lib.grow(step, [], jnp.array([5]), DraftShape(3, paths=paths), GUIDE)
    assert fed == [([5], [[1]]), ([8], [[1, 1]])]
    assert tree.tokens_BN[0].tolist() == [5, 7, 8, 3, 4]
    assert tree.parent_BN[0].tolist() == [0, 0, 0, 2, 2]


@pytest.mark.parametrize("size", [PIECE, 2 * PIECE + 1, 16 * 8016])
def test_scores_are_those_of_a_log_softmax(size):
    """Scores are equal bit by bit, in one piece and in many, without computing the log-softmax."""
    logits_BWU = jnp.asarray(np.random.default_rng(1).normal(0, 3, (1, 2, size)), jnp.float32)
    index_BWk, log_prob_BWk = jax.jit(tree_lib._top_k, static_argnums=1)(logits_BWU, 8)
    log_BWU = jax.jit(jax.nn.log_softmax)(logits_BWU)
    np.testing.assert_array_equal(index_BWk, jax.lax.top_k(logits_BWU, 8)[1])
    np.testing.assert_array_equal(log_prob_BWk, jnp.take_along_axis(log_BWU, index_BWk, axis=-1))
