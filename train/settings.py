"""Config files and dotted overrides: `--config configs/tiny.py --optim.total_steps 20`."""

from __future__ import annotations

import ast
import dataclasses
import runpy
import traceback
import types
import typing
from pathlib import Path
from typing import Any, TypeVar

from infer.cli import Parser
from moa_jax.errors import InputError, first_line

Config = TypeVar("Config")


def config_of_flags(
    prog: str, description: str | None, kind: type[Config], arguments: list[str] | None
) -> Config:
    """The config that `--config FILE` and the dotted flags after it describe."""
    parser = Parser(prog, description)
    parser.add_argument("--config", required=True, help="a Python file that defines `config`")
    known, overrides = parser.parse_known_args(arguments)
    return load_config(known.config, kind, overrides)


def load_config(path: str, kind: type[Config], overrides: list[str]) -> Config:
    """The `config` that the Python file at `path` defines, with overrides applied in order.

    Raises InputError for a file that is missing, does not run or has no `config` of `kind`,
    for an unknown field, and for a value of the wrong type or size.
    """
    if not Path(path).is_file():
        raise InputError(f"{path}: no such config file, see the folder configs/")
    config = _run(path).get("config")
    if not isinstance(config, kind):
        found = type(config).__name__
        raise InputError(f"{path}: defines a {found} named `config`, expected {kind.__name__}")
    for name, value in _pairs(overrides):
        config = _replace(config, name.split("."), value, name)
    return config


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


def _pairs(overrides: list[str]) -> list[tuple[str, str]]:
    """`--a.b 1 --c=2` as [("a.b", "1"), ("c", "2")]."""
    pairs, rest = [], list(overrides)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise InputError(f"{flag}: expected an override such as --optim.total_steps 20")
        name, equals, value = flag[2:].partition("=")
        if not equals:
            if not rest:
                raise InputError(f"--{name}: give it a value, as in --{name} VALUE")
            value = rest.pop(0)
        pairs.append((name, value))
    return pairs


def _replace(config: Any, path: list[str], text: str, name: str) -> Any:
    hints = typing.get_type_hints(type(config))
    if path[0] not in hints:
        raise InputError(f"--{name}: no such setting, {path[0]!r} is not among {', '.join(hints)}")
    old = getattr(config, path[0])
    if len(path) > 1:
        if not dataclasses.is_dataclass(old):
            raise InputError(f"--{name}: {path[0]!r} holds a value, not settings")
        new = _replace(old, path[1:], text, name)
    else:
        new = _parse(text, hints[path[0]], name)
    return dataclasses.replace(config, **{path[0]: new})


def _parse(text: str, hint: Any, name: str) -> Any:
    """`text` as a value of the annotated type: numbers, booleans, literals, comma lists."""
    if hint is str:
        return text
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if text in options:
            return text
        raise InputError(f"--{name}: {text!r} is not one of {', '.join(options)}")
    if origin is tuple:
        return tuple(_parse(part, options[0], name) for part in text.split(",") if part)
    if origin is types.UnionType:
        none = text.lower() == "none"
        return None if none else _parse(text, options[0], name)
    if hint is bool and text.lower() in ("true", "false"):
        return text.lower() == "true"
    try:
        value = ast.literal_eval(text)
    except (ValueError, SyntaxError):
        value = text
    if hint is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if type(value) is not hint:
        raise InputError(f"--{name}: {text!r} is not {hint.__name__}")
    return value
