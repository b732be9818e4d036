"""Texts equal those of torch and of the authors' code and end correctly; bad prompts are refused.

test_same_text.py shows that drafts do not change a text.
"""

# ruff: noqa: F811 (an imported fixture is an argument too)

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch

from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.decode import programs, step
from moa_jax.decode.sampling import BatchSampling
from moa_jax.decode.state import RoundState, Weights
from moa_jax.decode.verify import verify
from moa_jax.drafters.api import NO_TOKEN, Tree, chain
from tests.conftest import golden_cases, slow
from tests.decode.tiny import drafter, target
from tests.pairs import NO_STOP, PROMPTS, prompts_of, recorded, simple_pair  # noqa: F401


def test_plain_equals_torch(simple_pair):
    pair = simple_pair
    for prompt in PROMPTS:
        (found,) = pair.plain.generate([prompt], 24, NO_STOP)
        with torch.no_grad():
            best_T = pair.model(torch.tensor([prompt + found.token_ids])).logits[0].argmax(-1)
        assert found.token_ids == best_T[len(prompt) - 1 : -1].tolist()
        assert found.accept_lengths == [1] * 23


@pytest.fixture(scope="module")
def tiny() -> Session:
    """Returns a session; some of its drafts are accepted."""
    return Session(target(), drafter("moa-2"), DraftShape(4, 3, 8))


ANSWERED = [5, 17, 60, 33, 9, 5, 17]


@pytest.mark.slow
def test_every_stop_position(tiny):
    """Stopping at any token of the answer, or at any length, cuts the text there."""
    (whole,) = tiny.generate([ANSWERED], 16, NO_STOP)
    assert max(whole.accept_lengths) > 1
    for index, token in enumerate(whole.token_ids):
        cut = whole.token_ids[: whole.token_ids.index(token) + 1]
        (found,) = tiny.generate([ANSWERED], 16, [token])
        assert (found.token_ids, found.finish_reason) == (cut, "stop")
        assert 1 + sum(found.accept_lengths) == len(cut)
        (found,) = tiny.generate([ANSWERED], index + 1, NO_STOP)
        assert (found.token_ids, found.finish_reason) == (whole.token_ids[: index + 1], "length")


@pytest.mark.parametrize("kind, seconds", [slow("tiny", 0.0), slow("tiny", 60.0), ("plain", 60.0)])
def test_stream_equals_generate(kind, seconds, request, monkeypatch):
    """A call holds several rounds if they are fast enough to display, else one round."""
    monkeypatch.setattr("moa_jax.decode.session.SECONDS_BETWEEN_TEXTS", seconds)
    session = request.getfixturevalue({"plain": "simple_pair"}.get(kind, kind))
    session = getattr(session, kind, session)
    *parts, result = session.stream(ANSWERED, 20, NO_STOP)
    (whole,) = session.generate([ANSWERED], 20, NO_STOP)
    assert sum(parts, []) == result.token_ids == whole.token_ids
    assert result.accept_lengths == whole.accept_lengths
    if seconds:  # the first call has one round, because no time is known yet
        assert [len(part) for part in parts] == [1, whole.accept_lengths[0], len(parts[2])]
    else:
        assert [len(part) for part in parts[1:]] == whole.accept_lengths


def test_a_row_that_has_stopped_stays_as_it_is_beside_a_longer_one(simple_pair):
    one, other = simple_pair.plain.generate(PROMPTS[:2], 12, NO_STOP)
    stop = one.token_ids[2]
    cut = one.token_ids[: one.token_ids.index(stop) + 1]
    rows = simple_pair.plain.generate(PROMPTS[:2], 12, [[stop], NO_STOP])
    assert [row.token_ids for row in rows] == [cut, other.token_ids]


def test_numbers_of_numpy_are_numbers(simple_pair):
    prompts, stops = np.array([[5, 6, 7]]), np.array([simple_pair.target.config.vocab_size])
    (found,) = simple_pair.plain.generate(prompts, np.int64(8), stops)
    (same,) = simple_pair.plain.generate([[5, 6, 7]], 8, {1 << 40})  # which stops nothing
    assert json.loads(json.dumps(found._asdict()))["token_ids"] == same.token_ids
    assert len(same.token_ids) == 8


def test_a_text_that_ends_with_its_first_token_ends_by_its_stop(simple_pair):
    (found,) = simple_pair.plain.generate([[5, 6, 7]], 1, NO_STOP, stop_when=lambda tokens: 1)
    assert (len(found.token_ids), found.finish_reason) == (1, "stop")


# ---- recorded generations -----------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("folder", golden_cases("moa_", "generate.npz", ("moa_llama_n1",)))
def test_draft_chain_equals_recorded(folder):
    """Compares the recorded text, and the accept lengths of a chain of four."""
    pair, arrays = recorded(folder)
    for name, prompt, answer in prompts_of(arrays):
        (found,) = pair.session(5).generate([prompt], len(answer), NO_STOP)
        assert found.token_ids == answer
        if f"{name}/d5b1t4/accept_len" in arrays:
            expected = arrays[f"{name}/d5b1t4/accept_len"].tolist()
            assert found.accept_lengths[: len(expected) - 1] == expected[:-1]


# ---- the parts ----------------------------------------------------------------------------


def test_an_answer_does_not_begin_where_a_logit_is_not_finite(monkeypatch):
    """Minus infinity is refused too, even if another logit is larger."""
    logits_BV = jnp.array([[0.0, 1.0, -jnp.inf], [jnp.nan, 1.0, 2.0], [0.0, 1.0, 2.0]])
    monkeypatch.setattr(step.llama, "unembed", lambda params, hidden_BND: hidden_BND)
    state = RoundState(jnp.zeros(3, jnp.int32), jnp.zeros(3, bool))
    _, root_B = step.choose_after(Weights(None, None), state, logits_BV, BatchSampling())
    assert root_B.tolist() == [NO_TOKEN, NO_TOKEN, 2]


def test_verify_takes_the_longest_agreeing_prefix_of_a_chain():
    tree = chain(jnp.array([[1, 2, 3, 4], [1, 2, 3, 4], [1, 5, 3, 4]]))
    verdict = verify(tree, jnp.array([[2, 3, 4, 7], [2, 3, 0, 7], [2, 3, 4, 7]]), 4)
    assert verdict.count_B.tolist() == [4, 3, 1]
    assert verdict.emitted_BD[0].tolist() == [2, 3, 4, 7]
    assert verdict.emitted_BD[1, :3].tolist() == [2, 3, 0]
    assert verdict.emitted_BD[2, :1].tolist() == [2]


def test_verify_follows_the_agreeing_branch_of_a_tree():
    """The root has children a and b, and b has child c; b and c agree, a does not."""
    parent_BN = jnp.array([[0, 0, 0, 2]])
    ancestor_BNN = jnp.array([[[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]], bool)
    tree = Tree(jnp.array([[1, 2, 3, 4]]), parent_BN, jnp.array([[0, 1, 1, 2]]), ancestor_BNN)
    verdict = verify(tree, jnp.array([[3, 0, 4, 6]]), 3)
    assert verdict.count_B.tolist() == [3]
    assert verdict.path_BD[0, :3].tolist() == [0, 2, 3]
    assert verdict.emitted_BD[0, :3].tolist() == [3, 4, 6]


def test_compiles_without_options_that_xla_does_not_have(monkeypatch, caplog):
    """The options are experimental; an error of another kind is raised unchanged."""
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    monkeypatch.setattr(programs, "DRAFTING_OPTIONS", {"xla_gpu_experimental_gone": 1})
    assert programs.compile_lowered(lowered, "gpu", drafts=True)(1.0) == 2
    assert "xla_gpu_experimental_gone" in caplog.text
    monkeypatch.setattr(programs, "DRAFTING_OPTIONS", {"xla_cpu_enable_fast_math": "maybe"})
    with pytest.raises(jax.errors.JaxRuntimeError, match="maybe"):
        programs.compile_lowered(lowered, "gpu", drafts=True)
