"""Lets the target answer the user turns of conversations: training data for its drafter.

    python -m train.regenerate --target runs/demo_target/final --prompts data:chat/train.jsonl.gz \\
        --sources star,taskmaster-4 --output runs/demo_answers.jsonl

Every assistant turn is replaced by the target's own greedy answer to the conversation so far,
its earlier answers included; records of user turns alone do as well. A conversation ends before
an answer that does not stop by itself or a prompt that is too long, and one without any answer
is left out. The output grows in OUTPUT.partial and is renamed when complete; the same command
goes on where it was cut off.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from infer.cli import Parser, names, positive, progress, run
from moa_jax import Session, load_target
from moa_jax.data import chat, corpora
from moa_jax.errors import InputError, first_line
from moa_jax.pretrained import Target
from moa_jax.tokenizer import load_tokenizer

IDLE = [0]  # the prompt of a slot whose conversation is over; it gets one token
DECISIVE = ("target", "prompts", "sources", "max_prompt", "max_new_tokens", "dtype")


class Conversation:
    """One record on its way: the turns still to come, what was said, and what waits for answer."""

    def __init__(self, record: dict[str, Any]) -> None:
        self.record = record
        self.said: list[chat.Message] = []
        self.prompt: list[int] | None = None
        self.fault = "a record without a user message: give it one"  # why it has no answer
        self._asked: list[chat.Message] = []
        self._turns = self._messages()

    def ask(self, tokenizer: Any, longest: int) -> None:
        """Moves to the next user turn and sets its prompt, None at the end."""
        try:
            self.prompt = self._next_prompt(tokenizer, longest)
        except InputError as error:
            self.end(str(error))

    def hear(self, answer: str) -> None:
        """Takes the target's answer."""
        self.said = [*self._asked, {"role": "assistant", "content": answer}]

    def end(self, fault: str) -> None:
        """Ends the conversation before the question at hand."""
        self.fault, self.prompt, self._turns = fault, None, iter(())

    def line(self) -> str | None:
        """The JSON line of what was said, None if there was no answer."""
        if not self.said:
            return None
        kept = {key: self.record[key] for key in ("source", "license") if key in self.record}
        return json.dumps({"messages": self.said} | kept, ensure_ascii=False)

    def _messages(self) -> Iterator[chat.Message]:
        yield from chat.messages_of(self.record)  # not before the first turn: it may raise

    def _next_prompt(self, tokenizer: Any, longest: int) -> list[int] | None:
        self._asked = list(self.said)
        for message in self._turns:
            if message["role"] != "assistant":
                self._asked.append(message)
            if message["role"] == "user":
                prompt = chat.prompt_ids(tokenizer, self._asked)
                if len(prompt) > longest:
                    raise InputError(f"a prompt of more than {longest} tokens: raise --max-prompt")
                return prompt
        return None


def regenerate(args: argparse.Namespace) -> None:
    """Answers all conversations, `--batch` side by side."""
    output = Path(args.output)
    if output.exists():
        raise InputError(f"{output} exists already: remove it or name another --output")
    target = load_target(args.target, args.dtype and jnp.dtype(args.dtype))
    _check_lengths(args, target)
    tokenizer = load_tokenizer(target.folder)
    session = Session(target)
    sources = names(args.sources)
    records = list(itertools.islice(corpora.read(args.prompts, sources), args.limit))
    if not records:
        raise InputError(f"{args.prompts}: no records of {args.sources or 'any source'}")
    partial = Partial(output, {name: getattr(args, name) for name in DECISIVE})
    if partial.done > len(records):
        raise InputError(f"{partial.path} holds {partial.done} already: raise --limit or remove it")
    with progress(len(records), "conversations", initial=partial.done) as bar:
        while partial.done < len(records):
            chunk = records[partial.done : partial.done + args.batch]
            talks = [Conversation(record) for record in chunk]
            for _ in _rounds(talks, tokenizer, args.max_prompt):
                _answer(session, tokenizer, talks, args)
            partial.append(talks)
            bar.step(len(chunk))
    dropped = partial.finish()
    for fault, count in dropped.most_common():
        print(f"{count} of {len(records)} conversations left out: {fault}", file=sys.stderr)


def _check_lengths(args: argparse.Namespace, target: Target) -> None:
    positions = target.config.max_position_embeddings
    if args.max_prompt + args.max_new_tokens > positions:
        raise InputError(
            f"--max-prompt {args.max_prompt} and --max-new-tokens {args.max_new_tokens} need more "
            f"than the target's {positions} positions: lower one of the two"
        )


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
        if result.finish_reason != "stop":
            talk.end(f"an answer of more than {args.max_new_tokens} tokens: raise --max-new-tokens")
        elif not text:
            talk.end("an answer without text: the target had nothing to say")
        else:
            talk.hear(text)


class Partial:
    """The growing output: a line for the flags that decide its text, then a line for each batch.

    A cut leaves whole batches and at most half a line, which is cut off.
    """

    def __init__(self, output: Path, settings: dict[str, Any]) -> None:
        """Raises InputError for a file that other flags began or that cannot be written."""
        self.output, self.path = output, output.with_name(output.name + ".partial")
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._blocks = self._continue(json.dumps(settings, sort_keys=True).encode())
        except OSError as error:
            reason = first_line(error)
            raise InputError(
                f"{self.path} cannot be written ({reason}): change --output"
            ) from error

    def _continue(self, header: bytes) -> list[dict[str, Any]]:
        """The batches that are there; a new file, or one cut at its creation, gets the header."""
        content = self.path.read_bytes() if self.path.exists() else b""
        length = content.rfind(b"\n") + 1
        first, *blocks = content[:length].splitlines() or [header]
        if first != header:
            raise InputError(f"{self.path} was made with other flags: repeat those or remove it")
        if length:
            os.truncate(self.path, length)
        else:
            self.path.write_bytes(header + b"\n")
        return [json.loads(block) for block in blocks]

    @property
    def done(self) -> int:
        """Conversations that are over so far."""
        return sum(len(block["lines"]) + len(block["faults"]) for block in self._blocks)

    def append(self, talks: list[Conversation]) -> None:
        """Adds one batch: the lines of its conversations, and the faults of those without."""
        lines = [talk.line() for talk in talks]
        faults = [talk.fault for talk, line in zip(talks, lines, strict=True) if line is None]
        block = {"lines": [line for line in lines if line is not None], "faults": faults}
        with self.path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(block) + "\n")
        self._blocks.append(block)

    def finish(self) -> Counter[str]:
        """Writes the lines of all batches as the output; returns the faults of the others.

        Raises InputError, and starts from nothing the next time, where there is no line.
        """
        faults = Counter(fault for block in self._blocks for fault in block["faults"])
        if len(faults) and self.done == faults.total():
            self.path.unlink()
            ((fault, count),) = faults.most_common(1)
            raise InputError(f"none of {self.done} conversations got an answer; {count}: {fault}")
        whole = self.output.with_name(self.output.name + ".tmp")
        with whole.open("w", encoding="utf-8") as file:
            file.writelines(line + "\n" for block in self._blocks for line in block["lines"])
        os.replace(whole, self.output)
        self.path.unlink()
        return faults


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.regenerate", __doc__)
    group = parser.add_argument_group("models")
    group.add_argument("--target", required=True, metavar="DIR_OR_HUB_ID")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by hardware")
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", required=True, metavar="PATH", help="as in a data config")
    group.add_argument("--sources", default="", help="names with commas; default: all")
    group.add_argument("--limit", type=positive, help="at most this many conversations")
    group.add_argument("--max-prompt", type=positive, default=256, help="longest, in tokens")
    group = parser.add_argument_group("answers")
    group.add_argument("--output", required=True, metavar="FILE.jsonl")
    group.add_argument("--batch", type=positive, default=32, help="conversations side by side")
    group.add_argument("--max-new-tokens", type=positive, default=64, help="longest answer")
    return parser


def main(arguments: list[str] | None = None) -> None:
    regenerate(_parser().parse_args(arguments))


if __name__ == "__main__":
    run(main)
