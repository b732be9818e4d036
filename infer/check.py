"""Compares a target's logits with a reference, and drafted answers with plain decoding.

    python -m infer.check                                   the bundled pair against transformers
    python -m infer.check --pair smollm2
    python -m infer.check --target DIR_OR_GGUF --weights int8
    python -m infer.check --target DIR --reference transformers --write-golden golden.jsonl
    python -m infer.check --target DIR --dtype bfloat16 --reference golden.jsonl

The target answers each prompt greedily. Target and reference then read the prompt and the answer,
and their next-token distributions are compared after each token: KL(reference || target) in nats,
the share of positions with the same argmax (top-1), the share of the reference's five most likely
tokens among the target's five (top-5), and the largest difference of logits. The prompts are also
decoded with drafts, in a chain and in a tree (prompt lookup: in a chain): in float32 any different
token is a fault. The exit code is 0 if all prompts pass, 1 if one fails and 2 for bad input.

The reference is transformers in float32, in a separate process (pip install '.[test]');
transformers also loads GGUF files itself. A golden file stores the reference's top logits for
machines without torch: --write-golden stores those of transformers, or without --reference those
of this program's own float32 run, so that a later version, another device or other weights can be
compared with this run.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from infer.bench import fidelity, golden
from infer.bench.compare import bundled_questions
from infer.bench.fidelity import Closeness, TopLogits
from infer.bench.golden import Golden, GoldenPrompt
from infer.bench.tables import TableColumn, percent, precision, short, table_of
from infer.bench.thresholds import Thresholds, add_threshold_flags, faults_of, thresholds_of
from infer.cli.flags.auto import TREE, TREE_ELSEWHERE
from infer.cli.flags.pair import add_pair_flags, load_pair
from infer.cli.flags.prompts import add_prompt_flags, prompts_of, tokenizer_of
from infer.cli.program import Parser, local_path, positive, progress, run
from infer.peers import check_peer, run_peer
from moa_jax import Session
from moa_jax.config import DraftShape
from moa_jax.decode.exactness import Difference, compare
from moa_jax.decode.session import DEFAULT_DEPTH
from moa_jax.errors import InputError
from moa_jax.files.json_text import to_json
from moa_jax.files.paths import check_file
from moa_jax.files.tensor_reader import GGUF_LINK
from moa_jax.pairs import LOOKUP
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.version import __version__

FAILED = 1  # exit code
TRANSFORMERS = "transformers"
DRAFTED = ("chain", "tree")
COLUMNS: dict[str, TableColumn] = {
    "prompt": "prompt",
    "tokens": "tokens",
    "mean KL": lambda row: short(row.get("mean_kl")),
    "worst KL": lambda row: short(row.get("worst_kl")),
    "top-1": lambda row: percent(row.get("agreement"), 1),
    "top-5": lambda row: percent(row.get("top5_agreement"), 1),
    "logit difference": lambda row: short(row.get("logit_difference")),
    **{kind: kind for kind in DRAFTED},
}
EXACT = "float32"  # in other dtypes, one-token and multi-token passes round differently


class DecodedPrompt(NamedTuple):
    """A prompt, its greedy answer, and the first difference per kind of draft."""

    prompt_ids: list[int]
    token_ids: list[int]
    differences: dict[str, Difference | None]  # by kind of draft

    @property
    def sequence(self) -> list[int]:
        """Prompt and answer: the input of target and reference."""
        return [*self.prompt_ids, *self.token_ids]


def main(arguments: list[str] | None = None) -> int:
    args = _parser().parse_args(arguments)
    _check(args)
    target, drafter = load_pair(args)
    known = golden.read(Path(args.reference), target) if _is_golden(args) else None
    answers = _answers(args, target, drafter, known)
    prompts, compared, kept = [], [], []
    limits = thresholds_of(args, args.weights or str(target.params["embed"].dtype))
    with tempfile.TemporaryDirectory() as folder:
        made_by, references = _references(args, target, answers, known, folder)
        for answered, logits in zip(answers, references, strict=True):
            if args.reference is not None:
                ours_TV = fidelity.logits_of(target, answered.sequence)
                compared.append(fidelity.closeness(logits, ours_TV))
            if args.write_golden is not None:
                top = fidelity.top_logits(logits, min(golden.TOP, target.config.vocab_size - 1))
                kept.append(GoldenPrompt(answered.prompt_ids, answered.token_ids, top))
            prompts.append(_prompt_of(answered, compared[-1:], limits, target))
    if kept:
        about = {"made_by": made_by, "dtype": EXACT, **golden.model_of(target)}
        golden.write(args.write_golden, about, kept)
    document = {
        "passed": not any(prompt["faults"] for prompt in prompts),
        "prompts": prompts,
        "all": fidelity.summary(compared)._asdict() if compared else None,
        "thresholds": limits._asdict(),
        "settings": _settings(args, target, drafter, made_by),
    }
    print(to_json(document) if args.json else _render(document))
    return 0 if document["passed"] else FAILED


def _parser() -> argparse.ArgumentParser:
    parser = Parser("infer.check", __doc__)
    add_pair_flags(parser)
    add_prompt_flags(parser)
    add = parser.add_argument_group("reference").add_argument
    about = "what to compare with; a golden file brings its own prompts; default: transformers, "
    about += "or nothing with --write-golden"
    add("--reference", metavar="transformers|GOLDEN.jsonl", help=about)
    about = f"write the prompts, the answers and the {golden.TOP} largest logits of each position: "
    about += "the reference's, or with no --reference those of this float32 run"
    add("--write-golden", type=local_path, metavar="FILE.jsonl", help=about)
    about = "tokens of each answer to compare"
    add("--max-new-tokens", type=positive, default=32, help=about)
    add_threshold_flags(parser)
    add = parser.add_argument_group("output").add_argument
    add("--json", action="store_true", help="one JSON document on stdout")
    return parser


def _check(args: argparse.Namespace) -> None:
    """Fills in defaults; raises InputError for invalid combinations of flags."""
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
            "--reference names a golden file, which brings its own prompts; leave out --prompt, "
            "--prompt-ids, --prompts and --write-golden"
        )
    if args.write_golden is not None:
        check_file("--write-golden", args.write_golden)
        golden.check_replaceable(args.write_golden)
        if args.reference is None:
            if args.weights or args.dtype not in (None, EXACT):
                raise InputError(
                    f"--write-golden keeps a run in {EXACT}; leave out --dtype and --weights, or "
                    f"add --reference {TRANSFORMERS}"
                )
            args.dtype = EXACT


def _is_golden(args: argparse.Namespace) -> bool:
    return args.reference not in (None, TRANSFORMERS)


def _answers(
    args: argparse.Namespace, target: Target, drafter: LoadedDrafter, known: Golden | None
) -> list[DecodedPrompt]:
    """Decodes each prompt without drafts and with every kind of draft; compares the answers.

    With a golden file, `token_ids` are the file's answers. Raises InputError like `Session`.
    """
    tokenizer = tokenizer_of(target.folder)
    if known is not None:
        prompts = [each.prompt_ids for each in known.prompts]
    elif args.prompt is args.prompt_ids is args.prompts is None:
        prompts = bundled_questions(tokenizer)
    else:
        prompts = list(prompts_of(args, tokenizer))
    plain = Session(target)
    plain.check(prompts, args.max_new_tokens)  # all prompts, before the first is decoded
    tree = TREE.get(jax.default_backend(), TREE_ELSEWHERE)
    shapes = DraftShape(drafter.depth or DEFAULT_DEPTH), tree
    chains_only = drafter.method == LOOKUP
    drafted = [Session(target, drafter, shape) for shape in shapes[: 1 if chains_only else 2]]
    found = []
    with progress(len(prompts), "prompts decoded") as bar:
        for index, prompt in enumerate(prompts):
            answer, *others = (
                session.generate([prompt], args.max_new_tokens)[0].token_ids
                for session in (plain, *drafted)
            )
            differences = {
                kind: compare(target, prompt, answer, other)
                for kind, other in zip(DRAFTED, others, strict=False)
            }
            shown = answer if known is None else known.prompts[index].token_ids
            found.append(DecodedPrompt(prompt, shown, differences))
            bar.step()
    return found


def _references(
    args: argparse.Namespace,
    target: Target,
    answers: Sequence[DecodedPrompt],
    known: Golden | None,
    folder: str,
) -> tuple[str, Iterable[np.ndarray | TopLogits]]:
    """The software of the reference, and its logits per prompt: (T, V), or the top ones.

    `folder` receives the files of another process; the logits must be read before it goes.
    """
    sequences = [each.sequence for each in answers]
    if known is not None:
        return known.header["made_by"], [each.top for each in known.prompts]
    if args.reference is None:
        own = (fidelity.logits_of(target, tokens)[: len(tokens)] for tokens in sequences)
        return f"moa-jax {__version__}, jax {jax.__version__}", own
    model = target.folder
    if (model / GGUF_LINK).is_file():
        model = model / GGUF_LINK
        if target.config.block.rope_scaling is not None:
            raise InputError(
                f"--reference {TRANSFORMERS}: it does not read the RoPE scaling of "
                f"{model.resolve()}; check the folder that infer.convert makes of the file"
            )
    task = {"model": str(model), "sequences": sequences, "folder": folder}
    versions = run_peer(TRANSFORMERS, task, "--reference", "logits")["versions"]
    paths = [Path(folder, f"{index}.npy") for index in range(len(sequences))]
    return ", ".join(f"{name} {version}" for name, version in versions.items()), map(np.load, paths)


def _prompt_of(
    answered: DecodedPrompt, compared: Sequence[Closeness], limits: Thresholds, target: Target
) -> dict[str, Any]:
    """The JSON entry of a prompt: its figures (None without a reference) and its faults."""
    figures, faults = None, []
    if compared:
        found = fidelity.summary(compared)
        figures, faults = found._asdict(), faults_of(found, limits)
    differences = answered.differences
    if target.params["embed"].dtype == EXACT:
        faults += [f"{kind}: {each}" for kind, each in differences.items() if each is not None]
    return {
        "prompt_ids": answered.prompt_ids,
        "token_ids": answered.token_ids,
        "figures": figures,
        "differences": {kind: each and each._asdict() for kind, each in differences.items()},
        "faults": faults,
    }


def _settings(
    args: argparse.Namespace, target: Target, drafter: LoadedDrafter, made_by: str
) -> dict[str, Any]:
    return {
        "target": str(args.target or "bundled"),
        "draft": str(args.draft or "bundled"),
        "method": drafter.method,
        "dtype": str(target.params["embed"].dtype),
        "weights": args.weights,
        "mesh": args.mesh or None,
        "reference": args.reference,
        "made_by": made_by,
        "kl": "top and rest" if _is_golden(args) else "whole",
        "max_new_tokens": args.max_new_tokens,
        "golden": args.write_golden and str(args.write_golden),
    }


def _render(document: dict[str, Any]) -> str:
    """A table with one row per prompt, then one line per fault or difference."""
    settings, prompts = document["settings"], document["prompts"]
    against = settings["made_by"] if settings["reference"] else "no reference"
    rows = [
        {
            "prompt": number,
            **(prompt["figures"] or {}),
            **{kind: "differs" if each else "same" for kind, each in prompt["differences"].items()},
        }
        for number, prompt in enumerate(prompts, 1)
    ]
    if document["all"]:
        rows.append({"prompt": "all", **document["all"]})
    lines = [f"{settings['target']}, {precision(settings)}, against {against}", ""]
    lines += [table_of(rows, COLUMNS), ""]
    if settings["kl"] != "whole":
        lines.append(
            "KL is a lower bound: over the reference's most likely tokens, with all others as one. "
            "Logits are compared for these tokens."
        )
    for number, prompt in enumerate(prompts, 1):
        lines += [f"prompt {number}: {fault}" for fault in prompt["faults"]]
        if settings["dtype"] != EXACT:
            lines += [
                f"prompt {number}, {kind}: {Difference(**each)} (no fault in {settings['dtype']})"
                for kind, each in prompt["differences"].items()
                if each
            ]
    if settings["golden"]:
        lines.append(f"{settings['golden']} holds {len(prompts)} prompts of {settings['made_by']}")
    failed = sum(bool(prompt["faults"]) for prompt in prompts)
    lines.append(f"FAILED: {failed} of {len(prompts)} prompts" if failed else "PASSED")
    return "\n".join(lines)


if __name__ == "__main__":
    run(main)
