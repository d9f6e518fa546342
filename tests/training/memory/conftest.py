"""For tests in which memory is freed again and again."""

import gc

import pytest


@pytest.fixture(scope="module", autouse=True)
def little_garbage():
    """Collect the garbage of tests alone: what is freed for lack of memory is found by that."""
    gc.freeze()
    yield
    gc.unfreeze()
