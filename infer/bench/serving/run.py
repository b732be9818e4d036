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
from typing import Any

import httpx

from infer.bench.candidates import PLAIN
from infer.bench.drawing import check_plots
from infer.bench.serving import clients, results
from infer.bench.serving.servers import Server, parse, serving, summarise_counters
from infer.cli.documents import until_cut
from infer.cli.flags.mesh import add_mesh_flag, as_flag
from infer.cli.flags.pair import AUTO, EXPLICIT, add_model_flags, drafter_options
from infer.cli.program import Parser, above_zero, names, positive, progress, whole
from infer.server_process import ROOT
from moa_jax.config import Sampling
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from moa_jax.measure.turns import rotated

# Outcomes of requests to one server, and the increase of the server's counters.
Played = tuple[list[clients.RequestOutcome], Counter[str]]
MODES = (*EXPLICIT, AUTO)
WARMING = 1_000_000  # index of the first warm-up request


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
    questions = clients.questions_of(args, card["max_model_len"])
    for server in servers:
        await _warm_up(server, args, questions)
    dtype = args.dtype or ("float32" if document["machine"]["platform"] == "cpu" else "bfloat16")
    about = {"model": card["id"], "dtype": dtype, "questions": len(questions)}
    document["settings"] = vars(args) | about
    rows: list[dict[str, Any]] = document.setdefault("rates", [])
    with progress(len(args.rates) * len(servers), "runs") as bar:
        for index, rate in enumerate(args.rates):
            begin = index * args.requests
            times = clients.arrivals(args.requests, rate, args.seed + begin)
            batch, played = clients.requests_of(args, questions, begin, args.requests), {}
            for server in rotated(servers, index):
                played[server.mode] = await _play(server, batch, times)
                bar.step()
            rows += [_row(rate, server.mode, played) for server in servers]


async def _warm_up(server: Server, args: argparse.Namespace, questions: list[str]) -> None:
    """Sends one request, then two requests per slot."""
    print(f"{server.mode}: warming up", file=sys.stderr)
    batch = clients.requests_of(args, questions, WARMING, 1 + 2 * args.slots)
    for part in (batch[:1], batch[1:]):
        outcomes, _ = await _play(server, part, [0.0] * len(part))
        if errors := [each.error for each in outcomes if each.error]:
            raise InputError(f"{server.child.name} does not answer: {errors[0]}")


async def _play(server: Server, batch: Sequence[dict[str, Any]], times: Sequence[float]) -> Played:
    """Sends requests at `times`, and waits for the answers and for background compiles."""
    try:
        async with clients.client_of(server.url) as client:
            before = parse((await client.get("/metrics")).raise_for_status().text)
            outcomes = await clients.open_loop(client, batch, times)
            server.settle()
            after = parse((await client.get("/metrics")).raise_for_status().text)
    except httpx.HTTPError as error:
        server.child.check()
        raise InputError(f"{server.child.name}: no /metrics: {type(error).__name__}") from error
    return outcomes, after - before


def _row(rate: float, mode: str, played: Mapping[str, Played]) -> dict[str, Any]:
    """One mode at one rate, compared with plain decoding on the same requests."""
    (outcomes, grown), (plain, _) = played[mode], played[PLAIN]
    row = {"rate": rate, "mode": mode} | results.summarise(outcomes) | summarise_counters(grown)
    return row | results.compare(outcomes, plain)


def _machine() -> dict[str, Any]:
    """The device as reported by a subprocess, because this process must not occupy a GPU."""
    command = [sys.executable, "-m", "infer.info", "--json"]
    report = json.loads(subprocess.check_output(command, cwd=ROOT))
    if not report["devices"]:
        raise InputError(f"no device: {report['device_error']}; see infer.info")
    (device, *_), cores = report["devices"], report["host"]["cores"]
    platform = device["name"].partition(":")[0]
    return {"device_kind": device["kind"], "platform": platform, "cores": cores}


def parser_of(description: str | None) -> argparse.ArgumentParser:
    """The parser of `infer.bench --serve`, with grouped flags."""
    parser = Parser("infer.bench --serve", description)
    add_mesh_flag(add_model_flags(parser))
    add = parser.add_argument_group("servers").add_argument
    modes = f"of {', '.join(MODES)}; plain is always one of them"
    add("--modes", type=names, default="plain,chain,auto", help=modes)
    add("--slots", type=positive, default=16, help="requests decoded at once")
    add("--max-tokens", type=positive, metavar="N", help="of a prompt with its answer")
    add = parser.add_argument_group("requests").add_argument
    add("--suite", default="demo", help="question sets, as of infer.evaluate")
    add("--max-new-tokens", type=positive, default=128, help="longest answer")
    add("--ignore-stop", action="store_true", help="decode past the end of the answer")
    add("--temperature", type=float, default=0.0, metavar="X", help="each request has a seed")
    share = "share of requests whose answer is a JSON object, 0 to 1"
    add("--structured", type=float, default=0.0, metavar="X", help=share)
    add("--seed", type=whole, default=0, help="of arrivals, questions and requests")
    add = parser.add_argument_group("load").add_argument
    add("--rates", type=_rates, default="0.5,1,2,4,8", metavar="R,R", help="requests/s")
    add("--requests", type=positive, default=64, metavar="N", help="per rate")
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON document on stdout")
    add("--plot", metavar="FILE.png", help="latency, throughput and speedup by rate")
    return parser


def check(args: argparse.Namespace) -> None:
    """Raises InputError for invalid values and combinations, before any server starts."""
    if not args.modes or set(args.modes) - set(MODES):
        raise InputError(f"--modes {','.join(args.modes)}; choose from {', '.join(MODES)}")
    if not 0 <= args.structured <= 1:
        raise InputError(f"--structured {args.structured}; choose from 0 to 1")
    Sampling(temperature=args.temperature)
    if args.plot:
        check_plots(Path(args.plot))


def variants_of(args: argparse.Namespace) -> dict[str, list[str]]:
    """The flags of a server per mode, plain decoding first."""
    shared = ("target", "dtype", "weights", "threads", "slots", "max_tokens")
    common = {name: getattr(args, name) for name in shared}
    common["mesh"] = as_flag(args.mesh) if args.mesh else None
    drafter = {"draft": args.draft, **drafter_options(args)}
    found = {}
    for mode in dict.fromkeys([PLAIN, *args.modes]):
        values = common | {"mode": mode} | ({} if mode == PLAIN else drafter)
        flags = {f"--{name.replace('_', '-')}": value for name, value in values.items()}
        found[mode] = [str(word) for pair in flags.items() if pair[1] is not None for word in pair]
    return found


def _rates(text: str) -> list[float]:
    """Type of --rates: requests/s, separated by commas."""
    found = [above_zero(each) for each in names(text)]
    if not found:
        raise argparse.ArgumentTypeError("no rate; give requests/s, separated by commas")
    return sorted(found)
