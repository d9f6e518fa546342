"""Lists of integers become arrays fast."""

import enum

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes._support.arrays import array_of_ints

INT32 = st.integers(-(2**31), 2**31 - 1)
BYTES_OF_TAGS = st.sampled_from([0x69, 0x6969, 0x69696969, ord("l"), ord("I")])
OTHERS = st.one_of(
    *(st.integers(), st.booleans(), st.floats(), st.none(), st.text(max_size=5)),
    *(st.binary(max_size=10), st.lists(INT32, max_size=3), st.tuples(INT32)),
    *(st.integers(-100, 100).map(make) for make in (np.int64, np.int32, torch.tensor)),
    *(st.just(enum.IntEnum("Some", "one").one), st.just(object())),
)


@given(st.lists(INT32 | BYTES_OF_TAGS, min_size=1))
def test_ints_of_32_bits_become_the_array_that_numpy_makes(values):
    expected, array = np.asarray(values), array_of_ints(values)
    assert array.dtype == expected.dtype and array.tolist() == values
    assert array.flags.c_contiguous and array.flags.writeable and array.flags.owndata


@given(st.lists(INT32 | BYTES_OF_TAGS | OTHERS))
def test_other_lists_become_no_array(values):
    plain = bool(values) and all(type(v) is int and -(2**31) <= v < 2**31 for v in values)
    assert (array_of_ints(values) is not None) == plain


def test_a_list_that_holds_itself_becomes_no_array():
    values = [1]
    values.append(values)
    assert array_of_ints(values) is None
