"""Checks that a target computes what a reference computes, and that drafted text is plain text.

    python -m infer.check                                   the bundled pair against transformers
    python -m infer.check --pair smollm2
    python -m infer.check --target DIR_OR_GGUF --weights int8
    python -m infer.check --target DIR --reference transformers --write-golden golden.jsonl
    python -m infer.check --target DIR --dtype bfloat16 --reference golden.jsonl

The target answers each prompt greedily. Target and reference then read the prompt and the answer,
and their next-token distributions are compared after each token: KL(reference || target) in nats,
the share of positions with the same most likely token (top-1), the share of the reference's five
most likely tokens among the target's five (top-5), and the largest difference of logits. The
prompts are decoded with drafts as well, in a chain and in a tree: in float32 any other token is a
fault. The exit code is 0 if all prompts pass, 1 if one fails and 2 for bad input.

The reference is transformers in float32, in a process of its own (pip install '.[test]'); of a GGUF
file it is transformers' own reading. A golden file keeps its figures for machines without torch:
--write-golden keeps those of transformers, or with no --reference those of this program's own
float32 run, so that a later version, another device or other weights can be compared with today's.
"""

from __future__ import annotations

import argparse
import contextlib
import math
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from infer.bench import fidelity, golden
from infer.bench.compare import bundled_questions
from infer.bench.fidelity import Closeness, Fidelity, TopLogits
from infer.bench.golden import Golden, GoldenPrompt
from infer.bench.tables import percent, short, table_of
from infer.bench.thresholds import Thresholds, add_threshold_flags, faults_of, thresholds_of
from infer.flags.auto import TREE, TREE_ELSEWHERE
from infer.flags.pair import add_pair_flags, load_pair
from infer.flags.prompts import add_prompt_flags, prompts_of, tokenizer_of
from infer.peers import check_peer, run_peer
from infer.program import Parser, local_path, positive, progress, run
from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.decode.exactness import Difference, compare
from moa_jax.decode.session import DEFAULT_DEPTH
from moa_jax.errors import InputError
from moa_jax.files.folders import GGUF_LINK
from moa_jax.files.json_text import to_json
from moa_jax.files.places import check_file
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.version import __version__

FAILED = 1  # exit code
TRANSFORMERS = "transformers"
DRAFTED = ("chain", "tree")
EXACT = "float32"  # in other dtypes passes over one and over several tokens round differently


class DecodedPrompt(NamedTuple):
    """A prompt, its greedy answer, and where drafted answers first differ from plain ones."""

    prompt_ids: list[int]
    token_ids: list[int]
    differences: dict[str, Difference | None]  # by kind of draft

    @property
    def sequence(self) -> list[int]:
        """The tokens that target and reference read."""
        return [*self.prompt_ids, *self.token_ids]


class Reference(NamedTuple):
    """Logits to compare with, one entry a prompt, and the software that computed them."""

    made_by: str
    logits: Iterable[np.ndarray | TopLogits]  # (T, V), or of the most likely tokens alone


class CheckedPrompt(NamedTuple):
    """The figures of one prompt."""

    answered: DecodedPrompt
    closeness: Closeness | None  # None without a reference
    kept: GoldenPrompt | None  # None without --write-golden


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    _check(args)
    target, drafter = load_pair(args)
    known = golden.read(Path(args.reference), target) if _is_golden(args) else None
    answers = _answers(args, target, drafter, known)
    with _reference(args, target, answers, known) as reference:
        rows = list(_compared(args, target, answers, reference))
    if args.write_golden is not None:
        about = {"made_by": reference.made_by, "dtype": EXACT, **golden.model_of(target)}
        golden.write(args.write_golden, about, [row.kept for row in rows])
    document = _document(args, target, drafter, rows, reference.made_by)
    print(to_json(document) if args.json else _render(document))
    return 0 if document["passed"] else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.check", __doc__)
    add_pair_flags(parser)
    add_prompt_flags(parser)
    group = parser.add_argument_group("reference")
    group.add_argument(
        "--reference",
        metavar="transformers|GOLDEN.jsonl",
        help="what to compare with; a golden file brings its own prompts; default: transformers, "
        "or nothing with --write-golden",
    )
    group.add_argument(
        "--write-golden",
        type=local_path,
        metavar="FILE.jsonl",
        help=f"write the prompts, the answers and the {golden.TOP} largest logits of each position:"
        " the reference's, or with no --reference those of this float32 run",
    )
    group.add_argument(
        "--max-new-tokens", type=positive, default=32, help="tokens of each answer to compare"
    )
    add_threshold_flags(parser)
    group = parser.add_argument_group("output")
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Complete the flags; raise InputError for those that do not go together."""
    if args.reference is None and args.write_golden is None:
        args.reference = TRANSFORMERS
    if args.reference == TRANSFORMERS:
        check_peer(TRANSFORMERS, "--reference")
    elif args.reference is not None and not Path(args.reference).is_file():
        raise InputError(
            f"--reference {args.reference}: no such file; give {TRANSFORMERS} or a golden file"
        )
    if _is_golden(args) and any((args.prompt, args.prompt_ids, args.prompts, args.write_golden)):
        raise InputError(
            "--reference names a golden file, which brings its own prompts: leave out --prompt, "
            "--prompt-ids, --prompts and --write-golden"
        )
    if args.write_golden is not None:
        check_file("--write-golden", args.write_golden)
        golden.check_replaceable(args.write_golden)
        if args.reference is None:
            if args.weights or args.dtype not in (None, EXACT):
                raise InputError(
                    f"--write-golden keeps a run in {EXACT}: leave out --dtype and --weights, or "
                    f"add --reference {TRANSFORMERS}"
                )
            args.dtype = EXACT


def _is_golden(args: argparse.Namespace) -> bool:
    return args.reference not in (None, TRANSFORMERS)


def _answers(
    args: argparse.Namespace, target: Target, drafter: LoadedDrafter, known: Golden | None
) -> list[DecodedPrompt]:
    """The prompts and their plain answers, and whether drafted answers are the same.

    With a golden file the answer to compare is the file's. Raises InputError as `Session`.
    """
    tokenizer = tokenizer_of(target.folder)
    if known is not None:
        prompts = [each.prompt_ids for each in known.prompts]
    elif args.prompt is args.prompt_ids is args.prompts is None:
        prompts = bundled_questions(tokenizer)
    else:
        prompts = list(prompts_of(args, tokenizer))
    plain = Session(target)
    plain.check(prompts, args.max_new_tokens)  # all of them, before the first is answered
    tree = TREE.get(jax.default_backend(), TREE_ELSEWHERE)
    shapes = DraftShape(drafter.depth or DEFAULT_DEPTH), tree
    drafted = [Session(target, drafter, shape) for shape in shapes]
    found = []
    with progress(len(prompts), "prompts decoded") as bar:
        for index, prompt in enumerate(prompts):
            answer, *others = (
                session.generate([prompt], args.max_new_tokens)[0].token_ids
                for session in (plain, *drafted)
            )
            differences = {
                kind: compare(target, prompt, answer, other)
                for kind, other in zip(DRAFTED, others, strict=True)
            }
            shown = answer if known is None else known.prompts[index].token_ids
            found.append(DecodedPrompt(prompt, shown, differences))
            bar.step()
    return found


@contextlib.contextmanager
def _reference(
    args: argparse.Namespace, target: Target, answers: Sequence[DecodedPrompt], known: Golden | None
) -> Iterator[Reference]:
    """The reference that the flags name; its files are gone when the context ends."""
    sequences = [each.sequence for each in answers]
    if known is not None:
        yield Reference(known.header["made_by"], [each.top for each in known.prompts])
    elif args.reference is None:
        own = (fidelity.logits_of(target, tokens)[: len(tokens)] for tokens in sequences)
        yield Reference(f"moa-jax {__version__}, jax {jax.__version__}", own)
    else:
        model = target.folder
        if (model / GGUF_LINK).is_file():
            model = model / GGUF_LINK
            if target.config.block.rope_scaling is not None:
                raise InputError(
                    f"--reference {TRANSFORMERS}: it does not read the RoPE scaling of "
                    f"{model.resolve()}; check the folder that infer.convert makes of the file"
                )
        with tempfile.TemporaryDirectory() as folder:
            task = {"model": str(model), "sequences": sequences, "folder": folder}
            versions = run_peer(TRANSFORMERS, task, "--reference", "logits")["versions"]
            paths = [Path(folder, f"{index}.npy") for index in range(len(sequences))]
            made_by = ", ".join(f"{name} {version}" for name, version in versions.items())
            yield Reference(made_by, map(np.load, paths))


def _compared(
    args: argparse.Namespace, target: Target, answers: Sequence[DecodedPrompt], reference: Reference
) -> Iterator[CheckedPrompt]:
    """The figures of each prompt, and what a golden file keeps of it."""
    for each, logits in zip(answers, reference.logits, strict=True):
        closeness = kept = None
        if args.reference is not None:
            closeness = fidelity.closeness(logits, fidelity.logits_of(target, each.sequence))
        if args.write_golden is not None:
            top = fidelity.top_logits(logits, min(golden.TOP, target.config.vocab_size - 1))
            kept = GoldenPrompt(each.prompt_ids, each.token_ids, top)
        yield CheckedPrompt(each, closeness, kept)


def _document(
    args: argparse.Namespace,
    target: Target,
    drafter: LoadedDrafter,
    rows: Sequence[CheckedPrompt],
    made_by: str,
) -> dict[str, Any]:
    """The document that --json prints."""
    dtype = str(target.params["embed"].dtype)
    limits = thresholds_of(args, args.weights or dtype)
    prompts = [_as_dict(row, limits, dtype) for row in rows]
    compared = [row.closeness for row in rows if row.closeness is not None]
    return {
        "passed": not any(prompt["faults"] for prompt in prompts),
        "prompts": prompts,
        "all": _figures(fidelity.summary(compared)) if compared else None,
        "thresholds": limits._asdict(),
        "settings": {
            "target": str(args.target or "bundled"),
            "draft": str(args.draft or "bundled"),
            "method": drafter.method,
            "dtype": dtype,
            "weights": args.weights,
            "mesh": args.mesh or None,
            "reference": args.reference,
            "made_by": made_by,
            "kl": "top and rest" if _is_golden(args) else "whole",
            "max_new_tokens": args.max_new_tokens,
            "golden": args.write_golden and str(args.write_golden),
        },
    }


def _as_dict(row: CheckedPrompt, limits: Thresholds, dtype: str) -> dict[str, Any]:
    """The figures of a prompt, and its faults as sentences."""
    answered, figures, faults = row.answered, None, []
    if row.closeness is not None:
        found = fidelity.summary([row.closeness])
        figures, faults = _figures(found), faults_of(found, limits)
    differences = answered.differences
    if dtype == EXACT:
        faults += [f"{kind}: {each}" for kind, each in differences.items() if each is not None]
    return {
        "prompt_ids": answered.prompt_ids,
        "token_ids": answered.token_ids,
        "figures": figures,
        "differences": {kind: each and each._asdict() for kind, each in differences.items()},
        "faults": faults,
    }


def _figures(found: Fidelity) -> dict[str, float | None]:
    """Figures for JSON, which has no nan and no infinity."""
    return {key: value if math.isfinite(value) else None for key, value in found._asdict().items()}


def _render(document: dict[str, Any]) -> str:
    """A table with a row for each prompt, and sentences on what differs."""
    settings, prompts = document["settings"], document["prompts"]
    weights = f" with {settings['weights']} weights" if settings["weights"] else ""
    against = settings["made_by"] if settings["reference"] else "no reference"
    rows = [_cells(f"{n}", prompt, prompt["figures"]) for n, prompt in enumerate(prompts, 1)]
    if document["all"]:
        rows.append(_cells("all", None, document["all"]))
    lines = [f"{settings['target']}, {settings['dtype']}{weights}, against {against}", ""]
    lines += [table_of(rows), ""]
    if settings["kl"] != "whole":
        lines.append(
            "KL is a lower bound: over the reference's most likely tokens, with all others as one. "
            "Logits are compared for these tokens."
        )
    for number, prompt in enumerate(prompts, 1):
        lines += [f"prompt {number}: {fault}" for fault in prompt["faults"]]
        if settings["dtype"] != EXACT:
            found = {kind: each for kind, each in prompt["differences"].items() if each}
            lines += [
                f"prompt {number}, {kind}: {Difference(**each)} (no fault in {settings['dtype']})"
                for kind, each in found.items()
            ]
    if settings["golden"]:
        lines.append(f"{settings['golden']} holds {len(prompts)} prompts of {settings['made_by']}")
    failed = sum(bool(prompt["faults"]) for prompt in prompts)
    lines.append(f"FAILED: {failed} of {len(prompts)} prompts" if failed else "PASSED")
    return "\n".join(lines)


def _cells(name: str, prompt: dict[str, Any] | None, figures: dict[str, Any] | None) -> dict:
    """A row of the table; `prompt` is None for the row of all prompts."""
    found = figures or {}
    cells = {
        "prompt": name,
        "tokens": str(found.get("tokens", "-")),
        "mean KL": short(found.get("mean_kl")),
        "worst KL": short(found.get("worst_kl")),
        "top-1": percent(found.get("agreement"), 1),
        "top-5": percent(found.get("top5_agreement"), 1),
        "logit difference": short(found.get("logit_difference")),
    }
    differences = prompt["differences"] if prompt else {}
    drafted = {
        kind: "differs" if differences.get(kind) else "same" if prompt else "-" for kind in DRAFTED
    }
    return cells | drafted


if __name__ == "__main__":
    run(main)
