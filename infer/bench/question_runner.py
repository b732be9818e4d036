"""A question put to all contenders, turn by turn; compiling is never part of a time."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any, NamedTuple

from infer.bench.answers import Answer
from infer.bench.candidates import PLAIN, Contender
from infer.bench.suites import Question
from infer.flags.sampling import check_stop_ids, sampling_of, stopper
from moa_jax import Result, Session
from moa_jax.config import Sampling
from moa_jax.data import chat
from moa_jax.data.records import Message
from moa_jax.decode.exactness import compare
from moa_jax.decode.room import Room
from moa_jax.decode.session import StopWhen, row_of
from moa_jax.decode.text import before_stop, detokenizer_of
from moa_jax.measure.turns import rotated
from moa_jax.pretrained import Target

SHORTEST = 16  # a turn that leaves room for fewer new tokens is not asked


class Interview(NamedTuple):
    """What all questions of a run share."""

    target: Target
    tokenizer: Any
    contenders: list[Contender]
    sampling: Sampling
    max_new_tokens: int
    stop: list[str]
    stop_ids: list[int] | None
    stop_when: StopWhen | None
    cache_rows: int | None
    comparable: bool  # drafts may change no text, not even a sampled one

    def ask(self, question: Question, index: int) -> dict[str, Answer]:
        """Answers by contender; another contender begins at each index (measure/turns.py).

        An answer that differs from plain decoding's says where and by which margin. Drawn
        candidates change a sampled answer but not its distribution, so these are not compared.
        """
        sampling = row_of(self.sampling, index)
        found = {
            contender.name: self._talk(contender.session, question, sampling)
            for contender in rotated(self.contenders, index)
        }
        plain = found[PLAIN]
        for name, answer in found.items():
            if name != PLAIN and self.comparable:
                found[name] = answer._replace(difference=self._difference(plain, answer, sampling))
            elif name != PLAIN:
                found[name] = answer._replace(comparable=False)
        return found

    def room(self, prompt: list[int]) -> int:
        """How many new tokens every contender can write behind a prompt; 0 where it is too long."""
        draft_rows = max(contender.session.shape.num_rows for contender in self.contenders)
        positions = self.target.config.max_position_embeddings
        room = Room(positions, self.cache_rows, draft_rows).behind(len(prompt))
        return min(room, self.max_new_tokens) if room >= SHORTEST else 0

    def first_prompt(self, question: Question) -> list[int]:
        messages = [*_history(question), _message("user", question.turns[0])]
        return chat.prompt_ids(self.tokenizer, messages)

    def _talk(self, session: Session, question: Question, sampling: Sampling) -> Answer:
        messages, texts = _history(question), []
        results: list[Result] = []
        for number, text in enumerate(question.turns, start=1):
            messages.append(_message("user", text))
            prompt = chat.prompt_ids(self.tokenizer, messages)
            room = self.room(prompt)
            if not room:
                return Answer(results, texts, too_long=number)
            results.append(self._decode(session, prompt, room, sampling))
            said = detokenizer_of(self.tokenizer).decode(results[-1].token_ids)
            texts.append(before_stop(said, self.stop).strip())
            messages.append(_message("assistant", texts[-1]))
        return Answer(results, texts)

    def _decode(self, session: Session, prompt: list[int], room: int, sampling: Sampling) -> Result:
        """The answer to one turn; where a program was compiled for it, the second time counts."""
        compiled = session.num_compiled
        settings = {"stop_ids": self.stop_ids, "stop_when": self.stop_when}
        (result,) = session.generate([prompt], room, sampling=sampling, **settings)
        if session.num_compiled > compiled:
            (result,) = session.generate([prompt], room, sampling=sampling, **settings)
        return result

    def _difference(
        self, plain: Answer, drafted: Answer, sampling: Sampling
    ) -> dict[str, Any] | None:
        for turn, (ours, theirs) in enumerate(
            zip(drafted.results, plain.results, strict=False), start=1
        ):
            found = compare(
                self.target, theirs.prompt_ids, theirs.token_ids, ours.token_ids, sampling
            )
            if found is not None:
                return {"turn": turn, **found._asdict()}
        return None


def interview_of(
    args: argparse.Namespace, target: Target, tokenizer: Any, contenders: list[Contender]
) -> Interview:
    """The interview that the flags ask for; raises InputError for a stop that can never come."""
    check_stop_ids(args.stop_ids, target.config.vocab_size)
    return Interview(
        target,
        tokenizer,
        contenders,
        sampling_of(args),
        args.max_new_tokens,
        args.stop,
        args.stop_ids,
        stopper(tokenizer, args.stop),
        contenders[0].session.cache_rows,
        comparable=args.temperature == 0 or not args.sampled_drafts,
    )


def law_of_answers(interview: Interview) -> dict[str, Any]:
    """How answers are chosen and where they end, ready for JSON."""
    return {
        "max_new_tokens": interview.max_new_tokens,
        "stop": interview.stop,
        "stop_ids": interview.stop_ids,
        **dataclasses.asdict(interview.sampling),
    }


def _message(role: str, text: str) -> Message:
    return {"role": role, "content": text}


def _history(question: Question) -> list[Message]:
    return [_message(role, text) for role, text in question.history]
