"""Compares the model pairs of client and server during the Hello handshake.

Equal pairings prove the same drafter method and N, the same sizes, tokenizers with the same token
ids (`files/token_ids.py`), and files with the same config.json bytes, the same name, shape and
dtype per tensor, and the same sampled bytes per tensor (`files/client_files.py`). The split of
tensors into files does not matter. A client folder that omits some tensors has the pairing of the
complete folder.

Equal pairings do not prove that all weights are equal. A retrained model of the same shapes is
detected, because training changes nearly every number; damage between two samples is not
detected. A pairing is not a security measure: a client can send any values.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from moa_jax.files import client_files, model_folder, token_ids
from moa_jax.pretrained import LoadedDrafter, Target

Pairing = dict[str, str | int]

SHOWN = {  # names in error messages; other entries are named by their keys
    "target_layer_inference": "N (target layers that the drafter reuses)",
    "vocab_size": "the size of the vocabulary",
    "target_sha256": "the target's files",
    "vocabulary": "the tokenizer",
    "drafter_sha256": "the drafter's files",
}


def pairing_of(target: Target, drafter: LoadedDrafter | None) -> Pairing:
    """The pairing of a loaded target and drafter; `drafter_sha256` is empty without a drafter.

    Reads a few KiB per tensor. Raises OSError for missing files.
    """
    config, drafter_sha256 = target.config, ""
    if drafter is not None and drafter.folder.is_dir():
        drafter_sha256 = client_files.model_hash(drafter.folder)
    elif drafter is not None:  # a method without files: its config identifies it
        drafter_sha256 = model_folder.json_hash(dataclasses.asdict(drafter.config))
    tokens = token_ids.read_token_ids(target.folder)
    return {
        "method": drafter.method if drafter else "none",
        "target_layer_inference": getattr(drafter and drafter.config, "target_layer_inference", 0),
        "vocab_size": config.vocab_size,
        "hidden_size": config.block.hidden_size,
        "num_layers": config.num_layers,
        "target_sha256": client_files.model_hash(target.folder),
        "vocabulary": "" if tokens is None else token_ids.fingerprint(tokens),
        "drafter_sha256": drafter_sha256,
    }


def mismatch(server: Mapping[str, str | int], client: Mapping[str, str | int]) -> str:
    """The first entry in which two pairings differ, with both values; "" if they are equal.

    An entry that one side lacks counts as different: a newer version may have added the entry.
    """
    for key in (*server, *(key for key in client if key not in server)):
        ours, theirs = (_shown(facts.get(key)) for facts in (server, client))
        if server.get(key) != client.get(key):
            return f"{SHOWN.get(key, key)}: {ours} on the server, {theirs} on the client"
    return ""


def _shown(value: str | int | None) -> str:
    """A value for error messages: strings cut to 12 characters, "none" if absent or empty."""
    if value in (None, ""):
        return "none"
    return value[:12] if isinstance(value, str) else str(value)
