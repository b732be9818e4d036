"""Questions as requests for /v1/completions, and replies as answers.

Requests send prompts as token ids, and `return_token_ids`, which vLLM, SGLang and infer.serve
support, makes replies hold token ids. A server that takes no ids gets the text of the chat
template. An answer without ids is tokenised here. A stopped answer without its stop token gets the
end-of-turn token of the chat template, or else the tokenizer's eos.
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
    ignore_stop: bool = False  # answers continue past their end
    turn_id: int | None = None  # the member of `stop_ids` that the chat template writes

    def fields(self, law: Sampling) -> dict[str, Any]:
        """The fields of a request that do not depend on the prompt.

        Settings without effect are sent too, since servers take other defaults from the model's
        generation config.
        """
        fields: dict[str, Any] = {"max_tokens": self.max_new_tokens, "repetition_penalty": 1.0}
        fields |= {"ignore_eos": True} if self.ignore_stop else {"stop_token_ids": self.stop_ids}
        if not law.temperature:
            return fields | {"temperature": 0.0}
        drawn = {"temperature": law.temperature, "top_p": law.top_p, "min_p": 0.0}
        return fields | drawn | {"top_k": law.top_k or -1, "seed": law.seed}


class Capabilities(NamedTuple):
    """Whether a server takes prompts as token ids and returns the token ids of answers."""

    takes_ids: bool
    gives_ids: bool


class CompletionChoice(msgspec.Struct):
    """The fields of a choice that are read."""

    text: str
    finish_reason: str | None = None
    token_ids: list[int] | None = None


class CompletionUsage(msgspec.Struct):
    """The token counts, which some servers leave out."""

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
        """The JSON object to post for a question."""
        fields: dict[str, Any] = self.wanted.fields(question.sampling) | {"model": self.model}
        if self.speech.takes_ids:
            fields["prompt"] = question.prompt_ids
        else:  # the rendered template already holds all special tokens
            tokenizer, messages = self.wanted.tokenizer, question.messages
            fields["prompt"] = chat.render(tokenizer, messages, generation_prompt=True)
            fields["add_special_tokens"] = False
        if self.speech.gives_ids:
            fields["return_token_ids"] = True
        elif self.wanted.ignore_stop:
            fields["skip_special_tokens"] = False  # tokenising the answer needs them
        return fields

    def answer(self, reply: dict[str, Any], question: TargetQuestion) -> TargetAnswer:
        """The answer in a reply; raises RetryableError for an incomplete reply, or InputError."""
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
        """The choice of a reply, and the answer's number of tokens, None if not stated.

        Raises RetryableError for an incomplete reply, and InputError for a reply of another model
        or to a prompt of another length.
        """
        try:
            found = msgspec.convert(reply, CompletionReply)
        except msgspec.ValidationError as error:
            raise RetryableError("a reply without an answer") from error
        if found.model not in (None, self.model):
            raise InputError(
                f"{self.place} answers with the model {found.model} instead of {self.model}; "
                "serve that model there"
            )
        usage, choice = found.usage or CompletionUsage(), found.choices[0]
        if usage.prompt_tokens not in (None, len(question.prompt_ids)):
            raise InputError(
                f"{self.place} reads {usage.prompt_tokens} tokens where the tokenizer of --target "
                f"has {len(question.prompt_ids)}; give the folder of the model that is served"
            )
        if choice.finish_reason not in ("stop", "length"):
            raise RetryableError(f"an answer that ended with {choice.finish_reason!r}")
        return choice, usage.completion_tokens

    def _tokenised(self, number: int, text: str, stopped: bool, count: int | None) -> TargetAnswer:
        """The answer with this text; `count` is the server's number of tokens, None if unknown."""
        tokenizer = self.wanted.tokenizer
        sent, text = text, text.encode(errors="replace").decode()  # UTF-8 has no lone surrogates
        token_ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
        same = tokenizer.decode(token_ids) == sent
        if count is not None:  # the text lacks the stop token
            same &= len(token_ids) in (count, count - stopped)
        token_ids = self._with_stop(token_ids) if stopped else token_ids
        return TargetAnswer(number, token_ids, text.strip(), stopped, drifted=not same)

    def _with_stop(self, token_ids: list[int]) -> list[int]:
        """The answer's ids with the final stop token, which some servers leave out."""
        stop_ids = self.wanted.stop_ids
        if not stop_ids or (token_ids and token_ids[-1] in stop_ids):
            return token_ids
        own = (self.wanted.turn_id, self.wanted.tokenizer.eos_token_id)
        return [*token_ids, next((each for each in own if each in stop_ids), stop_ids[0])]

    def _check_end(self, stopped: bool, count: int | None) -> None:
        """Raises InputError for an answer cut below the limit, or stopped despite `ignore_stop`."""
        most = self.wanted.max_new_tokens
        if not stopped and count is not None and count < most:
            raise InputError(
                f"{self.place} ends answers after {count} tokens; lower --max-new-tokens {most}, "
                "or have the server take longer texts"
            )
        if stopped and self.wanted.ignore_stop:
            raise InputError(f"{self.place} has no ignore_eos; leave out --ignore-stop")
