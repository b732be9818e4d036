"""Questions as requests for /v1/completions, and its replies as answers.

Prompts go as token ids. Answers come as token ids with `return_token_ids`, which vLLM, SGLang and
infer.serve know. A server that takes no ids gets the text of the chat template. An answer without
ids is tokenised here. An answer that stopped without its stop token gets the tokenizer's own.
"""

from __future__ import annotations

import dataclasses
from typing import Any, NamedTuple

from moa_jax.config import Sampling
from moa_jax.config.checks import is_id
from moa_jax.data import chat
from moa_jax.errors import InputError
from train.run.answers import TargetAnswer, TargetQuestion, text_of
from train.run.connection import RetryableError


@dataclasses.dataclass(frozen=True)
class AnswerFields:
    """What every answer is asked for."""

    tokenizer: Any
    vocab_size: int
    max_new_tokens: int
    stop_ids: tuple[int, ...]
    ignore_stop: bool = False  # answers go on past their end
    turn_id: int | None = None  # of `stop_ids`, the one that the chat template writes

    def fields(self, law: Sampling) -> dict[str, Any]:
        """The part of a request that does not depend on the prompt.

        Settings that change nothing are sent, too: servers take other defaults from the model's
        generation config.
        """
        fields: dict[str, Any] = {"max_tokens": self.max_new_tokens, "repetition_penalty": 1.0}
        fields |= {"ignore_eos": True} if self.ignore_stop else {"stop_token_ids": self.stop_ids}
        if not law.temperature:
            return fields | {"temperature": 0.0}
        drawn = {"temperature": law.temperature, "top_p": law.top_p, "min_p": 0.0}
        return fields | drawn | {"top_k": law.top_k or -1, "seed": law.seed}


class Capabilities(NamedTuple):
    """What a server takes and gives beside text."""

    takes_ids: bool
    gives_ids: bool


@dataclasses.dataclass(frozen=True)
class Completions:
    """Requests to one model of a server, and what its replies say."""

    place: str  # the server's, for people
    model: str
    wanted: AnswerFields
    speech: Capabilities = Capabilities(True, True)

    def request(self, question: TargetQuestion) -> dict[str, Any]:
        """The object to post."""
        fields: dict[str, Any] = self.wanted.fields(question.sampling) | {"model": self.model}
        if self.speech.takes_ids:
            fields["prompt"] = question.prompt_ids
        else:  # in which the template has written all special tokens
            tokenizer, messages = self.wanted.tokenizer, question.messages
            fields["prompt"] = chat.render(tokenizer, messages, generation_prompt=True)
            fields["add_special_tokens"] = False
        if self.speech.gives_ids:
            fields["return_token_ids"] = True
        elif self.wanted.ignore_stop:
            fields["skip_special_tokens"] = False  # else they could not be tokenised again
        return fields

    def answer(self, reply: dict[str, Any], question: TargetQuestion) -> TargetAnswer:
        """The answer in a reply; raises RetryableError for half of one, or InputError."""
        choice = self.choice(reply, question)
        finish, stopped = choice["finish_reason"], choice["finish_reason"] == "stop"
        if not self.speech.gives_ids:
            count = _usage(reply, "completion_tokens")
            self._check_end(finish, count)
            return self._tokenised(question.number, choice["text"], stopped, count)
        token_ids = choice.get("token_ids")
        if not _are_ids(token_ids, self.wanted.vocab_size):
            raise RetryableError("an answer without its token ids")
        self._check_end(finish, len(token_ids))
        text = text_of(self.wanted.tokenizer, token_ids)
        token_ids = self._with_stop(token_ids) if stopped else token_ids
        return TargetAnswer(question.number, token_ids, text, stopped)

    def choice(self, reply: dict[str, Any], question: TargetQuestion) -> dict[str, Any]:
        """The one choice of a reply that answers this question with this model; raises as above."""
        if reply.get("model", self.model) != self.model:
            raise InputError(
                f"{self.place} answers with the model {reply['model']}, and {self.model} was "
                "asked: have it serve that one"
            )
        count = _usage(reply, "prompt_tokens")
        if count not in (None, len(question.prompt_ids)):
            raise InputError(
                f"{self.place} reads {count} tokens where the tokenizer of --target has "
                f"{len(question.prompt_ids)}: give the folder of the model that is served"
            )
        choices = reply.get("choices")
        choice = choices[0] if isinstance(choices, list) and choices else None
        if not isinstance(choice, dict) or not isinstance(choice.get("text"), str):
            raise RetryableError("a reply without an answer")
        if choice.get("finish_reason") not in ("stop", "length"):
            raise RetryableError(f"an answer that ended with {choice.get('finish_reason')!r}")
        return choice

    def _tokenised(self, number: int, text: str, stopped: bool, count: int | None) -> TargetAnswer:
        """An answer of `count` tokens, where the server says how many, that came as a text."""
        tokenizer = self.wanted.tokenizer
        said, text = text, text.encode(errors="replace").decode()  # halves of pairs have no form
        token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        same = tokenizer.decode(token_ids) == said
        if count is not None:  # the token that ends an answer is not in its text
            same &= len(token_ids) in (count, count - stopped)
        token_ids = self._with_stop(token_ids) if stopped else token_ids
        return TargetAnswer(number, token_ids, text.strip(), stopped, drifted=not same)

    def _with_stop(self, token_ids: list[int]) -> list[int]:
        """The answer with the token that stopped it, which some servers leave out."""
        stop_ids = self.wanted.stop_ids
        if not stop_ids or (token_ids and token_ids[-1] in stop_ids):
            return token_ids
        own = (self.wanted.turn_id, self.wanted.tokenizer.eos_token_id)
        return [*token_ids, next((each for each in own if each in stop_ids), stop_ids[0])]

    def _check_end(self, finish: str, count: int | None) -> None:
        """Raises InputError for an answer that ended where it should not."""
        most = self.wanted.max_new_tokens
        if finish == "length" and count is not None and count < most:
            raise InputError(
                f"{self.place} ends answers after {count} tokens: lower --max-new-tokens {most}, "
                "or have the server take longer texts"
            )
        if finish == "stop" and self.wanted.ignore_stop:
            raise InputError(f"{self.place} knows no ignore_eos: leave out --ignore-stop")


def _usage(reply: dict[str, Any], name: str) -> int | None:
    """A figure of what a request took; None where the server does not say."""
    usage = reply.get("usage")
    count = usage.get(name) if isinstance(usage, dict) else None
    return count if isinstance(count, int) else None


def _are_ids(found: Any, vocab_size: int) -> bool:
    return isinstance(found, list) and all(is_id(each, vocab_size) for each in found)
