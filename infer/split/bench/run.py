"""Measures split decoding over several networks, beside a streaming API and a drafter alone.

    python -m infer.bench --split                                   the bundled pair, all networks
    python -m infer.bench --split --draft n0=A --draft n3=B --profiles 4g,far --plot split.png
    python -m infer.bench --split --profiles 4g --clients 1,8,32 --rate 2
    python -m infer.bench --split --profiles loopback --modes stream --outages 0,16,64

Each drafter has an infer.server of its own, in a process behind the network. As root, the network
lies between two namespaces, where TCP loses real packets; else it is a TCP proxy, which is too kind
to bulk data that gets lost. Every question is answered in all ways before the next one, another
way first each time. Answers are greedy and compared with local plain decoding; where one differs
in float32, the exit code is 1.

With `stream` the target writes alone and sends each token, as an API does. With `plain` a client
asks for one token after the other. With `offline` the drafter writes without a network.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from infer.bench.arrivals import arrivals
from infer.bench.statistics import median, quartiles
from infer.documents import CODES, until_cut
from infer.program import Progress, progress
from infer.split.bench import crowd, outage, tables
from infer.split.bench.flags import check, parser_of
from infer.split.bench.pairs import (
    NO_STOP,
    SplitBench,
    SplitPair,
    Way,
    load,
    options_of,
    own_answers,
)
from infer.split.bench.stage import Stage, kind_of, staged
from infer.split.client.answering import SplitClient
from infer.split.client.figures import figures_of, timed
from infer.split.client.state import ClientOptions
from infer.split.link import ServerAddress
from infer.split.network.profiles import PROFILES
from infer.split.network.proxy import Proxy, in_thread
from moa_jax.config import Sampling
from moa_jax.files.folders import write_whole
from moa_jax.files.json_text import to_json
from moa_jax.measure.turns import in_turns

DIFFERENT = 1  # exit code, as of infer.evaluate
PATIENCE = 600.0  # seconds that a client of a crowd waits for its slot


def main(arguments: list[str] | None = None) -> int:
    args = parser_of(__doc__).parse_args(arguments)
    check(args)
    document = measure(load(args))
    text = to_json(document)
    try:
        print(text if args.json else tables.render(document))
    finally:  # one of the two may fail
        if args.output:
            write_whole(Path(args.output), text + "\n")
    if args.plot:
        tables.plot(document, Path(args.plot))
    if "cut" in document:
        return CODES[document["cut"]["by"]]
    differs = document["differences"] and document["settings"]["dtype"] == "float32"
    return DIFFERENT if differs else 0


# ---- measuring ----------------------------------------------------------------------------


def measure(bench: SplitBench) -> dict[str, Any]:
    """The whole document."""
    args, differences = bench.args, []
    networked = [way for way in bench.ways if way.mode != "offline"]
    total = len(args.profiles) * len(bench.prompts) * len(networked)
    found: dict[str, list[Any]] = {"profiles": [], "offline": [], "crowd": [], "outages": []}
    with until_cut() as cut:
        with progress(total, "answers") as bar:
            for name in args.profiles if networked else ():
                found["profiles"].append(_profile(bench, name, networked, differences, bar))
                bar.line(f"{name}: done")
        found["offline"] = [_offline(bench, way) for way in bench.ways if way.mode == "offline"]
        found["crowd"] = _crowds(bench, differences) if args.clients else []
        found["outages"] = _outages(bench) if args.outages else []
    mark = cut.mark(len(found["profiles"]), len(args.profiles), " networks")
    if mark and not any(found.values()):
        sys.exit(cut.code)
    return {
        **found,
        "best_n": _best_n(found["profiles"]),
        "local_plain_tokens_per_s": median(bench.own_tokens_per_s),
        "differences": differences,
        "settings": _settings(bench),
        "machine": {
            "device_kind": jax.devices()[0].device_kind,
            "cores": os.cpu_count(),
            "jax": jax.__version__,
        },
    } | mark


def _profile(
    bench: SplitBench, name: str, ways: Sequence[Way], differences: list[Any], bar: Progress
) -> dict[str, Any]:
    """All ways over one network."""
    profile, args = PROFILES[name], bench.args
    servers = {pair.name: [*pair.flags, "--slots", "2"] for pair in bench.pairs}
    with staged(profile, servers, args.seed) as stage:
        found = stage.play(lambda: _answers_of(bench, stage, ways, bar))
    rows = []
    for way, answers in zip(ways, found, strict=True):
        same = [one["token_ids"] == own for one, own in zip(answers, bench.own, strict=True)]
        rows.append(way.facts | _summary(answers) | {"same_as_plain": sum(same)})
        differences += [
            {"profile": name, "way": way.label, "prompt": index}
            for index, right in enumerate(same)
            if not right
        ]
    by_mode = {way.mode: answers for way, answers in zip(ways, found, strict=True)}
    for row, answers in zip(rows, found, strict=True):
        for mode in ("stream", "plain"):
            ratios = _ratios(answers, by_mode[mode]) if mode in by_mode else []
            row[f"speedup_over_{mode}"] = median(ratios)
    facts = dataclasses.asdict(profile)
    return facts | {"profile": name, "link": kind_of(profile), "ways": rows}


async def _answers_of(
    bench: SplitBench, stage: Stage, ways: Sequence[Way], bar: Progress
) -> list[list[dict[str, Any]]]:
    """The answers of each way to each prompt, taken in turns."""
    found: list[list[dict[str, Any]]] = [[] for _ in ways]
    with ThreadPoolExecutor(1, "drafter") as worker:
        answerings = [
            SplitClient(way.pair.half, _server(bench, stage, way.pair), way.options, worker)
            for way in ways
        ]
        try:
            for answering in answerings:  # connecting is not measured
                await _answer(bench, answering, 0, 3)
            for turn in in_turns(len(ways), len(bench.prompts), warm_up=False):
                answer = await _answer(bench, answerings[turn.way], turn.question)
                found[turn.way].append(answer)
                bar.step()
        finally:
            for answering in answerings:
                await answering.close()
    return found


async def _answer(
    bench: SplitBench, answering: SplitClient, index: int, new: int | None = None
) -> dict[str, Any]:
    """One answer with its times and costs."""
    prompt = bench.prompts[index]
    total = len(prompt) + (new or bench.args.max_new_tokens)
    events = answering.answer(prompt, total, bench.stop_ids, Sampling())
    found = figures_of(answering, prompt, await timed(answering, events))
    tokens, calls = len(found["token_ids"]), found["server_calls"]
    if answering.options.stream:
        found |= {"server_calls": calls + 1, "target_passes": calls + tokens - 1, "tau": 1.0}
    else:
        found["target_passes"] = calls
    return found


def _server(bench: SplitBench, stage: Stage, pair: SplitPair, **changes: Any) -> ServerAddress:
    args = bench.args
    server = ServerAddress(
        stage.urls[pair.name], pair.pairing, codec=args.codec, compress=args.compress
    )
    return dataclasses.replace(server, **changes)


def _summary(answers: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Medians over prompts of times, means of costs."""
    rates = [one["tokens_per_s"] for one in answers if one["tokens_per_s"]]
    tokens = sum(len(one["token_ids"]) for one in answers)
    rounds = [length for one in answers for length in one["accept_lengths"]]
    mean = lambda key: sum(one[key] for one in answers) / len(answers)
    streams = any(one["tau"] == 1.0 and not one["accept_lengths"] for one in answers)
    return {
        "answers": len(answers),
        "tokens": tokens,
        "tokens_per_s": median(rates),
        "tokens_per_s_quartiles": quartiles(rates),
        "answer_s": median([one["prefill_s"] + one["decode_s"] for one in answers]),
        "first_token_ms": 1e3 * median([one["prefill_s"] for one in answers]),
        "tau": sum(rounds) / len(rounds) if rounds else 1.0 if streams else None,
        "reply_ms": median([one["reply_ms"] for one in answers if one["reply_ms"] is not None]),
        **{key: mean(key) for key in ("server_calls", "target_passes", "drafting_s", "waiting_s")},
        **{f"bytes_{way}": mean(f"bytes_{way}") for way in ("up", "down")},
        **{
            f"bytes_{way}_per_token": sum(one[f"bytes_{way}"] for one in answers) / tokens
            for way in ("up", "down")
        },
        "rounds_drafted_ahead": sum(one["rounds_drafted_ahead"] for one in answers),
        "drops": sum(one["drops"] for one in answers),
    }


def _ratios(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> list[float]:
    """How many times as fast, prompt by prompt."""
    pairs = zip(ours, theirs, strict=True)
    key = "tokens_per_s"
    return [one[key] / other[key] for one, other in pairs if one[key] and other[key]]


def _best_n(profiles: Sequence[dict[str, Any]]) -> dict[str, int]:
    """The N of the fastest MoA drafter over each network, where drafters of several N compete."""
    found = {}
    for profile in profiles:
        rows = [row for row in profile["ways"] if row["method"] == "moa"]
        if len({row["target_layer_inference"] for row in rows}) > 1:
            best = max(rows, key=lambda row: row["tokens_per_s"] or 0)
            found[profile["profile"]] = best["target_layer_inference"]
    return found


def _offline(bench: SplitBench, way: Way) -> dict[str, Any]:
    """The drafter alone: how fast it writes, and how likely the target finds its text."""

    async def answers() -> list[dict[str, Any]]:
        with ThreadPoolExecutor(1, "drafter") as worker:
            answering = SplitClient(way.pair.half, None, way.options, worker)
            await _answer(bench, answering, 0, 8)
            return [await _answer(bench, answering, i) for i in range(len(bench.prompts))]

    found = asyncio.run(answers())
    triples = zip(bench.prompts, found, bench.own, strict=True)
    views = [
        (
            outage.judge(bench.target, prompt, one["token_ids"]),
            outage.judge(bench.target, prompt, own),
        )
        for prompt, one, own in triples
        if one["token_ids"]
    ]
    mean = lambda values: sum(values) / len(views) if views else None
    rates = [one["tokens_per_s"] for one in found if one["tokens_per_s"]]
    return way.facts | {
        "tokens_per_s": median(rates),
        "tokens_per_s_quartiles": quartiles(rates),
        "answers": len(found),
        "chosen_by_target": mean([ours.chosen for ours, _ in views]),
        "log_likelihood": mean([ours.log_likelihood for ours, _ in views]),
        "own_log_likelihood": mean([theirs.log_likelihood for _, theirs in views]),
    }


# ---- many clients, and links that die -----------------------------------------------------


def _crowds(bench: SplitBench, differences: list[Any]) -> list[dict[str, Any]]:
    """Answers crowds of each size from one server, with drafted chains and as an API streams."""
    args, pair = bench.args, bench.pairs[0]
    most, name = max(args.clients), args.profiles[0]
    flags = [*pair.flags, "--slots", str(min(args.slots, most))]
    flags += ["--max-clients", str(most + 8), "--max-queue", str(most + 8)]
    flags += ["--queue-seconds", str(PATIENCE), "--idle-seconds", str(PATIENCE)]
    new = args.max_new_tokens
    questions = [crowd.CrowdQuestion(prompt, len(prompt) + new) for prompt in bench.prompts]
    modes = [mode for mode in ("stream", "chain") if mode in args.modes] or ["chain"]
    # Drafting ahead would measure how these clients share the machine with their server.
    each = {mode: dataclasses.replace(options_of(args, mode), draft_ahead=False) for mode in modes}
    rows = []
    with staged(PROFILES[name], {pair.name: flags}, args.seed) as stage:
        server = _server(bench, stage, pair, timeout=60.0)
        for count in args.clients:
            times = arrivals(count, args.rate, args.seed)
            for mode in modes:
                ways = dataclasses.replace(each[mode], patience=PATIENCE)
                with _clients(pair, server, ways, count) as clients:
                    work = (clients, times, questions, args.asks, bench.stop_ids)
                    found, failed = stage.play(lambda work=work: crowd.gather(*work))
                facts = {"clients": count, "mode": mode, "profile": name, "rate": args.rate}
                rows.append(facts | crowd.summary(found, failed))
                wrong = [one for one in found if one.tokens != bench.own[one.question]]
                differences += [
                    {"clients": count, "way": mode, "prompt": one.question} for one in wrong
                ]
    return rows


@contextlib.contextmanager
def _clients(
    pair: SplitPair, server: ServerAddress, ways: ClientOptions, count: int
) -> Iterator[list[Callable[[], SplitClient]]]:
    """Functions that make clients, each with caches and a thread of its own."""
    with contextlib.ExitStack() as stack:
        workers = [stack.enter_context(ThreadPoolExecutor(1, "drafter")) for _ in range(count)]
        yield [
            lambda worker=worker: SplitClient(pair.half.twin(), server, ways, worker)
            for worker in workers
        ]


def _outages(bench: SplitBench) -> list[dict[str, Any]]:
    """What each drafter writes alone after its link was cut, for each of several places."""
    args, rows = bench.args, []
    longest = max(args.outages) + args.max_new_tokens
    own = [one.token_ids for one in own_answers(bench.target, bench.prompts, longest, NO_STOP)]
    ways = ClientOptions(
        lengths=(), policy="keep", reconnect_seconds=0.0, slowdown=bench.args.client_slowdown
    )
    servers = {pair.name: [*pair.flags, "--slots", "2"] for pair in bench.pairs}
    total = len(args.outages) * len(bench.prompts) * len(bench.pairs)
    with staged(PROFILES["loopback"], servers) as stage, progress(total, "outages") as bar:
        for pair in bench.pairs:
            direct = _server(bench, stage, pair)
            port = int(direct.url.rpartition(":")[2].partition("/")[0])
            with in_thread(Proxy("127.0.0.1", port)) as proxy:
                url = direct.url.replace(f":{port}/", f":{proxy.port}/")
                server = dataclasses.replace(direct, url=url)
                for after in args.outages:
                    work = _cut_all(bench, pair, server, ways, proxy, after, bar)
                    found = asyncio.run(work)
                    rows.append(_outage_row(bench, pair, own, found, after))
    return rows


async def _cut_all(
    bench: SplitBench,
    pair: SplitPair,
    server: ServerAddress,
    ways: ClientOptions,
    proxy: Proxy,
    after: int,
    bar: Progress,
) -> list[list[int]]:
    found = []
    with ThreadPoolExecutor(1, "drafter") as worker:
        for prompt in bench.prompts:
            answering = SplitClient(pair.half, server, ways, worker)
            total = len(prompt) + after + bench.args.max_new_tokens
            found.append(await outage.cut_after(answering, proxy, prompt, after, total))
            await answering.close()
            bar.step()
    return found


def _outage_row(
    bench: SplitBench, pair: SplitPair, own: list[list[int]], found: list[list[int]], after: int
) -> dict[str, Any]:
    came = max(after, 1)  # the first token comes with the prompt's reply
    each = [
        outage.compare(bench.target, prompt, theirs, ours, came)
        for prompt, theirs, ours in zip(bench.prompts, own, found, strict=True)
    ]
    written = [one for one in each if one["tokens"]]
    mean = lambda key: sum(one[key] for one in written) / len(written) if written else None
    keys = ("tokens", "agreement", "first_disagreement", "log_likelihood", "own_log_likelihood")
    facts = {"draft": pair.name, "method": pair.drafter.method, "after": after}
    return facts | {"answers": len(written)} | {key: mean(key) for key in keys}


def _settings(bench: SplitBench) -> dict[str, Any]:
    args = bench.args
    shown = ("max_new_tokens", "modes", "lengths", "tree", "client_slowdown", "codec", "compress")
    shown += ("seed", "suite", "no_ahead", "asks", "slots")
    return {
        "target": str(args.target or "bundled"),
        "drafts": {pair.name: pair.drafter.method for pair in bench.pairs},
        "dtype": str(bench.target.params["embed"].dtype),
        "weights": args.weights,
        "prompts": len(bench.prompts),
        "stop": "the target's end" if args.natural_stops else "never",
    } | {key: getattr(args, key) for key in shown}
