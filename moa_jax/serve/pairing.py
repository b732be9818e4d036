"""Do client and server hold the same pair? A few facts that both compute and compare at hello.

What equal facts prove: the same kind of drafter and N, the same sizes, and files that agree in
config.json and tokenizer.json (every byte), in the names, sizes and headers of their weights (so
in every tensor's name, shape, dtype and place) and in samples of the weights, spread evenly.
What they do not prove: that all weights are equal. Another training of the same shapes is noticed,
since it changes nearly every number; a file that was edited or damaged between samples is not.
Weights that were split into other files count as other weights, whatever they hold.
None of it is a defence: a client can send any facts that it likes.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Mapping
from pathlib import Path

from moa_jax import folders
from moa_jax.pretrained import LoadedDrafter, Target

Pairing = dict[str, str | int]

SAMPLES, SAMPLE_BYTES = 64, 4096  # of each file of weights; a file not larger is hashed whole
SHOWN = {  # what a refusal calls the facts that it names; the others go by their keys
    "target_layer_inference": "N (target layers that the drafter reuses)",
    "vocab_size": "the size of the vocabulary",
    "target_sha256": "the target's files",
    "tokenizer_sha256": "the tokenizer",
    "drafter_sha256": "the drafter's files",
}


def pairing_of(target: Target, drafter: LoadedDrafter | None) -> Pairing:
    """The facts of a loaded pair; with no drafter, as for plain decoding, its facts are empty.

    Reads kilobytes of each file, not gigabytes. Raises OSError for files that have vanished.
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
    """sha256 over a model folder's config.json and what is read of its weights."""
    digest = hashlib.sha256((folder / "config.json").read_bytes())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"\n{path.name} {path.stat().st_size}\n".encode())
        _add_samples(digest, path)
    return digest.hexdigest()


def _drafter_hash(drafter: LoadedDrafter) -> str:
    """That of its folder; for a kind without files, of its settings."""
    if drafter.folder.is_dir():
        return model_hash(drafter.folder)
    settings = json.dumps(dataclasses.asdict(drafter.config), sort_keys=True)
    return hashlib.sha256(settings.encode()).hexdigest()


def _add_samples(digest: hashlib._Hash, path: Path) -> None:
    """Header and evenly spread blocks of a safetensors file, the last one included."""
    with path.open("rb") as file:
        start = file.read(8)
        header = int.from_bytes(start, "little")  # its length; the loader has checked the file
        digest.update(start + file.read(header))
        begin = file.tell()
        data = path.stat().st_size - begin
        if data <= SAMPLES * SAMPLE_BYTES:
            digest.update(file.read())
            return
        for index in range(SAMPLES):
            file.seek(begin + index * (data - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(file.read(SAMPLE_BYTES))


def _shown(value: str | int | None) -> str:
    """A fact as a person reads it: hashes cut short, absent ones named so."""
    if value in (None, ""):
        return "none"
    return value[:12] if isinstance(value, str) else str(value)
