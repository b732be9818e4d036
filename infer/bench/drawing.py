"""Checks, files and grids shared by all plots."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_jax.errors import InputError
from moa_jax.files.paths import check_file
from moa_jax.files.whole_files import write_whole

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
DPI = 150


def check_plots(path: Path, flag: str = "--plot") -> None:
    """Raise InputError if matplotlib is missing, or `path` cannot be written as a picture."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{flag}: matplotlib is missing; pip install 'moa-jax[plots]'")
    if path.suffix not in FORMATS or not path.parent.is_dir():
        raise InputError(f"{flag} {path}; name a {', '.join(FORMATS)} file in a folder that exists")
    check_file(flag, path, "picture")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture atomically, in the format of the path's suffix."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, format=path.suffix[1:])
    write_whole(path, drawn.getvalue())


def tidy(panel: Any, axis: str = "both") -> None:
    """Draw a pale grid below the data, and hide the top and right spines."""
    panel.grid(axis=axis, color="0.9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)
