"""Do client and server hold the same pair? A few facts that both compute and compare at hello.

What equal facts prove: the same kind of drafter and N, the same sizes, and files that agree in
config.json and tokenizer.json (every byte), in every tensor's name, shape and dtype, and in
samples of each tensor's bytes, spread evenly (`files/parts.py`). How the tensors are split into
files is no matter; a client's folder that leaves some of them out has the facts of the whole.
What they do not prove: that all weights are equal. Another training of the same shapes is noticed,
since it changes nearly every number; a tensor that was edited or damaged between samples is not.
None of it is a defence: a client can send any facts that it likes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moa_jax.files import folders, parts
from moa_jax.pretrained import LoadedDrafter, Target

Pairing = dict[str, str | int]

SHOWN = {  # what a refusal calls the facts that it names; the others go by their keys
    "target_layer_inference": "N (target layers that the drafter reuses)",
    "vocab_size": "the size of the vocabulary",
    "target_sha256": "the target's files",
    "tokenizer_sha256": "the tokenizer",
    "drafter_sha256": "the drafter's files",
}


def pairing_of(target: Target, drafter: LoadedDrafter | None) -> Pairing:
    """The facts of a loaded pair; with no drafter, as for plain decoding, its facts are empty.

    Reads kilobytes of each tensor. Raises OSError for files that have vanished.
    """
    config = target.config
    return {
        "method": drafter.method if drafter else "none",
        "target_layer_inference": getattr(drafter and drafter.config, "target_layer_inference", 0),
        "vocab_size": config.vocab_size,
        "hidden_size": config.block.hidden_size,
        "num_layers": config.num_layers,
        "target_sha256": model_hash(target.folder),
        "tokenizer_sha256": folders.file_hash(target.folder / "tokenizer.json") or "",
        "drafter_sha256": _drafter_hash(drafter) if drafter else "",
    }


def mismatch(server: Mapping[str, str | int], client: Mapping[str, str | int]) -> str:
    """Why two pairings do not go together, with both values; "" if they do.

    A fact that one side lacks counts as different: it may be a newer version's.
    """
    for key in (*server, *(key for key in client if key not in server)):
        ours, theirs = (_shown(facts.get(key)) for facts in (server, client))
        if server.get(key) != client.get(key):
            return f"{SHOWN.get(key, key)}: {ours} on the server, {theirs} on the client"
    return ""


def model_hash(folder: Path) -> str:
    """sha256 over a model's config.json and a line on each of its tensors, in order of names."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for name, line in sorted(parts.lines_of(folder).items()):
        digest.update(f"\n{name} {line.dtype} {list(line.shape)} {line.sha256}".encode())
    return digest.hexdigest()


def _drafter_hash(drafter: LoadedDrafter) -> str:
    """That of its folder; for a kind without files, of its settings."""
    if drafter.folder.is_dir():
        return model_hash(drafter.folder)
    settings = json.dumps(dataclasses.asdict(drafter.config), sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()


def _shown(value: str | int | None) -> str:
    """A fact as a person reads it: hashes cut short, absent ones named so."""
    if value in (None, ""):
        return "none"
    return value[:12] if isinstance(value, str) else str(value)
