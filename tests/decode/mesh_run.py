"""Decodes on meshes of virtual devices and on one: run by tests in processes of their own.

python -m tests.decode.mesh_run CASE ...     with CASE = DRAFTER:SHAPE:MESH, as moa-1:tree:tensor=4

A DRAFTER with a slash is the folder of a recorded pair, whose texts are compared with it; one with
+int8 has weights of eight bits, read from a file; one with +words drafts from half of the tokens.

Prints a line of JSON for each case: the texts on both, and how many tokens rounds committed. The
text alone is plain decoding's, but for LIKE_ALONE, whose drafter decodes alone, too.
"""

from __future__ import annotations

import functools
import itertools
import json
import queue
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding

from infer.bench.random_pair import random_drafter, random_target
from infer.cli.flags.mesh import mesh_sizes
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
from moa_jax.decode.draft_vocabulary import DraftVocabulary
from moa_jax.decode.state import StaticConfig
from moa_jax.engine import Engine, Request
from moa_jax.engine.program_cache import ProgramName
from moa_jax.files import device_loader
from moa_jax.model import attention, convert, quantize, sharding
from moa_jax.model.cache import KV, HiddenCache
from moa_jax.model.sharding import decoding_mesh
from moa_jax.pretrained import (
    LoadedDrafter,
    Target,
    describe_target,
    save_drafter,
    save_target,
    table_of,
)
from moa_jax.speculation.controller import ShapeChoice
from moa_jax.speculation.cost_table import CostTable
from moa_jax.split.server_target import DraftRequest, TargetSlots
from tests.conftest import arrays_of
from tests.pairs import as_recorded, options_of_case, prompts_of

BLOCK = BlockConfig(32, 8, 4, 8, 48, 1e-5, 10000.0, None)  # 4 kv heads: 8 devices hold copies
CONFIG = TargetConfig("llama", 64, 2, BLOCK, False, 256)  # layers are most of a program's time
SMALL = TargetConfig("llama", 64, 1, BLOCK, True, 256)
MOA = (2, 24, 4, 24, 4, 16)
KINDS: dict[str, Any] = {
    "moa-0": ("moa", MoaConfig(*MOA)),
    "moa-1": ("moa", MoaConfig(*MOA, target_layer_inference=1)),
    "eagle": ("eagle", EagleConfig(2, 24)),
    "eagle3": ("eagle3", Eagle3Config(4, 24, None, tuple(range(0, 64, 2)), (0, 1, 1))),
    "glide": ("glide", GlideConfig(2, 24, 3)),
    "independent": ("independent", IndependentConfig(SMALL)),
    "lookup": ("lookup", LookupConfig()),
}
LONG = 16  # rows of caches that count as long here, where several texts are on a device
SHAPES = {
    "plain": DraftShape(1),
    "chain": DraftShape(4),
    "tree": DraftShape(4, 3, 8),
    "wide": DraftShape(2, 16, 40),  # of 64 tokens: some are accepted whatever a drafter thinks
    "drawn": DraftShape(4, sampled=True),
    "auto": DraftShape(4),  # and plain, in turns
}
LIKE_ALONE = {("moa-0", "drawn")}
PROMPTS = [[5, 17, 60, 33, 9, 5, 17], [50, 3, 44], [7], [2, 4, 8, 16, 32]]
LAWS = (
    Sampling(),
    Sampling(temperature=0.7, top_k=20, top_p=0.9, seed=3),
    Sampling(0.9, repetition_penalty=1.2, seed=4),
    Sampling(),
)
NEW, NO_STOP = 32, []


def calm(found: Any) -> Any:
    """Blocks that add little to what the last token's embedding says: drafts agree now and then."""

    def of(path: tuple[Any, ...], leaf: jax.Array) -> jax.Array:
        names = [getattr(step, "key", None) for step in path]
        grown = 20 if names[-1] in ("embed", "lm_head", "head") else 4
        return leaf if leaf.ndim == 1 else grown * leaf

    return found._replace(params=jax.tree.map_with_path(of, found.params))


class NamedPair(NamedTuple):
    """What decodes: a drafter of KINDS, or anything else for none, and where."""

    name: str
    mesh: Mesh | None

    @property
    def weights(self) -> str | None:
        return "int8" if "+int8" in self.name else None

    @property
    def vocabulary(self) -> DraftVocabulary | None:
        """Every other token."""
        ids_U = np.arange(0, CONFIG.vocab_size, 2)
        return DraftVocabulary(ids_U, CONFIG.vocab_size) if "+words" in self.name else None

    @property
    def pair(self) -> tuple[Target, LoadedDrafter | None]:
        if self.weights:
            return stored(self.name.partition("+")[0], self.mesh, self.weights)
        return target(self.mesh), drafter(self.name.partition("+")[0], self.mesh)


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
def folder_of(name: str) -> Path:
    """The pair in files."""
    folder, draft = Path(tempfile.mkdtemp()), drafter(name, None)
    save_target(folder / "target", CONFIG, target(None).params, dtype=jnp.float32)
    where = describe_target(folder / "target")
    save_drafter(folder / "draft", draft.method, draft.config, draft.params, where)
    return folder


@functools.cache
def stored(name: str, mesh: Mesh | None, weights: str | None) -> tuple[Target, LoadedDrafter]:
    folder = folder_of(name)
    loaded = load_target(folder / "target", jnp.float32, weights=weights, mesh=mesh)
    return loaded, load_drafter(folder / "draft", loaded, weights=weights)


def costs_of(batches: Sequence[int]) -> CostTable:
    """A chain costs little more than plain decoding."""
    costs = CostTable()
    for batch in batches:
        costs.put(batch, SHAPES["plain"], 64, 1.0)
        costs.put(batch, SHAPES["chain"], 64, 1.35)
    return costs


@functools.cache
def decoded(name: str, shape: str, mesh: Mesh | None, likely: int | None) -> list[dict[str, Any]]:
    """Uneven prompts side by side, two greedy and two sampled."""
    asked = NamedPair(name, mesh)
    loaded, draft = asked.pair
    rest: dict[str, Any] = {"vocabulary": asked.vocabulary if draft else None, "chunk": 16}
    if shape == "auto":
        rest |= {"ways": (SHAPES["plain"],), "costs": costs_of([len(PROMPTS)])}
    session = Session(loaded, draft, SHAPES[shape], top_logprobs=likely, **rest)
    assert session.mesh == mesh
    if shape == "auto":  # in turns, whatever is accepted
        turns = itertools.cycle([(SHAPES["auto"], 2), (SHAPES["plain"], 3)])
        session.controller.next = lambda *costs, **lag: ShapeChoice(*next(turns))
    found = session.generate(PROMPTS, NEW, NO_STOP, LAWS)
    if mesh is not None:
        state = session.start(PROMPTS, NEW, NO_STOP, LAWS)[0]
        assert_is_split(state, len(PROMPTS), mesh, session.setup)
    return [
        {
            "tokens": row.token_ids,
            "accepted": row.accept_lengths,
            "drafted": row.drafted_levels,
            "logprobs": [likely.logprob for likely in row.logprobs],
        }
        for row in found
    ]


def assert_is_split(state: Any, rows: int, mesh: Mesh, setup: StaticConfig) -> None:
    """Caches are cut by heads, kept states by features, both by rows, where these divide."""
    kept = [part for part in jax.tree.leaves(state, is_leaf=is_kept) if is_kept(part)]
    assert sum(isinstance(part, KV) for part in kept) >= CONFIG.num_layers
    taps = setup.drafter and setup.drafter.taps
    sets_aside = setup.catches_up and bool(taps.streams or taps.hidden)
    assert any(isinstance(part, HiddenCache) for part in kept) == sets_aside
    for part in kept:
        axes = {0: "data", 1 if isinstance(part, KV) else 2: "tensor"}
        for leaf in part:
            sizes = list(leaf.shape)
            assert sizes[0] == rows
            for axis, name in axes.items():
                if sizes[axis] % mesh.shape[name] == 0:
                    sizes[axis] //= mesh.shape[name]
            assert {shard.data.shape for shard in leaf.addressable_shards} == {tuple(sizes)}


def is_kept(part: Any) -> bool:
    return isinstance(part, KV | HiddenCache)


def served(name: str, shape: str, mesh: Mesh | None) -> list[dict[str, Any]]:
    """The same requests by an engine, which has fewer seats than there are requests."""
    rest: dict[str, Any] = {"num_slots": 2, "max_tokens": 64, "chunk": 16}
    if shape == "auto":
        shape = "tree"
        rest |= {"ways": (SHAPES["plain"], SHAPES["chain"]), "costs": costs_of([1, 2])}
    engine = Engine(*NamedPair(name, mesh).pair, SHAPES[shape], **rest)
    engine.start()
    state, _ = engine.programs.run(ProgramName("empty"), None)
    assert_is_split(state.round, engine.programs.num_slots, mesh, engine.session.setup)
    heard: list[queue.SimpleQueue] = []
    for prompt, law in zip(PROMPTS, LAWS, strict=True):
        heard.append(queue.SimpleQueue())
        engine.submit(Request(tuple(prompt), NEW, (), law), heard[-1].put)
    rows = []
    for outputs in heard:
        tokens: list[int] = []
        while not (one := outputs.get(timeout=300)).finish_reason:
            tokens += one.token_ids
        found = {"tokens": tokens + one.token_ids, "finish": one.finish_reason}
        rows.append(found | {"error": one.error})
    engine.close()
    return rows


def verified(name: str, mesh: Mesh | None) -> list[dict[str, Any]]:
    """The same texts by the target's half for clients, whose drafts are right but for the last."""
    loaded = target(mesh)
    slots = TargetSlots(
        loaded, drafter(name, mesh), num_slots=3, max_tokens=64, max_nodes=4, chunk=16
    )
    (where,) = {leaf.sharding.spec for leaf in jax.tree.leaves(slots._caches)}
    assert where[1] == "tensor", where
    rows = []
    texts = decoded("none", "plain", None, 2)
    for text, prompt, law in zip(texts, PROMPTS, LAWS, strict=True):
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


def streamed(name: str, weights: str | None, mesh: Mesh) -> dict[str, Any]:
    """What devices got while a pair was read from its files: arrays by how they were cut.

    Whatever is put on devices is in parts, so at no time does one of them hold a whole.
    """
    put, parts = device_loader._put, []

    def watched(array: np.ndarray, where: Any) -> jax.Array:
        placed = put(array, where)
        parts.append(placed)
        return placed

    folder_of(name)  # which needs whole weights
    device_loader._put = watched
    try:
        loaded, draft = stored.__wrapped__(name, mesh, weights)
    finally:
        device_loader._put = put
    tables = (
        (loaded.params, convert.target_table(CONFIG)),
        (draft.params, table_of(draft, CONFIG)),
    )
    wrong = []
    for params, table in tables:
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
    return {"wrong": wrong, "put": len(parts), "share": on_device / whole}


def recorded_on(folder: str, shape: str, mesh: Mesh) -> list[dict[str, Any]]:
    """The recorded texts of the authors' code, told to be right or not, and what was accepted."""
    place = Path(folder)
    loaded = load_target(place / "target", jnp.float32, mesh=mesh)
    draft = load_drafter(place / "draft", loaded, dtype=jnp.float32, **options_of_case(place))
    session, rows = Session(loaded, as_recorded(draft), SHAPES[shape]), []
    prompts = list(prompts_of(arrays_of(place / "generate.npz")))
    longest = max(len(answer) for _, _, answer in prompts)
    found = session.generate([prompt for _, prompt, _ in prompts], longest, NO_STOP)
    for row, (_, _, answer) in zip(found, prompts, strict=True):
        told = row.token_ids[: len(answer)]
        rows.append({"tokens": told, "wanted": answer, "accepted": row.accept_lengths})
    return rows


def outcome(case: str) -> dict[str, Any]:
    name, shape, sizes = case.split(":")
    mesh = decoding_mesh(**mesh_sizes(sizes))
    attention.LONG = LONG if "data=2" in sizes else 512
    if "/" in name:
        return {"mesh": recorded_on(name, shape, mesh)}
    weights = NamedPair(name, mesh).weights
    if shape == "files":
        return streamed(name.partition("+")[0], weights, mesh)
    if shape == "split":
        return {"mesh": verified(name, mesh), "alone": decoded("none", "plain", None, 2)}
    if shape.startswith("engine-"):
        on_mesh = served(name, shape.removeprefix("engine-"), mesh)
        return {"mesh": on_mesh, "alone": decoded("none", "plain", None, 2)}
    if (name, shape) in LIKE_ALONE:
        return {"mesh": decoded(name, shape, mesh, 2), "alone": decoded(name, shape, None, 2)}
    plain = decoded(f"{name.partition('+')[0]}+int8" if weights else "none", "plain", None, 2)
    return {"mesh": decoded(name, shape, mesh, 2 if shape == "plain" else None), "alone": plain}


def main() -> None:
    jax.config.update("jax_num_cpu_devices", 8)
    batches: set[int] = set()  # of a device's texts that were read as far as they were used
    as_far_as_used = attention._as_far_as_used

    def noted(q_BKGTE: jax.Array, kv: KV, *rest: jax.Array) -> jax.Array:
        batches.add(kv.k_BKSE.shape[0])
        return as_far_as_used(q_BKGTE, kv, *rest)

    attention._as_far_as_used = noted
    for case in sys.argv[1:]:
        batches.clear()
        found = {"case": case} | outcome(case)
        print(json.dumps(found | {"as_far_as_used": sorted(batches)}), flush=True)


if __name__ == "__main__":
    main()
