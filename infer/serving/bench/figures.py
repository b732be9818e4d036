"""Rows of results: what clients saw of one server at one rate, and how that compares with plain.

A rate is played several times, and a figure is of all requests together.

latency             from when a request should have been sent to the end of its answer
first token         the same to the first token
a token             from the first token to the end, over the tokens after the first
throughput          tokens of whole answers over the time from the first request to the last end
speedup             median over requests of (latency with plain decoding / latency)
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from infer.bench.arrivals import percentiles
from infer.bench.statistics import median
from infer.serving.bench.clients import RequestOutcome

Runs = Sequence[Sequence[RequestOutcome]]
RATIOS = ("speedup", "throughput_over_plain", "p95_over_plain")


class Capacity(NamedTuple):
    """What a server does while as many clients as it has slots ask all the time."""

    requests_per_s: float
    tokens_per_s: float


def capacity_of(answers: Sequence[RequestOutcome], begin: float, end: float) -> Capacity:
    """Requests and tokens between two times; an answer counts by its share that lies there.

    Raises ZeroDivisionError for an empty time.
    """
    requests = tokens = 0.0
    for answer in answers:
        inside = min(answer.end, end) - max(answer.sent, begin)
        if not answer.error and inside > 0:
            share = inside / (answer.end - answer.sent)
            requests, tokens = requests + share, tokens + share * answer.tokens
    return Capacity(requests / (end - begin), tokens / (end - begin))


def busiest(shares: Sequence[float | None]) -> float | None:
    """The most that a server of a way uses of a core at rest; None where one is not known."""
    return None if None in shares else max(shares)


def mean_capacity(capacities: Sequence[Capacity]) -> Capacity:
    """The mean capacity of a way's servers."""
    return Capacity(*(sum(each) / len(capacities) for each in zip(*capacities, strict=True)))


def summarise(runs: Runs) -> dict[str, Any]:
    """What clients saw of one server at one rate, which was played so often."""
    answers = list(itertools.chain(*runs))
    whole = [answer for answer in answers if not answer.error]
    span = sum(max(each.end for each in run) - min(each.due for each in run) for run in runs)
    tokens = sum(answer.tokens for answer in whole)
    firsts = [answer.first - answer.due for answer in whole if answer.first is not None]
    each = [
        (answer.end - answer.first) / (answer.tokens - 1)
        for answer in whole
        if answer.first is not None and answer.tokens > 1
    ]
    late = percentiles([answer.sent - answer.due for answer in answers])["p95"]
    return {
        "requests": len(answers),
        "failed": len(answers) - len(whole),
        "failures": dict(Counter(answer.error for answer in answers if answer.error)),
        "seconds": span,
        "tokens": tokens,
        "tokens_per_s": tokens / span,
        "requests_per_s": len(whole) / span,
        "first_token_ms": _ms(percentiles(firsts)),
        "ms_per_token": _ms(percentiles(each)),
        "latency_s": percentiles([answer.seconds for answer in whole]),
        "sent_late_ms": None if late is None else 1e3 * late,
    }


def beside(runs: Runs, plain: Runs) -> dict[str, Any]:
    """How a server compares with plain decoding of the same requests; above 1 it is better.

    Requests count where both answered. Each run alone is in `runs`, to show how sure a figure is.
    """
    found = _beside(runs, plain)
    each = [_beside([run], [other]) for run, other in zip(runs, plain, strict=True)]
    return found | {"runs": [{key: one[key] for key in RATIOS} for one in each]}


def _beside(runs: Runs, plain: Runs) -> dict[str, Any]:
    known = {answer.asked.index: answer for answer in itertools.chain(*plain) if not answer.error}
    pairs = [
        (answer, known[answer.asked.index])
        for answer in itertools.chain(*runs)
        if not answer.error and answer.asked.index in known
    ]
    ours, theirs = summarise(runs), summarise(plain)
    p95 = lambda row: row["latency_s"]["p95"]
    return {
        "speedup": median([theirs.seconds / ours.seconds for ours, theirs in pairs]),
        "throughput_over_plain": _over(ours["tokens_per_s"], theirs["tokens_per_s"]),
        "p95_over_plain": _over(p95(theirs), p95(ours)),
        "first_token_over_plain": _over(
            theirs["first_token_ms"]["p50"], ours["first_token_ms"]["p50"]
        ),
        "compared": len(pairs),
    }


def differences(runs: Runs, others: Runs, facts: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The requests whose text is another one than another way's, where both have answered."""
    known = {answer.asked.index: answer for answer in itertools.chain(*others) if not answer.error}
    return [
        dict(facts) | {"request": answer.asked.index, "set": answer.asked.set}
        for answer in itertools.chain(*runs)
        if not answer.error
        and answer.asked.index in known
        and _said(answer) != _said(known[answer.asked.index])
    ]


def worst(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Of the rows of one way: the speedup at the lowest rate, and the worst of all.

    Rates come in their order; of clients alone it is that of the fewest.
    """
    known = [row for row in rows if row.get("speedup") is not None]
    low = next((row for row in known if row["rate"] is not None), known[0])
    least = lambda key: min((row for row in known if row[key]), key=lambda row: row[key])
    return {
        "speedup_at_lowest_rate": _of_all_and_each(low, "speedup"),
        "lowest_throughput_over_plain": _of_all_and_each(
            least("throughput_over_plain"), "throughput_over_plain"
        ),
        "lowest_p95_over_plain": _of_all_and_each(least("p95_over_plain"), "p95_over_plain"),
    }


def _of_all_and_each(row: Mapping[str, Any], key: str) -> dict[str, Any]:
    """A figure of one rate, and the same of each run alone."""
    each = [run[key] for run in row["runs"]]
    return {"rate": row["rate"], "clients": row["clients"], "value": row[key], "runs": each}


def _said(answer: RequestOutcome) -> tuple[str, int]:
    return answer.text, answer.tokens


def _ms(values: Mapping[str, float | None]) -> dict[str, float | None]:
    return {key: None if value is None else 1e3 * value for key, value in values.items()}


def _over(above: float | None, below: float | None) -> float | None:
    return above / below if above and below else None
