"""Serves a target and its drafter over OpenAI's HTTP API, with continuous batching.

python -m infer.serve                                      the bundled pair, for this machine only
python -m infer.serve --target DIR --draft DIR --slots 32 --max-tokens 4096
python -m infer.serve --mesh tensor=8,data=2 --distributed   on each of two hosts: one server
python -m infer.serve --target Qwen/Qwen3-8B --reasoning-parser qwen3 --tool-call-parser hermes
python -m infer.serve --host 0.0.0.0 --api-key-file KEYS --tls-cert C.pem --tls-key K.pem

Paths: /v1/completions, /v1/chat/completions, /v1/models, /tokenize, /detokenize, /version, /ping,
/health and /metrics. SIGTERM lets running requests finish first; Ctrl-C does not.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import os
import signal
import socket
import sys
import time
from pathlib import Path
from typing import Any, NoReturn, get_args

import jinja2

from infer.cli.flags import cluster
from infer.cli.flags.alike import check_same_flags
from infer.cli.flags.auto import costs_of, folder, ways_of
from infer.cli.flags.pair import (
    AUTO,
    add_draft_flags,
    add_pair_flags,
    asked_mode,
    json_object,
    load_pair,
    shape_of,
)
from infer.cli.flags.prompts import tokenizer_of
from infer.cli.flags.vocabulary import vocabulary_of
from infer.cli.program import Parser, need, positive, run, utf8, whole

if __name__ == "__main__":
    need("infer.serve", "prometheus_client", "starlette", "uvicorn")

from infer.http.address import (
    DRAIN_SECONDS,
    add_address_flags,
    add_limits,
    bind,
    check_address,
)
from infer.http.auth import read_keys
from infer.http.log import EventLog, Log, WarningHandler
from infer.http.run import serve_until_signal
from infer.openai.app import OpenAIServer, ServingLimits
from infer.openai.metrics import ServingMetrics
from infer.openai.model import Model
from infer.openai.parsers import REASONING_PARSERS, TOOL_PARSERS
from infer.openai.responses import SpecMetrics
from moa_jax.data import chat
from moa_jax.data.records import check_template_kwargs
from moa_jax.decode.background import exit_now
from moa_jax.engine import Engine
from moa_jax.engine.multihost import run_follower
from moa_jax.errors import InputError, first_line
from moa_jax.pretrained import Target
from moa_jax.runtime import multihost
from moa_jax.runtime.followers import Followers, LeaderDied
from moa_jax.runtime.followers import gather as group_of
from moa_jax.runtime.followers import join as join_group
from moa_jax.runtime.memory import GIB
from moa_jax.speculation.cost_table import save_costs

SECRET = "--api-key-file"
SECONDS_TO_SWITCH = 3e-4  # Python's interval between switches of threads
SECONDS_TO_END = 3.0  # for other processes and running requests, at the end
KEEP_ALIVE_SECONDS = 75  # longer than clients' own timeouts, so that clients close first
DEMO_NAME = "moa-jax-demo"


def main(arguments: list[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(arguments)
    keys = read_keys(args.api_key_file) if args.api_key_file else ()
    check_address(args, SECRET, has_secret=bool(keys))
    # The engine's thread takes the GIL many times per round, and would wait up to 5 ms each time
    # while the server's thread runs.
    sys.setswitchinterval(SECONDS_TO_SWITCH)
    with cluster.joined(args, parser.prog) as processes:
        check_same_flags(args)
        if not multihost.is_first():
            return _follow(args, processes)
        followers = group_of(processes.fail) if multihost.count() > 1 else None
        # The port is bound before the models are loaded, which takes a while.
        listener = bind(args.host, args.port, args.ready_file)
        with listener, EventLog() as log, WarningHandler(log):
            engine, target = _load(args, followers)
            server = _server_of(args, engine, target, keys, log)
            plan = engine.memory._asdict() | {"sum": sum(engine.memory)}
            processes.last_words = functools.partial(_abandon, engine, server)
            log("memory", **{f"{name}_gib": round(each / GIB, 3) for name, each in plan.items()})
            log("compile")  # compilation may take a minute
            engine.prepare()
            engine.start()
            try:
                code = asyncio.run(_serve(args, server, listener))
            finally:
                engine.close()
        if followers:
            followers.close()
            followers.wait(SECONDS_TO_END)
            processes.say_goodbye()
            exit_now(code)
    # Compilation in other threads may take minutes.
    if server.is_compiling:
        exit_now(code)
    engine.session.background.exit_now(code)
    return code


def _follow(args: argparse.Namespace, processes: multihost.ProcessGroup) -> NoReturn:
    """Runs the programs that process 0 runs until process 0 ends; ignores SIGTERM."""
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    leader = join_group()
    with cluster.first_speaks():
        engine, _ = _load(args)
    try:
        run_follower(engine.programs, leader)
    except LeaderDied as error:
        processes.fail(str(error), lost=0)
    processes.say_goodbye()
    exit_now(0)


def _abandon(engine: Engine, server: OpenAIServer, line: str) -> None:
    """Fails all running requests with `line`; waits `SECONDS_TO_END` for their responses."""
    server.stop_compiling()  # /health shows it until the process ends
    engine.abandon(line)
    end = time.monotonic() + SECONDS_TO_END
    while server.num_open and time.monotonic() < end:
        time.sleep(0.02)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.serve", __doc__)
    add_address_flags(parser, 8000, SECRET, "with the keys of clients, one a line")
    add_pair_flags(parser)
    add_draft_flags(parser)
    cluster.add_flags(parser)
    _add_api_flags(parser)
    limits = ServingLimits()
    group = parser.add_argument_group("limits")
    numbers = [
        ("--slots", 16, "answers that are decoded at once"),
        (
            "--max-tokens",
            2048,
            "tokens of a prompt with its answer, within the target's positions",
        ),
        ("--max-queue", 256, "answers that wait for a slot; further ones get status 429"),
        ("--max-body-bytes", limits.max_body_bytes, "bytes of a request"),
    ]
    seconds = [
        ("--body-seconds", limits.body_seconds, "until a request's body must have come"),
        ("--request-seconds", limits.request_seconds, "that an answer may take, waiting included"),
        ("--send-seconds", limits.send_seconds, "that a client may take to accept what is sent"),
        ("--drain-seconds", DRAIN_SECONDS, "that running answers have left after SIGTERM"),
    ]
    add_limits(group, numbers, seconds)
    group.add_argument(
        "--max-prompt", type=positive, metavar="N", help="tokens of a prompt; default: what fits"
    )
    group.add_argument(
        "--prefix-bytes",
        type=whole,
        metavar="N",
        help="bytes of additional slots for the prefix cache; 0 turns the cache off; default: "
        "half of what --slots take",
    )
    return parser


def _add_api_flags(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("API")
    group.add_argument(
        "--served-model-name",
        type=utf8,
        metavar="NAME",
        help="by which clients ask for the model; default: the last part of --target",
    )
    group.add_argument(
        "--chat-template",
        type=_template,
        metavar="FILE",
        help="a Jinja file; default: the target's",
    )
    group.add_argument(
        "--default-chat-template-kwargs",
        type=json_object,
        default={},
        metavar="JSON",
        help='arguments of the chat template, such as {"enable_thinking": false}, which the '
        "chat_template_kwargs of a request replace one by one",
    )
    group.add_argument(
        "--reasoning-parser",
        choices=REASONING_PARSERS,
        default="none",
        help="format of the reasoning that is returned apart from the content",
    )
    group.add_argument(
        "--tool-call-parser",
        choices=tuple(TOOL_PARSERS),
        default="none",
        help="format of the model's tool calls; none refuses requests with tools",
    )
    group.add_argument(
        "--per-request-spec-decode-metrics",
        choices=get_args(SpecMetrics),
        default="none",
        help="acceptance of drafts in the reply's field metrics.speculative_decoding, as in vLLM; "
        "detailed adds figures per round",
    )


def _template(path: str) -> str:
    """An argparse type: the text of a chat template's file."""
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise argparse.ArgumentTypeError(f"{path} is not text in UTF-8") from error


def _load(args: argparse.Namespace, followers: Followers | None = None) -> tuple[Engine, Target]:
    """Loads the models; returns an engine that is not started yet, and the target."""
    target, drafter = load_pair(args)
    shape = shape_of(args, drafter and drafter.depth)
    vocabulary = vocabulary_of(args, target, drafter)
    rest = {}
    if drafter and asked_mode(args) == AUTO:
        costs = costs_of(target, drafter, vocabulary, args.weights, program="engine")
        save = functools.partial(save_costs, folder())
        rest = {"ways": ways_of(shape, drafter), "costs": costs, "on_calibrated": save}
    engine = Engine(
        target,
        drafter,
        shape,
        vocabulary=vocabulary,
        num_slots=args.slots,
        max_tokens=min(args.max_tokens, target.config.max_position_embeddings),
        max_waiting=args.max_queue,
        prefix_bytes=args.prefix_bytes,
        followers=followers,
        **rest,
    )
    return engine, target


def _server_of(
    args: argparse.Namespace, engine: Engine, target: Target, keys: tuple[str, ...], log: Log
) -> OpenAIServer:
    most = engine.max_tokens - 1
    if (args.max_prompt or 1) > most:
        raise InputError(
            f"--max-prompt {args.max_prompt}: prompts of at most {most} tokens fit; lower it"
        )
    check_template_kwargs(args.default_chat_template_kwargs, "--default-chat-template-kwargs")
    model = Model(
        name=args.served_model_name or _name_of(args.target),
        tokenizer=_tokenizer_of(args, target.folder),
        vocab_size=target.config.vocab_size,
        eos_ids=tuple(target.generation.eos_ids),
        max_tokens=engine.max_tokens,
        max_prompt=args.max_prompt or most,
        created=int(time.time()),
        reasoning_parser=args.reasoning_parser,
        tool_call_parser=args.tool_call_parser,
        template_kwargs=args.default_chat_template_kwargs,
    )
    limits = ServingLimits(
        max_body_bytes=args.max_body_bytes,
        body_seconds=args.body_seconds,
        request_seconds=args.request_seconds,
        send_seconds=args.send_seconds,
    )
    level, metrics = args.per_request_spec_decode_metrics, ServingMetrics(model.name, engine)
    return OpenAIServer(engine, model, metrics, log, limits, keys, level)


def _tokenizer_of(args: argparse.Namespace, folder: Path) -> Any | None:
    """The target's tokenizer with the chat template of the flags; InputError for a faulty one."""
    tokenizer = tokenizer_of(folder)
    if args.chat_template is None:
        return tokenizer
    if tokenizer is None:
        raise InputError("--chat-template needs a tokenizer, and the target has none; leave it out")
    tokenizer.chat_template = args.chat_template
    try:
        chat.render(tokenizer, [{"role": "user", "content": "Hello."}], generation_prompt=True)
    except InputError as error:  # a template may refuse this chat and render others
        if isinstance(cause := error.__cause__, jinja2.TemplateSyntaxError):
            line = f"--chat-template is not Jinja ({first_line(cause)}); correct the file"
            raise InputError(line) from error
    return tokenizer


def _name_of(target: str | None) -> str:
    """The served name of a model: a hub id, or the last part of a folder's path."""
    if target is None:
        return DEMO_NAME
    name = Path(target).resolve().name if Path(target).exists() else target
    return os.fsencode(name).decode(errors="replace")  # valid UTF-8 for clients


async def _serve(args: argparse.Namespace, server: OpenAIServer, listener: socket.socket) -> int:
    """Serves until a signal arrives; returns the exit code."""
    return await serve_until_signal(
        args,
        listener,
        server,
        ("http", "/v1"),
        functools.partial(server.drain, args.drain_seconds),
        stop=server.stop,
        ws="none",
        timeout_keep_alive=KEEP_ALIVE_SECONDS,
    )


if __name__ == "__main__":
    run(main)
