"""Accelerators by name, and compile targets for slices and hosts that are not attached.

    v5e:4x4  v5p:2x2x4  v6e:8x8  v7x:2x2x1    one TPU slice, by libtpu
    a100:8   h100:8     h200:8   b200:8       one host of GPUs, by jax's CUDA plugin; h200:16 is two

Both compilers come with the extra `plan` (`make env PLAN=1`) and need no chip, driver or network.
"""

from __future__ import annotations

import importlib.util
import math
import os
import re
import string
from pathlib import Path
from typing import Any, Literal, NamedTuple

import jax
from jax.experimental.topologies import get_topology_desc

from moa_jax.errors import InputError
from moa_jax.training.metrics import peak_flops

GIB = 1024**3
GPUS_PER_HOST = 8
GPU_SHARE = 0.92  # of a GPU's memory that a program may use

# libtpu neither queries the cloud for its topology nor locks out a second compiler.
ENVIRONMENT = {
    "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_SKIP_MDS_QUERY": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8",  # any value works: compilation names the topology
    "TPU_WORKER_HOSTNAMES": "localhost",
    "TPU_WORKER_ID": "0",
}


class Chip(NamedTuple):
    """One device of jax; rates are data-sheet peaks, so derived times are lower bounds."""

    kind: str  # jax's `device_kind`
    compiler: Literal["tpu", "cuda"]
    memory: int  # bytes that a program may use
    bandwidth: float  # bytes/s between the chip and its memory
    link: float  # bytes/s that a chip receives, a TPU at a corner of its slice
    float32: float  # FLOP/s at jax's highest precision / FLOP/s in bfloat16
    launch: float  # seconds between one kernel and the next
    latency: float  # least seconds of a collective
    fp8: bool = False  # whether it multiplies fp8
    per_chip: int = 1  # devices of jax that a chip is

    def flops(self, dtype: str) -> float:
        """Peak FLOP/s in bfloat16 or float32."""
        return peak_flops(self.kind) * (self.float32 if dtype == "float32" else 1)


class Gpu(NamedTuple):
    """A kind of GPU as XLA's compiler describes it, besides its memory.

    The values are those of cudaDeviceProp, as XLA's target_config/specs lists them.
    """

    capability: str
    cores: int  # streaming multiprocessors
    fpus: int  # per multiprocessor
    clock_ghz: float
    l2_cache: int  # bytes, like the shared memory
    shared_per_block: int
    shared_per_core: int


def _gpu(
    kind: str, memory: float, bandwidth: float, nvlink: float, float32: float, fp8: bool = True
) -> Chip:
    """A GPU by its data sheet; `nvlink` is the sheet's rate, of both directions together."""
    limit = int(GPU_SHARE * memory)
    return Chip(kind, "cuda", limit, bandwidth, nvlink / 2, float32, 2.5e-6, 8e-6, fp8)


# A TPU's memory is libtpu's limit. A TPU's float32 takes six passes in bfloat16. The data sheets
# state the rate of all links together: four in the plane of v5e and v6e, six in the cube of v5p and
# v7x. A chip at a corner has half of them, and it limits collectives; only whole pods have no
# corners. A v7x chip is two devices, which share its memory, FLOPs and links alike:
# docs.cloud.google.com/tpu/docs/tpu7x has 192 GiB, 7,380 GB/s and 1,200 GB/s in both directions.
# A program may use 92 % of a GPU's memory, the share that configs/slurm_gpu.sbatch gives jax; the
# rest is for CUDA's context, cuBLAS's workspaces, NCCL's buffers and compiled code. The network
# between hosts is slower than NVLink, so bounds for several hosts are looser.
# GPUs are the SXM parts of NVIDIA's data sheets: A100 80GB (2,039 GB/s, NVLink 600 GB/s, float32
# 19.5 TFLOP/s), H100 (3.35 TB/s, 900 GB/s, 67 TFLOP/s), H200 (4.8 TB/s, 900 GB/s, 67 TFLOP/s) and,
# of eight in HGX B200, one (180 GB, 8 TB/s, 1.8 TB/s, 75 TFLOP/s).
# A TPU runs its program without launches, and libtpu marks arrays that stay on the chip. A GPU
# takes a few microseconds from one kernel to the next, even within a CUDA graph. The launch time of
# 2.5 us and the latencies of collectives are guesses, not measurements.
CHIPS = {
    "v5e": Chip("TPU v5 lite", "tpu", int(15.75 * GIB), 819e9, 200e9 / 2, 1 / 6, 0.0, 4e-6),
    "v5p": Chip("TPU v5", "tpu", int(95.74 * GIB), 2765e9, 600e9 / 2, 1 / 6, 0.0, 4e-6),
    "v6e": Chip("TPU v6 lite", "tpu", int(31.25 * GIB), 1640e9, 448e9 / 2, 1 / 6, 0.0, 4e-6),
    "v7x": Chip(
        "TPU7x", "tpu", int(94.75 * GIB), 7380e9 / 2, 600e9 / 4, 1 / 6, 0.0, 4e-6, per_chip=2
    ),
    "a100": _gpu("NVIDIA A100-SXM4-80GB", 80e9, 2039e9, 600e9, 19.5 / 312, fp8=False),
    "h100": _gpu("NVIDIA H100 80GB HBM3", 80e9, 3350e9, 900e9, 67 / 989),
    "h200": _gpu("NVIDIA H200", 141e9, 4800e9, 900e9, 67 / 989),
    "b200": _gpu("NVIDIA B200", 180e9, 8000e9, 1800e9, 75 / 2250),
}
_ACCELERATED = "minor: 0 feature_extension: ACCELERATED_FEATURES"
_HOPPER = Gpu(f"major: 9 {_ACCELERATED}", 132, 128, 1.98, 50 << 20, 232_448, 233_472)
GPUS = {
    "a100": Gpu("major: 8 minor: 0", 108, 64, 1.41, 40 << 20, 166_912, 167_936),
    "h100": _HOPPER,
    "h200": _HOPPER,
    "b200": Gpu(f"major: 10 {_ACCELERATED}", 148, 128, 1.965, 132_644_864, 232_448, 233_472),
}
TPUS = [name for name in CHIPS if name not in GPUS]


class Machine(NamedTuple):
    """Several chips; `shape` is the sides of a TPU slice, or (hosts, GPUs per host)."""

    name: str
    chip: Chip
    shape: tuple[int, ...]

    @property
    def num_chips(self) -> int:
        return math.prod(self.shape)

    @property
    def num_devices(self) -> int:
        """Devices of jax."""
        return self.num_chips * self.chip.per_chip

    def links_s(self, collectives: dict[str, dict[str, int]]) -> float:
        """Seconds that the collectives of `hlo.collectives` take."""
        each = collectives.values()
        received = sum(kind["bytes"] for kind in each) / self.chip.link
        return received + self.chip.latency * sum(kind["count"] for kind in each)


def machine(topology: str) -> Machine:
    """The machine of a name such as `v5e:4x4`; raises InputError for an unknown name."""
    tpus, gpus = "|".join(TPUS), "|".join(GPUS)
    sides = r"[1-9]\d*(?:x[1-9]\d*){1,2}"
    found = re.fullmatch(rf"({tpus}):({sides})|({gpus}):([1-9]\d*)", topology)
    if not found:
        raise InputError(
            f"unknown topology {topology!r}; name sides or GPUs of one of {', '.join(CHIPS)}, as "
            "v5p:2x2x4, v5e:4x4 or h200:8; several slices (a DCN axis) are not supported"
        )
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
    name, _, sides = wanted.name.partition(":")
    if wanted.chip.compiler == "cuda":
        shape = "x".join(map(str, (1, *wanted.shape)))  # slices, hosts, GPUs of a host
        target = _described(wanted.chip, GPUS[name])
        return get_topology_desc(name, "cuda", topology=shape, target_config=target).devices
    alone = {"chips_per_host_bounds": (1, 1, 1)} if wanted.num_chips == 1 else {}
    name = {"v7x": "tpu7x"}.get(name, name)
    try:
        return get_topology_desc(f"{name}:{sides}", "tpu", **alone).devices
    except jax.errors.JaxRuntimeError as error:
        raise InputError(
            f"topology {wanted.name}: no such slice in libtpu; choose even sides, as in v5e:4x4"
        ) from error


def _described(chip: Chip, gpu: Gpu) -> str:
    """A GPU as XLA's compiler reads it."""
    template = string.Template(Path(__file__).with_name("gpu.txtpb").read_text("utf-8"))
    memory = {"memory": round(chip.memory / GPU_SHARE), "bandwidth": round(chip.bandwidth)}
    return template.substitute(gpu._asdict() | memory, kind=chip.kind)
