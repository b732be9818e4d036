"""Answers prompts with a target and its drafter: the text of plain decoding, sooner.

python -m infer.generate --prompt "I need a hotel in the north."
python -m infer.generate --prompts questions.jsonl --json
python -m infer.generate                    (a chat, on a terminal)
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infer.cli import Parser, positive, progress, run
from infer.pair import add_draft_flags, add_pair_flags, depth_of, load_pair
from moa_jax import Result, Session
from moa_jax.data import chat, corpora
from moa_jax.errors import InputError
from moa_jax.tokenizer import load_tokenizer


def main(arguments: list[str] | None = None) -> None:
    args = _parser().parse_args(arguments)
    if args.temperature:
        raise InputError(f"--temperature {args.temperature}: only 0 so far, greedy decoding")
    if args.compare and (args.json or not _asked(args)):
        raise InputError("--compare goes with --prompt, --prompt-ids or --prompts, as text")
    target, drafter = load_pair(args)
    writer = Writer(target.folder)
    session = Session(target, drafter, depth_of(args))
    if not args.json and not _asked(args):
        _chat(session, args, writer)
        return
    prompts = list(_prompts(args, writer))
    session.check(prompts, args.max_new_tokens)  # all of them, before the first is answered
    if args.json:
        _answer_as_json(session, prompts, args, writer)
        return
    plain = Session(target)
    for prompt in prompts:
        result = _answer_as_text(session, prompt, args, writer)
        if args.compare:
            print(_comparison(session, plain, result, args), file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.generate", __doc__)
    add_pair_flags(parser)
    group = parser.add_argument_group("prompts").add_mutually_exclusive_group()
    group.add_argument("--prompt", metavar="TEXT", help="one message, put in the chat template")
    group.add_argument("--prompt-ids", metavar='"1,2,3"', type=_ids, help="token ids as they are")
    group.add_argument(
        "--prompts", metavar="FILE.jsonl", help="lines with `prompt`, `messages` or `prompt_ids`"
    )
    add_draft_flags(parser)
    group = parser.add_argument_group("answers")
    group.add_argument("--max-new-tokens", type=positive, default=128, help="longest answer")
    group.add_argument("--temperature", type=float, default=0.0, help="0, greedy, is all so far")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    group.add_argument(
        "--compare", action="store_true", help="decode plainly too: same tokens? how much faster?"
    )
    return parser


class Writer:
    """Text of tokens; a target without tokenizer files has none, and ids must do."""

    def __init__(self, folder: Path) -> None:
        self.tokenizer = None
        if (folder / "tokenizer.json").exists():
            self.tokenizer = load_tokenizer(folder)

    def text(self, ids: list[int]) -> str | None:
        if self.tokenizer is None:
            return None
        return self.tokenizer.decode(ids, skip_special_tokens=True)

    def prompt(self, messages: list[dict[str, str]]) -> list[int]:
        if self.tokenizer is None:
            raise InputError("the target's folder has no tokenizer.json: use --prompt-ids")
        return chat.prompt_ids(self.tokenizer, messages)

    def pieces(self, parts: Iterator[list[int]]) -> Iterator[str]:
        """Text as it grows; a character whose bytes are not all there yet waits."""
        ids: list[int] = []
        shown = 0
        text: str | None = ""
        for part in parts:
            ids += part
            text = self.text(ids)
            if text is None:
                yield " ".join(map(str, part)) + " "
                continue
            ready = max(shown, len(text.rstrip("\ufffd")))
            yield text[shown:ready]
            shown = ready
        yield (text or "")[shown:]


def _asked(args: argparse.Namespace) -> bool:
    """Whether there are prompts; else a person sits at the terminal."""
    flags = (args.prompt, args.prompt_ids, args.prompts)
    return any(flag is not None for flag in flags) or not sys.stdin.isatty()


def _prompts(args: argparse.Namespace, writer: Writer) -> Iterator[list[int]]:
    """The prompts of the flags, or of stdin when it is not a terminal."""
    if args.prompt_ids is not None:
        yield args.prompt_ids
    elif args.prompts is not None:
        place = None
        for place, record in corpora.read_numbered(args.prompts):
            yield _prompt_of(record, place, writer)
        if place is None:
            raise InputError(f"{args.prompts} holds no prompts: write one a line")
    elif args.prompt is not None:
        yield writer.prompt([{"role": "user", "content": args.prompt}])
    elif not sys.stdin.isatty():
        yield writer.prompt([{"role": "user", "content": sys.stdin.read()}])


def _prompt_of(record: dict[str, Any], where: str, writer: Writer) -> list[int]:
    ids = record.get("prompt_ids")
    if ids is not None:
        if not isinstance(ids, list) or not all(type(i) is int for i in ids):
            raise InputError(f"{where}: `prompt_ids` is not a list of whole numbers")
        return ids
    messages = record.get("messages")
    if messages is None and isinstance(record.get("prompt"), str):
        messages = [{"role": "user", "content": record["prompt"]}]
    if messages is None:
        raise InputError(f"{where}: give it `prompt`, `messages` or `prompt_ids`")
    try:
        return writer.prompt(messages)
    except (InputError, KeyError, TypeError, AttributeError) as error:
        raise InputError(f"{where}: {error}") from error


def _answer_as_json(
    session: Session, prompts: list[list[int]], args: argparse.Namespace, writer: Writer
) -> None:
    results = []
    with progress(len(prompts), "answers", quiet=len(prompts) == 1) as bar:
        for prompt in prompts:
            (result,) = session.generate([prompt], args.max_new_tokens)
            results.append(_as_dict(result, writer))
            bar.step()
    settings = {
        "target": str(args.target or "bundled"),
        "draft": None if args.mode == "plain" else str(args.draft or "bundled"),
        "mode": args.mode,
        "depth": session.shape.depth,
        "max_new_tokens": args.max_new_tokens,
        "temperature": args.temperature,
        "dtype": str(session.weights.target["embed"].dtype),
    }
    print(json.dumps({"results": results, "settings": settings}))


def _as_dict(result: Result, writer: Writer) -> dict[str, Any]:
    derived = {
        "text": writer.text(result.token_ids),
        "rounds": result.rounds,
        "tau": _number(result.tau),
        "tokens_per_s": _number(result.tokens_per_s),
    }
    return result._asdict() | derived


def _number(value: float) -> float | None:
    return None if value != value else value  # JSON has no nan


def _answer_as_text(
    session: Session, prompt: list[int], args: argparse.Namespace, writer: Writer
) -> Result:
    """Streams one answer to stdout, then a line of figures to stderr."""
    found: list[Result] = []

    def parts() -> Iterator[list[int]]:
        for part in session.stream(prompt, args.max_new_tokens):
            if isinstance(part, Result):
                found.append(part)
            else:
                yield part

    for piece in writer.pieces(parts()):
        print(piece, end="", flush=True)
    print()
    print(_figures(found[0], session.shape.num_drafted), file=sys.stderr)
    return found[0]


def _figures(result: Result, num_drafted: int) -> str:
    parts = [f"{len(result.token_ids)} tokens", f"{result.rounds} rounds", f"tau {result.tau:.2f}"]
    parts.append(f"{result.tokens_per_s:.1f} tokens/s")
    if num_drafted and result.rounds:
        accepted = [
            sum(length > k for length in result.accept_lengths) / result.rounds
            for k in range(1, num_drafted + 1)
        ]
        parts.append("accepted by position " + " ".join(f"{a:.2f}" for a in accepted))
    return "[" + ", ".join(parts) + "]"


def _comparison(
    session: Session, plain: Session, streamed: Result, args: argparse.Namespace
) -> str:
    """Both ways on the device from first to last token, in turns; medians of five runs each."""
    runs: dict[str, list[Result]] = {"plain": [], "drafted": []}
    for _ in range(6):  # the first of each is left out
        for name, decoder in (("plain", plain), ("drafted", session)):
            runs[name] += decoder.generate([streamed.prompt_ids], args.max_new_tokens)
    middle = {
        name: sorted(found[1:], key=lambda run: run.decode_s)[2] for name, found in runs.items()
    }
    same = middle["plain"].token_ids == middle["drafted"].token_ids == streamed.token_ids
    ratio = middle["plain"].decode_s / middle["drafted"].decode_s
    lines = [
        f"{name:8} {run.tokens_per_s:7.1f} tokens/s, tau {run.tau:.2f}"
        for name, run in middle.items()
    ]
    verdict = "the same tokens" if same else "DIFFERENT tokens"
    return "\n".join([*lines, f"drafting gives {verdict}, {ratio:.2f} x as fast"])


def _chat(session: Session, args: argparse.Namespace, writer: Writer) -> None:
    """Turn by turn on a terminal, with the history; /new forgets it, an empty line ends."""
    print("Write a message; /new starts over, an empty line ends.", file=sys.stderr)
    history: list[dict[str, str]] = []
    while message := _ask():
        if message == "/new":
            history = []
            continue
        asked = [*history, {"role": "user", "content": message}]
        try:
            result = _answer_as_text(session, writer.prompt(asked), args, writer)
        except InputError as error:
            print(f"{error} (/new starts over)", file=sys.stderr)
            continue
        answer = writer.text(result.token_ids)
        history = [*asked, {"role": "assistant", "content": answer}]


def _ask() -> str:
    try:
        return input("> ").strip()
    except EOFError:
        return ""


def _ids(text: str) -> list[int]:
    try:
        return [int(part) for part in text.replace(",", " ").split()]
    except ValueError as error:
        raise argparse.ArgumentTypeError("write whole numbers with commas: 1,2,3") from error


if __name__ == "__main__":
    run(main)
