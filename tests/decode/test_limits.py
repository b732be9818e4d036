"""The limits computed for a prompt are the limits that `check` accepts, for every length."""

import pytest

from moa_jax.decode.limits import CacheLimits
from moa_jax.errors import InputError


def takes(room: CacheLimits, prompt_length: int, wanted: int) -> bool:
    try:
        room.check(0, prompt_length, wanted)
    except InputError as error:
        assert "\n" not in str(error)
        return False
    return True


@pytest.mark.parametrize(
    "room",
    [CacheLimits(40), CacheLimits(200, 101), CacheLimits(200, 101, 5), CacheLimits(60, 256, 62)],
)
def test_exactly_what_fits_is_taken(room):
    for prompt_length in range(1, 130):
        fits = room.max_new_tokens(prompt_length)
        assert fits == 0 or takes(room, prompt_length, fits)
        assert not takes(room, prompt_length, fits + 1)


def test_the_error_names_what_is_needed():
    with pytest.raises(InputError, match="8 tokens and 5 are to follow, but .* 12 positions"):
        CacheLimits(12).check(3, 8, 5)
    with pytest.raises(InputError, match="needs 37, 5 of them for drafts; make it larger"):
        CacheLimits(99, 36, 5).check(0, 8, 24)


def test_rows_double_up_to_the_positions():
    """A cache has a row for every token that fits, and no row that is never used."""
    room = CacheLimits(1000, draft_rows=5)
    assert [room.rows_for(count) for count in (1, 123, 124, 251, 500)] == [128, 128, 256, 256, 512]
    assert [room.rows_for(count) for count in (508, 1000)] == [1024, 1024]
    assert [room._replace(positions=700).rows_for(count) for count in (508, 700)] == [768, 768]
    assert [room._replace(least_rows=512).rows_for(count) for count in (1, 508)] == [512, 1024]
    assert room._replace(cache_rows=640).rows_for(1) == 640
