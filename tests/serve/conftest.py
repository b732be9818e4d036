"""A server on a toy engine for the tests of a file."""

from __future__ import annotations

import pytest

from tests.serve.toy_server import Running


@pytest.fixture(scope="module")
def server():
    with Running() as made:
        yield made
