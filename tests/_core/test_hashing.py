import pytest
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes._core.hashing import hash_ints, hash_rows

INTS = st.integers(-(2**70), 2**70)
COLUMNS = st.integers(1, 40).flatmap(
    lambda rows: st.lists(st.lists(INTS, min_size=rows, max_size=rows), min_size=1, max_size=4)
)


def test_golden_hashes():
    golden = [0, 16294208416658607535, 875356130342922583]
    assert [hash_ints(), hash_ints(0), hash_ints(1, -2, 2**63)] == golden
    with pytest.raises(TypeError):
        hash_rows([1, 2.5])


@given(COLUMNS)
def test_rows_hash_as_their_integers(columns):
    found = hash_rows(*columns)
    assert found == [hash_ints(*row) for row in zip(*columns, strict=True)]
    assert {*map(type, found)} == {int}
