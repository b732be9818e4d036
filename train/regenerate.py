"""Regenerates the answers of conversations with the target, as training data for its drafter.

    python -m train.regenerate --target runs/demo_target/final --prompts data:chat/train.jsonl.gz \\
        --sources star,taskmaster-4 --output runs/demo_answers.jsonl
    python -m train.regenerate --target DIR --draft DIR ...                speculates
    python -m train.regenerate --target DIR --endpoint http://HOST:8000 ...    uses a server

The target's own answers replace every assistant turn after the first user turn; each answer follows
the conversation so far, earlier regenerated answers included. A greeting before the first user turn
stays, and so do replies of tools and the turns that call them. Records may hold user turns only.
`messages` holds every answer as text, and `answers` holds its `prompt_ids`, `token_ids` and
`finish_reason`; training uses these ids. An answer cut at --max-new-tokens stays, with the
`finish_reason` `length`, and is the last of its conversation. A conversation also ends before a
prompt that is too long or an answer without text; a conversation without any answer is left out.
The last lines count the conversations that are left out or end early. With --ignore-stop the first
answer per conversation continues past its end, as in benchmarks of a fixed length, and only its ids
are written. Answers are greedy, or sampled at --temperature; a sampled answer depends on --seed,
its record and its turn alone.

With --endpoint an OpenAI-compatible server answers, and only the tokenizer, the chat template and
the config of --target are read. --api-key-file holds the server's key.

The output grows in OUTPUT.partial and is renamed when complete; the same command resumes an
interrupted run. With --shard 3/8 a process answers every eighth record, from record 3 on (of 0, 1,
...), into answers-00003-of-00008.jsonl for --output answers.jsonl; a data config may name the
folder of all eight files.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import itertools
import sys
from collections import Counter
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp

from infer.cli.flags.auto import costs_of, folder
from infer.cli.flags.mesh import add_mesh_flag
from infer.cli.flags.pair import (
    BUNDLED,
    MODEL,
    add_pair_flag,
    add_weights_flag,
    open_drafter,
    open_target,
    target_options,
)
from infer.cli.flags.sampling import add_law_flags, seed
from infer.cli.program import (
    Parser,
    above_zero,
    local_path,
    names,
    positive,
    progress,
    run,
    stage,
)
from infer.http.auth import read_keys
from moa_jax.config import Sampling
from moa_jax.data import sources
from moa_jax.data.records import unread_keys
from moa_jax.data.report import RecordTally, unread_lines
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.draft_vocabulary import vocabulary_beside
from moa_jax.decode.limits import CacheLimits
from moa_jax.engine import Engine
from moa_jax.errors import InputError
from moa_jax.files.paths import check_folder, check_links
from moa_jax.model.kernels import cpu
from moa_jax.pretrained import Target, default_dtype, describe_target
from moa_jax.speculation.controller import NO_DRAFT
from moa_jax.speculation.cost_table import save_costs
from train.run.answers import Answers, LocalAnswers
from train.run.connection import EndpointClient, address_of
from train.run.conversations import AnswerRules, Conversation, answer_all
from train.run.endpoint import EndpointAnswers
from train.run.partial import Partial

DECISIVE = ("target", "prompts", "sources", "max_prompt", "max_new_tokens", "ignore_stop")
DRAWING = ("temperature", "top_k", "top_p", "seed")
LOCAL = ("dtype", "weights", "mesh", "draft", "batch")  # flags refused with --endpoint
REMOTE = ("model", "api_key_file", "concurrency", "timeout")  # flags refused without --endpoint
AT_ONCE, TIMEOUT_S = 32, 600.0

Found = tuple[str, dict[str, Any] | InputError]  # place, as `FILE line N`, and record


def regenerate(args: argparse.Namespace) -> None:
    """Answers all conversations of the shard, many at a time."""
    if args.target is None:
        raise InputError(
            "no --target; name the model that answers, or a --pair that is not bundled"
        )
    _check_flags(args)
    output = args.output
    if args.shard is not None:
        number, count = args.shard
        output = output.with_name(f"{output.stem}-{number:05}-of-{count:05}{output.suffix}")
    if output.exists():
        raise InputError(f"{output} exists already; remove it or name another --output")
    check_links(output)
    check_folder(output.parent)
    sampling = Sampling(args.temperature, args.top_k, args.top_p, seed=args.seed)
    target = describe_target(args.target)
    _check_lengths(args, target)
    tokenizer = load_tokenizer(target.folder)
    lengths = (args.max_prompt, args.max_new_tokens)
    rules = AnswerRules(tokenizer, target.config.vocab_size, *lengths, args.ignore_stop, sampling)
    records = dict(_records(args))
    if not records:
        where = "in shard {}/{}".format(*args.shard) if args.shard else "there"
        raise InputError(
            f"{args.prompts}: no records of {args.sources or 'any source'} {where}; name others"
        )
    source = _endpoint(args, target, rules) if args.endpoint else _local(args, rules)
    with source as answers, Partial(output, _settings(args, answers)) as partial:
        _answer(records, answers, rules, partial)
        drifted, (left_out, short) = partial.drifted, partial.finish()
    if drifted:
        print(
            f"{drifted} answers of an earlier version re-tokenize differently; remove the output "
            "and answer again for exact tokens",
            file=sys.stderr,
        )
    for line in _lines(records, left_out, short, tokenizer):
        print(line, file=sys.stderr)


def _lines(
    records: dict[int, Found], left_out: dict[int, str], short: dict[int, str], tokenizer: Any
) -> Iterator[str]:
    """Lines that count faults by reason, with their first record, and keys that are not read."""
    for faults, verb in ((left_out, "left out"), (short, "end early")):
        tally = RecordTally()
        tally.total = len(records)
        for number in sorted(faults):
            tally.add(records[number][0], faults[number])
        yield from tally.lines("conversations", verb)
    read = (record for _, record in records.values() if not isinstance(record, InputError))
    unread = Counter(key for record in read for key in unread_keys(record, tokenizer.chat_template))
    yield from unread_lines(unread, len(records))


def _answer(
    records: dict[int, Found], answers: Answers, rules: AnswerRules, partial: Partial
) -> None:
    """Answers the unfinished conversations; `partial` keeps all answers before a fault."""
    if not records.keys() >= set(partial.over):
        done = len(partial.over)
        raise InputError(f"{partial.path} holds {done} already; raise --limit or remove it")
    left = (Conversation(records[i][1], rules, i) for i in records if i not in partial.over)
    waiting = stage("answering, which compiles programs first")
    with waiting, progress(len(records), "conversations", initial=len(partial.over)) as bar:
        try:
            answer_all(left, answers, partial, bar.step)
        except InputError as error:
            done = f"{len(partial.over)} of {len(records)} conversations are over"
            raise InputError(f"{error}; {done}: the same command goes on there") from error


def _settings(args: argparse.Namespace, answers: Answers) -> dict[str, Any]:
    """The settings that decide the answers."""
    flags = DECISIVE + (DRAWING if args.temperature else ())
    settings = {flag: getattr(args, flag) for flag in flags}
    if isinstance(answers, EndpointAnswers):
        return settings | {"model": answers.model}
    dtype = args.dtype or jnp.dtype(default_dtype()).name
    return settings | {"weights": args.weights, "dtype": dtype}


def _records(args: argparse.Namespace) -> Iterator[tuple[int, Found]]:
    """(number, record) pairs of this shard; numbers count all of the first `--limit` records."""
    records = sources.read_some(args.prompts, names(args.sources))
    first, step = args.shard or (0, 1)
    return itertools.islice(enumerate(itertools.islice(records, args.limit)), first, None, step)


def _check_lengths(args: argparse.Namespace, target: Target) -> None:
    positions = target.config.max_position_embeddings
    if args.max_new_tokens > CacheLimits(positions).max_new_tokens(args.max_prompt):
        raise InputError(
            f"--max-prompt {args.max_prompt} and --max-new-tokens {args.max_new_tokens} need more "
            f"than the target's {positions} positions; lower one of the two"
        )


# ---- sources of answers ----


@contextlib.contextmanager
def _local(args: argparse.Namespace, rules: AnswerRules) -> Iterator[LocalAnswers]:
    """Answers of an engine on this machine, with a drafter if --draft is set."""
    layout = cpu.laid_out_for(args.batch or AT_ONCE)
    with layout, stage("loading the target"):
        target, drafter = open_target(args.target, **target_options(args)), None
        if args.draft is not None:
            named = None if args.draft == BUNDLED else args.draft
            drafter = open_drafter(named, target, weights=args.weights)
        vocabulary = drafter and vocabulary_beside(target, drafter)
        engine = Engine(
            target,
            drafter,
            ways=(NO_DRAFT,),  # used when faster than the drafter's own chain
            costs=drafter and costs_of(target, drafter, vocabulary, args.weights, program="engine"),
            on_calibrated=functools.partial(save_costs, folder()),
            vocabulary=vocabulary,
            num_slots=args.batch or AT_ONCE,
            max_tokens=args.max_prompt + args.max_new_tokens,
        )
    stop_ids = () if args.ignore_stop else tuple(target.generation.eos_ids)
    with stage("starting the engine, which compiles its programs"):
        engine.start()
    with contextlib.closing(engine):
        yield LocalAnswers(engine, rules.tokenizer, args.max_new_tokens, stop_ids)


@contextlib.contextmanager
def _endpoint(
    args: argparse.Namespace, target: Target, rules: AnswerRules
) -> Iterator[EndpointAnswers]:
    """Answers of the server at --endpoint; queries its models first."""
    key = read_keys(args.api_key_file)[0] if args.api_key_file else None
    for line in target.notices:
        print(line, file=sys.stderr)
    at_once = args.concurrency or AT_ONCE
    address, timeout_s = address_of(args.endpoint), args.timeout or TIMEOUT_S
    with contextlib.closing(EndpointClient(address, key, timeout_s, at_once)) as client:
        yield EndpointAnswers(client, args.model, rules, target.generation)


# ---- flags ----


def _check_flags(args: argparse.Namespace) -> None:
    """Raises InputError for local flags with --endpoint and endpoint flags without --endpoint."""
    for flag in LOCAL if args.endpoint else REMOTE:
        if getattr(args, flag) is not None:
            rest = "is not for --endpoint" if args.endpoint else "is for --endpoint only"
            raise InputError(f"--{flag.replace('_', '-')} {rest}; leave it out")


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.regenerate", __doc__)
    group = parser.add_argument_group("models")
    add_pair_flag(parser, group)
    group.add_argument("--target", metavar=MODEL)
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by hardware")
    add_weights_flag(group)
    add_mesh_flag(group)
    group.add_argument(
        "--draft",
        metavar="DIR_OR_HUB_ID",
        help=f"speculate with this drafter, or with the {BUNDLED} one; the text stays the same",
    )
    group = parser.add_argument_group("endpoint")
    group.add_argument(
        "--endpoint", metavar="URL", help="have this OpenAI-compatible server answer"
    )
    group.add_argument(
        "--model", metavar="NAME", help="model name on the server; default: its only one"
    )
    group.add_argument("--api-key-file", metavar="FILE", help="the server's API key")
    group.add_argument(
        "--concurrency", type=positive, metavar="N", help=f"requests at once; default: {AT_ONCE}"
    )
    group.add_argument(
        "--timeout",
        type=above_zero,
        metavar="S",
        help="seconds without a byte from the server, which sends an answer as a whole, after "
        f"which a request is made again; default: {TIMEOUT_S:g}",
    )
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", required=True, metavar="PATH", help="as in a data config")
    group.add_argument("--sources", default="", help="names with commas; default: all")
    group.add_argument("--limit", type=positive, help="at most this many conversations")
    group.add_argument("--max-prompt", type=positive, default=256, help="longest, in tokens")
    group = parser.add_argument_group("answers")
    group.add_argument("--output", type=local_path, required=True, metavar="FILE.jsonl")
    group.add_argument(
        "--batch", type=positive, help=f"answers decoded at once; default: {AT_ONCE}"
    )
    group.add_argument("--max-new-tokens", type=positive, default=64, help="longest answer")
    group.add_argument("--ignore-stop", action="store_true", help="go on past the answer's end")
    add_law_flags(group)
    group.add_argument("--seed", type=seed, default=0, help="of all that is drawn; -1 draws one")
    group.add_argument("--shard", type=_shard, metavar="I/N", help="every N-th record, from I on")
    return parser


def _shard(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard; write 0/8, 1/8, ... or 7/8")
    return int(number), int(count)


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    with stage("reading the target's config and the prompts"):
        regenerate(args)


if __name__ == "__main__":
    run(main)
