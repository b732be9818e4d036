"""Measures infer.serve under load: plain decoding and drafting, at several rates of requests.

    python -m infer.bench --serve                                   the bundled pair
    python -m infer.bench --serve --rates 0.5,1,2 --modes plain,auto --json
    python -m infer.bench --serve --target DIR --draft DIR --plot serve.png

Every mode runs in its own server process, on the same pair and the same machine.
All servers receive the same requests, by Poisson arrivals. Only one server is under load at a time;
the order of servers rotates.
The exit code is 1 if answers to the same request differ in float32. Ctrl-C and SIGTERM print the
complete rates.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import subprocess
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx

from infer.bench.arrivals import arrivals
from infer.bench.candidates import PLAIN
from infer.bench.serving import clients, results
from infer.bench.serving.clients import RequestOutcome, questions_of, requests_of
from infer.bench.serving.flags import check, parser_of, variants_of
from infer.bench.serving.servers import PROGRAMS, Server, parse, serving, summarise_counters
from infer.cli.documents import until_cut
from infer.cli.program import progress
from infer.server_process import ROOT
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from moa_jax.measure.turns import rotated

WARMING = 1_000_000  # index of the first warm-up request
MOST_WARMINGS = 24  # passes of one size


class Played(NamedTuple):
    """Outcomes of requests to one server, and the increase of the server's counters."""

    outcomes: list[RequestOutcome]
    grown: Counter[str]


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    check(args)
    document: dict[str, Any] = {"machine": _machine()}
    with until_cut() as cut, serving(variants_of(args)) as servers:
        asyncio.run(measure(args, servers, document))
    if not document.get("rates"):
        sys.exit(cut.code)
    document |= cut.mark(len(document["rates"]) // len(servers), len(args.rates), " rates")
    if args.plot:
        results.plot(document, Path(args.plot))
    print(to_json(document) if args.json else results.render(document))
    if cut.error is not None:
        return cut.code
    differs = any(row["different"] for row in document["rates"])
    return int(differs and document["settings"]["dtype"] == "float32")


async def measure(
    args: argparse.Namespace, servers: Sequence[Server], document: dict[str, Any]
) -> None:
    """Adds to the document; `rates` gets a row per mode when a rate is complete."""
    async with clients.client_of(servers[0].url) as client:
        (card,) = (await client.get("/v1/models")).json()["data"]
    questions = questions_of(args, card["max_model_len"])
    for server in servers:
        await _warm_up(server, args, questions)
    dtype = args.dtype or ("float32" if document["machine"]["platform"] == "cpu" else "bfloat16")
    about = {"model": card["id"], "dtype": dtype, "questions": len(questions)}
    document["settings"] = vars(args) | about
    rows: list[dict[str, Any]] = document.setdefault("rates", [])
    with progress(len(args.rates) * len(servers), "runs") as bar:
        for index, rate in enumerate(args.rates):
            begin = index * args.requests
            times = arrivals(args.requests, rate, args.seed + begin)
            batch, played = requests_of(args, questions, begin, args.requests), {}
            for server in rotated(servers, index):
                played[server.mode] = await _play(server, batch, times)
                bar.step()
            rows += [{"rate": rate} | _row(server.mode, played) for server in servers]


async def _warm_up(server: Server, args: argparse.Namespace, questions: list[str]) -> None:
    """Sends 1, 2, 4 ... requests at once, each number until a pass compiles nothing."""
    print(f"{server.mode}: warming up", file=sys.stderr)
    begin = WARMING
    for count in (*(1 << power for power in range(args.slots.bit_length())), 2 * args.slots):
        for _ in range(MOST_WARMINGS):
            batch = requests_of(args, questions, begin, count)
            played = await _play(server, batch, [0.0] * count)
            if errors := [each.error for each in played.outcomes if each.error]:
                raise InputError(f"{server.child.name} does not answer: {errors[0]}")
            begin += count
            if not played.grown[PROGRAMS]:
                break


async def _play(server: Server, batch: Sequence[dict[str, Any]], times: Sequence[float]) -> Played:
    """Sends requests at `times`, and waits for the answers and for background compiles."""
    try:
        async with clients.client_of(server.url) as client:
            before = parse((await client.get("/metrics")).raise_for_status().text)
            outcomes = await clients.open_loop(client, batch, times)
            server.settle()
            grown = parse((await client.get("/metrics")).raise_for_status().text)
    except httpx.HTTPError as error:
        server.child.check()
        raise InputError(f"{server.child.name}: no /metrics: {type(error).__name__}") from error
    grown.subtract(before)
    return Played(outcomes, grown)


def _row(mode: str, played: Mapping[str, Played]) -> dict[str, Any]:
    """One mode at one rate, compared with plain decoding on the same requests."""
    (outcomes, grown), (plain, _) = played[mode], played[PLAIN]
    row = {"mode": mode} | results.summarise(outcomes) | summarise_counters(grown)
    row["speedup"] = results.speedup(outcomes, plain)
    return row | results.differences(outcomes, plain)


def _machine() -> dict[str, Any]:
    """The device as reported by a subprocess, because this process must not occupy a GPU."""
    command = [sys.executable, "-m", "infer.info", "--json"]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True)
    report = json.loads(done.stdout)
    if not report["devices"]:
        raise InputError(f"no device: {report['device_error']}; see infer.info")
    (device, *_), cores = report["devices"], report["host"]["cores"]
    platform = device["name"].partition(":")[0]
    return {"device_kind": device["kind"], "platform": platform, "cores": cores}
