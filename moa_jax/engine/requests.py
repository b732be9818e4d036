"""Requests of an engine, their output, and their lifecycle.

             a slot is free            the prompt is prefilled           stop or limit
WAITING ------------------> PREFILL ------------------------> DECODE ----------------> FINISHED
   |                           |                                 |                        ^
   '---------------------------'---------------------------------'------------------------'
             cancelled, failed, or at most one token, which prefill returns
"""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moa_jax.config import Sampling
from moa_jax.decode.logprobs import LogProbs, TokenLogprob, as_list
from moa_jax.decode.row_settings import RowSettings
from moa_jax.decode.session import GREEDY
from moa_jax.errors import InputError
from moa_jax.grammar.masks import Grammar, Row


@dataclasses.dataclass(frozen=True)
class Request:
    """A prompt, and how its answer is generated."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]  # the answer includes its stop token, as in `Session`
    sampling: Sampling = GREEDY  # `seed` is that of this request
    top_logprobs: int | None = None  # None: no log-probabilities; 0: only of the chosen tokens
    # Also those of the prompt, with all top tokens without `top_logprobs`; no new tokens are fine.
    prompt_logprobs: bool = False
    # Of the answer, which ends with a token of `stop_ids`; needs `Engine.prepare_masks`.
    grammar: Grammar | None = None


class RequestOutput(NamedTuple):
    """New output of a request; the last one has a `finish_reason`."""

    token_ids: list[int]  # newly committed, in order
    logprobs: Sequence[TokenLogprob] = ()  # per token, if requested
    finish_reason: str = ""  # "", "stop", "length", "cancelled" or "error"
    error: str = ""  # one line, if `finish_reason` is "error"
    # Of the prompt's next tokens, if requested; None for the prompt's first token.
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    num_cached: int = 0  # tokens of the prompt that the prefix cache had; 0 after the prompt
    rounds: Sequence[tuple[int, int]] = ()  # tokens committed and drafted in each round

    @classmethod
    def of_failure(cls, error: Exception) -> RequestOutput:
        """The last output of a request that fails with an exception."""
        name = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
        line = f"the engine failed at this request: {name}{error}".splitlines()[0]
        return cls([], finish_reason="error", error=line)


class QueueFull(InputError):
    """The queue of waiting requests is full."""


class EngineClosed(InputError):
    """The engine accepts no more requests."""


class Phase(enum.Enum):
    """The phases of a request."""

    WAITING = enum.auto()  # in the queue
    PREFILL = enum.auto()  # has a slot; the prompt is prefilled in chunks
    DECODE = enum.auto()  # the prompt is prefilled; decode calls include the request
    FINISHED = enum.auto()  # its last output is sent


@dataclasses.dataclass(eq=False)
class RequestState:
    """An unfinished request; only the engine's thread changes it."""

    id: int
    request: Request
    on_output: Callable[[RequestOutput], None]
    settings: RowSettings
    kind: int  # of the rows of the programs that it needs: GREEDY, SAMPLED or LOGPROBS
    phase: Phase = Phase.WAITING
    slot: int = -1
    answer: list[int] = dataclasses.field(default_factory=list)  # tokens that the host has read
    num_computed: int = 0  # tokens of the prompt in the slot, calls in flight included
    num_cached: int = 0  # tokens of the prompt that the slot had at the start
    # Tokens that a lagging drafter has not processed: of the prompt without a reused prefix, and of
    # plain rounds, at most.
    num_prompt: int = 0
    num_plain: int = 0
    row: Row = dataclasses.field(default_factory=Row)  # of masked calls

    @property
    def prompt_length(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_ids)

    @property
    def length(self) -> int:
        """Tokens of prompt and answer that the host has read."""
        return self.prompt_length + len(self.answer)

    def logprobs_of(self, found: LogProbs | None, row: int, count: int) -> list[TokenLogprob]:
        """Log-probabilities of the first `count` tokens of a row, if the request has them."""
        top = self.request.top_logprobs
        return [] if top is None else as_list(found, row, slice(count), top)

    def known_tokens(self) -> list[int]:
        """The tokens whose keys and values the slot has; the newest token is not among them."""
        tokens = list(self.request.prompt_ids[: self.num_computed])
        return tokens + self.answer[:-1] if self.num_computed == self.prompt_length else tokens
