"""The drafter's half: what a device without the target keeps of one session, and drafts with.

    row of the caches   0 ............ known-1 | known .... length-1 | length
    comes from          the target (`absorb`)  | the drafter itself  | the token fed next

In a round `known` and `length` are alike. They part where the drafter goes on without a word of
the target: while a verification is under way, and when there is no connection.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import DraftShape, Sampling, TargetConfig
from moa_jax.decode import sample, step
from moa_jax.decode.programs import Programs, one
from moa_jax.decode.sample import Law
from moa_jax.decode.session import bucket, for_decoding, law_of
from moa_jax.decode.step import DecodeState, Setup, Weights
from moa_jax.drafters.api import NOTHING, Cache, Drafter, Params, Shared, Tapped, Tree
from moa_jax.errors import InputError
from moa_jax.model import llama
from moa_jax.pretrained import (
    LoadedDrafter,
    Target,
    default_dtype,
    functions_of,
    load_borrowed,
)
from moa_jax.split.rows import LeafSpec

Array = jax.Array

EXACT = 16  # up to as many tokens are absorbed without padding, which would hide later rows
MOST_STEPS = 64  # tokens of one call of `chain`
CHUNK = 128  # tokens whose rows come at once, as a rule


class DraftHalf:
    """One session's caches on the drafter's side; all methods belong to one thread."""

    def __init__(self, target_: Target, drafter: LoadedDrafter, *, max_tokens: int) -> None:
        """Loads what the drafter borrows of `target_`, whose own weights need not be there.

        Raises InputError for a target whose files are missing or damaged.
        """
        functions = functions_of(drafter, target_.config)
        self.functions, self.cfg = functions, target_.config
        weights = jax.tree.leaves((drafter.params, target_.params))
        dtype = weights[0].dtype if weights else default_dtype()
        if target_.params is None:
            shared = load_borrowed(target_, functions.borrow, dtype)
        else:
            shared = functions.borrow(target_.params)
        shared = for_decoding(shared) if "embed" in shared else shared
        keep = set(drafter.params) - set(functions.digest_only)
        self._params = {name: drafter.params[name] for name in keep}
        self._shared, self._dtype = shared, dtype
        self._treedef, self.leaves = digest_form(functions, target_.config, dtype)
        self._max_tokens = max_tokens
        self._programs = Programs((functions, self.cfg), (self._params, shared), dtype)
        self.reset(Sampling())

    def reset(self, sampling: Sampling) -> None:
        """Forgets the session; the next one chooses its tokens by `sampling`."""
        rows = self._max_tokens + 2 * CHUNK
        self._cache = self.functions.init_cache(1, rows, self._dtype)
        self._sampling, self._law = sampling, law_of([sampling], self.cfg.vocab_size)

    @property
    def num_params(self) -> int:
        """Numbers held of drafter and target."""
        return sum(leaf.size for leaf in jax.tree.leaves((self._params, self._shared)))

    def absorb(self, start: int, tokens: Sequence[int], rows: Sequence[np.ndarray]) -> None:
        """Takes in the target's rows of the tokens at `start` and after it; rows[i] (T, ...)."""
        T = len(tokens)
        width = T if T <= EXACT else min(bucket(T), self._max_tokens + CHUNK - start)
        padded_1T = np.zeros((1, width), np.int32)
        padded_1T[0, :T] = tokens
        leaves = [_batched(row, width, spec) for row, spec in zip(rows, self.leaves, strict=True)]
        digest = jax.tree.unflatten(self._treedef, leaves)
        given = (self._cache, padded_1T, one(start), digest)
        (self._cache,) = self._programs.run(_absorb, (), *given)

    def warm(self, counts: Sequence[int], shapes: Sequence[DraftShape] = ()) -> None:
        """Compiles what replies of so many tokens, chains and these trees need; then forgets."""
        for count in sorted({count if count <= EXACT else bucket(count) for count in counts}):
            self.absorb_nothing([0] * count)
        if self.functions.go_on is not None:
            self.chain([0], 0, 1)
        for shape in shapes:
            self.tree([0], shape)
        self.reset(self._sampling)

    def absorb_nothing(self, tokens: Sequence[int], known: int = 0) -> None:
        """Takes in the first tokens of a text; from `known` on the target says nothing of them."""
        for start in range(known, len(tokens), CHUNK):
            part = tokens[start : start + CHUNK]
            self.absorb(start, part, [np.zeros((len(part), *leaf.shape)) for leaf in self.leaves])

    def twin(self) -> DraftHalf:
        """Another session's caches, with the same weights and programs."""
        other = copy.copy(self)
        other.reset(Sampling())
        return other

    def chain(self, text: Sequence[int], known: int, steps: int) -> list[int]:
        """Drafts up to `steps` tokens after a text, whose last token is fed first.

        Tokens before `known` have the target's rows; those from there to the last were fed
        by earlier calls. Chosen as the target would choose by its own law and noise, so that
        the same seed gives the same tokens where drafter and target agree.
        """
        if self.functions.go_on is None:
            raise InputError("this drafter cannot draft token by token: use a tree")
        steps = min(steps, MOST_STEPS)
        given = (self._cache, *self._guided(text), np.int32(known), np.int32(steps))
        self._cache, tokens_S = self._programs.run(_chain, (), *given)
        return np.asarray(tokens_S)[:steps].tolist()

    def tree(self, text: Sequence[int], shape: DraftShape) -> tuple[list[int], list[int]]:
        """Drafts a tree behind a text that is known but for its last token, the root.

        Returns tokens and parents of the nodes behind the root, whose index is 0.
        """
        given = (self._cache, *self._guided(text))
        self._cache, tree = self._programs.run(_tree, (shape,), *given)
        return _nodes(tree)

    def _guided(self, text: Sequence[int]) -> tuple[Any, ...]:
        """The token to feed, its row, and what its law depends on."""
        seen_1C = None
        if self._law.repetition_B is not None:
            seen_1C = np.full((1, self._max_tokens), NOTHING, np.int32)
            seen_1C[0, : len(text)] = text
        return one(text[-1]), one(len(text) - 1), self._law, seen_1C


def digest_form(
    functions: Drafter, cfg: TargetConfig, dtype: Any
) -> tuple[Any, tuple[LeafSpec, ...]]:
    """The structure of a drafter's digest, and its leaves for one token."""
    block, taps = cfg.block, functions.taps
    of = lambda *shape: jax.ShapeDtypeStruct(shape, dtype)  # noqa: E731
    rows = of(cfg.num_layers, 1, block.num_kv_heads, 1, block.head_dim)
    x_BTD = of(1, 1, block.hidden_size)
    tapped = Tapped(llama.KV(rows, rows), (x_BTD,) * len(taps.streams), x_BTD)
    params = jax.eval_shape(functions.init, jax.random.key(0))
    params = jax.tree.map(lambda leaf: of(*leaf.shape), params)
    digest = jax.eval_shape(functions.digest, params, jax.ShapeDtypeStruct((1,), "int32"), tapped)
    leaves, treedef = jax.tree.flatten(digest)
    one_token = tuple(LeafSpec((*a.shape[1:-2], a.shape[-1]), a.dtype) for a in leaves)
    return treedef, one_token


# ---- on the host --------------------------------------------------------------------------


def _batched(row: np.ndarray, width: int, spec: LeafSpec) -> np.ndarray:
    """A leaf (1, ..., width, D) from its tokens' rows (T, ..., D)."""
    padded = np.zeros((width, *spec.shape), np.float32)
    padded[: len(row)] = row
    return np.moveaxis(padded, 0, -2)[None].astype(spec.dtype)


def _nodes(tree: Tree) -> tuple[list[int], list[int]]:
    """The nodes that are there, root left out, and their parents' new places."""
    tokens_N, parent_N = np.asarray(tree.tokens_BN)[0], np.asarray(tree.parent_BN)[0]
    place = {0: 0}
    for node in range(1, len(tokens_N)):
        if tokens_N[node] != NOTHING and int(parent_N[node]) in place:
            place[node] = len(place)
    kept = list(place)[1:]
    return tokens_N[kept].tolist(), [place[int(parent_N[node])] for node in kept]


# ---- on the device ------------------------------------------------------------------------


def _absorb(
    functions: Drafter,
    cfg: TargetConfig,
    params: Params,
    shared: Shared,
    cache: Cache,
    tokens_1T: Array,
    start_1: Array,
    digest: Any,
) -> tuple[Cache]:
    return (functions.extend(params, shared, cache, tokens_1T, start_1, digest),)


def _seen(cfg: TargetConfig, law: Law, text_1C: Array | None) -> Array | None:
    if law.repetition_B is None:
        return None
    blank_1V = jnp.zeros((1, cfg.vocab_size), bool)
    return sample.mark(blank_1V, text_1C[:, None])[:, 0]


def _tree(
    shape: DraftShape,
    functions: Drafter,
    cfg: TargetConfig,
    params: Params,
    shared: Shared,
    cache: Cache,
    root_1: Array,
    length_1: Array,
    law: Law,
    text_1C: Array | None,
) -> tuple[Cache, Tree]:
    setup, weights = Setup(cfg, functions, shape), Weights(None, params)
    seen_1V, none_1 = _seen(cfg, law, text_1C), jnp.zeros(1, bool)
    state = DecodeState(None, length_1, none_1, None, cache, None, None, None, seen_1V)
    guide = step.guide(setup, weights, state, law)
    tree, cache = functions.propose(params, shared, cache, root_1, length_1, shape, guide)
    return cache, tree


def _chain(
    functions: Drafter,
    cfg: TargetConfig,
    params: Params,
    shared: Shared,
    cache: Cache,
    token_1: Array,
    length_1: Array,
    law: Law,
    text_1C: Array | None,
    known: Array,
    steps: Array,
) -> tuple[Cache, Array]:
    """Tokens (MOST_STEPS,), of which the first `steps` count."""
    ids_U = None if functions.draft_ids is None else jnp.array(functions.draft_ids)
    known_1 = known[None].astype(jnp.int32)

    def feed(count: Array, carry: tuple[Any, ...]) -> tuple[Any, ...]:
        tokens_S, token_1, cache, seen_1V = carry
        at_1 = length_1 + count
        logits_1U, cache = functions.go_on(params, shared, cache, token_1, at_1, known_1)
        score_1U = _scores(law, logits_1U, seen_1V, at_1 + 1, ids_U, cfg.vocab_size)
        best_1 = jnp.argmax(score_1U, axis=-1)
        token_1 = (best_1 if ids_U is None else ids_U[best_1]).astype(jnp.int32)
        if seen_1V is not None:
            seen_1V = seen_1V.at[0, token_1[0]].set(True)
        return tokens_S.at[count].set(token_1[0]), token_1, cache, seen_1V

    blank_S = jnp.zeros(MOST_STEPS, jnp.int32)
    start = (blank_S, token_1, cache, _seen(cfg, law, text_1C))
    tokens_S, _, cache, _ = jax.lax.fori_loop(0, steps, feed, start)
    return cache, tokens_S


def _scores(
    law: Law,
    logits_1U: Array,
    seen_1V: Array | None,
    position_1: Array,
    ids_U: Array | None,
    vocab_size: int,
) -> Array:
    """What the next token maximises, by the drafter's law and the target's noise."""
    narrow = (lambda row_V: row_V) if ids_U is None else (lambda row_V: row_V[..., ids_U])
    seen_11U = None if seen_1V is None else narrow(seen_1V)[:, None]
    after_11U = sample.after(law, logits_1U.astype(jnp.float32)[:, None], seen_11U)
    if law.key_B is None:
        return after_11U[:, 0]
    noise_11V = sample.gumbel(law, sample.TARGET, position_1[:, None], vocab_size)
    return (after_11U + narrow(noise_11V))[:, 0]
