"""What planning knows of samples before they are read."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from pools import budgets, streams

from odb_nodes import SampleError, TokenBudget
from odb_nodes.core.planning.sample_costs import SampleCosts

few = settings(max_examples=max(20, settings.default.max_examples // 5))


def costs_of(samples):
    tokens, patches, tasks = np.array(samples, np.int64).reshape(-1, 3).T
    return SampleCosts(tokens, tokens - 1, patches, tasks)


@given(streams, budgets)
@few
def test_a_sample_is_oversize_under_the_same_rule_in_a_table_and_alone(samples, budget):
    expected = [budget.is_oversize(tokens, patches) for tokens, patches, _ in samples]
    costs = costs_of(samples)
    assert costs.are_oversize(budget).tolist() == expected
    assert not costs.are_left_out(budget).any()
    assert costs.are_left_out(replace(budget, oversize="drop")).tolist() == expected


def test_skipped_samples_are_left_out_and_oversize_ones_dropped_or_an_error():
    costs = costs_of([(0, 0, 0), (9, 0, 0), (8, 5, 0), (4, 1, 0)])
    budget = TokenBudget(8, max_patches=4)
    assert costs.are_left_out(budget).tolist() == [True, False, False, False]
    dropping = replace(budget, oversize="drop")
    assert costs.are_left_out(dropping).tolist() == [True, True, True, False]
    with pytest.raises(SampleError, match="9 tokens and 0 patches exceeds TokenBudget"):
        costs.are_left_out(replace(budget, oversize="error"))


def test_of_lengths_alone_there_are_no_patches_or_targets():
    costs = SampleCosts.of_lengths([3, 5])
    assert [column.tolist() for column in costs] == [[3, 5], [0, 0], [0, 0], [0, 0]]
