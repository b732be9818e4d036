"""Answers of an OpenAI-compatible server: vLLM, SGLang, infer.serve, and others.

    question -> a thread of its own -> EndpointClient -> answer

After a permanent failure no new question is sent, and answers in flight are still returned.
"""

from __future__ import annotations

import queue
import threading
from typing import Any

import msgspec

from moa_jax.errors import InputError
from moa_jax.pretrained import SpecialIds
from train.run.answers import TargetAnswer, TargetQuestion, TargetRefusal
from train.run.completions import Completions
from train.run.connection import OF_THE_PROMPT, EndpointClient, RefusedByServer
from train.run.conversations import AnswerRules

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"


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
        client: EndpointClient,
        model: str | None,
        rules: AnswerRules,
        ends: SpecialIds,
        most_asked: int,
    ) -> None:
        """Queries the server's models; `model` None is the server's only model.

        Raises InputError for a server that cannot be reached, refuses the key or a first request,
        lacks the model, or states a context length too short for the flags.
        """
        self.most_asked, self._num_asked = most_asked, 0
        self._answers: queue.SimpleQueue[TargetAnswer | TargetRefusal | Exception]
        self._answers, self._failure = queue.SimpleQueue(), None
        self._client = client
        self.model = _model_of(client.request("GET", MODELS), model, rules, client.address)
        self._completions = Completions(client.address, self.model, rules, ends)
        client.request("POST", COMPLETIONS, self._completions.probe())

    def ask(self, question: TargetQuestion) -> None:
        """Sends a question in a new thread, unless an earlier question has failed."""
        if not self._client.stopping.is_set():
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
            answer = self._answer(question)
        except Exception as error:  # any kind: the main thread raises the error
            self._failure = self._failure or error
            self._client.stopping.set()
            answer = error
        self._answers.put(answer)

    def _answer(self, question: TargetQuestion) -> TargetAnswer | TargetRefusal:
        try:
            reply = self._client.request("POST", COMPLETIONS, self._completions.request(question))
        except RefusedByServer as error:
            if error.status not in OF_THE_PROMPT:
                raise
            return TargetRefusal(question.number, str(error))
        return self._completions.answer(reply, question)


def _model_of(listed: Any, model: str | None, rules: AnswerRules, address: str) -> str:
    """The name of the model to ask: `model`, or the server's only model if `model` is None.

    Raises InputError for a server without that model, and for a longest prompt and answer that
    exceed the server's stated length.
    """
    try:
        cards = msgspec.convert(listed, ModelList).data
    except msgspec.ValidationError as error:
        raise InputError(f"{address} has no list of models; name an OpenAI server") from error
    found = [card for card in cards if model in (None, card.id)]
    if len(found) != 1:
        names = ", ".join(card.id for card in cards[:5]) or "none"
        raise InputError(f"{address} has the models {names}; name one of them with --model")
    (card,), new, longest = found, rules.max_new_tokens, rules.max_prompt
    if card.max_model_len is not None and longest + new > card.max_model_len:
        raise InputError(
            f"--max-prompt {longest} and --max-new-tokens {new} need more than the "
            f"{card.max_model_len} tokens that {address} holds; lower one of the two"
        )
    return card.id
