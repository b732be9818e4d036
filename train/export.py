"""Exports a checkpoint as a drafter's folder: the best, the newest, or a step.

    python -m train.export --config configs/tiny.py --checkpoint best

The best has the highest decoded tau, or `simulated_tau` if the run decodes no prompts.
Config file and dotted flags must be those of the train.distill run, which may still be running.
`--draft` accepts the folder; a finished run already has the folder of its last step. A
`draft_vocabulary` of the config is counted again from the training data. README.md of the folder is
a model card, and `--push OWNER/NAME` uploads the folder to the Hugging Face hub.
"""

from __future__ import annotations

import dataclasses
import shlex
import sys
from typing import Any

import jax

from infer.cli.flags import hub
from infer.cli.program import progress, run
from moa_jax.config import DistillConfig, MeshConfig
from moa_jax.data import batches
from moa_jax.data.tokenizer import load_tokenizer
from moa_jax.decode.draft_vocabulary import DraftVocabulary
from moa_jax.drafters import method_of
from moa_jax.errors import InputError
from moa_jax.files.hub import push
from moa_jax.files.model_card import UNKNOWN, Card, write_card
from moa_jax.files.model_folder import public_name
from moa_jax.files.paths import place
from moa_jax.model import sharding
from moa_jax.pretrained import Target, describe_target
from moa_jax.training.checkpoint import read_state, steps_of
from moa_jax.training.distillation import make_train_step
from moa_jax.training.metrics import ratings, read_records
from train.distill import save, with_vocabulary
from train.run import output
from train.run.draft_vocabulary import facts_of_vocabulary, frequent_in
from train.run.loop import check_output
from train.run.model_card import datasets_of, training_section
from train.run.settings import config_parser, parse_config
from train.run.start import working_on


def export(config: DistillConfig, step: int, overwrite: bool = False) -> None:
    """Writes the drafter of one checkpoint of a run as `config.output`, on one device.

    A `config.draft_vocabulary` is counted again from the training data, which must be those of the
    run. Raises InputError as `read_state`, `check_output` and `check_writable`, and for data that
    cannot be read.
    """
    check_output(config)
    output.check_writable(config, overwrite)
    target = describe_target(config.target)
    config = with_vocabulary(config, target)
    here = sharding.make_mesh(MeshConfig(), jax.devices()[:1])
    program = make_train_step(config, target.config, here)
    vocabulary, data = _vocabulary_of(config, target)
    params = read_state(config, step, program.abstract_state(), data).params
    save(config, params, target, vocabulary, step)


def _vocabulary_of(
    config: DistillConfig, target: Target
) -> tuple[DraftVocabulary | None, dict[str, Any] | None]:
    """The draft vocabulary of the training data, and the facts of data and vocabulary.

    The data are tokenised again, or read from `data.cache`.
    """
    if config.draft_vocabulary is None:
        return None, None
    tokenizer, vocab_size = load_tokenizer(target.folder), target.config.vocab_size
    train, _ = batches.load(config.data, tokenizer, vocab_size, "train", progress)
    vocabulary = frequent_in(train, config.draft_vocabulary, target)
    return vocabulary, batches.facts_of(train) | facts_of_vocabulary(vocabulary)


def step_of(config: DistillConfig, checkpoint: str) -> int:
    """The step of a checkpoint, which is "best", "newest" or a number.

    Raises InputError for any other name, for "best" and "newest" of a run without checkpoints,
    and for "best" if no checkpoint was evaluated.
    """
    if checkpoint.isdecimal():
        return int(checkpoint)
    if checkpoint not in ("best", "newest"):
        raise InputError(f"--checkpoint {checkpoint}; say best, newest or a step")
    steps = steps_of(config)
    if not steps:
        raise InputError(f"{config.run.directory}: no checkpoint yet; train, or name another run")
    if checkpoint == "newest":
        return steps[-1]
    _, taus = ratings_of(config)
    rated = [step for step in steps if step in taus]
    if not rated:
        raise InputError(
            f"{config.run.directory}: none of the checkpoints {steps} was evaluated; name a step"
        )
    return max(rated, key=lambda step: (taus[step], step))


def ratings_of(config: DistillConfig) -> tuple[str, dict[int, float]]:
    """The field that rates the run's checkpoints, and its values by step, as `ratings`."""
    return ratings(read_records(place(config.run.directory) / "metrics.jsonl"))


def card_of(config: DistillConfig, step: int, name: str, command: str) -> Card:
    """The model card of a step's drafter; `name` is the repository's or the folder's."""
    return Card(
        name,
        method_of(config.drafter),
        "ours",
        public_name(describe_target(config.target).folder),
        config.horizon + 1,
        datasets=datasets_of(config.data),
        training=training_section(config, step, command),
    )


def main(arguments: list[str] | None = None) -> None:
    parser = config_parser("train.export", __doc__)
    parser.add_argument("--checkpoint", default="best", help="best, newest, or a step")
    parser.add_argument("--output", help="the folder to write; by default RUN/step_STEP")
    output.add_flag(parser)
    hub.add_flags(parser)
    config, args = parse_config(parser, DistillConfig, arguments)
    chosen = args.output and place(args.output)
    hub.check_flags(args, chosen or place(config.run.directory))
    step = step_of(config, args.checkpoint)
    folder = chosen or place(config.run.directory) / f"step_{step}"
    export(dataclasses.replace(config, output=str(folder)), step, args.overwrite)
    preset = ["--preset", args.preset] if args.preset else []
    flags = ["--config", args.config, *preset, *parser.parse_known_args(arguments)[1]]
    command = shlex.join(["python", "-m", "train.distill", *flags])
    with working_on("reading the licences of the training data"):
        card = card_of(config, step, args.push or folder.name, command)
    card = card._replace(license=args.license or UNKNOWN, target=args.base_model or card.target)
    notice = write_card(folder, card)
    name, taus = ratings_of(config)
    rated = f"{name} {taus[step]:.3f}" if step in taus else "not evaluated"
    for line in filter(None, (notice, f"step {step}, {rated}: {folder}")):
        print(line, file=sys.stderr)
    if args.push:
        with working_on(f"uploading {folder} to the hub"):
            url = push(folder, args.push, args.private)
        print(f"pushed to {url}", file=sys.stderr)


if __name__ == "__main__":
    run(main)
