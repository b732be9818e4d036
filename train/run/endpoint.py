"""Answers of an OpenAI-compatible server: vLLM, SGLang, infer.serve, and others.

    question -> worker 1 .. N, each with a connection of its own -> answer

First a request of one token finds out what the server speaks. What may pass is tried again after
growing waits. When a worker gives up, the others end what they are at, so that nothing is lost that
the server has answered.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import random
import threading
from collections.abc import Callable
from typing import Any, NamedTuple, ParamSpec, Self, TypeVar

from moa_jax.config import Sampling
from moa_jax.data import chat
from moa_jax.errors import InputError
from train.run.answers import TargetAnswer, TargetQuestion, TargetRefusal
from train.run.completions import AnswerFields, Capabilities, Completions
from train.run.connection import (
    OF_THE_PROMPT,
    Address,
    EndpointConnection,
    RefusedByServer,
    RetryableError,
)

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
TRIES = 5  # of one request
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 60.0  # the waits between them double
P, T = ParamSpec("P"), TypeVar("T")


class Endpoint(NamedTuple):
    """How to reach a server."""

    address: Address
    key: str | None
    timeout_s: float  # for its next bytes
    notice: Callable[[str], None]  # tells people of troubles

    def connect(self) -> EndpointConnection:
        """A connection of its own for a thread."""
        return EndpointConnection(self.address, self.key, self.timeout_s)


class Patience:
    """Tries again what may pass, for all threads that ask one server."""

    def __init__(self, server: Endpoint) -> None:
        self.stopping = threading.Event()  # nobody waits any more
        self._server = server
        self._num_replies = 0
        self._told: set[str] = set()  # each trouble once

    def ask(self, request: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """What a request brings; raises InputError where troubles do not end.

        That the server is busy does not count as long as it answers others.
        """
        tries, wait_s = 1, FIRST_WAIT_S
        while True:
            before = self._num_replies
            try:
                found = request(*args, **options)
            except RetryableError as trouble:
                if tries == TRIES or self.stopping.is_set():
                    where = self._server.address
                    raise InputError(f"{where}: {trouble}, {tries} times in a row") from trouble
                self._wait(trouble, max(wait_s, min(trouble.wait_s, LONGEST_WAIT_S)))
                if not (trouble.busy and self._num_replies > before):
                    tries, wait_s = tries + 1, min(2 * wait_s, LONGEST_WAIT_S)
            else:
                self._num_replies += 1
                return found

    def _wait(self, trouble: RetryableError, seconds: float) -> None:
        if str(trouble) not in self._told:
            self._told.add(str(trouble))
            self._server.notice(f"{self._server.address}: {trouble}; again in {seconds:g} s")
        self.stopping.wait(seconds * random.uniform(1.0, 1.25))  # not all at once


class EndpointAnswers:
    """Answers of a server, which as many workers ask at once."""

    def __init__(
        self,
        server: Endpoint,
        model: str | None,
        wanted: AnswerFields,
        max_prompt: int,
        workers: int,
    ) -> None:
        """Finds out what the server has and speaks; `model` None is the only one that it has.

        Raises InputError for one that cannot be reached, refuses the key, or lacks the model.
        """
        self.most_asked = self._num_workers = workers
        self._server, self._patience = server, Patience(server)
        self._questions: queue.SimpleQueue[TargetQuestion | None] = queue.SimpleQueue()
        # None says that a worker has left.
        self._answers: queue.SimpleQueue[TargetAnswer | TargetRefusal | None] = queue.SimpleQueue()
        self._failure: Exception | None = None
        with contextlib.closing(server.connect()) as connection:
            card = _card_of(self._patience.ask(_models, connection), model, server.address)
            self.model: str = card["id"]
            _check_length(card, wanted.max_new_tokens, max_prompt, server.address)
            asked = Completions(str(server.address), self.model, wanted)
            self._completions = dataclasses.replace(asked, speech=self._speech(asked, connection))

    def __enter__(self) -> Self:
        for index in range(self.most_asked):
            threading.Thread(target=self._work, name=f"endpoint-{index}", daemon=True).start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()

    def ask(self, question: TargetQuestion) -> None:
        """Takes a question, which nobody answers once a worker has given up."""
        self._questions.put(question)

    def next(self) -> TargetAnswer | TargetRefusal:
        """The next answer; raises what a worker gave up for when the others have ended, too."""
        while self._num_workers:
            if (answer := self._answers.get()) is not None:
                return answer
            self._num_workers -= 1
        raise self._failure

    def _work(self) -> None:
        """Asks one question after the other, until all is over or one cannot be answered."""
        connection, stopping = self._server.connect(), self._patience.stopping
        try:
            while (question := self._questions.get()) and not stopping.is_set():
                self._answers.put(self._patience.ask(self._answer, connection, question))
        except Exception as error:  # of any kind: the main thread hears of it
            self._failure = self._failure or error
            self._stop()
        finally:
            connection.close()
            self._answers.put(None)

    def _stop(self) -> None:
        self._patience.stopping.set()
        for _ in range(self.most_asked):
            self._questions.put(None)

    def _answer(
        self, connection: EndpointConnection, question: TargetQuestion
    ) -> TargetAnswer | TargetRefusal:
        try:
            reply = connection.post(COMPLETIONS, self._completions.request(question))
        except RefusedByServer as error:
            if error.status not in OF_THE_PROMPT:
                raise
            return TargetRefusal(question.number, str(error))
        return self._completions.answer(reply, question)

    def _speech(self, completions: Completions, connection: EndpointConnection) -> Capabilities:
        """What the server takes and gives beside text, found by requests of one token."""
        hello = [{"role": "user", "content": "Hello"}]
        prompt_ids = chat.prompt_ids(completions.wanted.tokenizer, hello)
        question = TargetQuestion(0, prompt_ids, hello, Sampling())
        one = dataclasses.replace(completions.wanted, max_new_tokens=1)
        refused: RefusedByServer | None = None
        for speech in itertools.starmap(Capabilities, itertools.product((True, False), repeat=2)):
            asking = dataclasses.replace(completions, wanted=one, speech=speech)
            try:
                choice = self._patience.ask(_first_choice, asking, connection, question)
            except RefusedByServer as error:
                refused = error
            else:
                return speech._replace(gives_ids=isinstance(choice.get("token_ids"), list))
        raise refused


def _first_choice(
    completions: Completions, connection: EndpointConnection, question: TargetQuestion
) -> dict[str, Any]:
    reply = connection.post(COMPLETIONS, completions.request(question))
    return completions.choice(reply, question)


def _models(connection: EndpointConnection) -> list[dict[str, Any]]:
    """The models that a server has; raises RetryableError where its list is none."""
    cards = connection.get(MODELS).get("data")
    if not isinstance(cards, list) or not all(isinstance(card, dict) for card in cards):
        raise RetryableError("a list of models that is none")
    return [card for card in cards if isinstance(card.get("id"), str)]


def _card_of(cards: list[dict[str, Any]], model: str | None, at: Address) -> dict[str, Any]:
    """The model that is asked for; raises InputError."""
    if model is None and len(cards) == 1:
        return cards[0]
    for card in cards:
        if card["id"] == model:
            return card
    shown = ", ".join(card["id"] for card in cards[:5]) or "no model"
    wrong = "has not one model" if model is None else f"has no model {model}"
    raise InputError(f"{at} {wrong} but {shown}: name the one to ask with --model")


def _check_length(card: dict[str, Any], new: int, max_prompt: int, at: Address) -> None:
    """Raises InputError where the server says that it holds less (vLLM, SGLang, infer.serve)."""
    most = card.get("max_model_len")
    if isinstance(most, int) and max_prompt + new > most:
        raise InputError(
            f"--max-prompt {max_prompt} and --max-new-tokens {new} need more than the {most} "
            f"tokens that {at} holds: lower one of the two"
        )
