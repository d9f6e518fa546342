"""A sample's source travels beside its fields."""

import copy
import pickle
from dataclasses import asdict
from itertools import chain

import pytest

from odb_nodes import (
    LengthObserver,
    Sample,
    SampleError,
    Skipped,
    SourceCount,
    SourceItem,
    StepInfo,
)
from odb_nodes.core.nodes.sample_records import encode_sample
from odb_nodes.core.processing.chunk import runs_of
from odb_nodes.core.processing.observation import observe_sample
from odb_nodes.core.processing.transport import pack, unpack
from odb_nodes.core.sample import ItemKey
from odb_nodes.core.sources import IterableSource

PLAIN = Sample({"input_ids": [1, 2, 3]}, 3, 2, 1)
NAMED = PLAIN.of_source("ocr")


def through_transport(items):
    """What arrives of the results of a chunk that a worker has made."""
    packed = pack(runs_of(items, joined=True))
    return [*chain(*unpack([bytearray(part) for part in packed]))]


def test_its_payload_is_the_same_whether_a_worker_has_made_it():
    """There, and in a block, the names of its source and of that of its item may be two objects."""
    names = ["".join(("o", "cr", end)) for end in ("", "", "x", "x")]
    assert names[0] is not names[1]
    for first, second in (names[:2], names[2:]):
        for source, of_item in ((first, first), (first, second), (second, first)):
            here = NAMED._replace(source=source, item=ItemKey(of_item, 4, 1))
            (there,) = through_transport([here])
            assert there == here
            assert encode_sample(there) == encode_sample(here) == encode_sample(again(here))


def again(sample):
    """The sample, with one object for both names."""
    return sample._replace(source=sample.item.source)


def test_an_observer_keeps_the_source_of_an_item():
    items = [SourceItem("a", {"input_ids": [1]}), SourceItem("b", SourceItem("c", [1, 2])), [3]]
    node = LengthObserver(IterableSource(items, 0, 1), observe=len)
    node.reset(None)
    assert [next(node).source for _ in items] == ["a", "b/c", ""]
    with pytest.raises(SampleError, match="of source 'a': a sample has no length"):
        observe_sample(SourceItem("a", 3))


def test_samples_and_tokens_are_counted_by_source_and_by_task():
    other = PLAIN.of_source("web")._replace(task="ocr")
    info = StepInfo.of_one_rank([NAMED, PLAIN.of_source("web"), other], 0)
    assert info.local_sources == {"ocr": SourceCount(1, 3), "web": SourceCount(2, 6)}
    assert info.local_tasks == {"ocr": SourceCount(2, 6), "web": SourceCount(1, 3)}
    assert StepInfo.of_one_rank([NAMED], 0).local_tasks == {"ocr": SourceCount(1, 3)}
    plain = StepInfo.of_one_rank([PLAIN], 0)
    assert plain.local_sources == plain.local_tasks == {}
    assert pickle.loads(pickle.dumps(info)) == info != plain
    assert hash(info) == hash(copy.deepcopy(info))
    assert asdict(info)["local_sources"]["web"] == (2, 6)


@pytest.mark.parametrize(("arguments", "named"), [((3, "x"), "reason"), (("a", 4), "message")])
def test_why_a_sample_is_skipped_must_be_strings(arguments, named):
    with pytest.raises(TypeError, match=f"`{named}` of `Skipped` must be a string, but is . inst"):
        Skipped(*arguments)
