"""Times a training step on this machine: the real program, with random weights and tokens.

    python -m train.bench --config configs/tiny.py
    python -m train.bench --config configs/moa_llama3_8b.py --data.rows_per_batch 4 \\
        --optim.accumulate 1

Alternates the step of train.distill (mesh, chunks) with a plain step (one device, no mesh, no
chunks), which --no-plain leaves out. --cached-target DTYPE takes random activations in place of
the target's pass, as with a target cache that is read in no time. With this flag or a draft
vocabulary, a further step, `whole`, has the pass and the whole vocabulary. Speeds are medians over
steps; model FLOPs exclude recomputation. Dotted flags override settings of the config file. No
files are written.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from infer.bench.tables import number, table_of
from infer.cli.program import positive, run
from moa_jax.config import DistillConfig, MeshConfig, TargetConfig
from moa_jax.data.batch import Batch, TappedBatch
from moa_jax.files.json_text import to_json
from moa_jax.measure.turns import in_turns
from moa_jax.model import sharding
from moa_jax.model.layers import INIT_STDDEV
from moa_jax.runtime.precision import matmul_precision
from moa_jax.training.distillation import abstract_frozen, make_train_step
from moa_jax.training.flops import abstract_parts, model_flops_per_token
from moa_jax.training.metrics import peak_flops
from train.plan import plain, with_shapes
from train.run.settings import config_parser, parse_config

MEGA = 1e6


class Runner(NamedTuple):
    """A compiled training step with its state."""

    name: str
    step: Callable[[], float]  # runs one update and returns its seconds
    compile_s: float
    temp_bytes: int
    flops_per_token: float


def main(arguments: list[str] | None = None) -> None:
    config, args = parse_config(_parser(), DistillConfig, arguments)
    config, target_cfg = with_shapes(config)
    mesh = sharding.make_mesh(config.mesh, jax.devices())
    cached = args.cached_target
    runners = [_runner("distill", config, target_cfg, mesh, cached)]
    if cached is not None or config.draft_vocabulary is not None:
        whole = dataclasses.replace(config, draft_vocabulary=None)
        runners.append(_runner("whole", whole, target_cfg, mesh))
    if not args.no_plain:
        runners.append(_runner("plain", plain(config), target_cfg, None, cached))
    seconds: dict[str, list[float]] = {runner.name: [] for runner in runners}
    for turn in in_turns(len(runners), 1, repeats=args.steps):
        spent = runners[turn.way].step()
        if turn.is_counted:
            seconds[runners[turn.way].name].append(spent)
    report = _report(config, runners, seconds)
    print(to_json(report, indent=2) if args.json else render(report))


def _runner(
    name: str,
    config: DistillConfig,
    target_cfg: TargetConfig,
    mesh: Mesh | None,
    cached: str | None = None,
) -> Runner:
    """Compiles the step on `mesh`, or on the first device if `mesh` is None."""
    alone = mesh is None
    mesh = sharding.make_mesh(MeshConfig(), jax.devices()[:1]) if alone else mesh
    program = make_train_step(config, target_cfg, mesh)
    frozen_at, places, out = None, None, None
    if not alone:
        frozen_at, places = program.frozen_sharding, program.state_sharding
        out = (places, None)
    batch = _batch(config, target_cfg, cached)
    with contextlib.nullcontext() if alone else jax.set_mesh(mesh):
        shapes = abstract_frozen(target_cfg, jnp.dtype(config.run.dtype))
        frozen = jax.jit(lambda: _random(shapes), out_shardings=frozen_at)()
        held = [jax.jit(program.init, out_shardings=places)(jax.random.key(0))]
        if not alone:
            part_of = lambda rows, whole=batch: jax.tree.map(lambda array: array[rows], whole)
            size = (config.data.rows_per_batch,)
            batch = sharding.place_rows(part_of, program.rows_sharding, size)
        begin = time.perf_counter()
        with matmul_precision(config.run.dtype):
            update = jax.jit(program.update, donate_argnums=0, out_shardings=out)
            update = update.lower(held[0], frozen, batch).compile()
        compile_s = time.perf_counter() - begin

    def step() -> float:
        begin = time.perf_counter()
        held[0], metrics = update(held[0], frozen, batch)
        jax.block_until_ready((held[0], metrics))
        return time.perf_counter() - begin

    flops = model_flops_per_token(config, target_cfg, cached is not None)
    return Runner(name, step, compile_s, update.memory_analysis().temp_size_in_bytes, flops)


def _random(shapes: Any) -> Any:
    """Random arrays of these shapes."""
    leaves, tree = jax.tree.flatten(shapes)
    keys = jax.random.split(jax.random.key(1), len(leaves))
    drawn = [
        (INIT_STDDEV * jax.random.normal(key, leaf.shape, leaf.dtype)).astype(leaf.dtype)
        for key, leaf in zip(keys, leaves, strict=True)
    ]
    return jax.tree.unflatten(tree, drawn)


def _batch(
    config: DistillConfig, target_cfg: TargetConfig, cached: str | None
) -> Batch | TappedBatch:
    """Full rows of random tokens and, with a dtype as `cached`, random activations of the target.

    The first quarter of every row is a prompt.
    """
    rows, length = config.data.rows_per_batch, config.data.row_length
    tokens_BT = np.random.default_rng(0).integers(0, target_cfg.vocab_size, (rows, length))
    position_BT = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
    ones_BT = np.ones((rows, length), np.int32)
    batch = Batch(tokens_BT.astype(np.int32), ones_BT, position_BT, position_BT >= length // 4)
    if cached is None:
        return batch
    shapes = abstract_parts(config, target_cfg, batch, jnp.dtype(cached))
    parts = jax.jit(lambda: _random(shapes))()
    return TappedBatch(*batch, jax.device_get(parts))


def _report(
    config: DistillConfig,
    runners: list[Runner],
    seconds: dict[str, list[float]],
) -> dict[str, Any]:
    tokens = config.data.rows_per_batch * config.data.row_length
    device = jax.devices()[0]
    peak = peak_flops(device.device_kind)
    modes = []
    for runner in runners:
        middle = statistics.median(seconds[runner.name])
        used = 1 if runner.name == "plain" else jax.device_count()
        rate = runner.flops_per_token * tokens / middle
        modes.append(
            {
                "mode": runner.name,
                "step_s": middle,
                "tokens_per_s": tokens / middle,
                "model_flops_per_token": runner.flops_per_token,
                "model_flops_per_s": rate,
                "mfu": rate / (peak * used) if peak else None,
                "temp_bytes": runner.temp_bytes,
                "compile_s": runner.compile_s,
            }
        )
    stats = device.memory_stats() or {}
    return {
        "device": device.device_kind,
        "devices": jax.device_count(),
        "rows": config.data.rows_per_batch,
        "row_length": config.data.row_length,
        "peak_bytes": stats.get("peak_bytes_in_use"),
        "modes": modes,
        "gain": {m["mode"]: modes[0]["tokens_per_s"] / m["tokens_per_s"] for m in modes[1:]},
    }


def render(report: dict[str, Any]) -> str:
    """The report in Markdown."""
    head = f"{report['devices']} x {report['device']}, {report['rows']} x {report['row_length']}"
    rows = [
        {
            "step": mode["mode"],
            "s": number(mode["step_s"], 3),
            "tokens/s": number(mode["tokens_per_s"], 0),
            "MFLOP/token": number(mode["model_flops_per_token"] / MEGA, 0),
            "MFU": "-" if mode["mfu"] is None else f"{mode['mfu']:.1%}",
            "temporary": f"{mode['temp_bytes'] / 2**20:.0f} MiB",
            "compile s": number(mode["compile_s"], 1),
        }
        for mode in report["modes"]
    ]
    parts = [f"{head} tokens a step", table_of(rows)]
    for name, gain in report["gain"].items():
        parts.append(f"tokens/s over those of the {name} step: {gain:.2f}")
    if report["peak_bytes"]:
        parts.append(f"peak memory {report['peak_bytes'] / 2**30:.1f} GiB")
    return "\n\n".join(parts)


def _parser() -> argparse.ArgumentParser:
    parser = config_parser("train.bench", __doc__)
    group = parser.add_argument_group("measurement")
    group.add_argument("--steps", type=positive, default=10, help="timed steps of each")
    group.add_argument("--no-plain", action="store_true", help="leave the plain step out")
    group.add_argument(
        "--cached-target",
        choices=("float32", "bfloat16"),
        help="as if the target's activations were stored in this dtype",
    )
    group.add_argument("--json", action="store_true", help="one JSON document on stdout")
    return parser


if __name__ == "__main__":
    run(main)
