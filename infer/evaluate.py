"""The paper's evaluation in one command: drafters against plain decoding on question sets.

    python -m infer.evaluate --suite demo
    python -m infer.evaluate --suite paper --target TARGET --draft moa=A --draft eagle=B
    python -m infer.evaluate --suite spec_bench,FILE.jsonl --modes chain,tree --limit 10
    python -m infer.evaluate --suite hub:cnn_dailymail:3.0.0/test
    python -m infer.evaluate --conversations data:chat/validation.jsonl --limit 100

Options after a folder describe a drafter whose files lack its method or settings:
`--draft small=DIR,method=independent --draft moa=DIR,n=3`.

All candidates answer a question before the next question begins, in rotating order. A second turn
follows the candidate's own answer to the first. Each answer is stored at once, in Spec-Bench's
format, so the same command resumes an interrupted run. The report has tau, speedup over plain
decoding with its spread, acceptance by position, target calls, and whether every answer equals
plain decoding's, next to the paper's figures, as tables, JSON and plots.

Answers have up to 512 tokens per turn. The demo suite and conversations have short answers and get
128, since on a CPU a cache with many unused rows slows plain decoding down and flatters drafts.
`--conversations` decodes one turn per conversation, after its history, and reports by source.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
import importlib.util
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from infer.bench import answers, conversations, plots, report, suites
from infer.bench.candidates import describe, load_candidates
from infer.bench.drawing import save_figure
from infer.bench.question_runner import QuestionRunner, runner_of
from infer.bench.suites import Question
from infer.cli.documents import until_cut
from infer.cli.flags.pair import add_cache_flag, add_draft_flags, add_pair_flags
from infer.cli.flags.sampling import add_sampling_flags
from infer.cli.program import Parser, local_path, names, positive, progress, run, stage
from moa_jax.data import chat
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from moa_jax.files.paths import check_folder
from moa_jax.files.whole_files import write_whole
from moa_jax.version import __version__

LONGEST, LONGEST_OF_SHORT = 512, 128  # tokens per turn: the paper's, and for short answers
LONGEST_PROMPT = 256  # tokens of a prompt, for conversations
DIFFERENT = 1  # exit code if drafts changed an answer in float32
SPEED, ACCEPTANCE = "speed.png", "acceptance.png"


def main(arguments: list[str] | None = None) -> int | None:
    args = _parser().parse_args(arguments)
    if args.max_new_tokens is None:
        short = args.conversations is not None or args.suite == "demo"
        args.max_new_tokens = LONGEST_OF_SHORT if short else LONGEST
    if args.conversations is not None:
        args.max_prompt = args.max_prompt or LONGEST_PROMPT
    elif args.sources:
        raise InputError("--sources chooses among --conversations; leave it out, or name them")
    if args.output is not None:
        _check_output(args.output)
    with stage("preparing the evaluation"):
        return _evaluate(args)


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.evaluate", __doc__)
    add_pair_flags(parser, several=True)
    add_draft_flags(parser, chooses=False)
    add = parser.add_argument_group("drafting of several kinds").add_argument
    about = "decode with each drafter in each of these modes"
    add("--modes", metavar="chain,tree", help=about)
    group = parser.add_argument_group("questions")
    add = group.add_mutually_exclusive_group().add_argument
    about = "demo, paper, spec_bench, sets with commas (mt_bench,qa), a question.jsonl, "
    add("--suite", default="demo", help=about + "hub:NAME/SPLIT or tfds:NAME/SPLIT")
    add("--conversations", metavar="PATH", help="chat records instead")
    add = group.add_argument
    add("--limit", type=positive, help="at most this many questions of each set")
    add("--sources", default="", help="of --conversations: names with commas")
    about = f"leave out what begins with a longer prompt; default: {LONGEST_PROMPT} tokens of "
    about += "--conversations, else what the target can hold"
    add("--max-prompt", type=positive, metavar="N", help=about)
    add_cache_flag(parser)
    add_sampling_flags(parser)
    parser.set_defaults(max_new_tokens=None)
    add = parser.add_argument_group("output").add_argument
    about = "answers, tables, pictures; default: runs/evaluate/..."
    add("--output", metavar="DIR", type=local_path, help=about)
    add("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _evaluate(args: argparse.Namespace) -> int:
    questions = _questions(args)
    with stage("loading the models"):
        target, candidates = load_candidates(args)
    runner = runner_of(args, target, load_tokenizer(target.folder), candidates)
    settings = _settings(args, runner, questions)
    folder = args.output or _default_output(args.suite, settings)
    kept = answers.AnswerFolder(folder, settings, questions, [*settings["models"]])
    why_not = functools.partial(_why_not, runner, args.max_prompt)
    asked, left_out = suites.choose(questions, args.limit, why_not)
    if not asked:
        reasons = "; ".join(dict.fromkeys(left_out.values()))
        what = args.conversations or f"--suite {args.suite}"
        raise InputError(f"{what}: no question is left ({reasons or 'of none'}); use others")
    with until_cut() as cut:
        ask_all(runner, kept, asked)
    answered = [question for question in asked if kept.has(question)]
    mark = cut.mark(len(answered), len(asked), " questions: the same command goes on")
    if not answered:
        return cut.code
    found = {q: {name: kept.answer(q, name) for name in settings["models"]} for q in answered}
    document = report.document_of(found, left_out, settings) | mark
    try:
        print(to_json(document) if args.json else report.render(document))
    finally:  # also after a failed print or render
        _write(folder, document)
    if mark:
        return cut.code
    exact = settings["dtype"] == "float32"
    return DIFFERENT if document["differences"] and exact else 0


def _questions(args: argparse.Namespace) -> list[Question]:
    """The questions to choose from; of a public data set, those in its first rows."""
    rows = args.limit or suites.PUBLIC_ROWS
    if args.conversations is None:
        return suites.load_suite(args.suite, rows)
    public = args.conversations.startswith(suites.PUBLIC)
    sources = names(args.sources)
    return list(conversations.questions_of(args.conversations, sources, rows if public else None))


def _why_not(runner: QuestionRunner, longest: int | None, question: Question) -> str | None:
    """The reason to skip a question, or None."""
    try:
        prompt = runner.first_prompt(question)
        rest = "\n".join(question.turns[1:])  # an invalid turn fails now, not after an hour
        later = runner.tokenizer(rest, add_special_tokens=False, verbose=False)["input_ids"]
        chat.check_ids([*prompt, *later], runner.target.config.vocab_size)
    except InputError as error:
        return str(error)
    if longest is not None and len(prompt) > longest:
        return f"first prompt longer than {longest} tokens (--max-prompt)"
    return None if runner.room(prompt) else report.TOO_LONG


def ask_all(
    runner: QuestionRunner, kept: answers.AnswerFolder, questions: Sequence[Question]
) -> None:
    """Runs all unanswered questions; each answer is stored before the next question runs."""
    done = sum(kept.has(question) for question in questions)
    waiting = stage("answering a question; the first one compiles the programs")
    with waiting, progress(len(questions), "questions", initial=done) as bar:
        for index, question in enumerate(questions):
            if not kept.has(question):
                kept.add(question, runner.ask(question, index))
                bar.step()


def _settings(
    args: argparse.Namespace, runner: QuestionRunner, questions: Sequence[Question]
) -> dict[str, Any]:
    """The settings that identify a run, ready for JSON: a resumed run must have the same."""
    sets: dict[str, list[Question]] = {}
    for question in questions:
        sets.setdefault(question.set, []).append(question)
    settings = {
        "version": __version__,
        "device": jax.devices()[0].device_kind,
        "dtype": str(runner.target.params["embed"].dtype),
        "weights": args.weights,
        "suite": {name: suites.digest(each) for name, each in sets.items()},
        **describe(args, runner.target, runner.candidates),
        "answers": {
            **{key: getattr(runner, key) for key in ("max_new_tokens", "stop", "stop_ids")},
            **dataclasses.asdict(runner.sampling),
        },
    }
    return json.loads(json.dumps(settings))


def _check_output(folder: Path) -> None:
    """Raises InputError for a folder that cannot be written or holds another report."""
    check_folder(folder)
    for name in ("report.json", "report.md", SPEED, ACCEPTANCE):
        if (folder / name).exists() and not (folder / answers.SETTINGS).exists():
            raise InputError(
                f"--output {folder} holds {name} but no {answers.SETTINGS} of an evaluation; "
                "choose another --output"
            )


def _default_output(suite: str, settings: dict[str, Any]) -> Path:
    """The default output folder, which only runs with the same settings share."""
    sets = [*settings["suite"]]
    name = suite if suite in ("demo", "paper") else "suite"
    name = sets[0] if len(sets) == 1 else name
    return Path("runs", "evaluate", f"{name}-{answers.run_id(settings)}")


def _write(folder: Path, document: dict[str, Any]) -> None:
    """Writes the report in Markdown and JSON, and plots if matplotlib is installed."""
    can_draw = importlib.util.find_spec("matplotlib") is not None
    pictures = [f"![tau and speedup]({SPEED})", f"![acceptance]({ACCEPTANCE})"] if can_draw else []
    text = "\n\n".join([report.render(document), *pictures])
    write_whole(folder / "report.json", to_json(document, indent=2) + "\n")
    write_whole(folder / "report.md", text + "\n")
    print(f"{folder}: report.md, report.json and the answers", file=sys.stderr)
    if can_draw:  # last: drawing may fail
        save_figure(plots.speed_figure(document), folder / SPEED)
        save_figure(plots.acceptance_figure(document), folder / ACCEPTANCE)
    else:
        print("no pictures; pip install 'moa-jax[plots]' and ask again", file=sys.stderr)


if __name__ == "__main__":
    run(main)
