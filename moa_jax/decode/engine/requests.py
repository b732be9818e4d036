"""What goes into an engine and what is heard of it."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

from moa_jax.config import Sampling
from moa_jax.decode.engine.seats import Text
from moa_jax.decode.logprobs import TokenLogprob
from moa_jax.decode.session import GREEDY
from moa_jax.errors import InputError


@dataclasses.dataclass(frozen=True)
class Request:
    """One answer that is wanted."""

    prompt_ids: tuple[int, ...]
    max_new_tokens: int
    stop_ids: tuple[int, ...]  # kept in the answer, as `Session` keeps them
    sampling: Sampling = GREEDY  # with its own seed
    top_logprobs: int | None = None  # None: none; 0: of the chosen tokens; k: and the k likeliest
    prompt_logprobs: bool = False  # those of the prompt as well; `max_new_tokens` may be 0 then

    @property
    def takes_seat(self) -> bool:
        """Whether rounds follow; the first token comes with the prompt."""
        return self.max_new_tokens > 1


class News(NamedTuple):
    """What a request's listener hears; the last of its news has a `finish`."""

    token_ids: list[int]  # newly committed, in order
    logprobs: Sequence[TokenLogprob] = ()  # of each token, if they were asked for
    finish: str = ""  # "", "stop", "length", "cancelled" or "error"
    error: str = ""  # a line for people, with "error"
    # Of the prompt's next tokens, if they were asked for; nothing precedes the first
    prompt_logprobs: Sequence[TokenLogprob | None] = ()


CANCELLED = News([], finish="cancelled")


def failed(error: Exception) -> News:
    """The end of an answer, in a line for people who cannot mend it."""
    name = "" if isinstance(error, InputError) else f"{type(error).__name__}: "
    line = f"the engine failed at this request: {name}{error}".splitlines()[0]
    return News([], finish="error", error=line)


class Ticket(NamedTuple):
    """A request that was taken."""

    id: int


class Full(InputError):
    """As many requests wait as may."""


class Closed(InputError):
    """The engine takes no requests any more."""


@dataclasses.dataclass(eq=False)
class Task:
    """A request under way, as the engine knows it."""

    id: int
    request: Request
    hear: Callable[[News], None]
    text: Text
    num_scored: int = 0  # tokens of the prompt whose log-probabilities were told
