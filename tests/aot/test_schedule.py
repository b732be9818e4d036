"""The modelled time of a scheduled program: kernels in a row, collectives beside them."""

import pytest

from moa_jax.aot import schedule

# Four turns with a gather that starts ahead, a sum that does not, a gather fused with kernels.
PROGRAM = """HloModule jit_f, is_scheduled=true

%add (a: f32[], b: f32[]) -> f32[] {
  %a = f32[] parameter(0)
  %b = f32[] parameter(1)
  ROOT %sum = f32[] add(%a, %b)
}

%piece (q: f32[8]) -> f32[16] {
  %q = f32[8]{0} parameter(0)
  ROOT %inner = f32[16]{0} all-gather(%q), channel_id=3, dimensions={0}
}

%body (p: (f32[8], s32[])) -> (f32[8], s32[]) {
  %p = (f32[8]{0}, s32[]) parameter(0)
  %x = f32[8]{0} get-tuple-element(%p), index=0
  %ahead = (f32[8]{0}, f32[16]{0}) all-gather-start(%x), channel_id=1, dimensions={0}
  %hiding = f32[8]{0} custom-call(%x), custom_call_target="k"
  %there = f32[16]{0} all-gather-done(%ahead)
  %i = s32[] get-tuple-element(%p), index=1
  ROOT %r = (f32[8]{0}, s32[]) tuple(%hiding, %i)
}

%cond (p.1: (f32[8], s32[])) -> pred[] {
  %p.1 = (f32[8]{0}, s32[]) parameter(0)
  ROOT %c = pred[] constant(true)
}

ENTRY %main (x.1: f32[8], i.1: s32[]) -> f32[8] {
  %x.1 = f32[8]{0} parameter(0)
  %i.1 = s32[] parameter(1)
  %s = (f32[8]{0}, s32[]) tuple(%x.1, %i.1)
  %w = (f32[8]{0}, s32[]) while(%s), condition=%cond, body=%body, TRIPS
  %y = f32[8]{0} get-tuple-element(%w), index=0
  %alone = f32[8]{0} all-reduce(%y), channel_id=2, to_apply=%add
  %first = f32[16]{0} fusion(%alone), kind=kCustom, calls=%piece
  %between = f32[8]{0} custom-call(%alone), custom_call_target="k"
  ROOT %last = f32[16]{0} fusion(%alone), kind=kCustom, calls=%piece
}
""".replace("TRIPS", 'backend_config={"known_trip_count":{"n":"4"}}')
KINDS = {"all-gather": 5.0, "all-reduce": 2.0}


def modelled(**kernels: float) -> schedule.Span:
    return schedule.span(PROGRAM, kernels, lambda each: KINDS[each.kind])


@pytest.mark.parametrize(
    ("kernels", "total", "exposed"),
    [
        ({}, 4 * 5 + 2 + 5, 4 * 5 + 2 + 5),  # nothing hides them
        ({"hiding": 3}, 4 * 5 + 2 + 5, 4 * 2 + 2 + 5),
        ({"hiding": 7}, 4 * 7 + 2 + 5, 2 + 5),
        ({"first": 1, "between": 2, "last": 1}, 4 * 5 + 2 + 5, 4 * 5 + 2 + 1),
        ({"first": 1, "between": 2, "last": 4}, 4 * 5 + 2 + 7, 4 * 5 + 2),
    ],
)
def test_kernels_hide_what_is_sent_beside_them(kernels, total, exposed):
    assert modelled(**kernels) == (total, exposed)


def test_one_collective_at_a_time():
    """Two that start together end one after the other."""
    second = "  %second = (f32[8]{0}, f32[16]{0}) all-gather-start(%x), channel_id=9\n"
    late = "  %late = f32[16]{0} all-gather-done(%second)\n"
    text = PROGRAM.replace("  %hiding", second + "  %hiding").replace("  %i = ", late + "  %i = ")
    found = schedule.span(text, {"hiding": 6.0}, lambda each: KINDS[each.kind])
    assert found == (4 * 10 + 2 + 5, 4 * 4 + 2 + 5)
