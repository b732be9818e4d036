"""Client and server halves of a step, without a network, write plain decoding's text."""

from __future__ import annotations

import numpy as np
import pytest

from moa_jax import Session, load_drafter
from moa_jax.config import DraftShape, Sampling
from moa_jax.decode.draft_vocabulary import FILE, load_vocabulary, save_vocabulary, vocabulary_of
from moa_jax.pretrained import describe_target
from moa_jax.split.client_drafter import ClientDrafter
from moa_jax.split.pairing import pairing_of
from moa_jax.split.rows import pack, unpack
from moa_jax.split.server_target import DraftRequest, TargetSlots
from tests.pairs import NO_STOP

NUM_NEW = 24
PROMPTS = ([5, 9, 4, 17, 23], [11], [3, 8, 8, 61, 7, 30, 31, 32, 33, 34])
LAWS = (
    Sampling(),
    Sampling(0.8, top_k=20, seed=7),
    Sampling(
        1.0, top_p=0.9, repetition_penalty=1.2, presence_penalty=-2.0, frequency_penalty=0.4, seed=8
    ),
)
TREE = DraftShape(4, 3, 8)


class Split:
    """Both halves, and the client's session: the text, and the number of verified tokens."""

    def __init__(self, slots: TargetSlots, drafter: ClientDrafter) -> None:
        self.slots, self.drafter = slots, drafter
        self.text: list[int] = []
        self.known = 0
        self.done = ""

    def open(self, prompt, sampling: Sampling) -> None:
        """Opens a slot and reads the prompt."""
        self.drafter.reset(sampling, len(prompt))
        self.slot = self.slots.open(sampling, NO_STOP, len(prompt) + NUM_NEW, len(prompt))
        self.text = list(prompt)
        self.take(self.slots.read(self.slot, prompt, pick_root=True), given=len(prompt))

    def take(self, reply, given: int = 0) -> None:
        self.text += reply.tokens[given:]
        self.done = reply.done
        data = pack(reply.rows, "float32", True)
        rows = unpack(data, reply.count, self.drafter.leaves, "float32", True)
        self.known = reply.start + reply.count
        self.drafter.absorb(reply.start, self.text[reply.start : self.known], rows)

    def draft(self, shape: DraftShape | int) -> DraftRequest:
        if isinstance(shape, DraftShape):
            return DraftRequest(self.slot, *self.drafter.tree(self.text, shape))
        tokens = self.drafter.chain(self.text, self.known, shape)
        return DraftRequest(self.slot, tokens, list(range(len(tokens))))

    def finish(self, shape: DraftShape | int) -> list[int]:
        """Decodes to the end and closes the slot; returns the number of tokens of each pass."""
        counts = []
        while not self.done:
            (reply,) = self.slots.verify([self.draft(shape)])
            self.take(reply)
            counts.append(reply.count)
        self.slots.close(self.slot)
        return counts


@pytest.mark.slow
@pytest.mark.parametrize("shape", [DraftShape(5), TREE], ids=["chain", "tree"])
@pytest.mark.parametrize("is_narrow", [False, True], ids=["all", "draft-vocabulary"])
def test_split_rounds_accept_what_those_of_one_process_accept(
    pair, slots, drafter, shape, is_narrow, tmp_path
):
    """A client with a draft vocabulary keeps the head of its tokens alone."""
    target, (found,) = pair.target, pair.session(shape).generate(PROMPTS[:1], NUM_NEW, NO_STOP)
    if is_narrow:  # without some tokens of the answer
        rest = np.setdiff1d(np.arange(target.config.vocab_size), found.token_ids[::5])
        save_vocabulary(tmp_path / FILE, vocabulary_of(rest, target))
        narrow, wide = pair.drafter._replace(folder=tmp_path), found
        session = Session(target, narrow, shape, vocabulary=load_vocabulary(tmp_path, target))
        (found,) = session.generate(PROMPTS[:1], NUM_NEW, NO_STOP)
        assert found.rounds > wide.rounds and found.token_ids == wide.token_ids
        drafter = ClientDrafter(describe_target(target.folder), narrow, max_tokens=64)
        assert drafter._weights.shared["lm_head"].shape[-1] < target.config.vocab_size
    split = Split(slots, drafter)
    split.open(PROMPTS[0], Sampling())
    counts = split.finish(shape if shape.breadth > 1 else shape.depth - 1)
    assert split.text == [*PROMPTS[0], *found.token_ids]
    assert counts == found.accept_lengths and max(counts) > 1


@pytest.mark.slow
def test_split_sessions_share_a_pass_without_touching_each_other(pair, slots, drafter):
    """Three sessions with different sampling settings share passes of one, two or three rows."""
    splits = [Split(slots, drafter.twin()) for _ in PROMPTS]
    for split, prompt, law in zip(splits, PROMPTS, LAWS, strict=True):
        split.open(prompt, law)
    random = np.random.default_rng(0)
    while running := [split for split in splits if not split.done]:
        some = [split for split in running if random.random() < 0.7] or running
        shapes = [TREE if random.random() < 0.5 else 3 for _ in some]
        requests = [split.draft(shape) for split, shape in zip(some, shapes, strict=True)]
        for split, reply in zip(some, slots.verify(requests), strict=True):
            split.take(reply)
    for split, prompt, law in zip(splits, PROMPTS, LAWS, strict=True):
        (plain,) = pair.plain.generate([prompt], NUM_NEW, NO_STOP, law)
        assert split.text == [*prompt, *plain.token_ids]
        slots.close(split.slot)
    assert slots._slots == [None] * 4


def test_split_client_drafts_alone_and_the_target_verifies_later(pair, slots, drafter):
    """A chain drafted offline is verified later: the text is the target's again."""
    (plain,) = pair.plain.generate(PROMPTS[:1], NUM_NEW, NO_STOP)
    split = Split(slots, drafter)
    split.open(PROMPTS[0], Sampling())
    split.take(slots.verify([split.draft(3)])[0])
    alone = []
    while len(alone) < 10:  # in calls of three tokens
        alone += drafter.chain([*split.text, *alone], split.known, 3)
    assert alone == drafter.chain(split.text, split.known, 12)
    split.take(slots.verify([DraftRequest(split.slot, alone, list(range(12)))])[0])
    split.finish(3)
    assert split.text == [*PROMPTS[0], *plain.token_ids]


def test_split_stop_ids_within_a_prompt_end_nothing(slots):
    """A chunk of a prompt may end with a stop id, as after each turn of a chat."""
    slot = slots.open(Sampling(), [6], 20, 4)
    slots.read(slot, [5, 6], pick_root=False)
    (*_, root), done = slots.read(slot, [7, 8], pick_root=True)[2:4]
    assert root != 6 and done == ""
    assert slots.verify([DraftRequest(slot, [], [])])[0].tokens
    slots.close(slot)


@pytest.mark.slow
def test_split_sides_choose_the_format_of_their_weights(pair, slots):
    """A client in int8 drafts for a target in float32: the text is the target's."""
    described = describe_target(pair.target.folder)
    options = {"target_layer_inference": pair.drafter.config.target_layer_inference}
    small = load_drafter(pair.drafter.folder, described, weights="int8", **options)
    assert pairing_of(described, small) == pairing_of(described, pair.drafter)
    split = Split(slots, ClientDrafter(described, small, max_tokens=64))
    (plain,) = pair.plain.generate(PROMPTS[:1], NUM_NEW, NO_STOP)
    split.open(PROMPTS[0], Sampling())
    split.finish(4)
    assert split.text == [*PROMPTS[0], *plain.token_ids]
