import copy
import subprocess
import sys

import numpy as np
import pytest
import torch

from odb_nodes._core.content import content_digest

ITEMS = [
    3,
    3.5,
    None,
    True,
    "text",
    b"text",
    [1, 2, 3],
    [1, 2, 4],
    (1, 2.5, "a"),
    [2**70],
    list(range(5000)),
    [*range(4999), 0],
    "a" * 9000 + "b",
    "a" * 9001,
    {"id": 1, "input_ids": [1, 2]},
    {"id": 2, "input_ids": [1, 2]},
    {"nested": {"id": [2, [3]]}},
    torch.arange(4),
    torch.arange(4).reshape(2, 2),
    torch.arange(4.0, dtype=torch.bfloat16),
    torch.tensor(True),
    torch.zeros(0),
    torch.zeros(3, 200, 200),
    torch.eye(3, 5).t(),
    np.arange(4, dtype=np.int16),
    np.float32(1.5),
    np.zeros((100, 100)),
    np.array(["a", "b"]),
]


def test_different_items_have_different_digests():
    assert len({content_digest(item) for item in ITEMS}) == len(ITEMS)


@pytest.mark.parametrize("item", ITEMS, ids=lambda item: type(item).__name__)
def test_equal_items_have_equal_digests(item):
    assert content_digest(copy.deepcopy(item)) == content_digest(item)


def test_an_object_of_an_unknown_type_is_digested_by_its_type():
    assert content_digest([object(), "a"]) == content_digest([object(), "a"])
    assert content_digest(object()) != content_digest(Exception())
    assert isinstance(content_digest(np.array([object()])), int)


def test_a_tensor_of_any_layout_is_digested():
    for tensor in (torch.eye(3).to_sparse(), torch.eye(3).to_sparse_csr(), torch.eye(3).to("meta")):
        assert content_digest(tensor) == content_digest(tensor.clone())
    number = torch.tensor([1 + 2j])
    assert content_digest(number.conj()) == content_digest(torch.tensor([1 - 2j]))


@pytest.mark.workers
def test_a_digest_is_the_same_in_every_process():
    item = {"id": "x", "ids": [1, 2]}
    code = f"from odb_nodes._core.content import content_digest; print(content_digest({item}))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert int(run.stdout) == content_digest(item)
