"""The breaks of `tests.mutations` apply to the current files."""

from __future__ import annotations

import pytest

from tests.mutations import MUTATIONS, ROOT, Mutation


@pytest.mark.parametrize("mutation", MUTATIONS, ids=lambda mutation: mutation.what)
def test_a_break_changes_one_place(mutation: Mutation):
    source = (ROOT / mutation.path).read_text("utf-8")
    assert source.count(mutation.old) == 1 and mutation.new != mutation.old
    compile(source.replace(mutation.old, mutation.new), mutation.path, "exec")
    files = [word for word in mutation.tests.split() if word.startswith("tests/")]
    assert files and all((ROOT / word.partition("::")[0]).exists() for word in files)


def test_breaks_have_distinct_sentences():
    assert len({mutation.what for mutation in MUTATIONS}) == len(MUTATIONS) >= 60
