"""Sources of answers: questions go in, and answers come out in order of completion.

ask(TargetQuestion) -->  an engine on this machine (here)     --> next() -> TargetAnswer
                    -->  a server somewhere (endpoint.py)     -->
"""

from __future__ import annotations

import queue
from typing import Any, NamedTuple, Protocol

from moa_jax.config import Sampling
from moa_jax.decode.detokenize import detokenizer_of
from moa_jax.engine import Engine, EngineClosed, QueueFull, Request, RequestOutput
from moa_jax.errors import InputError


class TargetQuestion(NamedTuple):
    """A prompt for the target to answer."""

    number: int  # of its conversation, which has at most one open question
    prompt_ids: list[int]
    sampling: Sampling  # with the question's own seed


class TargetAnswer(NamedTuple):
    """The target's answer to a question."""

    number: int  # of the question
    token_ids: list[int]  # stop token included
    text: str  # stripped, without special tokens
    stopped: bool  # False: the answer was cut at the token limit


class TargetRefusal(NamedTuple):
    """The reason why a question gets no answer."""

    number: int  # of the question
    fault: str


class Answers(Protocol):
    """A source of answers."""

    most_asked: int  # most open questions at a time

    def ask(self, question: TargetQuestion) -> None:
        """Submits a question and returns at once."""

    def next(self) -> TargetAnswer | TargetRefusal:
        """Waits for the next answer to any question; raises InputError if no answer will come."""


class LocalAnswers:
    """Answers of a target on this machine."""

    def __init__(
        self, engine: Engine, tokenizer: Any, max_new_tokens: int, stop_ids: tuple[int, ...]
    ) -> None:
        self.most_asked = engine.num_slots + 1 + engine.num_slots // 8  # no slot waits for the host
        self._engine, self._tokenizer = engine, tokenizer
        self._max_new_tokens, self._stop_ids = max_new_tokens, stop_ids
        self._ended: queue.SimpleQueue[tuple[int, list[int], RequestOutput | str]] = (
            queue.SimpleQueue()
        )

    def ask(self, question: TargetQuestion) -> None:
        """Submits a question; `next` returns a refusal if the question does not fit the engine."""
        tokens: list[int] = []

        def on_output(output: RequestOutput) -> None:
            tokens.extend(output.token_ids)
            if output.finish_reason:
                self._ended.put((question.number, tokens, output))

        prompt, new = tuple(question.prompt_ids), self._max_new_tokens
        try:
            self._engine.submit(Request(prompt, new, self._stop_ids, question.sampling), on_output)
        except (EngineClosed, QueueFull):  # these concern all questions
            raise
        except InputError as error:
            self._ended.put((question.number, [], str(error)))

    def next(self) -> TargetAnswer | TargetRefusal:
        """Waits for the next answer or refusal.

        Raises InputError if the engine fails a request, RuntimeError if the engine cancels one.
        """
        number, tokens, output = self._ended.get()
        if isinstance(output, str):
            return TargetRefusal(number, output)
        if output.finish_reason == "error":  # such as NaN in the weights, which fails every answer
            raise InputError(output.error)
        if output.finish_reason not in ("stop", "length"):
            raise RuntimeError(f"an answer was {output.finish_reason}")
        return TargetAnswer(
            number, tokens, text_of(self._tokenizer, tokens), output.finish_reason == "stop"
        )


def text_of(tokenizer: Any, token_ids: list[int]) -> str:
    """The text of an answer, stripped, without special tokens."""
    return detokenizer_of(tokenizer).decode(token_ids).strip()
