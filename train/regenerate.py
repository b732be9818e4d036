"""Lets the target answer the user turns of conversations: training data for its drafter.

    python -m train.regenerate --target runs/demo_target/final --prompts data:chat/train.jsonl.gz \\
        --sources star,taskmaster-4 --output runs/demo_answers.jsonl

Every assistant turn is replaced by the target's own answer to the conversation so far, its
earlier answers included; records with user turns only will do. A conversation ends before an
answer that does not stop by itself or a prompt that is too long, and one without any answer is
left out. With --ignore-stop the first answer of each goes on past its end, as in benchmarks of a
fixed length, and is written as `prompt_ids` and `token_ids`. Answers are greedy, or drawn at a
--temperature; a drawn one depends on --seed, its record and its turn alone.

The output grows in OUTPUT.partial and is renamed when complete; the same command goes on where it
was cut off. With --shard 3/8 a process answers every eighth record, from record 3 on (of 0, 1,
...), into answers-00003-of-00008.jsonl for --output answers.jsonl; a data config may name the
folder of all eight.
"""

from __future__ import annotations

import argparse
import dataclasses
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

import jax.numpy as jnp
import numpy as np

from infer.program import Parser, local_path, names, positive, progress, run
from moa_jax import Session, load_target
from moa_jax.config import Sampling
from moa_jax.data import chat, corpora
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.room import Room
from moa_jax.errors import InputError
from moa_jax.model.quantise import FORMATS
from moa_jax.pretrained import Target
from train.run.partial import Partial

IDLE = [0]  # the prompt of a slot whose conversation is over; it gets one token
DECISIVE = ("target", "prompts", "sources", "max_prompt", "max_new_tokens", "ignore_stop", "dtype")
DRAWING = ("temperature", "top_k", "top_p", "seed")


class Conversation:
    """One record while it is answered: the turns to come, what was said, and the present prompt."""

    def __init__(self, record: dict[str, Any] | InputError, number: int = 0) -> None:
        """`number` is the record's place among all; a fault stands for an unreadable one."""
        self.record, self.number = record, number
        self.said: list[chat.Message] = []
        self.prompt: list[int] | None = None
        self.fault = "a record without a user message: give it one"  # why it has no answer
        self._ids: dict[str, list[int]] | None = None
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

    def draw(self, law: Sampling) -> Sampling:
        """The settings of the answer that it waits for, the same in every batch and shard."""
        turn = len(self.said)
        (seed,) = np.random.SeedSequence((law.seed, self.number, turn)).generate_state(1)
        return dataclasses.replace(law, seed=int(seed))

    def keep(self, token_ids: list[int]) -> None:
        """Takes an answer as tokens, which ends the conversation."""
        self._ids = {"prompt_ids": self.prompt, "token_ids": token_ids}
        self.end("")

    def end(self, fault: str) -> None:
        """Ends the conversation before the question at hand."""
        self.fault, self.prompt, self._turns = fault, None, iter(())

    def line(self) -> str | None:
        """The JSON line of what was said, None if there was no answer."""
        if not self.said and self._ids is None:
            return None
        kept = {key: self.record[key] for key in ("source", "license") if key in self.record}
        return json.dumps((self._ids or {"messages": self.said}) | kept, ensure_ascii=False)

    def _messages(self) -> Iterator[chat.Message]:
        if isinstance(self.record, InputError):
            raise InputError(f"a record that is {self.record}")
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
    """Answers all conversations of its shard, `--batch` side by side."""
    output = args.output
    if args.shard is not None:
        number, count = args.shard
        output = output.with_name(f"{output.stem}-{number:05}-of-{count:05}{output.suffix}")
    if output.exists():
        raise InputError(f"{output} exists already: remove it or name another --output")
    law = Sampling(args.temperature, args.top_k, args.top_p, seed=args.seed)
    dtype = args.dtype and jnp.dtype(args.dtype)
    target = load_target(args.target, dtype, weights=args.weights)
    _check_lengths(args, target)
    tokenizer = load_tokenizer(target.folder)
    session = Session(target)
    records = list(_records(args))
    if not records:
        where = "in shard {}/{}".format(*args.shard) if args.shard else "there"
        raise InputError(f"{args.prompts}: no records of {args.sources or 'any source'} {where}")
    partial = Partial(output, _settings(args))
    if partial.done > len(records):
        raise InputError(f"{partial.path} holds {partial.done} already: raise --limit or remove it")
    with progress(len(records), "conversations", initial=partial.done) as bar:
        while partial.done < len(records):
            chunk = records[partial.done : partial.done + args.batch]
            talks = [Conversation(record, number) for number, record in chunk]
            for _ in _rounds(talks, tokenizer, args.max_prompt):
                _answer(session, tokenizer, talks, args, law)
            partial.append(talks)
            bar.step(len(chunk))
    dropped = partial.finish()
    for fault, count in dropped.most_common():
        print(f"{count} of {len(records)} conversations left out: {fault}", file=sys.stderr)


def _settings(args: argparse.Namespace) -> dict[str, Any]:
    """The flags that decide the text."""
    flags = DECISIVE + (DRAWING if args.temperature else ())
    flags += ("weights",) if args.weights else ()  # else files of older runs go on
    return {flag: getattr(args, flag) for flag in flags}


def _records(args: argparse.Namespace) -> Iterator[tuple[int, dict[str, Any] | InputError]]:
    """This shard's part of the first `--limit` records, with their numbers among all of them."""
    sources = names(args.sources)
    records = (
        record
        for _, record in corpora.read_all(args.prompts)
        if isinstance(record, InputError) or corpora.is_from(record, sources)
    )
    first, step = args.shard or (0, 1)
    return itertools.islice(enumerate(itertools.islice(records, args.limit)), first, None, step)


def _check_lengths(args: argparse.Namespace, target: Target) -> None:
    positions = target.config.max_position_embeddings
    if args.max_new_tokens > Room(positions).behind(args.max_prompt):
        raise InputError(
            f"--max-prompt {args.max_prompt} and --max-new-tokens {args.max_new_tokens} need more "
            f"than the target's {positions} positions: lower one of the two"
        )


def _rounds(talks: list[Conversation], tokenizer: Any, longest: int) -> Iterator[None]:
    """Yields each time that some conversations of the batch wait for an answer."""
    while True:
        for talk in talks:
            talk.ask(tokenizer, longest)
        if all(talk.prompt is None for talk in talks):
            return
        yield


def _answer(
    session: Session,
    tokenizer: Any,
    talks: list[Conversation],
    args: argparse.Namespace,
    law: Sampling,
) -> None:
    idle = [None] * (args.batch - len(talks))  # one batch size, one program
    prompts = [talk.prompt for talk in talks] + idle
    wanted = [args.max_new_tokens if prompt else 1 for prompt in prompts]
    stop_ids = () if args.ignore_stop else None
    drawn = {}  # nothing for greedy answers
    if law.temperature:
        drawn["sampling"] = [talk.draw(law) for talk in talks] + [law] * len(idle)
    results = session.generate([prompt or IDLE for prompt in prompts], wanted, stop_ids, **drawn)
    for talk, result in zip(talks, results, strict=False):
        if talk.prompt is None:
            continue
        if args.ignore_stop:
            talk.keep(result.token_ids)
            continue
        text = tokenizer.decode(result.token_ids, skip_special_tokens=True).strip()
        if result.finish_reason != "stop":
            talk.end(f"an answer of more than {args.max_new_tokens} tokens: raise --max-new-tokens")
        elif not text:
            talk.end("an answer without text: the target had nothing to say")
        else:
            talk.hear(text)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("train.regenerate", __doc__)
    group = parser.add_argument_group("models")
    group.add_argument("--target", required=True, metavar="DIR_OR_HUB_ID")
    group.add_argument("--dtype", choices=("float32", "bfloat16"), help="default: by hardware")
    group.add_argument("--weights", choices=FORMATS, help="quantise matrices; default: as --dtype")
    group = parser.add_argument_group("prompts")
    group.add_argument("--prompts", required=True, metavar="PATH", help="as in a data config")
    group.add_argument("--sources", default="", help="names with commas; default: all")
    group.add_argument("--limit", type=positive, help="at most this many conversations")
    group.add_argument("--max-prompt", type=positive, default=256, help="longest, in tokens")
    group = parser.add_argument_group("answers")
    group.add_argument("--output", type=local_path, required=True, metavar="FILE.jsonl")
    group.add_argument("--batch", type=positive, default=32, help="conversations side by side")
    group.add_argument("--max-new-tokens", type=positive, default=64, help="longest answer")
    group.add_argument("--ignore-stop", action="store_true", help="go on past the answer's end")
    group.add_argument("--temperature", type=float, default=0.0, help="0 is greedy")
    group.add_argument("--top-k", type=int, default=0, help="keep the k likeliest; 0 keeps all")
    group.add_argument("--top-p", type=float, default=1.0, help="keep this much probability")
    group.add_argument("--seed", type=int, default=0, help="of all that is drawn")
    group.add_argument("--shard", type=_shard, metavar="I/N", help="every N-th record, from I on")
    return parser


def _shard(text: str) -> tuple[int, int]:
    number, slash, count = text.partition("/")
    if not (slash and number.isdecimal() and count.isdecimal() and int(number) < int(count)):
        raise argparse.ArgumentTypeError(f"{text!r} is no shard: write 0/8, 1/8, ... or 7/8")
    return int(number), int(count)


def main(arguments: list[str] | None = None) -> None:
    regenerate(_parser().parse_args(arguments))


if __name__ == "__main__":
    run(main)
