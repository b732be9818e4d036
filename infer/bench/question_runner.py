"""Answers a question with all candidates, turn by turn; times exclude compilation."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from infer.bench.answers import Answer
from infer.bench.candidates import PLAIN, Candidate
from infer.bench.suites import Question
from infer.cli.flags.sampling import check_stop_ids, sampling_of, stopper
from moa_jax import Result, Session
from moa_jax.config import Sampling
from moa_jax.data import chat
from moa_jax.decode.detokenize import before_stop, detokenizer_of
from moa_jax.decode.exactness import compare
from moa_jax.decode.limits import CacheLimits
from moa_jax.decode.session import StopWhen, row_of
from moa_jax.measure.turns import rotated
from moa_jax.pretrained import Target

SHORTEST = 16  # a turn with fewer possible new tokens is skipped


class QuestionRunner(NamedTuple):
    """The models and settings of a run."""

    target: Target
    tokenizer: Any
    candidates: list[Candidate]
    sampling: Sampling
    max_new_tokens: int
    stop: list[str]
    stop_ids: list[int] | None
    stop_when: StopWhen | None
    cache_rows: int | None
    comparable: bool  # whether drafts must not change any answer, even a sampled answer

    def ask(self, question: Question, index: int) -> dict[str, Answer]:
        """Answers by candidate; the order rotates with `index` (moa_jax/measure/turns.py).

        An answer that differs from plain decoding's has the place and the margin of the difference.
        Sampled drafts change a sampled answer but not its distribution, so such answers are not
        compared.
        """
        sampling = row_of(self.sampling, index)
        found = {
            candidate.name: self._talk(candidate.session, question, sampling)
            for candidate in rotated(self.candidates, index)
        }
        for name, answer in found.items():
            if name != PLAIN:
                different = self.comparable and self._difference(found[PLAIN], answer, sampling)
                found[name] = answer._replace(
                    difference=different or None, comparable=self.comparable
                )
        return found

    def room(self, prompt: list[int]) -> int:
        """New tokens that every candidate can generate after a prompt; 0 for a long prompt."""
        draft_rows = max(candidate.session.shape.num_rows for candidate in self.candidates)
        positions = self.target.config.max_position_embeddings
        room = CacheLimits(positions, self.cache_rows, draft_rows).max_new_tokens(len(prompt))
        return min(room, self.max_new_tokens) if room >= SHORTEST else 0

    def first_prompt(self, question: Question) -> list[int]:
        """The prompt of the first turn, including the history."""
        return chat.prompt_ids(self.tokenizer, question.messages(), question.kwargs())

    def _talk(self, session: Session, question: Question, sampling: Sampling) -> Answer:
        messages, answer = question.messages(), Answer([], [])
        for number in range(1, len(question.turns) + 1):
            prompt = chat.prompt_ids(self.tokenizer, messages, question.kwargs())
            room = self.room(prompt)
            if not room:
                return answer._replace(too_long=number)
            answer.results.append(self._decode(session, prompt, room, sampling))
            whole = detokenizer_of(self.tokenizer).decode(answer.results[-1].token_ids)
            answer.texts.append(before_stop(whole, self.stop).strip())
            messages.append({"role": "assistant", "content": answer.texts[-1]})
            messages += [{"role": "user", "content": text} for text in question.turns[number:][:1]]
        return answer

    def _decode(self, session: Session, prompt: list[int], room: int, sampling: Sampling) -> Result:
        """The answer to one turn; after a compilation the turn runs again."""
        compiled, settings = session.num_compiled, {"stop_ids": self.stop_ids, "sampling": sampling}
        (result,) = session.generate([prompt], room, stop_when=self.stop_when, **settings)
        if session.num_compiled > compiled:
            (result,) = session.generate([prompt], room, stop_when=self.stop_when, **settings)
        return result

    def _difference(
        self, plain: Answer, drafted: Answer, sampling: Sampling
    ) -> dict[str, Any] | None:
        pairs = zip(drafted.results, plain.results, strict=False)
        for turn, (ours, theirs) in enumerate(pairs, start=1):
            tokens = (theirs.prompt_ids, theirs.token_ids, ours.token_ids)
            if found := compare(self.target, *tokens, sampling):
                return {"turn": turn, **found._asdict()}
        return None


def runner_of(
    args: argparse.Namespace, target: Target, tokenizer: Any, candidates: list[Candidate]
) -> QuestionRunner:
    """The runner for the flags; raises InputError for stop ids outside the vocabulary."""
    check_stop_ids(args.stop_ids, target.config.vocab_size)
    return QuestionRunner(
        target,
        tokenizer,
        candidates,
        sampling_of(args),
        args.max_new_tokens,
        args.stop,
        args.stop_ids,
        stopper(tokenizer, args.stop),
        candidates[0].session.cache_rows,
        comparable=args.temperature == 0 or not args.sampled_drafts,
    )
