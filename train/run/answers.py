"""Where answers come from: questions go in, and answers come out as they are ready.

ask(TargetQuestion) -->  an engine on this machine (here)     --> next() -> TargetAnswer
                    -->  a server somewhere (endpoint.py)     -->
"""

from __future__ import annotations

import queue
from typing import Any, NamedTuple, Protocol, Self

from moa_jax.config import Sampling
from moa_jax.data.records import Message
from moa_jax.decode.engine import Closed, Engine, Full, News, Request
from moa_jax.decode.text import detokenizer_of
from moa_jax.errors import InputError


class TargetQuestion(NamedTuple):
    """A prompt that wants an answer."""

    number: int  # of its conversation, which has one question at a time
    prompt_ids: list[int]
    messages: list[Message]  # of which the chat template made the prompt
    sampling: Sampling  # with its own seed


class TargetAnswer(NamedTuple):
    """What the target said."""

    number: int  # of the question
    token_ids: list[int]  # with the stop token
    text: str  # without special tokens, and without blanks around it
    stopped: bool  # by itself; else it has as many tokens as it may
    drifted: bool = False  # it came as a text that does not become its tokens again


class TargetRefusal(NamedTuple):
    """The reason for which one question gets no answer."""

    number: int  # of the question
    fault: str


class Answers(Protocol):
    """A source of answers; its threads live as long as the context."""

    most_asked: int  # questions that may wait for answers

    def __enter__(self) -> Self: ...

    def __exit__(self, *exception: object) -> None: ...

    def ask(self, question: TargetQuestion) -> None:
        """Takes a question and returns at once."""

    def next(self) -> TargetAnswer | TargetRefusal:
        """The next answer to any question; raises InputError where none will come."""


class LocalAnswers:
    """Answers of a target on this machine."""

    def __init__(
        self, engine: Engine, tokenizer: Any, max_new_tokens: int, stop_ids: tuple[int, ...]
    ) -> None:
        self.most_asked = engine.num_slots + 1 + engine.num_slots // 8  # no seat waits for the host
        self._engine, self._tokenizer = engine, tokenizer
        self._max_new_tokens, self._stop_ids = max_new_tokens, stop_ids
        self._ended: queue.SimpleQueue[tuple[int, list[int], News | str]] = queue.SimpleQueue()

    def __enter__(self) -> Self:
        self._engine.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._engine.close()

    def ask(self, question: TargetQuestion) -> None:
        """Takes a question; one that does not fit the engine is refused by `next`."""
        tokens: list[int] = []

        def hear(news: News) -> None:
            tokens.extend(news.token_ids)
            if news.finish:
                self._ended.put((question.number, tokens, news))

        prompt, new = tuple(question.prompt_ids), self._max_new_tokens
        try:
            self._engine.submit(Request(prompt, new, self._stop_ids, question.sampling), hear)
        except (Closed, Full):  # concern all questions
            raise
        except InputError as error:
            self._ended.put((question.number, [], str(error)))

    def next(self) -> TargetAnswer | TargetRefusal:
        """The next answer; a fault of the engine is raised."""
        number, tokens, news = self._ended.get()
        if isinstance(news, str):
            return TargetRefusal(number, news)
        if news.finish == "error":  # such as weights that hold NaN: each answer would fail
            raise InputError(news.error)
        if news.finish not in ("stop", "length"):
            raise RuntimeError(f"an answer was {news.finish}")
        return TargetAnswer(number, tokens, text_of(self._tokenizer, tokens), news.finish == "stop")


def text_of(tokenizer: Any, token_ids: list[int]) -> str:
    """An answer as people read it."""
    return detokenizer_of(tokenizer).decode(token_ids).strip()
