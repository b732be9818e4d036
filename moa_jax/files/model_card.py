"""Model cards: README.md of a drafter's folder, with the front matter that the hub reads.

A line of a card marks the card as this library's. A README.md without that line stays as it is.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

from moa_jax.files.json_text import to_json
from moa_jax.files.paths import is_stored
from moa_jax.files.registry import FileLayout
from moa_jax.files.whole_files import write_whole

FILE = "README.md"
TAG = "moa-jax"  # on the hub
UNKNOWN = "unknown"  # also the hub's name of a licence that nothing states
_MARK = "<!-- Written by moa-jax, which replaces this file: remove this line to keep changes. -->"
_TRAINING = "\n## Training\n\n"


class Card(NamedTuple):
    """The facts of a model card."""

    name: str  # of the repository, or of the folder
    method: str
    layout: FileLayout
    target: str  # a hub id, or the name of a folder
    depth: int = 5  # of the drafter's default chain, root included
    flags: str = ""  # of infer.generate, for what the layout does not state
    license: str = UNKNOWN  # of the weights, as the hub spells licences
    datasets: tuple[str, ...] = ()  # hub ids
    training: str = ""  # Markdown


def write_card(folder: Path, card: Card) -> str | None:
    """Writes README.md; returns a notice if another writer's README.md stays, else None."""
    path, text = folder / FILE, _text(card)
    if path.exists() and _MARK not in path.read_bytes().decode(errors="replace"):
        return f"{path} stays as it is: it is not a card that moa-jax wrote"
    if is_stored(path):
        path.write_text(text)
    else:
        write_whole(path, text)
    return None


def with_training_of(card: Card, folder: Path, name: str) -> Card:
    """A card with the training, datasets and licence of a folder's card, if it has one of ours.

    Of another writer's card only the licence is taken, and the training is that of `name`. A
    licence of `card` itself is kept.
    """
    path = folder / FILE
    text = path.read_bytes().decode(errors="replace") if path.is_file() else ""
    front = re.match(r"---\s*\n(.*?)^---", text, re.DOTALL | re.MULTILINE)
    keys = re.findall(r"^(license|datasets): *(.*)$", front[1] if front else "", re.MULTILINE)
    stated = dict(keys)
    if card.license == UNKNOWN:
        card = card._replace(license=stated.get("license", "").strip("\"' \r") or UNKNOWN)
    if _MARK not in text:
        return card._replace(training=f"The drafter was converted from {_link(name)}.\n")
    return card._replace(
        datasets=tuple(re.findall(r'"([^"]+)"', stated.get("datasets", ""))),
        training=text.partition(_TRAINING)[2],
    )


def _text(card: Card) -> str:
    parts = [_front_matter(card), f"{_MARK}\n\n# {card.name}\n\n", _summary(card), _usage(card)]
    return "".join([*parts, _TRAINING, card.training or "Not recorded.\n"])


def _front_matter(card: Card) -> str:
    """YAML whose values are JSON, which YAML contains."""
    is_speculators = card.layout == "speculators"
    values = {
        "library_name": "speculators" if is_speculators else "moa-jax",
        "license": card.license,
        "base_model": card.target if "/" in card.target else None,  # the hub refuses other names
        "tags": ["speculative-decoding", "draft-model", card.method, TAG],
        "datasets": list(card.datasets),
    }
    lines = [f"{name}: {to_json(value)}\n" for name, value in values.items() if value]
    return "".join(["---\n", *lines, "---\n"])


def _summary(card: Card) -> str:
    licence = f"The licence of the weights is {card.license}.\n"
    if card.license == UNKNOWN:
        licence = "The licence of the weights is unknown: nothing has stated it.\n"
    return (
        f"A drafter of kind `{card.method}` for speculative decoding with the target "
        f"{_link(card.target)}. The drafter proposes tokens and the target verifies them, so the "
        f"text is the target's own. {licence}"
    )


def _usage(card: Card) -> str:
    pair = " ".join(filter(None, (f"--target {card.target} --draft {card.name}", card.flags)))
    text = (
        "\n## Use\n\nWith MoA-JAX:\n\n"
        f'    python -m infer.generate {pair} --prompt "Good morning."\n'
    )
    if card.method != "eagle3":
        return text
    if card.layout != "speculators":
        return text + (
            "\nvLLM reads the layout of the speculators library, which this command writes:\n\n"
            f"    python -m infer.convert {pair} --to speculators --output NEW\n"
        )
    tokens = max(1, card.depth - 1)
    config = {"method": "eagle3", "model": card.name, "num_speculative_tokens": tokens}
    return text + (
        f"\nWith vLLM:\n\n    vllm serve {card.target} --speculative-config '{to_json(config)}'\n"
    )


def _link(name: str) -> str:
    return f"[{name}](https://huggingface.co/{name})" if "/" in name else f"`{name}`"
