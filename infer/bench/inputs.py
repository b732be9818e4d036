"""Inputs of infer.bench: batches of prompts, and pairs with random weights."""

from __future__ import annotations

import argparse
import itertools
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from infer.bench.conversations import prompts_of as conversation_prompts
from infer.bench.random_pair import random_drafter, random_target
from infer.cli.flags.config_file import SHAPES, read_config
from infer.cli.flags.mesh import asked_mesh
from infer.cli.flags.pair import dtype_of, use_cores
from infer.cli.flags.prompts import asking, prompts_in, tokenizer_of
from infer.cli.program import positive
from moa_jax.config import DistillConfig, PretrainConfig, TargetConfig
from moa_jax.data import chat, sources
from moa_jax.data.report import RecordTally
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.drafters import method_of
from moa_jax.errors import InputError
from moa_jax.pretrained import (
    LoadedDrafter,
    Target,
    check_format,
    default_dtype,
    describe_target,
)

RANDOM_LENGTH = 128
CONVERSATIONS = 30
TEXTS = (
    "Hello! I need a cheap hotel in the centre for two nights.",
    "Could you book a table for four people at an Italian restaurant?",
    "What will the weather be like in Vienna tomorrow?",
    "I lost my bank card. What should I do?",
    "Tell me something about yourself. What do you like to do?",
    "When does the next train to Cambridge leave?",
)


def add_batch_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that select the prompts, their number and the batch size."""
    group = parser.add_argument_group("prompts (default: a few short questions)")
    add = group.add_mutually_exclusive_group().add_argument
    about = "lines with `prompt`, `messages` or `prompt_ids`, or of a style that training reads"
    add("--prompts", metavar="FILE.jsonl", help=about)
    add("--conversations", metavar="PATH", help="chat records; one turn of each")
    add("--prompt-length", type=positive, metavar="N", help="prompts of N random tokens")
    add = group.add_argument
    add("--sources", default="", help="of --conversations: names with commas")
    about = "of --conversations: leave out longer ones"
    add("--max-prompt", type=positive, default=256, help=about)
    about = f"most prompts; default: {CONVERSATIONS} conversations, one random batch"
    add("--limit", type=positive, help=about)
    add("--batch", type=positive, default=1, help="prompts side by side")


def batches_of(args: argparse.Namespace, target: Target) -> list[list[list[int]]]:
    """The prompts in batches of equal size; an incomplete last batch is dropped.

    Raises InputError for too few prompts for a batch, and for an invalid line, with its place.
    """
    if args.prompt_length or (args.random_weights and not args.prompts):
        shape = (args.limit or args.batch, args.prompt_length or RANDOM_LENGTH)
        prompts = np.random.default_rng(0).integers(target.config.vocab_size, size=shape).tolist()
    elif args.prompts:
        tokenizer = tokenizer_of(target.folder)
        prompts = list(prompts_in(args.prompts, tokenizer, args.limit))
    elif args.conversations:
        longest = min(args.max_prompt, target.config.max_position_embeddings - args.max_new_tokens)
        found = conversation_prompts(args, load_tokenizer(target.folder), longest)
        prompts = [prompt for _, prompt in itertools.islice(found, args.limit or CONVERSATIONS)]
    else:
        tokenizer = tokenizer_of(target.folder)
        prompts = [asking(text, tokenizer) for text in TEXTS[: args.limit]]
    batches = [prompts[i : i + args.batch] for i in range(0, len(prompts), args.batch)]
    batches = [batch for batch in batches if len(batch) == args.batch]
    if not batches:
        raise InputError(f"{len(prompts)} prompts fill no batch of {args.batch}; give more of them")
    return batches


def answers_of(path: str, target: Target, limit: int) -> Iterator[chat.Example]:
    """The first `limit` conversations of a file as tokens, with a mask of answer tokens.

    Conversations are cut at the target's number of positions. Invalid records are skipped, with a
    line on stderr. Raises InputError for a file that cannot be read.
    """
    tokenizer = load_tokenizer(target.folder)
    vocab_size, most = target.config.vocab_size, target.config.max_position_embeddings
    tally, found = RecordTally(), itertools.islice(sources.read_all(path), limit)
    encode = lambda record: chat.encode_record(tokenizer, record, vocab_size, most)
    for examples in tally.each(found, encode):
        yield from examples
    for line in tally.lines():
        print(line, file=sys.stderr)


# ---- pairs with random weights ------------------------------------------------------------------


def random_pair(args: argparse.Namespace) -> tuple[Target, LoadedDrafter | None]:
    """Random weights in the shapes of a config; a PretrainConfig or mode plain has no drafter."""
    path = args.random_weights
    config = read_config(path, DistillConfig, PretrainConfig)
    if args.threads is not None:
        use_cores(args.threads)
    dtype = dtype_of(args) if args.dtype else default_dtype()
    shapes = config.target if isinstance(config, PretrainConfig) else shapes_of(config.target)
    if isinstance(config, PretrainConfig) and args.mode != "plain":
        raise InputError(f"{path} describes a target and no drafter; use --modes plain")
    check_format(args.weights)
    mesh = asked_mesh(args)
    target = random_target(shapes, dtype, Path(path), weights=args.weights, mesh=mesh)
    if args.mode == "plain":
        return target, None
    method = method_of(config.drafter)
    return target, random_drafter(method, config.drafter, target, dtype, weights=args.weights)


def shapes_of(name: str) -> TargetConfig:
    """The sizes of a config's target, by model name or from its folder."""
    return SHAPES[name] if name in SHAPES else describe_target(name).config
