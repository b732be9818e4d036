"""The folder that a run writes its model to: `output`, or final/ in the run's directory.

The folder records its run, as OUTPUT/training_run.json:

    {"run": "9c31...", "directory": "runs/tiny", "step": 60}

`run` is the random id that all checkpoints of the run hold, so a run that resumes, in a moved
directory too, may replace its own model. The model of another run is replaced with --overwrite.
"""

from __future__ import annotations

import argparse
import os

from moa_jax.config import DistillConfig, PretrainConfig, output_of
from moa_jax.files.json_text import to_json
from moa_jax.files.paths import is_stored, place
from moa_jax.files.replace import RUN, check_replaceable, check_writer
from moa_jax.training.checkpoint import run_id

Config = PretrainConfig | DistillConfig


def add_flag(parser: argparse.ArgumentParser) -> None:
    """Adds `--overwrite`."""
    help_ = "replace the model of another run in --output"
    parser.add_argument("--overwrite", action="store_true", help=help_)


def check_writable(config: Config, overwrite: bool) -> None:
    """Raises InputError for an output that cannot be written, or that another run wrote.

    With `overwrite` the model of another run may be replaced.
    """
    folder = place(output_of(config))
    check_replaceable(folder)
    if not overwrite:
        check_writer(folder, run_id(config))


def record(config: Config, step: int) -> dict[str, bytes]:
    """The file beside a model that records the run, by name; the run has saved a checkpoint."""
    directory = place(config.run.directory)
    where = str(directory) if is_stored(directory) else os.path.abspath(directory)
    content = {"run": run_id(config), "directory": where, "step": step}
    return {RUN: to_json(content).encode(errors="backslashreplace")}
