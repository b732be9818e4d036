"""Server processes per variant on one pair, and their metrics."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import httpx
from prometheus_client.parser import text_string_to_metric_families

from infer.bench.serving.flags import Variant
from infer.server_process import Child

MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # share of a GPU, which all servers use
IDLE_CPU, SAMPLE_SECONDS = 0.05, 0.5  # share of one core, averaging time
SETTLE_SECONDS = 180.0  # for background compiles
PROGRAMS, ROUNDS = "moa:programs_total", "moa:rounds_total"


class Server(NamedTuple):
    """A running server process."""

    variant: Variant
    url: str  # scheme, host and port
    child: Child

    def settle(self) -> None:
        """Waits until the process is idle, so that its compiles do not slow the next server."""
        end, share = time.monotonic() + SETTLE_SECONDS, 1.0
        while share > IDLE_CPU and time.monotonic() < end:
            before, began = self.child.cpu_seconds(), time.monotonic()
            time.sleep(SAMPLE_SECONDS)
            after = self.child.cpu_seconds()
            self.child.check()
            if before is None or after is None:  # the system does not report CPU time
                return
            share = (after - before) / (time.monotonic() - began)


@contextlib.contextmanager
def serving(variants: Sequence[Variant], count: int = 1) -> Iterator[list[list[Server]]]:
    """Starts all servers at once, `count` per variant; yields teams of one server per variant.

    Raises InputError with the last output line of a server that cannot start.
    """
    env = {MEMORY_FRACTION: f"{0.9 / (count * len(variants)):.3f}"}
    env = {} if MEMORY_FRACTION in os.environ else env
    # Servers refuse no request and reuse no prompt: questions repeat, differently per server.
    more = ["--max-queue", str(1 << 20), "--drain-seconds", "1", "--prefix-bytes", "0"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moa-serving-")))
        children = [
            stack.enter_context(
                Child("infer.serve", [*each.flags, *more], folder / str(i), env=env, of=each.label)
            )
            for i, each in enumerate([*variants] * count)
        ]
        urls = [child.ready()["url"].removesuffix("/v1") for child in children]
        servers = list(map(Server, [*variants] * count, urls, children))
        size = len(variants)
        yield [servers[begin : begin + size] for begin in range(0, len(servers), size)]


async def counters_of(client: httpx.AsyncClient) -> Counter[str]:
    """Values of a server's /metrics by name; rounds by name and shape."""
    response = await client.get("/metrics")
    response.raise_for_status()
    return parse(response.text)


def parse(text: str) -> Counter[str]:
    """Parses Prometheus text format to values by name; rounds by name and shape."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[f"{sample.name} {sample.labels.get('way', '')}".strip()] += sample.value
    return found


def summarise_counters(grown: Mapping[str, float]) -> dict[str, Any]:
    """tau, acceptance rate and shares of shapes, from the increase of a server's counters.

    A round commits the accepted draft tokens and one more token per row; the first token of an
    answer comes from prefill. `shares` counts rounds per batch, not per row.
    """
    first = grown.get("vllm:time_to_first_token_seconds_count", 0)
    committed = grown.get("moa:decoded_tokens_total", 0) - first
    accepted = grown.get("vllm:spec_decode_num_accepted_tokens_total", 0)
    drafted = grown.get("vllm:spec_decode_num_draft_tokens_total", 0)
    rounds = {
        name.split(" ", 1)[1]: n for name, n in grown.items() if name.startswith(ROUNDS) and n
    }
    return {
        "tau": committed / (committed - accepted) if committed > accepted else None,
        "acceptance_rate": accepted / drafted if drafted else None,
        "shares": {shape: rounds[shape] / sum(rounds.values()) for shape in sorted(rounds)},
        "compiled": int(grown.get(PROGRAMS, 0)),
    }
