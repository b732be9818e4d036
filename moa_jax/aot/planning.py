"""The training step compiled for machines that are not there: does it fit, what does it cost.

    config, topology --> child process: shapes, shardings, XLA --> plan or why there is none

Nothing is measured. Memory and collectives are those of the compiled program, FLOPs those of the
traced one, and the time is a roofline bound: no step can be faster. Compiling happens in a
process of its own, since compilers crash. The evaluation between steps is compiled too: it takes
the whole batch at once, even where the step takes it in parts.

Full optimisation for a TPU takes minutes. With little, libtpu is six times as fast and its figure
of memory is right within some percent. That is enough for a verdict that is not close.
"""

from __future__ import annotations

import dataclasses
import json
import math
import os
import pickle
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from moa_jax.aot import hlo, machines
from moa_jax.aot.machines import Machine
from moa_jax.config import ChunkConfig, DistillConfig, TargetConfig
from moa_jax.errors import InputError
from moa_jax.model.precision import matmul_precision
from moa_jax.model.sharding import make_mesh
from moa_jax.training import flops
from moa_jax.training.distillation import TrainStep, abstract_frozen, make_train_step
from moa_jax.training.update import abstract

Plan = dict[str, Any]
HURRY = {"tpu": {"exec_time_optimization_effort": -1.0}, "cuda": {}}
CLOSE = 0.1  # to the limit, as a share of it


class CompilerCrash(RuntimeError):
    """The compiler ended without a verdict; one line."""


def plain(config: DistillConfig) -> DistillConfig:
    """The same step without chunks, so that nothing is computed twice."""
    return dataclasses.replace(config, chunks=ChunkConfig(head=0, memory=0))


def with_rows(config: DistillConfig, rows: int) -> DistillConfig:
    """The same step for batches of `rows` rows."""
    return dataclasses.replace(config, data=dataclasses.replace(config.data, rows_per_batch=rows))


# ---- in the parent ------------------------------------------------------------------------


def plan(
    config: DistillConfig, target_cfg: TargetConfig, machine: Machine, hurry: bool = False
) -> Plan:
    """What the training step of `config` needs on `machine`; a dictionary fit for JSON.

    Raises InputError without the machine's compiler and for a mesh that does not divide the
    machine, the models or the batch; CompilerCrash where the compiler dies.
    """
    machines.check_compiler(machine)
    ran = subprocess.run(
        [sys.executable, "-m", "moa_jax.aot.planning"],
        input=pickle.dumps((config, target_cfg, machine, hurry)),
        env=os.environ | machines.ENVIRONMENT | {"PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
    )
    if ran.returncode < 0 or ran.returncode > 128:
        raise CompilerCrash(f"{machine.name}: {_crash(ran.returncode)}")
    if ran.returncode:
        raise RuntimeError(ran.stderr.decode(errors="replace"))
    answer = json.loads(ran.stdout.splitlines()[-1])
    if "input_error" in answer:
        raise InputError(answer["input_error"])
    return answer


def is_close(found: Plan) -> bool:
    """Whether another kind of optimisation might change the verdict."""
    peak, limit = found["memory"]["peak"], found["memory"]["limit"]
    return peak is not None and abs(peak - limit) <= CLOSE * limit


def _crash(code: int) -> str:
    number = -code if code < 0 else code - 128
    name = {each.value: each.name for each in signal.Signals}.get(number, f"code {code}")
    if number == signal.SIGKILL:
        return f"the compiler was killed ({name}): this machine may be out of memory"
    return (
        f"the compiler crashed ({name}), which says nothing about fitting: "
        "try other data.rows_per_batch or another mesh"
    )


def largest(fits: Callable[[int], bool], guess: int) -> int:
    """The largest number that fits, 0 if 1 does not; a good `guess` saves calls."""
    low, high, stride = 0, None, 1
    while high is None or high - low > 1:
        if fits(guess):
            low = guess
        else:
            high = guess
        if high is None:
            guess = low + stride
        elif low == 0:
            guess = max(high - stride, 1)
        else:
            guess = (low + high) // 2
        stride *= 2
    return low


def expected_rows(found: Plan) -> int:
    """The largest batch that should fit if temporary memory grows in proportion to its rows."""
    memory, unit = found["memory"], found["rows_unit"]
    if memory["peak"] is None:
        return unit
    fixed = sum(memory[part] for part in ("target", "drafter", "optimizer"))
    per_row = (memory["peak"] - fixed) / found["rows_per_batch"]
    return max(1, int((memory["limit"] - fixed) / per_row / unit)) * unit


# ---- in the child -------------------------------------------------------------------------


class Compiled(NamedTuple):
    """What XLA made of a function, or how it refused."""

    peak: int | None  # bytes on each chip, arguments included; None where XLA does not say
    hlo: str | None  # None where the program does not fit
    seconds: float


def compile_plan(
    config: DistillConfig, target_cfg: TargetConfig, machine: Machine, hurry: bool
) -> Plan:
    """`plan`, in this process."""
    mesh = make_mesh(config.mesh, machines.devices(machine))
    program = make_train_step(config, target_cfg, mesh)
    state, frozen, batch = _arguments(program, config, target_cfg)
    update = jax.jit(program.update, donate_argnums=0, out_shardings=(program.state_sharding, None))
    options = HURRY[machine.chip.compiler] if hurry else {}
    with jax.set_mesh(mesh), matmul_precision(config.run.dtype):
        step_flops = flops.count(program.update, state, frozen, batch)
        step = _compiled(update, options, state, frozen, batch)
        evaluation = Compiled(None, None, 0.0)
        if step.hlo is not None:
            evaluation = _compiled(jax.jit(program.probe), options, state.params, frozen, batch)
    held = {
        "target": _held(frozen),
        "drafter": _held(state.params),
        "optimizer": _held(state) - _held(state.params),
        "batch": _held(batch),
    }
    memory = _memory(held, step, evaluation, machine.chip.memory)
    compiled = {"step": step.seconds, "evaluation": evaluation.seconds}
    refused = None in (step.hlo, evaluation.hlo)
    rows, parts = config.data.rows_per_batch, config.optim.accumulate
    return {
        "topology": machine.name,
        "chips": machine.num_chips,
        "mesh": dict(mesh.shape),
        "rows_per_batch": rows,
        "rows_unit": parts * mesh.shape["data"] * mesh.shape["fsdp"],
        "row_length": config.data.row_length,
        "accumulate": parts,
        "memory": memory,
        "compile_s": compiled,
        "hurried": bool(options),
        "refused": refused,
        "fits": not refused and memory["peak"] <= memory["limit"],
    } | _cost(config, target_cfg, machine, held, step_flops, step.hlo)


def _arguments(
    program: TrainStep, config: DistillConfig, target_cfg: TargetConfig
) -> tuple[Any, ...]:
    """State, frozen weights and batch as shapes with shardings."""
    frozen = abstract_frozen(target_cfg, jnp.dtype(config.run.dtype))
    batch = flops.abstract_batch(config.data.rows_per_batch, config.data.row_length)
    return (
        program.abstract_state(),
        abstract(frozen, program.frozen_sharding),
        abstract(batch, program.rows_sharding),
    )


def _held(tree: Any) -> int:
    """Bytes that one chip holds of a tree of abstract arrays."""
    shards = ((leaf.sharding.shard_shape(leaf.shape), leaf) for leaf in jax.tree.leaves(tree))
    return sum(math.prod(shape) * leaf.dtype.itemsize for shape, leaf in shards)


def _compiled(function: Any, options: dict[str, float], *arguments: Any) -> Compiled:
    lowered = function.lower(*arguments)
    begin = time.perf_counter()
    try:
        program = lowered.compile(compiler_options=options)
    except jax.errors.JaxRuntimeError as error:
        if "RESOURCE_EXHAUSTED" not in str(error):
            raise
        return Compiled(_used(str(error)), None, time.perf_counter() - begin)
    seconds = time.perf_counter() - begin
    return Compiled(program.memory_analysis().peak_memory_in_bytes, program.as_text(), seconds)


def _used(complaint: str) -> int | None:
    """Bytes that a program needs at least, from libtpu's message that it does not fit."""
    found = re.search(r"(?:Used |\()([\d.]+)([KMGT])\)? (?:of|exceeds)", complaint)
    return int(float(found[1]) * 1024 ** (1 + "KMGT".index(found[2]))) if found else None


def _memory(
    held: dict[str, int], step: Compiled, evaluation: Compiled, limit: int
) -> dict[str, int | None]:
    """Bytes on one chip by part; `temporary` is the part of the peak that is no argument."""
    fixed, waiting = sum(held.values()), held["optimizer"]  # which is no argument of evaluations
    temporary = None if step.peak is None else step.peak - fixed
    evaluated = None if evaluation.peak is None else evaluation.peak + waiting - fixed
    known = [needs for needs in (temporary, evaluated) if needs is not None]
    peak = fixed + max(known) if known else None
    return held | {"temporary": temporary, "evaluation": evaluated, "peak": peak, "limit": limit}


def _cost(
    config: DistillConfig,
    target_cfg: TargetConfig,
    machine: Machine,
    held: dict[str, int],
    step_flops: int,
    optimised: str | None,
) -> Plan:
    """FLOPs, collectives, and the least time that they and reading every weight can take."""
    tokens = config.data.rows_per_batch * config.data.row_length
    per_token = flops.model_flops_per_token(config, target_cfg)
    chip = machine.chip
    rate = machine.num_chips * chip.flops(config.run.dtype)
    weights = held["target"] + held["drafter"]
    moved = config.optim.accumulate * weights + held["drafter"] + 2 * held["optimizer"]
    kinds, unknown = hlo.collectives(optimised) if optimised else ({}, 0)
    received = sum(traffic.received for traffic in kinds.values())
    network = machine.num_links * chip.link
    seconds = {
        "compute": step_flops / rate,
        "memory": moved / chip.bandwidth,
        "network": (received and received / network) if optimised else None,
    }
    bound = max(filter(None, seconds.values()))
    return {
        "flops": {"step": step_flops, "model": per_token * tokens, "model_per_token": per_token},
        "collectives": {kind: traffic._asdict() for kind, traffic in kinds.items()},
        "loops_of_unknown_length": unknown,
        "links": {"count": machine.num_links, "bytes_per_s": chip.link},
        "bound_s": seconds | {"step": bound},
        "bound_tokens_per_s": tokens / bound,
        "bound_mfu": per_token * tokens / rate / bound,
    }


def main() -> None:
    """Reads a pickled request from stdin, writes one JSON line to stdout."""
    request = pickle.load(sys.stdin.buffer)
    try:
        answer = compile_plan(*request)
    except InputError as error:
        answer = {"input_error": str(error)}
    print(json.dumps(answer))


if __name__ == "__main__":
    main()
