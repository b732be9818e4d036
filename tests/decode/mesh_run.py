"""Decodes on meshes of virtual devices; tests run this module in separate processes.

python -m tests.decode.mesh_run CASE@MESH ...     as batch:moa-1:tree@tensor=4

A CASE is one of test_same_text.py, or files:DRAFTER. Prints one line of JSON per case: the result
on the mesh, and the expected one.
"""

from __future__ import annotations

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding

from infer.cli.flags.mesh import mesh_sizes
from moa_jax import load_drafter, load_target
from moa_jax.config import BlockConfig, TargetConfig
from moa_jax.files import device_loader
from moa_jax.model import attention, convert, quantize, sharding
from moa_jax.pretrained import describe_target, save_drafter, save_target, table_of
from tests.decode import test_same_text
from tests.decode.test_same_text import (
    arguments_of,
    case_of,
    drafted_texts,
    plain_texts,
    session_of,
)
from tests.decode.tiny import TinyPairs

# Four heads of keys and values, for four devices.
CONFIG = TargetConfig("llama", 64, 2, BlockConfig(32, 8, 4, 8, 48, 1e-5, 10000.0, None), False, 256)
WIDE = TinyPairs(CONFIG, heads=4)
LONG = 16  # limit of a short cache here, if several rows are on a device


def drafted_on(name: str, mesh: Mesh) -> dict[str, Any]:
    case, driver = case_of(name, WIDE, mesh), name.partition(":")[0]
    with pytest.MonkeyPatch.context() as patch:
        if driver == "batch":
            session = session_of(case)
            patch.setattr(test_same_text, "session_of", lambda _: session)
        found = drafted_texts(name, case)
    if driver == "batch":  # in the program that has read these prompts
        columns = zip(*map(arguments_of, case.requests), strict=True)
        assert_is_split(session.start(*map(list, columns))[0].round, mesh)
    expected = plain_texts(name, case, WIDE)
    return {"found": found.token_ids, "accepted": found.num_accepted, "expected": expected}


def assert_is_split(state: Any, mesh: Mesh) -> None:
    """Asserts that caches are split by heads, kept states by features, both by rows."""
    for leaf, where in zip(
        jax.tree.leaves(state), jax.tree.leaves(sharding.of_state(state, mesh)), strict=True
    ):
        assert {each.data.shape for each in leaf.addressable_shards} == {
            where.shard_shape(leaf.shape)
        }


def streamed(name: str, mesh: Mesh) -> dict[str, Any]:
    """Returns the arrays that devices receive while a pair is read from its files, by partition.

    Every array is sent in parts, so a device never holds a whole array.
    """
    (name, *options), folder = name.split("+"), Path(tempfile.mkdtemp())
    pairs = WIDE.experts if "experts" in options else WIDE
    saved, config = pairs.drafter(name), pairs.config
    save_target(folder / "target", config, pairs.target().params, dtype=jnp.float32)
    described = describe_target(folder / "target")
    save_drafter(folder / "draft", saved.method, saved.config, saved.params, described)
    put, parts = device_loader._put, []

    def watched(array: np.ndarray, where: Any) -> jax.Array:
        parts.append(put(array, where))
        return parts[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(device_loader, "_put", watched)
        weights = "int8" if "int8" in options else None
        target = load_target(folder / "target", jnp.float32, mesh=mesh, weights=weights)
        drafter = load_drafter(folder / "draft", target, weights=weights)
    wrong = []
    for params, table in (
        (target.params, convert.target_table(config)),
        (drafter.params, table_of(drafter, config)),
    ):
        for path, packing in table.items():
            leaf = convert.leaf_at(params, path)
            spec = sharding.dividing(packing.axes, packing.shape, mesh)
            where = quantize.sharding_as(path[-1:], leaf, NamedSharding(mesh, spec))
            for one, at in zip(jax.tree.leaves(leaf), jax.tree.leaves(where), strict=True):
                held = {shard.data.shape for shard in one.addressable_shards}
                if held != {at.shard_shape(one.shape)}:
                    wrong.append([*map(str, path)])
    whole = sum(part.nbytes for part in parts)
    on_device = sum(shard.data.nbytes for part in parts for shard in part.addressable_shards[:1])
    return {"found": wrong, "expected": [], "put": len(parts), "share": on_device / whole}


def outcome(case: str) -> dict[str, Any]:
    name, sizes = case.split("@")
    mesh = sharding.decoding_mesh(**mesh_sizes(sizes))
    attention.LONG = LONG if "data=2" in sizes else 512
    driver, _, drafter = name.partition(":")
    return streamed(drafter, mesh) if driver == "files" else drafted_on(name, mesh)


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 4)
    for case in sys.argv[1:]:
        print(json.dumps({"case": case} | outcome(case)), flush=True)


if __name__ == "__main__":
    main()
