"""Prompt lookup: what it drafts, and what it has no use for."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from infer import generate
from moa_jax import InputError, Session, load_drafter
from moa_jax.config import DraftShape, LookupConfig, Objective
from moa_jax.drafters import lookup
from moa_jax.drafters.api import NO_TOKEN, CandidateSampler
from tests.drafting import (
    NUM_NEW,
    TREE,
    calm_target_of,
    make,
    shown,
)
from tests.model_folders import refusal


@pytest.fixture(scope="module")
def calm_target(tmp_path_factory):
    """A calm target of five layers, whose texts soon repeat themselves."""
    return calm_target_of(5, tmp_path_factory.mktemp("calm") / "target")


GUIDE = CandidateSampler(lambda x, _: x, None, None, 99)


def proposed(texts: list[list[int]], shape: DraftShape, cfg: LookupConfig | None = None):
    """The trees of texts whose last tokens are the roots; rows of 24 hold left-overs behind."""
    length_B = np.array([len(text) - 1 for text in texts], np.int32)
    text_BS = np.full((len(texts), 24), 7, np.int32)
    for row, text in zip(text_BS, texts, strict=True):
        row[: len(text) - 1] = text[:-1]
    root_B = jnp.array([text[-1] for text in texts])
    propose = lookup.make_propose(cfg or LookupConfig())
    draft = jax.jit(lambda text_BS: propose({}, {}, text_BS, *rest)[0])
    rest = (root_B, jnp.asarray(length_B), shape, GUIDE)
    tree = draft(text_BS)
    assert tree.tokens_BN.shape == (len(texts), shape.num_nodes)
    return tree


def chain(text: list[int], depth: int = 4, cfg: LookupConfig | None = None) -> list[int]:
    return proposed([text], DraftShape(depth), cfg).tokens_BN[0, 1:].tolist()


# ---- what is drafted ----------------------------------------------------------------------


def test_lengths_of_matches_are_bounded():
    text = [1, 2, 3, 50, 51, 52, 9, 2, 3, 60, 61, 62, 1, 2, 3]
    assert chain(text) == [50, 51, 52]
    assert chain(text, cfg=LookupConfig(2, 1)) == [60, 61, 62]
    assert chain([3, 50, 51, 52, 3]) == [50, 51, 52]
    assert chain([3, 50, 51, 52, 3], cfg=LookupConfig(3, 2)) == [NO_TOKEN] * 3


def test_nothing_is_drafted_where_nothing_was_said():
    assert chain([5]) == chain([1, 2, 3, 4]) == [NO_TOKEN] * 3
    assert chain([7, 1, 2, 3]) == [NO_TOKEN] * 3  # left-overs behind the root are no text


def test_random_texts_are_searched_as_defined():
    """Against a search in Python, rows of uneven lengths side by side."""
    rng = np.random.default_rng(0)
    texts = [rng.integers(0, 3, rng.integers(1, 20)).tolist() for _ in range(40)]
    tree = proposed(texts, DraftShape(4))
    assert tree.tokens_BN[:, 1:].tolist() == [by_definition(text) for text in texts]


def by_definition(text: list[int]) -> list[int]:
    """The best continuation of three tokens."""
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


def test_the_example_of_the_docstring():
    """Its arrays are what the functions give for its text."""
    docs = lookup.__doc__
    shown_as = lambda name: [int(x) for x in shown(docs, name)]
    text_BS, length_B = jnp.array([[1, 4, 6, 1, 4, 5, 1, 9]]), jnp.array([6])
    assert "text_BS          1  4  6  1  4  5  1 | 9" in docs
    count_S = lookup.match_lengths(LookupConfig(), text_BS, length_B)[0]
    assert count_S.tolist() == shown_as("count_BS")
    score_S = [count * 8 + place if count else -1 for place, count in enumerate(count_S.tolist())]
    assert score_S == shown_as("score_BS")
    found_BD = lookup.continuation(LookupConfig(), text_BS, length_B, 2)
    assert found_BD[0].tolist() == shown_as("tokens_BD")
    repeated = lookup.continuation(LookupConfig(), jnp.array([[4, 4, 9]]), jnp.array([1]), 2)
    assert repeated[0].tolist() == [4, 4], "only the root follows place 0, over and over"


@pytest.mark.parametrize("shape", [TREE, DraftShape.static([[0], [1]])], ids=["dynamic", "static"])
def test_trees_are_refused_by_name(calm_target, shape):
    with pytest.raises(InputError, match="prompt lookup drafts chains, no trees; use --mode chain"):
        proposed([[5, 5]], shape)
    with pytest.raises(InputError, match="kind lookup drafts chains, no trees; use --mode chain"):
        Session(calm_target, load_drafter("lookup", calm_target), shape)


# ---- in decoding --------------------------------------------------------------------------


def test_it_drafts_what_repeats(calm_target):
    """The target goes on with its prompt; nothing is drafted before something has repeated."""
    drafter, plain = load_drafter("lookup", calm_target), Session(calm_target)
    session = Session(calm_target, drafter, DraftShape(4))
    first, *_ = plain.generate([[7], [7], [80]], NUM_NEW, [])  # as many rows as below
    prompts = [[7], [7, *first.token_ids[:6]], [80]]
    expected = [row.token_ids for row in plain.generate(prompts, NUM_NEW, [])]
    found = session.generate(prompts, NUM_NEW, [])
    assert [row.token_ids for row in found] == expected
    assert found[0].drafted[0] == 0 and found[1].drafted[0] == 3
    assert found[1].accept_lengths[:3] == [4] * 3 and found[0].tau > 2


# ---- by its name --------------------------------------------------------------------------


def test_no_training_files_or_vocabulary(calm_target):
    drafter = load_drafter("lookup", calm_target)
    functions = make(calm_target, drafter)
    for train in (
        lambda: make(calm_target, drafter, Objective()),
        lambda: functions.loss({}, {}, None, None, None, None),
        lambda: functions.teacher_forced({}, {}, None, None, None, 3),
    ):
        with pytest.raises(InputError, match="prompt lookup needs no training"):
            train()
    said = refusal(lookup.write_config, LookupConfig(), calm_target.config)
    assert said == "prompt lookup has no files; name it as it is, `lookup`"


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [["--draft", "lookup"], pytest.param(["--method", "lookup"], marks=pytest.mark.slow)],
)
def test_programs_take_its_name(flags, capsys):
    """With the bundled target too."""
    asked = ["--prompt-ids", "7,8,9,7,8", "--max-new-tokens", "8", "--json", "--check"]
    generate.main([*flags, *asked, "--dtype", "float32"])
    assert '"tau"' in capsys.readouterr().out
