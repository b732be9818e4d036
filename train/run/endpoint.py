"""Answers of an OpenAI-compatible server: vLLM, SGLang, infer.serve, and others.

    question -> a thread of its own -> EndpointClient -> answer

First, requests of one token find out whether the server takes and returns token ids. Retryable
requests are sent again after growing waits. After a permanent failure no new question is sent, and
answers in flight are still returned.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import queue
import random
import threading
from collections.abc import Callable
from typing import ParamSpec, Self, TypeVar

import msgspec

from moa_jax.config import Sampling
from moa_jax.data import chat
from moa_jax.errors import InputError
from train.run.answers import TargetAnswer, TargetQuestion, TargetRefusal
from train.run.completions import AnswerFields, Capabilities, Completions
from train.run.connection import OF_THE_PROMPT, EndpointClient, RefusedByServer, RetryableError

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"
TRIES = 5  # per request
FIRST_WAIT_S, LONGEST_WAIT_S = 2.0, 60.0  # the waits between tries double
P, T = ParamSpec("P"), TypeVar("T")


class Patience:
    """Retries requests, for all threads that use one server."""

    def __init__(self, address: str, notice: Callable[[str], None]) -> None:
        self.stopping = threading.Event()  # ends all waits
        self._address, self._notice = address, notice
        self._num_replies = 0
        self._noticed: set[str] = set()  # messages already shown

    def ask(self, request: Callable[P, T], *args: P.args, **options: P.kwargs) -> T:
        """The result of a request; raises InputError after TRIES failures in a row.

        Status 429 uses up no try but the last while the server answers other requests. After
        `stopping` is set the first failure raises InputError.
        """
        tries, wait_s = 1, FIRST_WAIT_S
        while True:
            before = self._num_replies
            try:
                found = request(*args, **options)
            except RetryableError as trouble:
                if tries == TRIES or self.stopping.is_set():
                    line = f"{self._address}: {trouble}, {tries} times in a row"
                    raise InputError(line) from trouble
                self._wait(trouble, max(wait_s, min(trouble.wait_s, LONGEST_WAIT_S)))
                if not (trouble.busy and self._num_replies > before):
                    tries, wait_s = tries + 1, min(2 * wait_s, LONGEST_WAIT_S)
            else:
                self._num_replies += 1
                return found

    def _wait(self, trouble: RetryableError, seconds: float) -> None:
        if str(trouble) not in self._noticed:
            self._noticed.add(str(trouble))
            self._notice(f"{self._address}: {trouble}; again in {seconds:g} s")
        self.stopping.wait(seconds * random.uniform(1.0, 1.25))  # not all at the same time


class ModelCard(msgspec.Struct):
    """A model in the server's list; vLLM, SGLang and infer.serve state `max_model_len`."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """The reply of /v1/models."""

    data: list[ModelCard]


class EndpointAnswers:
    """Answers of a server to at most `most_asked` questions at once."""

    def __init__(
        self,
        connect: Callable[[], EndpointClient],
        model: str | None,
        wanted: AnswerFields,
        max_prompt: int,
        most_asked: int,
        notice: Callable[[str], None],
    ) -> None:
        """Queries the server's models and capabilities; `model` None is the server's only model.

        `notice` shows a message to the user. Raises InputError for a server that cannot be reached,
        refuses the key, lacks the model, or states a context length too short for the flags.
        """
        self.most_asked, self._num_asked = most_asked, 0
        self._answers: queue.SimpleQueue[TargetAnswer | TargetRefusal | Exception]
        self._answers, self._failure = queue.SimpleQueue(), None
        self._connect = connect
        with contextlib.closing(connect()) as self._client:
            address = self._client.address
            self._patience = Patience(address, notice)
            card = _card_of(self._patience.ask(_models, self._client), model, address)
            _check_length(card, wanted.max_new_tokens, max_prompt, address)
            self.model, asking = card.id, Completions(address, card.id, wanted)
            self._completions = dataclasses.replace(asking, speech=self._capabilities(asking))

    def __enter__(self) -> Self:
        self._client = self._connect()
        return self

    def __exit__(self, *exception: object) -> None:
        self._stop()
        self._client.close()

    def ask(self, question: TargetQuestion) -> None:
        """Sends a question in a new thread, unless an earlier question has failed."""
        if not self._patience.stopping.is_set():
            self._num_asked += 1
            # A daemon thread: Ctrl-C does not wait for the server.
            threading.Thread(target=self._work, args=(question,), daemon=True).start()

    def next(self) -> TargetAnswer | TargetRefusal:
        """Waits for the next answer; raises a failure after the answers to all other questions."""
        while self._num_asked:
            answer = self._answers.get()
            self._num_asked -= 1
            if not isinstance(answer, Exception):
                return answer
            self._failure = self._failure or answer
        raise self._failure

    def _work(self, question: TargetQuestion) -> None:
        try:
            answer = self._patience.ask(self._answer, question)
        except Exception as error:  # any kind: the main thread raises the error
            self._failure = self._failure or error
            self._stop()
            answer = error
        self._answers.put(answer)

    def _stop(self) -> None:
        self._patience.stopping.set()

    def _answer(self, question: TargetQuestion) -> TargetAnswer | TargetRefusal:
        try:
            reply = self._client.post(COMPLETIONS, self._completions.request(question))
        except RefusedByServer as error:
            if error.status not in OF_THE_PROMPT:
                raise
            return TargetRefusal(question.number, str(error))
        return self._completions.answer(reply, question)

    def _capabilities(self, completions: Completions) -> Capabilities:
        """Whether the server takes and returns token ids, found by requests of one token."""
        hello = [{"role": "user", "content": "Hello"}]
        prompt_ids = chat.prompt_ids(completions.wanted.tokenizer, hello)
        question = TargetQuestion(0, prompt_ids, hello, Sampling())
        one = dataclasses.replace(completions.wanted, max_new_tokens=1)
        refused: RefusedByServer | None = None
        for speech in itertools.starmap(Capabilities, itertools.product((True, False), repeat=2)):
            asking = dataclasses.replace(completions, wanted=one, speech=speech)
            try:
                gives_ids = self._patience.ask(self._gives_ids, asking, question)
            except RefusedByServer as error:
                refused = error
            else:
                return speech._replace(gives_ids=gives_ids)
        raise refused

    def _gives_ids(self, completions: Completions, question: TargetQuestion) -> bool:
        reply = self._client.post(COMPLETIONS, completions.request(question))
        return completions.choice(reply, question)[0].token_ids is not None


def _models(client: EndpointClient) -> list[ModelCard]:
    """The models of a server; raises RetryableError for a reply without a list of models."""
    try:
        return msgspec.convert(client.get(MODELS), ModelList).data
    except msgspec.ValidationError as error:
        raise RetryableError("a list of models that is none") from error


def _card_of(cards: list[ModelCard], model: str | None, address: str) -> ModelCard:
    """The model with this name, or the only model if `model` is None; raises InputError."""
    if model is None and len(cards) == 1:
        return cards[0]
    for card in cards:
        if card.id == model:
            return card
    shown = ", ".join(card.id for card in cards[:5]) or "no model"
    wrong = "has not one model" if model is None else f"has no model {model}"
    raise InputError(f"{address} {wrong} but {shown}; name a model with --model")


def _check_length(card: ModelCard, new: int, max_prompt: int, address: str) -> None:
    """Raises InputError if the longest prompt and answer exceed the server's stated length."""
    most = card.max_model_len
    if most is not None and max_prompt + new > most:
        raise InputError(
            f"--max-prompt {max_prompt} and --max-new-tokens {new} need more than the {most} "
            f"tokens that {address} holds; lower one of the two"
        )
