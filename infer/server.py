"""Serves the target's half of split decoding to infer.client, over a WebSocket.

python -m infer.server                                     clients on this machine only
python -m infer.server --port 0 --ready-file READY.json    any free port, for scripts
python -m infer.server --host 0.0.0.0 --token-file TOKEN --tls-cert C.pem --tls-key K.pem

SIGTERM lets running sessions end first; Ctrl-C does not. GET /health tells whether the server
works, and GET /metrics what it has counted (Prometheus).
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
from infer.split.server.app import PATH, ConnectionLimits, SplitServer
from infer.split.server.events import EventLog, Log, WarningsTo, place_of
from infer.split.server.listener import PatientHttp
from infer.split.server.metrics import ServerMetrics
from infer.split.server.scheduler import Scheduler
from infer.split.server.sessions import ServerLimits
from moa_jax.config import MAX_DEPTH
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.errors import InputError, first_line
from moa_jax.files.folders import write_whole
from moa_jax.split.pairing import pairing_of
from moa_jax.split.slots import PassSize, Slots

USUAL = 16  # nodes, enough for most drafts: a chain of the default lengths
PING_SECONDS = 20.0  # between pings, and again until the pong must have come


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    limits = _server_limits_of(args)
    token = _token_of(args)
    _check_certificate(args)
    _check_ready_file(args)
    # The port is bound before the models are loaded, which takes a while.
    with bind(args.host, args.port) as listener, EventLog() as log, WarningsTo(log):
        server, compiling = _load(args, limits, token, log)
        return asyncio.run(_serve(args, server, listener, compiling))


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.server", __doc__)
    group = parser.add_argument_group("address")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=_port, default=8765, help="0 takes any free port")
    group.add_argument("--token-file", metavar="FILE", help="with the token of clients")
    group.add_argument("--open", action="store_true", help="serve other machines without a token")
    group.add_argument("--tls-cert", metavar="FILE.pem", help="certificate chain, for wss://")
    group.add_argument("--tls-key", metavar="FILE.pem", help="its key, if it is in another file")
    group.add_argument("--ready-file", metavar="FILE.json", help="written when the server is ready")
    add_pair_flags(parser)
    _add_limits(parser)
    group = parser.add_argument_group("compiling")
    group.add_argument(
        "--warm",
        type=_sizes,
        metavar="N,N",
        help="compile programs for drafts of so many nodes, the root included, before clients are "
        "let in, and no others; other drafts are padded to the next size. By default the server "
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
    for flag, default, text in whole:
        group.add_argument(flag, type=positive, default=default, metavar="N", help=text)
    seconds = [
        ("--queue-seconds", limits.queue_seconds, "that a client waits for a slot"),
        ("--resume-seconds", limits.resume_seconds, "that a slot waits for a client to come back"),
        ("--idle-seconds", connection.idle_seconds, "that a client may be silent"),
        ("--hello-seconds", connection.hello_seconds, "until a client must have said Hello"),
        ("--send-seconds", connection.send_seconds, "that a client may take to accept a message"),
        ("--drain-seconds", 30.0, "that running sessions have left after SIGTERM"),
        ("--max-requests-per-second", connection.max_requests_per_second, "of one connection"),
    ]
    for flag, default, text in seconds:
        group.add_argument(flag, type=above_zero, default=default, metavar="X", help=text)


def _server_limits_of(args: argparse.Namespace) -> ServerLimits:
    """The flags as `ServerLimits`; InputError for impossible sizes."""
    if args.max_nodes >= MAX_DEPTH:
        raise InputError(f"--max-nodes {args.max_nodes}: choose from 1 to {MAX_DEPTH - 1}")
    if args.chunk > LARGEST_CHUNK:
        raise InputError(f"--chunk {args.chunk}: clients take at most {LARGEST_CHUNK} at once")
    if (most := max(args.warm or (1,))) > args.max_nodes + 1:
        raise InputError(
            f"--warm {most}: drafts have at most {args.max_nodes + 1} nodes, the root included"
        )
    return ServerLimits(
        num_slots=args.slots,
        max_prompt=args.max_prompt,
        max_tokens=args.max_tokens,
        max_nodes=args.max_nodes,
        chunk=args.chunk,
        max_queue=args.max_queue,
        queue_seconds=args.queue_seconds,
        resume_seconds=args.resume_seconds,
    )


def _connection_limits_of(args: argparse.Namespace, token: str | None) -> ConnectionLimits:
    return ConnectionLimits(
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
    args: argparse.Namespace, limits: ServerLimits, token: str | None, log: Log
) -> tuple[SplitServer, Compile]:
    """Loads the models and compiles the first programs.

    Returns the server, and a function that compiles the other programs while it serves.
    """
    target, drafter = load_pair(args)
    positions = target.config.max_position_embeddings
    limits = dataclasses.replace(limits, max_tokens=min(limits.max_tokens, positions))
    slots = Slots(
        target,
        drafter,
        num_slots=limits.num_slots,
        max_tokens=limits.max_tokens,
        max_nodes=limits.max_nodes + 1,
        chunk=limits.chunk,
    )
    first = slots.passes(args.warm or (USUAL,), args.warm_sampled, short=bool(args.warm))
    later = [] if args.warm else [size for size in slots.passes(sampled=True) if size not in first]
    log("compile", programs=len(first), later=len(later))  # this may take a minute
    for size in first:
        slots.compile(size)
    text_of = None
    if args.log_text:  # the ids are shown for a target without a tokenizer
        has_tokenizer = (target.folder / "tokenizer.json").exists()
        text_of = load_tokenizer(target.folder).decode if has_tokenizer else str
    scheduler = Scheduler(slots, limits, ServerMetrics(), log, text_of=text_of)
    pairing = pairing_of(target, drafter)
    server = SplitServer(
        scheduler, pairing, target.config.vocab_size, _connection_limits_of(args, token), log
    )
    return server, functools.partial(_compile, slots, later, log)


async def _compile(slots: Slots, passes: Sequence[PassSize], log: Log) -> None:
    """Compiles programs for passes that are padded until then; a failure is only logged."""
    for size in passes:
        try:
            await asyncio.to_thread(slots.compile, size)
        except Exception as error:
            return log("error", what=place_of(error))
    log("compiled", programs=len(passes))


async def _serve(
    args: argparse.Namespace, server: SplitServer, listener: socket.socket, compiling: Compile
) -> int:
    """Serves until a signal comes; returns the exit code."""
    config = uvicorn.Config(
        server.app,
        http=PatientHttp,
        ws="websockets-sansio",
        ws_max_size=args.max_message_bytes,
        ws_ping_interval=PING_SECONDS,
        ws_ping_timeout=PING_SECONDS,
        ws_per_message_deflate=False,  # rows are compressed if a client asks for it
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
    except OSError as error:  # another server bound this port, too, and listened first
        raise _unusable(args.host, args.port, error) from error
    _announce(args, listener)
    behind = asyncio.create_task(compiling())
    number = await asked.get()
    behind.cancel()  # the program under way is finished, no other one is begun
    if number == signal.SIGTERM:
        draining = asyncio.create_task(server.drain(args.drain_seconds))
        again = asyncio.create_task(asked.get())  # a second signal ends the server at once
        await asyncio.wait([draining, again], return_when=asyncio.FIRST_COMPLETED)
        again.cancel()
    listening.should_exit = True
    await serving
    return INTERRUPTED if number == signal.SIGINT else 0


class _Listening(uvicorn.Server):
    """uvicorn's server without its handling of signals."""

    def capture_signals(self) -> Any:
        return contextlib.nullcontext()

    async def ready(self, serving: asyncio.Task[None]) -> None:
        """Returns once connections are accepted; raises what went wrong otherwise."""
        while not self.started:
            if serving.done():
                serving.result()
                raise RuntimeError("the server ended before it listened")
            await asyncio.sleep(0.01)


def bind(host: str, port: int) -> socket.socket:
    """A socket that is bound to an address but does not listen yet; InputError if that fails."""
    try:
        family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(
            f"--host {host}: {error.strerror}: give an address of this machine"
        ) from error
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: give up on data that a dead link does not take
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
    """Whether only programs on this machine can reach a host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _token_of(args: argparse.Namespace) -> str | None:
    """The token that clients must present; InputError if a public host has none."""
    if args.token_file is None:
        if not (args.open or is_loopback(args.host)):
            raise InputError(
                f"--host {args.host} lets other machines in: give --token-file, or --open to serve "
                "anyone"
            )
        return None
    return read_token(args.token_file)


def _check_certificate(args: argparse.Namespace) -> None:
    """Raises InputError for files that are not a certificate and its key."""
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
    """Raises InputError for a file that could not be written later."""
    if args.ready_file is None:
        return
    path = Path(args.ready_file)
    if path.is_dir() or not os.access(path.parent, os.W_OK | os.X_OK):
        raise InputError(f"--ready-file {path}: no file can be written there: choose another path")


def _announce(args: argparse.Namespace, listener: socket.socket) -> None:
    """Prints the server's URL and writes the ready file."""
    port = listener.getsockname()[1]
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"{'wss' if args.tls_cert else 'ws'}://{host}:{port}{PATH}"
    print(f"listening on {url}", flush=True)
    if args.ready_file is not None:
        write_whole(Path(args.ready_file), json.dumps({"url": url, "port": port}) + "\n")


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)


def _sizes(text: str) -> tuple[int, ...]:
    return tuple(map(positive, names(text)))


if __name__ == "__main__":
    run(main)
