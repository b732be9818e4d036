"""The edge of the library: a loaded pair, compiled programs, prompts in and tokens out.

target = load_target("meta-llama/Meta-Llama-3-8B-Instruct")
drafter = load_drafter("huawei-noah/MOASpec-Llama-3-8B-Instruct", target)
result, = generate(target, drafter, [prompt_ids], max_new_tokens=128)
"""

from __future__ import annotations

import functools
import time
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from moa_jax.config import DraftShape
from moa_jax.drafters import DRAFTERS
from moa_jax.errors import InputError
from moa_jax.precision import matmul_precision
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.spec import step
from moa_jax.spec.step import DecodeState, Limits, Setup, Weights

DEFAULT_DEPTH = 5
SMALLEST_BUCKET = 32


class Result(NamedTuple):
    """One answer. `accept_lengths` has a round's accepted drafts + 1, the last one cut where a
    stop or the limit cut it, so `1 + sum(accept_lengths) == len(token_ids)`."""

    prompt_ids: list[int]
    token_ids: list[int]  # generated, a stop token included
    finish_reason: str  # "stop" or "length"
    accept_lengths: list[int]
    prefill_s: float
    decode_s: float  # of the whole batch that the answer was part of

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


class Session:
    """A pair ready to decode; programs compile once per (batch, prompt bucket, capacity)."""

    def __init__(
        self, target: Target, drafter: LoadedDrafter | None = None, depth: int | None = None
    ) -> None:
        """Without a drafter, or with depth 1, decoding is plain."""
        if depth is None:
            depth = (drafter and drafter.depth) or DEFAULT_DEPTH
        self.shape = DraftShape(depth if drafter else 1)
        drafter = drafter if self.shape.num_drafted else None
        functions = drafter and DRAFTERS[drafter.method].make(drafter.config, target.config)
        self.target = target
        self.setup = Setup(target.config, functions, self.shape)
        self.weights = Weights(target.params, drafter and drafter.params)
        self._prefill = jax.jit(
            functools.partial(step.prefill, self.setup), static_argnames="capacity"
        )
        self._round = jax.jit(functools.partial(_streamed_round, self.setup), donate_argnums=1)
        self._decode = jax.jit(functools.partial(step.decode, self.setup), donate_argnums=1)
        self._programs: dict[Any, Any] = {}

    @property
    def num_compiled(self) -> int:
        """Programs compiled so far."""
        return len(self._programs)

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_ids: Sequence[int] | None = None,
    ) -> list[Result]:
        """Decodes a batch of prompts to the end on the device.

        `max_new_tokens` is one number or one a prompt; `stop_ids` defaults to the target's
        end-of-text ids. Raises InputError for an empty
        prompt, ids outside the vocabulary, or more tokens than the target's positions.
        """
        state, limits, prefill_s = self._start(prompts, max_new_tokens, stop_ids)
        decode = self._compiled(self._decode, self.weights, state, limits)
        begin = time.perf_counter()
        state = jax.block_until_ready(decode(self.weights, state, limits))
        decode_s = time.perf_counter() - begin
        return self._results(prompts, state, limits, prefill_s, decode_s)

    def stream(
        self,
        prompt: Sequence[int],
        max_new_tokens: int,
        stop_ids: Sequence[int] | None = None,
    ) -> Iterator[list[int] | Result]:
        """Yields each round's new tokens as lists, and last the Result."""
        state, limits, prefill_s = self._start([prompt], max_new_tokens, stop_ids)
        advance = self._compiled(self._round, self.weights, state, limits)
        length, decode_s = len(prompt), 0.0
        yield [int(state.tokens_BC[0, length])]
        done = bool(state.done_B[0])
        while not done:
            begin = time.perf_counter()
            state, news = advance(self.weights, state, limits)
            count, done, *tokens = np.asarray(news).tolist()
            decode_s += time.perf_counter() - begin
            yield tokens[:count]
        yield self._results([prompt], state, limits, prefill_s, decode_s)[0]

    def _start(
        self,
        prompts: Sequence[Sequence[int]],
        max_new_tokens: int | Sequence[int],
        stop_ids: Sequence[int] | None,
    ) -> tuple[DecodeState, Limits, float]:
        wanted_B = np.array(self.check(prompts, max_new_tokens), np.int32)
        lengths_B = np.array([len(prompt) for prompt in prompts], np.int32)
        prompt_BT = np.zeros((len(prompts), bucket(int(lengths_B.max()))), np.int32)
        for row, prompt in zip(prompt_BT, prompts, strict=True):
            row[: len(prompt)] = prompt
        ids = self.target.generation.eos_ids if stop_ids is None else tuple(stop_ids)
        limits = Limits(
            jnp.asarray(lengths_B + wanted_B),
            jnp.array([*ids, *[-1] * (max(8, -(-len(ids) // 8) * 8) - len(ids))], jnp.int32),
        )
        capacity = prompt_BT.shape[1] + bucket(int(wanted_B.max()))
        read = (self.weights, prompt_BT, lengths_B, limits)
        prefill = self._compiled(self._prefill, *read, capacity=capacity)
        begin = time.perf_counter()
        state = jax.block_until_ready(prefill(*read))
        return state, limits, time.perf_counter() - begin

    def check(
        self, prompts: Sequence[Sequence[int]], max_new_tokens: int | Sequence[int]
    ) -> list[int]:
        """How many tokens each prompt may get; raises InputError as `generate` does."""
        vocab_size = self.target.config.vocab_size
        positions = self.target.config.max_position_embeddings
        same = isinstance(max_new_tokens, int)
        wanted_B = [max_new_tokens] * len(prompts) if same else list(max_new_tokens)
        if not prompts:
            raise InputError("no prompts: give at least one")
        for index, (prompt, wanted) in enumerate(zip(prompts, wanted_B, strict=True)):
            if wanted < 1:
                raise InputError(f"max_new_tokens {wanted}: ask for at least 1")
            if not len(prompt):
                raise InputError(f"prompt {index} is empty: give it at least one token")
            wrong = [token for token in prompt if not _is_id(token, vocab_size)]
            if wrong:
                raise InputError(
                    f"prompt {index} has the id {wrong[0]}, outside the vocabulary of "
                    f"{vocab_size}: use the target's own tokenizer"
                )
            if len(prompt) + wanted > positions:
                raise InputError(
                    f"prompt {index} has {len(prompt)} tokens and {wanted} are to follow, "
                    f"but the target has {positions} positions: shorten one of the two"
                )
        return wanted_B

    def _compiled(self, function: Any, *arguments: Any, **static: Any) -> Any:
        """The program for arguments of these shapes, compiled apart from any timing."""
        leaves, structure = jax.tree.flatten(arguments)
        shapes = tuple((leaf.shape, leaf.dtype) for leaf in leaves)
        key = (function, structure, shapes, *static.items())
        if key not in self._programs:
            with matmul_precision(self.weights.target["embed"].dtype):
                self._programs[key] = function.lower(*arguments, **static).compile()
        return self._programs[key]

    def _results(
        self,
        prompts: Sequence[Sequence[int]],
        state: DecodeState,
        limits: Limits,
        prefill_s: float,
        decode_s: float,
    ) -> list[Result]:
        fields = (state.tokens_BC, state.length_B, state.rounds_B, state.accept_lengths_BR)
        stop_ids = set(np.asarray(limits.stop_ids_X).tolist())
        results = []
        for prompt, tokens_C, length, rounds, accept_R in zip(
            prompts, *map(np.asarray, fields), strict=True
        ):
            new = tokens_C[len(prompt) : length + 1].tolist()
            reason = "stop" if new[-1] in stop_ids else "length"
            accepted = accept_R[:rounds].tolist()
            results.append(Result(list(prompt), new, reason, accepted, prefill_s, decode_s))
        return results


def generate(
    target: Target,
    drafter: LoadedDrafter | None,
    prompts: Sequence[Sequence[int]],
    max_new_tokens: int = 128,
    *,
    depth: int | None = None,
    stop_ids: Sequence[int] | None = None,
) -> list[Result]:
    """Greedy answers to a batch of prompts; keep a `Session` to decode more than once."""
    return Session(target, drafter, depth).generate(prompts, max_new_tokens, stop_ids)


def bucket(count: int) -> int:
    """The smallest power of two that holds `count`, and at least 32: few shapes, few compiles."""
    return max(SMALLEST_BUCKET, 1 << (count - 1).bit_length())


def _is_id(token: Any, vocab_size: int) -> bool:
    return isinstance(token, int | np.integer) and 0 <= token < vocab_size


def _streamed_round(
    setup: Setup, weights: Weights, state: DecodeState, limits: Limits
) -> tuple[DecodeState, jax.Array]:
    """A round, and what the host wants of it in one array: count, done, the new tokens."""
    before = state.length_B[0]
    state = step.advance(setup, weights, state, limits)
    new_N = jax.lax.dynamic_slice(state.tokens_BC[0], (before + 1,), (setup.shape.depth,))
    facts = jnp.stack([state.length_B[0] - before, state.done_B[0].astype(jnp.int32)])
    return state, jnp.concatenate([facts, new_N])
