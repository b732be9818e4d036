"""Compares split decoding over several networks with a streaming API.

    python -m infer.bench --split                                   the bundled pair, all networks
    python -m infer.bench --split --target DIR --draft DIR --profiles 4g,far

Clients connect to an infer.server process through a TCP proxy that emulates the network. All modes
answer a question before the next question, each time in a rotated order. Answers are greedy and
compared with local plain decoding; the exit code is 1 if an answer differs in float32.

With `stream` the target decodes alone and sends every token, as an API does. With `plain` a client
requests one token at a time.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import os
import sys
import tempfile
from collections.abc import AsyncIterator, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax

from infer.bench.network import PROFILES, Proxy, in_thread
from infer.bench.split import table
from infer.bench.split.flags import check, parser_of
from infer.bench.split.pairs import NO_STOP, SplitBench, load, options_of, server_flags
from infer.bench.statistics import median, quartiles
from infer.cli.documents import CODES, until_cut
from infer.cli.program import Progress, progress
from infer.server_process import Child
from infer.split_client.answering import SplitClient
from infer.split_client.figures import figures_of, timed
from infer.split_client.link import ServerAddress
from infer.split_server.app import PATH
from moa_jax.config import Sampling
from moa_jax.files.json_text import to_json
from moa_jax.measure.turns import in_turns

DIFFERENT = 1  # exit code, as in infer.evaluate
MEANS = ("server_calls", "target_passes", "drafting_s", "waiting_s", "bytes_up", "bytes_down")
SETTINGS = ("max_new_tokens", "modes", "lengths", "tree", "client_slowdown", "codec", "compress")
SETTINGS += ("seed", "suite", "no_ahead", "weights")

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
    """The complete document."""
    args, differences, found = bench.args, [], []
    total = len(args.profiles) * len(args.modes) * len(bench.prompts)
    with until_cut() as cut, server(server_flags(bench)) as port, progress(total, "answers") as bar:
        for name in args.profiles:
            found.append(measure_network(bench, name, port, differences, bar))
            bar.line(f"{name}: done")
    if not found:
        sys.exit(cut.code)
    settings = {
        "target": str(args.target or "bundled"),
        "draft": str(args.draft or "bundled"),
        "method": bench.drafter.method,
        "dtype": str(bench.target.params["embed"].dtype),
        "prompts": len(bench.prompts),
    }
    return {
        "profiles": found,
        "local_plain_tokens_per_s": median(bench.own_tokens_per_s),
        "differences": differences,
        "settings": settings | {key: getattr(args, key) for key in SETTINGS},
        "machine": {"device_kind": jax.devices()[0].device_kind, "cores": os.cpu_count()},
    } | cut.mark(len(found), len(args.profiles), " networks")


@contextlib.contextmanager
def server(flags: Sequence[str]) -> Iterator[int]:
    """Starts an infer.server, and yields its port.

    Raises InputError with the last output line of a server that does not start.
    """
    with tempfile.TemporaryDirectory(prefix="moa-server-") as folder:
        with Child("infer.server", flags, Path(folder) / "server") as child:
            yield child.ready()["port"]


@contextlib.asynccontextmanager
async def client_of(bench: SplitBench, mode: str, proxy: Proxy) -> AsyncIterator[SplitClient]:
    """A client of a proxied server."""
    args = bench.args
    url = f"ws://{proxy.host}:{proxy.port}{PATH}"
    address = ServerAddress(url, bench.pairing, codec=args.codec, compress=args.compress)
    with ThreadPoolExecutor(1, "drafter") as worker:
        client = SplitClient(bench.client_drafter, address, options_of(args, mode), worker)
        try:
            yield client
        finally:
            await client.session.close()


def measure_network(
    bench: SplitBench, name: str, port: int, differences: list[dict[str, Any]], bar: Progress
) -> dict[str, Any]:
    """Measures all modes over one network; appends wrong answers to `differences`."""
    with in_thread(Proxy("127.0.0.1", port, PROFILES[name], bench.args.seed)) as proxy:
        by_mode = asyncio.run(take_turns(bench, proxy, bar))
    rows = []
    for mode, answers in by_mode.items():
        pairs = zip(answers, bench.own, strict=True)
        wrong = [index for index, (one, own) in enumerate(pairs) if one["token_ids"] != own]
        row = {"mode": mode} | summary(answers) | {"same_as_plain": len(answers) - len(wrong)}
        for other in ("stream", "plain"):
            row[f"speedup_over_{other}"] = median(ratios(answers, by_mode.get(other, ())))
        differences += [{"profile": name, "mode": mode, "prompt": index} for index in wrong]
        rows.append(row)
    return dataclasses.asdict(PROFILES[name]) | {"profile": name, "modes": rows}


async def take_turns(
    bench: SplitBench, proxy: Proxy, bar: Progress
) -> dict[str, list[dict[str, Any]]]:
    """The answers of every mode to every prompt, one at a time."""
    modes, new = bench.args.modes, bench.args.max_new_tokens
    found: dict[str, list[dict[str, Any]]] = {mode: [] for mode in modes}
    async with contextlib.AsyncExitStack() as stack:
        clients = {}
        for mode in modes:
            clients[mode] = await stack.enter_async_context(client_of(bench, mode, proxy))
            await clients[mode].drafter.warm(map(len, bench.prompts))
            await answer(clients[mode], bench.prompts[0], min(8, new))  # connects before measuring
        for turn in in_turns(len(modes), len(bench.prompts), warm_up=False):
            mode = modes[turn.way]
            found[mode].append(await answer(clients[mode], bench.prompts[turn.question], new))
            bar.step()
    return found


async def answer(client: SplitClient, prompt: list[int], new: int) -> dict[str, Any]:
    """The figures of an answer of `new` tokens."""
    events = client.answer(prompt, len(prompt) + new, NO_STOP, Sampling())
    found = figures_of(client, prompt, await timed(client, events))
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
    }


def ratios(ours: AnswerRows, theirs: AnswerRows) -> list[float]:
    """Speedups per prompt, if both answers have a speed."""
    speed = "tokens_per_s"
    pairs = zip(ours, theirs, strict=False)  # `theirs` is empty for an unmeasured mode
    return [one[speed] / other[speed] for one, other in pairs if one[speed] and other[speed]]
