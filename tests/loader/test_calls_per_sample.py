"""The trainer's process calls nothing for each sample, but for groups and chunks."""

import sys

import numpy as np
import pytest

from odb_nodes import Ledger, ODBDataLoader, TokenBudget, WorkerOptions, pop_step_info

GROUPS, TOKENS = 24, 10


class Texts:
    def __init__(self, samples):
        self._samples = samples

    def __len__(self):
        return self._samples

    def __getitem__(self, index):
        ids = np.full(TOKENS, index)
        return {"input_ids": ids, "labels": ids}


def calls_of_an_epoch(of_each, budget, ledger):
    """Return the calls of Python functions in an epoch of groups of `of_each` samples."""
    calls = 0

    def count(_frame, event, _argument):
        nonlocal calls
        calls += event == "call"

    loader = ODBDataLoader(
        Texts(GROUPS * of_each),
        token_budget=budget,
        window=4 * of_each,
        workers=WorkerOptions(num_workers=1, chunk_size=4 * of_each),
        prefetch=0,
    )
    with loader, ledger:
        batches, groups = iter(loader), 0
        ledger.record(pop_step_info(next(batches)))
        sys.setprofile(count)
        try:
            for batch in batches:
                ledger.record(pop_step_info(batch))
                groups += 1
        finally:
            sys.setprofile(None)
    assert groups == GROUPS - 1
    return calls


@pytest.mark.slow  # worker processes
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_no_function_is_called_for_each_sample(layout, tmp_path):
    few, many = (
        calls_of_an_epoch(
            of_each, TokenBudget(of_each * TOKENS, layout=layout), Ledger(tmp_path / str(of_each))
        )
        for of_each in (8, 128)
    )
    assert (many - few) / (GROUPS * (128 - 8)) < 0.5
