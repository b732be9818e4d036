"""Serves the target's half of split decoding to infer.client, over a WebSocket.

python -m infer.server                                     for this machine alone
python -m infer.server --port 0 --ready-file READY.json    any free port, for scripts
python -m infer.server --host 0.0.0.0 --token-file TOKEN --tls-cert C.pem --tls-key K.pem

SIGTERM lets running sessions end first; Ctrl-C does not. GET /health and /metrics (Prometheus).
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import errno
import functools
import ipaddress
import json
import os
import signal
import socket
import ssl
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import uvicorn

from infer.flags.pair import add_pair_flags, load_pair
from infer.program import INTERRUPTED, Parser, above_zero, names, positive, run
from infer.split.credentials import read_token
from infer.split.link import LARGEST_CHUNK
from infer.split.server.app import PATH, Manners, Server
from infer.split.server.events import EventLog, Log, WarningsTo, place_of
from infer.split.server.listener import PatientHttp
from infer.split.server.metrics import Metrics
from infer.split.server.scheduler import Scheduler
from infer.split.server.sessions import Rules
from moa_jax.config import MAX_DEPTH
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.errors import InputError, first_line
from moa_jax.files.folders import write_whole
from moa_jax.pretrained import Target
from moa_jax.split.pairing import pairing_of
from moa_jax.split.slots import Pass, Slots

USUAL = 16  # nodes that hold most drafts: a chain of the default lengths
PING_SECONDS = 20.0  # between pings, and again until the answer must be there


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    rules = _rules_of(args)
    token = _token_of(args)
    _check_certificate(args)
    _check_ready_file(args)
    # The port comes before the models, which take their time.
    with bind(args.host, args.port) as listener, EventLog() as log, WarningsTo(log):
        server, compiling = _load(args, rules, token, log)
        return asyncio.run(_serve(args, server, listener, compiling))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.server", __doc__)
    group = parser.add_argument_group("address")
    group.add_argument("--host", default="127.0.0.1", help="to listen on")
    group.add_argument("--port", type=_port, default=8765, help="0 takes any that is free")
    group.add_argument("--token-file", metavar="FILE", help="with the token that clients must show")
    group.add_argument(
        "--open", action="store_true", help="let anyone in who reaches a host beyond this machine"
    )
    group.add_argument("--tls-cert", metavar="FILE.pem", help="certificate chain, for wss://")
    group.add_argument("--tls-key", metavar="FILE.pem", help="its key, where it is elsewhere")
    group.add_argument("--ready-file", metavar="FILE.json", help="written once clients can come")
    add_pair_flags(parser)
    _add_limits(parser)
    group = parser.add_argument_group("compiling")
    group.add_argument(
        "--warm",
        type=_sizes,
        metavar="N,N",
        help="compile, before clients come, for drafts of so many nodes, the root included, and "
        "for nothing else: others are padded to the next size there is. By default clients come "
        f"after the first programs ({USUAL} nodes, and the largest, which holds everything), and "
        "the rest is compiled while they are served",
    )
    group.add_argument(
        "--warm-sampled",
        action="store_true",
        help="before clients come, the same for answers at a temperature, too",
    )
    group = parser.add_argument_group("log")
    group.add_argument(
        "--log-text", action="store_true", help="log what users write and read, for debugging"
    )
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    """Flags for `Rules` and `Manners`, whose defaults they take."""
    rules, manners = Rules(), Manners()
    group = parser.add_argument_group("limits")
    whole = [
        ("--slots", rules.num_slots, "sessions that have a cache, and drafts in one target pass"),
        ("--max-clients", manners.max_clients, "open connections"),
        ("--max-queue", rules.max_queue, "clients that wait for a slot"),
        (
            "--max-tokens",
            rules.max_tokens,
            "tokens of one session, prompt included; fewer where the target has fewer positions",
        ),
        ("--max-prompt", rules.max_prompt, "tokens of a prompt"),
        ("--max-nodes", rules.max_nodes, "drafted tokens of one verification"),
        ("--chunk", rules.chunk, "tokens of a prompt read between two verifications"),
        ("--max-message-bytes", manners.max_message_bytes, "bytes of one message to the server"),
    ]
    for flag, default, text in whole:
        group.add_argument(flag, type=positive, default=default, metavar="N", help=text)
    seconds = [
        ("--queue-seconds", rules.queue_seconds, "that a client waits for a slot"),
        ("--resume-seconds", rules.resume_seconds, "that a slot waits for a client to come back"),
        ("--idle-seconds", manners.idle_seconds, "that a client may be silent"),
        ("--hello-seconds", manners.hello_seconds, "until the first message must be there"),
        ("--send-seconds", manners.send_seconds, "that a client may take to read what it is sent"),
        ("--drain-seconds", 30.0, "that running sessions have after SIGTERM"),
        ("--max-requests-per-second", manners.max_requests_per_second, "of one connection"),
    ]
    for flag, default, text in seconds:
        group.add_argument(flag, type=above_zero, default=default, metavar="X", help=text)


def _rules_of(args: argparse.Namespace) -> Rules:
    """What is lent; InputError for sizes that cannot be, before anything is loaded."""
    if args.max_nodes >= MAX_DEPTH:
        raise InputError(f"--max-nodes {args.max_nodes}: choose from 1 to {MAX_DEPTH - 1}")
    if args.chunk > LARGEST_CHUNK:
        raise InputError(f"--chunk {args.chunk}: clients take at most {LARGEST_CHUNK} at once")
    if (most := max(args.warm or (1,))) > args.max_nodes + 1:
        raise InputError(
            f"--warm {most}: drafts have at most {args.max_nodes + 1} nodes, the root included"
        )
    return Rules(
        num_slots=args.slots,
        max_prompt=args.max_prompt,
        max_tokens=args.max_tokens,
        max_nodes=args.max_nodes,
        chunk=args.chunk,
        max_queue=args.max_queue,
        queue_seconds=args.queue_seconds,
        resume_seconds=args.resume_seconds,
    )


def _manners_of(args: argparse.Namespace, token: str | None) -> Manners:
    return Manners(
        token=token,
        max_clients=args.max_clients,
        max_message_bytes=args.max_message_bytes,
        max_requests_per_second=args.max_requests_per_second,
        hello_seconds=args.hello_seconds,
        idle_seconds=args.idle_seconds,
        send_seconds=args.send_seconds,
    )


Compile = Callable[[], Awaitable[None]]


def _load(
    args: argparse.Namespace, rules: Rules, token: str | None, log: Log
) -> tuple[Server, Compile]:
    """The application over the models, and what is to be compiled while it serves."""
    target, drafter = load_pair(args)
    positions = target.config.max_position_embeddings
    rules = dataclasses.replace(rules, max_tokens=min(rules.max_tokens, positions))
    slots = Slots(
        target,
        drafter,
        num_slots=rules.num_slots,
        max_tokens=rules.max_tokens,
        max_nodes=rules.max_nodes + 1,
        chunk=rules.chunk,
    )
    first = slots.passes(args.warm or (USUAL,), args.warm_sampled, short=bool(args.warm))
    later = [] if args.warm else [size for size in slots.passes(sampled=True) if size not in first]
    log("compile", programs=len(first), later=len(later))  # a minute, perhaps
    for size in first:
        slots.compile(size)
    text_of = _decoder(target) if args.log_text else None
    scheduler = Scheduler(slots, rules, Metrics(), log, text_of=text_of)
    pairing = pairing_of(target, drafter)
    server = Server(scheduler, pairing, target.config.vocab_size, _manners_of(args, token), log)
    return server, functools.partial(_compile, slots, later, log)


async def _compile(slots: Slots, passes: Sequence[Pass], log: Log) -> None:
    """Programs for passes that are padded until then; without them the server goes on."""
    for size in passes:
        try:
            await asyncio.to_thread(slots.compile, size)
        except Exception as error:
            return log("error", what=place_of(error))
    log("compiled", programs=len(passes))


async def _serve(
    args: argparse.Namespace, server: Server, listener: socket.socket, compiling: Compile
) -> int:
    """Listen until a signal comes; the exit code is that of a program that was asked to end."""
    config = uvicorn.Config(
        server.app,
        http=PatientHttp,
        ws="websockets-sansio",
        ws_max_size=args.max_message_bytes,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        ws_per_message_deflate=False,  # rows are compressed where a client asks for it
        lifespan="on",
        log_config=None,
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=2,
        ssl_certfile=args.tls_cert,
        ssl_keyfile=args.tls_key,
    )
    asked: asyncio.Queue[int] = asyncio.Queue()
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, asked.put_nowait, number)
    listening = _Listening(config)
    serving = asyncio.create_task(listening.serve(sockets=[listener]))
    try:
        await listening.ready(serving)
    except OSError as error:  # another server was bound to this port, too, and was faster
        raise _unusable(args.host, args.port, error) from error
    _announce(args, listener)
    behind = asyncio.create_task(compiling())
    number = await asked.get()
    behind.cancel()  # the program in the works is finished, no other one is begun
    if number == signal.SIGTERM:
        draining = asyncio.create_task(server.drain(args.drain_seconds))
        again = asyncio.create_task(asked.get())  # a second signal means it
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
    listening.should_exit = True
    await serving
    return INTERRUPTED if number == signal.SIGINT else 0


class _Listening(uvicorn.Server):
    """uvicorn's server, without its own idea of signals."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    async def ready(self, serving: asyncio.Task[None]) -> None:
        """Return once connections are taken; raises what went wrong instead."""
        while not self.started:
            if serving.done():
                serving.result()
                raise RuntimeError("the server ended before it listened")
            await asyncio.sleep(0.01)


def bind(host: str, port: int) -> socket.socket:
    """A socket bound to an address, where nobody is let in yet; InputError if it cannot be."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(f"--host {host}: {error.strerror}: give an address of this one") from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: what is sent to a dead link is not kept long
        timeout = int(2000 * PING_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise _unusable(host, port, error) from error
    return listener


def _unusable(host: str, port: int, error: OSError) -> InputError:
    if error.errno == errno.EADDRINUSE:
        return InputError(f"port {port} of {host} is in use: choose another --port, or 0 for any")
    return InputError(f"port {port} of {host}: {error.strerror}: choose another --host or --port")


def is_loopback(host: str) -> bool:
    """Whether only programs on this machine reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token_of(args: argparse.Namespace) -> str | None:
    """The token that clients must show; InputError where a public host has none."""
    if args.token_file is None:
        if not (args.open or is_loopback(args.host)):
            raise InputError(
                f"--host {args.host} is not this machine alone: give --token-file, or --open to "
                "let anyone in"
            )
        return None
    return read_token(args.token_file)


def _check_certificate(args: argparse.Namespace) -> None:
    """Raise InputError for files that make no TLS server, before anything is loaded."""
    if args.tls_cert is None:
        if args.tls_key is not None:
            raise InputError("--tls-key without --tls-cert: give both")
        return
    for path in filter(None, (args.tls_cert, args.tls_key)):
        Path(path).open("rb").close()  # OSError names the file, load_cert_chain does not
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(args.tls_cert, args.tls_key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        files = " and ".join(filter(None, (args.tls_cert, args.tls_key)))
        raise InputError(
            f"{files}: no certificate with its key ({first_line(error)}): give PEM files that "
            "belong together, the key without a password"
        ) from error


def _check_ready_file(args: argparse.Namespace) -> None:
    """Raise InputError for a file that could not be written once everything is loaded."""
    if args.ready_file is None:
        return
    path = Path(args.ready_file)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"--ready-file {path}: no file can be written there: choose another path")


def _announce(args: argparse.Namespace, listener: socket.socket) -> None:
    """Say where clients find the server, to people and to scripts."""
    port = listener.getsockname()[1]
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"{'wss' if args.tls_cert else 'ws'}://{host}:{port}{PATH}"
    print(f"listening on {url}", flush=True)
    if args.ready_file is not None:
        write_whole(Path(args.ready_file), json.dumps({"url": url, "port": port}) + "\n")


def _decoder(target: Target) -> Any:
    """Text of tokens, or their ids for a target without a tokenizer."""
    if not (target.folder / "tokenizer.json").exists():
        return str
    return load_tokenizer(target.folder).decode


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(positive, names(text)))


if __name__ == "__main__":
    run(main)
