"""Do client and server hold the same pair? Both compute a few facts and compare them at hello.

Equal facts prove the same kind of drafter and N, the same sizes, tokenizers with the same ids for
tokens (`files/token_ids.py`), and files that agree in every byte of config.json, in every tensor's
name, shape and dtype, and in samples of each tensor's bytes (`files/parts.py`). It does not matter
how tensors are split into files, and a client's folder that leaves some of them out has the facts
of the whole.

Equal facts do not prove that all weights are equal. Another training of the same shapes is
noticed, since it changes nearly every number; damage between two samples is not. Nor are the
facts a defence: a client can send what it likes.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moa_jax.files import folders, parts, token_ids
from moa_jax.pretrained import LoadedDrafter, Target

Pairing = dict[str, str | int]

SHOWN = {  # what a refusal calls the facts that it names; the others go by their keys
    "target_layer_inference": "N (target layers that the drafter reuses)",
    "vocab_size": "the size of the vocabulary",
    "target_sha256": "the target's files",
    "vocabulary": "the tokenizer",
    "drafter_sha256": "the drafter's files",
}


def pairing_of(target: Target, drafter: LoadedDrafter | None) -> Pairing:
    """The facts of a loaded pair; those of the drafter are empty for plain decoding.

    Reads kilobytes of each tensor. Raises OSError for files that have vanished.
    """
    config, drafter_sha256 = target.config, ""
    if drafter is not None and drafter.folder.is_dir():
        drafter_sha256 = parts.model_hash(drafter.folder)
    elif drafter is not None:  # a kind without files: its settings are all there is
        drafter_sha256 = folders.json_hash(dataclasses.asdict(drafter.config))
    tokens = token_ids.read_token_ids(target.folder)
    return {
        "method": drafter.method if drafter else "none",
        "target_layer_inference": getattr(drafter and drafter.config, "target_layer_inference", 0),
        "vocab_size": config.vocab_size,
        "hidden_size": config.block.hidden_size,
        "num_layers": config.num_layers,
        "target_sha256": parts.model_hash(target.folder),
        "vocabulary": "" if tokens is None else token_ids.fingerprint(tokens),
        "drafter_sha256": drafter_sha256,
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


def _shown(value: str | int | None) -> str:
    """A fact as a person reads it: hashes cut short, absent ones named so."""
    if value in (None, ""):
        return "none"
    return value[:12] if isinstance(value, str) else str(value)
