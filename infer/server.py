"""Serves the target of split decoding to infer.client over a WebSocket.

python -m infer.server                                     clients on this machine only
python -m infer.server --port 0 --ready-file READY.json    any free port, for scripts
python -m infer.server --host 0.0.0.0 --token-file TOKEN --tls-cert C.pem --tls-key K.pem

SIGTERM lets running sessions finish first; Ctrl-C does not. GET /health returns the server's
health, and GET /metrics its Prometheus metrics.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import socket
from collections.abc import Awaitable, Callable, Sequence
from typing import Any, TypeVar

from infer.cli.flags.pair import add_pair_flags, load_pair
from infer.cli.program import Parser, names, need, positive, run

if __name__ == "__main__":
    need("infer.server", "prometheus_client", "starlette", "uvicorn", "websockets")

from infer.http.address import (
    DRAIN_SECONDS,
    PING_SECONDS,
    add_address_flags,
    add_limits,
    bind,
    check_address,
)
from infer.http.auth import read_token
from infer.http.log import EventLog, Log, WarningHandler, place_of
from infer.http.run import serve_until_signal
from infer.split_client.link import LARGEST_CHUNK
from infer.split_server.app import PATH, ConnectionLimits, SplitServer
from infer.split_server.metrics import ServerMetrics
from infer.split_server.service import Service
from infer.split_server.sessions import ServerLimits
from moa_jax.config import MAX_DEPTH
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.detokenize import detokenizer_of
from moa_jax.errors import InputError
from moa_jax.split.pairing import pairing_of
from moa_jax.split.server_target import PassSize, TargetSlots

T = TypeVar("T")
USUAL = 16  # nodes: enough for most drafts, such as chains of the default lengths
SECRET = "--token-file"


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    limits = _server_limits_of(args)
    if "num_speculative_tokens" in (args.speculative_config or {}):
        raise InputError(
            "--speculative-config: num_speculative_tokens has no meaning here; leave it out, and "
            "give --lengths to infer.client"
        )
    token = args.token_file and read_token(args.token_file)
    check_address(args, SECRET, has_secret=token is not None)
    # The port is bound before the models are loaded, which takes a while.
    listener = bind(args.host, args.port, args.ready_file)
    with listener, EventLog() as log, WarningHandler(log):
        server, compiling = _load(args, limits, token, log)
        return asyncio.run(_serve(args, server, listener, compiling))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.server", __doc__)
    add_address_flags(parser, 8765, SECRET, "with the token of clients")
    add_pair_flags(parser)
    _add_limits(parser)
    group = parser.add_argument_group("compiling")
    group.add_argument(
        "--warm",
        type=_sizes,
        metavar="N,N",
        help="compile programs for drafts of so many nodes, the root included, and for the largest "
        "before clients are let in, and no others; other drafts are padded. By default the server "
        f"compiles two sizes first ({USUAL} nodes and the largest) and the others while it serves",
    )
    group.add_argument(
        "--warm-sampled",
        action="store_true",
        help="also compile for answers at a temperature before clients are let in",
    )
    group = parser.add_argument_group("log")
    group.add_argument(
        "--log-text", action="store_true", help="log the texts of users, for debugging"
    )
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Flags for `ServerLimits` and `ConnectionLimits`, with their defaults."""
    limits, connection = ServerLimits(), ConnectionLimits()
    group = parser.add_argument_group("limits")
    whole = [
        ("--slots", limits.num_slots, "sessions with caches; also the most drafts of a pass"),
        ("--max-clients", connection.max_clients, "open connections"),
        ("--max-queue", limits.max_queue, "clients that wait for a slot"),
        (
            "--max-tokens",
            limits.max_tokens,
            "tokens of one session, prompt included; at most the target's positions",
        ),
        ("--max-prompt", limits.max_prompt, "tokens of a prompt"),
        ("--max-nodes", limits.max_nodes, "drafted tokens of one verification"),
        ("--chunk", limits.chunk, "tokens of a prompt read between two verifications"),
        ("--max-message-bytes", connection.max_message_bytes, "bytes of one message to the server"),
    ]
    seconds = [
        ("--queue-seconds", limits.queue_seconds, "that a client waits for a slot"),
        (
            "--resume-seconds",
            limits.resume_seconds,
            "that a slot waits for a client to come back at most, and less where another client "
            "waits for the slot",
        ),
        ("--idle-seconds", connection.idle_seconds, "that a client may be silent"),
        ("--hello-seconds", connection.hello_seconds, "that a client may take to send Hello"),
        ("--send-seconds", connection.send_seconds, "that a client may take to accept a message"),
        ("--drain-seconds", DRAIN_SECONDS, "that running sessions have left after SIGTERM"),
        ("--max-requests-per-second", connection.max_requests_per_second, "of one connection"),
    ]
    add_limits(group, whole, seconds)


def _server_limits_of(args: argparse.Namespace) -> ServerLimits:
    """The flags as `ServerLimits`; InputError for impossible sizes."""
    if args.max_nodes >= MAX_DEPTH:
        raise InputError(f"--max-nodes {args.max_nodes}; choose from 1 to {MAX_DEPTH - 1}")
    if args.chunk > LARGEST_CHUNK:
        raise InputError(
            f"--chunk {args.chunk}: clients take at most {LARGEST_CHUNK} at once; lower it"
        )
    if (most := max(args.warm or (1,))) > args.max_nodes + 1:
        raise InputError(
            f"--warm {most}: drafts have at most {args.max_nodes + 1} nodes with the root; lower it"
        )
    return _from_flags(args, ServerLimits, num_slots=args.slots)


def _from_flags(args: argparse.Namespace, kind: type[T], **more: Any) -> T:
    """A dataclass whose fields are the flags of the same names, and `more`."""
    names = {field.name for field in dataclasses.fields(kind)} & vars(args).keys()
    return kind(**{name: getattr(args, name) for name in names}, **more)


Compile = Callable[[], Awaitable[None]]


def _load(
    args: argparse.Namespace, limits: ServerLimits, token: str | None, log: Log
) -> tuple[SplitServer, Compile]:
    """Loads the models and compiles the first programs.

    Returns the server, and a function that compiles the other programs while the server runs.
    """
    target, drafter = load_pair(args, split=True)
    positions = target.config.max_position_embeddings
    limits = dataclasses.replace(limits, max_tokens=min(limits.max_tokens, positions))
    slots = TargetSlots(
        target,
        drafter,
        num_slots=limits.num_slots,
        max_tokens=limits.max_tokens,
        max_nodes=limits.max_nodes + 1,
        chunk=limits.chunk,
    )
    first = slots.passes(args.warm or (USUAL,), args.warm_sampled, short=bool(args.warm))
    later = [] if args.warm else [size for size in slots.passes(sampled=True) if size not in first]
    log("compile", programs=len(first), later=len(later))  # compilation may take a minute
    for size in first:
        slots.compile(size)
    text_of = None
    if args.log_text:  # token ids for a target without a tokenizer
        has_tokenizer = (target.folder / "tokenizer.json").exists()
        tokenizer = load_tokenizer(target.folder) if has_tokenizer else None
        text_of = detokenizer_of(tokenizer, skip_special=False).decode
    service = Service(slots, limits, ServerMetrics(), log, text_of=text_of)
    pairing = pairing_of(target, drafter)
    connection = _from_flags(args, ConnectionLimits, token=token)
    server = SplitServer(service, pairing, target.config.vocab_size, connection, log)
    return server, functools.partial(_compile, slots, later, log)


async def _compile(slots: TargetSlots, passes: Sequence[PassSize], log: Log) -> None:
    """Compiles programs for more pass sizes, until then padded; only logs a failure."""
    for size in passes:
        try:
            await asyncio.to_thread(slots.compile, size)
        except Exception as error:
            return log("error", what=place_of(error))
    log("compiled", programs=len(passes))


async def _serve(
    args: argparse.Namespace, server: SplitServer, listener: socket.socket, compiling: Compile
) -> int:
    """Serves until a signal arrives; returns the exit code."""
    return await serve_until_signal(
        args,
        listener,
        server.app,
        ("ws", PATH),
        functools.partial(server.drain, args.drain_seconds),
        background=compiling,  # a signal lets the current compilation finish
        ws="websockets-sansio",
        ws_max_size=args.max_message_bytes,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        ws_per_message_deflate=False,  # rows are compressed on a client's request
    )


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(positive, names(text)))


if __name__ == "__main__":
    run(main)
