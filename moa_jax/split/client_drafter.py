"""Client-side drafter: the caches of one session on a device without the target.

    row of the caches   0 ............ known-1 | known .... length-1 | length
    comes from          the target (`absorb`)  | the drafter itself  | the token fed next

In a round `known` equals `length`. They differ while the drafter runs ahead of the target: during
a verification, and while the connection is down.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import DraftShape, Sampling, TargetConfig
from moa_jax.decode import sampling as sampling_lib
from moa_jax.decode import step
from moa_jax.decode.draft_vocabulary import vocabulary_beside
from moa_jax.decode.programs import Programs, bucket, cache_rows_for, scalar_batch
from moa_jax.decode.sampling import BatchSampling, TokenCounts, make_batch_sampling
from moa_jax.decode.session import for_decoding, slice_of_head
from moa_jax.decode.state import RoundState, StaticConfig, Vocabulary, Weights
from moa_jax.drafters.api import NO_TOKEN, Cache, Drafter, TargetActivations, Tree
from moa_jax.errors import InputError
from moa_jax.model import llama, quantize
from moa_jax.model.topk import argmax
from moa_jax.pretrained import LoadedDrafter, Target, default_dtype, functions_of, load_borrowed
from moa_jax.split.rows import LeafSpec

Array = jax.Array

EXACT = 16  # up to this many tokens are absorbed unpadded; padding overwrites later rows
MOST_STEPS = 64  # most tokens per call of `chain`
CHUNK = 128  # most tokens per `absorb`; the server's default chunk


class ClientDrafter:
    """The drafter's caches of one session; all methods must be called from one thread."""

    def __init__(self, target: Target, drafter: LoadedDrafter, *, max_tokens: int) -> None:
        """Loads the parameters that the drafter shares with `target`.

        With a draft vocabulary in its folder, the drafter proposes these tokens only, and keeps the
        slice of the target's head for them. `target.params` may be None. Raises InputError for
        missing or damaged target files, and for a vocabulary of another target.
        """
        functions = functions_of(drafter, target.config)
        self.functions, self.cfg = functions, target.config
        held = quantize.matrices((drafter.params, target.params))
        dtype = held[0].dtype if held else default_dtype()
        if target.params is None:
            weights = quantize.format_of(drafter.params)
            shared = load_borrowed(target, functions.shared_params, dtype, weights=weights)
        else:
            shared = functions.shared_params(target.params)
        keep = set(drafter.params) - set(functions.condense_only)
        params = {name: drafter.params[name] for name in keep}
        vocabulary = vocabulary_beside(target, drafter)
        if vocabulary is not None:
            shared = shared | {"lm_head": slice_of_head(shared, vocabulary).head_DU}
        weights = for_decoding(Weights(None, params, shared=shared))
        if vocabulary is not None:
            head = Vocabulary(jnp.asarray(vocabulary.ids_U), weights.shared["lm_head"])
            weights = weights._replace(vocabulary=head)
        self._weights, self._dtype = weights, dtype
        self._treedef, self.leaves = digest_form(functions, target.config, dtype)
        self._max_tokens = max_tokens
        setup = StaticConfig(self.cfg, functions, DraftShape(1))
        self._programs = Programs(setup, (self._weights,), dtype, drafts=True)
        self.reset(Sampling())

    def reset(self, sampling: Sampling, prompt_length: int = 0) -> None:
        """Empties the caches; sets sampling settings and prompt length of the next session."""
        rows = cache_rows_for(self._max_tokens + 2 * CHUNK)  # a chunk or a draft beyond the limit
        self._cache = self.functions.init_cache(1, rows, self._dtype)
        self._sampling, self._prompt_length = sampling, prompt_length
        self._law = make_batch_sampling([sampling], self.cfg.vocab_size)

    def absorb(self, start: int, tokens: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        """Writes the target's rows of T tokens from position `start` on; rows[i] is (T, ...)."""
        T = len(tokens)
        width = T if T <= EXACT else min(bucket(T), self._max_tokens + CHUNK - start)
        padded_1T = np.zeros((1, width), np.int32)
        padded_1T[0, :T] = tokens
        leaves = [_batched(row, width, spec) for row, spec in zip(rows, self.leaves, strict=True)]
        digest = jax.tree.unflatten(self._treedef, leaves)
        self._cache = self._programs.run(
            _absorb, self._cache, padded_1T, scalar_batch(start), digest
        )

    def warm(self, counts: Sequence[int], shapes: Sequence[DraftShape] = ()) -> None:
        """Compiles the programs for replies of `counts` tokens, chains and `shapes`; resets."""
        for count in sorted({count if count <= EXACT else bucket(count) for count in counts}):
            self.absorb_nothing([0] * count)
        if self.functions.draft_one is not None:
            self.chain([0], 0, 1)
        for shape in shapes:
            self.tree([0], shape)
        self.reset(self._sampling, self._prompt_length)

    def absorb_nothing(self, tokens: Sequence[int], known: int = 0) -> None:
        """Absorbs the tokens from index `known` on, with zeros in place of the target's rows."""
        for start in range(known, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            self.absorb(start, part, [np.zeros((len(part), *leaf.shape)) for leaf in self.leaves])

    def twin(self) -> ClientDrafter:
        """A ClientDrafter with empty caches that shares the weights and programs."""
        other = copy.copy(self)
        other.reset(Sampling())
        return other

    def chain(self, text: Sequence[int], known: int, steps: int) -> list[int]:
        """Drafts up to `steps` tokens after the sequence `text`; its last token is fed first.

        Tokens before index `known` have the target's rows; earlier calls fed the tokens from
        `known` to the last but one. Sampling uses the target's settings and noise: with the same
        seed, drafter and target choose the same token wherever their distributions agree.
        Raises InputError for a drafter without `draft_one`.
        """
        if self.functions.draft_one is None:
            raise InputError("this drafter cannot draft token by token; use a tree")
        steps = min(steps, MOST_STEPS)
        given = (self._cache, self._fed(text), scalar_batch(known), np.int32(steps))
        self._cache, tokens_S = self._programs.run(_chain, *given)
        return np.asarray(tokens_S)[:steps].tolist()

    def tree(self, text: Sequence[int], shape: DraftShape) -> tuple[list[int], list[int]]:
        """Drafts a tree after the sequence `text`; its last token is the root.

        All tokens before the root must have the target's rows. Returns tokens and parents of the
        other nodes; the root's index is 0. Raises InputError for a tree that needs more than
        2 * CHUNK cache rows.
        """
        if shape.num_rows > 2 * CHUNK:
            raise InputError(
                f"a draft of depth {shape.depth} and breadth {shape.breadth} needs "
                f"{shape.num_rows} rows of a cache, and {2 * CHUNK} are kept for it; draft less"
            )
        self._cache, tree = self._programs.run(_tree, self._cache, self._fed(text), shape=shape)
        tokens_N, parent_N = np.asarray(tree.tokens_BN)[0], np.asarray(tree.parent_BN)[0]
        place = {0: 0}  # old index -> new index of the real nodes
        for node in range(1, len(tokens_N)):
            if tokens_N[node] != NO_TOKEN and int(parent_N[node]) in place:
                place[node] = len(place)
        kept = list(place)[1:]
        return tokens_N[kept].tolist(), [place[int(parent_N[node])] for node in kept]

    def _fed(self, text: Sequence[int]) -> Fed:
        """The inputs that feed the last token of the sequence `text`."""
        text_1C = None
        if self._law.penalises:
            text_1C = np.full((1, self._max_tokens), NO_TOKEN, np.int32)
            text_1C[0, : len(text)] = text
        prompt_1 = scalar_batch(self._prompt_length)
        return Fed(
            scalar_batch(text[-1]), scalar_batch(len(text) - 1), self._law, prompt_1, text_1C
        )


def digest_form(
    functions: Drafter, cfg: TargetConfig, dtype: Any
) -> tuple[Any, tuple[LeafSpec, ...]]:
    """The treedef of a drafter's digest, and the specs of its leaves for one token."""
    block, taps = cfg.block, functions.taps
    of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)
    rows = of(cfg.num_layers, 1, block.num_kv_heads, 1, block.head_dim)
    x_BTD = of(1, 1, block.hidden_size)
    tapped = TargetActivations(llama.KV(rows, rows), (x_BTD,) * len(taps.streams), x_BTD)
    params = jax.eval_shape(functions.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: of(*leaf.shape), params)
    digest = jax.eval_shape(functions.condense, params, jax.ShapeDtypeStruct((1,), "int32"), tapped)
    leaves, treedef = jax.tree.flatten(digest)
    one_token = tuple(LeafSpec((*a.shape[1:-2], a.shape[-1]), a.dtype) for a in leaves)
    return treedef, one_token


# ---- on the host --------------------------------------------------------------------------


def _batched(row: np.ndarray, width: int, spec: LeafSpec) -> np.ndarray:
    """Pads rows (T, ..., D) to `width` tokens and returns the leaf (1, ..., width, D)."""
    padded = np.zeros((width, *spec.shape), np.float32)
    padded[: len(row)] = row
    return np.moveaxis(padded, 0, -2)[None].astype(spec.dtype)


# ---- on the device ------------------------------------------------------------------------


class Fed(NamedTuple):
    """The token to feed next, its cache row, and the inputs of the sampling after it."""

    token_1: Array
    length_1: Array
    batch_sampling: BatchSampling
    prompt_length_1: Array
    text_1C: Array | None  # the whole sequence, if the settings have penalties

    def state(self, setup: StaticConfig, cache: Cache) -> RoundState:
        """A RoundState without target caches."""
        token_counts = TokenCounts()
        if self.text_1C is not None:
            text = (self.text_1C, self.prompt_length_1, setup.target.vocab_size)
            token_counts = sampling_lib.counts_in(self.batch_sampling, *text)
        return RoundState(self.length_1, jnp.zeros(1, bool), token_counts, draft_cache=cache)


def _absorb(
    setup: StaticConfig,
    weights: Weights,
    cache: Cache,
    tokens_1T: Array,
    start_1: Array,
    digest: Any,
) -> Cache:
    given = (weights.drafter, weights.shared, cache, tokens_1T, start_1, digest)
    return setup.drafter.extend(*given)


def _tree(
    setup: StaticConfig, weights: Weights, cache: Cache, fed: Fed, shape: DraftShape
) -> tuple[Cache, Tree]:
    setup = setup._replace(shape=shape)
    tree, cache = step.propose(
        setup, weights, fed.state(setup, cache), fed.batch_sampling, fed.token_1
    )
    return cache, tree


def _chain(
    setup: StaticConfig, weights: Weights, cache: Cache, fed: Fed, known_1: Array, steps: Array
) -> tuple[Cache, Array]:
    """Drafts tokens (MOST_STEPS,); only the first `steps` are valid."""
    own = setup.drafter.draft_ids
    ids_U = weights.vocabulary.ids_U if weights.vocabulary else own and jnp.array(own)
    vocabulary = None if ids_U is None else (ids_U, setup.target.vocab_size)

    def feed(count: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens_S, token_1, cache, token_counts = carry
        at_1 = fed.length_1 + count
        given = (weights.drafter, weights.shared, cache, token_1, at_1, known_1)
        logits_1U, cache = setup.drafter.draft_one(*given)
        logits_11U = logits_1U.astype(jnp.float32)[:, None]
        given = (fed.batch_sampling, logits_11U, token_counts.each(), at_1[:, None] + 1, vocabulary)
        score_11U = sampling_lib.perturbed_logits(*given)
        best_1 = argmax(score_11U[:, 0])
        token_1 = (best_1 if ids_U is None else ids_U[best_1]).astype(jnp.int32)
        token_counts = sampling_lib.add_answer_tokens(token_counts, token_1[:, None])
        return tokens_S.at[count].set(token_1[0]), token_1, cache, token_counts

    token_counts = fed.state(setup, cache).token_counts
    start = (jnp.zeros(MOST_STEPS, jnp.int32), fed.token_1, cache, token_counts)
    tokens_S, _, cache, _ = jax.lax.fori_loop(0, steps, feed, start)
    return cache, tokens_S
