"""Rows of integers of every type, and keys of items, for tests that draw them."""

import numpy as np
import torch
from hypothesis import strategies as st

from odb_nodes.core.sample import ItemKey

ROWS_OF_INTEGERS = {
    "array": lambda row: np.array(row, np.int64),
    "strided": lambda row: np.repeat(np.array(row, np.int64), 2)[::2],
    "big-endian": lambda row: np.array(row, ">i8"),
    "(1, L)": lambda row: np.array([row], np.int64),
    "tensor": lambda row: torch.tensor(row, dtype=torch.int64),
    "list": list,
    "nested list": lambda row: [row],
    "list of numpy's ints": lambda row: [*map(np.int64, row)],
    "tuple": tuple,
}
KEYS = st.builds(
    ItemKey,
    st.sampled_from(["", "a", "b/c"]),
    st.integers(0, 2**63 - 1),
    st.sampled_from([1, 2]),
    st.sampled_from([0, 1, 2**40]),
)
