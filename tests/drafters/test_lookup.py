"""Prompt lookup: its drafts, and the settings that it does not support."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from moa_jax import Session, load_drafter
from moa_jax.config import DraftShape, LookupConfig, Objective
from moa_jax.drafters import lookup
from moa_jax.drafters.api import NO_TOKEN, CandidateSampler
from tests.drafting import TREE, calm_target, make  # noqa: F401
from tests.model_folders import refusal

GUIDE = CandidateSampler(lambda x, _: x, None, None, 99)


def chains(texts: list[list[int]], cfg: LookupConfig | None = None) -> list[list[int]]:
    """Returns the three tokens drafted after each text, whose last token is the root."""
    length_B = np.array([len(text) - 1 for text in texts], np.int32)
    text_BS = np.full((len(texts), 24), 7, np.int32)
    for row, text in zip(text_BS, texts, strict=True):
        row[: len(text) - 1] = text[:-1]
    root_B = jnp.array([text[-1] for text in texts])
    propose = lookup.make_propose(cfg or LookupConfig())
    draft = jax.jit(lambda text_BS: propose({}, {}, text_BS, *rest)[0])
    rest = (root_B, jnp.asarray(length_B), DraftShape(4), GUIDE)
    return draft(text_BS).tokens_BN[:, 1:].tolist()


def chain(text: list[int], cfg: LookupConfig | None = None) -> list[int]:
    return chains([text], cfg)[0]


# ---- what is drafted ----------------------------------------------------------------------


def test_lengths_of_matches_are_bounded():
    text = [1, 2, 3, 50, 51, 52, 9, 2, 3, 60, 61, 62, 1, 2, 3]
    assert chain(text) == [50, 51, 52]
    assert chain(text, cfg=LookupConfig(2, 1)) == [60, 61, 62]
    assert chain([3, 50, 51, 52, 3], cfg=LookupConfig(3, 2)) == [NO_TOKEN] * 3


def test_nothing_is_drafted_without_a_match():
    assert chain([5]) == chain([1, 2, 3, 4]) == [NO_TOKEN] * 3
    assert chain([7, 1, 2, 3]) == [NO_TOKEN] * 3  # tokens after the root do not belong to the text


def test_random_texts_are_searched_as_defined():
    """Compares rows of uneven lengths with a search in Python."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 3, rng.integers(1, 20)).tolist() for _ in range(40)]
    assert chains(texts) == [by_definition(text) for text in texts]


def by_definition(text: list[int]) -> list[int]:
    """Returns the best continuation of three tokens."""
    ends = range(len(text) - 1)
    length = {
        end: next(
            (n for n in (3, 2, 1) if end >= n - 1 and text[end - n + 1 : end + 1] == text[-n:]), 0
        )
        for end in ends
    }
    best = max(ends, key=lambda end: (length[end], end), default=None)
    if best is None or not length[best]:
        return [NO_TOKEN] * 3
    going = list(text)
    while len(going) < len(text) + 3:
        going.append(going[len(going) - (len(text) - 1 - best)])
    return going[len(text) :]


# ---- what it has no use for ---------------------------------------------------------------


@pytest.mark.parametrize("shape", [TREE, DraftShape.static([[0], [1]])], ids=["dynamic", "static"])
def test_trees_are_refused_by_name(calm_target, shape):  # noqa: F811
    said = refusal(Session, calm_target, load_drafter("lookup", calm_target), shape)
    assert "kind lookup drafts chains, no trees; use --mode chain" in said


def test_no_training_and_no_files(calm_target):  # noqa: F811
    drafter = load_drafter("lookup", calm_target)
    for train in (
        lambda: make(calm_target, drafter, Objective()),
        lambda: make(calm_target, drafter).loss({}, {}, None, None, None, None),
    ):
        assert "prompt lookup needs no training" in refusal(train)
    said = refusal(lookup.write_config, LookupConfig(), calm_target.config)
    assert said == "prompt lookup has no files; name it as it is, `lookup`"
