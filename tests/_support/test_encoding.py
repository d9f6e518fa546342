import numpy as np
import pytest

from odb_nodes._support.encoding import decode, encode
from odb_nodes.errors import SampleError, StateError


def test_plain_data_is_decoded_as_it_was():
    value = {
        "a": [1, 2.5, "text", None, True, b""],
        ("b", 1): np.arange(6, dtype=">i2").reshape(2, 3),
    }
    decoded = decode(encode(value))
    assert decoded["a"] == value["a"]
    assert decoded["b", 1].dtype == ">i2" and (decoded["b", 1] == value["b", 1]).all()


@pytest.mark.parametrize("value", [object(), {1, 2}, np.ma.array([1, 2], mask=[0, 1])])
def test_other_data_is_an_error_that_names_its_type(value):
    with pytest.raises(SampleError, match=type(value).__name__):
        encode([value])


def test_damaged_data_is_an_error():
    with pytest.raises(StateError, match="damaged"):
        decode(encode([1, 2])[:-7])
