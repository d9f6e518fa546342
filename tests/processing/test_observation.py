"""What a sample costs and its digest: of the usual samples as of all others."""

from collections import UserDict

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import SampleError
from odb_nodes.processing.observation import digest_of, made_of, observe_sample
from odb_nodes.sample import ItemKey, Sample

LABELS = st.lists(st.sampled_from([-100, 0, 7, 2**31, -(2**63)]), max_size=12)
KINDS = {
    "array": np.array,
    "int32": lambda row: np.array(row).clip(-(2**31), 2**31 - 1).astype(np.int32),
    "float": lambda row: np.array(row, np.float32),
    "(1, L)": lambda row: np.array([row], np.int64),
    "strided": lambda row: np.repeat(np.array(row, np.int64), 2)[::2],
    "big-endian": lambda row: np.array(row, ">i8"),
    "tensor": lambda row: torch.tensor(row, dtype=torch.int64),
    "with a gradient": lambda row: torch.tensor(row, dtype=torch.float32, requires_grad=True),
    "without a dtype of numpy": lambda row: torch.tensor(row, dtype=torch.bfloat16),
    "list": list,
    "nested list": lambda row: [row],
    "list of numpy's ints": lambda row: [*map(np.int64, row)],
    "tuple": tuple,
}
NOT_INTEGERS = {"float", "with a gradient", "without a dtype of numpy"}
MORE = st.sampled_from(
    [
        {},
        {"label": 1},
        {"label_ids": [1, 2]},
        {"start_positions": 3},
        {"pixel_values": np.zeros((4, 2))},
        {"image_grid_thw": [[1, 2, 3]]},
        {"text": "a"},
    ]
)


def outcome(data):
    """Return what a sample costs, and the types of that; or its error."""
    try:
        facts = observe_sample(data)[1:]
    except SampleError as error:
        return str(error).replace("UserDict", "dict")
    return facts, [*map(type, facts)]


@given(st.sampled_from(sorted(KINDS)), LABELS, LABELS, MORE)
def test_a_dict_costs_what_any_other_mapping_does(kind, ids, labels, more):
    data = {"input_ids": KINDS[kind](ids), **more}
    of_all = [data, *({**data, "labels": make(labels)} for make in KINDS.values())]
    for one in of_all:
        assert outcome(one) == outcome(UserDict(one))


@given(LABELS.filter(len), st.sampled_from(sorted({*KINDS} - NOT_INTEGERS)))
def test_targets_are_the_labels_after_the_first_that_count(labels, kind):
    if kind == "int32":
        labels = [label for label in labels if abs(label) < 2**31] or [1]
    sample = observe_sample({"input_ids": KINDS[kind](labels), "labels": KINDS[kind](labels)})
    assert sample.tokens == len(labels)
    assert sample.targets == sum(label != -100 for label in labels[1:])
    assert sample.counted == "labels"
    assert {type(cost) for cost in sample[1:4]} == {int}  # which a checkpoint can hold


def test_a_result_keeps_its_own_key_and_digest_and_learns_its_item():
    item = ItemKey("a", 2**63 - 1, 2, 3)
    data = {"input_ids": np.arange(3)}
    of_item = made_of(Sample(data, 3, 2, 1, "s", "labels", task="t"), item)
    assert of_item == (data, 3, 2, 1, "s", "labels", item.key, item, of_item.digest, "t", None)
    assert of_item.digest == digest_of(Sample(data, 3, 2, 1, task="t"))
    own = made_of(Sample(data, 3, 2, key=0, digest=0), item)
    assert (own.key, own.digest, own.item) == (0, 0, item)
