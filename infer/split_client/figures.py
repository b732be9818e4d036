"""Figures of one answer, as infer.client and infer.bench report them."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, NamedTuple

from infer.split_client.answering import SplitClient
from infer.split_client.state import AnswerEvent


class AnswerTimes(NamedTuple):
    """Times (s) of the request, the first tokens and the end of an answer, on one clock."""

    begin: float
    first: float
    end: float
    count: int  # tokens at time `first`: 1 from a server, a piece from the drafter alone


async def timed(
    answering: SplitClient,
    events: AsyncIterator[AnswerEvent],
    see: Callable[[AnswerEvent], int | None] = lambda event: None,
) -> AnswerTimes:
    """Consumes `events` of `answering.answer`; cuts the answer at the first number from `see`."""
    begin, first, count = time.perf_counter(), 0.0, 0
    async with contextlib.aclosing(events):
        async for event in events:
            if not count and (count := len(answering.text.answer)):
                first = time.perf_counter()
            if (cut := see(event)) is not None:
                await answering.stop(cut)
                break
    end = time.perf_counter()
    return AnswerTimes(begin, first or end, end, count)


def figures_of(answering: SplitClient, prompt: list[int], times: AnswerTimes) -> dict[str, Any]:
    """The keys of infer.generate's results plus those of the link; times in s, or ms (`_ms`)."""
    prefill_s, decode_s = times.first - times.begin, times.end - times.first
    counts, tokens = answering.counts, answering.text.answer
    later = len(tokens) - times.count
    rounds = len(counts.accept_lengths)
    trips = [1000 * seconds for seconds in counts.round_trips_s]
    calls, trip_s = rounds + counts.prompts, answering.session.traffic.round_trip_s
    return {
        "prompt_ids": prompt,
        "token_ids": tokens,
        "finish_reason": answering.done,
        "rounds": rounds,
        "accept_lengths": counts.accept_lengths,
        "tau": sum(counts.accept_lengths) / rounds if rounds else None,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "tokens_per_s": later / decode_s if decode_s and later > 0 else None,
        "server_calls": calls,
        "server_calls_per_token": calls / len(tokens) if tokens else None,
        "reply_ms": statistics.median(trips) if trips else None,
        "rtt_ms": trip_s and 1000 * trip_s,
        "bytes_up": counts.bytes_up,
        "bytes_down": counts.bytes_down,
        "bytes_up_per_token": counts.bytes_up / len(tokens) if tokens else None,
        "bytes_down_per_token": counts.bytes_down / len(tokens) if tokens else None,
        "drafted": counts.drafted,
        "rounds_drafted_ahead": counts.ahead,
        "drafting_s": counts.drafting_s,
        "waiting_s": counts.waiting_s,
        "alone_s": counts.alone_s,
        "drops": counts.drops,
        "unverified": answering.text.num_unverified,
        "rewritten": counts.rewritten,
    }
