"""Samples that processing skips: left out in order, counted by reason, exact after a resume."""

import pytest
from torchdata.nodes import IterableWrapper, Mapper
from worker_functions import SkipSome

from odb_nodes import (
    IterableSource,
    LengthObserver,
    Loader,
    ODBDataLoader,
    ParallelProcessor,
    RankAligner,
    Sample,
    ShardedSampler,
    Skipped,
    SourceItem,
    StateError,
    WindowBucketer,
)

SIZE = 90
skip_some = SkipSome()
COUNTS = {"corrupt": 12, "missing": 18}

pytestmark = pytest.mark.filterwarnings("ignore:.* (is|were) skipped")


def make(**options):
    given = {"token_budget": 64, "window": 12, "process_fn": skip_some, **options}
    return ODBDataLoader(range(SIZE), **given)


def ids(loader):
    return [batch["id"].tolist() for batch in loader]


def flat(epoch):
    return sorted(index for batch in epoch for index in batch)


def test_the_first_of_each_reason_is_shown():
    with pytest.warns(UserWarning) as caught:
        ids(make(shuffle=False))
    shown = [str(one.message) for one in caught if "is skipped" in str(one.message)]
    assert [text.partition(". Further")[0] for text in shown] == [
        "sample 0 of the epoch (key 0) is skipped (missing): no file for 0",
        "sample 3 of the epoch (key 3) is skipped (corrupt): cannot read 3",
    ]


def test_data_that_was_mended_or_lost_between_save_and_resume():
    loader = make(shuffle=False)
    next(iter(loader))
    lost = make(process_fn=SkipSome(also=range(SIZE)), shuffle=False)
    lost.load_state_dict(loader.state_dict())
    with pytest.raises(StateError, match="is skipped now .lost.: gone"):
        next(iter(lost))
    mended = make(process_fn=SkipSome(never=True), shuffle=False)
    mended.load_state_dict(loader.state_dict())
    rest = flat(ids(mended))
    # What was skipped stays so, what comes later is good: nothing twice.
    assert len(rest) == len(set(rest))
    assert sum(mended.skipped_samples.values()) < sum(COUNTS.values())


@pytest.mark.parametrize("strict", [True, False])
@pytest.mark.parametrize("make_source", [ShardedSampler, IterableSource, IterableWrapper])
def test_a_planned_sample_that_is_skipped_now_is_an_error_that_names_it(make_source, strict):
    """Steps count it, so that also `strict=False` cannot do without it."""

    def loader_of(process_fn):
        items = SIZE if make_source is ShardedSampler else range(SIZE)
        source = make_source(items)
        if make_source is IterableWrapper:  # a node that knows nothing of keys
            node = Mapper(source, process_fn)
        else:
            node = ParallelProcessor(source, process_fn)
        return Loader(RankAligner(WindowBucketer(LengthObserver(node), 64, 8), round_size=8))

    it = iter(loader := loader_of(skip_some))
    for _ in range(15):  # to within the third round
        next(it)
    state = loader.state_dict()
    key = next(it).samples[0].data["id"]
    resumed = loader_of(SkipSome(also=[key]))
    resumed.load_state_dict(state, strict=strict)
    message = rf"RankAligner cannot.* {key}\b.* was good .*skipped now .lost.: gone"
    with pytest.raises(StateError, match=message):
        iter(resumed)


def test_nodes_pass_a_skipped_sample_on():
    items = [Skipped("a"), SourceItem("x", Skipped("b")), SourceItem("x", {"input_ids": [1]})]
    observed = list(Loader(LengthObserver(IterableWrapper(items))))
    skipped = Skipped("b", source="x")
    assert observed == [Skipped("a"), skipped, Sample({"input_ids": [1]}, 1, 0, 0, "x", "tokens")]
