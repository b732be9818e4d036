"""What fits behind a prompt is what `check` takes, for every length."""

import pytest

from moa_jax.decode.room import Room
from moa_jax.errors import InputError


def takes(room: Room, prompt_length: int, wanted: int) -> bool:
    try:
        room.check(0, prompt_length, wanted)
    except InputError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize("room", [Room(40), Room(200, 101), Room(200, 101, 5), Room(60, 256, 62)])
def test_exactly_what_fits_is_taken(room):
    for prompt_length in range(1, 130):
        fits = room.behind(prompt_length)
        assert fits == 0 or takes(room, prompt_length, fits)
        assert not takes(room, prompt_length, fits + 1)


def test_a_prompt_is_read_in_rows_of_its_bucket():
    """A prompt of 65 tokens takes 128 rows at first, though it needs 65."""
    assert [Room(200, 101).behind(count) for count in (30, 64, 65)] == [71, 37, 0]


def test_the_line_says_what_is_needed():
    with pytest.raises(InputError, match="8 tokens and 5 are to follow, but .* 12 positions"):
        Room(12).check(3, 8, 5)
    with pytest.raises(InputError, match="needs 37, 5 of them for the draft: make it larger"):
        Room(99, 36, 5).check(0, 8, 5)
