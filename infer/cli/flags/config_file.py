"""Config files: Python files that define `config`, as in configs/, and optionally `presets`.

A name such as configs/tiny.py that is not in the current folder is that of the installed package.
"""

from __future__ import annotations

import runpy
import traceback
from pathlib import Path
from typing import Any, TypeVar

from moa_jax.errors import InputError, first_line

Config = TypeVar("Config")
CONFIGS = Path(__file__).parents[3] / "configs"
# Loaded by path: in an import, a local folder `configs` would shadow this project's.
SHAPES = runpy.run_path(str(CONFIGS / "shapes.py"))["SHAPES"]
Settings = dict[str, str]  # unparsed values by dotted name, as in flags


def read_config(path: str, *kinds: type[Config]) -> Config:
    """The `config` that the Python file at `path` defines.

    Raises InputError for a file that is missing, does not run or has no `config` of these kinds.
    """
    if not Path(_installed(path)).is_file():
        raise InputError(f"no such config file: {path}; see the folder {CONFIGS}")
    found = _run(path)
    if not isinstance(config := found.get("config"), kinds):
        what = f"a {type(config).__name__} named" if "config" in found else "no"
        wanted = " or ".join(kind.__name__ for kind in kinds)
        raise InputError(f"{path} defines {what} `config`; name a file with a {wanted}")
    return config


def presets_of(path: str) -> dict[str, Settings]:
    """The `presets` of a config file, by machine; raises InputError like `read_config`."""
    return _run(path).get("presets", {})


def read_preset(path: str, name: str) -> Settings:
    """The settings for a machine in the `presets` of a config file, by dotted name.

    Raises InputError like `read_config`, and for a preset that the file does not define.
    """
    presets = presets_of(path)
    if name not in presets:
        advice = f"choose from {', '.join(presets)}" if presets else "leave the flag out"
        raise InputError(f"--preset {name}: no such preset in {path}; {advice}")
    return presets[name]


def _installed(path: str) -> str:
    """The config of the package for a name below configs/ that the current folder lacks."""
    own = CONFIGS.parent / path
    is_named = Path(path).parts[:1] == ("configs",) and not Path(path).exists()
    return str(own) if is_named and own.is_file() else path


def _run(path: str) -> dict[str, Any]:
    path = _installed(path)
    try:
        return runpy.run_path(path)
    except InputError as error:
        raise InputError(f"{path}: {error}") from error
    except Exception as error:  # a config is Python code and may raise anything
        frames = traceback.extract_tb(error.__traceback__)
        lines = [f" line {frame.lineno}" for frame in frames if frame.filename == path]
        where = path + "".join(lines[-1:])
        raise InputError(
            f"{where}: {type(error).__name__}: {first_line(error)}; fix the config file"
        ) from error
