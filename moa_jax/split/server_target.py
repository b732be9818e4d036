"""Server-side target: the caches of all sessions, and forward passes over a batch of sessions.

A slot is one batch row of the caches on the device. A pass gathers the slots of its sessions, runs
the functions of `decode.step`, and scatters the written rows back:

    slots    0 1 2 3 4 ... S-1 | scratch        tokens of slot 3, `length` of them processed
                 \\ \\  ______/                    0 .. length-1 | length | length+1 ..
    pass         2 3 + padding                   in the caches | root   | not read yet (a prompt)

Batch sizes and node counts are padded to a few sizes, so a few programs serve every pass. A pass
without a compiled program of its size uses the smallest compiled size that fits, so no request
waits for compilation. All methods must be called from one thread, except `compile`.
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
from moa_jax.decode import finite, step
from moa_jax.decode import sampling as sampling_lib
from moa_jax.decode.limits import MOST_STOPS, check_stops
from moa_jax.decode.programs import CompiledSizes, Programs, bucket, bucket_for, cache_rows_for
from moa_jax.decode.sampling import BatchSampling, TokenCounts, make_batch_sampling
from moa_jax.decode.session import for_decoding
from moa_jax.decode.state import RoundState, StaticConfig, StopConditions, Weights
from moa_jax.drafters.api import NO_TOKEN, TargetActivations, Tree, host_tree
from moa_jax.errors import InputError
from moa_jax.model import cache, llama, quantize, sharding
from moa_jax.pretrained import LoadedDrafter, Target, functions_of
from moa_jax.runtime import memory
from moa_jax.split.protocol import LOCAL

Array = jax.Array

NODES = (1, 4, 8, 16, MAX_DEPTH)  # per draft in a pass, including the root
SESSIONS = tuple(4**k for k in range(8))  # per pass


class NoSlot(InputError):
    """All slots are taken."""


class PassSize(NamedTuple):
    """The size of a pass; each size is one program."""

    function: Any  # _read or _verify
    rows: int  # sessions
    width: int  # tokens or nodes per session
    sampled: bool  # True: any sampling settings; False: greedy only (True for every read)

    @property
    def cost(self) -> tuple[int, bool]:
        """Approximate cost of a pass, as a sort key."""
        return self.rows * self.width, self.sampled

    def holds(self, rows: int, width: int, sampled: bool) -> bool:
        return self.rows >= rows and self.width >= width and self.sampled >= sampled


class DraftRequest(NamedTuple):
    """A draft to verify: nodes without the root, parents first; the root has index 0."""

    slot: int
    tokens: Sequence[int]
    parents: Sequence[int]


class Reply(NamedTuple):
    """The result of `TargetSlots.read` or `TargetSlots.verify` for one session."""

    start: int  # the pass processed tokens start .. start + count - 1
    count: int
    tokens: list[int]  # newly committed; the last one is the root
    done: str  # "stop", "length" or ""
    rows: list[np.ndarray]  # of the processed tokens: (count, ...) per leaf of the digest
    error: str = ""  # if not empty: the session must be closed, for this reason


@dataclasses.dataclass
class Slot:
    """One session."""

    sampling: Sampling
    stop_ids: frozenset[int]
    total: int  # most tokens, including the prompt
    prompt_length: int  # leading tokens that are the prompt
    tokens: list[int] = dataclasses.field(default_factory=list)  # committed, including the root
    length: int = 0  # leading tokens that are in the caches
    done: str = ""


class TargetSlots:
    """Sessions that share a target and its caches on the device."""

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
        """Allocates caches for `num_slots` sessions of up to `max_tokens` tokens.

        Drafts have up to `max_nodes` nodes, including the root. Raises InputError if `max_tokens`
        exceeds the target's positions, if `max_nodes` is not in 1..MAX_DEPTH, or if the caches do
        not fit into memory.
        """
        positions = target.config.max_position_embeddings
        if max_tokens > positions:
            raise InputError(
                f"{max_tokens} tokens a session: the target has {positions} positions; allow fewer"
            )
        if not 1 <= max_nodes <= MAX_DEPTH:
            raise InputError(f"{max_nodes} nodes; choose from 1 to {MAX_DEPTH}")
        functions = drafter and functions_of(drafter, target.config)
        self.target, self.functions = target, functions
        self.max_tokens, self.max_nodes, self.chunk = max_tokens, max_nodes, chunk
        own = for_decoding(Weights(target.params, None))
        self.weights = own._replace(drafter=quantize.in_panels(drafter and drafter.params))
        ahead = max(bucket_for(NODES, max_nodes), bucket(chunk))  # rows that a pass writes
        sizes = {"rows": cache_rows_for(max_tokens + ahead), "ahead": ahead}
        dtype = target.params["embed"].dtype
        caches_of = functools.partial(llama.init_caches, target.config, dtype=dtype, **sizes)
        one = memory.num_bytes_of(jax.eval_shape(functools.partial(caches_of, batch=1)))
        mesh = sharding.mesh_of(target.params)
        memory.check_memory(
            (num_slots + 1) * one,
            f"caches of {sizes['rows']} rows for {num_slots} slots",
            "lower --slots or --max-tokens",
            mesh.size if mesh else 1,
        )
        self._empty = functools.partial(caches_of, batch=num_slots + 1)
        self._scratch = num_slots  # padding rows of a pass write here
        self._slots: list[Slot | None] = [None] * num_slots
        setup = StaticConfig(target.config, functions, DraftShape(1))
        self._programs = Programs(setup, (self.weights,), dtype, drafts=True)
        self._ready = CompiledSizes[PassSize]()
        self._renew()

    def open(
        self, sampling: Sampling, stop_ids: Sequence[int], total: int, prompt_length: int
    ) -> int:
        """Assigns a slot to a session of at most `total` tokens; raises NoSlot if none is free.

        All tokens after the first `prompt_length` belong to the answer, including given ones.
        Raises InputError for a `total` out of range, settings that do not travel, or too many stop
        ids.
        """
        if not 1 < total <= self.max_tokens:
            raise InputError(f"{total} tokens: sessions hold from 2 to {self.max_tokens}")
        if name := next((name for name in LOCAL if getattr(sampling, name)), None):
            raise InputError(f"{name} does not travel; leave it out")
        check_stops(stop_ids)
        for index, slot in enumerate(self._slots):
            if slot is None:
                self._slots[index] = Slot(sampling, frozenset(stop_ids), total, prompt_length)
                return index
        raise NoSlot(f"all {len(self._slots)} slots are taken; retry later")

    def close(self, slot: int) -> None:
        """Frees a slot; the content of its caches is never read again."""
        self._slots[slot] = None

    def recover(self) -> bool:
        """Returns, after an exception, whether a failed pass lost the cache rows of all sessions.

        If True, the caches are new and empty, and the caller must close all open slots.
        """
        if self._sound:
            return False
        self._renew()
        return True

    def _renew(self) -> None:
        """Frees the caches, then allocates empty ones."""
        self._caches = None
        self._caches = sharding.init_sharded(self._empty, sharding.mesh_of(self.weights.target))
        self._sound = True

    def read(self, slot: int, tokens: Sequence[int], *, pick_root: bool) -> Reply:
        """Commits given tokens and processes all tokens that are not in the caches yet.

        With `pick_root` the target then chooses the next token, which becomes the root; otherwise
        the last given token is the root and stays unprocessed. Raises InputError for no tokens,
        more than `chunk` tokens to process, or more than the session's `total`.
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
        news, rows = list(tokens), []
        if todo:
            size = self._fit(_read, [session], len(todo))
            padded_1T = np.zeros((1, size.width), np.int32)
            padded_1T[0, : len(todo)] = todo
            count_1 = np.array([len(todo)], np.int32)
            served = self._served(size, [slot], [everything])
            root_1, leaves = self._run(_read, served, padded_1T, count_1)
            rows = [_rows_of(leaf, 0, len(todo)) for leaf in leaves]
            if pick_root:
                news.append(int(root_1[0]))
        return self._commit(slot, len(todo), news, rows)

    def verify(self, requests: Sequence[DraftRequest]) -> list[Reply]:
        """Verifies one draft per slot in a single pass of the target.

        Raises InputError, and changes nothing, for a repeated slot, a slot without a root, a
        finished session, too many nodes, or nodes that are not a tree with distinct siblings.
        """
        sessions = [self._session(request.slot) for request in requests]
        if len({request.slot for request in requests}) < len(requests):
            raise InputError("a slot has two drafts in one pass: one at a time")
        for request, session in zip(requests, sessions, strict=True):
            if session.done or session.length != len(session.tokens) - 1:
                raise InputError("the session is over or has no root; read its prompt first")
            self._check_draft(request)
        width = max(1 + len(request.tokens) for request in requests)
        size = self._fit(_verify, sessions, width)
        roots = [session.tokens[-1] for session in sessions]
        slots = [request.slot for request in requests]
        served = self._served(size, slots, [session.tokens for session in sessions])
        tree = _tree_of([*zip(roots, requests, strict=True)], size.rows, size.width)
        emitted_AD, count_A, leaves = self._run(_verify, served, tree)
        replies = []
        for row, slot in enumerate(slots):
            count = int(count_A[row])
            rows = [_rows_of(leaf, row, count) for leaf in leaves]
            replies.append(self._commit(slot, count, emitted_AD[row, :count].tolist(), rows))
        return replies

    def _commit(self, slot: int, count: int, news: list[int], rows: list[np.ndarray]) -> Reply:
        """Adds a pass over `count` tokens to a session, with the tokens `news` that it commits."""
        session = self._session(slot)
        start, error = session.length, self._error_of(slot, session, news)
        session.tokens += news
        session.length += count
        is_full = len(session.tokens) >= session.total
        is_stop = session.tokens[-1] in session.stop_ids
        session.done = "stop" if is_stop else "length" if is_full else ""
        return Reply(start, count, news, session.done, rows, error)

    def _error_of(self, slot: int, session: Slot, news: Sequence[int]) -> str:
        """The error of a session whose logits are not finite, or ""; zeroes the slot's caches then.

        Otherwise NaN would reach the slot's next session, as 0 * NaN in its attention.
        """
        try:
            finite.check(self.target, "this prompt", len(session.tokens), news)
        except finite.NotFinite as error:
            self._caches = self._programs.run(_cleared, self._caches, np.int32(slot))
            return str(error)
        return ""

    def padded(self, num_nodes: int) -> int:
        """Padded node count of a pass over one draft of `num_nodes`; both include the root."""
        return self._fit(_verify, [], num_nodes).width

    def passes(
        self, nodes: Sequence[int] = NODES, sampled: bool = False, short: bool = True
    ) -> list[PassSize]:
        """The pass sizes for drafts of `nodes` nodes, for any number of sessions.

        `short` adds smaller sizes for short prompts. The first two sizes fit every request, so a
        server can start once these two are compiled.
        """
        most = bucket_for(NODES, self.max_nodes)
        reads = sorted({bucket(count) for count in range(1, self.chunk + 1)})
        rows = sorted({self._num_rows(count) for count in range(1, len(self._slots) + 1)})
        widths = sorted({min(bucket_for(NODES, number), most) for number in nodes})
        found = [PassSize(_read, 1, reads[-1], True), PassSize(_verify, rows[-1], most, True)]
        found += [PassSize(_read, 1, T, True) for T in reads if short]
        for batch_sampling in (False, True) if sampled else (False,):
            found += [PassSize(_verify, A, N, batch_sampling) for A in rows for N in widths]
        return list(dict.fromkeys(found))

    def compile(self, size: PassSize) -> None:
        """Compiles the program of a pass size; may run in a thread of its own, during passes."""
        A, T = size.rows, size.width
        if size.function is _read:
            given = (np.zeros((A, T), np.int32), np.full(A, T, np.int32))
        else:
            given = (_tree_of([], A, T),)
        form = jax.eval_shape(self._empty)
        self._programs.compile(size.function, form, self._served(size, [], []), *given)
        self._ready.add(size)

    def _fit(self, function: Any, sessions: Sequence[Slot], width: int) -> PassSize:
        """The pass size of some work: its exact size, else the cheapest compiled size that fits."""
        plain, count = Sampling(), max(len(sessions), 1)
        sampled = any(dataclasses.replace(s.sampling, seed=0) != plain for s in sessions)
        if function is _read:
            own = PassSize(function, 1, bucket(width), True)
        else:
            own = PassSize(function, self._num_rows(count), bucket_for(NODES, width), sampled)
        holds = lambda size: size.function is function and size.holds(count, width, sampled)
        return self._ready.cheapest(holds, lambda size: (size != own, *size.cost)) or own

    def _num_rows(self, count: int) -> int:
        """Padded batch size of a pass over `count` sessions, at most the number of slots."""
        return min(bucket_for(SESSIONS, count), len(self._slots))

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
            raise InputError("two children of a node are the same token; send each once")

    def _served(
        self, size: PassSize, slots: Sequence[int], texts: Sequence[Sequence[int]]
    ) -> PassInputs:
        """The arrays of a pass: one row per session, then padding rows for the scratch slot.

        `texts` are the sequences for penalties: all tokens committed before the pass samples.
        """
        A = size.rows
        slot_A = np.full(A, self._scratch, np.int32)
        length_A, total_A, prompt_length_A = np.zeros((3, A), np.int32)
        stop_ids_AX = np.full((A, MOST_STOPS), -1, np.int32)
        settings = [Sampling()] * A
        for row, slot in enumerate(slots):
            session = self._session(slot)
            slot_A[row], settings[row] = slot, session.sampling
            length_A[row], total_A[row] = session.length, session.total
            prompt_length_A[row] = session.prompt_length
            stop_ids_AX[row, : len(session.stop_ids)] = sorted(session.stop_ids)
        limits = StopConditions(total_A, stop_ids_AX)
        if not size.sampled:
            return PassInputs(slot_A, length_A, limits, BatchSampling())
        batch_sampling = make_batch_sampling(settings, self.target.config.vocab_size, True)
        text_AC = np.full((A, self.max_tokens), NO_TOKEN, np.int32)
        for text_C, text in zip(text_AC, texts, strict=False):
            text_C[: len(text)] = text
        return PassInputs(slot_A, length_A, limits, batch_sampling, prompt_length_A, text_AC)

    def _run(self, function: Any, *arrays: Any) -> Any:
        """Runs one pass over the slots' caches; returns its other outputs as NumPy arrays."""
        self._sound = False  # the caches are donated: a failed pass loses them
        self._caches, *found = self._programs.run(function, self._caches, *arrays)
        found = jax.tree.map(np.asarray, found)
        self._sound = True
        return found


# ---- on the host --------------------------------------------------------------------------


def _tree_of(drafts: Sequence[tuple[int, DraftRequest]], rows: int, size: int) -> Tree:
    """Trees of roots and drafts with padding nodes, then padding rows of one root."""
    tokens_BN = np.full((rows, size), NO_TOKEN, np.int32)
    parent_BN = np.zeros_like(tokens_BN)
    tokens_BN[:, 0] = 0
    for row, (root, request) in enumerate(drafts):
        count = 1 + len(request.tokens)
        tokens_BN[row, :count], parent_BN[row, 1:count] = (root, *request.tokens), request.parents
    return host_tree(tokens_BN, parent_BN)


def _rows_of(leaf: np.ndarray, row: int, count: int) -> np.ndarray:
    """The first `count` tokens of one batch row of a digest leaf, with tokens on axis 0."""
    return np.moveaxis(leaf[row], -2, 0)[:count]


# ---- on the device ------------------------------------------------------------------------


class PassInputs(NamedTuple):
    """The sessions of a pass as arrays: slots, lengths, limits and sampling settings."""

    slot_A: Array
    length_A: Array  # tokens processed
    limits: StopConditions
    batch_sampling: BatchSampling
    # Only in sampled passes: prompt lengths, and the sequences for penalties.
    prompt_length_A: Array | None = None
    text_AC: Array | None = None


def _read(
    setup: StaticConfig,
    weights: Weights,
    caches: llama.Caches,
    served: PassInputs,
    tokens_1T: Array,
    count_1: Array,
) -> tuple[llama.Caches, Array, list[Array]]:
    """Processes T given tokens of one slot; returns caches, the next token and digest leaves."""
    round_state = _taken(setup, caches, served)
    round_state, hidden_1D, tapped = step.read(setup, weights, round_state, tokens_1T, count_1)
    round_state, root_1 = step.choose_after(weights, round_state, hidden_1D, served.batch_sampling)
    leaves = _digest(setup, weights, served.length_A, tapped)
    caches = _put(setup, caches, round_state.target_caches, served, tokens_1T.shape[1])
    return caches, root_1, leaves


def _verify(
    setup: StaticConfig, weights: Weights, caches: llama.Caches, served: PassInputs, tree: Tree
) -> tuple[llama.Caches, Array, Array, list[Array]]:
    """Verifies A trees of N nodes; returns caches, emitted tokens, their counts, digest leaves."""
    N = tree.tokens_BN.shape[1]
    # A shape that covers every tree of N nodes: up to N levels, as in a chain.
    setup = setup._replace(shape=DraftShape(N, 2, N - 1) if N > 1 else DraftShape(1))
    round_state = _taken(setup, caches, served)
    found = step.verify_tree(setup, weights, round_state, served.batch_sampling, tree)
    _, count_A = step.commit(round_state, found.result, served.limits)
    leaves = _digest(setup, weights, served.length_A, found.tapped)
    caches = _put(setup, caches, found.caches, served, N)
    return caches, found.result.emitted_BD, count_A, leaves


def _cleared(
    setup: StaticConfig, weights: Weights, caches: llama.Caches, slot: Array
) -> llama.Caches:
    """The caches of all slots, with one slot set to zeros."""
    return jax.tree.map(lambda cache_SKRE: cache_SKRE.at[slot].set(0), caches)


def _digest(
    setup: StaticConfig, weights: Weights, start_A: Array, tapped: TargetActivations
) -> list[Array]:
    if setup.drafter is None:
        return []
    return jax.tree.leaves(setup.drafter.condense(weights.drafter, start_A, tapped))


def _taken(setup: StaticConfig, caches: llama.Caches, served: PassInputs) -> RoundState:
    """Gathers the caches of the pass's slots into a RoundState."""
    A = len(served.slot_A)
    token_counts = TokenCounts()
    if served.text_AC is not None:
        text = (served.text_AC, served.prompt_length_A)
        token_counts = sampling_lib.counts_in(served.batch_sampling, *text, setup.target.vocab_size)
    return RoundState(
        served.length_A,
        jnp.zeros(A, bool),
        token_counts,
        jax.tree.map(lambda cache_SKRE: cache_SKRE[served.slot_A], caches),
    )


def _put(
    setup: StaticConfig,
    caches: llama.Caches,
    worked: llama.Caches,
    served: PassInputs,
    count: int,
) -> llama.Caches:
    """Scatters the `count` rows after each session's length back into the caches of all slots."""
    position_AT = served.length_A[:, None] + jnp.arange(count)

    def put(is_ring: bool, cache_SKRE: Array, worked_AKRE: Array) -> Array:
        row_AT = position_AT % cache_SKRE.shape[2] if is_ring else position_AT
        new_AKTE = jnp.take_along_axis(worked_AKRE, row_AT[:, None, :, None], axis=2)
        at = (served.slot_A[:, None], slice(None), row_AT)
        return cache_SKRE.at[at].set(new_AKTE.swapaxes(1, 2))  # indexed axes come first

    windows = setup.target.windows_of_last(len(caches))
    return tuple(
        cache.KV(*map(functools.partial(put, window > 0), old, new))
        for window, old, new in zip(windows, caches, worked, strict=True)
    )
