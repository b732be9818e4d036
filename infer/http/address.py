"""Address of a server: flags, a bound port, certificates, the ready file."""

from __future__ import annotations

import argparse
import errno
import ipaddress
import json
import os
import socket
import ssl
from pathlib import Path
from typing import Any

from infer.cli.program import above_zero, positive
from moa_jax.errors import InputError, first_line
from moa_jax.files.paths import check_file
from moa_jax.files.whole_files import write_whole

PING_SECONDS = 20.0  # between pings; also the timeout of a pong
DRAIN_SECONDS = 30.0


def add_address_flags(parser: argparse.ArgumentParser, port: int, secret: str, help: str) -> None:
    """Adds the flags of an address; `secret` is the flag of the file with tokens or keys."""
    group = parser.add_argument_group("address")
    group.add_argument("--host", default="127.0.0.1", help="address to listen on")
    group.add_argument("--port", type=_port, default=port, help="0 takes any free port")
    group.add_argument(secret, metavar="FILE", help=help)
    group.add_argument("--open", action="store_true", help=f"serve other machines without {secret}")
    group.add_argument("--tls-cert", metavar="FILE.pem", help="certificate chain, for encryption")
    group.add_argument("--tls-key", metavar="FILE.pem", help="its key, if it is in another file")
    group.add_argument(
        "--ready-file",
        metavar="FILE.json",
        help="written when the server is ready; an old one is removed at the start",
    )


def add_limits(
    group: Any, whole: list[tuple[str, int, str]], seconds: list[tuple[str, float, str]]
) -> None:
    """Adds flags (name, default, help) for whole numbers and for seconds."""
    for flag, default, text in whole:
        group.add_argument(flag, type=positive, default=default, metavar="N", help=text)
    for flag, default, text in seconds:
        group.add_argument(flag, type=above_zero, default=default, metavar="X", help=text)


def check_address(args: argparse.Namespace, secret: str, has_secret: bool) -> None:
    """Raises InputError for unusable files, and for a public host without a secret.

    Raises OSError for a path that cannot be read.
    """
    if not (has_secret or args.open or is_loopback(args.host)):
        raise InputError(
            f"--host {args.host} lets other machines in; give {secret}, or --open to serve anyone"
        )
    _check_certificate(args.tls_cert, args.tls_key)
    if args.ready_file is not None:
        # A killed server may have left a symbolic link without its file.
        ready = Path(os.path.realpath(args.ready_file))
        check_file("--ready-file", ready)
        if ready.is_file() and not _is_ready_file(ready):
            raise InputError(f"--ready-file {ready}: not a ready file; choose another path")


def bind(host: str, port: int, ready_file: str | None = None) -> socket.socket:
    """Binds a socket that does not listen yet; raises InputError if the system rejects the address.

    Removes the ready file of an earlier server, which would announce this server too early.
    """
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise InputError(
            f"--host {host}: {error.strerror}; give an address of this machine"
        ) from error
    family, kind, protocol, _, address = found
    # asyncio sets TCP_NODELAY only for a socket with a protocol number.
    listener = socket.socket(family, kind, protocol)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    if hasattr(socket, "TCP_USER_TIMEOUT"):  # Linux: closes a dead connection
        timeout = int(2000 * PING_SECONDS)
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, timeout)
    try:
        listener.bind(address)
    except OSError as error:
        listener.close()
        raise unusable(host, port, error) from error
    if ready_file is not None and Path(ready_file).is_file():
        Path(os.path.realpath(ready_file)).unlink()  # a symbolic link to the file stays
    return listener


def unusable(host: str, port: int, error: OSError) -> InputError:
    """The error for an address that the system rejects."""
    if error.errno == errno.EADDRINUSE:
        return InputError(f"port {port} of {host} is in use; choose another --port, or 0 for any")
    return InputError(f"port {port} of {host}: {error.strerror}; choose another --host or --port")


def announce(args: argparse.Namespace, listener: socket.socket, scheme: str, path: str) -> None:
    """Prints the URL and writes the ready file; with a certificate the scheme gets an s."""
    port = listener.getsockname()[1]
    host = f"[{args.host}]" if ":" in args.host else args.host
    url = f"{scheme}{'s' if args.tls_cert else ''}://{host}:{port}{path}"
    print(f"listening on {url}", flush=True)
    if args.ready_file is not None:
        write_whole(Path(args.ready_file), json.dumps({"url": url, "port": port}) + "\n")


def _is_ready_file(path: Path) -> bool:
    """True for a ready file that a server wrote, and for an empty file."""
    with path.open("rb") as file:
        return file.read(16).startswith((b'{"url": ', b"{}")) or not path.stat().st_size


def is_loopback(host: str) -> bool:
    """True if only programs on this machine can reach the host."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _check_certificate(certificate: str | None, key: str | None) -> None:
    """Raises InputError for files that are not a certificate and its key."""
    if certificate is None:
        if key is not None:
            raise InputError("--tls-key without --tls-cert; give both")
        return
    for path in filter(None, (certificate, key)):
        Path(path).open("rb").close()  # this OSError names the file, unlike load_cert_chain
    try:
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(certificate, key, password=lambda: "")
    except (ssl.SSLError, ValueError) as error:
        files = " and ".join(filter(None, (certificate, key)))
        raise InputError(
            f"{files}: no certificate with its key ({first_line(error)}); give PEM files that "
            "belong together, the key without a password"
        ) from error


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"{text!r} is not a port from 0 to 65535")
    return int(text)
