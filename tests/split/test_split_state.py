"""The text of a split answer, without a network."""

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
