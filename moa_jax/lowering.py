"""The decode program compiled for a GPU that is not there, and what it moves in memory.

A round of decoding reads every weight once and waits for little else. A weight or a cache that
is copied within the loop is written and read a second time, so nothing large may be: no copy,
slice, concatenation or transposition. XLA's optimised program tells, and is read here as text.

Compiling needs jax's CUDA plugin (`make env PLAN=1`), JAX_PLATFORMS=cpu and no CUDA library.
Nothing is measured or tuned: the program says what is moved, not how long that takes.
"""

from __future__ import annotations

import functools
import importlib.util
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import topologies
from jax.sharding import SingleDeviceSharding

from moa_jax import target
from moa_jax.errors import InputError
from moa_jax.spec import step
from moa_jax.spec.sample import Law
from moa_jax.spec.step import Limits, Setup, Weights

GREEDY = Law()
LARGE = 2 * 1024**2  # bytes

# What the compiler asks about a device, as cudaDeviceProp and the data sheet of an H200 SXM
# have it; the names are those of XLA's GpuTargetConfigProto.
H200 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H200"
runtime_version { major: 13 }
dnn_version_info { major: 9 minor: 10 }
gpu_device_info {
  name: "NVIDIA H200"
  device_vendor: "NVIDIA Corporation"
  cuda_compute_capability { major: 9 minor: 0 feature_extension: ACCELERATED_FEATURES }
  driver_version: "13.0.0"
  runtime_version: "13.0.0"
  compile_time_toolkit_version: "13.0.0"
  dnn_version: "9.10.0"
  device_address_bits: 64
  device_memory_size: 141000000000
  memory_bandwidth: 4800000000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  core_count: 132
  fpus_per_core: 128
  threads_per_warp: 32
  threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  thread_dim_limit_x: 1024
  thread_dim_limit_y: 1024
  thread_dim_limit_z: 64
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  registers_per_block_limit: 65536
  registers_per_core_limit: 65536
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
}
"""


# ---- compile ------------------------------------------------------------------------------


class Program(NamedTuple):
    """What XLA made of a function."""

    hlo: str  # the optimised module
    temp_bytes: int  # memory beside arguments and results
    seconds: float  # that compiling took


def has_cuda_compiler() -> bool:
    """Whether jax's CUDA plugin is installed."""
    if importlib.util.find_spec("jax_plugins") is None:
        return False
    return importlib.util.find_spec("jax_plugins.xla_cuda13") is not None


def h200() -> Any:
    """One H200 to compile for; raises InputError without the CUDA plugin."""
    if not has_cuda_compiler():
        raise InputError("jax's CUDA plugin is not installed: make env PLAN=1 adds it")
    described = topologies.get_topology_desc(
        platform="cuda", topology_name="h200", topology="1x1x1", target_config=H200
    )
    return described.devices[0]


def compile_for(
    device: Any, function: Callable[..., Any], *arguments: Any, donate: tuple[int, ...] = ()
) -> Program:
    """Compiles for a device that need not be there, from the arguments' shapes alone."""
    sharding = SingleDeviceSharding(device)
    place = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)  # noqa: E731
    lowered = jax.jit(function, donate_argnums=donate).lower(*jax.tree.map(place, arguments))
    begin = time.perf_counter()
    compiled = lowered.compile()
    seconds = time.perf_counter() - begin
    return Program(compiled.as_text(), compiled.memory_analysis().temp_size_in_bytes, seconds)


def abstract_weights(setup: Setup, dtype: jnp.dtype = jnp.bfloat16) -> Weights:
    """The shapes of both models' weights as they are loaded for decoding."""
    key = jax.eval_shape(lambda: jax.random.key(0))
    cast = lambda leaf: jax.ShapeDtypeStruct(leaf.shape, dtype)  # noqa: E731
    inits = (functools.partial(target.init, setup.target), setup.drafter and setup.drafter.init)
    return Weights(*(init and jax.tree.map(cast, jax.eval_shape(init, key)) for init in inits))


def compile_decode(
    device: Any,
    setup: Setup,
    weights: Weights,
    cache_rows: int,
    batch: int = 1,
    law: Law = GREEDY,
) -> Program:
    """The loop of rounds for caches of `cache_rows` rows, its state donated as in a session."""
    integers = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.int32)  # noqa: E731
    limits = Limits(integers(batch), integers(batch, 8), integers())
    read = functools.partial(step.prefill, setup, capacity=cache_rows - setup.shape.num_rows)
    prompt = (integers(batch, 1), integers(batch))
    state = jax.eval_shape(read, weights, *prompt, limits, law)
    decode = functools.partial(step.decode, setup)
    return compile_for(device, decode, weights, state, limits, law, donate=(1,))


def num_bytes(tree: Any) -> int:
    """Bytes of all arrays of a tree, abstract or not."""
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


# ---- read what was compiled ---------------------------------------------------------------

MOVES = {"copy", "slice", "dynamic-slice", "concatenate", "transpose"}
# A value is the same memory, or as much of it in another type, before and after these.
SEEN_THROUGH = {"bitcast", "reshape", "convert", "dynamic-update-slice"}
FOLLOWED = {"while", "conditional", "call", "async-start", "fusion-start"}
FREE = {"parameter", "constant", "tuple", "get-tuple-element", "bitcast", "after-all"}

_COMPUTATION = re.compile(r"^(?:ENTRY )?%([\w.\-]+) \(.*\{$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%([\w.\-]+) = (.*?) ([a-z][\w\-]*)\(([^)]*)\)(.*)$")
_ARRAY = re.compile(r"\b(pred|[a-z]+(\d+)\w*)\[([\d,]*)\]")
_NAME = re.compile(r"%([\w.\-]+)")
_CALLED = re.compile(
    r"(?:calls|to_apply|body|condition|true_computation|false_computation|branch_computations)="
    r"(%[\w.\-]+|\{[^}]*\})"
)
_LABEL = re.compile(r'op_name="([^"]*)"')


class Instruction(NamedTuple):
    """One line of a computation."""

    name: str
    opcode: str
    size: int  # bytes of what it gives; of a tuple, those of its largest array
    operands: list[str]
    called: list[str]  # computations
    label: str  # where it comes from: named scopes and the jax primitive
    is_root: bool


Computation = dict[str, Instruction]


class Move(NamedTuple):
    """A large array written again by nothing but moving it."""

    name: str  # of the instruction, or of the fusion that holds it
    opcode: str
    size: int
    label: str


def large_moves(hlo: str, at_least_bytes: int = LARGE) -> list[Move]:
    """Copies, slices, concatenations and transpositions in loops that give an array so large.

    A fusion counts if that is what it gives in the end; moves whose result is used up within
    it are never stored. Updates in place do not count, what they are made to update does.
    Raises ValueError for a program without a loop.
    """
    computations = parse(hlo)
    found = []
    for instruction in _looped(computations):
        given = [instruction]
        if instruction.opcode == "fusion":
            given = _given(computations[instruction.called[0]])
        for value in given:
            opcode = value.opcode.removesuffix("-done")
            if opcode in MOVES and value.size >= at_least_bytes:
                found.append(Move(instruction.name, opcode, value.size, instruction.label))
    return found


def launches(hlo: str) -> Counter[str]:
    """Kernels and memory copies of one turn of the loops, by kind; inner loops count once."""
    steps = (each for each in _looped(parse(hlo)) if each.opcode not in FREE | FOLLOWED)
    return Counter(_kind(each) for each in steps if not each.opcode.endswith("-done"))


def parse(hlo: str) -> dict[str, Computation]:
    """The computations of a module by name, each with its instructions by name."""
    computations: dict[str, Computation] = {}
    current: Computation = {}
    for line in hlo.splitlines():
        if header := _COMPUTATION.match(line):
            current = computations[header[1]] = {}
        elif found := _INSTRUCTION.match(line):
            root, name, shape, opcode, operands, rest = found.groups()
            called = _NAME.findall(" ".join(_CALLED.findall(rest)))
            label = _LABEL.search(rest)
            current[name] = Instruction(
                *(name, opcode, _size(shape), _NAME.findall(operands), called),
                *(label[1] if label else "", bool(root)),
            )
    return computations


def _size(shape: str) -> int:
    sizes = [0]
    for kind, bits, dims in _ARRAY.findall(shape):
        count = 1
        for dim in filter(None, dims.split(",")):
            count *= int(dim)
        sizes.append(count if kind == "pred" else count * int(bits) // 8)
    return max(sizes)


def _looped(computations: dict[str, Computation]) -> Iterator[Instruction]:
    """All instructions that run within loops; those inside fusions belong to the fusion."""
    every = [each for computation in computations.values() for each in computation.values()]
    waiting = [name for each in every if each.opcode == "while" for name in each.called]
    if not waiting:
        raise ValueError("this program has no loop")
    seen: set[str] = set()
    while waiting:
        name = waiting.pop()
        if name in seen:
            continue
        seen.add(name)
        for instruction in computations[name].values():
            yield instruction
            if instruction.opcode in FOLLOWED:
                waiting += instruction.called


def _given(fused: Computation) -> list[Instruction]:
    """What made the results of a fusion: its roots, seen through what leaves arrays as they are."""
    (root,) = (each for each in fused.values() if each.is_root)
    values = [fused[name] for name in root.operands] if root.opcode == "tuple" else [root]
    return [_origin(fused, value) for value in values]


def _origin(fused: Computation, value: Instruction) -> Instruction:
    while value.opcode in SEEN_THROUGH:
        value = fused[value.operands[0]]
    return value


def _kind(instruction: Instruction) -> str:
    if instruction.opcode != "fusion":
        return instruction.opcode
    return "matrix product" if "gemm" in instruction.name else "fusion"
