"""The two halves of a step, without a network: what a split pair writes is plain decoding's."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from moa_jax import load_drafter
from moa_jax.config import DraftShape, Sampling
from moa_jax.errors import InputError
from moa_jax.pretrained import describe_target
from moa_jax.split.client_drafter import ClientDrafter
from moa_jax.split.pairing import pairing_of
from moa_jax.split.rows import pack, unpack
from moa_jax.split.server_target import DraftRequest, NoSlot, TargetSlots
from tests.pairs import NO_STOP, Pair, random_pair_of

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
    """Both halves, and the client's side of a session: text and what the target has verified."""

    def __init__(self, slots: TargetSlots, drafter: ClientDrafter, codec: str = "float32") -> None:
        self.slots, self.drafter, self.codec = slots, drafter, codec
        self.text: list[int] = []
        self.known = 0
        self.done = ""

    def open(self, prompt, sampling: Sampling, stop_ids=NO_STOP, new=NUM_NEW) -> None:
        self.drafter.reset(sampling, len(prompt))
        self.slot = self.slots.open(sampling, stop_ids, len(prompt) + new, len(prompt))
        self.text = list(prompt)
        for start in range(0, len(prompt), self.slots.chunk):
            part = prompt[start : start + self.slots.chunk]
            last = start + len(part) == len(prompt)
            self.take(self.slots.read(self.slot, part, pick_root=last), given=len(part))

    def take(self, reply, given: int = 0) -> None:
        self.text += reply.tokens[given:]
        self.done = reply.done
        data = pack(reply.rows, self.codec, True)
        rows = unpack(data, reply.count, self.drafter.leaves, self.codec, True)
        if reply.count:
            self.drafter.absorb(
                reply.start, self.text[reply.start : reply.start + reply.count], rows
            )
        self.known = reply.start + reply.count

    def draft(self, shape: DraftShape | int) -> DraftRequest:
        if isinstance(shape, DraftShape):
            return DraftRequest(self.slot, *self.drafter.tree(self.text, shape))
        tokens = self.drafter.chain(self.text, self.known, shape)
        return DraftRequest(self.slot, tokens, list(range(len(tokens))))

    def finish(self, shape: DraftShape | int = 4) -> list[int]:
        """Decodes to the end and closes the slot; returns the number of tokens of each pass."""
        counts = []
        while not self.done:
            (reply,) = self.slots.verify([self.draft(shape)])
            self.take(reply)
            counts.append(reply.count)
        self.slots.close(self.slot)
        return counts


@pytest.fixture(
    scope="module", params=[1, pytest.param(0, marks=pytest.mark.slow)], ids=["n1", "n0"]
)
def pair(request, tmp_path_factory) -> Pair:
    """A random pair that agrees now and then; the drafter reuses this many layers."""
    return random_pair_of("llama", request.param, tmp_path_factory.mktemp("pair"))


LONG = (np.arange(45) * 7 % 90 + 3).tolist()  # comes in two chunks
CASES = {  # shape, settings, codec and prompts; the drafter is that of one process
    "chain-greedy": (4, LAWS[0], "float32", PROMPTS),
    "tree-greedy": (TREE, LAWS[0], "float32", PROMPTS),
    "chain-penalties": (4, LAWS[2], "float32", PROMPTS),
    "bfloat16": (4, LAWS[0], "bfloat16", PROMPTS[:1]),
    "int8": (4, LAWS[0], "int8", PROMPTS[:1]),
    "long": (4, LAWS[0], "float32", (LONG,)),
}
SLOW = ("tree-greedy", "chain-penalties")  # sessions that share a pass have all settings and shapes


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow) if n in SLOW else n for n in CASES]
)
def test_split_writes_what_plain_decoding_writes(pair, slots, drafter, name):
    """Greedy rounds in float32 accept what those of one process accept."""
    shape, sampling, codec, prompts = CASES[name]
    new = 12 if name == "long" else NUM_NEW
    local = pair.session(shape if isinstance(shape, DraftShape) else DraftShape(shape + 1))
    counts = []
    for prompt in prompts:
        (plain,) = pair.plain.generate([prompt], new, NO_STOP, sampling)
        split = Split(slots, drafter, codec)
        split.open(prompt, sampling, new=new)
        counts.append(split.finish(shape))
        assert (split.text, split.done) == ([*prompt, *plain.token_ids], "length")
    assert max(map(max, counts)) > 1
    if name.endswith("-greedy"):
        found = [local.generate([prompt], new, NO_STOP)[0] for prompt in prompts]
        assert counts == [result.accept_lengths for result in found]


@pytest.mark.slow
def test_split_sessions_share_a_pass_without_touching_each_other(pair, slots, drafter):
    """Three sessions of their own laws, in passes of one, two or three of them."""
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


def test_split_goes_on_alone_and_what_it_wrote_is_a_draft(pair, slots, drafter):
    """Tokens written alone are verified as a chain: the text is the target's again."""
    prompt = PROMPTS[0]
    (plain,) = pair.plain.generate([prompt], NUM_NEW, NO_STOP)
    split = Split(slots, drafter)
    split.open(prompt, Sampling())
    split.take(slots.verify([split.draft(3)])[0])
    alone = []
    while len(alone) < 10:  # in calls of three, as they are shown
        alone += drafter.chain([*split.text, *alone], split.known, 3)
    whole = drafter.chain(split.text, split.known, 12)
    assert alone == whole
    (reply,) = slots.verify([DraftRequest(split.slot, alone, list(range(12)))])
    split.take(reply)
    split.finish(3)
    assert split.text == [*prompt, *plain.token_ids]


def test_split_keeps_given_tokens(pair, slots, drafter):
    """Tokens that were read as they are stay; what follows is the target's answer to them."""
    prompt, given = PROMPTS[0], [40, 41, 42]
    split = Split(slots, drafter)
    split.open(prompt, Sampling())
    first = split.text[len(prompt) :]
    split.text += given
    split.take(slots.read(split.slot, given, pick_root=False), given=len(given))
    split.finish(3)
    kept = [*prompt, *first, *given]
    (plain,) = pair.plain.generate([kept], NUM_NEW - len(given) - 1, NO_STOP)
    assert split.text == [*kept, *plain.token_ids]


def test_split_counts_an_answer_that_is_read(pair, slots, drafter):
    """A session that is opened again with its text has the same penalties as before."""
    prompt, law = PROMPTS[0], LAWS[2]
    (plain,) = pair.plain.generate([prompt], NUM_NEW, NO_STOP, law)
    text = [*prompt, *plain.token_ids[:10]]
    split = Split(slots, drafter)
    split.drafter.reset(law, len(prompt))
    split.slot = slots.open(law, NO_STOP, len(prompt) + NUM_NEW, len(prompt))
    split.text = list(text)
    split.take(slots.read(split.slot, text, pick_root=False), given=len(text))
    split.finish(3)
    assert split.text == [*prompt, *plain.token_ids]


def test_split_drafts_ahead_and_keeps_what_was_right(pair, slots, drafter):
    """What was drafted beyond a draft is the next draft if all before it was right; taking in
    the target's rows leaves the rows behind them."""
    split = Split(slots, drafter)
    split.open(PROMPTS[2], Sampling())
    ahead = drafter.chain(split.text, split.known, 3)
    while not split.done:
        request = DraftRequest(split.slot, ahead[:3], list(range(len(ahead[:3]))))
        text = [*split.text, *ahead]
        ahead += drafter.chain(text, split.known, 4)
        (reply,) = slots.verify([request])
        split.take(reply)
        if ahead[: reply.count] == reply.tokens and len(ahead) > reply.count:
            ahead = ahead[reply.count :]
        else:
            ahead = drafter.chain(split.text, split.known, 3)
    (plain,) = pair.plain.generate([PROMPTS[2]], NUM_NEW, NO_STOP)
    assert split.text[len(PROMPTS[2]) :] == plain.token_ids
    slots.close(split.slot)


def test_split_stops_where_plain_decoding_stops(pair, slots, drafter):
    (plain,) = pair.plain.generate([PROMPTS[0]], NUM_NEW, NO_STOP)
    stop = plain.token_ids[7]
    (stopped,) = pair.plain.generate([PROMPTS[0]], NUM_NEW, [stop])
    split = Split(slots, drafter)
    split.open(PROMPTS[0], Sampling(), [stop])
    split.finish()
    assert (split.text[len(PROMPTS[0]) :], split.done) == (stopped.token_ids, "stop")


def test_split_stop_ids_within_a_prompt_end_nothing(slots):
    """A chunk of a prompt may end with one, as after each turn of a chat."""
    slot = slots.open(Sampling(), [6], 20, 4)
    assert slots.read(slot, [5, 6], pick_root=False).done == "stop"
    (*_, root), done = slots.read(slot, [7, 8], pick_root=True)[2:4]
    assert root != 6 and done == ""
    assert slots.verify([DraftRequest(slot, [], [])])[0].tokens
    slots.close(slot)


BROKEN = {
    "ids": lambda slot: DraftRequest(slot, [10_000], [0]),
    "too many": lambda slot: DraftRequest(slot, [3] * 16, list(range(16))),
    "no tree": lambda slot: DraftRequest(slot, [3, 4], [0, 2]),
    "a parent short": lambda slot: DraftRequest(slot, [3, 4], [0]),
    "twins": lambda slot: DraftRequest(slot, [3, 3], [0, 0]),
}


@pytest.mark.parametrize("name", BROKEN)
def test_split_drafts_that_are_no_trees_are_refused(slots, name):
    slot = slots.open(Sampling(), NO_STOP, 20, 2)
    slots.read(slot, [5, 6], pick_root=True)
    before = dataclasses.asdict(slots._slots[slot])
    with pytest.raises(InputError):
        slots.verify([BROKEN[name](slot)])
    assert dataclasses.asdict(slots._slots[slot]) == before
    slots.close(slot)


def test_split_slots_run_out_and_sessions_are_bounded(slots):
    taken = [slots.open(Sampling(), NO_STOP, 20, 2) for _ in range(4)]
    with pytest.raises(NoSlot):
        slots.open(Sampling(), NO_STOP, 20, 2)
    for slot in taken:
        slots.close(slot)
    with pytest.raises(InputError, match="hold from 2 to 64"):
        slots.open(Sampling(), NO_STOP, 65, 2)
    slot = slots.open(Sampling(), NO_STOP, 6, 2)
    with pytest.raises(InputError, match="in all"):
        slots.read(slot, [5] * 6, pick_root=True)
    slots.close(slot)
    with pytest.raises(InputError, match="holds no session"):
        slots.read(slot, [5], pick_root=True)


def test_split_needs_no_drafter_on_the_server(pair):
    """A client that drafts nothing streams the target's tokens, one a pass."""
    slots = TargetSlots(pair.target, None, num_slots=1, max_tokens=64, max_nodes=1)
    slot = slots.open(Sampling(), NO_STOP, 15, 2)
    text = slots.read(slot, PROMPTS[0], pick_root=True).tokens
    while len(text) < 15:
        (reply,) = slots.verify([DraftRequest(slot, (), ())])
        assert (reply.count, reply.rows) == (1, [])
        text += reply.tokens
    (plain,) = pair.plain.generate([PROMPTS[0]], 10, NO_STOP)
    assert text == [*PROMPTS[0], *plain.token_ids]


def test_split_sides_choose_the_format_of_their_weights(pair, slots):
    """A client in int8 drafts for a target that is not: the text is the target's, on its own."""
    described = describe_target(pair.target.folder)
    options = {"target_layer_inference": pair.drafter.config.target_layer_inference}
    loaded, drafters = {}, {}
    for weights in (None, "int8"):
        loaded[weights] = load_drafter(pair.drafter.folder, described, weights=weights, **options)
        drafters[weights] = ClientDrafter(described, loaded[weights], max_tokens=64)
    size = lambda params: sum(leaf.nbytes for leaf in jax.tree.leaves(params))
    whole, held = size((pair.target.params, pair.drafter.params)), size(drafters[None]._weights)
    assert size(drafters["int8"]._weights) < 0.4 * held < 0.4 * whole
    assert drafters["int8"].leaves == drafters[None].leaves  # what the server sends is the same
    assert pairing_of(described, loaded["int8"]) == pairing_of(described, loaded[None])
    split = Split(slots, drafters["int8"])
    (plain,) = pair.plain.generate([PROMPTS[0]], NUM_NEW, NO_STOP)
    split.open(PROMPTS[0], Sampling())
    split.finish()
    assert split.text == [*PROMPTS[0], *plain.token_ids]
