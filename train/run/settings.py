"""Config files and dotted overrides: `--config configs/tiny.py --optim.total_steps 20`."""

from __future__ import annotations

import argparse
import ast
import dataclasses
import types
import typing
from collections.abc import Iterable
from typing import Any, TypeVar

from infer.flags.config_file import read_config, read_preset
from infer.program import Parser, local_path
from moa_jax.errors import InputError
from moa_jax.files.places import place

Config = TypeVar("Config")

NO_PRESET = "none"  # says so where a program would choose one
WRITTEN = ("directory", "output", "cache", "tokenizer")  # settings that name what a run writes


def config_parser(prog: str, description: str | None) -> Parser:
    """A parser with `--config` and `--preset`, to which a program adds flags of its own."""
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
    """The `config` that the Python file at `path` defines, with overrides applied in order.

    A preset of the file comes before them. Raises InputError as `read_config` and `read_preset`,
    for an unknown field, for a value of the wrong type or size, and for a URL where files are to be
    written.
    """
    config = read_config(path, kind)
    if preset not in (None, NO_PRESET):
        config = overridden(config, read_preset(path, preset).items())
    config = overridden(config, _pairs(overrides))
    check_paths(config)
    return config


def overridden(config: Config, settings: Iterable[tuple[str, str]]) -> Config:
    """A config with settings by their dotted names; raises InputError as `load_config`."""
    for name, value in settings:
        config = _replace(config, name.split("."), value, name)
    return config


def check_paths(config: Any, above: str = "") -> None:
    """Raises InputError for a path to write, anywhere in a config, that is a URL.

    The folder of a run may be one of an object store.
    """
    for field in dataclasses.fields(config):
        value, name = getattr(config, field.name), f"{above}{field.name}"
        if dataclasses.is_dataclass(value):
            check_paths(value, f"{name}.")
        elif field.name == "cells":  # of a grid
            for cell, settings in value:
                check_paths(settings, f"{cell}: ")
        elif name.endswith("run.directory"):
            place(value)
        elif field.name in WRITTEN and value is not None:
            try:
                local_path(value)
            except argparse.ArgumentTypeError as error:
                raise InputError(f"{name}: {error}") from error


def _pairs(overrides: list[str]) -> list[tuple[str, str]]:
    """`--a.b 1 --c-d=2` as [("a.b", "1"), ("c_d", "2")]."""
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
        pairs.append((name.replace("-", "_"), value))
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
