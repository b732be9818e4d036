"""Rows of earlier reports that count as done, so that a grid grows over days and machines."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from moa_jax.config import DistillConfig
from moa_jax.errors import InputError, first_line
from moa_jax.files.folders import read_json
from moa_jax.training.fingerprint import changes, listed
from train.run.grid_decoding import decoding_changes
from train.run.grid_report import ENDINGS, FORMER_PROMPTS, Decoded, tau_of

# By cell, seed and learning rate, the rate as in the names of folders.
Configs = Mapping[tuple[str, int, str], DistillConfig]


class Earlier(NamedTuple):
    """What an earlier report says of one cell and seed, decoded at the best of its rates.

    `decoded` is None where it was not, or with other prompts: it tells of learning rates alone.
    """

    report: str
    cell: str
    seed: int
    learning_rate: str
    simulated_tau_by_rate: dict[str, float]
    decoded: Decoded | None
    trained_on: str | None = None


def read_earlier(
    path: str, configs: Configs, files: Mapping[str, Any], decoding: Mapping[str, Any]
) -> list[Earlier]:
    """The rows of a report that `configs` asks for.

    Raises InputError where such a row was trained with other settings, where a file that both
    know has other content, and where prompts were decoded in another way, but for which they are.
    """
    document = read_json(Path(path))
    try:
        same_prompts = document.get("prompts_are", FORMER_PROMPTS) == decoding["prompts_are"]
        asked = [(_key(row), row) for row in document["rows"]]
        rows = [(configs[key], row) for key, row in asked if key in configs]
        found = decoding_changes(document | {"prompts_are": decoding["prompts_are"]}, decoding)
        for config, row in rows:
            different = changes(row["settings"], config)
            found += [f"cell {row['cell']}: {each}" for each in different]
        both = document["files"].keys() & files.keys()
        found += [f"{n}: other content" for n in sorted(both) if files[n] != document["files"][n]]
        earlier = [_earlier(path, row, same_prompts) for _, row in rows]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise InputError(
            f"{path} is no report of train.grid ({first_line(error)}): name its report.json"
        ) from error
    if rows and found:
        raise InputError(
            f"{path} is of another grid: {listed(found)}: restore them, or leave it out"
        )
    return earlier


def _key(row: Mapping[str, Any]) -> tuple[str, int, str]:
    return row["cell"], row["seed"], f"{row['learning_rate']:g}"


def _earlier(path: str, row: Mapping[str, Any], same_prompts: bool) -> Earlier:
    tried = {rate: float(tau) for rate, tau in row["simulated_tau_by_learning_rate"].items()}
    decoded = None
    if row["decoded"] and same_prompts:
        taus = [{key: tau_of(shape[key]) for key in ENDINGS} for shape in row["decoded"]]
        decoded = Decoded(int(row["prompts"]), taus)
    return Earlier(path, *_key(row), tried, decoded, row.get("trained_on"))
