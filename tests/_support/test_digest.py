"""Digests of samples, equal where they are equal, however they are stored; hashes of integers."""

import copy
import math
import subprocess
import sys
import time
import zlib
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import PerSource
from odb_nodes._support.content import tensor_bytes
from odb_nodes._support.digest import content_digest
from odb_nodes._support.hashing import hash_ints, hash_rows, stable_name


def matrix(number, *changed):
    rows = [[number(row * 300 + column) for column in range(300)] for row in range(300)]
    for row, column in changed:
        rows[row][column] += number(1)
    return rows


ITEMS = [
    *(3, 3.5, None, True, "text", b"text"),
    *([1, 2, 3], [1, 2, 4], (1, 2.5, "a"), [2**70]),
    *(list(range(5000)), [*range(4999), 0], "a" * 9000 + "b", "a" * 9001),
    *({"id": 1, "input_ids": [1, 2]}, {"id": 2, "input_ids": [1, 2]}, {"nested": {"id": [2, [3]]}}),
    *(torch.arange(4), torch.arange(4).reshape(2, 2), torch.arange(4.0, dtype=torch.bfloat16)),
    *(torch.tensor(True), torch.zeros(0), torch.zeros(3, 200, 200), torch.eye(3, 5).t()),
    *(np.arange(4, dtype=np.int16), np.float32(1.5), np.zeros((100, 100)), np.array(["a", "b"])),
    *([0.1, 0.2], [0.1, 0.3], [0.1, 2], [0.1, 2.0], [0.1, None]),
    *([[0.1, 0.2], [0.3, 0.4]], [[0.1, 0.2], [0.3, 0.5]]),
    *(
        matrix(n, *places)
        for n in (int, math.sqrt)
        for places in ((), [(0, 0)], [(150, 150)], [(299, 299)])
    ),
]


def test_equal_items_have_equal_digests():
    digests = [*map(content_digest, ITEMS)]
    assert len(set(digests)) == len(ITEMS)
    assert [content_digest(copy.deepcopy(item)) for item in ITEMS] == digests


@given(st.lists(st.integers(-(2**63), 2**63 - 1) | st.integers(0, 100), min_size=30, max_size=60))
def test_long_lists_have_the_digests_of_tuples(values):
    assert content_digest(values) == content_digest(tuple(values))
    small = [value % 1000 for value in values]
    assert content_digest(small) == content_digest(tuple(small))


@pytest.mark.parametrize(
    "row",
    [
        np.arange(0),
        np.arange(10)[::2],
        np.arange(5, dtype=np.int32),
        np.array([2**63 - 1, -(2**63)]),
        torch.arange(10)[::2],
        torch.arange(5.0, requires_grad=True),
    ],
    ids=str,
)
def test_a_row_is_digested_by_dtype_length_and_values(row):
    array = np.asarray(row.detach()) if isinstance(row, torch.Tensor) else row
    form = zlib.crc32(b"%d %d" % (array.dtype.num, len(array)))
    assert content_digest(row) == zlib.crc32(array.tobytes(), form)
    whole = zlib.crc32(array.tobytes(), zlib.crc32(b"%d %a" % (array.dtype.num, (1, len(array)))))
    assert content_digest(row[None]) == whole
    assert content_digest({"a": row}, 3) == content_digest(row, zlib.crc32(b"a", 3))


def test_an_object_of_an_unknown_type_is_digested_by_its_type():
    assert content_digest([object(), "a"]) == content_digest([object(), "a"])
    assert content_digest(object()) != content_digest(Exception())
    assert isinstance(content_digest(np.array([object()])), int)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32, torch.float8_e4m3fn], ids=str)
@pytest.mark.parametrize("length", [0, 1, 2])
def test_a_digest_does_not_depend_on_how_memory_is_laid_out(dtype, length):
    values = torch.arange(6.0).to(dtype)
    sparse, dense = values[::2][:length], torch.arange(0.0, 2 * length, 2).to(dtype)
    assert sparse.stride() != dense.stride()
    assert content_digest(sparse) == content_digest(dense)
    assert tensor_bytes(sparse).tolist() == tensor_bytes(dense).tolist()
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(3).to("meta")):
        assert content_digest(tensor) == content_digest(tensor.clone())
    conjugate = torch.tensor([1 + 2j]).conj()
    assert content_digest(conjugate) == content_digest(torch.tensor([1 - 2j]))


def test_fractions_are_digested_about_as_fast_as_integers():
    def seconds(item):
        start_s = time.process_time()
        content_digest(item)
        return time.process_time() - start_s

    def best(number):
        item = matrix(number)
        return min(seconds(item) for _ in range(3))

    assert best(math.sqrt) < 10 * best(int)  # twice as long; by their text, 50 times


def test_a_digest_is_the_same_in_every_process():
    item = {"id": "x", "ids": [1, 2]}
    code = f"from odb_nodes._support.digest import content_digest; print(content_digest({item}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) == content_digest(item)


# --- hashes of integers, and names of callables: what an object declares of itself ---------------


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
    hashes = hash_rows(*columns)
    assert hashes == [hash_ints(*row) for row in zip(*columns, strict=True)]
    assert {*map(type, hashes)} == {int}


class Crop:
    def __init__(self, tokens):
        self.fingerprint_name = f"Crop({tokens})"

    def __call__(self, item):
        return item


class Plain:
    __call__ = Crop.__call__


@pytest.mark.parametrize(
    ("named", "name"),
    [
        (Crop(5), "Crop(5)"),
        (partial(Crop(5), 3), "Crop(5)(3)"),
        (Plain(), "Plain"),
        (Crop, "Crop"),
        (PerSource({"a": Crop(3), "b": Plain()}), "PerSource(a=Crop(3), b=Plain)"),
    ],
)
def test_an_object_is_known_by_the_name_that_it_declares_or_its_class(named, name):
    assert stable_name(named) == name
