"""Tokens that are bytes of characters: one text, in which bad bytes leave good characters alone."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import tokenizers
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from tests.model_folders import edit_tensors, tensors_of

TURN = "你寿成😀"  # no byte of it occurs twice
FIRST = 3  # of the ids that the target below goes through again and again
CUT = f"{TURN} ok{TURN} ok{TURN[:3]}" + 3 * "\ufffd"


@pytest.fixture
def spelling(pair: Path) -> Path:
    """A target that writes TURN and " ok" again and again, with a tokenizer as Llama 2 has."""
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in TURN.encode()), "\u2581ok"]
    others = [f"<0x{byte:02X}>" for byte in range(256)]
    names += [name for name in others if name not in names]
    vocab = {name: i for i, name in enumerate(names)}
    model = tokenizers.models.BPE(vocab, [], unk_token="<unk>", byte_fallback=True)
    tokenizer = tokenizers.Tokenizer(model)
    tokenizer.decoder = decoders.Sequence(
        [
            decoders.Replace("\u2581", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    folder = pair / "target"
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    tensors = tensors_of(folder)
    for name, tensor in tensors.items():
        if "o_proj" in name or "down_proj" in name:
            tensors[name] = np.zeros_like(tensor)  # layers add nothing
    count = len(TURN.encode()) + 1
    embed, head = (np.zeros_like(tensors[f"{n}.weight"]) for n in ("model.embed_tokens", "lm_head"))
    for place in range(count):
        embed[FIRST + place, place] = 1
        head[FIRST + (place + 1) % count, place] = 1
    new = {"model.embed_tokens.weight": embed, "lm_head.weight": head}
    edit_tensors(folder, **tensors | new)
    return folder


@pytest.fixture
def ask(run, spelling):
    """Answers the last token of a turn."""
    last = FIRST + len(TURN.encode())

    def ask(*arguments: object) -> str:
        flags = ("--target", spelling, "--prompt-ids", last, "--mode", "chain")
        done = run("infer.generate", *flags, *arguments)
        assert done.code == 0, done.err
        return done.out

    return ask


def test_a_character_that_is_cut_takes_no_other_with_it(ask):
    new = ("--max-new-tokens", 2 * 14 + 12)
    (result,) = json.loads(ask(*new, "--json"))["results"]
    assert result["text"] == CUT
    assert ask(*new) == CUT + "\n"  # streamed
    (result,) = json.loads(ask(*new, "--json", "--stop", "k你寿"))["results"]
    assert result["text"] == f"{TURN} o" and len(result["token_ids"]) == 14 + 6
