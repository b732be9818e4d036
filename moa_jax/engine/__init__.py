"""Continuous batching, with speculation that adapts to the load.

engine.py         the engine's thread: commands, steps, failures
requests.py       Request and RequestOutput, and the phases of a request
scheduler.py      the queue; the chunks of prompts of a step, and the requests that decode
prefix_cache.py   slots, and the prefixes that they hold for later prompts
pacing.py         draft shape and rounds of a decode call, and costs
batch.py          the state of all slots, and calls of compiled programs
device_ops.py     the functions that are compiled: prefill, decode, copy, catch_up
program_cache.py  names of programs, buckets, stand-ins
multihost.py      the programs of several processes
stats.py          counters for metrics
"""

from moa_jax.engine.engine import Engine
from moa_jax.engine.requests import EngineClosed, QueueFull, Request, RequestOutput
from moa_jax.engine.stats import EngineStats

__all__ = ["Engine", "EngineClosed", "EngineStats", "QueueFull", "Request", "RequestOutput"]
