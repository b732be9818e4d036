"""Continuous batching, with speculation that adapts to the load.

engine.py         the engine's thread: commands, steps, failures
requests.py       Request and RequestOutput, and the phases of a request
scheduler.py      the queue; the chunks of prompts of a step, and the requests that decode
prefix_cache.py   slots, and the prefixes that they hold for later prompts
pacing.py         draft shape and number of rounds of a decode call
batch.py          the state of all slots, and calls of compiled programs
device_ops.py     the functions that are compiled: prefill, decode, copy, catch_up
program_cache.py  names of programs, buckets, stand-ins
compile_queue.py  compilation in the background
multihost.py      process 0 and its followers
stats.py          counters for metrics
"""

from moa_jax.engine.engine import Engine
from moa_jax.engine.requests import (
    EngineClosed,
    QueueFull,
    Request,
    RequestHandle,
    RequestOutput,
)
from moa_jax.engine.stats import EngineStats

__all__ = [
    "Engine",
    "EngineClosed",
    "EngineStats",
    "QueueFull",
    "Request",
    "RequestHandle",
    "RequestOutput",
]
