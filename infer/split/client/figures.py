"""What one answer was and cost, as the client and the benchmark report it."""

from __future__ import annotations

import statistics
from typing import Any

from infer.split.client.answering import SplitClient


def figures_of(
    answering: SplitClient, prompt: list[int], prefill_s: float, decode_s: float
) -> dict[str, Any]:
    """The keys of infer.generate's results, and those that a link adds; times in seconds or ms."""
    counts, tokens = answering.counts, answering.text.answer
    rounds = len(counts.accept_lengths)
    trips = [1000 * seconds for seconds in counts.round_trips_s]
    calls, trip_s = rounds + counts.prompts, answering.traffic.round_trip_s
    return {
        "prompt_ids": prompt,
        "token_ids": tokens,
        "finish_reason": answering.done,
        "rounds": rounds,
        "accept_lengths": counts.accept_lengths,
        "tau": sum(counts.accept_lengths) / rounds if rounds else None,
        "prefill_s": prefill_s,
        "decode_s": decode_s,
        "tokens_per_s": (len(tokens) - 1) / decode_s if decode_s and len(tokens) > 1 else None,
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
        "unverified": answering.text.unverified,
        "rewritten": counts.rewritten,
    }
