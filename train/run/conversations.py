"""Conversations whose answers the target regenerates, turn by turn.

Messages of tools and the calls before them stay as they are. A conversation becomes a JSON line
with its messages, its `tools` and `chat_template_kwargs` if any, and the ids per answer:

    {"messages": [...], "answers": [{"prompt_ids": [...], "token_ids": [...],
                                     "finish_reason": "stop"}, ...]}

`prompt_ids` holds all tokens that the target read, earlier turns included. `token_ids` holds all
tokens that the target generated, stop token included. An answer cut at the limit has the
`finish_reason` `length` and is the last answer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from moa_jax.config import Sampling
from moa_jax.data import chat, sources
from moa_jax.data.records import FOR_TEMPLATE, Message, generated_places, read_record
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from train.run.answers import Answers, TargetAnswer, TargetQuestion, TargetRefusal
from train.run.partial import Partial


class AnswerRules(NamedTuple):
    """Length limits of prompts and answers, and the sampling parameters of all answers."""

    tokenizer: Any
    vocab_size: int
    max_prompt: int  # tokens
    max_new_tokens: int
    ignore_stop: bool  # answers continue past their end, and only ids are written
    sampling: Sampling  # the seeds of all sampled answers derive from its seed


class Conversation:
    """A record in progress: its messages and answers so far, and its current prompt."""

    def __init__(
        self, record: dict[str, Any] | InputError, rules: AnswerRules, number: int = 0
    ) -> None:
        """`number` is the record's index among all; an InputError replaces an unreadable record."""
        self.record, self.rules, self.number = record, rules, number
        self.messages: list[Message] = []
        self.prompt: list[int] | None = None
        self.fault = "a record without a user message; give it one"  # why no answer follows
        self._answers: list[dict[str, Any]] = []
        self._asked: list[Message] = []
        self._template_kwargs: Mapping[str, Any] = {}
        self._turns = self._messages()

    def ask(self) -> None:
        """Moves to the next user turn and sets `prompt`, None at the end of the conversation."""
        try:
            self.prompt = self._next_prompt()
        except InputError as error:
            self.end(str(error))

    def question(self) -> TargetQuestion:
        """The current prompt as a question; its sampling seed does not depend on the shard."""
        sampling = self.rules.sampling
        if sampling.temperature:
            key = np.random.SeedSequence((sampling.seed, self.number, len(self.messages)))
            sampling = dataclasses.replace(sampling, seed=int(key.generate_state(1)[0]))
        return TargetQuestion(self.number, self.prompt, sampling)

    def take(self, answer: TargetAnswer) -> None:
        """Adds the answer to the current prompt; a cut or empty answer ends the conversation."""
        past_end, most = self.rules.ignore_stop, self.rules.max_new_tokens
        if not (answer.text or past_end):
            self.end("an answer without text: the target had nothing to say")
            return
        self.fault = ""
        self.messages = [*self._asked, {"role": "assistant", "content": answer.text}]
        ids = {"prompt_ids": self.prompt, "token_ids": answer.token_ids}
        self._answers.append(ids | {"finish_reason": "stop" if answer.stopped else "length"})
        if past_end:
            self.end("")
        elif not answer.stopped:
            self.end(f"an answer is cut at {most} tokens; raise --max-new-tokens for longer ones")

    def end(self, fault: str) -> None:
        """Ends the conversation, so that no question follows; `fault` is the reason or empty."""
        self.fault, self.prompt, self._turns = fault, None, iter(())

    def line(self) -> str | None:
        """The JSON line of the conversation, None if it has no answer."""
        if not self._answers:
            return None
        kept = {key: self.record[key] for key in FOR_TEMPLATE if self.record.get(key)}
        whole = {"messages": self.messages, "answers": self._answers, **kept}
        # Text past the end of an answer is not a message, so the answer is written alone.
        written = self._answers[0] if self.rules.ignore_stop else whole
        about = {key: self.record.get(key) for key in ("source", "license")}
        about = {key: value for key, value in about.items() if isinstance(value, str | int)}
        return to_json(written | about, ensure_ascii=False)

    def _messages(self) -> Iterator[tuple[Message, bool]]:
        """The messages that stay, each with whether an answer follows it."""
        read = read_record(sources.sound(self.record))  # raises at the first turn
        self._template_kwargs = read.template_kwargs
        generated = generated_places(read.messages)
        roles = [message["role"] for message in read.messages] + [""]
        for i, message in enumerate(read.messages):
            if i not in generated:
                stays_next = i + 1 not in generated and roles[i + 1] in ("assistant", "tool")
                yield message, roles[i] in ("user", "tool") and not stays_next

    def _next_prompt(self) -> list[int] | None:
        longest = self.rules.max_prompt
        self._asked = list(self.messages)
        for message, is_answered in self._turns:
            self._asked.append(message)
            if is_answered:
                kwargs = self._template_kwargs
                prompt = chat.prompt_ids(self.rules.tokenizer, self._asked, kwargs)
                chat.check_ids(prompt, self.rules.vocab_size)  # a tokenizer may have more ids
                if len(prompt) > longest:
                    raise InputError(f"a prompt of more than {longest} tokens; raise --max-prompt")
                return prompt
        return None


def answer_all(
    talks: Iterable[Conversation],
    answers: Answers,
    partial: Partial,
    is_over: Callable[[], None],
) -> None:
    """Answers all conversations, up to `answers.most_asked` at a time.

    Every answer is in `partial` before the next answer is awaited. `is_over` is called once per
    finished conversation.
    """
    under_way: dict[int, Conversation] = {}
    to_come = iter(talks)

    def ask_next(talk: Conversation, answer: TargetAnswer | None = None) -> None:
        """Writes `answer` to `partial`, then submits the next question unless the talk is over."""
        talk.ask()
        if talk.prompt is None:
            under_way.pop(talk.number, None)
            partial.close(talk.number, talk.line(), talk.fault)
            is_over()
            return
        if answer is not None:
            partial.add(answer)
        under_way[talk.number] = talk
        answers.ask(talk.question())

    while True:
        while len(under_way) < answers.most_asked and (talk := next(to_come, None)):
            for answer in partial.answers_of(talk.number):
                talk.ask()
                talk.take(answer)
            ask_next(talk)
        if not under_way:
            return
        answer = answers.next()
        talk = under_way[answer.number]
        if isinstance(answer, TargetRefusal):
            talk.end(answer.fault)
            ask_next(talk)
        else:
            talk.take(answer)
            ask_next(talk, answer)
