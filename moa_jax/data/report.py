"""What became of the records of one split: counted as they pass, reported in one line."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from moa_jax.data.batch import Batch
from moa_jax.data.chat import Example
from moa_jax.data.encode import Coder, Outcome
from moa_jax.errors import InputError

MOST_REASONS = 5  # in the line
SUMS = ("kept", "examples", "full", "tokens", "response_tokens", "rows")


@dataclasses.dataclass(frozen=True)
class DataReport:
    """What became of the records of one split, and what its rows hold."""

    kept: int  # records
    dropped: dict[str, int]  # why -> records, the most frequent reason first
    examples: int  # a long plain text makes several of one record
    full: int  # examples that take all of max_length (or of a row), most of them cut
    tokens: int
    response_tokens: int
    rows: int
    row_length: int
    first: dict[str, str] = dataclasses.field(default_factory=dict)  # why -> the first such place

    def __str__(self) -> str:
        reasons = []
        for why in list(self.dropped)[:MOST_REASONS]:
            place = f" (first: {self.first[why]})" if why in self.first else ""
            reasons.append(f"{self.dropped[why]} x {why}{place}")
        others = len(self.dropped) - len(reasons)
        told = "; ".join([*reasons, f"{others} other reasons"] if others else reasons)
        return (
            f"{self.kept} conversations, {sum(self.dropped.values())} dropped"
            f"{told and f' ({told})'}, {self.tokens} tokens, "
            f"{self.response_tokens} of them answers, in {self.rows} rows, {self.fill:.0%} full"
        )

    @property
    def fill(self) -> float:
        """Share of the rows' places that hold tokens, 0 to 1."""
        return self.tokens / (self.rows * self.row_length)


def total(reports: Sequence[DataReport]) -> DataReport:
    """One report for several paths with rows of one length."""
    dropped = sum((Counter(report.dropped) for report in reports), Counter())
    first = {why: place for report in reversed(reports) for why, place in report.first.items()}
    sums = {name: sum(getattr(report, name) for report in reports) for name in SUMS}
    return DataReport(
        dropped=dict(dropped.most_common()), row_length=reports[0].row_length, first=first, **sums
    )


def refusal(place: str, why: str) -> InputError:
    """The error for a record that cannot be used, where none may be left out."""
    return InputError(f"{place}: {why} (or set data.bad_records to skip)")


class Tally:
    """Counts the records that pass through it; `report` is complete when all have passed."""

    def __init__(self, paths: Sequence[str], coder: Coder) -> None:
        self._where = ", ".join(paths) or "an empty list of paths"
        self._coder = coder
        self._dropped: Counter[str] = Counter()
        self._first: dict[str, str] = {}
        self._counts: Counter[str] = Counter()

    def examples(self, outcomes: Iterable[Outcome]) -> Iterator[Example]:
        """The examples of all records that can be used.

        Raises InputError for the first that cannot, if the config says so, and at the end if
        there was no example.
        """
        for place, found in outcomes:
            if isinstance(found, InputError):
                self._drop(place, str(found))
                continue
            lengths = [len(example.tokens_T) for example in found]
            self._counts.update(
                kept=bool(found),
                examples=len(found),
                full=sum(length >= self._coder.limit for length in lengths),
            )
            yield from found
        if not self._counts["examples"]:
            self._raise_nothing_left()

    def rows(self, blocks: Iterable[Batch]) -> Iterator[Batch]:
        """The same rows."""
        for rows in blocks:
            self._counts.update(
                tokens=int((rows.segment_BT > 0).sum()),
                response_tokens=int(rows.response_BT.sum()),
                rows=len(rows.tokens_BT),
            )
            yield rows

    def report(self) -> DataReport:
        """What has passed."""
        dropped = dict(self._dropped.most_common())
        counts = {name: self._counts[name] for name in SUMS}
        return DataReport(
            dropped=dropped, row_length=self._coder.config.row_length, first=self._first, **counts
        )

    def _drop(self, place: str, why: str) -> None:
        if self._coder.config.bad_records == "refuse":
            raise refusal(place, why)
        self._dropped[why] += 1
        self._first.setdefault(why, place)

    def _raise_nothing_left(self) -> None:
        where, sources = self._where, self._coder.config.sources
        if self._dropped:
            ((why, count),) = self._dropped.most_common(1)
            raise InputError(
                f"none of {self._dropped.total()} records of {where} can be used; "
                f"of {count}: {why} (first: {self._first[why]})"
            )
        wanted = f" of the sources {', '.join(sources)}" if sources else ""
        raise InputError(f"no records{wanted} in {where}: name files that hold some")
