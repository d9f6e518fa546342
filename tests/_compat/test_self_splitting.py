"""Iterables that split themselves: classes and functions named as those of the real packages."""

from functools import partial

import pytest
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset

from odb_nodes._compat.self_splitting import split_by_itself


class Items(IterableDataset):
    """Has what it is given, and yields nothing."""

    def __init__(self, **attributes):
        vars(self).update(attributes)

    def __iter__(self):
        return iter(())


def named(module, name, base=Items):
    return type(name, (base,), {"__module__": module})


def split_by_node(src, group=None):
    return src


split_by_node.__module__ = "webdataset.shardlists"
WebDataset = named("webdataset.compat", "WebDataset")
LitData = named("litdata.streaming.dataset", "StreamingDataset")
Mosaic = named("streaming.base.dataset", "StreamingDataset")
WEB = WebDataset(pipeline=[Items(), split_by_node, sorted])
NODE, LIT, MDS = "`split_by_node`", "`StreamingDataset` of litdata", "of streaming"
ITSELF = Items()
ITSELF.again = [ITSELF]


@pytest.mark.parametrize(
    ("iterable", "name"),
    [
        (WEB, NODE),
        (WebDataset(pipeline=[partial(split_by_node, group=None)]), NODE),
        (named("webdataset.mix", "RandomMix")(datasets=[Items(), WEB]), NODE),
        (named("webdataset.compat", "WebLoader")(pipeline=[DataLoader(WEB)]), NODE),
        (LitData(), LIT),
        (named("litdata.streaming.combined", "CombinedStreamingDataset")(), "of litdata"),
        (named("litdata.streaming.parallel", "ParallelStreamingDataset")(), "of litdata"),
        (named("own", "Own", LitData)(), LIT),
        (Items(names=["x"] * 1000, rows=[[n] for n in range(1000)], inner={"a": [LitData()]}), LIT),
        (named("streaming.vision.cifar10", "StreamingCIFAR10", Mosaic)(), MDS),
        (DistributedSampler(range(9), 2, 0), "`DistributedSampler`"),
        (DistributedSampler(range(9), 1, 0), None),
        (WebDataset(pipeline=[Items(), sorted]), None),
        (named("streaming", "StreamingDataset")(), None),  # a file of the user's
        (named("litdata.raw.dataset", "StreamingRawDataset")(), None),  # map-style
        ({"a": range(3)}.values(), None),
        (ITSELF, None),
    ],
)
def test_what_splits_itself_is_found(iterable, name):
    by = split_by_itself(iterable)
    assert by is None if name is None else name in by
