"""Measures infer.serve under load: plain decoding and drafting, at several rates of requests.

    python -m infer.bench --serve                                   the bundled pair
    python -m infer.bench --serve --rates 1c,0.5,1,2 --modes plain,auto --json
    python -m infer.bench --serve --target DIR --draft moa=A --draft eagle=B --plot serve.png

Each way to decode has a server of its own, all on this machine and on the same pair. From this
process clients send each of them the same questions at the same times, which follow a Poisson law,
and read streams. The ways take turns rate by rate, another one first each time, and only one server
is loaded at a time; all rates come again with other questions as often as --repeats says. With
--servers each way has several, and teams of one server a way take turns repeat by repeat, since two
processes that run the same programs may be some percent apart for as long as they live. Rates
such as 0.5x are shares of what plain decoding does with all slots full, and 2c are two clients who
ask again once they are answered. What was measured while a server compiled is measured again. Texts
of the same request are compared; where one differs in float32, the exit code is 1.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from infer.bench.arrivals import arrivals, arrivals_within
from infer.bench.candidates import PLAIN
from infer.documents import CODES, until_cut
from infer.listening.child import ROOT
from infer.program import progress
from infer.serving.bench import clients, counts, figures, picture, tables
from infer.serving.bench.clients import RequestOutcome
from infer.serving.bench.counts import ServerCounts
from infer.serving.bench.figures import Capacity
from infer.serving.bench.flags import EACH, SECONDS, Rate, check, parser_of, ways_of
from infer.serving.bench.questions import Asked, Questions
from infer.serving.bench.stage import Server, serving
from moa_jax.errors import InputError
from moa_jax.files.folders import write_whole
from moa_jax.files.json_text import to_json
from moa_jax.measure.turns import rotated

DIFFERENT = 1  # exit code, as of infer.evaluate
CAPACITY_SECONDS, FILLING_SECONDS = 6.0, 1.5  # the second: until all slots are surely full
WARMING = 1_000_000  # index of the first request that is not measured
# By number of clients: requests at least, since texts of other lengths want other programs; and how
# often, of which the last ones in a row make nothing new
LEAST_WARMING, MOST_WARMINGS, QUIET_WARMINGS = 8, 24, 2
ATTEMPTS = 3  # at a cell in which something is compiled


class Cell(NamedTuple):
    """What every server of a team is sent at one rate."""

    asks: list[Asked]
    times: list[float]  # seconds at which requests come; with clients there are none
    clients: int | None  # who ask one after the other


class ServerFound(NamedTuple):
    """What became of it with one server."""

    answers: list[RequestOutcome]
    grown: ServerCounts  # what the server has counted
    seen: list[ServerCounts]  # what it did until the last request came

    @property
    def compiled(self) -> bool:
        """Whether the server made programs, which slows it down."""
        return self.grown.get(counts.PROGRAMS, 0.0) > 0


class Played(NamedTuple):
    """One rate with every server, as often as it was played."""

    rate: float | None  # requests a second
    of_capacity: float | None
    clients: int | None
    cells: list[list[ServerFound]]  # by repeat and way

    @property
    def facts(self) -> dict[str, Any]:
        return {"rate": self.rate, "of_capacity": self.of_capacity, "clients": self.clients}


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    check(args)
    document = measure(args)
    if args.plot:
        picture.plot(document, Path(args.plot))
    text = to_json(document)
    if args.output:
        write_whole(args.output, text + "\n")
    print(text if args.json else tables.render(document))
    if "cut" in document:
        return CODES[document["cut"]["by"]]
    differs = document["differences"] and document["settings"]["dtype"] == "float32"
    return DIFFERENT if differs else 0


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """The whole document."""
    machine, found = _machine(), {}
    with until_cut() as cut, serving(ways_of(args), args.servers) as teams:
        asyncio.run(_measure(args, machine, teams, found))
    if not found:
        sys.exit(cut.code)
    return found | cut.mark(len(found["rates"]), len(args.rates), " rates")


async def _measure(
    args: argparse.Namespace,
    machine: dict[str, Any],
    teams: Sequence[Sequence[Server]],
    found: dict[str, Any],
) -> None:
    """Fills the document, with servers that are there: each team has one of every way.

    Where it is cancelled, the document has the rates that were played until then, if any.
    """
    servers = teams[0]
    model, most_tokens = await _model_of(servers[0])
    questions = Questions(args, most_tokens)
    idle_of_all, capacity_of_all = [], []
    for server in itertools.chain(*teams):
        print(f"{server.way.label}: compiling what requests ask for", file=sys.stderr)
        idle_of_all.append(await _prepare(server, questions, args.slots))
    for server in itertools.chain(*teams):
        capacity_of_all.append(await _capacity(server, questions, args.slots))
    of_ways = lambda each: [each[way :: len(servers)] for way in range(len(servers))]
    idle, each_capacity = map(figures.busiest, of_ways(idle_of_all)), of_ways(capacity_of_all)
    capacities = list(map(figures.mean_capacity, each_capacity))
    plain = next((i for i, server in enumerate(servers) if server.way.mode == PLAIN), None)
    dtype = args.dtype or ("float32" if machine["platform"] == "cpu" else "bfloat16")
    rows = zip(servers, capacities, idle, each_capacity, strict=True)
    about = {
        "servers": [
            _facts(server)
            | capacity._asdict()
            | {"idle_cpu": cpu, "each_tokens_per_s": [one.tokens_per_s for one in each]}
            for server, capacity, cpu, each in rows
        ],
        "settings": _settings(args, questions) | {"model": model, "dtype": dtype},
        "machine": machine,
    }
    played = _to_play(args.rates, None if plain is None else capacities[plain])
    try:
        await _in_turns(args, teams, questions, played)
    finally:
        if played := [each for each in played if each.cells]:
            differences: list[dict[str, Any]] = []
            rates = [_rate_of(each, servers, plain, differences) for each in played]
            beside = _beside_plain(servers, rates)
            found |= about | {"rates": rates, "beside_plain": beside, "differences": differences}


# ---- before measuring ---------------------------------------------------------------------


async def _model_of(server: Server) -> tuple[str, int]:
    """The model's name, and the tokens that a prompt with its answer may have."""
    async with clients.client_of(server.url) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
    return card["id"], card["max_model_len"]


async def _prepare(server: Server, questions: Questions, slots: int) -> float | None:
    """Asks with more and more clients, with each number until it makes nothing new.

    Returns how idle the server is then. Raises InputError where it does not answer.
    """
    share, begin = None, WARMING
    async with clients.client_of(server.url) as client:
        for count in [1 << power for power in range(slots.bit_length())]:
            num_asks, quiet = max(2 * count, LEAST_WARMING), 0
            for _ in range(MOST_WARMINGS):
                before = await counts.num_programs(client)
                asks = itertools.islice(questions.from_(begin), num_asks)
                _check(server, await clients.keep_asking(client, asks, count))
                begin += num_asks
                share = server.settle()
                quiet = quiet + 1 if await counts.num_programs(client) == before else 0
                if quiet == QUIET_WARMINGS:
                    break
    return share


def _check(server: Server, answers: Sequence[RequestOutcome]) -> None:
    server.check()
    if errors := [answer.error for answer in answers if answer.error]:
        raise InputError(f"the server of {server.way.label} does not answer: {errors[0]}")


async def _capacity(server: Server, questions: Questions, slots: int) -> Capacity:
    """What a server does while all its slots are full, and compiles nothing if all goes well."""
    async with clients.client_of(server.url) as client:
        for attempt in range(ATTEMPTS):
            programs, begin = await counts.num_programs(client), time.perf_counter()
            end = begin + FILLING_SECONDS + CAPACITY_SECONDS
            asks = clients.until(end, questions.from_((2 + attempt) * WARMING))
            answers = await clients.keep_asking(client, asks, slots)
            _check(server, answers)
            server.settle()
            found = figures.capacity_of(answers, begin + FILLING_SECONDS, end)
            # Rates are shares of it, and a machine that stood still meanwhile has answered nothing.
            if found.requests_per_s and await counts.num_programs(client) == programs:
                return found
    if not found.requests_per_s:
        raise InputError(
            f"the server of {server.way.label} answers nothing in {CAPACITY_SECONDS} s"
        )
    return found


def cell_of(args: argparse.Namespace, questions: Questions, played: Played, begin: int) -> Cell:
    """What is sent at a rate: the questions from one on, at times that depend on the first."""
    seed = args.seed + begin
    if played.clients:
        times, count = [], args.requests or EACH * played.clients
    else:
        if args.requests:
            times = arrivals(args.requests, played.rate, seed)
        else:
            times = arrivals_within(args.seconds or SECONDS, played.rate, seed)
        count = len(times)
    asks = itertools.islice(questions.from_(begin), count)
    return Cell(list(asks), times, played.clients)


def _to_play(rates: Sequence[Rate], plain: Capacity | None) -> list[Played]:
    """Clients, the fewest first, and then rates, the lowest first."""
    crowds = sorted(rate.clients for rate in rates if rate.clients)
    whole = plain.requests_per_s if plain else 1.0
    per_second = [
        rate.value * (whole if rate.of_capacity else 1.0) for rate in rates if not rate.clients
    ]
    share = lambda rate: rate / whole if plain else None
    return [Played(None, None, count, []) for count in crowds] + [
        Played(rate, share(rate), None, []) for rate in sorted(per_second)
    ]


# ---- measuring ----------------------------------------------------------------------------


async def _in_turns(
    args: argparse.Namespace,
    teams: Sequence[Sequence[Server]],
    questions: Questions,
    found: Sequence[Played],
) -> None:
    """Plays all rates with one team, the slowest first, then with the next, --repeats times."""
    begin = 0
    with progress(args.repeats * len(found) * len(teams[0]), "cells") as bar:
        for repeat, (index, played) in itertools.product(range(args.repeats), enumerate(found)):
            servers = teams[repeat % len(teams)]
            order = rotated(range(len(servers)), repeat + repeat // len(teams) + index)
            for _ in range(ATTEMPTS):
                cell = cell_of(args, questions, played, begin)
                begin += len(cell.asks)
                each = {way: await _play(servers[way], cell) for way in order}
                if not (late := [servers[way].way.label for way in order if each[way].compiled]):
                    break
                name = tables.name_of_rate(played.facts)
                bar.line(f"{' and '.join(late)} compiled at {name}: once more")
            bar.step(len(servers))
            played.cells.append([each[way] for way in range(len(servers))])


async def _play(server: Server, cell: Cell) -> ServerFound:
    """Sends a server what it is sent at one rate; raises InputError if it ends."""
    try:
        async with clients.client_of(server.url) as client, counts.watched(client) as seen:
            before = await counts.read_counts(client)
            if cell.clients:
                answers = await clients.keep_asking(client, cell.asks, cell.clients)
                last = time.perf_counter()
            else:
                last = time.perf_counter() + cell.times[-1]
                answers = await clients.come(client, cell.asks, cell.times)
            server.settle()  # what it compiles now must not slow down the next one
            after = await counts.read_counts(client)
    except httpx.HTTPError as error:
        server.check()
        raise InputError(
            f"the server of {server.way.label} does not tell its metrics: {type(error).__name__}"
        ) from error
    server.check()
    return ServerFound(answers, counts.growth(before, after), counts.seen_until(seen, last))


# ---- the document -------------------------------------------------------------------------


def _rate_of(
    played: Played,
    servers: Sequence[Server],
    plain: int | None,
    differences: list[dict[str, Any]],
) -> dict[str, Any]:
    """All ways at one rate; texts are compared with those of the first way."""
    facts = played.facts
    runs_of = lambda way: [cell[way].answers for cell in played.cells]
    first = runs_of(plain or 0)
    rows = []
    for index, server in enumerate(servers):
        runs, who = runs_of(index), _facts(server)
        grown = sum((Counter(cell[index].grown) for cell in played.cells), Counter())
        seen = list(itertools.chain(*(cell[index].seen for cell in played.cells)))
        row = facts | who | figures.summarise(runs) | counts.what_server_did(grown)
        row |= counts.mean_in_use(seen) | figures.beside(runs, first)
        if plain is None:
            row |= dict.fromkeys((key for key in row if "plain" in key), None)
            row |= {"speedup": None, "runs": []}
        wrong = figures.differences(runs, first, facts | who)
        rows.append(row | {"different": len(wrong)})
        differences += wrong
    return facts | {"requests": sum(map(len, first)), "ways": rows}


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
        "mesh": args.mesh or None,
        "suite": questions.suite,
        "questions": questions.count,
        "left_out": questions.left_out,
        "seconds": None if args.requests else args.seconds or SECONDS,
        "requests": args.requests,
        "repeats": args.repeats,
        "servers_of_each_way": args.servers,
    }


def _machine() -> dict[str, Any]:
    """The device as another process sees it: this one must not take a GPU from the servers."""
    command = [sys.executable, "-m", "infer.info", "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, errors="replace")
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
