"""Counts of records and tokens, reported in one line per kind of fault."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TypeVar

from moa_jax.data import sources as sources_lib
from moa_jax.data.batch import Batch
from moa_jax.data.chat import Example
from moa_jax.data.files import Found
from moa_jax.data.records import unread_keys
from moa_jax.errors import InputError

if TYPE_CHECKING:
    from moa_jax.data.encode import Coder, Outcome

T = TypeVar("T")
MOST_REASONS, MOST_KEYS = 5, 8  # shown in a line
SUMS = ("kept", "examples", "full", "tokens", "response_tokens", "rows", "rewritten", "other_text")


class RecordTally:
    """Counts of the faults and unread keys of records, with the first location of each fault."""

    def __init__(self) -> None:
        self.total = 0
        self.faults: Counter[str] = Counter()
        self.first: dict[str, str] = {}  # fault -> location of its first record
        self.unread: Counter[str] = Counter()  # key -> number of records with the key

    def each(self, found: Found, use: Callable[[dict], T]) -> Iterator[T]:
        """Yield `use(record)` per record, and count records for which `use` raises InputError."""
        for place, record in found:
            self.total += 1
            try:
                made = use(sources_lib.sound(record))
            except InputError as error:
                self.add(place, str(error))
                continue
            self.unread.update(unread_keys(record))
            yield made

    def add(self, place: str, fault: str) -> None:
        """Count a fault of the record at `place`."""
        self.faults[fault] += 1
        self.first.setdefault(fault, place)

    def lines(self, noun: str = "records", verb: str = "left out") -> list[str]:
        """One line per fault, the most frequent first, and one for keys that are not read."""
        lines = [
            f"{count} of {self.total} {noun} {verb}: {fault} (first: {self.first[fault]})"
            for fault, count in self.faults.most_common()
        ]
        return lines + unread_lines(self.unread, self.total)

    def most_frequent(self) -> str:
        """The most frequent fault with its number of records and the first location."""
        ((fault, count),) = self.faults.most_common(1)
        return f"of {count}: {fault} (first: {self.first[fault]})"


def unread_lines(unread: Mapping[str, int], total: int) -> list[str]:
    """The line on keys that are not empty and not read; an empty list without such keys."""
    counts = Counter(unread).most_common()
    names = [f"`{key}` ({count})" for key, count in counts[:MOST_KEYS]]
    names += [f"{len(counts) - MOST_KEYS} others"] if len(counts) > MOST_KEYS else []
    return [f"keys that are not read, in {total} records: {', '.join(names)}"] if names else []


@dataclasses.dataclass(frozen=True)
class DataReport:
    """Counts of one split: its records by outcome, and the tokens of its rows."""

    kept: int  # records
    dropped: dict[str, int]  # reason -> number of records, the most frequent first
    examples: int  # a long plain text makes several
    full: int  # examples of max_length (or of a whole row), most of them truncated
    tokens: int
    response_tokens: int
    rows: int
    row_length: int
    first: dict[str, str] = dataclasses.field(default_factory=dict)  # reason -> first location
    unread: dict[str, int] = dataclasses.field(default_factory=dict)  # key -> number of records
    rewritten: int = 0  # records with a turn that the chat template renders unlike decoding
    other_text: int = 0  # records whose token ids decode to a text other than their messages

    def __str__(self) -> str:
        reasons = []
        for why in list(self.dropped)[:MOST_REASONS]:
            place = f" (first: {self.first[why]})" if why in self.first else ""
            reasons.append(f"{self.dropped[why]} x {why}{place}")
        others = len(self.dropped) - len(reasons)
        named = "; ".join([*reasons, f"{others} other reasons"] if others else reasons)
        summary = (
            f"{self.kept} conversations, {sum(self.dropped.values())} dropped"
            f"{named and f' ({named})'}, {self.tokens} tokens, "
            f"{self.response_tokens} of them answers, in {self.rows} rows, {self.fill:.0%} full"
        )
        lines = [summary, *unread_lines(self.unread, self.kept)]
        if self.rewritten:
            lines.append(
                f"{self._share(self.rewritten)} differ from decoding: the chat template renders "
                "past turns unlike the prompt and answer of each turn; train on the token ids that "
                "train.regenerate writes"
            )
        if self.other_text:
            lines.append(
                f"{self._share(self.other_text)} hold token ids that decode to another text than "
                "their messages; check that this tokenizer wrote them, or run train.regenerate"
            )
        return "\n".join(lines)

    def _share(self, count: int) -> str:
        return f"{count} of {self.kept} rows ({count / self.kept:.0%})"

    @property
    def fill(self) -> float:
        """Fraction of the rows' positions that hold tokens, 0 to 1."""
        return self.tokens / (self.rows * self.row_length)


def total(reports: Sequence[DataReport]) -> DataReport:
    """The sum of the reports of several paths with equal row lengths."""
    dropped = sum((Counter(report.dropped) for report in reports), Counter())
    unread = sum((Counter(report.unread) for report in reports), Counter())
    first = {why: place for report in reversed(reports) for why, place in report.first.items()}
    sums = {name: sum(getattr(report, name) for report in reports) for name in SUMS}
    return DataReport(
        dropped=dict(dropped.most_common()),
        row_length=reports[0].row_length,
        first=first,
        unread=dict(unread),
        **sums,
    )


def refusal(place: str, why: str) -> InputError:
    """The error for an unusable record if `data.bad_records` refuses such records."""
    return InputError(f"{place}: {why}, or set data.bad_records to skip")


class Tally:
    """Counts the records that pass through; `report` is complete after the last record."""

    def __init__(self, paths: Sequence[str], coder: Coder) -> None:
        self._where = ", ".join(paths) or "an empty list of paths"
        self._coder = coder
        self._records = RecordTally()
        self._counts: Counter[str] = Counter()

    def examples(self, outcomes: Iterable[Outcome]) -> Iterator[Example]:
        """Yield the examples of all usable records.

        Raises InputError for the first unusable record if the config refuses such records, and at
        the end if no example was found.
        """
        for place, found in outcomes:
            if isinstance(found, InputError):
                self._drop(place, str(found))
                continue
            examples = found.examples
            self._records.unread.update(found.unread)
            self._counts.update(
                kept=bool(examples),
                examples=len(examples),
                full=sum(len(each.tokens_T) >= self._coder.limit for each in examples),
                rewritten=any(each.rewritten for each in examples),
                other_text=found.other_text,
            )
            yield from examples
        if not self._counts["examples"]:
            self._raise_nothing_left()

    def rows(self, blocks: Iterable[Batch]) -> Iterator[Batch]:
        """Yield the same rows and count their tokens."""
        for rows in blocks:
            self._counts.update(
                tokens=int((rows.segment_BT > 0).sum()),
                response_tokens=int(rows.response_BT.sum()),
                rows=len(rows.tokens_BT),
            )
            yield rows

    def report(self) -> DataReport:
        """The report of the records that have been encoded so far."""
        return DataReport(
            dropped=dict(self._records.faults.most_common()),
            row_length=self._coder.config.row_length,
            first=self._records.first,
            unread=dict(self._records.unread),
            **{name: self._counts[name] for name in SUMS},
        )

    def _drop(self, place: str, why: str) -> None:
        if self._coder.config.bad_records == "refuse":
            raise refusal(place, why)
        self._records.add(place, why)

    def _raise_nothing_left(self) -> None:
        where, sources = self._where, self._coder.config.sources
        if self._records.faults:
            raise InputError(
                f"none of {self._records.faults.total()} records of {where} can be used; "
                f"{self._records.most_frequent()}"
            )
        wanted = f" of the sources {', '.join(sources)}" if sources else ""
        raise InputError(f"no records{wanted} in {where}; name files that hold some")
