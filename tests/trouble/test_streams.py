"""Streams of a process: what is no UTF-8, what is closed, what a terminal cannot write."""


def test_a_bad_flag_is_one_line(run, start):
    for program in (run, start):
        line = program("infer.generate", "--max-new-tokens", "0").refusal()
        assert "'0' is not a whole number of at least 1" in line
