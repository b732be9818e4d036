"""Measures infer.serve under load: plain decoding and drafting, at several rates of requests.

    python -m infer.bench --serve                                   the bundled pair
    python -m infer.bench --serve --rates 0.5,1,2 --modes plain,auto --json
    python -m infer.bench --serve --target DIR --draft moa=A --draft eagle=B --plot serve.png

Each way to decode has a server of its own, all on this machine and on the same pair. From this
process clients send each of them the same questions at the same times, which follow a Poisson law,
and read streams. The ways take turns rate by rate, another one first each time, and only one server
is loaded at a time. Rates such as 0.5x are shares of what plain decoding does with all slots full.
Texts of the same request are compared; where one differs in float32, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from infer.evaluation.contenders import PLAIN
from infer.listening.child import ended_by_sigterm
from infer.program import Progress, progress
from infer.serving.bench import clients, counts, figures, picture, tables
from infer.serving.bench.clients import Answer
from infer.serving.bench.figures import Capacity
from infer.serving.bench.flags import SECONDS, Rate, check, parser_of, ways_of
from infer.serving.bench.questions import Asked, Questions
from infer.serving.bench.stage import Server, serving
from moa_jax.errors import InputError
from moa_jax.files.folders import write_whole
from moa_jax.measure.arrivals import arrivals, arrivals_within
from moa_jax.measure.turns import in_turns

DIFFERENT = 1  # exit code, as of infer.evaluate
CAPACITY_SECONDS, FILLING_SECONDS = 6.0, 1.5  # the second: until all slots are surely full
WARMING = 1_000_000  # index of the first request that is not measured


class Cell(NamedTuple):
    """What one server is sent at one rate."""

    rate: float
    of_capacity: float | None
    asks: list[Asked]
    times: list[float]  # seconds


class Found(NamedTuple):
    """What became of it."""

    answers: list[Answer]
    facts: dict[str, Any]  # what the server says of itself


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    check(args)
    with ended_by_sigterm():
        document = measure(args)
    if args.plot:
        picture.plot(document, Path(args.plot))
    text = json.dumps(document)
    if args.output:
        write_whole(args.output, text + "\n")
    print(text if args.json else tables.render(document))
    differs = document["differences"] and document["settings"]["dtype"] == "float32"
    return DIFFERENT if differs else 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole document."""
    machine = _machine()
    with serving(ways_of(args)) as servers:
        return asyncio.run(_measure(args, machine, servers))


async def _measure(
    args: argparse.Namespace, machine: dict[str, Any], servers: Sequence[Server]
) -> dict[str, Any]:
    model, most_tokens = await _model_of(servers[0])
    questions = Questions(args, most_tokens)
    idle, capacities = [], []
    for server in servers:
        print(f"{server.way.label}: compiling what requests ask for", file=sys.stderr)
        idle.append(await _prepare(server, questions, args.slots))
    for server in servers:
        capacities.append(await _capacity(server, questions, args.slots))
    plain = next((i for i, server in enumerate(servers) if server.way.mode == PLAIN), None)
    cells = cells_of(args, questions, None if plain is None else capacities[plain])
    found = await _in_turns(servers, cells)
    differences: list[dict[str, Any]] = []
    rates = [
        _rate_of(cell, servers, each, plain, differences)
        for cell, each in zip(cells, found, strict=True)
    ]
    dtype = args.dtype or ("float32" if machine["platform"] == "cpu" else "bfloat16")
    triples = zip(servers, capacities, idle, strict=True)
    return {
        "servers": [_facts(server) | c._asdict() | {"idle_cpu": cpu} for server, c, cpu in triples],
        "rates": rates,
        "beside_plain": _beside_plain(servers, rates),
        "differences": differences,
        "settings": _settings(args, questions) | {"model": model, "dtype": dtype},
        "machine": machine,
    }


# ---- before measuring ---------------------------------------------------------------------


async def _model_of(server: Server) -> tuple[str, int]:
    """The model's name, and the tokens that a prompt with its answer may have."""
    async with clients.client_of(server.url) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
    return card["id"], card["max_model_len"]


async def _prepare(server: Server, questions: Questions, slots: int) -> float | None:
    """Asks with more and more clients, so that what they need is compiled; how idle it is then.

    Raises InputError where the server does not answer.
    """
    count = 1
    while count <= slots:
        asks = itertools.islice(questions.from_(WARMING), 2 * count)
        async with clients.client_of(server.url) as client:
            _check(server, await clients.keep_asking(client, asks, count))
        count *= 2
    return server.settle()


def _check(server: Server, answers: Sequence[Answer]) -> None:
    server.check()
    if errors := [answer.error for answer in answers if answer.error]:
        raise InputError(f"the server of {server.way.label} does not answer: {errors[0]}")


async def _capacity(server: Server, questions: Questions, slots: int) -> Capacity:
    """What a server does while all its slots are full."""
    async with clients.client_of(server.url) as client:
        begin = time.perf_counter()
        end = begin + FILLING_SECONDS + CAPACITY_SECONDS
        asks = clients.until(end, questions.from_(2 * WARMING))
        answers = await clients.keep_asking(client, asks, slots)
    _check(server, answers)
    server.settle()
    return figures.capacity_of(answers, begin + FILLING_SECONDS, end)


def cells_of(args: argparse.Namespace, questions: Questions, plain: Capacity | None) -> list[Cell]:
    """What is sent at each rate; questions go on from one rate to the next."""
    found, begin = [], 0
    for rate in sorted(args.rates, key=lambda rate: _per_second(rate, plain)):
        value = _per_second(rate, plain)
        if args.requests:
            times = arrivals(args.requests, value, args.seed)
        else:
            times = arrivals_within(args.seconds or SECONDS, value, args.seed)
        asks = list(itertools.islice(questions.from_(begin), len(times)))
        begin += len(times)
        of_capacity = value / plain.requests_per_s if plain else None
        found.append(Cell(value, of_capacity, asks, times))
    return found


def _per_second(rate: Rate, plain: Capacity | None) -> float:
    return rate.value * plain.requests_per_s if rate.of_capacity and plain else rate.value


# ---- measuring ----------------------------------------------------------------------------


async def _in_turns(servers: Sequence[Server], cells: Sequence[Cell]) -> list[list[Found]]:
    """What became of each cell with each server, in the servers' order."""
    found: list[dict[int, Found]] = [{} for _ in cells]
    total = len(servers) * sum(len(cell.asks) for cell in cells)
    seconds = len(servers) * sum(_least_seconds(cell) for cell in cells)
    with progress(total, "answers") as bar:
        bar.line(f"{len(servers)} ways at {len(cells)} rates: at least {seconds / 60:.1f} minutes")
        for turn in in_turns(len(servers), len(cells), warm_up=False):
            server, cell = servers[turn.way], cells[turn.question]
            found[turn.question][turn.way] = await _play(server, cell, bar)
            server.settle()  # what it compiles now must not slow down the next one
    return [[each[way] for way in range(len(servers))] for each in found]


def _least_seconds(cell: Cell) -> float:
    """How long a cell takes with a server that does no more than plain's capacity."""
    return cell.times[-1] * max(cell.of_capacity or 0.0, 1.0)


async def _play(server: Server, cell: Cell, bar: Progress) -> Found:
    """Sends a server what it is sent at one rate; raises InputError if it ends."""
    try:
        async with clients.client_of(server.url) as client, counts.watched(client) as seen:
            before = await counts.read_counts(client)
            last = time.perf_counter() + cell.times[-1]
            answers = await clients.come(client, cell.asks, cell.times, bar.step)
            after = await counts.read_counts(client)
    except httpx.HTTPError as error:
        server.check()
        raise InputError(
            f"the server of {server.way.label} does not tell its metrics: {type(error).__name__}"
        ) from error
    server.check()
    return Found(answers, counts.what_server_did(before, after) | counts.mean_in_use(seen, last))


# ---- the document -------------------------------------------------------------------------


def _rate_of(
    cell: Cell,
    servers: Sequence[Server],
    found: Sequence[Found],
    plain: int | None,
    differences: list[dict[str, Any]],
) -> dict[str, Any]:
    """All ways at one rate; texts are compared with those of the first way."""
    facts = {"rate": cell.rate, "of_capacity": cell.of_capacity}
    first = found[0 if plain is None else plain].answers
    rows = []
    for server, each in zip(servers, found, strict=True):
        row = facts | _facts(server) | figures.summarise(each.answers) | each.facts
        row |= figures.beside(each.answers, first)
        if plain is None:
            row |= dict.fromkeys((key for key in row if "plain" in key), None) | {"speedup": None}
        wrong = figures.differences(each.answers, first, {"rate": cell.rate} | _facts(server))
        rows.append(row | {"different": len(wrong)})
        differences += wrong
    return facts | {"requests": len(cell.asks), "ways": rows}


def _beside_plain(
    servers: Sequence[Server], rates: Sequence[dict[str, Any]]
) -> list[dict[str, Any]]:
    """How each way that drafts does over all rates."""
    found = []
    for index, server in enumerate(servers):
        rows = [rate["ways"][index] for rate in rates]
        if server.way.mode != PLAIN and any(row["speedup"] is not None for row in rows):
            found.append(_facts(server) | figures.worst(rows))
    return found


def _facts(server: Server) -> dict[str, Any]:
    way = server.way
    return {"way": way.label, "mode": way.mode, "draft": way.draft}


def _settings(args: argparse.Namespace, questions: Questions) -> dict[str, Any]:
    shown = ("slots", "max_new_tokens", "ignore_stop", "temperature", "seed", "weights", "threads")
    return {key: getattr(args, key) for key in shown} | {
        "target": str(args.target or "bundled"),
        "suite": questions.suite,
        "questions": questions.count,
        "left_out": questions.left_out,
        "seconds": None if args.requests else args.seconds or SECONDS,
        "requests": args.requests,
    }


def _machine() -> dict[str, Any]:
    """The device as another process sees it: this one must not take a GPU from the servers."""
    command = [sys.executable, "-m", "infer.info", "--json"]
    done = subprocess.run(command, capture_output=True, text=True)
    if done.returncode:
        line = (done.stderr.strip().splitlines() or [f"exit {done.returncode}"])[-1]
        raise InputError(f"infer.info failed: {line}")
    report = json.loads(done.stdout)
    if not report["devices"]:
        raise InputError(f"there is no device: {report['device_error']}")
    device = report["devices"][0]
    return {
        "device_kind": device["kind"],
        "platform": device["name"].partition(":")[0],
        "devices": len(report["devices"]),
        "cores": report["host"]["cores"],
        "jax": report["versions"]["jax"],
    }
