"""Compares split decoding over several networks with a streaming API and with a drafter alone.

    python -m infer.bench --split                                   the bundled pair, all networks
    python -m infer.bench --split --draft n0=A --draft n3=B --profiles 4g,far
    python -m infer.bench --split --profiles loopback --modes stream --outages 0,16,64

Every drafter has its own infer.server process. Clients connect through a TCP proxy that emulates
the network. All modes answer a question before the next question, each time in a rotated order.
Answers are greedy and compared with local plain decoding; the exit code is 1 if an answer differs
in float32.

With `stream` the target decodes alone and sends every token, as an API does. With `plain` a client
requests one token at a time. With `offline` the drafter decodes without a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from infer.bench.network import PROFILES, Profile, Proxy, in_thread
from infer.bench.split import alone, table
from infer.bench.split.flags import check, parser_of
from infer.bench.split.pairs import NO_STOP, SplitBench, SplitPair, Way, load, outage_options
from infer.bench.statistics import median, quartiles
from infer.cli.documents import CODES, until_cut
from infer.cli.program import Progress, progress
from infer.server_process import Child
from infer.split_client.answering import SplitClient
from infer.split_client.figures import figures_of, timed
from infer.split_client.link import ServerAddress
from infer.split_client.state import ClientOptions
from infer.split_server.app import PATH
from moa_jax.config import Sampling
from moa_jax.files.json_text import to_json
from moa_jax.measure.turns import in_turns

DIFFERENT = 1  # exit code, as in infer.evaluate
MEANS = ("server_calls", "target_passes", "drafting_s", "waiting_s", "bytes_up", "bytes_down")
SETTINGS = ("max_new_tokens", "modes", "lengths", "tree", "client_slowdown", "codec", "compress")
SETTINGS += ("seed", "suite", "no_ahead", "weights")

Ports = Mapping[str, int]  # server ports by pair name
AnswerRows = Sequence[dict[str, Any]]  # figures of one mode's answers, by prompt


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    check(args)
    document = measure(load(args))
    print(to_json(document) if args.json else table.render(document))
    if "cut" in document:
        return CODES[document["cut"]["by"]]
    differs = document["differences"] and document["settings"]["dtype"] == "float32"
    return DIFFERENT if differs else 0


def measure(bench: SplitBench) -> dict[str, Any]:
    """The complete document; after a signal, the document of the completed parts."""
    args, differences = bench.args, []
    ways = [way for way in bench.ways if way.mode != "offline"]
    offline = [way for way in bench.ways if way.mode == "offline"]
    outages = [Way("outage", pair, outage_options(args)) for pair in bench.pairs]
    networks = args.profiles if ways else []
    found: dict[str, list[Any]] = {"profiles": [], "offline": [], "outages": []}
    flags = {pair.name: pair.flags for pair in bench.pairs if ways or args.outages}
    count = len(networks) * len(ways) + len(offline) + len(args.outages) * len(outages)
    total = count * len(bench.prompts)
    with until_cut() as cut, servers(flags) as ports, progress(total, "answers") as bar:
        for name in networks:
            found["profiles"].append(measure_network(bench, name, ports, ways, differences, bar))
            bar.line(f"{name}: done")
        found["offline"] = measure_alone(bench, offline, {}, 0, bar)
        for after in args.outages:
            with proxied(ports, PROFILES["loopback"]) as proxies:
                found["outages"] += measure_alone(bench, outages, proxies, after, bar)
    mark = cut.mark(len(found["profiles"]), len(networks), " networks")
    if mark and not any(found.values()):
        sys.exit(cut.code)
    device = {"device_kind": jax.devices()[0].device_kind, "cores": os.cpu_count()}
    settings = {
        "target": str(args.target or "bundled"),
        "drafts": {pair.name: pair.drafter.method for pair in bench.pairs},
        "dtype": str(bench.target.params["embed"].dtype),
        "prompts": len(bench.prompts),
    }
    return {
        **found,
        "local_plain_tokens_per_s": median(bench.own_tokens_per_s),
        "differences": differences,
        "settings": settings | {key: getattr(args, key) for key in SETTINGS},
        "machine": device | {"jax": jax.__version__},
    } | mark


@contextlib.contextmanager
def servers(flags: Mapping[str, Sequence[str]]) -> Iterator[Ports]:
    """Starts an infer.server per name with its flags, and yields the ports.

    Raises InputError with the last output line of a server that does not start.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moa-servers-")))
        children = {
            name: stack.enter_context(Child("infer.server", own, folder / str(index)))
            for index, (name, own) in enumerate(flags.items())
        }
        yield {name: child.ready()["port"] for name, child in children.items()}


@contextlib.contextmanager
def proxied(ports: Ports, profile: Profile, seed: int = 0) -> Iterator[dict[str, Proxy]]:
    """Starts and yields a proxy per server."""
    with contextlib.ExitStack() as stack:
        enter = stack.enter_context
        proxies = {name: Proxy("127.0.0.1", port, profile, seed) for name, port in ports.items()}
        yield {name: enter(in_thread(proxy)) for name, proxy in proxies.items()}


@contextlib.asynccontextmanager
async def client_of(
    bench: SplitBench, pair: SplitPair, options: ClientOptions, proxy: Proxy | None
) -> AsyncIterator[SplitClient]:
    """A client of a proxied server; without a proxy the drafter decodes alone."""
    address, args = None, bench.args
    if proxy is not None:
        url = f"ws://{proxy.host}:{proxy.port}{PATH}"
        address = ServerAddress(url, pair.pairing, codec=args.codec, compress=args.compress)
    with ThreadPoolExecutor(1, "drafter") as worker:
        client = SplitClient(pair.half, address, options, worker)
        try:
            yield client
        finally:
            await client.close()


# ---- networks -----------------------------------------------------------------------------


def measure_network(
    bench: SplitBench,
    name: str,
    ports: Ports,
    ways: Sequence[Way],
    differences: list[dict[str, Any]],
    bar: Progress,
) -> dict[str, Any]:
    """Measures all modes over one network; appends wrong answers to `differences`."""
    with proxied(ports, PROFILES[name], bench.args.seed) as proxies:
        found = asyncio.run(take_turns(bench, ways, proxies, bar))
    by_mode = {way.mode: answers for way, answers in zip(ways, found, strict=True)}
    own = [tokens[: bench.args.max_new_tokens] for tokens in bench.own]
    rows = []
    for way, answers in zip(ways, found, strict=True):
        pairs = zip(answers, own, strict=True)
        wrong = [index for index, (one, own) in enumerate(pairs) if one["token_ids"] != own]
        row = way.facts | summary(answers) | {"same_as_plain": len(answers) - len(wrong)}
        for mode in ("stream", "plain"):
            row[f"speedup_over_{mode}"] = median(ratios(answers, by_mode.get(mode, ())))
        differences += [{"profile": name, "way": row["way"], "prompt": index} for index in wrong]
        rows.append(row)
    return dataclasses.asdict(PROFILES[name]) | {"profile": name, "ways": rows}


async def take_turns(
    bench: SplitBench,
    ways: Sequence[Way],
    proxies: Mapping[str, Proxy],
    bar: Progress,
    after: int | None = None,
) -> list[list[dict[str, Any]]]:
    """The answers of every mode to every prompt, one at a time; `after` as in `answer`."""
    found: list[list[dict[str, Any]]] = [[] for _ in ways]
    most = bench.args.max_new_tokens
    async with contextlib.AsyncExitStack() as stack:
        clients = []
        for way in ways:
            client = client_of(bench, way.pair, way.options, proxies.get(way.pair.name))
            clients.append(await stack.enter_async_context(client))
            await clients[-1].warm(map(len, bench.prompts))
            await answer(clients[-1], bench.prompts[0], min(8, most))  # connects before measuring
        for turn in in_turns(len(ways), len(bench.prompts), warm_up=False):
            prompt, proxy = bench.prompts[turn.question], proxies.get(ways[turn.way].pair.name)
            found[turn.way].append(await answer(clients[turn.way], prompt, most, proxy, after))
            bar.step()
    return found


async def answer(
    client: SplitClient,
    prompt: list[int],
    new: int,
    proxy: Proxy | None = None,
    after: int | None = None,
) -> dict[str, Any]:
    """The figures of an answer of `new` tokens.

    With a proxy and `after`, the link is cut permanently after `after` tokens, and `new` tokens
    follow.
    """
    is_cut = proxy is not None and after is not None
    total = len(prompt) + new + (after if is_cut else 0)
    events = client.answer(prompt, total, NO_STOP, Sampling())
    cut = lambda event: proxy.refuse() if is_cut and event.verified >= after else None
    times = await timed(client, events, cut)
    if is_cut:
        proxy.heal()
    found = figures_of(client, prompt, times)
    tokens, calls = len(found["token_ids"]), found["server_calls"]
    if client.options.stream:
        return found | {"server_calls": calls + 1, "target_passes": calls + tokens - 1, "tau": 1.0}
    return found | {"target_passes": calls}


def summary(answers: AnswerRows) -> dict[str, Any]:
    """Medians of times and means of costs over prompts."""
    rates = [one["tokens_per_s"] for one in answers if one["tokens_per_s"]]
    rounds = [length for one in answers for length in one["accept_lengths"]]
    total = lambda key: sum(one[key] for one in answers)
    tokens = sum(len(one["token_ids"]) for one in answers)
    return {
        "answers": len(answers),
        "tokens": tokens,
        "tokens_per_s": median(rates),
        "tokens_per_s_quartiles": quartiles(rates),
        "answer_s": median([one["prefill_s"] + one["decode_s"] for one in answers]),
        "first_token_ms": 1e3 * median([one["prefill_s"] for one in answers]),
        "tau": sum(rounds) / len(rounds) if rounds else answers[0]["tau"],
        "reply_ms": median([one["reply_ms"] for one in answers if one["reply_ms"] is not None]),
        **{key: total(key) / len(answers) for key in MEANS},
        **{f"bytes_{way}_per_token": total(f"bytes_{way}") / tokens for way in ("up", "down")},
        **{key: total(key) for key in ("rounds_drafted_ahead", "drops")},
    }


def ratios(ours: AnswerRows, theirs: AnswerRows) -> list[float]:
    """Speedups per prompt, if both answers have a speed."""
    speed = "tokens_per_s"
    pairs = zip(ours, theirs, strict=False)  # `theirs` is empty for an unmeasured mode
    return [one[speed] / other[speed] for one, other in pairs if one[speed] and other[speed]]


# ---- drafters alone -----------------------------------------------------------------------


def measure_alone(
    bench: SplitBench, ways: Sequence[Way], proxies: Mapping[str, Proxy], after: int, bar: Progress
) -> list[dict[str, Any]]:
    """Speed and quality of drafters without a link, or with links cut after `after` tokens."""
    found = asyncio.run(take_turns(bench, ways, proxies, bar, after))
    came = max(after, 1) if proxies else 0  # the prompt's reply holds the first token
    rows = []
    for way, answers in zip(ways, found, strict=True):
        tokens = [one["token_ids"] for one in answers]
        quality = alone.compare_all(bench.target, bench.prompts, bench.own, tokens, came)
        rows.append(way.facts | {"after": after} | summary(answers) | quality)
    return rows
