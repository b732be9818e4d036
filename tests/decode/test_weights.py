"""Exactness with quantized weights: drafts change nothing of what the same weights write alone."""

# ruff: noqa: F811 (an imported fixture is an argument too)

import dataclasses

import numpy as np
import pytest

from infer.cli.flags.pair import DEMO
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import (
    BorrowedConfig,
    DraftShape,
    Eagle3Config,
    EagleConfig,
    GlideConfig,
    IndependentConfig,
    MoaConfig,
    Sampling,
)
from moa_jax.data import chat
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.draft_vocabulary import DraftVocabulary
from moa_jax.model.quantize import format_of, quantize_params
from moa_jax.pretrained import LoadedDrafter, Target
from tests.drafting import CHAIN, TREE, assert_changes_nothing, calm_target, untrained  # noqa: F401
from tests.pairs import NO_STOP, PROMPTS

MOA = MoaConfig(1, 24, 1, 24, 1, 16)
IDS = tuple(range(3, 90, 2))
CONFIGS = {
    "moa": dataclasses.replace(MOA, target_layer_inference=1),
    "eagle": EagleConfig(2, 44),
    "eagle3": Eagle3Config(2, 44, draft_ids=IDS, tapped_layers=(0, 1, 2)),
    "glide": GlideConfig(2, 44, 3),
}


def eight_bits(target: Target, weights: str) -> Target:
    """The same target in a format, under a name of its own; on any hardware."""
    folder = target.folder.with_name(f"{target.folder.name}-{weights}")
    return target._replace(params=quantize_params(target.params, weights), folder=folder)


@pytest.fixture(scope="module")
def target(calm_target) -> Target:
    return eight_bits(calm_target, "int8")


def drafter_of(target: Target, method: str, config: object) -> LoadedDrafter:
    drafter = untrained(target, method, config)
    drafter = drafter._replace(params=quantize_params(drafter.params, "int8"))
    assert format_of(drafter.params) == format_of(target.params) == "int8"
    return drafter


def cut_short(target: Target) -> LoadedDrafter:
    """The first layer of the target as a drafter that is often right."""
    config = dataclasses.replace(target.config, num_layers=1)
    params = target.params | {"layers": target.params["layers"][:1]}
    return LoadedDrafter("independent", IndependentConfig(config), params, (), None, None)


@pytest.mark.slow
@pytest.mark.parametrize(
    "weights, shape",
    [("int8", TREE), ("int8", CHAIN), ("fp8", TREE), ("fp8", CHAIN)],
    ids=["int8-tree", "int8-chain", "fp8-tree", "fp8-chain"],
)
def test_drafts_that_are_accepted_change_no_text(calm_target, weights, shape):
    """Greedy and sampled, uneven rows side by side."""
    target = eight_bits(calm_target, weights)
    (row,) = assert_changes_nothing(target, cut_short(target), [shape])
    assert max(row) > 1.5


@pytest.mark.slow
@pytest.mark.parametrize("method", CONFIGS)
def test_drafts_of_every_kind_change_no_text(target, method):
    """MoA with a layer of the target's; a tree, whose levels read what was drafted."""
    assert_changes_nothing(target, drafter_of(target, method, CONFIGS[method]), [TREE])


@pytest.mark.slow
def test_drafts_with_a_borrowed_embedding_and_head_change_no_text(target):
    config = BorrowedConfig(dataclasses.replace(target.config, num_layers=1))
    assert_changes_nothing(target, drafter_of(target, "independent-borrowed", config), [CHAIN])


@pytest.mark.slow
@pytest.mark.parametrize("tied", [True, False])
def test_a_draft_vocabulary_is_a_slice_of_the_quantized_head(target, tied):
    """Only tokens of the slice are drafted, and they are right or wrong as any others."""
    if tied:
        config = dataclasses.replace(target.config, tie_word_embeddings=True)
        params = {name: part for name, part in target.params.items() if name != "lm_head"}
        target = target._replace(config=config, params=params)
    drafter = drafter_of(target, "moa", MOA)
    (plain,) = Session(target).generate(PROMPTS[:1], 24, NO_STOP)
    ids = sorted({*plain.token_ids, *IDS})
    vocabulary = DraftVocabulary(np.array(ids, np.int32), target.config.vocab_size)
    session = Session(target, drafter, DraftShape(3, 2, 4), vocabulary=vocabulary)
    head = session.weights.vocabulary.head_DU
    assert head.shape == (target.config.block.hidden_size, len(ids))
    (found,) = session.generate(PROMPTS[:1], 24, NO_STOP)
    assert found.token_ids == plain.token_ids


@pytest.mark.slow
def test_the_bundled_pair_in_eight_bits():
    """Quantized as it is loaded; greedy and sampled."""
    target = load_target(DEMO / "target", weights="int8")
    drafter = load_drafter(DEMO / "draft", target, weights="int8")
    assert format_of(target.params) == format_of(drafter.params) == "int8"
    tokenizer = load_tokenizer(DEMO / "target")
    ask = lambda text: chat.prompt_ids(tokenizer, [{"role": "user", "content": text}])
    prompts = [ask("I need a cheap hotel in the north of town."), ask("Hello!")]
    laws = [Sampling(), Sampling(0.8, seed=5)]
    plain, found = (
        session.generate(prompts, 32, NO_STOP, laws)
        for session in (Session(target), Session(target, drafter))
    )
    assert [row.token_ids for row in found] == [row.token_ids for row in plain]
    assert found[0].tau > 1.3
