"""The edge of the library: a loaded pair, compiled programs, prompts in and tokens out.

target = load_target("meta-llama/Meta-Llama-3-8B-Instruct")
drafter = load_drafter("huawei-noah/MOASpec-Llama-3-8B-Instruct", target)
result, = generate(target, drafter, [prompt_ids], max_new_tokens=128)
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import DraftShape, Sampling
from moa_jax.decode import step
from moa_jax.decode.programs import Programs, bucket, cache_rows_for
from moa_jax.decode.room import Room
from moa_jax.decode.sample import Law, is_id, law_of
from moa_jax.decode.step import NEVER, DecodeState, Limits, Setup, Weights
from moa_jax.decode.vocabulary import DraftVocabulary
from moa_jax.drafters.api import Drafter
from moa_jax.errors import InputError
from moa_jax.pretrained import LoadedDrafter, Target, functions_of

GREEDY = Sampling()
DEFAULT_DEPTH = 5
ROUNDS_BETWEEN_LOOKS = 8  # at an answer's text, for stops that the device does not know


class Result(NamedTuple):
    """One answer. `accept_lengths` has a round's accepted drafts + 1, the last one cut where a
    stop or the limit cut it, so `1 + sum(accept_lengths) == len(token_ids)`."""

    prompt_ids: list[int]
    token_ids: list[int]  # generated, a stop token included
    finish_reason: str  # "stop" or "length"
    accept_lengths: list[int]
    prefill_s: float
    decode_s: float  # of the whole batch that the answer was part of
    drafted: list[int]  # nodes that each round proposed, the root apart

    @property
    def rounds(self) -> int:
        return len(self.accept_lengths)

    @property
    def tau(self) -> float:
        """Tokens committed per target verification; nan before any round."""
        return sum(self.accept_lengths) / self.rounds if self.rounds else float("nan")

    @property
    def tokens_per_s(self) -> float:
        """Generated tokens over decoding time, prefill and its token left out."""
        return sum(self.accept_lengths) / self.decode_s if self.decode_s else float("nan")


# (generated tokens) -> how many of them to keep if they hold a stop, else None
StopWhen = Callable[[list[int]], int | None]


class Session:
    """A pair ready to decode; programs compile once per (batch, prompt bucket, capacity)."""

    def __init__(
        self,
        target: Target,
        drafter: LoadedDrafter | None = None,
        shape: DraftShape | None = None,
        *,
        vocabulary: DraftVocabulary | None = None,
        cache_rows: int | None = None,
        choose: Callable[..., jax.Array] | None = None,
    ) -> None:
        """Without a drafter, or with depth 1, decoding is plain; `shape` defaults to a chain.

        `vocabulary` narrows what is drafted. `cache_rows` fixes the caches' size, rounded up to
        a multiple of 128, so that one program serves all lengths. `choose` replaces the target's
        choice of tokens, to price a round. Raises InputError for a tree wider than the vocabulary.
        """
        if shape is None:
            shape = DraftShape((drafter and drafter.depth) or DEFAULT_DEPTH)
        self.shape = shape if drafter else DraftShape(1)
        drafter = drafter if self.shape.num_drafted else None
        functions = drafter and functions_of(drafter, target.config)
        if vocabulary and functions and functions.own_head:
            raise InputError(
                f"a drafter of kind {drafter.method} has a head of its own: leave out the draft "
                "vocabulary, which is a slice of the target's"
            )
        _check_breadth(self.shape, target, functions, vocabulary)
        self.target = target
        self.setup = Setup(target.config, functions, self.shape, choose)
        head = _slice_of_head(target.params, vocabulary) if drafter and vocabulary else None
        weights = Weights(for_decoding(target.params), drafter and drafter.params, head)
        self.cache_rows = cache_rows and cache_rows_for(cache_rows)
        self._programs = Programs((self.setup,), (weights,), target.params["embed"].dtype)

    @property
    def weights(self) -> Weights:
        """The parameters of both models; others of the same shapes may take their place."""
        return self._programs.weights[0]

    @weights.setter
    def weights(self, weights: Weights) -> None:
        self._programs.weights = (weights,)

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_ids: Sequence[int] | Sequence[Sequence[int]] | None = None,
        sampling: Sampling | Sequence[Sampling] = GREEDY,
        stop_when: StopWhen | None = None,
    ) -> list[Result]:
        """Decodes a batch of prompts to the end on the device.

        `max_new_tokens` is one number, or one for each prompt. `stop_ids` is one list, or one for
        each prompt; the default is the target's end-of-text ids. With a single `sampling`, row
        i gets its seed plus i. Every few rounds `stop_when` is given the tokens of a row, and
        may say where to cut it. Raises InputError for an empty prompt, ids outside the
        vocabulary, more tokens than the target's positions, or a cache too small for them.
        """
        state, limits, law, prefill_s = self.start(prompts, max_new_tokens, stop_ids, sampling)
        decode = self.loop(state, limits, law)
        begin = time.perf_counter()
        kept: dict[int, int] = {}
        while True:
            pause = NEVER if stop_when is None else int(state.rounds_B.max()) + ROUNDS_BETWEEN_LOOKS
            limits = limits._replace(pause=jnp.int32(pause))
            state = jax.block_until_ready(decode(self.weights, state, limits, law))
            if stop_when is not None:
                state = _look(prompts, state, stop_when, kept)
            if stop_when is None or bool(state.now.done_B.all()):
                break
        decode_s = time.perf_counter() - begin
        return self._results(prompts, state, limits, prefill_s, decode_s, kept)

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_ids: Sequence[int] | None = None,
        sampling: Sampling = GREEDY,
        stop_when: StopWhen | None = None,
    ) -> Iterator[list[int] | Result]:
        """Yields each round's new tokens as lists, and last the Result."""
        state, limits, law, prefill_s = self.start([prompt], max_new_tokens, stop_ids, sampling)
        advance = self._programs.compile(_streamed_round, state, limits, law)
        length, decode_s = len(prompt), 0.0
        found = [int(state.tokens_BC[0, length])]
        kept: dict[int, int] = {}
        done, shown = bool(state.now.done_B[0]), 0
        while True:
            cut = stop_when(found) if stop_when else None
            if cut is not None:
                kept[0] = cut
                found = found[:cut]
            yield found[shown:]
            shown = len(found)
            if done or cut is not None:
                break
            begin = time.perf_counter()
            state, news = advance(self.weights, state, limits, law)
            count, done, *tokens = np.asarray(news).tolist()
            decode_s += time.perf_counter() - begin
            found = found + tokens[:count]
        yield self._results([prompt], state, limits, prefill_s, decode_s, kept)[0]

    def start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_ids: Sequence[int] | Sequence[Sequence[int]] | None,
        sampling: Sampling | Sequence[Sampling],
    ) -> tuple[DecodeState, Limits, Law, float]:
        """Reads prompts and commits their first tokens; returns also the seconds that this took.

        The arguments are those of `generate`.
        """
        wanted_B = np.array(self.check(prompts, max_new_tokens), np.int32)
        lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
        prompt_BT = np.zeros((len(prompts), bucket(int(lengths_B.max()))), np.int32)
        for row, prompt in zip(prompt_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        total_B = jnp.asarray(lengths_B + wanted_B)
        limits = Limits(total_B, self._stops(len(prompts), stop_ids))
        law = law_of(rows_of(sampling, len(prompts)), self.target.config.vocab_size)
        num_rows = self.shape.num_rows
        rows = self.cache_rows
        if rows is None:
            rows = cache_rows_for(prompt_BT.shape[1] + bucket(int(wanted_B.max())) + num_rows)
        arrays = (prompt_BT, lengths_B, limits, law)
        static = {"donate": False, "capacity": rows - num_rows}
        prefill = self._programs.compile(step.prefill, *arrays, **static)
        begin = time.perf_counter()
        state = jax.block_until_ready(prefill(self.weights, *arrays))
        return state, limits, law, time.perf_counter() - begin

    def loop(self, state: DecodeState, limits: Limits, law: Law) -> jax.stages.Compiled:
        """The compiled loop of rounds: (weights, state, limits, law) -> state, which it donates."""
        return self._programs.compile(step.decode, state, limits, law)

    def _stops(
        self, batch: int, stop_ids: Sequence[int] | Sequence[Sequence[int]] | None
    ) -> jax.Array:
        """Stop ids (B, X), padded with -1 so that their number seldom compiles anew."""
        ids = self.target.generation.eos_ids if stop_ids is None else stop_ids
        one_each = len(ids) and not isinstance(ids[0], int | np.integer)
        rows = [list(row) for row in ids] if one_each else [list(ids)] * batch
        if len(rows) != batch:
            raise InputError(f"{len(rows)} lists of stop ids for {batch} prompts: give one each")
        width = max(8, *(-(-len(row) // 8) * 8 for row in rows))
        return jnp.array([row + [-1] * (width - len(row)) for row in rows], jnp.int32)

    def check(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]
    ) -> list[int]:
        """How many tokens each prompt may get; raises InputError as `generate` does."""
        vocab_size = self.target.config.vocab_size
        positions = self.target.config.max_position_embeddings
        room = Room(positions, self.cache_rows, self.shape.num_rows)
        same = isinstance(max_new_tokens, int)
        wanted_B = [max_new_tokens] * len(prompts) if same else list(max_new_tokens)
        if not prompts:
            raise InputError("no prompts: give at least one")
        if len(wanted_B) != len(prompts):
            raise InputError(f"{len(wanted_B)} lengths for {len(prompts)} prompts: give one each")
        for index, (prompt, wanted) in enumerate(zip(prompts, wanted_B, strict=True)):
            if wanted < 1:
                raise InputError(f"max_new_tokens {wanted}: ask for at least 1")
            if not len(prompt):
                raise InputError(f"prompt {index} is empty: give it at least one token")
            wrong = [token for token in prompt if not is_id(token, vocab_size)]
            if wrong:
                raise InputError(
                    f"prompt {index} has the id {wrong[0]}, outside the vocabulary of "
                    f"{vocab_size}: use the target's own tokenizer"
                )
            room.check(index, len(prompt), wanted)
        return wanted_B

    def _results(
        self,
        prompts: Sequence[Sequence[int]],
        state: DecodeState,
        limits: Limits,
        prefill_s: float,
        decode_s: float,
        kept: dict[int, int],
    ) -> list[Result]:
        fields = (state.tokens_BC, state.now.length_B, state.rounds_B, limits.stop_ids_BX)
        counts = (state.accept_lengths_BR, state.drafted_BR)
        results = []
        for index, (prompt, tokens_C, length, rounds, stop_X, accept_R, drafted_R) in enumerate(
            zip(prompts, *map(np.asarray, (*fields, *counts)), strict=True)
        ):
            new = tokens_C[len(prompt) : length + 1].tolist()
            accepted = accept_R[:rounds].tolist()
            stopped = new[-1] in stop_X.tolist()
            if index in kept:
                new, stopped = new[: kept[index]], True
                accepted = _cut(accepted, len(new) - 1)
            drafted = drafted_R[: len(accepted)].tolist()
            reason = "stop" if stopped else "length"
            results.append(
                Result(list(prompt), new, reason, accepted, prefill_s, decode_s, drafted)
            )
        return results


def generate(
    target: Target,
    drafter: LoadedDrafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    *,
    shape: DraftShape | None = None,
    stop_ids: Sequence[int] | None = None,
    sampling: Sampling | Sequence[Sampling] = GREEDY,
) -> list[Result]:
    """Answers to a batch of prompts; keep a `Session` to decode more than once."""
    session = Session(target, drafter, shape)
    return session.generate(prompts, max_new_tokens, stop_ids, sampling)


def rows_of(sampling: Sampling | Sequence[Sampling], batch: int) -> list[Sampling]:
    """The settings of each row; with a single `Sampling`, row i gets its seed plus i."""
    if isinstance(sampling, Sampling):
        return [row_of(sampling, row) for row in range(batch)]
    if len(sampling) != batch:
        raise InputError(f"{len(sampling)} samplings for {batch} prompts: give one each")
    return list(sampling)


def row_of(sampling: Sampling, row: int) -> Sampling:
    """The same law with the row's own seed."""
    return dataclasses.replace(sampling, seed=(sampling.seed + row) % (1 << 32))


def _look(
    prompts: Sequence[Sequence[int]],
    state: DecodeState,
    stop_when: StopWhen,
    kept: dict[int, int],
) -> DecodeState:
    """Ends the rows in which a stop is found, and notes how many tokens they keep."""
    tokens_BC, length_B = np.asarray(state.tokens_BC), np.asarray(state.now.length_B)
    done_B = np.array(state.now.done_B)
    for row, prompt in enumerate(prompts):
        cut = stop_when(tokens_BC[row, len(prompt) : length_B[row] + 1].tolist())
        if cut is not None:
            kept.setdefault(row, cut)
            done_B[row] = True
    return state._replace(now=state.now._replace(done_B=jnp.asarray(done_B)))


def _cut(accept_lengths: list[int], total: int) -> list[int]:
    """The accept lengths of the rounds that gave the first `total` tokens; the last one is cut."""
    rounds = []
    for length in accept_lengths:
        if total > 0:
            rounds.append(min(length, total))
        total -= length
    return rounds


def _check_breadth(
    shape: DraftShape,
    target: Target,
    drafter: Drafter | None,
    vocabulary: DraftVocabulary | None,
) -> None:
    """Raises InputError where a node has more children than there are tokens to draft."""
    if vocabulary is not None:
        size = len(vocabulary.ids_U)
    else:
        own = drafter.draft_ids if drafter else None
        size = target.config.vocab_size if own is None else len(own)
    if shape.most_children > size:
        raise InputError(
            f"breadth {shape.most_children} is more than the {size} tokens that can be drafted: "
            "choose a smaller one"
        )


def for_decoding(params: Any) -> Any:
    """The weights; on a CPU, a tied head gets an array (D, V) of its own.

    There a product of several tokens with the table (V, D) would first transpose the table, which
    costs more than the product itself.
    """
    if "lm_head" in params or jax.default_backend() != "cpu":
        return params
    return params | {"lm_head": jnp.asarray(params["embed"].T)}


def _slice_of_head(params: Any, vocabulary: DraftVocabulary) -> step.Vocabulary:
    """The part of the target's head that the drafter reads, once and for all."""
    ids_U = jnp.asarray(vocabulary.ids_U, jnp.int32)
    if "lm_head" in params:
        return step.Vocabulary(ids_U, params["lm_head"][:, ids_U])
    return step.Vocabulary(ids_U, params["embed"][ids_U].T)


def _streamed_round(
    setup: Setup, weights: Weights, state: DecodeState, limits: Limits, law: Law
) -> tuple[DecodeState, jax.Array]:
    """A round, and what the host wants of it in one array: count, done, the new tokens."""
    before = state.now.length_B[0]
    state = step.advance(setup, weights, state, limits, law)
    new_D = jax.lax.dynamic_slice(state.tokens_BC[0], (before + 1,), (setup.shape.levels,))
    facts = jnp.stack([state.now.length_B[0] - before, state.now.done_B[0].astype(jnp.int32)])
    return state, jnp.concatenate([facts, new_D])
