"""Answer files in Spec-Bench's format, one for each way of decoding: OUTPUT/SET/NAME.jsonl.

    {"question_id", "category", "answer_id", "model_id", "choices": [{"index", "turns",
     "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}], "tstamp"}

Lists have one entry a turn; `accept_lengths` has one a round, over all turns. The first token of
a turn comes from prefill, so its new_tokens are 1 + the sum of its accept_lengths. A line also
has what the report needs: the run that wrote it, tokens, prefill times, drafted nodes, and where
the answer first differs from plain decoding's. `same_as_plain` is null where candidates were
drawn, since such an answer may differ.

The lines of a question are written, and flushed to the disk, when all ways have answered it. After
a crash, a question that some file lacks or has half a line of is asked again. All others are kept.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from infer.bench.suites import Question
from moa_jax.decode.session import Result
from moa_jax.errors import InputError
from moa_jax.files.folders import json_hash, write_whole
from moa_jax.files.json_text import to_json

SETTINGS = "settings.json"
AnswerLine = dict[str, Any]


class Answer(NamedTuple):
    """One question answered in one way: a result and a text for each of its turns."""

    results: list[Result]
    texts: list[str]
    too_long: int | None = None  # the first turn, from 1, that the target had no room for
    difference: dict[str, Any] | None = (
        None  # the first one between this and plain decoding's answer
    )
    comparable: bool = True  # with plain decoding's answer; not where candidates were drawn

    @property
    def same_as_plain(self) -> bool | None:
        return self.difference is None if self.comparable else None

    @property
    def accept_lengths(self) -> list[int]:
        return [length for result in self.results for length in result.accept_lengths]

    @property
    def rounds(self) -> int:
        return len(self.accept_lengths)

    @property
    def tokens(self) -> int:
        return sum(len(result.token_ids) for result in self.results)

    @property
    def wall_s(self) -> float:
        return sum(result.prefill_s + result.decode_s for result in self.results)


class AnswerFolder:
    """The answers of one run, on disk and in memory."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        questions: Iterable[Question],
        models: Sequence[str],
    ) -> None:
        """Open or make the folder; raises InputError if it holds answers of another run."""
        self.folder, self._models = folder, models
        self._run = run_id(settings)
        self._check_settings(settings)
        sets = dict.fromkeys(question.set for question in questions)
        self._lines = {
            (name, model): self._read(self._path(name, model), model)
            for name in sets
            for model in models
        }
        for name in sets:
            self._drop_unfinished(name)
        self.folder.mkdir(parents=True, exist_ok=True)
        write_whole(self.folder / SETTINGS, to_json(settings, indent=2) + "\n")

    def has(self, question: Question) -> bool:
        """Whether every model has answered this question."""
        return all(question.id in self._lines[question.set, each] for each in self._models)

    def add(self, question: Question, answers: Mapping[str, Answer]) -> None:
        """Store the answers of all models to a question; raises OSError for a full disk."""
        for model, answer in answers.items():
            line = _line_of(question, model, answer) | {"run": self._run}
            path = self._path(question.set, model)
            path.parent.mkdir(exist_ok=True)
            with path.open("a", encoding="utf-8") as file:
                file.write(to_json(line) + "\n")
                file.flush()
                os.fsync(file.fileno())
            self._lines[question.set, model][question.id] = line

    def answer(self, question: Question, model: str) -> Answer:
        """The stored answer to a question for which `has` is true."""
        return _answer_of(self._lines[question.set, model][question.id])

    def _path(self, name: str, model: str) -> Path:
        return self.folder / name / f"{model}.jsonl"

    def _check_settings(self, settings: Mapping[str, Any]) -> None:
        path = self.folder / SETTINGS
        if not path.exists():
            return
        try:
            known = json.loads(path.read_text(encoding="utf-8"))
            differing = sorted(k for k in {*known, *settings} if known.get(k) != settings.get(k))
        except (ValueError, TypeError, AttributeError) as error:
            raise InputError(
                f"{path} is no settings file of a run: choose another --output"
            ) from error
        if differing:
            raise InputError(
                f"{self.folder} holds the answers of another run, with other {', '.join(differing)}"
                ": choose another --output"
            )

    def _read(self, path: Path, model: str) -> dict[Any, AnswerLine]:
        """The lines of a file by question, without a last line that a crash cut off."""
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        found: dict[Any, AnswerLine] = {}
        for number, content in enumerate(text.split("\n")[:-1], start=1):
            try:
                line = json.loads(content)
                ours = (line["run"], line["model_id"]) == (self._run, model)
                found[line["question_id"]] = line
                _answer_of(line)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise InputError(
                    f"{path} line {number} is no answer of a run like this: choose another "
                    "--output, or remove the line"
                ) from error
            if not ours:
                raise InputError(
                    f"{path} line {number} is of another run, with other models or settings: "
                    "choose another --output, or remove the file"
                )
        return found

    def _drop_unfinished(self, name: str) -> None:
        """Drop questions that some model has not answered, in memory and on disk."""
        files = {model: self._lines[name, model] for model in self._models}
        finished = set.intersection(*(set(lines) for lines in files.values()))
        for model, lines in files.items():
            kept = {key: line for key, line in lines.items() if key in finished}
            content = "".join(to_json(line) + "\n" for line in kept.values())
            path = self._path(name, model)
            if path.exists() and path.read_bytes() != content.encode():
                write_whole(path, content)
            self._lines[name, model] = kept


def run_id(settings: Mapping[str, Any]) -> str:
    """A short name shared only by runs of the same settings."""
    return json_hash(settings)[:12]


def _line_of(question: Question, model: str, answer: Answer) -> AnswerLine:
    results = answer.results
    choice = {
        "index": 0,
        "turns": answer.texts,
        "decoding_steps": [result.rounds for result in results],
        "new_tokens": [len(result.token_ids) for result in results],
        "wall_time": [result.prefill_s + result.decode_s for result in results],
        "accept_lengths": answer.accept_lengths,
        "drafted": [count for result in results for count in result.drafted],
        "prefill_time": [result.prefill_s for result in results],
        "prompt_tokens": [len(result.prompt_ids) for result in results],
        "token_ids": [result.token_ids for result in results],
        "finish_reasons": [result.finish_reason for result in results],
    }
    return {
        "question_id": question.id,
        "category": question.category,
        "answer_id": f"{model}-{question.set}-{question.id}",
        "model_id": model,
        "choices": [choice],
        "tstamp": time.time(),
        "too_long": answer.too_long,
        "same_as_plain": answer.same_as_plain,
        "difference": answer.difference,
    }


def _answer_of(line: AnswerLine) -> Answer:
    """The answer of a line; its prompts are not kept."""
    (choice,) = line["choices"]
    results, start = [], 0
    for index, rounds in enumerate(choice["decoding_steps"]):
        part = slice(start, start + rounds)
        prefill_s = choice["prefill_time"][index]
        results.append(
            Result(
                [],
                choice["token_ids"][index],
                choice["finish_reasons"][index],
                choice["accept_lengths"][part],
                prefill_s,
                choice["wall_time"][index] - prefill_s,
                choice["drafted"][part],
            )
        )
        start += rounds
    comparable = line["same_as_plain"] is not None
    return Answer(results, choice["turns"], line["too_long"], line["difference"], comparable)
