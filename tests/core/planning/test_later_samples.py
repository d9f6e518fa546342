"""Samples that wait for the end of an epoch."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import TokenBudget
from odb_nodes.core.planning.later_samples import LaterSamples

BUDGETS = [TokenBudget(60), TokenBudget(60, layout="packed"), TokenBudget(60, max_patches=3)]


def later_of(tokens, **options):
    """Samples 100, 101, ... of these lengths, each with a patch."""
    later = LaterSamples()
    numbers = np.arange(100, 100 + len(tokens))
    later.add(numbers, np.array(tokens, np.int64), np.ones_like(numbers), **options)
    return later


def groups_of(later, budget):
    groups = []
    while (group := later.next_group(budget)) is not None:
        groups.append(group.tolist())
    return groups


@given(st.lists(st.integers(1, 80), max_size=20), st.sampled_from(BUDGETS), st.integers(0, 9))
def test_groups_are_the_same_from_each_state(tokens, budget, taken):
    later = later_of(tokens)
    groups = groups_of(later, budget)
    assert sorted(sum(groups, [])) == later.numbers.tolist() == [*range(100, 100 + len(tokens))]
    for group in groups:
        lengths = [tokens[number - 100] for number in group]
        assert len(group) == 1 or budget.cost(lengths) <= budget.tokens
        assert len(group) <= (budget.max_patches or len(group))
    for group in groups[:taken]:
        later.remove(np.array(group))
    again = LaterSamples.from_states(later.to_state(), samples=200)
    assert groups_of(again, budget) == groups[taken:]


def test_samples_that_are_added_to_groups_have_all_grouped_anew():
    later, other = later_of([30, 30]), later_of([30], were_in_group=True)
    assert not later.are_grouped and later.next_group(TokenBudget(60)).tolist() == [100, 101]
    assert later.are_grouped and later.next_group(TokenBudget(60)) is None
    later.group_anew()
    assert groups_of(later, TokenBudget(30)) == [[101], [100]]
    assert other.were_in_group(np.array([100, 101])).tolist() == [True, False]
    assert not later.were_in_group(later.numbers).any()


def test_later_samples_join_states_and_split_into_parts():
    states = [later_of([5, 6]).to_state(), None, later_of([7]).to_state()]
    later = LaterSamples.from_states(*states)
    assert later.tokens.tolist() == [5, 6, 7] and later.tokens_of(101) == 6
    part = later.part(np.array([True, False, True]))
    assert len(part) == 2 and part.tokens.tolist() == [5, 7]
    assert LaterSamples().to_state() is None


@pytest.mark.parametrize("numbers", [[-1], [200]])
def test_a_state_of_other_data_is_refused(numbers):
    later = LaterSamples()
    later.add(np.array(numbers), np.array([5]), np.array([0]))
    with pytest.raises(ValueError, match="a sample that does not exist"):
        LaterSamples.from_states(later.to_state(), samples=200)
    with pytest.raises(ValueError, match="reshape"):
        LaterSamples.from_states(bytes(8))
