"""Question sets: bundled, of the paper, of Spec-Bench, from files and from public data sets.

`--suite` takes any of these, separated by commas:

    demo                            twelve bundled questions in six small sets: demo-mt_bench, ...
    paper                           mt_bench, humaneval, gsm8k, alpaca, sum, qa in data:specbench
    spec_bench                      the 480 questions of Spec-Bench, in its six subtasks
    mt_bench,qa                     some of the sets above
    FOLDER/question.jsonl           lines {"question_id", "category", "turns": [...]}
    hub:cnn_dailymail:3.0.0/test    through `datasets`
    tfds:natural_questions/validation    through `tensorflow_datasets`
"""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import moa_jax
from infer.cli.program import names
from moa_jax.data import sources
from moa_jax.data.records import Message
from moa_jax.errors import InputError
from moa_jax.files.model_folder import json_hash

PAPER = ("mt_bench", "humaneval", "gsm8k", "alpaca", "sum", "qa")
SPEC_BENCH = "spec_bench"
FILE = "question.jsonl"
DEMO = Path(moa_jax.__file__).parent / "demo" / "questions"
KNOWN = (
    f"choose from demo, paper, {', '.join(PAPER)}, {SPEC_BENCH}, a {FILE}, hub:NAME/SPLIT and "
    "tfds:NAME/SPLIT"
)
PUBLIC = ("hub:", "tfds:")
PUBLIC_ROWS = 80  # questions per set of the paper
# The categories of Spec-Bench's multi-turn questions, which form one subtask.
TALKS = "writing roleplay reasoning math coding extraction stem humanities".split()


class Question(NamedTuple):
    """The user turns of one question; `group` is its row in the tables."""

    set: str
    id: int | str
    category: str
    group: str
    turns: tuple[str, ...]
    history: tuple[tuple[str, str], ...] = ()  # (role, content) of earlier messages
    template_kwargs: str = ""  # tools and other arguments of the chat template, as JSON

    def messages(self) -> list[Message]:
        """The history and the first turn."""
        pairs = (*self.history, ("user", self.turns[0]))
        return [{"role": role, "content": text} for role, text in pairs]

    def kwargs(self) -> dict[str, Any]:
        """The arguments for the chat template."""
        return json.loads(self.template_kwargs or "{}")


def load_suite(text: str, public_rows: int = PUBLIC_ROWS) -> list[Question]:
    """The questions of `--suite`; of public data sets the first `public_rows`.

    Raises InputError for a set that is missing or named twice, and for an invalid line, with file
    and line number.
    """
    found: list[Question] = []
    sets = list(_sets_of(text))
    if not sets:
        raise InputError(f"--suite {text!r} names no set; {KNOWN}")
    for name, path in sets:
        if any(question.set == name for question in found):
            raise InputError(f"--suite {text}: two sets are named {name}; take one of them")
        found += _read(name, path, public_rows)
    return found


def choose(
    questions: Iterable[Question],
    limit: int | None,
    why_not: Callable[[Question], str | None],
) -> tuple[list[Question], dict[Question, str]]:
    """The first `limit` usable questions per set, and the skipped questions with their reasons.

    `why_not` returns the reason to skip a question, or None.
    """
    count: Counter[str] = Counter()
    chosen, left_out = [], {}
    for question in questions:
        if count[question.set] == limit:
            continue
        reason = why_not(question)
        if reason is None:
            chosen.append(question)
            count[question.set] += 1
        else:
            left_out[question] = reason
    return chosen, left_out


def digest(questions: Iterable[Question]) -> str:
    """The sha256 of all questions."""
    # Questions without arguments keep the hash of earlier versions.
    return json_hash([each if each.template_kwargs else each[:-1] for each in questions])


def _sets_of(text: str) -> Iterator[tuple[str, str]]:
    """Yields name and path per set."""
    for part in names(text):
        if part == "demo":  # distinct names: the full sets have other figures
            yield from ((f"demo-{name}", str(DEMO / name / FILE)) for name in PAPER)
        elif part == "paper":
            yield from ((name, f"data:specbench/{name}/{FILE}") for name in PAPER)
        elif part in (*PAPER, SPEC_BENCH):
            yield part, f"data:specbench/{part}/{FILE}"
        elif part.startswith(PUBLIC):
            # hub:openai/gsm8k:main/test is gsm8k, tfds:squad/default/test is squad.
            kind, _, dataset = part.rpartition("/")[0].partition(":")
            of_hub = Path(dataset.split(":")[0]).name
            yield dataset.split("/")[0] if kind == "tfds" else of_hub, part
        elif Path(part).expanduser().exists():
            path = Path(part).expanduser()
            path = path / FILE if path.is_dir() else path
            yield path.resolve().parent.name if path.name == FILE else path.stem, str(path)
        else:
            raise InputError(f"--suite {part}: no such set or file; {KNOWN}")


def _read(name: str, path: str, public_rows: int) -> list[Question]:
    public = path.startswith(PUBLIC)
    records = sources.read_numbered(path)
    found: dict[Any, Question] = {}
    for place, record in itertools.islice(records, public_rows) if public else records:
        record = _from_public(record, len(found) + 1) if public else record
        question = _question(name, record, place)
        if question.id in found:
            raise InputError(f"{place}: question_id {question.id} is there twice; number them anew")
        found[question.id] = question
    if not found:
        raise InputError(f"{path} holds no questions; write one a line")
    return list(found.values())


def _question(name: str, record: dict[str, Any], place: str) -> Question:
    number, turns, category = (record.get(key) for key in ("question_id", "turns", "category"))
    if type(number) not in (int, str):
        raise InputError(f"{place}: no `question_id`; give it a number or a name")
    if not isinstance(turns, list) or not turns:
        raise InputError(f"{place}: a question without turns; give it a list of texts")
    if not all(isinstance(turn, str) and turn.strip() for turn in turns):
        raise InputError(f"{place}: a turn is empty or not text; write the question")
    category = category if isinstance(category, str) else ""
    group = name
    if name == SPEC_BENCH:
        group += "/multi_turn" if category in TALKS else f"/{category}"
    return Question(name, number, category, group, tuple(turns))


def _from_public(record: dict[str, Any], number: int) -> dict[str, Any]:
    """Converts a record of CNN/DailyMail, Natural Questions, GSM8K or the like to a question line.

    A record without a question becomes a line without turns, which `_question` refuses.
    """
    asked = record.get("question")
    asked = asked.get("text") if isinstance(asked, dict) else asked
    turns = record.get("turns")
    if isinstance(asked, str) and asked.strip():
        asked = asked.strip()  # Natural Questions has raw search queries
        turns = [asked if asked[-1] in ".?!" else f"{asked[0].upper()}{asked[1:]}?"]
    elif isinstance(record.get("article"), str):
        turns = [f"Summarize: {record['article'].strip()}"]
    return {"question_id": number, "category": "", "turns": turns}
