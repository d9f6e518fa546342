import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes._core.hashing import hash_ints, hash_rows

INTS = st.integers(-(2**70), 2**70)
COLUMNS = st.integers(1, 40).flatmap(
    lambda rows: st.lists(st.lists(INTS, min_size=rows, max_size=rows), min_size=1, max_size=4)
)


def test_golden_hashes():
    assert [hash_ints(), hash_ints(0), hash_ints(1, -2, 2**63)] == [
        0,
        16294208416658607535,
        875356130342922583,
    ]


@given(COLUMNS)
def test_rows_hash_as_their_integers(columns):
    assert hash_rows(*columns) == [hash_ints(*row) for row in zip(*columns, strict=True)]


def test_rows_hash_to_plain_ints():
    assert {type(value) for value in hash_rows([1, 2], [3, 4])} == {int}


def test_what_is_no_integer_is_refused():
    with pytest.raises(TypeError):
        hash_rows([1, 2.5])
