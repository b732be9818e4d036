"""Accelerators by name, and compile targets for slices and hosts that are not attached.

    v5e:4x4  v5p:2x2x4  v6e:8x8     TPU slices, by libtpu
    h200:8                          one host of GPUs, by jax's CUDA plugin; h200:16 is two hosts

Both compilers come with the extra `plan` (`make env PLAN=1`) and need no chip, driver or network.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental.topologies import get_topology_desc

from moa_jax.errors import InputError
from moa_jax.training.metrics import peak_flops

GIB = 1024**3
GPUS_PER_HOST = 8

# libtpu neither queries the cloud for its topology nor locks out a second compiler.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any value works: compilation names the topology
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


class Chip(NamedTuple):
    """One accelerator; rates are data-sheet peaks, so derived times are lower bounds."""

    kind: str  # jax's `device_kind`
    compiler: Literal["tpu", "cuda"]
    memory: int  # bytes that a program may use
    bandwidth: float  # bytes/s between the chip and its memory
    link: float  # bytes/s that a chip receives, a TPU at a corner of its slice
    float32: float  # FLOP/s at jax's highest precision / FLOP/s in bfloat16
    launch: float  # seconds between one kernel and the next
    latency: float  # least seconds of a collective

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in bfloat16 or float32."""
        return peak_flops(self.kind) * (self.float32 if dtype == "float32" else 1)


# A TPU's memory is libtpu's limit. A TPU's float32 takes six passes in bfloat16. The data sheets
# state the rate of all links together: four in the plane of v5e and v6e, six in the cube of v5p. A
# chip at a corner has half of them, and it limits collectives; only whole pods have no corners.
# A program may use 92 % of an H200's 141 GB, the share that configs/slurm_gpu.sbatch gives jax; the
# rest is for CUDA's context, cuBLAS's workspaces, NCCL's buffers and compiled code. The network
# between hosts is slower than NVLink, so bounds for several hosts are looser.
# A TPU runs its program without launches, and libtpu marks arrays that stay on the chip. A GPU
# takes a few microseconds from one kernel to the next, even within a CUDA graph. The launch time of
# 2.5 us and the latencies of collectives are guesses, not measurements.
CHIPS = {
    "v5e": Chip("TPU v5 lite", "tpu", int(15.75 * GIB), 819e9, 200e9 / 2, 1 / 6, 0.0, 4e-6),
    "v5p": Chip("TPU v5", "tpu", int(95.74 * GIB), 2765e9, 600e9 / 2, 1 / 6, 0.0, 4e-6),
    "v6e": Chip("TPU v6 lite", "tpu", int(31.25 * GIB), 1640e9, 448e9 / 2, 1 / 6, 0.0, 4e-6),
    "h200": Chip("NVIDIA H200", "cuda", int(0.92 * 141e9), 4800e9, 450e9, 67 / 989, 2.5e-6, 8e-6),
}


class Machine(NamedTuple):
    """Several chips; `shape` is the sides of a TPU slice, or (hosts, GPUs per host)."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    def links_s(self, collectives: dict[str, dict[str, int]]) -> float:
        """Seconds that the collectives of `hlo.collectives` take."""
        each = collectives.values()
        received = sum(kind["bytes"] for kind in each) / self.chip.link
        return received + self.chip.latency * sum(kind["count"] for kind in each)


def machine(topology: str) -> Machine:
    """The machine of a name such as `v5e:4x4`; raises InputError for an unknown name."""
    found = re.fullmatch(r"(v5e|v5p|v6e):([1-9]\d*(?:x[1-9]\d*){1,2})|(h200):([1-9]\d*)", topology)
    if not found:
        raise InputError(f"unknown topology {topology!r}; name v5p:2x2x4, v5e:4x4 or h200:8")
    tpu, torus, gpu, count = found.groups()
    if tpu:
        return Machine(topology, CHIPS[tpu], tuple(map(int, torus.split("x"))))
    hosts, rest = divmod(int(count), GPUS_PER_HOST)
    if hosts and rest:
        raise InputError(f"topology {topology}: not all hosts have 8 GPUs; choose a multiple of 8")
    return Machine(topology, CHIPS[gpu], (hosts, GPUS_PER_HOST) if hosts else (1, rest))


def has_compiler(compiler: Literal["tpu", "cuda"]) -> bool:
    """Whether a compiler is installed: libtpu, or jax's CUDA plugin."""
    package = {"tpu": "libtpu", "cuda": "jax_cuda13_plugin"}[compiler]
    return importlib.util.find_spec(package) is not None


def devices(wanted: Machine) -> list[Any]:
    """The machine's devices as compile targets; turns off jax's compilation cache.

    The cache could not read back programs for devices that are not attached. Raises InputError
    without the compiler, and for a shape that libtpu does not support.
    """
    if not has_compiler(wanted.chip.compiler):
        raise InputError(f"{wanted.name}: its compiler is not installed; run make env PLAN=1")
    os.environ.update(ENVIRONMENT)
    jax.config.update("jax_enable_compilation_cache", False)
    if wanted.chip.compiler == "cuda":
        shape = "x".join(map(str, (1, *wanted.shape)))  # slices, hosts, GPUs of a host
        target = Path(__file__).with_name("h200.txtpb").read_text("utf-8")
        return get_topology_desc("h200", "cuda", topology=shape, target_config=target).devices
    alone = {"chips_per_host_bounds": (1, 1, 1)} if wanted.num_chips == 1 else {}
    try:
        return get_topology_desc(wanted.name, "tpu", **alone).devices
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"topology {wanted.name}: no such slice in libtpu; choose even sides, as in v5e:4x4"
        ) from error
