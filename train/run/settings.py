"""Config files and dotted overrides: `--config configs/tiny.py --optim.total_steps 20`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import os
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from infer.cli.flags.config_file import read_config, read_preset
from infer.cli.program import Parser, local_path
from moa_jax.errors import InputError
from moa_jax.files.paths import is_stored, place

Config = TypeVar("Config")

NO_PRESET = "none"  # no preset, also in programs that choose one
WRITTEN = ("directory", "output", "cache", "tokenizer")  # settings that name what a run writes


def config_parser(prog: str, description: str | None) -> Parser:
    """A parser with `--config` and `--preset`; programs add flags of their own."""
    parser = Parser(prog, description)
    parser.add_argument("--config", required=True, help="a Python file that defines `config`")
    parser.add_argument(
        "--preset",
        help=f"settings for a machine, of those that the config file has, or {NO_PRESET}",
    )
    return parser


def parse_config(
    parser: Parser, kind: type[Config], arguments: list[str] | None
) -> tuple[Config, argparse.Namespace]:
    """The config that `--config FILE` and the dotted flags describe, and the other flags."""
    args, overrides = parser.parse_known_args(arguments)
    return load_config(args.config, kind, overrides, args.preset), args


def load_config(
    path: str, kind: type[Config], overrides: list[str], preset: str | None = None
) -> Config:
    """The `config` that the Python file at `path` defines, with overrides.

    The settings of `preset` apply before the overrides, and `~` is expanded. Raises InputError as
    `read_config`, `read_preset`, `overridden` and `expanded`.
    """
    config = read_config(path, kind)
    chosen = {} if preset in (None, NO_PRESET) else read_preset(path, preset)
    return expanded(overridden(config, [*chosen.items(), *_pairs(overrides)]))


def overridden(config: Config, settings: Iterable[tuple[str, str]]) -> Config:
    """A config with settings replaced by dotted name; the last value of a repeated name counts.

    All settings are replaced together, so their order does not matter to checks. Raises InputError
    for an unknown name, and for a value of the wrong type or size.
    """
    return _replace(config, [(name.split("."), value, name) for name, value in settings])


def expanded(config: Config, above: str = "") -> Config:
    """A config with `~` expanded in all paths to write, and with an absolute `run.directory`.

    Raises InputError for a path that is a URL, but for `run.directory` and `output`, which may be
    in an object store.
    """
    found: dict[str, Any] = {}
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{above}{field.name}"
        if dataclasses.is_dataclass(value):
            found[field.name] = expanded(value, f"{name}.")
        elif field.name == "cells":  # of a grid
            found["cells"] = tuple((cell, expanded(each, f"{cell}: ")) for cell, each in value)
        elif field.name in WRITTEN and value is not None:
            found[field.name] = _written(value, name)
    return dataclasses.replace(config, **found)


def _written(path: str, name: str) -> str:
    if name.endswith(("run.directory", "output")):
        folder = place(path)
        if is_stored(folder):
            return path
        return os.path.abspath(folder) if name.endswith("run.directory") else str(folder)
    try:
        local_path(path)
        return os.path.expanduser(path)  # runs compare the text of decisive paths
    except argparse.ArgumentTypeError as error:
        raise InputError(f"{name}: {error}") from error


def _pairs(overrides: list[str]) -> list[tuple[str, str]]:
    """`--a.b 1 --c-d=2` as [("a.b", "1"), ("c_d", "2")]."""
    pairs, rest = [], list(overrides)
    while rest:
        flag = rest.pop(0)
        if not flag.startswith("--"):
            raise InputError(f"{flag} is not an override; write one such as --optim.total_steps 20")
        name, equals, value = flag[2:].partition("=")
        if not equals:
            if not rest:
                raise InputError(f"--{name}; give it a value, as in --{name} VALUE")
            value = rest.pop(0)
        pairs.append((name.replace("-", "_"), value))
    return pairs


def _replace(config: Config, settings: list[tuple[list[str], str, str]]) -> Config:
    """`config` with settings (path, value, full name) replaced together, as checks see them all."""
    hints = typing.get_type_hints(type(config))
    values: dict[str, Any] = {}
    below: dict[str, list[tuple[list[str], str, str]]] = {}
    for (field, *rest), text, name in settings:
        if field not in hints:
            raise InputError(
                f"no such setting: --{name}; replace {field!r} by one of {', '.join(hints)}"
            )
        if not rest:
            values[field] = _parse(text, hints[field], name)
        elif dataclasses.is_dataclass(getattr(config, field)):
            below.setdefault(field, []).append((rest, text, name))
        else:
            setting = name.removesuffix("." + ".".join(rest))
            raise InputError(f"--{name}: {field!r} is not a group; write --{setting} VALUE")
    values |= {field: _replace(getattr(config, field), inner) for field, inner in below.items()}
    return dataclasses.replace(config, **values)


def _parse(text: str, hint: Any, name: str) -> Any:
    """`text` as a value of the annotated type: numbers, booleans, literals, comma lists."""
    if hint is str:
        return text
    origin, options = typing.get_origin(hint), typing.get_args(hint)
    if origin is typing.Literal:
        if text in options:
            return text
        raise InputError(f"--{name}: {text!r}; choose from {', '.join(options)}")
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
        raise InputError(f"--{name}: {text!r}; write a value of type {hint.__name__}")
    return value
