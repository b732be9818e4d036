"""Decodes on meshes of virtual devices and on one: run by tests in processes of their own.

python -m tests.decode.mesh_run CASE ...     with CASE = DRAFTER:SHAPE:MESH, as moa-3:tree:tensor=4

A DRAFTER with a slash is the folder of a recorded pair, whose texts are compared with it.

Prints a line of JSON for each case: the texts on both, and how many tokens rounds committed.
"""

from __future__ import annotations

import functools
import json
import queue
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from infer.flags.mesh import mesh_sizes
from moa_jax import Session, load_drafter, load_target
from moa_jax.config import (
    BlockConfig,
    DraftShape,
    Eagle3Config,
    EagleConfig,
    GlideConfig,
    IndependentConfig,
    LookupConfig,
    MoaConfig,
    Sampling,
    TargetConfig,
)
from moa_jax.decode.engine import Engine, Request
from moa_jax.measure.random_pair import random_drafter, random_target
from moa_jax.model.sharding import decoding_mesh
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.split.slots import DraftRequest, Slots
from tests.conftest import arrays_of
from tests.pairs import prompts_of

BLOCK = BlockConfig(32, 8, 4, 8, 48, 1e-5, 10000.0, None)  # 4 kv heads: 8 devices hold copies
CONFIG = TargetConfig("llama", 64, 4, BLOCK, False, 256)
SMALL = TargetConfig("llama", 64, 1, BLOCK, True, 256)
MOA = (2, 24, 4, 24, 4, 16)
KINDS: dict[str, Any] = {
    "moa-0": ("moa", MoaConfig(*MOA)),
    "moa-3": ("moa", MoaConfig(*MOA, target_layer_inference=3)),
    "eagle": ("eagle", EagleConfig(2, 24)),
    "eagle3": ("eagle3", Eagle3Config(4, 24, draft_ids=tuple(range(0, 64, 2)))),
    "glide": ("glide", GlideConfig(2, 24, 3)),
    "independent": ("independent", IndependentConfig(SMALL)),
    "lookup": ("lookup", LookupConfig()),
}
SHAPES = {
    "plain": DraftShape(1),
    "chain": DraftShape(4),
    "tree": DraftShape(4, 3, 8),
    "wide": DraftShape(2, 16, 40),  # of 64 tokens: some are accepted whatever a drafter thinks
}
PROMPTS = [[5, 17, 60, 33, 9, 5, 17], [50, 3, 44], [7], [2, 4, 8, 16, 32]]
LAWS = (
    Sampling(),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=3),
    Sampling(0.9, repetition_penalty=1.2, seed=4),
    Sampling(),
)
NEW, NO_STOP = 16, []


def calm(found: Any) -> Any:
    """Blocks that add little to what the last token's embedding says: drafts agree now and then."""

    def of(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = [getattr(step, "key", None) for step in path]
        grown = 20 if names[-1] in ("embed", "lm_head", "head") else 4
        return leaf if leaf.ndim == 1 else grown * leaf

    return found._replace(params=jax.tree.map_with_path(of, found.params))


@functools.cache
def target(mesh: Mesh | None) -> Target:
    return calm(random_target(CONFIG, jnp.float32, Path("tiny"), mesh=mesh))


@functools.cache
def drafter(name: str, mesh: Mesh | None) -> LoadedDrafter | None:
    if name not in KINDS:
        return None
    method, config = KINDS[name]
    return calm(random_drafter(method, config, target(mesh), jnp.float32))


@functools.cache
def decoded(name: str, shape: str, mesh: Mesh | None) -> list[dict[str, Any]]:
    """Uneven prompts side by side, two greedy and two sampled."""
    session = Session(target(mesh), drafter(name, mesh), SHAPES[shape], top_logprobs=2)
    assert session.mesh == mesh
    found = session.generate(PROMPTS, NEW, NO_STOP, LAWS)
    return [
        {
            "tokens": row.token_ids,
            "accepted": row.accept_lengths,
            "logprobs": [likely.logprob for likely in row.logprobs],
        }
        for row in found
    ]


def served(name: str, shape: str, mesh: Mesh | None) -> list[dict[str, Any]]:
    """The same requests by an engine, which has fewer seats than there are requests."""
    engine = Engine(
        target(mesh), drafter(name, mesh), SHAPES[shape], num_slots=2, max_tokens=64, chunk=16
    )
    engine.start()
    heard: list[queue.SimpleQueue] = []
    for prompt, law in zip(PROMPTS, LAWS, strict=True):
        heard.append(queue.SimpleQueue())
        engine.submit(Request(tuple(prompt), NEW, (), law), heard[-1].put)
    rows = []
    for news in heard:
        tokens: list[int] = []
        while not (one := news.get(timeout=300)).finish:
            tokens += one.token_ids
        rows.append({"tokens": tokens + one.token_ids, "finish": one.finish, "error": one.error})
    engine.close()
    return rows


def verified(name: str, mesh: Mesh | None) -> list[dict[str, Any]]:
    """The same texts by the target's half for clients, whose drafts are right but for the last."""
    loaded = target(mesh)
    slots = Slots(loaded, drafter(name, mesh), num_slots=3, max_tokens=64, max_nodes=4, chunk=16)
    (where,) = {leaf.sharding.spec for leaf in jax.tree.leaves(slots._caches)}
    assert where[1] == "tensor", where
    rows = []
    for text, prompt, law in zip(decoded(name, "plain", None), PROMPTS, LAWS, strict=True):
        slot = slots.open(law, NO_STOP, len(prompt) + NEW, len(prompt))
        tokens = slots.read(slot, prompt, pick_root=True).tokens[len(prompt) :]
        while len(tokens) < NEW:
            right = text["tokens"][len(tokens) :][:2]
            draft = [*right, (right[-1] + 1) % CONFIG.vocab_size]
            (reply,) = slots.verify([DraftRequest(slot, draft, range(len(draft)))])
            tokens += reply.tokens
        slots.close(slot)
        rows.append({"tokens": tokens})
    return rows


def recorded_on(folder: str, shape: str, mesh: Mesh) -> list[dict[str, Any]]:
    """The recorded texts of the authors' code, told to be right or not, and what was accepted."""
    place = Path(folder)
    loaded = load_target(place / "target", jnp.float32, mesh=mesh)
    reused = json.loads((place / "moa.json").read_text())["train_args"]["target_layer_inference"]
    draft = load_drafter(place / "draft", loaded, dtype=jnp.float32, target_layer_inference=reused)
    session, rows = Session(loaded, draft, SHAPES[shape]), []
    for _, prompt, answer in prompts_of(arrays_of(place / "generate.npz")):
        (row,) = session.generate([prompt], len(answer), NO_STOP)
        rows.append({"tokens": row.token_ids, "wanted": answer, "accepted": row.accept_lengths})
    return rows


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    for case in sys.argv[1:]:
        name, shape, sizes = case.split(":")
        mesh = decoding_mesh(**mesh_sizes(sizes))
        if "/" in name:
            found = {"mesh": recorded_on(name, shape, mesh)}
        elif shape == "split":
            found = {"mesh": verified(name, mesh), "alone": decoded(name, "plain", None)}
        else:
            how, shape = (served, shape[7:]) if shape.startswith("engine-") else (decoded, shape)
            found = {"mesh": how(name, shape, mesh), "alone": decoded(name, shape, None)}
        print(json.dumps({"case": case} | found), flush=True)


if __name__ == "__main__":
    main()
