"""Questions as requests for /v1/completions, and replies as answers.

Prompts go as token ids. Answers come as token ids with `return_token_ids`, which vLLM, SGLang and
infer.serve know. A server that takes no ids gets the text of the chat template. An answer without
ids is tokenised here. An answer that stopped without its stop token gets the tokenizer's own.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any, NamedTuple

import msgspec

from moa_jax.config import Sampling
from moa_jax.config.checks import is_id
from moa_jax.data import chat
from moa_jax.errors import InputError
from train.run.answers import TargetAnswer, TargetQuestion, text_of
from train.run.connection import RetryableError


@dataclasses.dataclass(frozen=True)
class AnswerFields:
    """The settings that all requests share."""

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
    """Whether a server takes token ids as a prompt and returns those of an answer."""

    takes_ids: bool
    gives_ids: bool


class CompletionChoice(msgspec.Struct):
    """The fields of a choice that are read."""

    text: str
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class CompletionUsage(msgspec.Struct):
    """The counts of tokens, which some servers leave out."""

    prompt_tokens: int | None = None
    completion_tokens: int | None = None


class CompletionReply(msgspec.Struct):
    """The fields of a reply that are read."""

    choices: Annotated[list[CompletionChoice], msgspec.Meta(min_length=1)]
    model: str | None = None
    usage: CompletionUsage | None = None


@dataclasses.dataclass(frozen=True)
class Completions:
    """Requests to one model of a server, and the answers in its replies."""

    place: str  # the server's address
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
        choice, count = self.choice(reply, question)
        stopped, token_ids = choice.finish_reason == "stop", choice.token_ids
        if not self.speech.gives_ids:
            self._check_end(stopped, count)
            return self._tokenised(question.number, choice.text, stopped, count)
        if token_ids is None or not all(is_id(each, self.wanted.vocab_size) for each in token_ids):
            raise RetryableError("an answer without its token ids")
        self._check_end(stopped, len(token_ids))
        text = text_of(self.wanted.tokenizer, token_ids)
        token_ids = self._with_stop(token_ids) if stopped else token_ids
        return TargetAnswer(question.number, token_ids, text, stopped)

    def choice(
        self, reply: dict[str, Any], question: TargetQuestion
    ) -> tuple[CompletionChoice, int | None]:
        """The choice that answers this question with this model, and its tokens; raises as above.

        The number of tokens is None where the server does not state it.
        """
        try:
            found = msgspec.convert(reply, CompletionReply)
        except msgspec.ValidationError as error:
            raise RetryableError("a reply without an answer") from error
        if found.model not in (None, self.model):
            raise InputError(
                f"{self.place} answers with the model {found.model}, and {self.model} was "
                "asked: have it serve that one"
            )
        usage, choice = found.usage or CompletionUsage(), found.choices[0]
        if usage.prompt_tokens not in (None, len(question.prompt_ids)):
            raise InputError(
                f"{self.place} reads {usage.prompt_tokens} tokens where the tokenizer of --target "
                f"has {len(question.prompt_ids)}: give the folder of the model that is served"
            )
        if choice.finish_reason not in ("stop", "length"):
            raise RetryableError(f"an answer that ended with {choice.finish_reason!r}")
        return choice, usage.completion_tokens

    def _tokenised(self, number: int, text: str, stopped: bool, count: int | None) -> TargetAnswer:
        """An answer that came as a text, of `count` tokens where the server states the number."""
        tokenizer = self.wanted.tokenizer
        sent, text = text, text.encode(errors="replace").decode()  # lone surrogates have no form
        token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        same = tokenizer.decode(token_ids) == sent
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

    def _check_end(self, stopped: bool, count: int | None) -> None:
        """Raises InputError for an answer that ended where it should not."""
        most = self.wanted.max_new_tokens
        if not stopped and count is not None and count < most:
            raise InputError(
                f"{self.place} ends answers after {count} tokens: lower --max-new-tokens {most}, "
                "or have the server take longer texts"
            )
        if stopped and self.wanted.ignore_stop:
            raise InputError(f"{self.place} knows no ignore_eos: leave out --ignore-stop")
