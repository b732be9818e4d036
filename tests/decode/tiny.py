"""A tiny random target, and a drafter of every kind with a moderate acceptance rate."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from llguidance import LLMatcher, LLTokenizer, TokenizerWrapper

from infer.bench import random_pair
from moa_jax import Session
from moa_jax.config import (
    BlockConfig,
    BorrowedConfig,
    DraftShape,
    Eagle3Config,
    EagleConfig,
    ExpertsConfig,
    GlideConfig,
    IndependentConfig,
    LookupConfig,
    MoaConfig,
    TargetConfig,
)
from moa_jax.decode import sampling
from moa_jax.engine import Request
from moa_jax.grammar.masks import Grammar
from moa_jax.model import llama, masks
from moa_jax.model.quantize import Format, quantize_params
from moa_jax.pretrained import LoadedDrafter, Target

CONFIG = TargetConfig(  # layers take most of a program's time
    "llama", 64, 2, BlockConfig(16, 2, 1, 8, 24, 1e-5, 10000.0, None), False, 256
)


def configs_for(target: TargetConfig, heads: int) -> dict[str, tuple[str, Any]]:
    """Returns methods and configs of drafters with this number of key-value heads."""
    one = dict(num_layers=1, sliding_windows=target.sliding_windows[:1])
    small, moa = dataclasses.replace(target, **one), (heads, 24, heads, 24, heads, 16)
    taps, half = (0, 1, 1), tuple(range(1, target.vocab_size, 2))
    return {
        "moa-0": ("moa", MoaConfig(*moa)),
        "moa-1": ("moa", MoaConfig(*moa, target_layer_inference=1)),
        "moa-2": ("moa", MoaConfig(*moa, target_layer_inference=2)),
        "eagle": ("eagle", EagleConfig(heads, 24)),
        "eagle3": ("eagle3", Eagle3Config(heads, 24, tapped_layers=taps)),
        "glide": ("glide", GlideConfig(heads, 24, 3)),
        "independent": ("independent", IndependentConfig(small)),
        "borrowed": ("independent-borrowed", BorrowedConfig(small)),
        "lookup": ("lookup", LookupConfig()),
        "eagle-authors": (
            "eagle",
            EagleConfig(heads, 24, input_norm=True, fc_bias=False, names="authors"),
        ),
        "eagle3-ids": ("eagle3", Eagle3Config(heads, 24, draft_ids=half, tapped_layers=taps)),
    }


class TinyPairs:
    """A target, and a drafter of every kind for it, in float32 or quantized, on any mesh."""

    def __init__(self, config: TargetConfig, heads: int = 1) -> None:
        self.config, self.heads, self.configs = config, heads, configs_for(config, heads)
        self.target = functools.cache(self._target)
        self.drafter = functools.cache(self._drafter)

    @functools.cached_property
    def experts(self) -> TinyPairs:
        """The same sizes with experts, of which a few tokens use some and many tokens use all."""
        experts = {"experts": ExpertsConfig(8, 2, 12, norm_topk_prob=True), "qk_norm": True}
        block = dataclasses.replace(self.config.block, **experts)
        config = dataclasses.replace(self.config, family="qwen3_moe", block=block)
        return TinyPairs(config, self.heads)

    @functools.cached_property
    def gemma(self) -> TinyPairs:
        """The same sizes as Gemma 3, with a window in the first layer."""
        own = dict(qk_norm=True, gemma_norms=True, query_pre_attn_scalar=4, local_rope_theta=1e3)
        block = dataclasses.replace(self.config.block, hidden_act="gelu_pytorch_tanh", **own)
        rest = dict(block=block, sliding_windows=(5, 0), embed_scale=4)
        return TinyPairs(dataclasses.replace(self.config, **rest), self.heads)

    def _target(self, weights: Format | None = None, mesh: Mesh | None = None) -> Target:
        """Scales layers to the embedding's size, so that every cache row affects the output."""
        found = random_pair.random_target(self.config, jnp.float32, Path("tiny"), mesh=mesh)
        return grown(found, weights)

    def _drafter(
        self, name: str, weights: Format | None = None, mesh: Mesh | None = None
    ) -> LoadedDrafter:
        method, config = self.configs[name]
        target = self.target(None, mesh)
        return grown(random_pair.random_drafter(method, config, target, jnp.float32), weights)


def grown(found: Any, weights: Format | None) -> Any:
    grow = lambda leaf: leaf if leaf.ndim == 1 else 10 * leaf
    params = jax.jit(functools.partial(jax.tree.map, grow))(found.params)  # one program
    return found._replace(params=quantize_params(params, weights) if weights else params)


TINY = TinyPairs(CONFIG)
target, drafter = TINY.target, TINY.drafter
# The text of each token of the tiny target; one more token ends an answer.
CHARACTERS = '{}[]":,.- 0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJK'
TOKENS = [*CHARACTERS, '{"', '":', '"}', "ab", "bc", "12"]
END = len(TOKENS)


class TinyTokenizer:
    """A tokenizer with the attributes that llguidance reads."""

    eos_token_id, bos_token_id, special_token_ids = END, None, [END]
    tokens = [*map(str.encode, TOKENS), b"<end>"]

    def __call__(self, text: bytes) -> list[int]:
        return [TOKENS.index(character) for character in text.decode() if character in TOKENS]


MOST = 128  # tokens of a prompt and its answer in `masked_plain`


def tiny_grammar(text: str) -> Grammar:
    tokenizer = LLTokenizer(TokenizerWrapper(TinyTokenizer()), n_vocab=CONFIG.vocab_size)
    return Grammar(LLMatcher(tokenizer, text, log_level=0), CONFIG.vocab_size)


@functools.partial(jax.jit, static_argnums=0)
def next_token(config: TargetConfig, params, law, tokens_1T, count, prompt_length, allowed_V):
    """Returns the token after the first `count` tokens, by one pass and among the allowed ones."""
    context = llama.Context(jnp.arange(tokens_1T.shape[1])[None], masks.causal_tree(MOST))
    hidden_1TD = llama.forward(config, params, tokens_1T, context).hidden_BTD
    logits_11V = llama.unembed(params, hidden_1TD[:, count - 1][:, None])
    counts = sampling.counts_in(law, tokens_1T, prompt_length[None], len(allowed_V), count[None])
    masked_11V = jnp.where(allowed_V, logits_11V, -jnp.inf)
    score_11V = sampling.perturbed_logits(law, masked_11V, counts.each(), count[None, None])
    return jnp.argmax(score_11V)


def masked_plain(target: Target, request: Request) -> list[int]:
    """Returns the answer of plain decoding under the request's grammar, token by token."""
    matcher, text = request.grammar.row().matcher, list(request.prompt_ids)
    law = sampling.make_batch_sampling([request.sampling], target.config.vocab_size, whole=True)
    for _ in range(request.max_new_tokens):
        bits = np.frombuffer(matcher.compute_bitmask(), np.uint8)
        allowed_V = np.unpackbits(bits, bitorder="little")[: len(TOKENS) + 1].astype(bool)
        tokens_1T = np.pad(text, (0, MOST - len(text)))[None]
        arrays = law, tokens_1T, np.int32(len(text)), np.int32(len(request.prompt_ids)), allowed_V
        text.append(int(next_token(target.config, target.params, *arrays)))
        if text[-1] in request.stop_ids:
            break
        assert matcher.consume_token(text[-1])
    return text[len(request.prompt_ids) :]


def log_probs_along(target: Target, text: Sequence[int]) -> np.ndarray:
    """Returns the raw log-probabilities (T, V) after each token of a text, by one pass."""
    T = len(text)
    context = llama.Context(jnp.arange(T)[None], masks.causal_tree(T))
    found = llama.forward(target.config, target.params, jnp.array([text]), context)
    return np.asarray(jax.nn.log_softmax(llama.unembed(target.params, found.hidden_BTD)))[0]


class Script:
    """A controller that repeats its choices and records what it observes."""

    def __init__(self, *choices: tuple[DraftShape, int]) -> None:
        self.choices, self.observed = itertools.cycle(choices), []

    def next(self, costs, lag_ms):
        return next(self.choices)

    def observe(self, costs, shape, accepted, rounds, batch, round_ms):
        self.observed.append((shape, [*map(int, accepted)], rounds))


def follow(session: Session, *choices: tuple[DraftShape, int]) -> Session:
    """The session uses these shapes and rounds in turn, and compiles missing programs at once."""
    session.controller = Script(*choices)
    session.round_costs = lambda batch, length: dict.fromkeys(session.ways, 1.0)
    session._is_ready = lambda way, arrays: True
    return session
