"""Mode auto: the candidate draft shapes of a session, and their cost table on this machine."""

from __future__ import annotations

import contextlib
import hashlib
import os
import sys
import threading
from pathlib import Path
from typing import Any, Literal

import jax

import moa_jax
from moa_jax.config import DraftShape
from moa_jax.decode.draft_vocabulary import DraftVocabulary
from moa_jax.decode.session import Session
from moa_jax.model.kernels import cpu
from moa_jax.model.sharding import mesh_of, name_of
from moa_jax.pretrained import LoadedDrafter, Target
from moa_jax.speculation.calibrate import Cell, calibrate
from moa_jax.speculation.controller import NO_DRAFT
from moa_jax.speculation.cost_table import CostKey, CostTable, load_costs, pair_hash, save_costs
from moa_jax.version import __version__

CHAINS = (3, 5, 8)  # depths, besides the drafter's own
TREE = {"cpu": DraftShape(5, 4, 16)}  # a CPU verifies few tokens at once
TREE_ELSEWHERE = DraftShape(7, 8, 62)  # the paper's
TIMED = ("model", "drafters", "decode", "engine")  # packages with the code of a round
FOLDER = "costs"  # below the folder of the compilation cache
LENGTH = 64  # tokens in the caches when a round is timed; calls that run alone correct the cost


def ways_of(own: DraftShape, drafter: LoadedDrafter | None = None) -> tuple[DraftShape, ...]:
    """Candidate shapes: plain decoding, `own`, chains, and a tree unless candidates are sampled.

    A drafter without weights gets plain decoding and `own` only: both are compiled before the first
    round, so that the compiler takes no cores from an answer that is hardly drafted.
    """
    if drafter is not None and not drafter.params:
        return NO_DRAFT, own
    chains = tuple(DraftShape(depth, sampled=own.sampled) for depth in CHAINS)
    tree = TREE.get(jax.default_backend(), TREE_ELSEWHERE)
    return tuple(dict.fromkeys((NO_DRAFT, own, *chains, *(() if own.sampled else (tree,)))))


def costs_of(
    target: Target,
    drafter: LoadedDrafter,
    vocabulary: DraftVocabulary | None,
    weights: str | None,
    program: Literal["session", "engine"] = "session",
) -> CostTable:
    """The cost table of this pair on this device; empty before the first measurement.

    On a CPU `cpu.laid_out_for` decides the layout of the weights, and layouts have other costs.
    """
    size = len(vocabulary.ids_U) if vocabulary else target.config.vocab_size
    device, mesh = jax.devices()[0], mesh_of(target.params)
    has_panels = cpu.is_for_few() or device.platform != "cpu"
    kind = device.device_kind
    key = CostKey(
        device_kind=kind if mesh is None else f"{kind}, mesh {name_of(mesh)}",
        dtype=str(target.params["embed"].dtype),
        weights=weights,
        pair=pair_hash(target.config, drafter.method, drafter.config, size),
        cores=_num_cores(),
        program=program if has_panels else f"{program}, whole weights",
        driver=device.client.platform_version,
        moa_jax=f"{__version__}, code {_code_hash()}",
    )
    costs, notice = load_costs(folder(), key)
    if notice:
        print(notice, file=sys.stderr)
    return costs


def fill(session: Session, batch: int = 1, keep: bool = True) -> None:
    """Times the session's shapes if its cost table lacks one; stores the table if `keep`."""
    if _lacks(session, batch):
        print(
            f"compiling and timing {len(session.ways)} ways to decode, once on this machine",
            file=sys.stderr,
        )
        calibrate(session.costs, _cells(session, batch), session.seconds_of_a_round)
        if keep:
            save_costs(folder(), session.costs)


def fill_meanwhile(session: Session, batch: int = 1) -> None:
    """`fill` in the background, silently; stops when the main thread ends."""
    if session.controller is not None and _lacks(session, batch):

        def measure() -> None:
            with contextlib.suppress(_Ended):
                calibrate(session.costs, _cells(session, batch), seconds)
                save_costs(folder(), session.costs)

        def seconds(*cell: Any) -> float:
            if not threading.main_thread().is_alive():
                raise _Ended
            return session.seconds_of_a_round(*cell)

        session.background.submit("costs", measure)


class _Ended(Exception):
    """The main thread has ended while costs were measured."""


def _lacks(session: Session, batch: int) -> bool:
    return not all(session.costs.has(*cell) for cell in _cells(session, batch))


def _cells(session: Session, batch: int) -> list[Cell]:
    return [(batch, way, LENGTH) for way in session.ways]


def folder() -> Path | None:
    """The folder of the cost tables; None without a local compilation cache."""
    config = jax.config
    kept = config.jax_compilation_cache_dir if config.jax_enable_compilation_cache else None
    return Path(kept) / FOLDER if kept and "://" not in kept else None  # jax accepts URLs


def _code_hash() -> str:
    """A hash of the code that costs depend on: commits of one version may differ."""
    root = Path(moa_jax.__file__).parent
    files = [file for package in TIMED for file in sorted((root / package).rglob("*.py"))]
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()[:16]


def _num_cores() -> int:
    """Number of CPU cores that this process may use."""
    if hasattr(os, "sched_getaffinity"):  # Linux
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
