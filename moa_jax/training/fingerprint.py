"""The settings that decide the result of a run, compared between runs.

Settings of bookkeeping and execution are free: a run may be resumed with other values of these. A
setting that is missing from a saved run was added later, and counts as its default.
"""

from __future__ import annotations

import dataclasses
import json
from typing import Any

from moa_jax.config import DistillConfig, PretrainConfig
from moa_jax.drafters import method_of

Settings = dict[str, Any]  # dotted names -> values after a round trip through JSON

# Each name stands for all settings below this name.
FREE = (
    "output",
    "run",
    "mesh",
    "chunks",
    "data.cache",
    "data.workers",
    "data.bad_records",
)
DECISIVE = ("run.seed", "run.dtype")  # although below a free name
OF_A_HOST = ("data.cache", "data.workers")  # may differ between processes of one run
FORMER = {"seed": "run.seed", "dtype": "run.dtype"}  # names in the files of old runs
# Settings of earlier versions, with the value that all current runs have implicitly.
REMOVED = {"feedback.noisy_target": False}
KIND = "drafter.kind"  # two kinds may have equal settings; missing from older files
MOST_SHOWN = 6
MOST_ELEMENTS = 16  # of a list in a summary: a draft vocabulary has thousands of ids
LONGEST_SHOWN = 80  # characters of one value: a draft vocabulary has thousands of ids


def fingerprint(config: PretrainConfig | DistillConfig) -> Settings:
    """The settings that decide what a run computes."""
    return _decisive(_settings(config))


def common(config: PretrainConfig | DistillConfig) -> Settings:
    """The settings that all processes of a run must share; free settings affect compilation."""
    return {name: value for name, value in _settings(config).items() if name not in OF_A_HOST}


def short(settings: Settings) -> Settings:
    """The settings without long lists, for model cards and trackers."""
    is_long = lambda value: isinstance(value, list) and len(value) > MOST_ELEMENTS
    return {name: value for name, value in settings.items() if not is_long(value)}


def changes(saved: dict[str, Any], config: PretrainConfig | DistillConfig) -> list[str]:
    """One string per decisive setting that differs, as `optim.b1: 0.9 -> 0.8`."""
    saved = {FORMER.get(name, name): value for name, value in _flat(saved).items()}
    saved = {name: value for name, value in saved.items() if REMOVED.get(name, ...) != value}
    unsaid = _defaults(config) | _kind_of(config)
    old, new = _decisive(unsaid | saved), fingerprint(config)
    names = [*new, *(name for name in old if name not in new)]
    return [
        f"{name}: {_shown(old, name)} -> {_shown(new, name)}"
        for name in names
        if name not in old or name not in new or old[name] != new[name]
    ]


def listed(differences: list[str]) -> str:
    """The first differences in one line, with the number of the others."""
    more = len(differences) - MOST_SHOWN
    rest = [f"{more} more"] if more > 0 else []
    return ", ".join(differences[:MOST_SHOWN] + rest)


def _settings(config: PretrainConfig | DistillConfig) -> Settings:
    return _kind_of(config) | _flat(dataclasses.asdict(config))


def _kind_of(config: PretrainConfig | DistillConfig) -> Settings:
    return {KIND: method_of(config.drafter)} if isinstance(config, DistillConfig) else {}


def _flat(tree: dict[str, Any], above: str = "") -> Settings:
    found: Settings = {}
    for name, value in tree.items():
        if isinstance(value, dict):
            found |= _flat(value, f"{above}{name}.")
        else:
            found[above + name] = json.loads(json.dumps(value))  # tuples become lists
    return found


def _defaults(config: Any, above: str = "") -> Settings:
    """All settings that have a default, with their defaults."""
    found: Settings = {}
    for field in dataclasses.fields(config):
        value = field.default
        if value is dataclasses.MISSING:
            given = getattr(config, field.name)
            if dataclasses.is_dataclass(given):
                found |= _defaults(given, f"{above}{field.name}.")
        else:
            value = dataclasses.asdict(value) if dataclasses.is_dataclass(value) else value
            found |= _flat({field.name: value}, above)
    return found


def _decisive(settings: Settings) -> Settings:
    free = lambda name: any(f"{name}.".startswith(f"{part}.") for part in FREE)
    return {n: v for n, v in settings.items() if n in DECISIVE or not free(n)}


def _shown(settings: Settings, name: str) -> str:
    if name not in settings:
        return "none"
    text = json.dumps(settings[name])
    return text if len(text) <= LONGEST_SHOWN else f"{text[:LONGEST_SHOWN]}..."
