"""The text of a split answer, without a network."""

import random

from infer.split_client.state import AnswerText

STOP = 9


def test_split_text_tail_ends_at_a_stop_or_the_limit():
    text = AnswerText([1, 2], 6, [STOP])
    text.write([3, 4, STOP, 5])
    assert text.unverified == [3, 4, STOP] and text.is_written and text.num_unverified == 3
    text = AnswerText([1, STOP], 5, [STOP])  # a prompt's own stop ids end nothing
    assert not text.is_written and not text.end_of(text.committed)
    text.write([3, 4, 5, 6])
    assert text.unverified == [3, 4, 5] and text.end_of(text.whole) == "length"


def test_split_text_rewrites_all_of_a_tail_that_differs():
    text = AnswerText([1], 20, [])
    text.write([2, 3, 4])
    assert text.replace_tail([2, 3]) == 0 and text.unverified == [4]
    assert text.replace_tail([5]) == 1 and text.unverified == []
    assert text.replace_tail([5]) == 0  # nothing was written alone
    text.write([6])
    assert text.replace_tail([6, 7]) == 0 and text.unverified == []
    text.write([10, 11, 12, 13])
    assert text.replace_tail([10, 11, 99]) == 2 and text.unverified == []  # 10 and 11 stayed


def test_split_text_kept_tokens_are_told_from_verified_ones():
    text = AnswerText([1], 20, [])
    text.settle([2])
    text.write([3, 4])
    text.keep_tail()
    text.settle([5])
    assert text.kept == [False, False, True, True, False] and text.num_unverified == 2
    text.cut(2)
    assert text.answer == [2, 3] and text.num_unverified == 1


def test_split_text_what_was_verified_stays():
    """Whatever is written alone, settled and rewritten."""
    for seed in range(50):
        chance = random.Random(seed)
        text, settled = AnswerText([0, 0], 60, []), []
        for _ in range(20):
            tokens = [chance.randrange(3) for _ in range(chance.randrange(5))]
            if chance.random() < 0.5:
                text.write(tokens)
            else:
                text.settle(tokens)
                text.replace_tail(tokens)
            verified = text.event().verified
            assert text.answer[: len(settled)] == settled and verified >= len(settled)
            settled = text.answer[:verified]
            assert settled == text.committed[2:]
