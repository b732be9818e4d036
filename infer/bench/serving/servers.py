"""A server process per mode on one pair, and its metrics."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

from infer.server_process import Child

MEMORY_FRACTION = "XLA_PYTHON_CLIENT_MEM_FRACTION"  # share of a GPU, which all servers use
IDLE_CPU, SAMPLE_SECONDS = 0.05, 0.5  # share of one core, averaging time
SETTLE_SECONDS = 900.0  # to compile and time all programs
PROGRAMS = "moa:programs_total"


class Server(NamedTuple):
    """A running server process."""

    mode: str
    url: str  # scheme, host and port
    child: Child

    def settle(self) -> None:
        """Waits until the process is idle, so that its compiles do not slow the next server."""
        for _ in range(int(SETTLE_SECONDS / SAMPLE_SECONDS)):
            before = self.child.cpu_seconds() or 0.0
            time.sleep(SAMPLE_SECONDS)
            self.child.check()
            if (self.child.cpu_seconds() or 0.0) - before < IDLE_CPU * SAMPLE_SECONDS:
                return


@contextlib.contextmanager
def serving(variants: Mapping[str, Sequence[str]]) -> Iterator[list[Server]]:
    """Starts the servers of all modes, with their flags, one after the other.

    A server compiles and times its programs before the next one starts, since costs that are
    measured beside a compiler are too high. Raises InputError with the last output line of a server
    that cannot start.
    """
    share = f"{0.9 / len(variants):.3f}"
    env = {MEMORY_FRACTION: os.environ.get(MEMORY_FRACTION, share)}
    # Servers refuse no request and reuse no prompt: questions repeat, differently per server.
    more = ["--max-queue", str(1 << 20), "--drain-seconds", "1", "--prefix-bytes", "0"]
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="moa-serving-")))
        servers = []
        for mode, flags in variants.items():
            print(f"{mode}: compiles and times its programs", file=sys.stderr)
            child = Child("infer.serve", [*flags, *more], folder / mode, env=env, of=mode)
            url = stack.enter_context(child).ready()["url"].removesuffix("/v1")
            servers.append(Server(mode, url, child))
            servers[-1].settle()
        yield servers


def parse(text: str) -> Counter[str]:
    """Parses Prometheus text format to values by name, summed over labels."""
    found: Counter[str] = Counter()
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found[sample.name] += sample.value
    return found


def summarise_counters(grown: Mapping[str, float]) -> dict[str, Any]:
    """tau and the number of compiled programs, from the increase of a server's counters.

    A round commits the accepted draft tokens and one more token per row; the first token of an
    answer comes from prefill.
    """
    first = grown.get("vllm:time_to_first_token_seconds_count", 0)
    committed = grown.get("moa:decoded_tokens_total", 0) - first
    accepted = grown.get("vllm:spec_decode_num_accepted_tokens_total", 0)
    return {
        "tau": committed / (committed - accepted) if committed > accepted else None,
        "compiled": int(grown.get(PROGRAMS, 0)),
    }
