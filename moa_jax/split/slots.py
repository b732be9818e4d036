"""The target's half: caches of many sessions, and passes that serve several of them at once.

A slot is one row of caches that stay on the device. A pass takes the rows it serves out of them,
does what a round of `decode.step` does, and puts back what it wrote:

    slots    0 1 2 3 4 ... S-1 | scratch        tokens of slot 3, `length` of them processed
                 \\ \\  ______/                    0 .. length-1 | length | length+1 ..
    pass         2 3 + padding                   in the caches | root   | not read yet (a prompt)

Numbers of rows and of nodes are padded to a few sizes, so few programs serve everything. Once
some are compiled, a pass that has none of its own takes the smallest that holds it: nobody waits
for a compiler. All methods belong to one thread, but for `compile`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import MAX_DEPTH, DraftShape, Sampling
from moa_jax.config.checks import is_id
from moa_jax.decode import finite, sample, step
from moa_jax.decode.programs import Programs, Ready, at_least, bucket, cache_rows_for
from moa_jax.decode.room import MOST_STOPS, check_stops
from moa_jax.decode.sample import Law, Said, law_of
from moa_jax.decode.session import for_decoding
from moa_jax.decode.state import Limits, RoundState, Setup, Weights
from moa_jax.drafters.api import NOTHING, Tapped, Tree
from moa_jax.errors import InputError
from moa_jax.model import cache, llama, quantise, sharding
from moa_jax.pretrained import LoadedDrafter, Target, functions_of
from moa_jax.runtime import memory

Array = jax.Array

NODES = (1, 4, 8, 16, MAX_DEPTH)  # of a pass, the root included
SESSIONS = tuple(4**k for k in range(8))  # of a pass


class NoSlot(InputError):
    """No slot is free."""


class PassSize(NamedTuple):
    """The size of a pass: one program."""

    function: Any  # _read or _verify
    rows: int  # sessions
    width: int  # tokens or nodes of each
    sampled: bool  # serves any settings; if not, greedy ones alone (a read always serves any)

    @property
    def cost(self) -> tuple[int, bool]:
        """What a pass costs, roughly."""
        return self.rows * self.width, self.sampled

    def holds(self, rows: int, width: int, sampled: bool) -> bool:
        return self.rows >= rows and self.width >= width and self.sampled >= sampled


class DraftRequest(NamedTuple):
    """A draft to verify: its nodes without the root, parents first; 0 is the root's index."""

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int]


class Reply(NamedTuple):
    """What became of a request."""

    start: int  # the tokens start .. start + count - 1 are verified now
    count: int
    tokens: list[int]  # newly committed; the last one is the root
    done: str  # "stop", "length" or ""
    rows: list[np.ndarray]  # of these tokens: (count, ...) for each leaf of the digest
    error: str = ""  # why the session has to be closed, if it has


@dataclasses.dataclass
class Slot:
    """One session."""

    sampling: Sampling
    stop_ids: frozenset[int]
    total: int  # most tokens it may hold
    prompt_length: int  # of these
    tokens: list[int] = dataclasses.field(default_factory=list)  # all committed, the root included
    length: int = 0  # of these, processed
    done: str = ""


class Slots:
    """Sessions that share a target and the device's caches."""

    def __init__(
        self,
        target: Target,
        drafter: LoadedDrafter | None,
        *,
        num_slots: int,
        max_tokens: int,
        max_nodes: int = MAX_DEPTH,
        chunk: int = 128,
    ) -> None:
        """Room for `num_slots` sessions of `max_tokens` tokens; drafts have `max_nodes` nodes at
        most, the root included. InputError for more tokens than the target has positions."""
        positions = target.config.max_position_embeddings
        if max_tokens > positions:
            raise InputError(
                f"{max_tokens} tokens a session: the target has {positions} positions, allow fewer"
            )
        if not 1 <= max_nodes <= MAX_DEPTH:
            raise InputError(f"{max_nodes} nodes: choose from 1 to {MAX_DEPTH}")
        functions = drafter and functions_of(drafter, target.config)
        self.target, self.functions = target, functions
        self.max_tokens, self.max_nodes, self.chunk = max_tokens, max_nodes, chunk
        own = for_decoding(Weights(target.params, None))
        self.weights = own._replace(drafter=quantise.in_panels(drafter and drafter.params))
        num_rows = cache_rows_for(max_tokens + max(at_least(NODES, max_nodes), bucket(chunk)))
        dtype = target.params["embed"].dtype
        caches_of = functools.partial(llama.init_caches, target.config, rows=num_rows, dtype=dtype)
        one = memory.num_bytes_of(jax.eval_shape(functools.partial(caches_of, batch=1)))
        mesh = sharding.mesh_of(target.params)
        memory.check_memory(
            (num_slots + 1) * one,
            f"caches of {num_rows} rows for {num_slots} slots",
            "lower --slots or --max-tokens",
            mesh.size if mesh else 1,
        )
        self._empty = functools.partial(caches_of, batch=num_slots + 1)
        self._scratch = num_slots  # where the padding of a pass writes
        self._slots: list[Slot | None] = [None] * num_slots
        setup = Setup(target.config, functions, DraftShape(1))
        self._programs = Programs(setup, (self.weights,), dtype, drafts=True)
        self._ready = Ready[PassSize]()
        self._renew()

    def open(
        self, sampling: Sampling, stop_ids: Sequence[int], total: int, prompt_length: int
    ) -> int:
        """Takes a slot for a session of at most `total` tokens; NoSlot if none is free.

        All tokens after the first `prompt_length` are the answer's, even if they are given.
        Raises InputError for settings that no pass serves.
        """
        if not 1 < total <= self.max_tokens:
            raise InputError(f"{total} tokens: sessions hold from 2 to {self.max_tokens}")
        if sampling.logit_bias:
            raise InputError("logit_bias does not travel: leave it out")
        check_stops(stop_ids)
        for index, slot in enumerate(self._slots):
            if slot is None:
                self._slots[index] = Slot(sampling, frozenset(stop_ids), total, prompt_length)
                return index
        raise NoSlot(f"all {len(self._slots)} slots are taken: try again later")

    def close(self, slot: int) -> None:
        """Frees a slot; what its caches hold is never seen again."""
        self._slots[slot] = None

    def recover(self) -> bool:
        """Says, after an exception, whether the rows of all sessions were lost with a failed pass.

        If so, the caches are new, and the slots of these sessions must be closed.
        """
        if self._sound:
            return False
        self._renew()
        return True

    def _renew(self) -> None:
        """Makes empty caches, after it has freed the memory of the old ones."""
        self._caches = None
        self._caches = sharding.born(self._empty, sharding.mesh_of(self.weights.target))
        self._sound = True

    def read(self, slot: int, tokens: Sequence[int], *, pick_root: bool) -> Reply:
        """Commits given tokens, at most `chunk` of them, and processes what can be.

        With `pick_root` the target then chooses the next token, else the last one given is the
        root and waits. Raises InputError for tokens that do not fit.
        """
        session = self._session(slot)
        self._check_ids(tokens)
        everything = [*session.tokens, *tokens]
        todo = everything[session.length : len(everything) - (not pick_root)]
        if not tokens or len(todo) > self.chunk or len(everything) + pick_root > session.total:
            raise InputError(
                f"{len(tokens)} tokens after {len(session.tokens)}: at most {self.chunk} at once, "
                f"{session.total} in all"
            )
        start, news, rows = session.length, list(tokens), []
        if todo:
            size = self._fit(_read, [session], len(todo))
            padded_1T = np.zeros((1, size.width), np.int32)
            padded_1T[0, : len(todo)] = todo
            count_1 = np.array([len(todo)], np.int32)
            served = self._served(size, [slot], [session], [everything])
            root_1, leaves = self._run(_read, served, padded_1T, count_1)
            rows = [_rows_of(leaf, 0, len(todo)) for leaf in leaves]
            if pick_root:
                news.append(int(root_1[0]))
        error = self._error_of(slot, session, news)
        session.tokens += news
        session.length += len(todo)
        session.done = _done(session, news[-1:])
        return Reply(start, len(todo), news, session.done, rows, error)

    def verify(self, requests: Sequence[DraftRequest]) -> list[Reply]:
        """Verifies a draft for each of several slots in one pass of the target.

        Raises InputError, and changes nothing, for a slot twice, one that has no root or is
        done, and for nodes that are too many or no tree of distinct siblings.
        """
        sessions = [self._session(request.slot) for request in requests]
        if len({request.slot for request in requests}) < len(requests):
            raise InputError("a slot has two drafts in one pass: one at a time")
        for request, session in zip(requests, sessions, strict=True):
            if session.done or session.length != len(session.tokens) - 1:
                raise InputError("the session is over or has no root: read its prompt first")
            self._check_draft(request)
        width = max(1 + len(request.tokens) for request in requests)
        size = self._fit(_verify, sessions, width)
        trees = [
            _tree_of(session.tokens[-1], request, size.width)
            for request, session in zip(requests, sessions, strict=True)
        ]
        slots, texts = [r.slot for r in requests], [session.tokens for session in sessions]
        served = self._served(size, slots, sessions, texts)
        tree = _stacked(trees, size.rows, size.width)
        emitted_AD, count_A, leaves = self._run(_verify, served, tree)
        replies = []
        for row, session in enumerate(sessions):
            start, count = session.length, int(count_A[row])
            news = emitted_AD[row, :count].tolist()
            error = self._error_of(slots[row], session, news)
            session.tokens += news
            session.length += count
            session.done = _done(session, news[-1:])
            rows = [_rows_of(leaf, row, count) for leaf in leaves]
            replies.append(Reply(start, count, news, session.done, rows, error))
        return replies

    def _error_of(self, slot: int, session: Slot, news: Sequence[int]) -> str:
        """Why a session cannot go on: logits that are not finite. Its rows become zeros.

        Else NaN would reach the slot's next session, as 0 * NaN in its attention.
        """
        try:
            finite.check(self.target, "this prompt", len(session.tokens), news)
        except finite.NotFinite as error:
            self._caches = self._programs.run(_cleared, self._caches, np.int32(slot))
            return str(error)
        return ""

    def padded(self, num_nodes: int) -> int:
        """How many nodes a pass over one draft of `num_nodes` really has, both with the root."""
        return self._fit(_verify, [], num_nodes).width

    def passes(
        self, nodes: Sequence[int] = NODES, sampled: bool = False, short: bool = True
    ) -> list[PassSize]:
        """The passes for drafts of these numbers of nodes, for any number of sessions.

        `short` adds those that fit short prompts closely. The first two passes hold all work, so a
        server can start as soon as these are compiled.
        """
        most = at_least(NODES, self.max_nodes)
        reads = sorted({bucket(count) for count in range(1, self.chunk + 1)})
        rows = sorted({self._num_rows(count) for count in range(1, len(self._slots) + 1)})
        widths = sorted({min(at_least(NODES, number), most) for number in nodes})
        found = [PassSize(_read, 1, reads[-1], True), PassSize(_verify, rows[-1], most, True)]
        found += [PassSize(_read, 1, T, True) for T in reads if short]
        for law in (False, True) if sampled else (False,):
            found += [PassSize(_verify, A, N, law) for A in rows for N in widths]
        return list(dict.fromkeys(found))

    def compile(self, size: PassSize) -> None:
        """Compiles the program of a pass; one thread may do so while another one runs passes."""
        A, T = size.rows, size.width
        if size.function is _read:
            given = (np.zeros((A, T), np.int32), np.full(A, T, np.int32))
        else:
            given = (_stacked([], A, T),)
        form = jax.eval_shape(self._empty)
        self._programs.compile(size.function, form, self._served(size, [], [], []), *given)
        self._ready.add(size)

    def _fit(self, function: Any, sessions: Sequence[Slot], width: int) -> PassSize:
        """The pass for some work: of exactly its size, or the smallest compiled one that fits."""
        plain, count = Sampling(), max(len(sessions), 1)
        sampled = any(dataclasses.replace(s.sampling, seed=0) != plain for s in sessions)
        if function is _read:
            own = PassSize(function, 1, bucket(width), True)
        else:
            own = PassSize(function, self._num_rows(count), at_least(NODES, width), sampled)
        holds = lambda size: size.function is function and size.holds(count, width, sampled)
        return self._ready.cheapest(holds, lambda size: (size != own, *size.cost)) or own

    def _num_rows(self, count: int) -> int:
        """Rows of a pass over so many sessions: never more than there are slots."""
        return min(at_least(SESSIONS, count), len(self._slots))

    def _session(self, slot: int) -> Slot:
        session = self._slots[slot]
        if session is None:
            raise InputError(f"slot {slot} holds no session")
        return session

    def _check_ids(self, tokens: Sequence[int]) -> None:
        vocab_size = self.target.config.vocab_size
        if not all(is_id(token, vocab_size) for token in tokens):
            raise InputError(f"a token is outside the vocabulary of {vocab_size}")

    def _check_draft(self, request: DraftRequest) -> None:
        self._check_ids(request.tokens)
        if len(request.tokens) >= self.max_nodes:
            raise InputError(f"{len(request.tokens)} nodes: at most {self.max_nodes - 1} a draft")
        if len(request.parents) != len(request.tokens) or not all(
            0 <= parent <= index for index, parent in enumerate(request.parents)
        ):
            raise InputError("the nodes are no tree: each needs a parent that stands before it")
        pairs = set(zip(request.parents, request.tokens, strict=True))
        if len(pairs) < len(request.tokens):
            raise InputError("two children of a node are the same token: send each once")

    def _served(
        self,
        size: PassSize,
        slots: Sequence[int],
        sessions: Sequence[Slot],
        texts: Sequence[Sequence[int]],
    ) -> Served:
        """A pass's sessions, then padding that writes to the scratch slot.

        `texts` are what penalties see: what is committed before the pass chooses.
        """
        A = size.rows
        slot_A = np.full(A, self._scratch, np.int32)
        length_A, total_A = np.zeros(A, np.int32), np.zeros(A, np.int32)
        stop_ids_AX = np.full((A, MOST_STOPS), -1, np.int32)
        for row, session in enumerate(sessions):
            slot_A[row], length_A[row], total_A[row] = slots[row], session.length, session.total
            stop_ids_AX[row, : len(session.stop_ids)] = sorted(session.stop_ids)
        limits = Limits(total_A, stop_ids_AX)
        if not size.sampled:
            return Served(slot_A, length_A, limits, Law())
        rows = [session.sampling for session in sessions]
        law = law_of(rows + [Sampling()] * (A - len(rows)), self.target.config.vocab_size, True)
        text_AC = np.full((A, self.max_tokens), NOTHING, np.int32)
        for text_C, text in zip(text_AC, texts, strict=False):
            text_C[: len(text)] = text
        prompts = [session.prompt_length for session in sessions]
        prompt_length_A = np.array(prompts + [0] * (A - len(prompts)), np.int32)
        return Served(slot_A, length_A, limits, law, prompt_length_A, text_AC)

    def _run(self, function: Any, *arrays: Any) -> Any:
        """One pass over the slots' caches; arrays on the host."""
        self._sound = False  # a pass takes over the caches' memory: if it fails, they are lost
        self._caches, *found = self._programs.run(function, self._caches, *arrays)
        found = jax.tree.map(np.asarray, found)
        self._sound = True
        return found


# ---- on the host --------------------------------------------------------------------------


def _tree_of(root: int, request: DraftRequest, size: int) -> Tree:
    """One row of a pass: the draft behind its root, then nodes that are not there."""
    tokens_N = np.full(size, NOTHING, np.int32)
    parent_N, depth_N = np.zeros(size, np.int32), np.zeros(size, np.int32)
    ancestor_NN = np.eye(size, dtype=bool)
    tokens_N[0] = root
    for node, (token, parent) in enumerate(zip(request.tokens, request.parents, strict=True), 1):
        tokens_N[node], parent_N[node] = token, parent
        depth_N[node] = depth_N[parent] + 1
        ancestor_NN[node] |= ancestor_NN[parent]
    return Tree(tokens_N, parent_N, depth_N, ancestor_NN)


def _stacked(trees: Sequence[Tree], rows: int, size: int) -> Tree:
    """The trees as the first rows of a pass, with a root alone in each of the others."""
    blank = _tree_of(0, DraftRequest(0, (), ()), size)
    return jax.tree.map(lambda *leaves: np.stack(leaves), *trees, *[blank] * (rows - len(trees)))


def _done(session: Slot, last: Sequence[int]) -> str:
    if any(token in session.stop_ids for token in last):
        return "stop"
    return "length" if len(session.tokens) >= session.total else ""


def _rows_of(leaf: np.ndarray, row: int, count: int) -> np.ndarray:
    """The first tokens of one row of a digest's leaf, tokens first."""
    return np.moveaxis(leaf[row], -2, 0)[:count]


# ---- on the device ------------------------------------------------------------------------


class Served(NamedTuple):
    """The sessions of a pass, as arrays: where each stands and what it is decoded by."""

    slot_A: Array
    length_A: Array  # tokens processed
    limits: Limits
    law: Law
    # Where the law asks for them: how many tokens are prompts, and what penalties see.
    prompt_length_A: Array | None = None
    text_AC: Array | None = None


def _read(
    setup: Setup,
    weights: Weights,
    caches: llama.Caches,
    served: Served,
    tokens_1T: Array,
    count_1: Array,
) -> tuple[llama.Caches, Array, list[Array]]:
    """Processes T given tokens of one slot: what follows the last real one, and the digest."""
    now = _taken(setup, caches, served)
    now, hidden_1D, tapped = step.read(setup, weights, now, tokens_1T, count_1)
    now, root_1 = step.choose_after(weights, now, hidden_1D, served.law)
    leaves = _digest(setup, weights, served.length_A, tapped)
    return _put(caches, now.target_caches, served, tokens_1T.shape[1]), root_1, leaves


def _verify(
    setup: Setup, weights: Weights, caches: llama.Caches, served: Served, tree: Tree
) -> tuple[llama.Caches, Array, Array, list[Array]]:
    """One pass over A slots' trees of N nodes: emitted tokens, how many, digests of the paths."""
    N = tree.tokens_BN.shape[1]
    # The shape of which any tree of N nodes is one: N levels at most, as in a chain.
    setup = setup._replace(shape=DraftShape(N, 2, N - 1) if N > 1 else DraftShape(1))
    now = _taken(setup, caches, served)
    found = step.verify_tree(setup, weights, now, served.law, tree)
    _, count_A = step.commit(now, found.verdict, served.limits)
    leaves = _digest(setup, weights, served.length_A, found.tapped)
    caches = _put(caches, found.caches, served, N)
    return caches, found.verdict.emitted_BD, count_A, leaves


def _cleared(setup: Setup, weights: Weights, caches: llama.Caches, slot: Array) -> llama.Caches:
    """The slots' caches with zeros in one slot."""
    return jax.tree.map(lambda cache_SKRE: cache_SKRE.at[slot].set(0), caches)


def _digest(setup: Setup, weights: Weights, start_A: Array, tapped: Tapped) -> list[Array]:
    if setup.drafter is None:
        return []
    return jax.tree.leaves(setup.drafter.digest(weights.drafter, start_A, tapped))


def _taken(setup: Setup, caches: llama.Caches, served: Served) -> RoundState:
    """The slots' rows of the caches, as the state of a round."""
    A = len(served.slot_A)
    said = Said()
    if served.text_AC is not None:
        text = (served.text_AC, served.prompt_length_A)
        said = sample.said_in(served.law, *text, setup.target.vocab_size)
    return RoundState(
        served.length_A,
        jnp.zeros(A, bool),
        said,
        jax.tree.map(lambda cache_SKRE: cache_SKRE[served.slot_A], caches),
    )


def _put(caches: llama.Caches, worked: llama.Caches, served: Served, count: int) -> llama.Caches:
    """The slots' caches with the `count` rows that a pass wrote behind each session's length."""
    row_AT = served.length_A[:, None] + jnp.arange(count)

    def put(cache_SKRE: Array, worked_AKRE: Array) -> Array:
        new_AKTE = jnp.take_along_axis(worked_AKRE, row_AT[:, None, :, None], axis=2)
        at = (served.slot_A[:, None], slice(None), row_AT)
        return cache_SKRE.at[at].set(new_AKTE.swapaxes(1, 2))  # indexed axes come first

    return tuple(cache.KV(*map(put, old, new)) for old, new in zip(caches, worked, strict=True))
