"""Lets the target answer the user turns of conversations: training data for its drafter.

    python -m train.regenerate --target runs/demo_target/final --prompts data:chat/train.jsonl.gz \\
        --sources star,taskmaster-4 --output runs/demo_answers.jsonl

Every assistant turn is replaced by the target's own greedy answer to the conversation so far,
its earlier answers included. A conversation ends before an answer that does not stop by itself
or a prompt that is too long. The output grows in OUTPUT.partial and is renamed when complete;
the same command goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from infer.cli import Parser, progress, run
from moa_jax import Session, load_target
from moa_jax.data import chat, corpora
from moa_jax.errors import InputError
from moa_jax.tokenizer import load_tokenizer

IDLE = [0]  # the prompt of a slot whose conversation is over; it gets one token


class Conversation:
    """One record on its way: the user turns still to ask, and what was said so far."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.said: list[dict[str, str]] = []
        self._turns = iter(chat.messages_of(record))
        self.prompt: list[int] | None = None

    def ask(self, tokenizer: Any, longest: int) -> None:
        """Moves to the next user turn and sets its prompt, None at the end."""
        self.prompt = None
        asked = list(self.said)
        for message in self._turns:
            if message["role"] == "assistant":
                continue
            asked.append(message)
            if message["role"] == "user":
                prompt = chat.prompt_ids(tokenizer, asked)
                if len(prompt) <= longest:
                    self.said, self.prompt = asked, prompt
                return

    def hear(self, answer: str | None) -> None:
        """Takes the target's answer; None ends the conversation before its question."""
        if answer is None:
            self.said, self._turns = self.said[:-1], iter(())
        else:
            self.said = [*self.said, {"role": "assistant", "content": answer}]

    def line(self) -> str | None:
        """The JSON line of what was said, None if there was no answer."""
        if not self.said:
            return None
        kept = {key: self.record[key] for key in ("source", "license") if key in self.record}
        return json.dumps({"messages": self.said} | kept, ensure_ascii=False)


def regenerate(args: argparse.Namespace) -> None:
    """Answers all conversations, `--batch` side by side."""
    output = Path(args.output)
    if output.exists():
        raise InputError(f"{output} exists already: remove it or name another --output")
    target = load_target(args.target)
    tokenizer = load_tokenizer(target.folder)
    session = Session(target)
    sources = [name for name in args.sources.split(",") if name]
    records = list(itertools.islice(corpora.read(args.prompts, sources), args.limit))
    if not records:
        raise InputError(f"{args.prompts}: no records of {args.sources or 'any source'}")
    partial = Partial(output, vars(args))
    with progress(len(records), "conversations", initial=partial.done) as bar:
        bar.step(0)
        while partial.done < len(records):
            chunk = records[partial.done : partial.done + args.batch]
            talks = [Conversation(record) for record in chunk]
            for _ in _rounds(talks, tokenizer, args.max_prompt):
                _answer(session, tokenizer, talks, args)
            partial.append([talk.line() for talk in talks], len(chunk))
            bar.step(len(chunk))
    partial.finish()


def _rounds(talks: list[Conversation], tokenizer: Any, longest: int) -> Iterator[None]:
    """One item for each time that a conversation of the batch waits for an answer."""
    while True:
        for talk in talks:
            talk.ask(tokenizer, longest)
        if all(talk.prompt is None for talk in talks):
            return
        yield


def _answer(
    session: Session, tokenizer: Any, talks: list[Conversation], args: argparse.Namespace
) -> None:
    idle = [None] * (args.batch - len(talks))  # one batch size, one program
    prompts = [talk.prompt for talk in talks] + idle
    wanted = [args.max_new_tokens if prompt else 1 for prompt in prompts]
    results = session.generate([prompt or IDLE for prompt in prompts], wanted)
    for talk, result in zip(talks, results, strict=False):
        if talk.prompt is None:
            continue
        text = tokenizer.decode(result.token_ids, skip_special_tokens=True).strip()
        talk.hear(text if text and result.finish_reason == "stop" else None)


class Partial:
    """The growing output; its first line says which command makes it and is cut off at the end."""

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        self.output, self.path = output, output.with_name(output.name + ".partial")
        self.path.parent.mkdir(parents=True, exist_ok=True)
        header = json.dumps(settings, sort_keys=True)
        text = self.path.read_text(encoding="utf-8") if self.path.exists() else header + "\n"
        whole = text[: text.rfind("\n") + 1]  # a cut may have left half a line
        first, *blocks = whole.splitlines()
        if first != header:
            raise InputError(f"{self.path} was made with other flags: repeat those or remove it")
        self.path.write_text(whole, encoding="utf-8")
        self._blocks = [json.loads(block) for block in blocks]

    @property
    def done(self) -> int:
        """Records answered so far."""
        return sum(block["records"] for block in self._blocks)

    def append(self, lines: list[str | None], records: int) -> None:
        """Adds one batch as one line, so that a cut leaves whole batches."""
        block = {"records": records, "lines": [line for line in lines if line is not None]}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(block) + "\n")
        self._blocks.append(block)

    def finish(self) -> None:
        """Writes the lines of all batches as the output."""
        whole = self.output.with_name(self.output.name + ".tmp")
        with whole.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for block in self._blocks for line in block["lines"])
        os.replace(whole, self.output)
        self.path.unlink()


def main(arguments: list[str] | None = None) -> None:
    parser = Parser("train.regenerate", __doc__)
    parser.add_argument("--target", required=True, metavar="DIR_OR_HUB_ID")
    parser.add_argument("--prompts", required=True, metavar="PATH", help="as in a data config")
    parser.add_argument("--sources", default="", help="names with commas; default: all")
    parser.add_argument("--output", required=True, metavar="FILE.jsonl")
    parser.add_argument("--limit", type=int, help="at most this many conversations")
    parser.add_argument("--batch", type=int, default=32, help="conversations side by side")
    parser.add_argument("--max-prompt", type=int, default=256, help="longest prompt, in tokens")
    parser.add_argument("--max-new-tokens", type=int, default=64, help="longest answer")
    regenerate(parser.parse_args(arguments))


if __name__ == "__main__":
    run(main)
