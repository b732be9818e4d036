"""Pictures: what all of them share, and speedup against the size of drafts."""

from __future__ import annotations

import importlib.util
import io
from pathlib import Path
from typing import TYPE_CHECKING, Any

from moa_jax.errors import InputError
from moa_jax.files.folders import write_whole
from moa_jax.files.places import check_file

if TYPE_CHECKING:
    from matplotlib.figure import Figure

FORMATS = (".png", ".svg", ".pdf")
DPI = 150
AXES = (("chain", "depth", "depth of a chain"), ("tree", "total_tokens", "drafted nodes of a tree"))


def check_plots(path: Path, flag: str = "--plot") -> None:
    """Raise InputError where matplotlib is missing, or the path is no place for a picture."""
    if importlib.util.find_spec("matplotlib") is None:
        raise InputError(f"{flag}: matplotlib is missing: pip install 'moa-jax[plots]'")
    if path.suffix not in FORMATS or not path.parent.is_dir():
        raise InputError(f"{flag} {path}: name a {', '.join(FORMATS)} file in a folder that exists")
    check_file(flag, path, "picture")


def save_figure(figure: Figure, path: Path) -> None:
    """Write a picture, whole or not at all, in the format that its name ends with."""
    drawn = io.BytesIO()
    figure.savefig(drawn, dpi=DPI, format=path.suffix[1:])
    write_whole(path, drawn.getvalue())


def colour(index: int) -> Any:
    """The colour of a series."""
    from matplotlib import colormaps

    return colormaps["tab10"](index % 10)


def tidy(panel: Any, axis: str = "both") -> None:
    """A pale grid behind the figures, and no frame above and to the right."""
    panel.grid(axis=axis, color="0.9", linewidth=0.8)
    panel.set_axisbelow(True)
    panel.spines[["top", "right"]].set_visible(False)


def plot_speedups(modes: list[dict[str, Any]], device: str, path: Path) -> None:
    """Medians with their quartiles, and tau beside them; the line at 1 is plain decoding."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 3.5), layout="constrained")
    panels = figure.subplots(1, 2, sharey=True)
    for panel, (mode, key, label) in zip(panels, AXES, strict=True):
        rows = [row for row in modes if row["mode"] == mode and row["speedup"] is not None]
        rows.sort(key=lambda row: row[key])
        x, y = [row[key] for row in rows], [row["speedup"] for row in rows]
        low, high = (
            zip(*(row["speedup_quartiles"] for row in rows), strict=True) if rows else ((), ())
        )
        panel.fill_between(x, low, high, alpha=0.2)
        panel.plot(x, y, marker="o")
        for row in rows:
            panel.annotate(f"tau {row['tau']:.2f}", (row[key], row["speedup"]), fontsize=8)
        panel.axhline(1.0, color="gray", linewidth=1)
        panel.set_xlabel(label)
    panels[0].set_ylabel("speedup over plain decoding")
    figure.suptitle(device)
    save_figure(figure, path)
