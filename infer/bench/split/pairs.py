"""Target, drafter, prompts and client options of `infer.bench --split`."""

from __future__ import annotations

import argparse
from typing import NamedTuple

from infer.bench.split.flags import DRAFTING
from infer.bench.suites import load_suite
from infer.cli.flags.pair import open_drafter, open_target, target_options
from infer.cli.flags.prompts import asking, tokenizer_of
from infer.split_client.state import ClientOptions
from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.decode.programs import bucket
from moa_jax.errors import InputError
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.split.client_drafter import CHUNK, ClientDrafter
from moa_jax.split.pairing import Pairing, pairing_of

NO_STOP: list[int] = []


class SplitBench(NamedTuple):
    """The inputs of the benchmark, and the target's own answers."""

    args: argparse.Namespace
    target: Target
    drafter: LoadedDrafter
    client_drafter: ClientDrafter  # the drafter with its client-side caches
    pairing: Pairing
    max_tokens: int  # of a prompt with its answer
    prompts: list[list[int]]
    own: list[list[int]]  # answers of local plain decoding
    own_tokens_per_s: list[float]


def load(args: argparse.Namespace) -> SplitBench:
    """Loads target, drafter and prompts, and runs local plain decoding.

    Raises InputError for answers that do not fit, and for modes that the drafter does not support.
    """
    target = open_target(args.target, **target_options(args))
    questions, tokenizer = load_suite(args.suite), tokenizer_of(target.folder)
    count, new = min(args.prompts, len(questions)), args.max_new_tokens
    spread = (questions[index * len(questions) // count] for index in range(count))
    prompts = [asking(question.turns[0], tokenizer) for question in spread]
    most = min(bucket(max(map(len, prompts)) + new), target.config.max_position_embeddings)
    drafter = open_drafter(args.draft, target, weights=args.weights)
    client_drafter = ClientDrafter(target, drafter, max_tokens=most)
    if client_drafter.functions.draft_one is None and "chain" in args.modes:
        raise InputError(
            f"--draft {args.draft} cannot write token by token, as chain asks; leave it out, as in "
            "--modes stream,plain,tree"
        )
    session = Session(target, cache_rows=most + CHUNK)
    session.generate(prompts[:1], new, NO_STOP)  # compiles
    own = [session.generate([prompt], new, NO_STOP)[0] for prompt in prompts]
    rates = [len(one.token_ids[1:]) / one.decode_s for one in own if one.decode_s]
    tokens = [one.token_ids for one in own]
    pairing = pairing_of(target, drafter)
    return SplitBench(args, target, drafter, client_drafter, pairing, most, prompts, tokens, rates)


def options_of(args: argparse.Namespace, mode: str) -> ClientOptions:
    """The client options of a mode."""
    return ClientOptions(
        shape=DraftShape(*args.tree) if mode == "tree" else None,
        lengths=args.lengths if mode in DRAFTING else (),
        draft_ahead=not args.no_ahead,
        slowdown=args.client_slowdown,
        stream=mode == "stream",
    )


def server_flags(bench: SplitBench) -> list[str]:
    """The flags of an infer.server for the sessions of the benchmark."""
    args, drafter = bench.args, bench.drafter
    nodes = {1}  # sizes of drafts that the server verifies
    if "chain" in args.modes:
        nodes |= {1 + length for length in args.lengths}
    if "tree" in args.modes:
        nodes |= {1 + args.tree[2], *range(2, 1 + args.tree[0])}  # also chains drafted ahead
    place = drafter.folder.resolve() if drafter.folder.is_dir() else drafter.folder
    flags = ["--target", str(bench.target.folder.resolve()), "--draft", str(place), "--slots", "2"]
    flags += ["--max-tokens", str(bench.max_tokens)]
    flags += ["--warm", ",".join(map(str, sorted(nodes)))]
    for name in ("dtype", "weights"):
        if given := getattr(args, name):
            flags += [f"--{name}", given]
    return flags
