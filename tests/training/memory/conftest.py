"""Faster garbage collection for tests that free memory many times."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Exclude objects that exist before a module's tests from garbage collection."""
    gc.freeze()
    yield
    gc.unfreeze()
