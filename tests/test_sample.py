"""A sample's source travels beside its fields."""

import copy
import pickle
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from odb_nodes import LengthObserver, Sample, SampleError, SourceCount, SourceItem, StepInfo
from odb_nodes.nodes.payload import decode_sample, encode_sample
from odb_nodes.processing.observation import observe_sample
from odb_nodes.processing.transport import pack, unpack
from odb_nodes.sample import ItemKey
from odb_nodes.sources import IterableSource
from odb_nodes.step_info import count_sources

PLAIN = Sample({"input_ids": [1, 2, 3]}, 3, 2, 1)
NAMED = PLAIN.of_source("ocr")


def through_transport(sample):
    (again,) = unpack([bytearray(part) for part in pack([sample])])
    return again


COPIES = {
    "pickle": lambda sample: pickle.loads(pickle.dumps(sample)),
    "pickle of old": lambda sample: pickle.loads(pickle.dumps(sample, protocol=2)),
    "copy": copy.copy,
    "deepcopy": copy.deepcopy,
    "payload": lambda sample: decode_sample(encode_sample(sample)),
    "transport": through_transport,
    "replace": lambda sample: sample._replace(data=dict(sample.data)),
}


def test_its_payload_is_the_same_whether_a_worker_has_made_it():
    """Its key comes from the trainer then, with an equal name of the source."""
    key = ItemKey("ocr", 4, 1)
    here = NAMED._replace(source=key.source, item=key)
    (there,) = unpack([bytearray(part) for part in pack([here], [key])], [key])
    assert there.source is not there.item.source
    assert encode_sample(there) == encode_sample(here)


def test_its_source_is_a_field_of_it():
    costs = ("data", "tokens", "targets", "patches")
    assert Sample._fields == (*costs, "source", "counted", "key", "item", "digest", "task")
    assert tuple(NAMED) == (*PLAIN[:4], "ocr", "", None, None, None, "")
    assert NAMED != PLAIN


def test_it_has_no_source_unless_one_is_named():
    assert PLAIN.source == ""
    assert NAMED.source == "ocr"
    assert NAMED.of_source("web").source == "web/ocr"


@pytest.mark.parametrize("how", COPIES)
@pytest.mark.parametrize("sample", [PLAIN, NAMED], ids=["plain", "named"])
def test_a_copy_keeps_it(sample, how):
    again = COPIES[how](sample)
    assert again == sample
    assert type(again) is type(sample)
    assert again.source == sample.source


SAMPLES = st.builds(
    lambda length, source: (
        Sample({"input_ids": np.arange(length)}, length, 0).of_source(source)
        if source
        else Sample({"input_ids": np.arange(length)}, length, 0)
    ),
    st.integers(1, 9),
    st.sampled_from(["", "a", "b"]),
)


@given(st.lists(SAMPLES, max_size=6), st.booleans())
def test_a_chunk_keeps_sources_on_its_way_between_processes(samples, as_items):
    items = [SourceItem(one.source, one.data) for one in samples] if as_items else samples
    again = unpack([bytearray(part) for part in pack(items)])
    assert [type(one) for one in again] == [type(one) for one in items]
    assert [one.source for one in again] == [one.source for one in items]
    data = [one.item if as_items else one.data for one in again]
    assert [one["input_ids"].tolist() for one in data] == [
        one.data["input_ids"].tolist() for one in samples
    ]


@given(st.lists(SAMPLES, max_size=20))
def test_counts_by_source_add_up(samples):
    counts = count_sources(samples)
    if not any(one.source for one in samples):
        assert counts == {}
        return
    assert sum(count.samples for count in counts.values()) == len(samples)
    assert sum(count.tokens for count in counts.values()) == sum(one.tokens for one in samples)


def test_an_observer_keeps_the_source_of_an_item():
    items = [SourceItem("a", {"input_ids": [1]}), SourceItem("b", SourceItem("c", [1, 2])), [3]]
    node = LengthObserver(IterableSource(items, 0, 1), observe=len)
    node.reset(None)
    assert [next(node).source for _ in items] == ["a", "b/c", ""]


def test_an_item_without_a_length_is_named_by_its_source():
    with pytest.raises(SampleError, match="of source 'a': a sample has no length"):
        observe_sample(SourceItem("a", 3))


def test_step_info_stays_plain():
    info = StepInfo.of_one_rank([NAMED, NAMED, PLAIN.of_source("web")], 0)
    assert info.local_sources == {"ocr": SourceCount(2, 6), "web": SourceCount(1, 3)}
    assert pickle.loads(pickle.dumps(info)) == info
    assert hash(info) == hash(StepInfo.of_one_rank([NAMED, NAMED, PLAIN.of_source("web")], 0))
    assert asdict(info)["local_sources"]["web"] == (1, 3)
    assert info != StepInfo.of_one_rank([PLAIN] * 3, 0)
    assert StepInfo.of_one_rank([PLAIN], 0).local_sources == {}


def test_samples_and_tokens_are_counted_by_task_whatever_the_source():
    other = PLAIN.of_source("web")._replace(task="ocr")
    info = StepInfo.of_one_rank([NAMED, PLAIN.of_source("web"), other], 0)
    assert info.local_tasks == {"ocr": SourceCount(2, 6), "web": SourceCount(1, 3)}
    assert StepInfo.of_one_rank([NAMED], 0).local_tasks == {"ocr": SourceCount(1, 3)}
    assert StepInfo.of_one_rank([PLAIN], 0).local_tasks == {}


def test_tensors_of_a_named_sample_travel_as_buffers():
    samples = [Sample({"x": torch.arange(n)}, n, 0).of_source("a") for n in (3, 5)]
    parts = pack(samples)
    assert len(parts) > 1
