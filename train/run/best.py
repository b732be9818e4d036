"""Which settings of a step are fastest: one group after the other, the others as they are.

Chunks and mesh change the results of a run by no more than rounding. Parts change them by the draws
and the weights of micro-batches. Rows change what is trained, so they come last.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator

from moa_jax.config import DistillConfig
from train.run.settings import overridden

Flags = tuple[tuple[str, str], ...]  # dotted names and values, as on the command line

PARTS = ("1", "2", "4")
CHUNKS = (("0", "0"), ("512", "0"), ("512", "512"), ("128", "256"))  # at the head, in LSA
MESHES = (
    ("1", "auto"),
    ("1", "copied"),
    ("1", "cut"),
    ("2", "copied"),
    ("2", "cut"),
    ("4", "auto"),
)
ROWS = (2, 4)  # times as many
PAYS = 1.02  # the least gain in speed that a change is worth


def search(config: DistillConfig, speed: Callable[[DistillConfig], float]) -> Flags:
    """The flags of the fastest step found; `speed` is 0 for one that does not fit."""
    chosen: dict[str, str] = {}
    fastest = speed(config)
    for group in _groups(config):
        before = dict(chosen)
        for flags in group:
            tried = overridden(config, (before | dict(flags)).items())
            if tried == overridden(config, before.items()):
                continue
            found = speed(tried)
            shown = " ".join(f"--{name} {value}" for name, value in flags)
            told = f"{found:,.0f} tokens/s" if found else "does not fit"
            print(f"{shown}: {told}", file=sys.stderr, flush=True)
            if found > PAYS * fastest:
                chosen, fastest = before | dict(flags), found
    return tuple(chosen.items())


def _groups(config: DistillConfig) -> Iterator[list[Flags]]:
    yield [(("optim.accumulate", parts),) for parts in PARTS]
    yield [(("chunks.head", head), ("chunks.memory", memory)) for head, memory in CHUNKS]
    yield [
        (("mesh.data", "1"), ("mesh.fsdp", "-1"), ("mesh.tensor", tensor), ("mesh.target", target))
        for tensor, target in MESHES
    ]
    rows = config.data.rows_per_batch
    yield [(("data.rows_per_batch", str(rows * times)),) for times in ROWS]
