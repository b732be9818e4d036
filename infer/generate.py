"""Generates answers with a target and its drafter: the text of plain decoding, faster.

python -m infer.generate --prompt "I need a hotel in the north."
python -m infer.generate --prompts questions.jsonl --json
python -m infer.generate --prompts questions.jsonl --output answers.json     resumable
python -m infer.generate --mode tree --temperature 0.8 --seed 1 --prompt "Hello"
python -m infer.generate --check --prompt "Hello"     compares with plain decoding
python -m infer.generate --prompts FILE --mesh tensor=8,data=2 --distributed      on two hosts
python -m infer.generate                    (a chat, on a terminal)
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax

from infer.bench.compare import bundled_questions, compare_in_turns
from infer.cli.documents import GrowingDocument
from infer.cli.flags import cluster
from infer.cli.flags.alike import check_same_flags
from infer.cli.flags.auto import fill, fill_meanwhile
from infer.cli.flags.pair import (
    add_cache_flag,
    add_draft_flags,
    add_pair_flags,
    asked_mode,
    load_pair,
    mode_of,
    open_session,
)
from infer.cli.flags.prompts import (
    BYTE_ORDER_MARK,
    add_prompt_flags,
    after,
    prompts_of,
    tokenizer_of,
)
from infer.cli.flags.sampling import add_sampling_flags, check_stop_ids, sampling_of, stopper
from infer.cli.flags.vocabulary import source_of, vocabulary_of
from infer.cli.program import Parser, local_path, positive, progress, run
from moa_jax import Result, Session
from moa_jax.config import Sampling
from moa_jax.decode.detokenize import Writer, before_stop
from moa_jax.decode.exactness import Difference, compare
from moa_jax.decode.session import StopWhen, row_of, rows_of
from moa_jax.errors import InputError
from moa_jax.runtime.multihost import is_first, on_first

DIFFERENT = 1  # exit code of --check
ASKED, BUNDLED = "asked", "demo"  # values of --compare
# Initial cache rows of a chat, so that a chat seldom recompiles. A CPU reads all rows in every
# round, so its caches start small; on other backends unused rows only cost memory.
CHAT_ROWS = {"cpu": 512}
CHAT_ROWS_ELSEWHERE = 4096


def main(arguments: list[str] | None = None) -> int | None:
    parser = _parser()
    args = parser.parse_args(arguments)
    sampling = sampling_of(args)
    _check(args)
    with cluster.joined(args, parser.prog), cluster.first_speaks():
        return _generate(args, sampling)


def _generate(args: argparse.Namespace, sampling: Sampling) -> int | None:
    check_same_flags(args)
    target, drafter = load_pair(args)
    check_stop_ids(args.stop_ids, target.config.vocab_size)
    writer = Writer(tokenizer_of(target.folder))
    is_chat = not _is_document(args) and not _asked(args)
    rows: dict[str, Any] = {"cache_rows": args.cache_rows, "top_logprobs": args.logprobs}
    vocabulary = vocabulary_of(args, target, drafter)
    if is_chat:
        rows["least_rows"] = CHAT_ROWS.get(jax.default_backend(), CHAT_ROWS_ELSEWHERE)
    session = open_session(args, target, drafter, vocabulary=vocabulary, **rows)
    plain = Session(target, cache_rows=args.cache_rows) if args.check or args.compare else None
    ask = Asking(session, plain, writer, args, sampling, stopper(writer.tokenizer, args.stop))
    if is_chat:
        _chat(ask)
        return None
    prompts = list(prompts_of(args, writer.tokenizer))
    session.check(prompts, args.max_new_tokens)  # all prompts, before the first is decoded
    if _is_document(args):
        return _answer_as_document(ask, prompts)
    faults = 0
    for index, prompt in enumerate(prompts):
        result = _answer_as_text(ask, prompt, index)
        if args.check:
            difference = ask.check(result, index)
            faults += difference is not None
            print(_as_line(difference), file=sys.stderr)
    if args.compare:
        some = prompts if args.compare == ASKED else bundled_questions(writer.tokenizer)
        print(_comparison(ask, some), file=sys.stderr)
    return _verdict(faults, session)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.generate", __doc__)
    add_pair_flags(parser)
    add_prompt_flags(parser)
    add_draft_flags(parser)
    add_cache_flag(parser)
    add_sampling_flags(parser)
    cluster.add_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    group.add_argument(
        "--output",
        type=local_path,
        metavar="FILE.json",
        help="the document of --json as a file, with each answer as it comes; the same command "
        "goes on in a file that was cut, and so in what a cut --json has written",
    )
    group.add_argument(
        "--batch", type=positive, default=1, help="prompts side by side, with --json"
    )
    group.add_argument(
        "--logprobs",
        type=int,
        metavar="K",
        help="with --json: each token's log-probability, and those of the K most likely tokens",
    )
    group.add_argument(
        "--compare",
        nargs="?",
        const=ASKED,
        choices=(ASKED, BUNDLED),
        help="then decode with and without drafts in turns for ten seconds, and print the speedup "
        f"and whether the tokens are the same: of the prompts given, or with `{BUNDLED}` of the "
        "bundled questions",
    )
    group.add_argument(
        "--check",
        action="store_true",
        help="decode plainly too and show the first difference; in float32 it means exit code 1",
    )
    return parser


def _check(args: argparse.Namespace) -> None:
    """Raises InputError for flags that contradict each other, before models are loaded."""
    if (args.compare or args.check) and not _asked(args):
        raise InputError(
            "--compare and --check need prompts; add --prompt, --prompt-ids or --prompts"
        )
    if cluster.is_asked(args) and (args.compare or not _is_given(args)):
        raise InputError(
            "several processes decode prompts that are given; use --prompts FILE, and leave out "
            "--compare"
        )
    if args.json and args.output:
        raise InputError("--output writes the document of --json to a file; leave out one of them")
    if args.compare and _is_document(args):
        raise InputError("--compare measures and prints text; leave out --json, or use infer.bench")
    if args.logprobs is not None and not _is_document(args):
        raise InputError(f"--logprobs {args.logprobs} is for --json; add that, or leave it out")
    if args.batch > 1 and not _is_document(args):
        raise InputError(f"--batch {args.batch} is for --json; add that, or leave out --batch")
    if (args.check or args.compare) and args.sampled_drafts and args.temperature > 0:
        flag = "--check" if args.check else "--compare"
        raise InputError(
            f"{flag} with --sampled-drafts at a temperature: sampled drafts change the text, but "
            "not the distribution; leave out one of the two"
        )
    if args.compare and (asked_mode(args) == "plain" or args.depth == 1):
        raise InputError("--compare needs drafts to compare with plain decoding; choose a --mode")


class Asking(NamedTuple):
    """The sessions and settings that all prompts of a run share."""

    session: Session
    plain: Session | None  # for --check and --compare
    writer: Writer
    args: argparse.Namespace
    sampling: Sampling
    stop_when: StopWhen | None

    def settings(self, index: int) -> dict[str, Any]:
        """Keyword arguments to decode prompt `index` alone, as row `index` of the whole batch."""
        return {
            "stop_ids": self.args.stop_ids,
            "sampling": row_of(self.sampling, index),
            "stop_when": self.stop_when,
        }

    def check(self, result: Result, index: int) -> Difference | None:
        """The first difference of an answer from plain decoding, or None."""
        prompt, settings = result.prompt_ids, self.settings(index)
        (other,) = self.plain.generate([prompt], self.args.max_new_tokens, **settings)
        return compare(
            self.session.target, prompt, other.token_ids, result.token_ids, settings["sampling"]
        )


def _as_line(difference: Difference | None) -> str:
    if difference is None:
        return "check: the same tokens as plain decoding"
    return f"check: {difference}"


def _verdict(faults: int, session: Session) -> int:
    """The exit code: 1 for differences in float32, in which drafts must not change tokens."""
    exact = session.weights.target["embed"].dtype == "float32"
    return DIFFERENT if faults and exact else 0


def _is_document(args: argparse.Namespace) -> bool:
    return args.json or args.output is not None


def _asked(args: argparse.Namespace) -> bool:
    """Whether flags or stdin give prompts; otherwise the program is a chat on a terminal."""
    return _is_given(args) or not sys.stdin.isatty()


def _is_given(args: argparse.Namespace) -> bool:
    return any(flag is not None for flag in (args.prompt, args.prompt_ids, args.prompts))


def _answer_as_document(ask: Asking, prompts: list[list[int]]) -> int:
    """Writes each answer once finished, after those already in --output; returns the exit code."""
    session, args, rows = ask.session, ask.args, rows_of(ask.sampling, len(prompts))
    path = args.output if is_first() else None
    go_on = f"; go on with the same flags and --output {path or 'FILE, with this document in FILE'}"
    with GrowingDocument(_settings(ask), prompts, path, go_on) as document:
        differ = [result.get("difference") is not None for result in document.results]
        differ = on_first(lambda: differ)
        faults, done = sum(differ), len(differ)
        is_one = not cluster.is_asked(args)  # processes may have different cost tables
        if session.controller is not None and is_one and len(prompts) - done > args.batch > 1:
            fill(session, args.batch)
        with progress(len(prompts), "answers", initial=done, quiet=len(prompts) == 1) as bar:
            for start in range(done, len(prompts), args.batch):
                some = slice(start, start + args.batch)
                found = session.generate(
                    prompts[some], args.max_new_tokens, args.stop_ids, rows[some], ask.stop_when
                )
                for index, result in enumerate(found, start):
                    entry = _as_dict(result, ask)
                    if args.check:
                        difference = ask.check(result, index)
                        faults += difference is not None
                        entry["difference"] = difference and difference._asdict()
                    document.add(entry)
                bar.step(len(found))
    return _verdict(faults, session)


def _settings(ask: Asking) -> dict[str, Any]:
    session, args = ask.session, ask.args
    mode = mode_of(session)
    return {
        "target": str(args.target or "bundled"),
        "draft": None if mode == "plain" else str(args.draft or "bundled"),
        "mode": mode,
        "max_new_tokens": args.max_new_tokens,
        "dtype": str(session.weights.target["embed"].dtype),
        "weights": args.weights,
        "mesh": args.mesh or None,
        "draft_vocabulary": source_of(session.vocabulary),
        **dataclasses.asdict(session.shape),
        **dataclasses.asdict(ask.sampling),
        **{name: getattr(args, name) for name in ("stop", "stop_ids", "logprobs", "check")},
    }


def _as_dict(result: Result, ask: Asking) -> dict[str, Any]:
    derived = {
        "text": before_stop(ask.writer.text(result.token_ids), ask.args.stop),
        "rounds": result.rounds,
        "tau": result.tau,
        "tokens_per_s": result.tokens_per_s,
    }
    found = result._asdict()
    found["logprobs"] = [likely._asdict() for likely in result.logprobs]
    if ask.args.logprobs is None:
        del found["logprobs"]
    return found | derived


def _answer_as_text(ask: Asking, prompt: list[int], index: int = 0) -> Result:
    """Streams one answer to stdout, then a line of figures to stderr."""
    found: list[Result] = []

    def parts() -> Iterator[list[int]]:
        settings = ask.settings(index)
        for part in ask.session.stream(prompt, ask.args.max_new_tokens, **settings):
            if isinstance(part, Result):
                found.append(part)
            else:
                yield part

    for piece in ask.writer.pieces(parts(), ask.args.stop):
        print(piece, end="", flush=True)
    print()
    levels = max(way.levels for way in ask.session.ways)
    print(_figures(found[0], levels - 1), file=sys.stderr)
    return found[0]


def _figures(result: Result, num_drafted: int) -> str:
    """One line of figures; acceptance by position is over rounds that drafted the position."""
    parts = [f"{len(result.token_ids)} tokens", f"{result.rounds} rounds", f"tau {result.tau:.2f}"]
    parts.append(f"{result.tokens_per_s:.1f} tokens/s")
    accepted = []
    for position in range(1, num_drafted + 1):
        rounds = zip(result.accept_lengths, result.drafted_levels, strict=True)
        hits = [length > position for length, levels in rounds if levels >= position]
        accepted += [f"{sum(hits) / len(hits):.2f}"] if hits else []
    if accepted:
        parts.append(f"accepted by position {' '.join(accepted)}")
    return "[" + ", ".join(parts) + "]"


def _comparison(ask: Asking, prompts: list[list[int]]) -> str:
    """Times plain and drafted decoding in turns; mode auto first measures its cost table."""
    session = ask.session
    session.check(prompts, ask.args.max_new_tokens)
    if session.controller is not None:
        fill(session)
    ways = {"plain": ask.plain, mode_of(session): session}
    return compare_in_turns(ways, prompts, ask.args.max_new_tokens, ask.settings)


def _chat(ask: Asking) -> None:
    """A chat on a terminal: /new clears the history, an empty line ends the chat."""
    print("Write a message; /new starts over, an empty line ends.", file=sys.stderr)
    history: list[dict[str, str]] = []
    while message := _ask():
        if message == "/new":
            history = []
            continue
        asked = [*history, {"role": "user", "content": message}]
        try:
            result = _answer_as_text(ask, after(asked, ask.writer.tokenizer))
        except InputError as error:
            print(f"{error} (/new starts over)", file=sys.stderr)
            continue
        fill_meanwhile(ask.session)
        answer = before_stop(ask.writer.text(result.token_ids), ask.args.stop)
        history = [*asked, {"role": "assistant", "content": answer}]


def _ask() -> str:
    try:
        return input("> ").removeprefix(BYTE_ORDER_MARK).strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    run(main)
