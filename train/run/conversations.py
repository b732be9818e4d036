"""Conversations that a target answers anew: what is asked next, and what was said."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np

from moa_jax.config import Sampling
from moa_jax.data import chat
from moa_jax.errors import InputError
from train.run.answers import Answers, TargetAnswer, TargetQuestion
from train.run.partial import Partial


class AnswerRules(NamedTuple):
    """What is asked of every answer, and which prompts are asked at all."""

    tokenizer: Any
    max_prompt: int  # tokens
    max_new_tokens: int
    ignore_stop: bool  # answers go on past their end, and are kept as tokens
    law: Sampling  # with the seed of all that is drawn


class Conversation:
    """One record while it is answered: the turns to come, what was said, and the present prompt."""

    def __init__(self, record: dict[str, Any] | InputError, number: int = 0) -> None:
        """`number` is the record's place among all; a fault stands for an unreadable one."""
        self.record, self.number = record, number
        self.said: list[chat.Message] = []
        self.prompt: list[int] | None = None
        self.fault = "a record without a user message: give it one"  # why it has no answer
        self._ids: dict[str, list[int]] | None = None
        self._asked: list[chat.Message] = []
        self._turns = self._messages()

    def ask(self, tokenizer: Any, longest: int) -> None:
        """Moves to the next user turn and sets its prompt, None at the end."""
        try:
            self.prompt = self._next_prompt(tokenizer, longest)
        except InputError as error:
            self.end(str(error))

    def question(self, law: Sampling) -> TargetQuestion:
        """The prompt that waits for an answer; what is drawn is the same in every shard."""
        if law.temperature:
            key = np.random.SeedSequence((law.seed, self.number, len(self.said)))
            law = dataclasses.replace(law, seed=int(key.generate_state(1)[0]))
        return TargetQuestion(self.number, self.prompt, self._asked, law)

    def take(self, answer: TargetAnswer, rules: AnswerRules) -> None:
        """Takes the target's answer, or ends before it."""
        if rules.ignore_stop:
            self.keep(answer.token_ids)
        elif not answer.stopped:
            most = rules.max_new_tokens
            self.end(f"an answer of more than {most} tokens: raise --max-new-tokens")
        elif not answer.text:
            self.end("an answer without text: the target had nothing to say")
        else:
            self.hear(answer.text)

    def hear(self, answer: str) -> None:
        """Takes the target's answer."""
        self.said = [*self._asked, {"role": "assistant", "content": answer}]

    def keep(self, token_ids: list[int]) -> None:
        """Takes an answer as tokens, which ends the conversation."""
        self._ids = {"prompt_ids": self.prompt, "token_ids": token_ids}
        self.end("")

    def end(self, fault: str) -> None:
        """Ends the conversation before the question at hand."""
        self.fault, self.prompt, self._turns = fault, None, iter(())

    def line(self) -> str | None:
        """The JSON line of what was said, None if there was no answer."""
        if not self.said and self._ids is None:
            return None
        kept = {key: self.record[key] for key in ("source", "license") if key in self.record}
        return json.dumps((self._ids or {"messages": self.said}) | kept, ensure_ascii=False)

    def _messages(self) -> Iterator[chat.Message]:
        if isinstance(self.record, InputError):
            raise InputError(f"a record that is {self.record}")
        yield from chat.messages_of(self.record)  # not before the first turn: it may raise

    def _next_prompt(self, tokenizer: Any, longest: int) -> list[int] | None:
        self._asked = list(self.said)
        for message in self._turns:
            if message["role"] != "assistant":
                self._asked.append(message)
            if message["role"] == "user":
                prompt = chat.prompt_ids(tokenizer, self._asked)
                if len(prompt) > longest:
                    raise InputError(f"a prompt of more than {longest} tokens: raise --max-prompt")
                return prompt
        return None


def answer_all(
    talks: Iterable[Conversation],
    answers: Answers,
    rules: AnswerRules,
    partial: Partial,
    is_over: Callable[[], None],
) -> None:
    """Answers all conversations, as many side by side as `answers` takes.

    What was heard is in `partial` before the next is waited for; `is_over` is called at each end.
    """
    under_way: dict[int, Conversation] = {}
    to_come = iter(talks)

    def go_on(talk: Conversation, answer: TargetAnswer | None = None) -> None:
        """Asks on; the answer to the last question is written first."""
        drifted = answer is not None and answer.drifted
        talk.ask(rules.tokenizer, rules.max_prompt)
        if talk.prompt is None:
            under_way.pop(talk.number, None)
            partial.close(talk.number, talk.line(), talk.fault, drifted)
            is_over()
            return
        if answer is not None:
            partial.add(talk.number, answer.text, drifted)
        under_way[talk.number] = talk
        answers.ask(talk.question(rules.law))

    while True:
        while len(under_way) < answers.most_asked and (talk := next(to_come, None)):
            for text in partial.heard(talk.number):
                talk.ask(rules.tokenizer, rules.max_prompt)
                talk.hear(text)
            go_on(talk)
        if not under_way:
            return
        answer = answers.next()
        talk = under_way[answer.number]
        talk.take(answer, rules)
        go_on(talk, answer)
