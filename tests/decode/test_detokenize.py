"""Incremental detokenization emits whole characters, and no part of a stop text."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import tokenizers
from tokenizers import decoders
from transformers import PreTrainedTokenizerFast

from infer.openai.tokens import _bytes_of_characters
from moa_jax.decode.detokenize import (
    HALF,
    Detokenizer,
    GrowingText,
    StopFinder,
    Writer,
    before_stop,
)

SENTENCE = "Ein Café, ein Kaffee für 3 €. 你好, 👩‍🚀! " * 9


class Bytes:
    """A tokenizer; each of its tokens is one byte of UTF-8."""

    def decode(self, tokens: list[int], skip_special_tokens: bool) -> str:
        return bytes(tokens).decode(errors="replace")


WRITER = Writer(Bytes())


def pieces(*parts: bytes, stops: tuple[str, ...] = ()) -> list[str]:
    return list(WRITER.pieces([list(part) for part in parts], stops))


def test_the_possible_beginning_of_a_stop_text_waits():
    assert pieces(b"a us", b"e", stops=("us.",)) == ["a ", "use", ""]
    assert pieces(b"a us", b". b", stops=("us.",)) == ["a ", "", ""]
    assert pieces(b"a u", stops=("us.",)) == ["a ", "u"]  # none came


def test_the_first_of_two_stop_texts_that_one_token_completes_ends_the_text():
    text = GrowingText(None, ("7 ", "17 "))
    assert text.add([5, 17, 3]) == "5 "
    assert (text.stop, text.num_tokens) == ("17 ", 2)
    assert StopFinder(Bytes(), ["."])(list(b"ab.cd")) == 3


def test_without_a_tokenizer_ids_are_shown():
    writer = Writer(None)
    assert writer.text([5]) is None
    assert list(writer.pieces([[5, 6], [7]], [])) == ["5 6 ", "7 ", ""]


def test_tokens_have_places_in_a_growing_text():
    growing, places = GrowingText(Bytes()), []
    for token in "a€".encode() + b"\xe2b\xffc":
        growing.add([token])
        places.append((growing.begin, growing.num_characters))
    assert places == [(0, 1), (1, 2), (1, 2), (1, 2), (2, 3), (3, 4), (4, 5), (5, 6)]


def test_the_space_before_a_word_is_kept_after_a_prompt():
    """SentencePiece decoders drop the first space of a text."""
    hello, world = pieces_ids = (4, 5)
    pieces = sentence_pieces()
    assert pieces.decode(pieces_ids) == "Hello world" and pieces.decode([world]) == "world"
    growing = GrowingText(pieces, ["wor"], preceding=[hello])
    assert growing.add([world]) == " " and (growing.begin, growing.num_characters) == (0, 6)
    growing = GrowingText(Bytes(), preceding=b"caf\xc3")  # half a character is no context
    assert growing.add(b"\xa9!") == "\ufffd!"
    long = GrowingText(pieces, preceding=[hello] * 99)
    assert "".join(long.add([token]) for token in [world, 3] * 50) == " worldthe" * 50
    assert long.num_characters == 9 * 50


def sentence_pieces() -> PreTrainedTokenizerFast:
    """Returns a tokenizer of five words with Llama 2's decoder."""
    vocab = {"<unk>": 0, "\u2581a": 1, "\u2581the": 2, "the": 3, "\u2581Hello": 4, "\u2581world": 5}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel(vocab, "<unk>"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Metaspace()
    steps = [decoders.Replace("\u2581", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def test_a_stop_text_may_be_kept():
    growing = GrowingText(Bytes(), ("fee",), keep_stop=True)
    assert growing.add(b"coffee, tea") == "coffee"
    assert (growing.stop, growing.num_tokens, growing.end()) == ("fee", 6, "")


def byte_fallback() -> PreTrainedTokenizerFast:
    """Returns a tokenizer in Llama 2's format; its ids are bytes, three words and `</s>`."""
    names = [*(f"<0x{byte:02X}>" for byte in range(256)), "\u2581the", "the", "\u2581", "</s>"]
    vocab = {name: token for token, name in enumerate(names)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, [], byte_fallback=True))
    tokenizer.add_special_tokens(["</s>"])
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback()]
    steps += [decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def byte_level() -> PreTrainedTokenizerFast:
    """Returns a byte-level BPE: ids 0 to 255 are bytes, and longer tokens cross characters."""
    character_of = {byte: character for character, byte in _bytes_of_characters().items()}
    longer = [b" the", "好".encode(), b"\x82\xac\xe2", b"a\xe4"]
    parts = [*(bytes([byte]) for byte in range(256)), *longer]
    vocab = {"".join(character_of[byte] for byte in part): i for i, part in enumerate(parts)}
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    tokenizer.add_special_tokens(["</s>"])
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>")


def answers(tokenizer: PreTrainedTokenizerFast, seed: int) -> Iterator[list[int]]:
    """Yields split and damaged characters, random tokens, repeated tokens, and ids without text."""
    chance, most = random.Random(seed), len(tokenizer) + 2
    yield list("€好👩‍🚀 a".encode())[: chance.randrange(20)] * 4
    for count in (1, 3):
        damaged = list(SENTENCE.encode())
        for _ in range(count):
            damaged.insert(chance.randrange(len(damaged)), chance.randrange(most))
        yield damaged[: chance.randrange(len(damaged))]
    for pool in (range(most), chance.sample(range(most), 2), [0x80, 0xE4, most - 3]):
        yield chance.choices(pool, k=chance.choice([9, 150]))


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
@pytest.mark.parametrize("seed", range(4))
def test_a_text_does_not_depend_on_the_parts_of_its_tokens(make, seed):
    tokenizer = make()
    for tokens in answers(tokenizer, seed):
        for skip in (True, False):
            text = Detokenizer(tokenizer, skip).decode(tokens)
            theirs = tokenizer.decode(tokens, skip_special_tokens=skip)
            assert text == theirs or (make is byte_fallback and HALF in theirs)
            for stops in ((), ("never there",), ("好",), (text[9:12].replace(HALF, "") or "x",)):
                ends = set()
                for size in (1, 2, 3, 8, 999):
                    growing = GrowingText(tokenizer, stops, skip_special=skip)
                    parts = [tokens[i : i + size] for i in range(0, len(tokens), size)]
                    shown = "".join(map(growing.add, parts)) + growing.end()
                    assert shown == before_stop(text, stops)
                    ends.add(growing.num_tokens)
                assert len(ends) == 1


@pytest.mark.parametrize("least, shown, count", [(0, "", 2), (3, "ab", 4), (6, "ababab", 6)])
def test_a_stop_text_within_the_least_tokens_does_not_stop(least, shown, count):
    growing = GrowingText(byte_level(), ["ab"], min_tokens=least)
    text = "".join(growing.add([token]) for token in b"ababab") + growing.end()
    assert (text, growing.num_tokens) == (shown, count)


def test_bad_bytes_leave_characters_as_they_are():
    tokenizer = byte_fallback()
    text_of = Detokenizer(tokenizer).decode
    eos = tokenizer.eos_token_id
    start, face = list("你好吗".encode()), list("😀".encode())
    assert text_of([*start, *face[:3]]) == "你好吗" + 3 * HALF
    assert text_of([0xFF, *start, 0x80, *face]) == f"{HALF}你好吗{HALF}😀"
    assert text_of([*face[:2], eos, *face[2:]]) == "😀"
    assert Detokenizer(tokenizer, skip_special=False).decode([*face[:1], eos]) == f"{HALF}</s>"


@pytest.mark.parametrize("make", [byte_fallback, byte_level])
@pytest.mark.parametrize("kind", [b"\x80", b"\xe4", "好".encode(), b"a", None], ids=str)
def test_the_text_of_a_token_costs_the_same_in_a_long_answer(make, kind, monkeypatch):
    """Holds for bad bytes, split characters and special tokens (None here)."""
    growing, lengths = Detokenizer.growing, []

    def counted(self: Detokenizer, tokens: list[int]) -> tuple[str, int]:
        lengths.append(len(tokens))
        return growing(self, tokens)

    monkeypatch.setattr(Detokenizer, "growing", counted)
    tokenizer, stops = make(), ["never there"]
    tokens = list(kind or [tokenizer.eos_token_id]) * 300
    find, text = StopFinder(tokenizer, stops), GrowingText(tokenizer, stops)
    for end in range(3, len(tokens) + 3, 3):
        assert find(tokens[:end]) is None
        text.add(tokens[end - 3 : end])
    assert max(lengths) < 50 and len(lengths) < 3 * len(tokens)
