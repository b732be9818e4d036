"""Mixture-of-Attentions speculative decoding in JAX: load a pair, generate, train a drafter."""

from moa_jax.decode.session import Result, Session, generate
from moa_jax.errors import InputError
from moa_jax.model.sharding import decoding_mesh
from moa_jax.pairs import load_pair
from moa_jax.pretrained import load_drafter, load_target
from moa_jax.version import __version__

__all__ = [
    "InputError",
    "Result",
    "Session",
    "__version__",
    "decoding_mesh",
    "generate",
    "load_drafter",
    "load_pair",
    "load_target",
]
