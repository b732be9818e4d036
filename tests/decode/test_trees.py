"""Trees equal those of the authors' code and of the definition; invalid shapes are refused."""

import functools

import jax
import numpy as np
import pytest

from moa_jax import InputError, Session
from moa_jax.config import DraftShape
from moa_jax.decode import step
from moa_jax.decode.session import GREEDY
from moa_jax.drafters import tree as tree_lib
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


# Their rounds are those of the authors' code. Drafting does not depend on the target's family.
RECORDED = {
    "moa_llama_trained": ("d4b3t8", "d7b8t62"),  # test_spec.py has chains
    "eagle_llama_trained": ("d7b8t62",),
    **dict.fromkeys(("glide_llama", "independent_llama"), ("d5b1t4",)),
}


def cases():
    for case in golden_cases("", "generate.npz"):
        for name in RECORDED.get(case.id, ()):
            slow = [] if name == "d4b3t8" else [pytest.mark.slow]
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
