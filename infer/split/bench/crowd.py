"""Many clients of one server, who come by a Poisson law."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from infer.bench.arrivals import percentiles
from infer.split.client.answering import SplitClient
from infer.split.client.figures import timed
from infer.split.link import Gone, Lost
from moa_jax.config import Sampling
from moa_jax.errors import InputError


class CrowdAnswer(NamedTuple):
    """One answer of one client; its times are on the clock that all clients share."""

    begin: float
    first: float
    end: float
    question: int
    tokens: list[int]


class CrowdQuestion(NamedTuple):
    """A prompt, and the most tokens that it and its answer may have together."""

    prompt: Sequence[int]
    total: int


async def gather(
    clients: Sequence[Callable[[], SplitClient]],
    times: Sequence[float],
    questions: Sequence[CrowdQuestion],
    asks: int,
    stop_ids: Sequence[int],
) -> tuple[list[CrowdAnswer], int]:
    """The answers of all clients, who ask `asks` questions each, and how many answers failed."""
    found: list[CrowdAnswer] = []
    failed = 0

    async def one(index: int) -> None:
        nonlocal failed
        await asyncio.sleep(times[index])
        answering = clients[index]()
        try:
            for turn in range(asks):
                number = (index * asks + turn) % len(questions)
                found.append(await _ask(answering, questions[number], number, stop_ids))
        except (Lost, Gone, InputError):
            failed += asks - turn
        finally:
            await answering.close()

    await asyncio.gather(*(one(index) for index in range(len(clients))))
    return found, failed


async def _ask(
    answering: SplitClient, question: CrowdQuestion, number: int, stop_ids: Sequence[int]
) -> CrowdAnswer:
    events = answering.answer(question.prompt, question.total, stop_ids, Sampling())
    times = await timed(answering, events)
    return CrowdAnswer(times.begin, times.first, times.end, number, answering.text.answer)


def summary(found: Sequence[CrowdAnswer], failed: int) -> dict[str, Any]:
    """Tokens/s from the first question to the last answer, and waiting times in seconds."""
    if not found:
        return {"answers": 0, "failed": failed}
    span = max(one.end for one in found) - min(one.begin for one in found)
    tokens = sum(len(one.tokens) for one in found)
    return {
        "answers": len(found),
        "failed": failed,
        "seconds": span,
        "tokens_per_s": tokens / span,
        "answer_s": percentiles([one.end - one.begin for one in found]),
        "first_token_s": percentiles([one.first - one.begin for one in found]),
    }
