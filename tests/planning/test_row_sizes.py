import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pools import run

from odb_nodes import TokenBudget
from odb_nodes.planning.budget import allowed_rows

EVEN = {1, *range(2, 2000, 2)}
FRIENDLY = {1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536}
ALLOWED = {"any": set(range(1, 2000)), "even": EVEN, "friendly": FRIENDLY}


@pytest.mark.parametrize(("sizes", "allowed"), ALLOWED.items())
def test_rows_are_rounded_down_to_the_next_number_allowed(sizes, allowed):
    rows = np.arange(1, 2000)
    expected = [max(one for one in allowed if one <= number) for number in rows.tolist()]
    assert allowed_rows(rows, sizes).tolist() == expected


def test_the_largest_numbers_of_rows_are_rounded_as_well():
    most = np.array([2**31 - 1, 2**31 - 2, 3 << 29])
    assert allowed_rows(most, "friendly").tolist() == [3 << 29] * 3
    assert allowed_rows(most, "even").tolist() == [2**31 - 2, 2**31 - 2, 3 << 29]


@given(
    lengths=st.lists(st.integers(1, 60), min_size=60, max_size=200),
    sizes=st.sampled_from(["even", "friendly"]),
    data=st.data(),
)
def test_under_a_limit_of_patches_groups_have_these_rows_until_the_data_ends(lengths, sizes, data):
    patches = data.draw(st.lists(st.integers(0, 9), min_size=len(lengths), max_size=len(lengths)))
    budget = TokenBudget(600, max_patches=40, row_sizes=sizes)
    groups, _ = run(lengths, budget, 30, patches)
    out = np.cumsum([len(group) for group in groups])
    before_the_end = int(np.searchsorted(out, len(lengths) - 30, side="right"))
    assert {len(group) for group in groups[:before_the_end]} <= ALLOWED[sizes]
