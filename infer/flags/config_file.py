"""Config files: Python that defines one `config`, as those in configs/ do, and maybe `presets`."""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path
from typing import Any, TypeVar

from moa_jax.errors import InputError, first_line

Config = TypeVar("Config")
# By its path: a folder `configs` of one's own would be imported in place of ours.
SHAPES = runpy.run_path(str(Path(__file__).parents[2] / "configs" / "shapes.py"))["SHAPES"]
Settings = dict[str, str]  # as flags give them


def read_config(path: str, *kinds: type[Config]) -> Config:
    """The `config` that the Python file at `path` defines.

    Raises InputError for a file that is missing, does not run or has no `config` of these kinds.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such config file, see the folder configs/")
    found = _run(path)
    if not isinstance(config := found.get("config"), kinds):
        what = f"a {type(config).__name__} named" if "config" in found else "no"
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(f"{path}: defines {what} `config`, expected {wanted}")
    return config


def presets_of(path: str) -> dict[str, Settings]:
    """The `presets` of a config file, by their machines; raises InputError as `read_config`."""
    return _run(path).get("presets", {})


def read_preset(path: str, name: str) -> Settings:
    """The settings for a machine in the `presets` of a config file, by their dotted names.

    Raises InputError for a file as `read_config` does, and for a preset that it does not have.
    """
    presets = presets_of(path)
    if name not in presets:
        has = f"it has {', '.join(presets)}" if presets else "it has none"
        raise InputError(f"--preset {name}: {path} has no such preset, {has}")
    return presets[name]


def _run(path: str) -> dict[str, Any]:
    try:
        return runpy.run_path(path)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # a config is Python: it can fail in any way
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f" line {frame.lineno}" for frame in frames if frame.filename == path]
        where = path + "".join(lines[-1:])
        raise InputError(
            f"{where}: {type(error).__name__}: {first_line(error)}: mend the config file"
        ) from error
