"""Split decoding: drafts here, verifies on a server; drafts on alone when the link is lost.

python -m infer.client --connect ws://127.0.0.1:8765/v1/split --prompt "I need a hotel."
python -m infer.client --connect wss://HOST:8765/v1/split --token-file TOKEN --tls-ca CA.pem
python -m infer.client --offline --prompt "Hello"      the drafter alone, without a server
python -m infer.client ... --policy keep               keeps text drafted without a link

Only the target weights that the drafter borrows are loaded. Verified text is printed as the answer
grows, unverified text when the answer ends. Notices about the link go to stderr.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import ssl
import sys
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple, get_args

from infer.cli.documents import GrowingDocument
from infer.cli.flags.pair import DEFAULT_TREE, add_model_flags, load_pair
from infer.cli.flags.prompts import add_prompt_flags, prompts_of, tokenizer_of
from infer.cli.flags.sampling import add_sampling_flags, check_stop_ids, sampling_of, stopper
from infer.cli.program import Parser, above_zero, positive, run
from infer.http.auth import read_token
from infer.split_client.answering import SplitClient
from infer.split_client.figures import figures_of, timed
from infer.split_client.flags import add_pace_flags, add_row_flags
from infer.split_client.link import ConnectionLost, ServerAddress, ServerBusy, check_url
from infer.split_client.state import AnswerEvent, ClientOptions, Policy
from moa_jax.decode.detokenize import GrowingText, Writer
from moa_jax.decode.limits import CacheLimits, prompt_ids_of
from moa_jax.decode.programs import bucket
from moa_jax.decode.session import row_of
from moa_jax.errors import InputError, TemporaryError
from moa_jax.pretrained import Target
from moa_jax.split.client_drafter import ClientDrafter
from moa_jax.split.pairing import pairing_of
from moa_jax.split.protocol import Welcome, sampling_fields

MODES = ("plain", "chain", "tree", "stream")


def main(arguments: list[str] | None = None) -> int | None:
    args = _parser().parse_args(arguments)
    sampling = sampling_of(args)
    options = options_of(args)
    if not args.offline:
        check_url(args.connect)
        sampling_fields(sampling)
    tls, token = _tls_of(args), args.token_file and read_token(args.token_file)
    target, drafter = load_pair(args, split=True, for_client=True)
    check_stop_ids(args.stop_ids, target.config.vocab_size)
    writer = Writer(tokenizer_of(target.folder))
    stopper(writer.tokenizer, args.stop)
    prompts = list(prompts_of(args, writer.tokenizer))
    if not prompts:
        raise InputError("there is no prompt; give --prompt, --prompt-ids or --prompts")
    for index, prompt in enumerate(prompts):
        _check(prompt, index, args.max_new_tokens, target)
    most = max(map(len, prompts)) + args.max_new_tokens
    client_drafter = ClientDrafter(target, drafter, max_tokens=bucket(most))
    _check_drafter(args, client_drafter)
    server = None
    if not args.offline:
        given = (args.codec, args.compress, args.timeout)
        server = ServerAddress(args.connect, pairing_of(target, drafter), token, tls, *given)
    stops = target.generation.eos_ids if args.stop_ids is None else args.stop_ids
    job = ClientJob(args, prompts, list(stops), sampling)
    with ThreadPoolExecutor(1, "drafter") as worker:
        answering = SplitClient(client_drafter, server, options, worker)
        try:
            whole = GrowingDocument(_settings(args), prompts) if args.json else nullcontext()
            with whole as document:
                output = _Output(writer, args.stop, document)
                return asyncio.run(_answer_all(answering, job, output))
        except ConnectionLost as error:
            start = "" if isinstance(error, ServerBusy) else "start infer.server there, or "
            raise TemporaryError(
                f"--connect {args.connect}: {error}; {start}give --offline to have the drafter "
                "answer alone"
            ) from error


class ClientJob(NamedTuple):
    """The prompts of one run and their shared settings."""

    args: argparse.Namespace
    prompts: list[list[int]]
    stop_ids: list[int]
    sampling: Any


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.client", __doc__)
    group = parser.add_argument_group("server").add_mutually_exclusive_group(required=True)
    group.add_argument("--connect", metavar="URL", help="ws://HOST:PORT/v1/split, or wss://")
    group.add_argument("--offline", action="store_true", help="no server: the drafter alone")
    group = parser.add_argument_group("connection")
    group.add_argument("--token-file", metavar="FILE", help="with the server's token")
    group.add_argument("--tls-ca", metavar="FILE.pem", help="certificates to trust for wss://")
    add_row_flags(group)
    group.add_argument(
        "--timeout",
        type=above_zero,
        default=5.0,
        metavar="S",
        help="seconds until a silent link counts as lost",
    )
    group.add_argument(
        "--policy",
        choices=get_args(Policy),
        default="verify",
        help="for text written without a link: keep it, or have it verified and rewritten",
    )
    group.add_argument(
        "--reconnect-seconds",
        type=above_zero,
        default=120.0,
        metavar="S",
        help="seconds that a finished but unverified answer waits for a link (verify)",
    )
    add_model_flags(parser)
    add_prompt_flags(parser)
    _add_drafting_flags(parser)
    add_sampling_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _add_drafting_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("drafting")
    group.add_argument(
        "--mode",
        choices=MODES,
        default="chain",
        help="plain drafts nothing; stream has the target write alone, as an API does",
    )
    add_pace_flags(group)
    tree = DEFAULT_TREE
    group.add_argument("--depth", type=positive, help=f"levels of a tree; default: {tree.depth}")
    group.add_argument("--breadth", type=positive, help=f"default: {tree.breadth}")
    group.add_argument("--total-tokens", type=positive, help=f"default: {tree.total_tokens}")


def options_of(args: argparse.Namespace) -> ClientOptions:
    """The flags as `ClientOptions`; raises InputError for flags that contradict each other."""
    sizes = {name: getattr(args, name) for name in ("depth", "breadth", "total_tokens")}
    tree = {name: size for name, size in sizes.items() if size}
    if args.mode != "tree" and tree:
        raise InputError("--depth, --breadth and --total-tokens describe a tree; add --mode tree")
    if args.mode != "chain" and args.lengths != ClientOptions().lengths:
        raise InputError("--lengths are those of chains; leave it out, or use --mode chain")
    if args.mode in ("plain", "stream") and args.no_ahead:
        raise InputError(f"--no-ahead: --mode {args.mode} drafts nothing; leave it out")
    shape = None
    if args.mode == "tree":
        shape = dataclasses.replace(DEFAULT_TREE, **tree)
        if shape.depth < 2:
            raise InputError("--depth 1 drafts nothing; use --mode plain")
    return ClientOptions(
        shape,
        args.lengths if args.mode in ("chain", "tree") else (),
        not args.no_ahead,
        args.policy,
        reconnect_seconds=args.reconnect_seconds,
        slowdown=args.client_slowdown,
        stream=args.mode == "stream",
    )


def _check(prompt: list[int], index: int, new: int, target: Target) -> None:
    """Raises InputError for invalid ids, and for a prompt too long for the target's positions."""
    positions, vocab_size = target.config.max_position_embeddings, target.config.vocab_size
    prompt_ids_of(index, prompt, vocab_size)
    CacheLimits(positions).check(index, len(prompt), new)


def _check_drafter(args: argparse.Namespace, client_drafter: ClientDrafter) -> None:
    """Raises InputError for a mode that this drafter does not support."""
    if args.offline and args.mode == "stream":
        raise InputError("--mode stream needs the target; leave out --offline")
    if client_drafter.functions.draft_one is None and (args.offline or args.mode == "chain"):
        flag = "--offline" if args.offline else "--mode chain"
        raise InputError(f"{flag}: this drafter cannot write token by token; name another --draft")


def _tls_of(args: argparse.Namespace) -> ssl.SSLContext | None:
    """TLS settings for a wss:// server; raises InputError for a file without a certificate."""
    secure = (args.connect or "").startswith("wss://")
    if args.tls_ca is not None and not secure:
        raise InputError("--tls-ca is for wss:// servers; change --connect, or leave it out")
    if not secure:
        return None
    context = ssl.create_default_context()
    if args.tls_ca is not None:
        try:
            Path(args.tls_ca).open("rb").close()  # this OSError names the file
            context.load_verify_locations(args.tls_ca)
        except ssl.SSLError as error:
            raise InputError(f"{args.tls_ca} holds no certificate; give a PEM file") from error
    return context


async def _answer_all(answering: SplitClient, job: ClientJob, output: _Output) -> None:
    try:
        await answering.session.connect()  # before programs are compiled, which takes a while
        if answering.session.link is not None:
            _check_lengths(job, answering.session.link.welcome)
        await answering.drafter.warm(map(len, job.prompts))
        for index, prompt in enumerate(job.prompts):
            output.start()
            output.end(await _answer(answering, job, index, prompt, output))
    finally:
        await answering.session.close()


def _check_lengths(job: ClientJob, welcome: Welcome) -> None:
    """Raises InputError for a prompt that is too long for this server."""
    new = job.args.max_new_tokens
    for index, prompt in enumerate(job.prompts):
        count = len(prompt)
        if count > welcome.max_prompt:
            raise InputError(
                f"prompt {index} has {count} tokens, but the server reads {welcome.max_prompt} at "
                "most; shorten it, or ask for a larger --max-prompt there"
            )
        if count + new > welcome.max_tokens:
            raise InputError(
                f"prompt {index} has {count} tokens and {new} are to follow, but the server holds "
                f"{welcome.max_tokens} at most; shorten one of the two"
            )


async def _answer(
    answering: SplitClient, job: ClientJob, index: int, prompt: list[int], output: _Output
) -> dict[str, Any]:
    """Decodes one prompt up to its end or first stop string; returns the answer's figures."""
    total = len(prompt) + job.args.max_new_tokens
    events = answering.answer(prompt, total, job.stop_ids, row_of(job.sampling, index))
    see = lambda event: output.take(event, answering)
    return figures_of(answering, prompt, await timed(answering, events, see))


class _Output:
    """Writes answers in turn, as text or in a JSON document; detokenizes each token once."""

    def __init__(
        self, writer: Writer, stops: list[str], document: GrowingDocument | None = None
    ) -> None:
        self._tokenizer, self._stops = writer.tokenizer, stops if writer.tokenizer else ()
        self._document = document

    def start(self) -> None:
        """Starts an answer."""
        self._text = GrowingText(self._tokenizer, self._stops)
        self._num_tokens, self._shown = 0, ""  # tokens detokenized; text so far

    def take(self, event: AnswerEvent, answering: SplitClient) -> int | None:
        """Writes new verified text and the event's notice; returns the length up to a stop string.

        The length is in tokens, None without a stop string. Verified text is never retracted.
        """
        if self._document is not None:
            traffic = answering.session.traffic
            up, down = traffic.bytes_up, traffic.bytes_down
            self._document.rest["traffic"] = {"bytes_up": up, "bytes_down": down}
        self._show(answering.text.answer[: event.verified])
        if event.notice:
            print(f"[{event.notice}]", file=sys.stderr, flush=True)
        return None if self._text.stop is None else self._text.num_tokens

    def end(self, figures: dict[str, Any]) -> None:
        """Writes the rest of an answer, unverified text included, and its figures."""
        self._show(figures["token_ids"])
        rest = self._text.end()
        if self._document is None:
            print(rest, flush=True)
            print(_line(figures), file=sys.stderr)
        else:
            text = self._shown + rest if self._tokenizer else None
            self._document.add(figures | {"text": text})

    def _show(self, tokens: list[int]) -> None:
        """Writes the text of those tokens of an answer that were not detokenized before."""
        new = self._text.add(tokens[self._num_tokens :])
        self._num_tokens = max(self._num_tokens, len(tokens))
        self._shown += new
        if new and self._document is None:
            print(new, end="", flush=True)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    return {
        "target": str(args.target or "bundled"),
        "draft": str(args.draft or "bundled"),
        "mode": args.mode,
        "max_new_tokens": args.max_new_tokens,
        "policy": args.policy,
        "codec": args.codec,
        "offline": args.offline,
    }


def _line(figures: dict[str, Any]) -> str:
    count = len(figures["token_ids"])
    parts = [f"{count} tokens", f"{figures['server_calls']} server calls"]
    if figures["tau"] is not None:
        parts.append(f"tau {figures['tau']:.2f}")
    if figures["tokens_per_s"]:
        parts.append(f"{figures['tokens_per_s']:.1f} tokens/s")
    if figures["reply_ms"] is not None:
        parts.append(f"replies {figures['reply_ms']:.1f} ms")
    if figures["bytes_down"]:
        up, down = figures["bytes_up_per_token"], figures["bytes_down_per_token"]
        parts.append(f"{up:.0f} bytes/token up, {down:.0f} down")
    for name in ("unverified", "rewritten", "drops"):
        if figures[name]:
            parts.append(f"{figures[name]} {name}")
    return "[" + ", ".join(parts) + "]"


if __name__ == "__main__":
    run(main)
