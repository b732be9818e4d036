"""Rounds on a CPU copy no cache, use weights in panels, and write the same text."""

# ruff: noqa: F811 (an imported fixture is an argument too)

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer.bench.plan.hlo import large_moves
from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.decode.session import GREEDY
from moa_jax.model import quantize
from moa_jax.model.kernels import cpu
from moa_jax.model.kernels.cpu import Panels
from moa_jax.pretrained import load_target, save_target
from tests.model_folders import save_random_pair
from tests.pairs import NO_STOP, PROMPTS, Pair

CHAIN, TREE = DraftShape(3), DraftShape(4, 3, 8)
SIZES = dict(hidden_size=128, intermediate_size=64, head_dim=32, vocab_size=128)
SIZES |= dict(max_position_embeddings=1024, num_attention_heads=4, num_key_value_heads=2)


@pytest.fixture(scope="module")
def pair(tmp_path_factory) -> Pair:
    """Returns a random pair; all kernels of its target can be split into panels."""
    folder = tmp_path_factory.mktemp("heads")
    save_random_pair(folder, "llama", seed=3, num_hidden_layers=2, **SIZES)
    return Pair(folder, 0)


@pytest.mark.slow
@pytest.mark.parametrize(("shape", "batch"), [(None, 2), (TREE, 1)], ids=str)
def test_a_round_copies_no_cache(pair, shape, batch):
    """A round copies no other array of the size of a cache either."""
    session = Session(pair.target, shape and pair.drafter, shape)
    state, limits, law, _ = session.start([[5, 6, 7]] * batch, 9, NO_STOP, GREEDY)
    size = min(rows.nbytes for kv in state.round.target_caches for rows in kv)
    assert large_moves(session.loop(state, limits, law).as_text(), size) == []


@pytest.mark.slow
def test_panels_change_no_text(pair, monkeypatch):
    def texts() -> list[list[int]]:
        session = Session(pair.target)
        cut = [isinstance(leaf, Panels) for leaf in quantize.matrices(session.weights)]
        assert sum(cut) >= 9 if cpu.is_fast() else not any(cut)
        return [result.token_ids for result in session.generate(PROMPTS, 20, NO_STOP)]

    found = texts()
    monkeypatch.setattr(cpu, "is_fast", lambda: False)
    assert texts() == found


def test_a_session_holds_weights_as_it_decodes_with_them_and_they_are_saved_whole(pair, tmp_path):
    session = Session(pair.target, pair.drafter, CHAIN)
    given, held = pair.target, session.target
    assert held.params is session.weights.target
    save_target(tmp_path, held.config, held.params, dtype=jnp.float32)
    saved = load_target(tmp_path, jnp.float32).params
    same = jax.tree.map(np.array_equal, saved, given.params)
    assert all(jax.tree.leaves(same))
