"""SmolLM2-135M-Instruct equals transformers in float32: real weights, up to 2,048 tokens.

The reference is transformers' own reading of the GGUF file, never a folder that we wrote.
"""

from __future__ import annotations

import copy
import functools
import json
import os
import re
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import torch
import transformers
from tokenizers import pre_tokenizers

from infer.bench.inputs import TEXTS
from infer.bench.suites import load_suite
from infer.cli.flags.prompts import asking, tokenizer_of
from infer.peers import transformers_logits
from moa_jax import Session, load_target
from moa_jax.decode.exactness import compare
from moa_jax.files.model_folder import find_folder
from moa_jax.model import llama, masks
from moa_jax.pretrained import Target
from tests.compare import ARRAYS, assert_close
from tests.oracle import moa as oracle

pytestmark = pytest.mark.slow


# A key turns by its position in radians and less, which float32 rounds by up to 6e-8 of itself; the
# keys of later positions therefore differ by more than all other arrays.
ANGLE = 3e-8  # of the largest key, for each position
ANSWER = min(32, int(os.environ.get("MOA_SMOLLM2_TOKENS", "32")))  # .ci/run sets fewer
LENGTH, PROMPTS = (2048, 20) if ANSWER == 32 else (512, 4)
TIE = 1e-3  # logits; twice what float32 moves the logits of these weights by, and more


class Smol(NamedTuple):
    """The same weights on both sides, and text as tokens."""

    ours: Target
    model: Any
    text_T: np.ndarray
    prompts: list[list[int]]


def prompts_for(target: Target) -> list[list[int]]:
    """Returns the questions of the suite and the texts of the bench, more than 20 of them."""
    tokenizer = tokenizer_of(target.folder)
    questions = [turn for question in load_suite("demo") for turn in question.turns]
    return [asking(text, tokenizer) for text in (*questions, *TEXTS)]


@pytest.fixture(scope="module")
def smol(smollm2_gguf) -> Smol:
    ours = load_target(smollm2_gguf, jnp.float32)
    prompts = prompts_for(ours)
    text = [token for prompt in prompts for token in prompt]
    text_T = np.resize(np.array(text, np.int32), LENGTH)
    return Smol(ours, transformers_logits.load(smollm2_gguf), text_T, prompts[:PROMPTS])


@functools.partial(jax.jit, static_argnums=0)
def whole(cfg: Any, params: Any, tokens_1T: jax.Array) -> llama.ForwardOutput:
    """Runs one pass without caches, and taps every residual stream."""
    T = tokens_1T.shape[1]
    context = llama.Context(jnp.arange(T)[None], masks.causal(jnp.ones((1, T), jnp.int32)))
    return llama.forward(cfg, params, tokens_1T, context, range(cfg.num_layers))


def test_every_layer_of_smollm2_equals_transformers(smol):
    """Compares states, keys, values and logits."""
    cfg, params = smol.ours.config, smol.ours.params
    tokens_1T = smol.text_T[None]
    seen = oracle.observe(smol.model, torch.from_numpy(tokens_1T.astype(np.int64)))
    found = whole(cfg, params, tokens_1T)
    for index, stream_1TD in enumerate([*found.tapped, found.hidden_BTD]):
        assert_close(stream_1TD, seen.hidden_LBTD[index], f"stream {index}")
    keys_LBKTE, values_LBKTE = llama.stack_rows(found.rows)
    assert_close(keys_LBKTE, seen.key_LBKTE, "keys", max(ARRAYS, ANGLE * LENGTH))
    assert_close(values_LBKTE, seen.value_LBKTE, "values")
    logits_1TV = smol.model.lm_head(seen.hidden_LBTD[-1]).numpy()
    assert_close(llama.unembed(params, found.hidden_BTD), logits_1TV, "logits")


def test_greedy_text_of_smollm2_equals_transformers(smol):
    """Compares each token; only a tie in float32 may be decided differently, and is printed."""
    session, eos = Session(smol.ours), list(smol.ours.generation.eos_ids)
    for number, prompt in enumerate(smol.prompts):
        (found,) = session.generate([prompt], ANSWER)
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "max_new_tokens": ANSWER, "eos_token_id": eos}
        mask = torch.ones_like(ids)
        theirs = smol.model.generate(ids, attention_mask=mask, pad_token_id=eos[0], **settings)
        theirs = theirs[0, len(prompt) :].tolist()
        if difference := compare(session.target, prompt, theirs, found.token_ids):
            print(f"prompt {number}: {difference}")
            assert difference.margin is not None and abs(difference.margin) < TIE, difference


# transformers reads `smollm` as GPT-2's pattern. llama.cpp and the model's own tokenizer.json split
# digits off first, so ids differ if another blank than one space precedes a digit.
BEFORE_DIGIT = re.compile(r"(\s\s|[^\S ])\d")


def test_ids_of_smollm2_equal_transformers(smollm2_gguf, data):
    """Compares the tokenizer and the template in the metadata, over validation text."""
    folder = smollm2_gguf.parent
    theirs = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=smollm2_gguf.name)
    digits = copy.deepcopy(theirs)
    split = theirs.backend_tokenizer.pre_tokenizer
    digits.backend_tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), split]
    )
    ours = tokenizer_of(find_folder(smollm2_gguf))
    lines = (data / "chat" / "validation.jsonl").read_text(encoding="utf-8").splitlines()
    talks = [json.loads(line)["messages"] for line in lines]
    for text in (message["content"] for messages in talks for message in messages):
        ids = ours(text)["input_ids"]
        assert ids == digits(text)["input_ids"], text
        assert BEFORE_DIGIT.search(text) or ids == theirs(text)["input_ids"], text
    for messages in talks[:20]:
        assert ours.apply_chat_template(messages) == theirs.apply_chat_template(messages)
