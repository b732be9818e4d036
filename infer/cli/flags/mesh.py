"""The flag --mesh, for decoding on several devices."""

from __future__ import annotations

import argparse
import math
from typing import Any

import jax
from jax.sharding import Mesh

from infer.cli.program import names, positive
from moa_jax.errors import InputError
from moa_jax.model.sharding import DECODE_AXES, decoding_mesh


def add_mesh_flag(group: Any) -> None:
    """Add --mesh, whose sizes `sharding.decoding_mesh` takes."""
    group.add_argument(
        "--mesh",
        type=mesh_sizes,
        metavar="tensor=T,data=D",
        help="decode on the first T x D devices: heads, feed-forwards and vocabulary are split by "
        "T, the rows of a batch by D; default: one device",
    )


def mesh_sizes(text: str) -> dict[str, int]:
    """Type of --mesh: axis sizes by name; {} for a single device."""
    sizes: dict[str, int] = {}
    for part in names(text):
        name, _, count = part.partition("=")
        if name not in DECODE_AXES or name in sizes:
            raise argparse.ArgumentTypeError(f"{text!r} is not like tensor=4 or tensor=4,data=2")
        sizes[name] = positive(count)
    return sizes if math.prod(sizes.values()) > 1 else {}


def as_flag(sizes: dict[str, int]) -> str:
    """Axis sizes in the format of --mesh."""
    return ",".join(f"{name}={size}" for name, size in sizes.items())


def asked_mesh(args: argparse.Namespace) -> Mesh | None:
    """The mesh of --mesh, or None.

    Raises InputError if the machine has fewer devices, and if a process has no device of the mesh.
    """
    sizes = getattr(args, "mesh", None)  # not all programs that open a target have the flag
    mesh = decoding_mesh(**sizes) if sizes else None
    if jax.process_count() > 1:
        busy = {each.process_index for each in mesh.devices.flat} if mesh else {0}
        if len(busy) < jax.process_count():
            raise InputError(
                f"--mesh uses devices of {len(busy)} of {jax.process_count()} processes; give one "
                f"of all {jax.device_count()} devices, or start fewer processes"
            )
    return mesh
