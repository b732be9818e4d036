"""The Python API: arrays of any library, and invalid token ids, numbers and stops."""

import json

import jax.numpy as jnp
import numpy as np
import pytest
import torch

from moa_jax import InputError, Session, load_drafter, load_target


@pytest.fixture(scope="module")
def session(saved) -> Session:
    folder = saved / "llama"
    target = load_target(str(folder / "target"), jnp.float32)
    return Session(target, load_drafter(folder / "draft", target))


@pytest.mark.slow
@pytest.mark.parametrize("kind", [np.array, jnp.array, torch.tensor, tuple, list])
def test_prompts_are_arrays_of_any_library(session, kind):
    (own,) = session.generate([[5, 6, 7]], 6)
    stop = own.token_ids[2]
    for prompts in ([kind([5, 6, 7])], kind([[5, 6, 7]]), [[*kind([5, 6, 7])]]):
        (found,) = session.generate(prompts, 6)
        assert found.token_ids == own.token_ids and found.prompt_ids == [5, 6, 7]
        assert all(type(token) is int for token in found.prompt_ids)
    for most in (np.int64(6), jnp.int32(6), torch.tensor(6), np.array([6])):
        assert session.generate([[5, 6, 7]], most)[0].token_ids == own.token_ids
    *_, streamed = session.stream(kind([5, 6, 7]), 6, kind([stop]))
    assert streamed.token_ids == own.token_ids[: own.token_ids.index(stop) + 1]


PROMPTS = [
    *([[5.0]], [[True]], [[None]], [[-1]], [[10**9]], [[]], [], None, 5, [5, 6]),
    *("Hello", ["Hello"], {"input_ids": [[5]]}, [jnp.ones((1, 2), jnp.int32)], [[[5]]]),
]


@pytest.mark.parametrize(
    "given, says",
    [
        *(((prompts, 4), ".") for prompts in PROMPTS),
        *((([[5, 6, 7]], most), "max_new_tokens|lengths") for most in (0, 2.5, True, "8", [1, 2])),
        *((([[5, 6, 7]], 4, stop_ids), "stop") for stop_ids in ([2.5], "12", 5, [True])),
    ],
    ids=repr,
)
def test_invalid_prompts_lengths_and_stops_are_one_line(session, given, says):
    with pytest.raises(InputError, match=says) as error:
        session.generate(*given)
    assert "\n" not in str(error.value) and len(str(error.value)) < 150


@pytest.mark.slow
def test_a_seed_of_minus_1_is_drawn_at_each_call(run, saved):
    flags = ["--target", saved / "llama" / "target", "--mode", "plain", "--prompt-ids", "5,6"]
    flags += ["--max-new-tokens", 12, "--temperature", 1, "--json", "--seed"]
    found = [json.loads(run("infer.generate", *flags, -1).out) for _ in range(2)]
    seeds = [document["settings"]["seed"] for document in found]
    texts = [document["results"][0]["token_ids"] for document in found]
    assert seeds[0] != seeds[1] and texts[0] != texts[1] and min(seeds) >= 0
    again = json.loads(run("infer.generate", *flags, seeds[0]).out)
    assert again["results"][0]["token_ids"] == texts[0]
