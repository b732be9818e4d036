"""Answers of an OpenAI-compatible server: vLLM, SGLang, infer.serve, and others.

    question -> a thread of its own -> Completions -> EndpointClient -> Completions -> answer

Requests send prompts as token ids, and `return_token_ids`, which vLLM, SGLang and infer.serve
support, makes replies hold token ids: text may re-tokenize to other ids. A stopped answer without
its stop token gets the end-of-turn token of the chat template, or else the tokenizer's eos. After a
permanent failure no new question is sent, and answers in flight are still returned.
"""

from __future__ import annotations

import queue
import threading
from typing import Annotated, Any, NamedTuple

import msgspec

from moa_jax.errors import InputError
from moa_jax.pretrained import SpecialIds
from train.run.answers import TargetAnswer, TargetQuestion, TargetRefusal, text_of
from train.run.connection import EndpointClient, PromptRefused
from train.run.conversations import AnswerRules

COMPLETIONS, MODELS = "/v1/completions", "/v1/models"


class ModelCard(msgspec.Struct):
    """A model in the server's list; vLLM, SGLang and infer.serve state `max_model_len`."""

    id: str
    max_model_len: int | None = None


class ModelList(msgspec.Struct):
    """The reply of /v1/models."""

    data: list[ModelCard]


class CompletionChoice(msgspec.Struct):
    """The fields of a choice that are read."""

    finish_reason: str | None = None
    token_ids: list[int] | None = None


class CompletionReply(msgspec.Struct):
    """The fields of a reply of /v1/completions that are read."""

    choices: Annotated[list[CompletionChoice], msgspec.Meta(min_length=1)]
    model: str | None = None


class Completions(NamedTuple):
    """Requests to one model of a server, and the answers in its replies."""

    place: str  # the server's address
    model: str
    rules: AnswerRules
    ends: SpecialIds

    def request(self, question: TargetQuestion) -> dict[str, Any]:
        """The JSON object to post for a question.

        Settings without effect are sent too, since servers take other defaults from the model's
        generation config.
        """
        sampling, ends = question.sampling, {"stop_token_ids": self.ends.eos_ids}
        fields = {
            "model": self.model,
            "prompt": question.prompt_ids,
            "max_tokens": self.rules.max_new_tokens,
            "return_token_ids": True,
            "repetition_penalty": 1.0,
            "temperature": sampling.temperature,
        }
        fields |= {"ignore_eos": True} if self.rules.ignore_stop else ends
        drawn = {"top_p": sampling.top_p, "min_p": 0.0, "top_k": sampling.top_k or -1}
        return fields | (drawn | {"seed": sampling.seed} if sampling.temperature else {})

    def probe(self) -> dict[str, Any]:
        """A request for one token: a server that refuses it refuses every request."""
        return self.request(TargetQuestion(-1, [0], self.rules.sampling)) | {"max_tokens": 1}

    def answer(self, reply: CompletionReply, question: TargetQuestion) -> TargetAnswer:
        """The answer in a reply; raises InputError for a reply that cannot be used."""
        choice, rules = reply.choices[0], self.rules
        finish, token_ids, most = choice.finish_reason, choice.token_ids or [], rules.max_new_tokens
        faults = {
            f"answers with the model {reply.model} instead of {self.model}; serve that model "
            "there": reply.model not in (None, self.model),
            f"ended an answer with {finish!r}": finish not in ("stop", "length"),
            "returns no token ids; serve the model with infer.serve, or with a version of vLLM or "
            "SGLang that has return_token_ids": choice.token_ids is None,
            "answers with ids outside the vocabulary of --target; give the folder of the model "
            "that is served": not all(0 <= each < rules.vocab_size for each in token_ids),
            f"ends answers after {len(token_ids)} tokens; lower --max-new-tokens {most}, or have "
            "the server take longer texts": finish == "length" and len(token_ids) < most,
            "has no ignore_eos; leave out --ignore-stop": finish == "stop" and rules.ignore_stop,
        }
        for fault, is_found in faults.items():
            if is_found:
                raise InputError(f"{self.place} {fault}")
        text, stop_ids = text_of(rules.tokenizer, token_ids), self.ends.eos_ids
        if finish == "stop" and not set(token_ids[-1:]) & set(stop_ids):
            ends = (self.ends.turn_id, rules.tokenizer.eos_token_id, *stop_ids)
            token_ids = token_ids + [each for each in ends if each in stop_ids][:1]
        return TargetAnswer(question.number, token_ids, text, finish == "stop")


class EndpointAnswers:
    """Answers of a server to at most `most_asked` questions at once, one per connection."""

    def __init__(
        self, client: EndpointClient, model: str | None, rules: AnswerRules, ends: SpecialIds
    ) -> None:
        """Queries the server's models; `model` None is the server's only model.

        Raises InputError for a server that cannot be reached, refuses the key or a first request,
        lacks the model, or states a context length too short for the flags.
        """
        self.most_asked, self._num_asked, self._failure = client.connections, 0, None
        self._client, self._answers = client, queue.SimpleQueue()  # of answers and exceptions
        self.model = _model_of(client.request(MODELS, ModelList), model, rules, client.address)
        self._completions = Completions(client.address, self.model, rules, ends)
        client.request(COMPLETIONS, CompletionReply, self._completions.probe())

    def ask(self, question: TargetQuestion) -> None:
        """Sends a question in a new thread, unless an earlier question has failed."""
        if not self._client.stopping.is_set():
            self._num_asked += 1
            # A daemon thread: Ctrl-C does not wait for the server.
            threading.Thread(target=self._answer, args=(question,), daemon=True).start()

    def next(self) -> TargetAnswer | TargetRefusal:
        """Waits for the next answer; raises a failure after the answers to all other questions."""
        while self._num_asked:
            self._num_asked -= 1
            if not isinstance(answer := self._answers.get(), Exception):
                return answer
            self._failure = self._failure or answer
        raise self._failure

    def _answer(self, question: TargetQuestion) -> None:
        try:
            body = self._completions.request(question)
            reply = self._client.request(COMPLETIONS, CompletionReply, body)
            self._answers.put(self._completions.answer(reply, question))
        except PromptRefused as error:
            self._answers.put(TargetRefusal(question.number, str(error)))
        except Exception as error:  # any kind: the main thread raises the error
            self._answers.put(error)  # before the errors of the requests that stop now
            self._client.stopping.set()


def _model_of(listed: ModelList, model: str | None, rules: AnswerRules, address: str) -> str:
    """The name of the model to ask: `model`, or the server's only model if `model` is None.

    Raises InputError for a server without that model, and for a longest prompt and answer that
    exceed the server's stated length.
    """
    found = [card for card in listed.data if model in (None, card.id)]
    if len(found) != 1:
        names = ", ".join(card.id for card in listed.data[:5]) or "none"
        raise InputError(f"{address} has the models {names}; name one of them with --model")
    new, longest, limit = rules.max_new_tokens, rules.max_prompt, found[0].max_model_len
    if limit is not None and longest + new > limit:
        raise InputError(
            f"--max-prompt {longest} and --max-new-tokens {new} need more than the {limit} tokens "
            f"that {address} holds; lower one of the two"
        )
    return found[0].id
