"""Answer files in Spec-Bench's format, one per candidate: OUTPUT/SET/NAME.jsonl.

    {"question_id", "category", "answer_id", "model_id", "choices": [{"index", "turns",
     "decoding_steps", "new_tokens", "wall_time", "accept_lengths"}], "tstamp"}

Lists have one entry per turn; `accept_lengths` has one entry per round, over all turns. The first
token of a turn comes from prefill, so its new_tokens are 1 + the sum of its accept_lengths. A line
also has fields for the report: the run's id, tokens, prefill times, drafted nodes, and the first
difference from plain decoding's answer. `same_as_plain` is null for sampled drafts, whose answers
may differ.

The lines of a question are written, and flushed to disk, once all candidates have answered the
question. After a crash, a question with a missing or incomplete line in any file runs again.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

from infer.bench.suites import Question
from moa_jax.decode.session import Result
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from moa_jax.files.model_folder import json_hash
from moa_jax.files.whole_files import write_whole

SETTINGS = "settings.json"


class Answer(NamedTuple):
    """One candidate's answer to a question: a result and a text per turn."""

    results: list[Result]
    texts: list[str]
    too_long: int | None = None  # first turn, from 1, that does not fit the target
    difference: dict[str, Any] | None = None  # first difference from plain decoding's answer
    comparable: bool = True  # with plain decoding's answer; False for sampled drafts

    @property
    def same_as_plain(self) -> bool | None:
        return self.difference is None if self.comparable else None

    @property
    def accept_lengths(self) -> list[int]:
        return [length for result in self.results for length in result.accept_lengths]


class AnswerFolder:
    """The answers of one run on disk, cached in memory."""

    def __init__(
        self,
        folder: Path,
        settings: Mapping[str, Any],
        questions: Iterable[Question],
        models: Sequence[str],
    ) -> None:
        """Opens or creates the folder; raises InputError if it holds another run's answers."""
        self.folder, self._models, self._run = folder, models, run_id(settings)
        _check_settings(folder, settings)
        self._lines: dict[tuple[str, str], dict[Any, dict[str, Any]]] = {}
        for name in dict.fromkeys(question.set for question in questions):
            self._open_set(name)
        folder.mkdir(parents=True, exist_ok=True)
        write_whole(folder / SETTINGS, to_json(settings, indent=2) + "\n")

    def has(self, question: Question) -> bool:
        """Whether every candidate has answered this question."""
        return all(question.id in self._lines[question.set, each] for each in self._models)

    def add(self, question: Question, answers: Mapping[str, Answer]) -> None:
        """Stores the answers of all candidates to a question; raises OSError for a full disk."""
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

    def _open_set(self, name: str) -> None:
        """Reads the files of a set; drops questions that lack a candidate's answer."""
        files = {model: self._read(self._path(name, model), model) for model in self._models}
        finished = set.intersection(*map(set, files.values()))
        for model, lines in files.items():
            kept = {key: line for key, line in lines.items() if key in finished}
            path = self._path(name, model)
            content = "".join(to_json(line) + "\n" for line in kept.values())
            if path.exists() and path.read_bytes() != content.encode():
                write_whole(path, content)
            self._lines[name, model] = kept

    def _read(self, path: Path, model: str) -> dict[Any, dict[str, Any]]:
        """The lines of a file by question id, without an incomplete last line."""
        text = path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""
        found = {}
        for number, content in enumerate(text.split("\n")[:-1], start=1):
            try:
                line = json.loads(content)
                ours = (line["run"], line["model_id"]) == (self._run, model)
                found[line["question_id"]] = line
                _answer_of(line)
            except (ValueError, KeyError, TypeError, IndexError) as error:
                raise InputError(
                    f"{path} line {number} is no answer of a run like this; choose another "
                    "--output, or remove the line"
                ) from error
            if not ours:
                raise InputError(
                    f"{path} line {number} is of another run, with other models or settings; "
                    "choose another --output, or remove the file"
                )
        return found


def run_id(settings: Mapping[str, Any]) -> str:
    """A short id shared only by runs of the same settings."""
    return json_hash(settings)[:12]


def _check_settings(folder: Path, settings: Mapping[str, Any]) -> None:
    path = folder / SETTINGS
    if not path.exists():
        return
    try:
        known = json.loads(path.read_text(encoding="utf-8"))
        differing = sorted(k for k in known | dict(settings) if known.get(k) != settings.get(k))
    except (ValueError, TypeError, AttributeError) as error:
        raise InputError(f"{path} is no settings file of a run; choose another --output") from error
    if differing:
        raise InputError(
            f"{folder} holds the answers of another run, with other {', '.join(differing)}; "
            "choose another --output"
        )


def _line_of(question: Question, model: str, answer: Answer) -> dict[str, Any]:
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


def _answer_of(line: Mapping[str, Any]) -> Answer:
    """The answer of a line; `prompt_ids` are empty."""
    (choice,) = line["choices"]
    keys = ("decoding_steps", "token_ids", "finish_reasons", "prefill_time", "wall_time")
    lengths, drafted = iter(choice["accept_lengths"]), iter(choice["drafted"])
    results = [
        Result([], ids, why, [*islice(lengths, n)], prefill, wall - prefill, [*islice(drafted, n)])
        for n, ids, why, prefill, wall in zip(*map(choice.get, keys), strict=True)
    ]
    comparable = line["same_as_plain"] is not None
    return Answer(results, choice["turns"], line["too_long"], line["difference"], comparable)
