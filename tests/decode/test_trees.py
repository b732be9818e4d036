"""Trees equal those of the authors' code and of the definition; invalid shapes are refused."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import InputError, Session
from moa_jax.config import DraftShape
from moa_jax.decode import step
from moa_jax.decode.session import GREEDY
from moa_jax.drafters import tree as tree_lib
from moa_jax.drafters.api import NO_TOKEN, CandidateSampler
from tests.compare import assert_close
from tests.conftest import golden_cases
from tests.pairs import NO_STOP, prompts_of, recorded, simple_pair  # noqa: F401

SAFE_GAP = 1e-5  # least gap between scores that decide: above this gap, float32 agrees
SHAPES = {
    "d4b3t8": DraftShape(4, 3, 8),
    "d7b8t62": DraftShape(7, 8, 62),
    "d5b1t4": DraftShape(5, 1, 4),
}


# ---- recorded trees -----------------------------------------------------------------------


@functools.cache
def tree_session(folder, name: str) -> tuple[Session, object]:
    """Returns the session of a recorded shape, and a jitted round with its tree and scores."""
    models, _ = recorded(folder)
    session = Session(models.target, models.drafter, SHAPES[name], least_rows=256)  # of all prompts

    @jax.jit
    def shown(weights, state, limits, law):
        propose, select, trees, scores = step.propose, tree_lib.select, [], []

        def noted(*arguments):
            trees.append(propose(*arguments))
            return trees[-1]

        def scored(root_B, flat, shape):
            scores.append(flat.score_BX)
            return select(root_B, flat, shape)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(step, "propose", noted)
            patch.setattr(tree_lib, "select", scored)
            state = step.advance(session.setup, weights, state, limits, law)
        ((tree, _),) = trees
        return tree, scores, state  # a chain has no scores, because select removes nothing

    return session, shown


KINDS = ("moa_", "glide_", "independent_", "eagle_")  # their rounds are those of the authors' code
QUICK = ("moa_llama_trained", "d4b3t8")
WHOLE = ("moa_llama_trained", "glide_llama", "independent_llama", "eagle_llama_trained")


def cases():
    generated = [case for kind in KINDS for case in golden_cases(kind, "generate.npz")]
    for case in generated:
        # Drafting does not depend on the family: for one case of each kind, all shapes.
        shapes = set(SHAPES) if case.id in WHOLE else {"d7b8t62"}
        if case.id.startswith("moa_"):
            shapes.discard("d5b1t4")  # a chain: test_spec.py has it
        for name in sorted(shapes):
            slow = [] if (case.id, name) == QUICK else [pytest.mark.slow]
            marks = [*case.marks, *slow]
            yield pytest.param(*case.values, name, id=f"{case.id}-{name}", marks=marks)


@pytest.mark.parametrize(("folder", "name"), list(cases()))
def test_draft_rounds_equal_recorded(folder, name):
    """Compares the text, and trees and accept lengths of rounds with distinct enough scores.

    For the first round, compares masks, positions and scores as well.
    """
    session, shown = tree_session(folder, name)
    _, arrays = recorded(folder)
    compared = 0
    for which, prompt, answer in prompts_of(arrays):
        seen = f"{which}/{name}/rounds_draft_tokens" in arrays
        of = lambda key, which=which: arrays[f"{which}/{name}/{key}"]
        state, limits, law, _ = session.start([prompt], len(answer), NO_STOP, GREEDY)
        rounds = len(of("rounds_min_gap")) if seen else 0
        index = 0
        while not bool(state.round.done_B[0]):
            tree, scores, state = shown(session.weights, state, limits, law)
            if index < rounds and of("rounds_min_gap")[index] > SAFE_GAP:
                np.testing.assert_array_equal(tree.tokens_BN[0], of("rounds_draft_tokens")[index])
                np.testing.assert_array_equal(tree.parent_BN[0, 1:], of("rounds_parent_row")[index])
                if index == 0:
                    assert_first_tree(tree, scores, prompt, lambda key, of=of: of(f"r0_{key}"))
                compared += 1
            index += 1
        length = len(prompt)
        assert state.tokens_BC[0, length : length + len(answer)].tolist() == answer
        if seen and (of("rounds_min_gap") > SAFE_GAP).all():
            expected = of("accept_len").tolist()
            found = np.asarray(state.accept_lengths_BR)[0, : len(expected) - 1].tolist()
            assert found == expected[:-1]
    assert compared or not any("rounds_draft_tokens" in key for key in arrays)


def assert_first_tree(tree, scores, prompt, first):
    """Compares masks, positions and scores of a first round; `first` gets recorded arrays."""
    np.testing.assert_array_equal(tree.depth_BN[0], first("depth"))
    mask_NN = np.asarray(tree.ancestor_BNN[0])
    np.testing.assert_array_equal(mask_NN, first("tree_mask").astype(bool))
    position_N = len(prompt) + np.asarray(tree.depth_BN[0])
    np.testing.assert_array_equal(position_N, first("position_ids").reshape(-1))
    for score_BX in scores:
        assert_close(score_BX[0], first("flat_scores").reshape(-1), "scores")


# ---- growth, without a model --------------------------------------------------------------

V = 7
GUIDE = CandidateSampler(lambda x, _: jax.nn.log_softmax(x), None, None, V)


def grown(table_VV, shape):
    """Returns the tree of a drafter whose logits depend on the last token alone."""

    def level(cache, tokens_BW, ancestor_BWX, depth):
        assert ancestor_BWX.shape[1] == tokens_BW.shape[1]
        return jnp.asarray(table_VV, jnp.float32)[tokens_BW], cache

    return jax.jit(lambda: tree_lib.grow(level, (), jnp.array([0]), shape, GUIDE)[0])()


def paths_of(tree):
    """Returns {path of tokens from the root} for all nodes that exist."""
    tokens, parents = np.asarray(tree.tokens_BN[0]), np.asarray(tree.parent_BN[0])
    found = {0: ()}
    for node in range(1, len(tokens)):
        assert parents[node] < node
        if tokens[node] != NO_TOKEN:
            found[node] = (*found[int(parents[node])], int(tokens[node]))
    assert len(set(found.values())) == len(found), "siblings are distinct"
    return set(found.values()) - {()}


def brute_force(table_VV, shape):
    """Returns the same tree from its definition, by sorting in Python."""
    log_VV = np.asarray(jax.nn.log_softmax(jnp.asarray(table_VV, jnp.float32)))
    flat, frontier = [], [((), np.float32(0))]
    for _ in range(shape.depth - 1):
        new = []
        for path, score in frontier:
            row = log_VV[path[-1] if path else 0]
            best = sorted(range(V), key=lambda v, row=row: (-row[v], v))[: shape.breadth]
            new += [((*path, v), np.float32(score + row[v])) for v in best]
        flat += new
        frontier = sorted(new, key=lambda item: -item[1])[: shape.breadth]
    best = sorted(flat, key=lambda item: -item[1])[: shape.num_drafted]
    return {path for path, _ in best}


@pytest.mark.parametrize("shape", [DraftShape(5), DraftShape(4, 3, 8), DraftShape(3, 7)])
def test_dynamic_tree_from_its_definition(shape):
    for seed in range(5):
        table_VV = np.random.default_rng(seed).normal(size=(V, V))
        assert paths_of(grown(table_VV, shape)) == brute_force(table_VV, shape)


@pytest.mark.parametrize(
    ("make", "line"),
    [
        (lambda: DraftShape(0), "depth is 0"),
        (lambda: DraftShape(65), "at most 64"),
        (lambda: DraftShape(4, 3, sampled=True), "static tree"),
        (lambda: DraftShape.static([]), "at least one rank"),
        (lambda: DraftShape.static([[0, 0]]), r"path \[0, 0\] but not \[0\]"),
        (lambda: DraftShape.static("x"), "lists of child ranks"),
        (lambda: DraftShape(3, paths=((0,), (0, 0), (1,))), "not in order"),
    ],
)
def test_impossible_trees_are_one_line(make, line):
    with pytest.raises(InputError, match=line) as error:
        make()
    assert "\n" not in str(error.value)


def test_wide_trees_and_small_caches_are_one_line(simple_pair):  # noqa: F811
    models = simple_pair
    size = models.target.config.vocab_size
    with pytest.raises(InputError, match=f"breadth {size + 1} is more than the {size}"):
        Session(models.target, models.drafter, DraftShape(3, size + 1))
    session = Session(models.target, models.drafter, DraftShape(7, 8, 62), cache_rows=100)
    with pytest.raises(InputError, match="a cache of 128 rows is too small"):
        session.generate([[1, 2]], 64)
