"""What `infer.bench --split` measures: drafters, ways of answering, prompts."""

from __future__ import annotations

import argparse
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from infer.bench.suites import load_suite
from infer.flags.pair import open_drafter, open_target, target_options
from infer.flags.prompts import asking, tokenizer_of
from infer.split.bench.flags import DRAFTING, named
from infer.split.client.state import ClientOptions
from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.decode.programs import bucket
from moa_jax.decode.room import Room
from moa_jax.decode.session import Result
from moa_jax.drafters import needs_no_files
from moa_jax.errors import InputError
from moa_jax.files.folders import find_folder
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.split.half import CHUNK, DraftHalf
from moa_jax.split.pairing import Pairing, pairing_of

NO_STOP: list[int] = []


class SplitPair(NamedTuple):
    """A drafter with the client's half of decoding, and the flags of its server."""

    name: str
    drafter: LoadedDrafter
    half: DraftHalf
    pairing: Pairing
    flags: list[str]


class Way(NamedTuple):
    """One way of answering."""

    mode: str
    pair: SplitPair
    options: ClientOptions

    @property
    def label(self) -> str:
        """The name in tables; stream and plain are the same with any drafter."""
        return f"{self.pair.name} {self.mode}" if self.mode in (*DRAFTING, "offline") else self.mode

    @property
    def facts(self) -> dict[str, Any]:
        drafts = self.label != self.mode
        layers = getattr(self.pair.drafter.config, "target_layer_inference", None)
        return {
            "way": self.label,
            "mode": self.mode,
            "draft": self.pair.name if drafts else None,
            "method": self.pair.drafter.method if drafts else None,
            "target_layer_inference": layers if drafts else None,
        }


class SplitBench(NamedTuple):
    """What is measured, and the target's own answers."""

    args: argparse.Namespace
    target: Target
    pairs: list[SplitPair]
    ways: list[Way]
    prompts: list[list[int]]
    stop_ids: list[int]
    own: list[list[int]]  # answers of local plain decoding
    own_tokens_per_s: list[float]


def load(args: argparse.Namespace) -> SplitBench:
    """Load target, drafters and prompts, compile the clients' halves, and decode plainly."""
    for _, path in named(args):  # a wrong path is refused before the target is loaded
        if not needs_no_files(path):
            find_folder(path)
    target = open_target(args.target, **target_options(args))
    prompts = _prompts(args, target)
    longest, new = max(map(len, prompts)), max(args.outages, default=0) + args.max_new_tokens
    most, positions = longest + new, target.config.max_position_embeddings
    if new > Room(positions).behind(longest):
        raise InputError(
            f"prompt and answer take {most} tokens, the target has {positions} positions: lower "
            "--max-new-tokens or --outages"
        )
    clients = {mode: options_of(args, mode) for mode in args.modes}
    options = {"weights": args.weights}
    drafters = [(name, open_drafter(path, target, **options)) for name, path in named(args)]
    pairs = [_pair(args, name, target, drafter, bucket(most)) for name, drafter in drafters]
    for pair in pairs:
        _check_writes(args, pair)
        _warm(pair.half, clients.values(), prompts)
    ways = [
        Way(mode, pair, clients[mode])
        for mode in args.modes
        for pair in (pairs if mode in (*DRAFTING, "offline") else pairs[:1])
    ]
    stop_ids = list(target.generation.eos_ids) if args.natural_stops else NO_STOP
    own = own_answers(target, prompts, args.max_new_tokens, stop_ids)
    rates = [len(one.token_ids[1:]) / one.decode_s for one in own if one.decode_s]
    return SplitBench(
        args, target, pairs, ways, prompts, stop_ids, [one.token_ids for one in own], rates
    )


def _check_writes(args: argparse.Namespace, pair: SplitPair) -> None:
    """Raises InputError for what a drafter is to write alone that only drafts trees."""
    alone = [mode for mode in ("chain", "offline") if mode in args.modes]
    alone += [f"--{flag}" for flag in ("clients", "outages") if getattr(args, flag)]
    if pair.half.functions.go_on is None and alone:
        raise InputError(
            f"--draft {pair.name} cannot write token by token, as {', '.join(alone)} asks: leave "
            "it out, as in --modes stream,plain,tree"
        )


def _prompts(args: argparse.Namespace, target: Target) -> list[list[int]]:
    """First turns of questions, spread evenly over the suite."""
    questions, tokenizer = load_suite(args.suite), tokenizer_of(target.folder)
    count = min(args.prompts, len(questions))
    chosen = [questions[i * len(questions) // count] for i in range(count)]
    return [asking(one.turns[0], tokenizer) for one in chosen]


def own_answers(
    target: Target, prompts: Sequence[list[int]], new: int, stop_ids: list[int]
) -> list[Result]:
    """Local plain decoding of each prompt, after a first time that compiles."""
    session = Session(target, cache_rows=bucket(max(map(len, prompts)) + new) + CHUNK)
    session.generate(prompts[:1], new, stop_ids)
    return [session.generate([prompt], new, stop_ids)[0] for prompt in prompts]


def options_of(args: argparse.Namespace, mode: str) -> ClientOptions:
    """How a client of a mode drafts."""
    return ClientOptions(
        shape=DraftShape(*args.tree) if mode == "tree" else None,
        lengths=args.lengths if mode in (*DRAFTING, "offline") else (),
        draft_ahead=not args.no_ahead,
        slowdown=args.client_slowdown,
        stream=mode == "stream",
    )


def _pair(
    args: argparse.Namespace, name: str, target: Target, drafter: LoadedDrafter, most: int
) -> SplitPair:
    most = min(most, target.config.max_position_embeddings)
    half = DraftHalf(target, drafter, max_tokens=most)
    nodes = {1}
    if "chain" in args.modes or args.clients:
        nodes |= {1 + length for length in args.lengths}
    if "tree" in args.modes:
        nodes |= {1 + args.tree[2], *range(2, 1 + args.tree[0])}  # and chains drafted ahead
    place = drafter.folder.resolve() if drafter.folder.is_dir() else drafter.folder
    flags = ["--target", str(target.folder.resolve()), "--draft", str(place)]
    flags += ["--max-tokens", str(most), "--warm", ",".join(map(str, sorted(nodes)))]
    if args.dtype:
        flags += ["--dtype", args.dtype]
    if args.weights:
        flags += ["--weights", args.weights]
    return SplitPair(name, drafter, half, pairing_of(target, drafter), flags)


def _warm(half: DraftHalf, each: Iterable[ClientOptions], prompts: Sequence[list[int]]) -> None:
    """Compile what the client's half will need."""
    each = list(each)
    replies = range(1, 2 + max(level for options in each for level in (0, *options.levels)))
    counts = [*replies, *(min(len(prompt), CHUNK) for prompt in prompts)]
    counts += [len(prompt) % CHUNK for prompt in prompts if len(prompt) % CHUNK]
    half.warm(counts, [shape for options in each for shape in options.shapes])
