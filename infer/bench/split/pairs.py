"""Target, drafters, prompts and answering modes of `infer.bench --split`."""

from __future__ import annotations

import argparse
from typing import Any, NamedTuple

from infer.bench.split.flags import DRAFTING, named
from infer.bench.suites import load_suite
from infer.cli.flags.pair import open_drafter, open_target, target_options
from infer.cli.flags.prompts import asking, tokenizer_of
from infer.split_client.state import ClientOptions
from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.decode.programs import bucket
from moa_jax.drafters import needs_no_files
from moa_jax.errors import InputError
from moa_jax.files.model_folder import find_folder
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.split.client_drafter import CHUNK, ClientDrafter
from moa_jax.split.pairing import Pairing, pairing_of

NO_STOP: list[int] = []


class SplitPair(NamedTuple):
    """A drafter with its client-side caches, and the flags of its server."""

    name: str
    drafter: LoadedDrafter
    half: ClientDrafter
    pairing: Pairing
    flags: list[str]


class Way(NamedTuple):
    """One answering mode with its pair and client options."""

    mode: str
    pair: SplitPair
    options: ClientOptions

    @property
    def facts(self) -> dict[str, Any]:
        """The identifying keys of a row; stream and plain do not depend on the drafter."""
        name, drafter = self.pair.name, self.pair.drafter
        if self.mode in ("stream", "plain"):
            none = dict.fromkeys(("draft", "method", "target_layer_inference"))
            return {"way": self.mode, "mode": self.mode} | none
        layers = getattr(drafter.config, "target_layer_inference", None)
        facts = {"way": f"{name} {self.mode}", "mode": self.mode, "draft": name}
        return facts | {"method": drafter.method, "target_layer_inference": layers}


class SplitBench(NamedTuple):
    """The inputs of the benchmark, and the target's own answers."""

    args: argparse.Namespace
    target: Target
    pairs: list[SplitPair]
    ways: list[Way]
    prompts: list[list[int]]
    own: list[list[int]]  # answers of local plain decoding, including the tokens after an outage
    own_tokens_per_s: list[float]


def load(args: argparse.Namespace) -> SplitBench:
    """Loads target, drafters and prompts, and runs local plain decoding.

    Raises InputError for answers that do not fit, and for modes that a drafter does not support.
    """
    for _, path in named(args):  # checks paths before the target is loaded
        if not needs_no_files(path):
            find_folder(path)
    target = open_target(args.target, **target_options(args))
    questions, tokenizer = load_suite(args.suite), tokenizer_of(target.folder)
    count = min(args.prompts, len(questions))
    spread = (questions[index * len(questions) // count] for index in range(count))
    prompts = [asking(question.turns[0], tokenizer) for question in spread]
    new = max(args.outages, default=0) + args.max_new_tokens
    most = min(bucket(max(map(len, prompts)) + new), target.config.max_position_embeddings)
    pairs = []
    for name, path in named(args):
        drafter = open_drafter(path, target, weights=args.weights)
        half = ClientDrafter(target, drafter, max_tokens=most)
        _check_can_write(args, name, half)
        flags = _server_flags(args, target, drafter, most)
        pairs.append(SplitPair(name, drafter, half, pairing_of(target, drafter), flags))
    ways = [
        Way(mode, pair, options_of(args, mode))
        for mode in args.modes
        for pair in (pairs if mode in DRAFTING else pairs[:1])
    ]
    session = Session(target, cache_rows=most + CHUNK)
    session.generate(prompts[:1], new, NO_STOP)  # compiles
    own = [session.generate([prompt], new, NO_STOP)[0] for prompt in prompts]
    rates = [len(one.token_ids[1:]) / one.decode_s for one in own if one.decode_s]
    return SplitBench(args, target, pairs, ways, prompts, [one.token_ids for one in own], rates)


def _check_can_write(args: argparse.Namespace, name: str, half: ClientDrafter) -> None:
    """Raises InputError if the modes need `draft_one` and the drafter has none."""
    alone = [mode for mode in ("chain", "offline") if mode in args.modes]
    alone += ["--outages"] if args.outages else []
    if half.functions.draft_one is None and alone:
        raise InputError(
            f"--draft {name} cannot write token by token, as {', '.join(alone)} asks; leave "
            "it out, as in --modes stream,plain,tree"
        )


def options_of(args: argparse.Namespace, mode: str) -> ClientOptions:
    """The client options of a mode."""
    return ClientOptions(
        shape=DraftShape(*args.tree) if mode == "tree" else None,
        lengths=args.lengths if mode in DRAFTING else (),
        draft_ahead=not args.no_ahead,
        slowdown=args.client_slowdown,
        stream=mode == "stream",
    )


def outage_options(args: argparse.Namespace) -> ClientOptions:
    """Options of a client that requests single tokens and never waits for a lost link."""
    slowdown = args.client_slowdown
    return ClientOptions(lengths=(), policy="keep", reconnect_seconds=0.0, slowdown=slowdown)


def _server_flags(
    args: argparse.Namespace, target: Target, drafter: LoadedDrafter, most: int
) -> list[str]:
    """The flags of an infer.server for sessions of up to `most` tokens."""
    nodes = {1}  # sizes of drafts that the server verifies
    if "chain" in args.modes:
        nodes |= {1 + length for length in args.lengths}
    if "tree" in args.modes:
        nodes |= {1 + args.tree[2], *range(2, 1 + args.tree[0])}  # also chains drafted ahead
    place = drafter.folder.resolve() if drafter.folder.is_dir() else drafter.folder
    flags = ["--target", str(target.folder.resolve()), "--draft", str(place), "--slots", "2"]
    flags += ["--max-tokens", str(most), "--warm", ",".join(map(str, sorted(nodes)))]
    for name in ("dtype", "weights"):
        if given := getattr(args, name):
            flags += [f"--{name}", given]
    return flags
