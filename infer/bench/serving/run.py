"""Measures infer.serve under load: plain decoding and drafting, at several rates of requests.

    python -m infer.bench --serve                                   the bundled pair
    python -m infer.bench --serve --rates 1c,0.5,1,2 --modes plain,auto --json
    python -m infer.bench --serve --target DIR --draft moa=A --draft eagle=B --plot serve.png

Every mode with a drafter runs in its own server process, on the same pair and the same machine.
All servers receive the same requests, by Poisson arrivals (--rates 2, or 0.5x for a share of plain
decoding's capacity) or from a closed loop of clients (2c). Only one server is under load at a time;
servers rotate per rate and repeat. The exit code is 1 if answers to the same request differ in
float32.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from infer.bench.arrivals import arrivals, arrivals_within
from infer.bench.candidates import PLAIN
from infer.bench.serving import clients, results
from infer.bench.serving.clients import RequestOutcome, Requests, SampleRequest
from infer.bench.serving.flags import REQUESTS_PER_CLIENT, check, parser_of, variants_of
from infer.bench.serving.servers import PROGRAMS, Server, counters_of, serving, summarise_counters
from infer.cli.documents import CODES, until_cut
from infer.cli.program import progress
from infer.server_process import ROOT
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from moa_jax.measure.turns import rotated

WARMING = 1_000_000  # index of the first warm-up request
LEAST_WARMING, MOST_WARMINGS, QUIET_WARMINGS = 8, 24, 2  # requests, passes, passes without compiles


class LoadPoint(NamedTuple):
    """A load: requests per second, or the number of clients in a closed loop."""

    rate: float | None
    of_capacity: float | None
    clients: int | None


class Played(NamedTuple):
    """Outcomes of requests to one server, and the increase of the server's counters."""

    outcomes: list[RequestOutcome]
    grown: Counter[str]


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    check(args)
    machine, document = _machine(), {}
    with until_cut() as cut, serving(variants_of(args), args.servers) as teams:
        asyncio.run(measure(args, machine, teams, document))
    if not document:
        sys.exit(cut.code)
    document |= cut.mark(len(document["rates"]), len(args.rates), " rates")
    if args.plot:
        results.plot(document, Path(args.plot))
    print(to_json(document) if args.json else results.render(document))
    if "cut" in document:
        return CODES[document["cut"]["by"]]
    differs = any(row["different"] for rate in document["rates"] for row in rate["ways"])
    return int(differs and document["settings"]["dtype"] == "float32")


async def measure(
    args: argparse.Namespace,
    machine: dict[str, Any],
    teams: Sequence[Sequence[Server]],
    document: dict[str, Any],
) -> None:
    """Fills `document`; if cancelled, with the completed rates."""
    async with clients.client_of(teams[0][0].url) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
    requests = Requests(args, card["max_model_len"])
    found = [[await _warm_up(server, requests, args.slots) for server in team] for team in teams]
    servers = [_server_row(*row) for row in zip(teams[0], zip(*found, strict=True), strict=True)]
    capacity = next((row["requests_per_s"] for row in servers if row["mode"] == PLAIN), 0)
    loads = [load_of(text, capacity) for text in args.rates]
    loads.sort(key=lambda load: (load.rate or 0, load.clients))  # closed loops first
    cells: list[list[list[Played]]] = [[] for _ in loads]  # by load, repeat and variant
    try:
        await _play_all(args, teams, requests, loads, cells)
    finally:
        if rates := [_row(*each, servers) for each in zip(loads, cells, strict=True) if each[1]]:
            dtype = args.dtype or ("float32" if machine["platform"] == "cpu" else "bfloat16")
            about = {"model": card["id"], "dtype": dtype, "suite": requests.suite}
            about |= {"questions": requests.count, "left_out": requests.left_out}
            document |= {"servers": servers, "settings": vars(args) | about, "machine": machine}
            document["rates"] = rates


async def _warm_up(server: Server, requests: Requests, slots: int) -> list[float]:
    """Runs passes with 1, 2, 4 ... clients, each until QUIET_WARMINGS passes compile nothing.

    Returns requests/s and tokens/s of the last pass, in which all slots are full.
    """
    print(f"{server.variant.label}: warming up", file=sys.stderr)
    begin = WARMING
    for count in sorted({slots, *(1 << power for power in range(slots.bit_length()))}):
        quiet, size = 0, max((4 if count == slots else 2) * count, LEAST_WARMING)
        for _ in range(MOST_WARMINGS):
            batch = list(itertools.islice(requests.from_(begin), size))
            played = await _play(server, batch, [], count)
            if errors := [each.error for each in played.outcomes if each.error]:
                raise InputError(f"{server.child.name} does not answer: {errors[0]}")
            begin, quiet = begin + size, 0 if played.grown[PROGRAMS] else quiet + 1
            if quiet == QUIET_WARMINGS:
                break
    return results.capacity_of(played.outcomes)


def load_of(text: str, capacity: float) -> LoadPoint:
    """Parses one of --rates; `capacity` is plain decoding's in requests/s, 0 if not measured."""
    if text.endswith("c"):
        return LoadPoint(None, None, int(text[:-1]))
    rate = float(text.removesuffix("x")) * (capacity if text.endswith("x") else 1)
    return LoadPoint(rate, rate / capacity if capacity else None, None)


def times_of(args: argparse.Namespace, load: LoadPoint, begin: int) -> list[float]:
    """Arrival times (s), seeded by the index of the first request; zeros for a closed loop."""
    if load.clients:
        return [0.0] * (args.requests or REQUESTS_PER_CLIENT * load.clients)
    if args.requests:
        return arrivals(args.requests, load.rate, args.seed + begin)
    return arrivals_within(args.seconds, load.rate, args.seed + begin)


async def _play_all(
    args: argparse.Namespace,
    teams: Sequence[Sequence[Server]],
    requests: Requests,
    loads: Sequence[LoadPoint],
    cells: Sequence[list[list[Played]]],
) -> None:
    """Runs all loads, lightest first, --repeats times; teams alternate by repeat."""
    begin = 0
    with progress(args.repeats * len(loads) * len(teams[0]), "cells") as bar:
        for repeat, (index, load) in itertools.product(range(args.repeats), enumerate(loads)):
            team = teams[repeat % len(teams)]
            order = rotated(range(len(team)), repeat + repeat // len(teams) + index)
            times = times_of(args, load, begin)
            batch = list(itertools.islice(requests.from_(begin), len(times)))
            begin += len(batch)
            played = {i: await _play(team[i], batch, times, load.clients) for i in order}
            bar.step(len(team))
            cells[index].append([played[i] for i in range(len(team))])


async def _play(
    server: Server, batch: Sequence[SampleRequest], times: Sequence[float], num_clients: int | None
) -> Played:
    """Sends requests from `num_clients` clients in a closed loop, or at `times`."""
    try:
        async with clients.client_of(server.url) as client:
            before = await counters_of(client)
            if num_clients:
                outcomes = await clients.closed_loop(client, batch, num_clients)
            else:
                outcomes = await clients.open_loop(client, batch, times)
            server.settle()
            grown = await counters_of(client)
    except httpx.HTTPError as error:
        server.child.check()
        raise InputError(f"{server.child.name}: no /metrics: {type(error).__name__}") from error
    grown.subtract(before)
    return Played(outcomes, grown)


# ---- the document -------------------------------------------------------------------------


def _server_row(server: Server, capacities: Sequence[list[float]]) -> dict[str, Any]:
    requests, tokens = zip(*capacities, strict=True)
    return {
        "way": server.variant.label,
        "mode": server.variant.mode,
        "draft": server.variant.draft,
        "requests_per_s": sum(requests) / len(requests),
        "tokens_per_s": sum(tokens) / len(tokens),
        "each_tokens_per_s": list(tokens),
    }


def _row(
    load: LoadPoint, cells: list[list[Played]], servers: list[dict[str, Any]]
) -> dict[str, Any]:
    """All variants at one rate; compares answers with plain decoding's or the first variant's."""
    modes = [server["mode"] for server in servers]
    first = [cell[modes.index(PLAIN) if PLAIN in modes else 0].outcomes for cell in cells]
    rows = []
    for index, server in enumerate(servers):
        runs = [cell[index].outcomes for cell in cells]
        grown = sum((cell[index].grown for cell in cells), Counter())
        ratios = results.compare(runs, first)
        row = load._asdict() | {key: server[key] for key in ("way", "mode", "draft")}
        row |= results.summarise(runs) | summarise_counters(grown)
        row |= ratios if PLAIN in modes else dict.fromkeys(ratios)
        rows.append(row | results.differences(runs, first))
    return load._asdict() | {"requests": rows[0]["requests"], "ways": rows}


def _machine() -> dict[str, Any]:
    """The device as reported by a subprocess, because this process must not occupy a GPU."""
    command = [sys.executable, "-m", "infer.info", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    report = json.loads(done.stdout)
    if not report["devices"]:
        raise InputError(f"no device: {report['device_error']}; see infer.info")
    kind, name = (report["devices"][0][key] for key in ("kind", "name"))
    machine = {"device_kind": kind, "platform": name.partition(":")[0]}
    return machine | {"devices": len(report["devices"]), "cores": report["host"]["cores"]}
