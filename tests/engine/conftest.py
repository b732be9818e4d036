"""Fixtures close the engines of a test at its end; the files share compiled programs."""

from __future__ import annotations

import pytest

from moa_jax.engine import Engine
from tests.engine.engines import FIRST, close_all


@pytest.fixture(scope="package", autouse=True)
def _dropping():
    yield
    FIRST.clear()


@pytest.fixture(scope="module", autouse=True)
def _closing():
    yield
    close_all()


@pytest.fixture
def started():
    """Returns a function that starts an engine; the fixture closes the engine."""
    engines = []

    def start(engine: Engine) -> Engine:
        engines.append(engine)
        engine.start()
        return engine

    yield start
    for engine in engines:
        engine.close()
