"""The order of prompt chunks and passes of a shared target."""

from __future__ import annotations

from infer.split_server.pass_scheduler import DecodePass, PassScheduler, PrefillChunk, PromptPicker


def read_all(chunks_of: dict[str, int], coming: dict[int, tuple[str, int]]) -> str:
    """Returns the chunks in their order; `coming` maps a turn to the prompts that arrive then."""
    picker, left, read = PromptPicker(), dict(chunks_of), ""
    while left:
        left |= dict([coming.pop(len(read))]) if len(read) in coming else {}
        name = picker.next(list(left), left.__getitem__)
        read += name
        left[name] -= 1
        if not left[name]:
            del left[name]
    return read


def test_short_prompts_pass_by_a_long_one_that_still_gets_every_other_chunk():
    assert read_all({"A": 4, "B": 1, "C": 1}, {}) == "ABACAA"
    assert read_all({"A": 5}, {1: ("B", 1), 3: ("C", 1)}) == "AABACAA"
    coming = {turn: (chr(ord("a") + turn), 1) for turn in range(20)}
    assert read_all({"A": 6}, coming)[:10] == "AaAbAcAdAA"


# ---- steps --------------------------------------------------------------------------------


class Driver:
    """Prompts with unread tokens, and answers with the widths of their rows."""

    def __init__(self, left: dict[str, int], widths: dict[str, int]) -> None:
        self.left, self.widths = left, widths
        self.scheduler = PassScheduler[str](
            prompts=lambda: list(self.left),
            left=lambda one: self.left[one],
            queue_sizes=lambda: (len(self.left), len(self.widths)),
            answers=lambda: list(self.widths),
            has_state=lambda: list(self.widths),
            chunk=16,
            most_rows=3,
            width=lambda one: self.widths[one],
        )

    def step(self) -> list[str]:
        """Returns the prompts whose chunks were read, then the rows of the pass."""
        found = []
        for piece in self.scheduler.schedule():
            found.append("".join(piece.rows) if isinstance(piece, DecodePass) else piece.of)
            if isinstance(piece, PrefillChunk):
                size = min(self.left[piece.of], 16)
                self.scheduler.on_chunk_done(size)
                self.left[piece.of] -= size
                if not self.left[piece.of]:
                    del self.left[piece.of]
        return found


def test_a_step_is_a_chunk_and_then_a_pass():
    driver = Driver({"A": 40}, {"x": 1, "y": 1})
    assert [driver.step() for _ in range(4)] == [["A", "xy"]] * 3 + [["xy"]]
    assert Driver({}, {}).step() == [] and Driver({"A": 40}, {}).step() == ["A"]


def test_a_wide_row_has_a_pass_of_its_own():
    """The oldest row is first, with the rows that fit beside it."""
    driver = Driver({}, {"a": 1, "b": 8, "c": 4, "d": 2, "e": 4})
    assert driver.step() == ["acd"]
    driver.widths = {"b": 8, "e": 1, "f": 32}
    assert driver.step() == ["bf"]


def test_a_failure_affects_those_at_work_and_with_the_state_all():
    driver = Driver({"A": 40, "B": 40}, {"x": 1, "y": 9})
    scheduler = driver.scheduler
    pieces = scheduler.schedule()
    assert next(pieces) == PrefillChunk("A")
    assert scheduler.affected(state_is_lost=False) == ["A"]
    driver.left, pieces = {"B": 40}, scheduler.schedule()
    assert next(pieces) == PrefillChunk("B")
    assert scheduler.affected(state_is_lost=True) == ["B", "x", "y"]
    driver.left, pieces = {}, scheduler.schedule()
    assert next(pieces) == DecodePass(["x"])
    assert scheduler.affected(state_is_lost=False) == ["x"]
    assert not scheduler.affected(state_is_lost=False), "a failure affects them once"
