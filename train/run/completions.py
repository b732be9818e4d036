"""Questions as requests for /v1/completions, and replies as answers.

Requests send prompts as token ids, and `return_token_ids`, which vLLM, SGLang and infer.serve
support, makes replies hold token ids: text may re-tokenize to other ids. A stopped answer without
its stop token gets the end-of-turn token of the chat template, or else the tokenizer's eos.
"""

from __future__ import annotations

import dataclasses
from typing import Annotated, Any

import msgspec

from moa_jax.config.checks import is_id
from moa_jax.errors import InputError
from moa_jax.pretrained import SpecialIds
from train.run.answers import TargetAnswer, TargetQuestion, text_of
from train.run.conversations import AnswerRules


class CompletionChoice(msgspec.Struct):
    """The fields of a choice that are read."""

    finish_reason: str | None = None
    token_ids: list[int] | None = None


class CompletionReply(msgspec.Struct):
    """The fields of a reply that are read."""

    choices: Annotated[list[CompletionChoice], msgspec.Meta(min_length=1)]
    model: str | None = None


@dataclasses.dataclass(frozen=True)
class Completions:
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
        fields: dict[str, Any] = {
            "model": self.model,
            "prompt": question.prompt_ids,
            "max_tokens": self.rules.max_new_tokens,
            "return_token_ids": True,
            "repetition_penalty": 1.0,
        }
        ends = {"stop_token_ids": self.ends.eos_ids}
        fields |= {"ignore_eos": True} if self.rules.ignore_stop else ends
        sampling = question.sampling
        if not sampling.temperature:
            return fields | {"temperature": 0.0}
        drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p, "min_p": 0.0}
        return fields | drawn | {"top_k": sampling.top_k or -1, "seed": sampling.seed}

    def probe(self) -> dict[str, Any]:
        """A request for one token: a server that refuses it refuses every request."""
        return self.request(TargetQuestion(-1, [0], self.rules.sampling)) | {"max_tokens": 1}

    def answer(self, reply: dict[str, Any], question: TargetQuestion) -> TargetAnswer:
        """The answer in a reply; raises InputError for a reply that cannot be used."""
        try:
            found = msgspec.convert(reply, CompletionReply)
        except msgspec.ValidationError as error:
            raise InputError(f"{self.place} replies without an answer; name another") from error
        choice, most = found.choices[0], self.rules.max_new_tokens
        token_ids, stopped = choice.token_ids, choice.finish_reason == "stop"
        if found.model not in (None, self.model):
            raise InputError(
                f"{self.place} answers with the model {found.model} instead of {self.model}; "
                "serve that model there"
            )
        if choice.finish_reason not in ("stop", "length"):
            raise InputError(f"{self.place} ended an answer with {choice.finish_reason!r}")
        if token_ids is None:
            raise InputError(
                f"{self.place} returns no token ids; serve the model with infer.serve, or with a "
                "version of vLLM or SGLang that has return_token_ids"
            )
        if not all(is_id(each, self.rules.vocab_size) for each in token_ids):
            raise InputError(
                f"{self.place} answers with ids outside the vocabulary of --target; give the "
                "folder of the model that is served"
            )
        if not stopped and len(token_ids) < most:
            raise InputError(
                f"{self.place} ends answers after {len(token_ids)} tokens; lower --max-new-tokens "
                f"{most}, or have the server take longer texts"
            )
        if stopped and self.rules.ignore_stop:
            raise InputError(f"{self.place} has no ignore_eos; leave out --ignore-stop")
        text = text_of(self.rules.tokenizer, token_ids)
        token_ids = self._with_stop(token_ids) if stopped else token_ids
        return TargetAnswer(question.number, token_ids, text, stopped)

    def _with_stop(self, token_ids: list[int]) -> list[int]:
        """The answer's ids with the final stop token, which some servers leave out."""
        stop_ids = self.ends.eos_ids
        if not stop_ids or (token_ids and token_ids[-1] in stop_ids):
            return token_ids
        own = (self.ends.turn_id, self.rules.tokenizer.eos_token_id)
        return [*token_ids, next((each for each in own if each in stop_ids), stop_ids[0])]
