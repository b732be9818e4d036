"""The training section of a drafter's model card, from the settings and metrics of its run."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from moa_jax.config import DataConfig, DistillConfig
from moa_jax.data import sources
from moa_jax.errors import InputError
from moa_jax.files.model_card import UNKNOWN
from moa_jax.files.paths import place
from moa_jax.training.fingerprint import fingerprint, short
from moa_jax.training.metrics import Record, read_records


def datasets_of(data: DataConfig) -> tuple[str, ...]:
    """The hub ids of the training data."""
    return tuple(dict.fromkeys(filter(None, map(sources.hub_id, data.train))))


def training_section(config: DistillConfig, step: int, command: str) -> str:
    """Data with licences, taus, settings and the command of a run, as Markdown.

    `command` trained the drafter; `step` is its number of updates. Reads all training files.
    """
    records = read_records(place(config.run.directory) / "metrics.jsonl")
    measured = {record["kind"]: record for record in records if record["step"] == step}
    settings = (
        f"    {name} {json.dumps(value)}"
        for name, value in short(fingerprint(config)).items()
        if name not in ("data.train", "data.validation", "target")
    )
    data = ("data", "records", "licence"), *_data_rows(config.data)
    lines = [
        f"The drafter had {step} of the {config.optim.total_steps} updates of this command:\n",
        f"    {command}\n",
        "### Data\n",
        *_table(data),
        "\n### Tau\n",
        *_taus(config, measured),
        "\n### Settings\n",
        *settings,
    ]
    return "\n".join(lines) + "\n"


def _data_rows(data: DataConfig) -> Iterator[tuple[str, object, str]]:
    """Name, number of records and licence of each source of the training data."""
    for path in data.train:
        if dataset := sources.hub_id(path):
            page = f"https://huggingface.co/datasets/{dataset}"
            yield f"[{dataset}]({page})", UNKNOWN, f"{UNKNOWN} here; see its page"
        elif path.startswith(("hub:", "tfds:")):
            yield _shown(path), UNKNOWN, UNKNOWN
        else:
            yield from _file_rows(path, data.sources)


def _file_rows(path: str, chosen: Sequence[str]) -> Iterator[tuple[str, object, str]]:
    counts: Counter[tuple[str, str]] = Counter()
    try:
        for _, record in sources.read_some(path, chosen):
            if isinstance(record, dict):
                name, licence = (record.get(key) for key in ("source", "license"))
                counts[str(name or _shown(path)), str(licence or UNKNOWN)] += 1
    except (InputError, OSError):  # moved or damaged since
        yield _shown(path), UNKNOWN, f"{UNKNOWN}: the file could not be read"
        return
    for (name, licence), count in counts.most_common():
        yield name, count, licence


def _taus(config: DistillConfig, measured: dict[str, Record]) -> list[str]:
    evaluated, decoded = (measured.get(kind, {}) for kind in ("eval", "decode"))
    names = ", ".join(map(_shown, config.data.validation))
    lines = []
    if rates := evaluated.get("agreement"):
        chains = itertools.accumulate(itertools.accumulate(rates, lambda a, b: a * b), initial=1.0)
        rows = (
            ("position after the last known token", *range(1, len(rates) + 1)),
            ("agreement with the target's choice", *(f"{rate:.3f}" for rate in rates)),
            ("simulated tau of a chain up to here", *(f"{x:.3f}" for x in [*chains][1:])),
        )
        lines += [f"That command measured after this update, on {names}:\n", *_table(rows), ""]
        lines += [f"`simulated_tau` is {evaluated['simulated_tau']:.3f}, without decoding."]
    if (tau := decoded.get("decoded_tau")) is not None:
        chains = f"greedy chains of depth {config.horizon + 1}"
        lines += [f"`decoded_tau` is {tau:.3f}, with {chains} on the first prompts of {names}."]
    return lines or ["The run measured no tau after this update."]


def _table(rows: Iterable[Sequence[Any]]) -> list[str]:
    head, *rest = ([str(cell).replace("|", "\\|") for cell in row] for row in rows)
    return [f"| {' | '.join(row)} |" for row in (head, ["---"] * len(head), *rest)]


def _shown(path: str) -> str:
    """The name of a file or dataset without the folders of this machine."""
    return sources.hub_id(path) or Path(path).name
